"""The Python API on run directories without processes.

tests/integration/local/test_python_api.py uses real runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rrl
from rrl.cli import main
from rrl.cli.common.output import JSON_SCHEMA
from rrl.config.job.load import load_job, resolved
from rrl.core.log_lines import stamp
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import Outcome
from rrl.manager.bootstrap import start as starting
from rrl.manager.reporting.summary import write_summary
from rrl.manager.storage.journal import Journal
from rrl.manager.storage.resume_request import read_pending
from rrl.tests.support.cli.story import Story, completed, job_view
from rrl.tests.support.cli.waiting import eventually
from rrl.tests.support.job_toml import JOB

RUN = "small-7"
PAGE = Path(__file__).parents[3] / "docs" / "python.md"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def started(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    """Replace the start of a manager, and return the list of the runs whose start was requested."""
    runs: list[RunDir] = []

    def start_manager(run: RunDir, spec: RunSpec) -> str:
        runs.append(run)
        return "no successor is queued"

    monkeypatch.setattr(starting, "start_manager", start_manager)
    return runs


def job_of(run: rrl.Run) -> Any:
    return load_job(RunDir(run.path).job_toml)


# ── submit ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_path_a_text_and_a_dict_give_the_same_job(started: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    table = {
        "run": {"name": "small", "steps": 10},
        "cluster": {"kind": "local", "node": {"cpus": 4, "mem": "4GiB"}},
        "model": {"tokenizer": {"pieces": "0123456789+= "}},
        "task": {"dataset": "chain_sum", "args": {"min_terms": 2, "seeds": (1, 2)}},
        "roles": {"rollout": {"replicas": 2, "env": {"FOO": "bar"}}},
        "faults": {"planned": [{"kind": "kill", "target": "rollout/0", "at": "step=5"}]},
    }
    runs = [rrl.submit(job) for job in ("job.toml", tmp_path / "job.toml", JOB, table)]
    assert [run.path for run in runs] == [run.path for run in started]
    assert len({run.id for run in runs}) == 4
    jobs = [resolved(job_of(run)) for run in runs]
    assert jobs[1:] == [jobs[0]] * 3
    sources = [json.loads(run.resolved.read_bytes())["source"] for run in started]
    assert sources == [str(tmp_path / "job.toml")] * 4, (
        "the source is not the job file, or job.toml in the current folder"
    )
    assert runs[0].warnings[-1] == "no successor is queued"


def test_last_of_several_parts_and_settings_counts(started: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.toml").write_text("[run]\nsteps = 20\n[roles.rollout]\nreplicas = 3\n")
    run = rrl.submit(
        [JOB, Path("folder/more.toml"), {"roles": {"rollout": {"replicas": 4}}}],
        set={"roles.trainer.learning_rate": 1e-6, "cluster.walltime": "8h", "faults.planned": [], "run.name": "x5"},
    )
    job = job_of(run)
    assert (job.run.steps, job.roles.rollout.replicas, job.roles.trainer.learning_rate) == (20, 4, 1e-6)
    assert (job.cluster.walltime, job.faults.planned, job.run.name) == (28800.0, (), "x5")
    assert json.loads(started[0].resolved.read_bytes())["source"] == str(tmp_path / "folder" / "more.toml")


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (f"{JOB}\n[roles.trainer]\nranx = 2", {}, r'job:26: roles.trainer.ranx: unknown key; did you mean "ranks"\?'),
        (["[run]\nname = 'x'\nsteps = 0.5\n", {}], {}, r"job\[0\]:3: run.steps: must be a whole number.*, not 0.5"),
        ([JOB, {"roles": {"rollout": {"replica": 2}}}], {}, r"job\[1\]: roles.rollout.replica: unknown key"),
        (JOB, {"roles.rollout.replicas": "two"}, r'set\["roles.rollout.replicas"\]: must be .*, not "two"$'),
        (JOB, {"run.name": 5}, r'set\["run.name"\]: must be text in quotes, not 5$'),
        (JOB, {"run steps": 5}, r'set\["run steps"\]: is not a key of job.toml; write for example set='),
        (JOB, {"run.steps": None}, r'set\["run.steps"\]: must be text, a number, .*, not None: leave the key out'),
        ({"run": {"steps": {1, 2}}}, {}, "job: run.steps: must be text, a number, .*, not of type set"),
        ({"run": {3: 4}}, {}, "job: run: the key 3 is not text; write it in quotes"),
        ("run = [\n", {}, r"job:2: not valid TOML: "),
        ("no.toml", {}, "no.toml: no such file"),
        ([], {}, "job is an empty list; name a job.toml"),
        (7, {}, "job must be a path, TOML text, a dict or a list of these, not of type int"),
    ],
)
def test_a_wrong_job_is_refused_with_its_place(
    started: list[RunDir], root: Path, job: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(rrl.UsageError, match=f"^{message}"):
        rrl.submit(job, set=settings)
    assert not list(root.iterdir())


def test_a_table_that_contains_itself_is_refused(started: list[RunDir]) -> None:
    table: dict[str, Any] = {}
    table["run"] = table
    with pytest.raises(rrl.UsageError, match=r"^job: tables or arrays are nested too deeply; use fewer levels$"):
        rrl.submit(table)


def test_failed_start_of_a_manager_leaves_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_manager(run: RunDir, spec: RunSpec) -> str:
        raise RuntimeError("sbatch: error: Invalid account")

    monkeypatch.setattr(starting, "start_manager", start_manager)
    with pytest.raises(rrl.OperationFailed, match=r"^the run could not be started: sbatch: error: Invalid account$"):
        rrl.submit(JOB)
    assert not list(root.iterdir())


def test_slurm_is_queried_within_a_running_event_loop(
    started: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sinfo", "sbatch", "scontrol", "sacctmgr", "squeue"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/calls\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.defpath}")

    async def cell() -> rrl.RunState:
        return rrl.submit(JOB, set={"cluster.kind": "slurm"}).state()

    state = asyncio.run(cell())
    assert {"sinfo", "sbatch", "squeue"} <= set((tmp_path / "calls").read_text().split())
    assert (state.standing, state.outcome) == ("submitted", None)
    assert capfd.readouterr() == ("", "")


# ── find ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_run_is_found_by_id_prefix_folder_or_as_the_newest(root: Path) -> None:
    written = completed(RUN).written(root)
    for id in (RUN, "small", str(written.path), written.path, None):
        assert (rrl.run(id).id, rrl.run(id).path) == (RUN, written.path)
    assert repr(rrl.run()) == "<rrl.Run small-7>"
    with pytest.raises(rrl.UsageError, match=r'^no run "quick" in .*; newest: small-7$'):
        rrl.run("quick")


# ── watching ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_state_and_metrics_equal_the_output_of_the_commands(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed(RUN).written(root)
    run = rrl.run(RUN)
    state, rows = run.state(), list(run.metrics())
    assert capsys.readouterr() == ("", "")
    assert (state.outcome, state.step, state.recoveries, state.why) == ("completed", 12, 1, "all steps are done")
    assert main.run(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"schema": JSON_SCHEMA} | msgspec.to_builtins(state)]
    assert main.run(["metrics", RUN]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [{"schema": JSON_SCHEMA} | json.loads(msgspec.json.encode(row)) for row in rows]
    assert [row.step for row in run.metrics(follow=True)] == [*range(1, 13), None]


def test_run_without_a_manager_states_why_it_makes_no_progress(root: Path) -> None:
    Story(RUN).works().written(root)
    state = rrl.run(RUN).state()
    assert (state.outcome, state.standing) == (None, "unattended")
    assert state.why == f"no manager is running; the roles go on; start one: rrl manage {RUN}"


def test_damaged_journal_raises_instead_of_returning_a_state(root: Path) -> None:
    run = completed(RUN).written(root)
    for segment in run.journal.iterdir():
        segment.write_bytes(b"x" * 100)
    with pytest.raises(rrl.UsageError):
        rrl.run(RUN).state()


def test_wait_returns_the_summary_of_a_completed_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = completed(RUN).written(root)
    summary = rrl.run(RUN).wait()
    assert (summary.outcome, summary.steps, len(summary.recoveries)) == ("completed", 12, 1)
    assert summary.reward_last10 == json.loads(run.summary.read_text())["reward_last10"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (Outcome.FAILED, rrl.OperationFailed, f"{RUN} failed after 12 steps: no nodes; see: rrl status {RUN}"),
        (
            Outcome.CANCELLED,
            rrl.OperationFailed,
            f"{RUN} was cancelled after 12 steps: no nodes; see: rrl status {RUN}",
        ),
        (Outcome.REJECTED, rrl.UsageError, f"{RUN} was rejected: no nodes"),
    ],
)
def test_wait_raises_if_the_run_does_not_complete(
    root: Path, outcome: Outcome, error: type[Exception], message: str
) -> None:
    Story(RUN).works().ends(outcome, "no nodes").written(root)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        rrl.run(RUN).wait()


_WAITING = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import rrl
run = rrl.run("{RUN}")
try:
    print("waits", flush=True)
    run.wait()
except KeyboardInterrupt:
    print("interrupted", run.state().outcome, flush=True)
"""


def test_an_interrupt_ends_only_the_wait(root: Path) -> None:
    run = Story(RUN).works().written(root)
    with subprocess.Popen([sys.executable, "-c", _WAITING], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.stdout.readline() == "interrupted None\n"
    assert waiting.returncode == 0
    assert not list(run.mailbox.iterdir()), "an interrupted wait has sent a command to the run"


# ── logs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_logs_are_merged_with_times_and_selected_as_by_the_command(root: Path) -> None:
    run, noon = Story(RUN).works().written(root), datetime(2026, 11, 20, 12, tzinfo=UTC)
    for tag, second, text in (
        ("rollout-0.1", 0, "early"),
        ("trainer-0.1", 1, "step \x1b[1m1"),
        ("rollout-0.1", 2, "late"),
    ):
        with run.log_file(f"{RUN}.{tag}").open("a") as file:
            file.write(f"{stamp(int((noon.timestamp() + second) * 1e6)).decode()} {text}\n")
    found = rrl.run(RUN)
    lines = list(found.logs())
    assert [(line.incarnation, line.text) for line in lines] == [
        ("rollout/0#1", "early"),
        ("trainer/0#1", "step \x1b[1m1"),
        ("rollout/0#1", "late"),
    ]
    assert [line.time for line in lines] == [noon.replace(second=second) for second in range(3)]
    assert [line.text for line in found.logs("rollout/0", lines=1)] == ["late"]
    assert [line.text for line in found.logs(since=noon.replace(second=1), grep="l.te")] == ["late"]
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"grep": "("}, r'grep "\(" is not a valid regular expression'),
        ({"selector": "reward"}, '"reward" of small-7 has written no log yet; there are logs of: rollout/0, trainer/0'),
    )
    for arguments, message in wrong:
        with pytest.raises(rrl.UsageError, match=message):
            found.logs(**arguments)


def test_logs_of_a_run_that_has_not_begun_can_be_followed(started: list[RunDir]) -> None:
    run = rrl.submit(JOB)
    lines = run.logs("rollout/0", follow=True)
    (RunDir(run.path).log_file(f"{run.id}.rollout-0.1")).write_text("hello\n")
    assert next(lines).text == "hello"
    with pytest.raises(rrl.UsageError, match=r'has no logs of "critic"|has no logs yet'):
        run.logs("critic", follow=True)


# ── change ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class FakeManager:
    """Takes the commands of a run and records the events of a manager, without starting any process."""

    def __init__(self, story: Story, root: Path) -> None:
        self.run, self._story, self._recorded = story.written(root), story, len(story.stamped)
        self._epoch = story.epoch

    def takes_a_command(self, does: Callable[[Story], object]) -> dict[str, Any]:
        """Wait for a command, record the events that ``does`` adds to the story, and return the command."""
        eventually(lambda: bool(self._commands()))
        (file,) = self._commands()
        command: dict[str, Any] = json.loads(file.read_text())
        file.unlink()
        does(self._story)
        self._epoch += 1
        journal = Journal(self.run, self._epoch)
        for stamped in self._story.stamped[self._recorded :]:
            journal.append(stamped)
        journal.close()
        self._recorded = len(self._story.stamped)
        if self._story.recorded().outcome is not None:
            write_summary(self.run)
        return command

    def _commands(self) -> list[Path]:
        return list(self.run.mailbox.glob("[!.]*.json"))


async def test_cancel_and_restart_return_once_the_manager_has_carried_them_out(root: Path) -> None:
    manager = FakeManager(Story(RUN).works(), root)

    run = rrl.run(RUN)
    restart = asyncio.create_task(asyncio.to_thread(run.restart, "rollout/0"))
    command = await asyncio.to_thread(manager.takes_a_command, lambda story: story.recovers("rollout/0"))
    assert (command["command"], command["target"]) == ("restart", "rollout/0")
    await restart
    cancel = asyncio.create_task(asyncio.to_thread(run.cancel))
    command = await asyncio.to_thread(manager.takes_a_command, lambda story: story.ends(Outcome.CANCELLED, "me"))
    assert command["command"] == "cancel"
    await cancel
    assert run.state().outcome == "cancelled"
    run.cancel()  # the run has ended, so that no command is sent
    with pytest.raises(rrl.UsageError, match=f"^{RUN} has ended \\(cancelled\\); to continue it: rrl resume"):
        run.restart("rollout/0")

    assert not list(manager.run.mailbox.iterdir())


def test_without_waiting_a_command_is_left_for_the_manager(root: Path) -> None:
    run = Story(RUN).works().written(root)
    rrl.run(RUN).restart("rollout/1", wait=False)
    rrl.run(RUN).cancel(wait=False)
    commands = sorted(json.loads(path.read_text())["command"] for path in run.mailbox.glob("[!.]*.json"))
    assert commands == ["cancel", "restart"]
    with pytest.raises(rrl.UsageError, match=r'^no replica "rollout/7" in this run; it has reward/0, rollout/0'):
        rrl.run(RUN).restart("rollout/7")
    with pytest.raises(rrl.UsageError, match=r"there are no allocations to keep$"):
        rrl.run(RUN).cancel(keep_allocation=True)


def test_an_ended_run_is_resumed_with_changed_values(started: list[RunDir], root: Path) -> None:
    run = rrl.submit(JOB)
    with pytest.raises(rrl.UsageError, match=f"^{run.id} has not begun yet"):
        run.resume()
    story = Story(run.id, job_view(10)).works().ends(Outcome.FAILED, "no nodes")
    journal = Journal(RunDir(run.path), 1)
    for stamped in story.stamped:
        journal.append(stamped)
    journal.close()
    with pytest.raises(rrl.UsageError, match=f"^{run.id} has committed 12 steps already"):
        run.resume()
    with pytest.raises(rrl.UsageError, match=r'^set\["run.seed"\]: is different in'):
        run.resume(set={"run.seed": 7, "run.steps": 20})
    run.resume(set={"run.steps": 20})
    pending = read_pending(RunDir(run.path))
    assert pending is not None
    assert (pending.job.steps, pending.source) == (20, str(root.parent / "job.toml"))
    assert run.warnings[-1] == "no successor is queued"
    state = run.state()
    assert (state.outcome, state.standing, state.step) == (None, "submitted", 12), (
        "the run still has the state from before the resume"
    )
    run.cancel(wait=False)
    assert len(list(RunDir(run.path).mailbox.glob("[!.]*.json"))) == 1, (
        "no command was left for the manager, though the run has not ended"
    )


@pytest.mark.torch
def test_export_writes_a_folder_as_documented(root: Path) -> None:
    pytest.importorskip("torch")
    from rrl.tests.support.roles.trainer.committed_run import CommittedRun

    CommittedRun(root / RUN).commit(1)
    names: dict[str, Any] = {"run": rrl.run(RUN)}
    (program,) = re.findall(r"^```python\n(exported = .*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(program, names)
    exported: rrl.Exported = names["exported"]
    assert (exported.step, exported.folder) == (1, str(Path("models/mine").absolute()))
    assert (Path(exported.folder) / "model.safetensors").exists()
    with pytest.raises(rrl.UsageError, match=r"mine is not empty; name a new folder$"):
        rrl.run(RUN).export("models/mine")
    with pytest.raises(rrl.OperationFailed, match=r"; nothing was exported$"):
        rrl.run(RUN).export("/proc/mine")
