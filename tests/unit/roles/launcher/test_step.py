from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.launch import LAUNCH_ENV, ExitReason, ExitRecord, Launch, exit_text
from rrl.core.processes import STEP_ENV, Process, descendants, read_process
from rrl.core.run_dir import write_atomically
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab, eventually, lab
from rrl.transport.messages import AdmissionRequest, Fenced, Stop

JOB = {"run": {"name": "x", "steps": 1}, "task": {"function": "task:make"}, "model": {"tokenizer": {"pieces": "01"}}}
SLEEP = ("sleep", "1000")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)",
)
DAEMON = "(setsid sleep 1001 &) ; (env -i setsid sleep 1002 &) ; sleep 1000"


async def command(at: Lab, launch: Launch, argument: str = "1000") -> Process:
    """Return the running process of the step whose last command-line argument is ``argument``."""

    def find() -> Process | None:
        ours = [process for process in at.processes(launch) if process.step]
        return next((process for process in ours if arguments(process)[-1] == argument), None)

    return await eventually(find, f"a command with {argument}")


def arguments(process: Process) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text().removesuffix("\0").split("\0")
    except OSError:
        return [""]


def text_of(end: ExitRecord) -> str:
    return exit_text(end.reason, end.detail)


def gone(process: Process) -> bool:
    now = read_process(process.pid)
    return now is None or now.started != process.started


def test_killed_role_leaves_a_record_and_is_reported(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*SLEEP)
            step = at.start(launch)
            os.killpg((await command(at, launch)).pid, signal.SIGKILL)
            report = await manager.wait_for(ExitRecord)
            record = at.record(launch)
            assert report == record
            assert (record.code, record.signal, record.reason) == (None, signal.SIGKILL, ExitReason.SIGNALED)
            assert await at.end_of(step) == 128 + signal.SIGKILL

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_exit_code_is_recorded_with_the_last_line(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch("sh", "-c", "echo to the log; echo and this >&2; exit 7")
            assert await at.end_of(at.start(launch)) == 7
            when = getattr(at.record(launch), "at", 0.0)
            record = ExitRecord(
                launch.tag, launch.incarnation, launch.node, 7, None, ExitReason.EXITED, when, "and this"
            )
            assert at.record(launch) == record
            assert at.log(launch) == "to the log\nand this\n"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_exit_record_that_cannot_be_written_is_named_beside_the_last_line(tmp_path: Path) -> None:
    """A program whose checkpoint does not fit on the disk may end with a text that does not say so."""

    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch("sh", "-c", "echo unexpected pos 704; exit 1")
            at.run.exit_file(launch.tag).mkdir()
            assert await at.end_of(at.start(launch)) == 1
            report = await manager.wait_for(ExitRecord)
            assert report.last_line == "unexpected pos 704 (its exit record cannot be written: Is a directory)"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def python_role(at: Lab, folder: Path, *lines: str) -> Launch:
    """Write a program of these lines, and a launch file that starts it as a role which may join the run."""
    job = resolve(Job.model_validate(JOB), "python")
    write_atomically(at.run.run_spec, msgspec.json.encode(job))
    program = folder / "role.py"
    program.write_text("\n".join(lines))
    return at.launch(sys.executable, "-P", str(program), env={"PYTHONWARNINGS": "default::ResourceWarning"})


def test_uncaught_exception_of_a_role_is_recorded_with_the_users_line(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = python_role(
                at,
                tmp_path,
                "import json, rrl",
                "rrl.join()",
                "def load(state):",
                "    return json.loads(state)",
                "load({})",
            )
            assert await at.end_of(at.start(launch)) == 1
            report = await manager.wait_for(ExitRecord)
            record = at.record(launch)
            assert record is not None
            assert report.exception == record.exception
            assert record.exception is not None
            assert (record.code, record.reason) == (1, ExitReason.EXITED)
            message = "the JSON object must be str, bytes or bytearray, not dict"
            assert str(record.exception) == f"TypeError: {message} ({tmp_path}/role.py:4)"
            assert record.last_line == f"TypeError: {message}"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize(
    ("lines", "last_line", "place"),
    [
        (
            ("import rrl", "import json", "json.loads('nothing')", "rrl.join()"),
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            3,
        ),
        (("import rrl", "with rrl.join() as me", "    pass"), "SyntaxError: expected ':'", 2),
    ],
    ids=["import", "syntax"],
)
def test_exception_before_the_role_joins_is_recorded_with_the_users_line(
    tmp_path: Path, lines: tuple[str, ...], last_line: str, place: int
) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            assert await at.end_of(at.start(python_role(at, tmp_path, *lines))) == 1
            report = await manager.wait_for(ExitRecord)
            assert report.exception is None
            assert report.last_line == f"{last_line} ({tmp_path}/role.py:{place})"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_exit_of_a_role_for_a_changed_input_is_a_reason_of_its_own(tmp_path: Path) -> None:
    """The file changes while the role has it open; the user's code would take an exception for its own."""

    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            prompts = tmp_path / "prompts.jsonl"
            prompts.write_text('{"question": "1"}\n')
            launch = python_role(
                at,
                tmp_path,
                "from pathlib import Path",
                "from rrl.config.prompt_file import open_rows",
                f"path = Path({str(prompts)!r})",
                "rows = open_rows(path, '{question}')",
                'path.write_text(\'{"question": "2"}\\n\')',
                "try: rows.row(0)",
                "except BaseException: pass",
            )
            assert await at.end_of(at.start(launch)) == 2
            report = await manager.wait_for(ExitRecord)
            assert (report.code, report.reason) == (2, ExitReason.INPUT_CHANGED)
            assert report.detail.startswith(f"{prompts} has changed since the run first read it (18 bytes then, 18 oth")
            assert at.log(launch) == f"rrl: {report.detail}\n"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_exit_of_a_role_for_invalid_configuration_is_a_reason_of_its_own(tmp_path: Path) -> None:
    """The log has only one line: an event loop that is still open at the exit would add a warning or a traceback."""

    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = python_role(
                at,
                tmp_path,
                "import rrl",
                "from rrl.roles.launcher.end_report import exits_on_invalid_config",
                "me = rrl.join()",
                "with exits_on_invalid_config():",
                "    raise ValueError('[task] has no such dataset')",
            )
            assert await at.end_of(at.start(launch)) == 2
            report = await manager.wait_for(ExitRecord)
            assert (report.code, report.reason) == (2, ExitReason.INVALID_CONFIG)
            assert (report.detail, report.last_line) == ("[task] has no such dataset", "")
            assert at.log(launch) == "rrl: [task] has no such dataset\n"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize(
    "lines",
    [
        ("import sys, rrl", "rrl.join()", "sys.stderr.write('rrl: bad\\n')", "sys.exit(2)"),
        (
            "import sys, rrl",
            "from rrl.roles.launcher.end_report import exits_on_invalid_config",
            "rrl.join()",
            "try:",
            "    with exits_on_invalid_config(): raise ValueError('bad')",
            "except SystemExit: pass",
            "sys.exit(3)",
        ),
    ],
    ids=["its own exit code 2", "another exit code"],
)
def test_command_that_exits_on_its_own_is_not_taken_for_invalid_configuration(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            await at.end_of(at.start(python_role(at, tmp_path, *lines)))
            report = await manager.wait_for(ExitRecord)
            assert (report.reason, report.exception) == (ExitReason.EXITED, None)
            assert report.last_line == "rrl: bad"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_damaged_end_report_counts_as_missing(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch("sh", "-c", "echo last words; exit 2")
            at.run.end_report_file(launch.tag).write_bytes(b'{"type": "InvalidConf')
            await at.end_of(at.start(launch))
            report = await manager.wait_for(ExitRecord)
            assert (report.reason, report.last_line) == (ExitReason.EXITED, "last words")

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_daemons_of_a_role_end_with_it_even_without_their_environment(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch("sh", "-c", DAEMON)
            step = at.start(launch)
            marked = await command(at, launch, "1001")

            def wiped() -> Process | None:
                bare = [process for process in descendants(step.pid) if not process.launch]
                return next((process for process in bare if arguments(process)[-1] == "1002"), None)

            bare = await eventually(wiped, "the daemon without an environment")
            os.killpg((await command(at, launch)).group, signal.SIGKILL)
            await at.end_of(step)
            assert gone(marked)
            assert gone(bare)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_marked_process_ends_with_its_step_whatever_its_parent(tmp_path: Path) -> None:
    """The process is not a descendant of the role: another process started it with the role's environment."""

    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch(*SLEEP)
            step = at.start(launch)
            role = await command(at, launch)
            marks = {"PATH": "/usr/bin:/bin", LAUNCH_ENV: role.launch, STEP_ENV: role.step}
            helper = await asyncio.create_subprocess_exec("sleep", "1001", env=marks)
            os.killpg(role.group, signal.SIGKILL)
            await at.end_of(step)
            assert await asyncio.wait_for(helper.wait(), TIMEOUT_S) == -signal.SIGKILL

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_command_ends_with_a_step_killed_by_sigkill(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch(*SLEEP)
            step = at.start(launch)
            role = await command(at, launch)
            step.kill()
            await eventually(lambda: gone(role))
            assert at.record(launch) is None

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_refused_step_exits_without_starting_its_command(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager(refuse="an older incarnation") as manager:
            launch = at.launch("touch", str(tmp_path / "started"))
            await at.end_of(at.start(launch))
            assert not (tmp_path / "started").exists()
            assert text_of(await manager.wait_for(ExitRecord)) == "not admitted: an older incarnation"
            record = at.record(launch)
            assert record is not None
            assert text_of(record) == "not admitted: an older incarnation"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_without_an_admission_answer_exits(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        launch = at.launch("touch", str(tmp_path / "started"))
        await at.end_of(
            at.start(
                launch,
                patch="from rrl.roles.launcher import first_process as f;"
                " f.ADMISSION_TIMEOUT_S = 0.2; f.EXIT_REPORT_TIMEOUT_S = 0.1",
            )
        )
        record = at.record(launch)
        assert record is not None
        assert text_of(record) == "not admitted: no manager answered"
        assert not (tmp_path / "started").exists()

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_outlives_the_manager_and_reports_to_the_next(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        launch = at.launch(*SLEEP)
        async with at.manager(epoch=1):
            at.start(launch)
            role = await command(at, launch)
        async with at.manager(epoch=2) as second:
            wanted = await second.wait_for(AdmissionRequest)
            assert (wanted.incarnation, wanted.tag) == (launch.incarnation, launch.tag)
            assert not gone(role)
            os.killpg(role.pid, signal.SIGKILL)
            assert (await second.wait_for(ExitRecord)).signal == signal.SIGKILL

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_refused_by_the_next_manager_ends_its_role(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        launch = at.launch(*STUBBORN)
        async with at.manager(epoch=1):
            step = at.start(launch)
            await eventually(lambda: "up" in at.log(launch))
        async with at.manager(epoch=2, refuse="replaced"):
            await at.end_of(step)
            record = at.record(launch)
            assert record is not None
            assert (record.signal, text_of(record)) == (signal.SIGKILL, "not admitted: replaced")

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_exit_without_a_manager_is_reported_to_one_that_starts_in_time(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        launch = at.launch(*SLEEP)
        at.start(
            launch,
            patch="from rrl.roles.launcher import first_process as f;"
            " f.ADMISSION_TIMEOUT_S = 0.1; f.EXIT_REPORT_TIMEOUT_S = 20.0",
        )
        await eventually(lambda: at.record(launch))
        async with at.manager() as late:
            assert text_of(await late.wait_for(ExitRecord)) == "not admitted: no manager answered"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("how", ["signal", "message"])
def test_role_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path, how: str) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*STUBBORN, grace=0.3)
            step = at.start(launch)
            await eventually(lambda: "up" in at.log(launch))
            if how == "signal":
                step.terminate()
            else:
                await manager.send(launch.incarnation, Stop(launch.incarnation, 0.3, "done"))
            report = await manager.wait_for(ExitRecord)
            assert (report.signal, report.reason) == (signal.SIGKILL, ExitReason.STOPPED)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_role_may_finish_after_a_stop_request(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch("sh", "-c", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
            step = at.start(launch)
            await eventually(lambda: "up" in at.log(launch))
            step.terminate()
            report = await manager.wait_for(ExitRecord)
            assert (report.code, report.reason) == (0, ExitReason.STOPPED)
            await at.end_of(step)
            assert "saved" in at.log(launch)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_frozen_role_is_killed_after_a_stop_request(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*SLEEP, grace=0.3)
            step = at.start(launch)
            role = await command(at, launch)
            os.killpg(role.pid, signal.SIGSTOP)
            await eventually(lambda: ") T " in Path(f"/proc/{role.pid}/stat").read_text())
            step.terminate()
            assert (await manager.wait_for(ExitRecord)).signal == signal.SIGKILL

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_fenced_role_gets_no_grace(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*STUBBORN, grace=1000.0)
            at.start(launch)
            await eventually(lambda: "up" in at.log(launch))
            await manager.send(launch.incarnation, Stop(launch.incarnation, 1000.0, "finish"))
            await manager.send(launch.incarnation, Fenced(launch.incarnation, "superseded"))
            assert (await manager.wait_for(ExitRecord)).signal == signal.SIGKILL

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_fenced_step_records_the_reason(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*SLEEP)
            at.start(launch)
            await command(at, launch)
            await manager.send(launch.incarnation, Fenced(launch.incarnation, "superseded"))
            end = await manager.wait_for(ExitRecord)
            assert (end.reason, end.detail) == (ExitReason.FENCED, "superseded")

    with lab(tmp_path) as at:
        asyncio.run(story(at))


@pytest.mark.parametrize("virtual", [False, True])
def test_death_of_the_parent_ends_the_step_but_on_a_virtual_node(tmp_path: Path, virtual: bool) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*SLEEP, virtual_node=virtual)
            file = str(at.run.launch_file(launch.tag))
            start = f"{sys.executable} -P -m rrl.roles.launcher.step {file} & wait"
            launcher = await asyncio.create_subprocess_exec("sh", "-c", start, start_new_session=True)
            role = await command(at, launch)
            launcher.kill()
            await launcher.wait()
            if not virtual:
                assert (await manager.wait_for(ExitRecord)).reason == ExitReason.LAUNCHER_DIED
            else:
                os.killpg(role.pid, signal.SIGTERM)
                assert (await manager.wait_for(ExitRecord)).reason == ExitReason.SIGNALED

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_role_gets_only_the_environment_of_its_launch_file(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch("env", env={"GIVEN": "1"})
            await at.end_of(at.start(launch))
            environment = dict(line.split("=", 1) for line in at.log(launch).splitlines())
            assert environment.keys() == {"RRL_LAUNCH", "RRL_STEP", "SPT_NOENV", "RRL_ADDRESS", "PATH", "GIVEN"}
            assert environment["RRL_LAUNCH"] == str(at.run.launch_file(launch.tag))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_command_that_cannot_be_started_is_recorded_with_the_reason(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            at.start(at.launch("no-such-command"))
            assert (await manager.wait_for(ExitRecord)).reason is ExitReason.NOT_STARTED

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_stop_of_another_incarnation_is_ignored(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager() as manager:
            launch = at.launch(*SLEEP)
            at.start(launch)
            role = await command(at, launch)
            older = at.launch(*SLEEP, number=0).incarnation
            await manager.send(launch.incarnation, Fenced(older, "superseded"))
            await manager.send(launch.incarnation, Stop(launch.incarnation, 5.0, "done"))
            report = await manager.wait_for(ExitRecord)
            assert (report.signal, report.reason) == (signal.SIGTERM, ExitReason.STOPPED)
            assert gone(role)

    with lab(tmp_path) as at:
        asyncio.run(story(at))
