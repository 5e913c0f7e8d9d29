"""A GPU that fails during a run costs the run only its node; a GPU that is broken from the start is never used.

The runs use nodes with GPUs of a fake driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rrl.core.types import AGENT, STANDBY_ROLE, Cause, NodeName, ReplicaId, Verdict, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Launch
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.tests.support.runs import Incarnations, TestRun, check_sound, joined_incarnations, light_job, submit_here

VICTIM = ReplicaId("rollout/1")
AS_PYTHON = """#!/bin/sh
# Each virtual node has GPUs of its own: its agent, which is told so by its launch file, finds that node's driver.
for word; do
    case "$word" in
    */*.agent-*.launch)
        node="${{word##*.agent-}}"
        export RRL_FAKE_NVML="{drivers}/${{node%%.*}}/fake_nvml.state" LD_LIBRARY_PATH="{library}" RRL_READERS=nvml
        ;;
    esac
done
exec "{python}" "$@"
"""


class Gpus:
    """Fake drivers for virtual nodes, each with two GPUs."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.of: dict[NodeName, FakeDriver] = {}
        for i in range(1, nodes + 1):
            (home := folder / "drivers" / f"local{i}").mkdir(parents=True)
            self.of[NodeName(f"local{i}")] = FakeDriver(home).gpus(2)
        self.python = folder / "python"
        library = self.of[NodeName("local1")].env()["LD_LIBRARY_PATH"]
        self.python.write_text(AS_PYTHON.format(drivers=folder / "drivers", library=library, python=sys.executable))
        self.python.chmod(0o755)

    def job(self, steps: int, extra: str = "") -> str:
        return light_job("local", steps, spares=2, warm=False, extra=f'[env]\npython = "{self.python}"\n{extra}')


def _excluded(run: TestRun) -> Iterator[Exclude]:
    for stamped in run.events():
        if isinstance(stamped.event, ev.Decided) and isinstance(stamped.event.action, Exclude):
            yield stamped.event.action


def _placed(run: TestRun) -> set[NodeName]:
    """Return the nodes on which a role was started, without those of standby processes.

    If the job requests no GPUs, standby processes may start before the first sample of a virtual node.
    """
    launches = [s.event.action for s in run.events() if isinstance(s.event, ev.Intended)]
    return {
        one.node
        for one in launches
        if isinstance(one, Launch) and role_of(one.incarnation.replica) not in (AGENT, STANDBY_ROLE)
    }


def _ends_well(run: TestRun) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)


def test_broken_gpus_exclude_their_nodes_and_only_the_role_on_them_moves(tmp_path: Path) -> None:
    """A run never uses a spare that is broken from the start, and leaves each of two nodes that lose a GPU later."""
    gpus = Gpus(tmp_path, nodes=10)
    broken = NodeName("local5")
    gpus.of[broken].set(0, "ecc_volatile_uncorrected", 1)
    run = submit_here(tmp_path, gpus.job(90, extra="[recovery]\nbreaker = 1.0\n"))
    state = run.wait(lambda state: broken in state.nodes and state.nodes[broken].excluded is not None)
    assert any(one.node == broken and one.verdict is Verdict.FAIL for one in state.findings.values())

    before = joined_incarnations(run)
    first_node = _node_of_victim(before)
    gpus.of[first_node].xid(1, 79)
    before = run.wait_back_alone(before, VICTIM, *(ReplicaId(f"{AGENT}/{name}") for name in gpus.of))
    second_node = _node_of_victim(before)
    gpus.of[second_node].lose(0)
    run.wait_back_alone(before, VICTIM, *(ReplicaId(f"{AGENT}/{name}") for name in gpus.of))
    _ends_well(run)

    excludes = {one.node: one for one in _excluded(run)}
    assert excludes.keys() == {broken, first_node, second_node}
    assert (excludes[first_node].cause, excludes[first_node].proof) == (Cause.GPU, True)
    assert "79" in excludes[first_node].why.evidence[0]
    findings = [s.event.finding for s in run.events() if isinstance(s.event, ev.FindingChanged)]
    assert not [one for one in findings if one.detector == "node_lost"], (
        "an excluded node, which sends no heartbeats, was reported as lost"
    )
    assert broken not in _placed(run)
    recoveries = run.summary()["recoveries"]
    assert [recovery["replica"] for recovery in recoveries] == [VICTIM, VICTIM]
    assert recoveries[0]["rung"] == "spare node"


def _node_of_victim(incarnations: Incarnations) -> NodeName:
    node = incarnations[VICTIM][2]
    assert node is not None
    return NodeName(node)
