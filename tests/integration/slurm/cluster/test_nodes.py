"""Single nodes of a real Slurm are drained and undrained if the user has the right to, and released in any case."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Callable, Coroutine, Iterator

import pytest

from rrl.cluster.base import AllocationState, Refused, Unanswered
from rrl.cluster.slurm.cluster import SlurmCluster
from rrl.cluster.slurm.nodes import SlurmNodes
from rrl.cluster.slurm.parsing import Job
from rrl.cluster.slurm.readers.command_reader import CommandReader, RunCommand
from rrl.core.command_runner import CommandResult
from rrl.core.types import NodeName
from rrl.tests.support.plain_user import call_as
from rrl.tests.support.slurm.cluster_run import FAST, Run, as_user, is_alive, state, until
from rrl.tests.support.slurm.lab import SlurmLab

N1, N2, N3, N4 = (NodeName(f"n{i}") for i in range(1, 5))
REASON = "rrl:run-1:gpu: xid: agent: Xid 79, GPU 3 has fallen off the bus"


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    for node in slurm_lab.nodes:
        if "DRAIN" in shown(slurm_lab, node) or "DOWN" in shown(slurm_lab, node):
            slurm_lab.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    slurm_lab.clear()


@pytest.fixture
def run(lab: SlurmLab) -> Run:
    path = lab.user_home / f"nodes{len(list(lab.user_home.glob('nodes*')))}"
    lab.call_as_user(path.mkdir)
    return Run(path)


def shown(lab: SlurmLab, node: str) -> str:
    """Return a node's state and reason as Slurm reports them."""
    text = lab.slurm("scontrol", "show", "node", "-o", node)
    reason = text.partition(" Reason=")[2].partition(" [")[0].strip()
    return text.partition(" State=")[2].split()[0] + (f": {reason}" if reason else "")


def by(read: RunCommand, write: RunCommand) -> SlurmNodes:
    """Return a SlurmNodes that runs its commands through these two functions."""
    return SlurmNodes(CommandReader(read, write), write)


def set_down(lab: SlurmLab, node: str, state: str, reason: str) -> None:
    lab.slurm("scontrol", "update", f"NodeName={node}", f"State={state}", f"Reason={reason}")


def as_admin(lab: SlurmLab, scenario: Callable[[SlurmCluster], Coroutine[None, None, None]]) -> None:
    """Run the scenario with the daemons' rights."""
    cluster = SlurmCluster("run-1", "python", FAST)
    call_as(getpass.getuser(), lambda: asyncio.run(scenario(cluster)), lab.environment(), lab.dir, 60.0)


# ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_own_drain_can_be_repeated_is_listed_and_is_removed(lab: SlurmLab) -> None:
    async def scenario(slurm: SlurmCluster) -> None:
        for _ in range(2):
            await slurm.drain(N1, REASON)
        assert shown(lab, N1) == f"IDLE+DRAIN: {REASON}"
        observed = await slurm.observe()
        assert observed.nodes is not None
        assert observed.nodes[N1].detail == f"IDLE+DRAIN: {REASON}"
        for _ in range(2):
            await slurm.undrain(N1, REASON)
        assert "DRAIN" not in shown(lab, N1)

    as_admin(lab, scenario)


def test_drain_by_another_user_stays_and_is_named(lab: SlurmLab) -> None:
    set_down(lab, N1, "DOWN", "bad fan")
    set_down(lab, N2, "DRAIN", "bad disk")
    set_down(lab, N3, "DRAIN", "rrl:run-2:gpu: another run")
    before = [shown(lab, node) for node in (N1, N2, N3)]

    async def scenario(slurm: SlurmCluster) -> None:
        for node, reason in ((N1, "bad fan"), (N2, "bad disk"), (N3, "rrl:run-2:gpu: another run")):
            with pytest.raises(Refused, match=reason):
                await slurm.drain(node, REASON)
        polled = (await slurm.observe()).nodes or {}
        assert [polled[node].detail for node in (N1, N2, N3)] == before, "nobody would see that they are back"
        await slurm.undrain(N1, REASON)  # it is not drained
        for node in (N2, N3):
            with pytest.raises(Refused, match="did not set that drain"):
                await slurm.undrain(node, REASON)
        assert [shown(lab, node) for node in (N1, N2, N3)] == before
        await slurm.drain(N4, REASON)
        set_down(lab, N4, "DOWN", REASON)  # this keeps the drain
        await slurm.undrain(N4, REASON)
        assert shown(lab, N4).startswith("DOWN")
        assert "DRAIN" not in shown(lab, N4)
        with pytest.raises(Refused, match="not known to Slurm"):
            await slurm.drain(NodeName("nowhere"), REASON)

    as_admin(lab, scenario)


def test_drain_without_rights_is_tried_once_and_refused(lab: SlurmLab, run: Run) -> None:
    """A drain without rights is tried once and refused.

    Without root the test does nothing, because the plain user is then SlurmUser and may drain.
    """
    if lab.user == getpass.getuser():
        return

    def violations() -> int:
        return (lab.dir / "log/slurmctld.log").read_text().count("Security violation, UPDATE_NODE")

    before = violations()

    async def scenario() -> None:
        slurm = run.cluster()
        for node in (N1, N2):
            with pytest.raises(Refused, match="this user may not drain nodes"):
                await slurm.drain(node, REASON)

    as_user(lab, scenario)
    assert violations() == before + 1
    assert "DRAIN" not in shown(lab, N1)


def test_drain_without_an_answer_stays_open() -> None:
    async def scenario() -> None:
        async def silent(argv: tuple[str, ...]) -> CommandResult:
            raise Unanswered("scontrol: no answer within 10 s")

        async def idle(argv: tuple[str, ...]) -> CommandResult:
            return CommandResult(0, "NodeName=n1 State=IDLE ThreadsPerCore=1\n", "")

        for nodes in (by(silent, silent), by(idle, silent), by(idle, idle)):
            with pytest.raises(Unanswered):
                await nodes.drain(N1, REASON)

    asyncio.run(scenario())


# ── releases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_shrink_releases_a_node_and_the_rest_of_the_pool_continues(lab: SlurmLab, run: Run) -> None:
    shrinks_twice = lab.version >= (24, 11)

    async def scenario() -> None:
        slurm = run.cluster()
        first, second, third = await run.hold(slurm, 3)
        for number, node in enumerate((first, second, third)):
            await slurm.launch(run.step(f"s{number}", node))
        pids = [await run.pid(f"s{number}") for number in range(3)]
        for _ in range(2):
            await slurm.shrink(run.pool, (first,))
        await until(
            slurm, lambda snapshot: snapshot.allocations and snapshot.allocations[run.pool].nodes == (second, third)
        )
        await until(slurm, lambda snapshot: set(snapshot.steps or ()) == {run.tag("s1"), run.tag("s2")})
        lab.wait_states({first: "idle"})  # its processes have ended then
        assert [is_alive(pid) for pid in pids] == [False, True, True]
        await slurm.launch(run.step("s3", third))
        assert is_alive(await run.pid("s3"))
        with pytest.raises(Refused, match="no node of job"):
            await slurm.shrink(run.pool, (second, third))
        if shrinks_twice:
            await slurm.shrink(run.pool, (second,))
        else:
            with pytest.raises(Refused, match="Slurm cannot shrink"):
                await slurm.shrink(run.pool, (second,))
        assert [is_alive(pid) for pid in pids] == [False, not shrinks_twice, True]
        await slurm.release(run.pool)
        await until(slurm, lambda snapshot: state(snapshot, run.pool) is AllocationState.ENDED)
        await slurm.close()

    as_user(lab, scenario)


def test_shrink_refuses_the_node_of_a_batch_script(lab: SlurmLab, run: Run) -> None:
    async def scenario() -> None:
        slurm = run.cluster(hold="sbatch")
        first, second = await run.hold(slurm, 2)
        await slurm.launch(run.step("s1", second))
        pid = await run.pid("s1")
        with pytest.raises(Refused, match="Slurm cannot shrink"):
            await slurm.shrink(run.pool, (first,))
        snapshot = await slurm.observe()
        assert snapshot.allocations is not None
        assert snapshot.allocations[run.pool].nodes == (first, second)
        assert is_alive(pid)
        await slurm.release(run.pool)
        await slurm.close()

    as_user(lab, scenario)


def test_shrink_refuses_hetjob_nodes_whose_release_would_affect_others() -> None:
    async def never(argv: tuple[str, ...]) -> CommandResult:
        raise AssertionError(argv)

    first = Job("5", AllocationState.RUNNING, (N1, N2), "", "", "", leader="5")
    second = Job("6", AllocationState.RUNNING, (N3, N4), "", "", "", leader="5", offset=1)

    async def scenario() -> None:
        nodes = by(never, never)
        with pytest.raises(Refused, match="first component"):
            await nodes.shrink(first, (N1,))
        with pytest.raises(Refused, match="would keep only one node"):
            await nodes.shrink(second, (N3,))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("expected_text", "kind"),
    [
        ("Unexpected message received for job 1", Refused),
        ("Invalid node name specified for job 4", Refused),
        ("Job is no longer pending execution for job 1", Refused),
        ("slurm_update error: Invalid user id", Refused),
        ("Unable to contact slurm controller (connect failure)", Unanswered),
        ("Socket timed out", Unanswered),
    ],
)
def test_shrink_distinguishes_refused_from_unanswered(expected_text: str, kind: type[Exception]) -> None:
    async def answer(argv: tuple[str, ...]) -> CommandResult:
        assert argv == ("scontrol", "update", "JobId=7", "NodeList=n[2-3]")
        return CommandResult(1, "", expected_text)

    job = Job("7", AllocationState.RUNNING, (N1, N2, N3), "", "", "")
    with pytest.raises(kind):
        asyncio.run(by(answer, answer).shrink(job, (N1,)))
