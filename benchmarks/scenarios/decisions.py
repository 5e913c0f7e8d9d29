"""Checks the manager's decisions about the failures that a scenario's detectors find, and their explanations."""

from __future__ import annotations

import msgspec

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.ours import RrlDetectors
from rrl.core.types import AGENT, Finding, ReplicaId, Verdict, replica_id, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, RestartAll
from rrl.manager.planner.capacity.node_fitness import excludes_node
from rrl.manager.reporting.decisions.explanations import Explanation
from rrl.tests.support.cli.explained import assert_explained
from rrl.tests.support.manager.jobs import ROLLOUTS, gang_job
from rrl.tests.support.manager.world import World

REPAIR_TIMEOUT_S = 300.0
"""Virtual time (s) within which a failure must be repaired."""


class RecordingDetectors(RrlDetectors):
    """rrl's detectors, which record each failure that they find."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.failures: dict[tuple[str, str], Finding] = {}
        """Failures by (detector, role); the role of a failure of a node is empty."""

    def findings(self, now: float) -> list[Finding]:
        found = super().findings(now)
        for one in found:
            if one.verdict is Verdict.FAIL:
                role = "" if one.incarnation is None else role_of(one.incarnation.replica)
                self.failures.setdefault((one.detector, role), one)
        return found


def decided_about(failure: Finding) -> list[Explanation]:
    """Play a small virtual run in which this failure is found; return the explained decisions about it.

    Asserts that every decision of the run is explained, and that a failure that needs a decision has one.
    """
    world = World(gang_job(2, 1, donors=True, spares=2), nodes=20).steady().warmed()
    placed = _placed(world, failure)
    before = len(world.events)
    world.happen(ev.FindingChanged(placed))
    world.play(lambda: world.over, timeout_s=REPAIR_TIMEOUT_S)
    explanations = [one for one in assert_explained(world.events) if one.seq > before]
    about = [one for one in explanations if placed in one.findings]
    if placed.incarnation is not None or excludes_node(placed):
        kinds = (Fence, RestartAll, Finish, Exclude)
        assert any(isinstance(one.action, kinds) for one in explanations), placed
        assert about or any(isinstance(one.action, Finish) for one in explanations), placed
    return about


def _placed(world: World, failure: Finding) -> Finding:
    """Return the failure, moved to a replica of its role or to a node of the virtual run."""
    node = world.node_of(ROLLOUTS[0])
    if failure.incarnation is None:
        return msgspec.structs.replace(failure, node=node if failure.node is not None else None, since=world.now)
    role = role_of(failure.incarnation.replica)
    ids = [id for id in world.state.replicas if role_of(id) == role]
    replica: ReplicaId = replica_id(AGENT, node) if role == AGENT else (ids or [ROLLOUTS[0]])[0]
    return msgspec.structs.replace(failure, incarnation=world.state.replica(replica).incarnation, since=world.now)
