"""All readers of a real Slurm read equal values: commands, and pyslurm if it matches Slurm (make test-pyslurm).

pyslurm runs in its child process, as in a manager. At each moment of the test, all readers read one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import Struct

from rrl.cluster.base import AllocationState, NodeState, NodeStatus, Refused, Unanswered
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.commands import SlurmLimits
from rrl.cluster.slurm.parsing import Job, JobEnd, NodeInfo, StepLine
from rrl.cluster.slurm.readers.base import NotPermitted, SlurmReader
from rrl.cluster.slurm.readers.child_process import PyslurmChild
from rrl.cluster.slurm.readers.command_reader import CommandReader
from rrl.cluster.slurm.readers.pyslurm_reader import PyslurmReader
from rrl.cluster.slurm.readers.selection import choose_reader
from rrl.core.types import NodeName
from rrl.tests.support.plain_user import call_as
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm_readers.cluster_states import (
    CRASHED,
    DOWN,
    DOWN_REASON,
    DRAINED,
    ODD_REASONS,
    RUN,
    Jobs,
    states,
)
from rrl.tests.support.slurm_readers.comparison import look, same_value
from rrl.tests.support.slurm_readers.pyslurm_pair import mismatch

WITH_PYSLURM = mismatch() is None
READERS = ("commands", "pyslurm") if WITH_PYSLURM else ("commands",)
LIMITS = SlurmLimits(read_timeout_s=30.0, write_timeout_s=30.0)
REASON = "rrl:readers:gpu: xid: Xid 79, [GPU 3] fell = off"
KILLS = 100
LOOKS = 3
"""Largest number of attempts at a moment until all readers agree. Slurm's state may change between two readers.
"""

T = TypeVar("T", bound=Callable[..., None])


def needs_pyslurm(test: T) -> T:
    """Collect a test only if pyslurm matches Slurm. CI has no pyslurm, and takes a skipped test for a failure."""
    test.__test__ = WITH_PYSLURM  # type: ignore[attr-defined]
    return test


def reader_of(name: str, limits: SlurmLimits = LIMITS) -> SlurmReader:
    return CommandReader.with_limits(limits) if name == "commands" else PyslurmReader(PyslurmChild(), limits)


def asked(name: str, question: Callable[[SlurmReader], Awaitable[Any]]) -> Any:
    """Return the answer of a reader in this process."""

    async def ask() -> Any:
        reader = reader_of(name)
        try:
            return await question(reader)
        finally:
            await reader.close()

    return asyncio.run(ask())


def asked_as_user(lab: SlurmLab, name: str, question: Callable[[SlurmReader], Awaitable[Any]]) -> Any:
    """Return the answer of a reader that runs as the plain user."""
    path = lab.user_home / "answer"
    lab.call_as_user(lambda: _keep(path, pickle.dumps(asked(name, question))))
    answer = pickle.loads(path.read_bytes())  # written by a process of this test
    path.unlink()
    return answer


def _keep(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def as_admin(lab: SlurmLab, function: Callable[[], None]) -> None:
    call_as(getpass.getuser(), function, lab.environment(), lab.dir, 280.0)


class Read(Struct):
    """Everything that the readers read: ``values[moment][reader][name]``."""

    jobs: Jobs
    values: dict[str, dict[str, dict[str, Struct]]]

    def job(self, moment: str, reader: str, job: str) -> Job:
        value = self.values[moment][reader][f"job {job}"]
        assert isinstance(value, Job)
        return value

    def node(self, moment: str, reader: str, node: str) -> NodeStatus:
        value = self.values[moment][reader][f"node {node}"]
        assert isinstance(value, NodeStatus)
        return value


def differing(values: dict[str, dict[str, Struct]]) -> dict[str, tuple[Struct | None, Struct | None]]:
    """Return by name the values (of the commands, of the last reader) in which these two readers differ."""
    expected, found = values["commands"], values[READERS[-1]]
    return {
        name: (expected.get(name), found.get(name))
        for name in expected.keys() | found.keys()
        if not same_value(expected.get(name), found.get(name))
    }


@pytest.fixture(scope="module")
def read(preempting_lab: SlurmLab) -> Iterator[Read]:
    values: dict[str, dict[str, dict[str, Struct]]] = {}

    def look_by_all(moment: str) -> None:
        for _ in range(LOOKS):
            values[moment] = {name: asked_as_user(preempting_lab, name, look) for name in READERS}
            if not differing(values[moment]):
                return

    with states(preempting_lab, look_by_all) as jobs:
        yield Read(jobs, values)


@pytest.mark.parametrize("reader", READERS)
def test_jobs_are_read_in_each_state(read: Read, reader: str) -> None:
    jobs, moment = read.jobs, "settled"
    running = read.job(moment, reader, jobs.running)
    assert (running.state, running.nodes, running.comment) == (
        AllocationState.RUNNING,
        ("n1",),
        f"rrl {RUN} {RUN}.pool",
    )
    assert running.time_left_s is not None
    assert 0 < running.time_left_s < 600
    assert read.job(moment, reader, jobs.suspended).state is AllocationState.SUSPENDED
    assert read.job(moment, reader, jobs.held).detail == "PENDING: held by its user (scontrol release)"
    assert read.job(moment, reader, jobs.pending).state is AllocationState.PENDING
    assert read.job(moment, reader, jobs.never).unsatisfiable_reason == "DependencyNeverSatisfied"
    assert read.job(moment, reader, jobs.failed).end is JobEnd.OTHER
    assert read.job(moment, reader, jobs.cancelled).end is JobEnd.CANCELLED
    assert read.job(moment, reader, jobs.preempted).end is JobEnd.RECLAIMED
    preempted = read.job("preempting", reader, jobs.preempted)
    assert (preempted.state, preempted.reclaimed) == (AllocationState.RUNNING, True)
    assert read.job("completing", reader, jobs.completing).end is JobEnd.COMPLETING


@pytest.mark.parametrize("reader", READERS)
def test_components_of_a_heterogeneous_job_are_read_with_their_offsets(read: Read, reader: str) -> None:
    first, second = (read.job("settled", reader, str(int(read.jobs.het) + offset)) for offset in (0, 1))
    assert (first.leader, first.offset, first.nodes) == (read.jobs.het, 0, ("n1",))
    assert (second.leader, second.offset, second.nodes) == (read.jobs.het, 1, ("n2",))


@pytest.mark.parametrize("reader", READERS)
def test_numbered_steps_are_read_without_the_batch_steps(read: Read, reader: str) -> None:
    steps = [value for value in read.values["settled"][reader].values() if isinstance(value, StepLine)]
    assert steps == [StepLine(f"{read.jobs.running}.0", (NodeName("n1"),), f"{RUN}.s1")]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("number", range(len(ODD_REASONS)))
def test_odd_reason_of_a_drain_is_read_as_it_was_written(read: Read, reader: str, number: int) -> None:
    node = read.node(f"reason-{number}", reader, DRAINED)
    assert (node.state, node.reason.strip()) == (NodeState.DRAINING, ODD_REASONS[number].strip())


@pytest.mark.parametrize("reader", READERS)
def test_nodes_that_are_down_are_read_as_down(read: Read, reader: str) -> None:
    assert read.node("down", reader, DOWN).state is NodeState.DOWN
    assert read.node("down", reader, DOWN).reason == DOWN_REASON
    assert read.node("settled", reader, CRASHED).state is NodeState.DOWN


@pytest.mark.parametrize("reader", READERS)
def test_drain_is_made_read_and_removed_and_refused_to_a_plain_user(
    read: Read, reader: str, preempting_lab: SlurmLab
) -> None:
    node = NodeName("n1")

    async def scenario(slurm: SlurmReader) -> None:
        await slurm.drain(node, REASON)
        mark = await slurm.node(node)
        assert (mark.draining, mark.reason) == (True, REASON)
        assert mark.reason_by.startswith(f"{getpass.getuser()}@20"), mark
        await slurm.undrain(node)
        assert not (await slurm.node(node)).draining
        with pytest.raises(Refused, match="not known to Slurm"):
            await slurm.node(NodeName("nowhere"))
        with pytest.raises(Refused):
            await slurm.drain(NodeName("nowhere"), REASON)

    async def refused(slurm: SlurmReader) -> None:
        with pytest.raises(NotPermitted):
            await slurm.drain(node, REASON)

    as_admin(preempting_lab, lambda: asked(reader, scenario))
    if preempting_lab.user != getpass.getuser():
        preempting_lab.call_as_user(lambda: asked(reader, refused))


@needs_pyslurm
def test_all_values_of_both_readers_are_equal_at_each_moment(read: Read) -> None:
    assert len(read.values) == 4 + len(ODD_REASONS)
    for moment, values in read.values.items():
        assert differing(values) == {}, moment


@needs_pyslurm
def test_auto_takes_pyslurm_on_this_cluster(read: Read, preempting_lab: SlurmLab) -> None:
    async def scenario() -> None:
        choice = await choose_reader("auto", CommandReader.with_limits(LIMITS), LIMITS)
        await choice.reader.close()
        assert isinstance(choice.reader, PyslurmReader), choice.reason

    preempting_lab.call_as_user(lambda: asyncio.run(scenario()))


@needs_pyslurm
def test_loop_turns_while_slurmctld_is_stopped_for_60_seconds(read: Read, preempting_lab: SlurmLab) -> None:
    """A manager's polls return that everything is unknown, and never block its event loop for 0.5 s."""

    async def scenario() -> None:
        slurm = SlurmCluster(
            "run-1", "python", SlurmLimits(min_poll_interval_s=0.0, reads_per_minute=10_000), reader="auto"
        )
        assert (await slurm.observe()).unknown == ""
        longest, unknown, polling = 0.0, 0, None
        with preempting_lab.controller_stopped():
            end = last = time.monotonic() + 0.0
            end += 60.0
            while last < end:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if polling is None or polling.done():
                    unknown += polling is not None and bool(polling.result().unknown)
                    polling = asyncio.create_task(slurm.observe())
        print(f"largest gap of the loop: {longest:.3f} s; {unknown} polls were unknown")
        assert unknown >= 3
        assert longest < 0.5
        assert polling is not None
        await polling
        deadline = time.monotonic() + 60.0
        while (await slurm.observe()).unknown:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
        await slurm.close()

    call_as(getpass.getuser(), lambda: asyncio.run(scenario()), preempting_lab.environment(), preempting_lab.dir, 200.0)


def mark_of(node: NodeInfo) -> str:
    """Return the reason of a node's drain, or "" if the node is not drained. Slurm changes other flags by itself."""
    return node.reason if node.draining else ""


@needs_pyslurm
def test_nothing_is_lost_when_the_process_is_killed_a_hundred_times(read: Read, preempting_lab: SlurmLab) -> None:
    """Each drain and undrain either succeeds or is unanswered.

    After an unanswered request, Slurm shows either the previous state of the node or the requested one.
    """
    node = NodeName("n1")

    async def scenario() -> None:
        child = PyslurmChild()
        reader, commands = PyslurmReader(child, LIMITS), CommandReader.with_limits(LIMITS)
        unanswered = 0
        for number in range(KILLS):
            await child.version()
            pid = child.pid
            assert pid is not None
            wanted = number % 2 == 0
            before = mark_of(await commands.node(node))
            change = asyncio.create_task(reader.drain(node, f"rrl:{number}") if wanted else reader.undrain(node))
            await asyncio.sleep((number % 10) * 0.0005)  # before, during and after the request
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            made = f"rrl:{number}" if wanted else ""
            try:
                await change
            except Unanswered:
                unanswered += 1
                assert mark_of(await commands.node(node)) in (before, made)
            else:
                assert mark_of(await commands.node(node)) == made
            if mark_of(await commands.node(node)) != made:
                await (commands.drain(node, f"rrl:{number}") if wanted else commands.undrain(node))
        print(f"{KILLS} kills: {unanswered} changes unanswered")
        assert unanswered > 0
        expected, found = await look(commands), await look(reader)
        assert {name for name, value in expected.items() if not same_value(value, found.get(name))} == set()
        await reader.close()

    as_admin(preempting_lab, lambda: asyncio.run(scenario()))
