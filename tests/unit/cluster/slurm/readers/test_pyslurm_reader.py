"""The real child process with a fake pyslurm, which returns recorded objects of the real one or misbehaves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rrl.cluster.base import NodeState, Refused, Unanswered
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.cluster.slurm.readers.base import NotPermitted
from rrl.cluster.slurm.readers.child_process import ChildFailed, PyslurmChild
from rrl.cluster.slurm.readers.command_reader import CommandReader
from rrl.cluster.slurm.readers.messages import Failed
from rrl.cluster.slurm.readers.pyslurm_reader import PyslurmReader, error_of
from rrl.cluster.slurm.readers.selection import (
    LARGE_QUEUE_JOBS,
    MAX_CHILD_FAILURES,
    ReaderSetting,
    SelectedReader,
    choose_reader,
)
from rrl.core.command_runner import CommandResult
from rrl.core.types import NodeName
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.slurm_readers import fake_pyslurm
from rrl.tests.support.slurm_readers.comparison import look, same_value
from rrl.tests.support.slurm_readers.fake_pyslurm import CONTROL_ENV, Control, write_control
from rrl.tests.support.slurm_readers.recording import COMMANDS, FOLDER

FAKE = fake_pyslurm.__name__
RECORDINGS = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
MOMENTS = [
    (version, moment) for version, path in RECORDINGS.items() for moment in json.loads(path.read_text())["moments"]
]
LIMITS = SlurmLimits(read_timeout_s=60.0, write_timeout_s=60.0)
HASTY = SlurmLimits(read_timeout_s=0.5, write_timeout_s=0.5)
N5 = NodeName("n5")


def recorded(version: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(RECORDINGS[version].read_text())
    return recording


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that controls the fake pyslurm: ``control(behaviour="hang")``."""
    path = tmp_path / "control.json"
    monkeypatch.setenv(CONTROL_ENV, str(path))
    usual = Control(str(RECORDINGS["22.05"]), "settled")

    def set_control(**other: Any) -> None:
        write_control(path, msgspec.structs.replace(usual, **other))

    set_control()
    return set_control


def recorded_commands(version: str, moment: str, calls: list[str] | None = None) -> CommandReader:
    """Return a reader whose commands print the output of Slurm's commands that was recorded at ``moment``."""
    outputs = recorded(version)["moments"][moment]["commands"]

    async def run(argv: tuple[str, ...]) -> CommandResult:
        name = next(name for name, known in COMMANDS.items() if argv[: len(known)] == known)
        if calls is not None:
            calls.append(name)
        return CommandResult(0, outputs[name], "")

    return CommandReader(run, run)


@pytest.fixture
def reader(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[PyslurmReader]:
    """Return a reader of the fake pyslurm; its limits may be the test's parameter."""
    reader = PyslurmReader(PyslurmChild(FAKE), getattr(request, "param", LIMITS))
    yield reader
    runner.run(reader.close())


in_haste = pytest.mark.parametrize("reader", [HASTY], indirect=True)


def selected(
    scenario: Callable[[SelectedReader], Coroutine[None, None, None]],
    commands: CommandReader,
    limits: SlurmLimits = LIMITS,
    setting: ReaderSetting = "auto",
) -> None:
    async def play() -> None:
        reader = SelectedReader(setting, commands, limits, FAKE)
        try:
            await scenario(reader)
        finally:
            await reader.close()

    asyncio.run(play())


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_recordings_of_two_slurm_versions_have_all_moments() -> None:
    assert list(RECORDINGS) == ["22.05", "24.11"]
    assert {moment for _, moment in MOMENTS} >= {"preempting", "completing", "settled", "down", "reason-0"}


@pytest.mark.parametrize(("version", "moment"), MOMENTS)
async def test_recorded_objects_give_the_values_of_the_commands(
    reader: PyslurmReader, control: Callable[..., None], version: str, moment: str
) -> None:
    control(recording=str(RECORDINGS[version]), moment=moment)

    expected, found = await look(recorded_commands(version, moment)), await look(reader)
    assert expected.keys() == found.keys()
    assert {name: value for name, value in expected.items() if not same_value(value, found[name])} == {}


async def test_one_node_is_read_with_its_drain_and_an_unknown_one_is_refused(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    control(moment="down")

    node = await reader.node(N5)
    assert (node.draining, node.reason) == (True, "bad disk")
    assert node.reason_by.startswith("root@20")
    with pytest.raises(Refused, match="not known to Slurm"):
        await reader.node(NodeName("nowhere"))
    states = await reader.nodes((N5, NodeName("nowhere")))
    assert [states[N5].state, states[NodeName("nowhere")].state] == [NodeState.DRAINING, NodeState.UNKNOWN]
    many = [NodeName(f"m{number}") for number in range(20)]  # more nodes than are read one by one
    assert [status.state for status in (await reader.nodes([N5, *many])).values()] == [
        NodeState.DRAINING,
        *[NodeState.UNKNOWN] * 20,
    ]


async def test_text_that_is_not_utf8_is_replaced_as_in_the_output_of_a_command(
    reader: PyslurmReader, control: Callable[..., None], tmp_path: Path
) -> None:
    recording = recorded("22.05")
    next(node for node in recording["moments"]["down"]["nodes"] if node["name"] == "n5")["reason"] = {"bytes": "66fc72"}
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(recording))
    control(recording=str(path), moment="down")

    assert (await reader.node(N5)).reason == "f�r"


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_drain_and_undrain_reach_pyslurm_with_state_and_reason(
    reader: PyslurmReader, control: Callable[..., None], tmp_path: Path
) -> None:
    changes = tmp_path / "changes"
    control(changes=str(changes))

    await reader.drain(N5, "rrl:x: é [1]")
    await reader.undrain(N5)
    assert [json.loads(line) for line in changes.read_text().splitlines()] == [
        ["n5", {"state": "DRAIN", "reason": "rrl:x: é [1]"}],
        ["n5", {"state": "UNDRAIN"}],
    ]


@pytest.mark.parametrize("version", RECORDINGS)
@pytest.mark.parametrize(
    ("error", "kind"),
    [("drain_not_permitted", NotPermitted), ("drain_unknown_node", Refused), ("controller_away", Unanswered)],
)
async def test_recorded_error_is_refused_or_unanswered_by_its_number(
    reader: PyslurmReader, control: Callable[..., None], version: str, error: str, kind: type[Exception]
) -> None:
    control(recording=str(RECORDINGS[version]), modify_error=error)

    with pytest.raises(kind) as raised:
        await reader.drain(N5, "rrl:x")
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (0, Unanswered),
        (-1, Unanswered),
        (110, Unanswered),
        (111, Unanswered),
        (1001, Unanswered),
        (1800, Unanswered),
        (2002, NotPermitted),
        (2010, NotPermitted),
        (2018, Refused),
        (2027, Unanswered),
        (2028, Refused),
        (2090, Unanswered),
        (2131, Unanswered),
        (5004, Unanswered),
        (6000, Unanswered),
        (9000, Unanswered),
    ],
)
def test_number_of_an_error_decides_whatever_its_text_says(number: int, kind: type[Exception]) -> None:
    assert type(error_of(Failed(number, "Invalid user id: Access/permission denied, timed out"))) is kind


# ── a child process that misbehaves ──────────────────────────────────────────────────────────────────────────────────
@in_haste
async def test_hanging_request_is_killed_and_the_next_one_gets_a_new_process(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    child = reader._child
    await child.version()
    first = child.pid
    assert first is not None
    control(behaviour="hang")
    with pytest.raises(ChildFailed, match=r"did not answer within 0\.5 s"):
        await reader.steps()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    control()
    reader._limits = LIMITS
    assert await reader.steps()
    assert child.pid not in (None, first)


@in_haste
async def test_event_loop_runs_on_while_the_process_is_silent(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    """The process is stopped, as if its call held the interpreter, and the manager's event loop must continue."""

    await reader._child.version()
    assert reader._child.pid is not None
    os.kill(reader._child.pid, signal.SIGSTOP)
    asking = asyncio.create_task(reader.jobs())
    turns = 0
    while not asking.done():
        await asyncio.sleep(0.001)
        turns += 1
    with pytest.raises(ChildFailed):
        await asking
    assert turns > 10


@in_haste
async def test_late_reply_is_never_taken_for_the_reply_to_the_next_request(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    await reader._child.version()
    control(behaviour="late", late_s=1.0)
    with pytest.raises(ChildFailed):
        await reader.jobs()
    control()
    reader._limits = LIMITS
    await asyncio.sleep(1.2)  # long enough for the late reply
    assert [step.id.count(".") for step in await reader.steps()] == [1]


async def test_cancelled_request_leaves_no_reply_behind(reader: PyslurmReader, control: Callable[..., None]) -> None:
    await reader._child.version()
    control(behaviour="late", late_s=0.5)
    asking = asyncio.create_task(reader.jobs())
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert reader._child.pid is None
    control()
    assert len(await reader.steps()) == 1


async def test_process_that_dies_is_unanswered_with_its_last_line(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    control(behaviour="die")

    with pytest.raises(ChildFailed, match=r"ended with [0-9]+: fatal: the false pyslurm ends the process"):
        await reader.jobs()


async def test_process_that_ended_between_two_requests_is_replaced_without_a_failure(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    await reader.steps()
    running = reader._child._running
    assert running is not None
    running.process.kill()
    await running.process.wait()
    assert len(await reader.steps()) == 1


async def test_drain_whose_process_dies_is_unanswered_although_it_was_made(
    reader: PyslurmReader, control: Callable[..., None], tmp_path: Path
) -> None:
    changes = tmp_path / "changes"
    control(behaviour="die", changes=str(changes))

    with pytest.raises(Unanswered):
        await reader.drain(N5, "rrl:x")
    assert changes.exists()


async def test_impossible_value_is_a_failure_of_the_process(
    reader: PyslurmReader, control: Callable[..., None]
) -> None:
    control(behaviour="garbage")

    with pytest.raises(ChildFailed, match="'FLYING' is not a known job state"):
        await reader.jobs()


# ── the choice ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("settings", "uses_pyslurm", "reason"),
    [
        ({}, True, "it was built for Slurm 22.05.8"),
        ({"version": "24.11.0"}, False, "24.11.0 was not built for Slurm 22.05.8"),
        ({"import_behaviour": "die"}, False, "pyslurm does not start: the process of pyslurm ended with "),
    ],
)
async def test_auto_takes_pyslurm_only_if_it_starts_and_fits_the_version(
    control: Callable[..., None], settings: dict[str, str], uses_pyslurm: bool, reason: str
) -> None:
    control(**settings)

    choice = await choose_reader("auto", recorded_commands("22.05", "settled"), LIMITS, FAKE)
    await choice.reader.close()
    assert isinstance(choice.reader, PyslurmReader) == uses_pyslurm, choice.reason
    assert reason in choice.reason
    assert choice.rejected != uses_pyslurm


async def test_import_that_hangs_is_given_up(control: Callable[..., None]) -> None:
    control(import_behaviour="hang")

    child = PyslurmChild(FAKE, start_timeout_s=0.5)
    with pytest.raises(ChildFailed, match=r"did not answer within 0\.5 s"):
        await child.version()
    assert child.pid is None


async def test_commands_are_used_if_pyslurm_is_absent_or_not_wanted(control: Callable[..., None]) -> None:
    commands = recorded_commands("22.05", "settled")

    absent = await choose_reader("auto", commands, LIMITS, "no_such_module")
    unwanted = await choose_reader("commands", commands, LIMITS, FAKE)
    assert (absent.reader, unwanted.reader) == (commands, commands)
    assert not absent.rejected
    assert "is not installed" in absent.reason


def test_setting_pyslurm_takes_it_without_asking_for_slurms_version(control: Callable[..., None]) -> None:
    control(moment="down")
    calls: list[str] = []

    async def scenario(reader: SelectedReader) -> None:
        assert (await reader.node(N5)).reason == "bad disk"

    selected(scenario, recorded_commands("22.05", "settled", calls), setting="pyslurm")
    assert calls == []


def test_commands_take_over_after_three_failures(
    control: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    async def scenario(reader: SelectedReader) -> None:
        with caplog.at_level(logging.INFO, "rrl.manager"):
            await reader.steps()
            control(behaviour="die")
            calls.clear()
            for _ in range(MAX_CHILD_FAILURES):
                with pytest.raises(ChildFailed):
                    await reader.steps()
            assert calls == []
            assert len(await reader.steps()) == 1
            control()
            await reader.jobs()
        assert calls == ["steps", "jobs"]

    selected(scenario, recorded_commands("22.05", "settled", calls))
    assert "pyslurm has failed 3 times: Slurm is read by its commands" in caplog.text


def test_process_is_not_started_again_once_commands_have_taken_over(control: Callable[..., None]) -> None:
    """Two tasks wait for the child process when its last permitted failure makes the commands take over."""
    calls: list[str] = []

    async def scenario(reader: SelectedReader) -> None:
        await reader.steps()
        chosen = reader._chosen
        assert isinstance(chosen, PyslurmReader)
        control(behaviour="die")
        calls.clear()
        failing = [reader.steps() for _ in range(MAX_CHILD_FAILURES)]
        *failures, nodes = await asyncio.gather(*failing, reader.nodes(None), return_exceptions=True)
        assert [type(failure) for failure in failures] == [ChildFailed] * MAX_CHILD_FAILURES
        assert N5 in cast("dict[NodeName, Any]", nodes)
        assert (calls, chosen._child.pid) == (["nodes"], None)

    selected(scenario, recorded_commands("22.05", "settled", calls))


def test_jobs_of_a_long_queue_are_read_by_squeue(control: Callable[..., None]) -> None:
    calls: list[str] = []

    async def scenario(reader: SelectedReader) -> None:
        first = await reader.jobs()
        control(queue_length=LARGE_QUEUE_JOBS)
        calls.clear()
        # without the other jobs of the long queue
        assert {job.id for job in await reader.jobs()} == {job.id for job in first}
        assert calls == []
        await reader.jobs()
        await reader.steps()
        assert calls == ["jobs"]

    selected(scenario, recorded_commands("22.05", "settled", calls))


async def test_process_ends_with_the_manager(reader: PyslurmReader, control: Callable[..., None]) -> None:
    """A killed manager closes the pipe, which ends the process."""

    await reader._child.version()
    running = reader._child._running
    assert running is not None
    assert running.process.stdin is not None
    running.process.stdin.close()
    await eventually(lambda: running.process.returncode is not None)
    assert running.process.returncode == 0
