"""The times at which planned and requested faults are due."""

from __future__ import annotations

import pytest

from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.launch import ExitReason
from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import InjectFault
from rrl.manager.model.state import Status
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World

R0, R1 = ROLLOUTS


def planned_order(world: World, fault: Fault) -> None:
    world.happen(ev.FaultRequested(fault, "ada", f"letter of {fault.id}"))


def performed(world: World) -> list[str]:
    return [action.fault.id for action in world.decided(InjectFault)]


def test_fault_requested_without_a_time_is_injected_once_its_target_exists() -> None:
    world = World(job())
    planned_order(world, Fault("i1", FaultKind.KILL, R0, by="ada"))
    world.play(lambda: world.state.replica(R0).status is Status.STARTING)
    assert performed(world) == []
    world.play(lambda: bool(performed(world)), timeout_s=60.0)
    (action,) = world.decided(InjectFault)
    assert (action.fault.id, action.incarnation) == ("i1", world.state.replica(R0).incarnation)
    assert action.why.evidence == ("fault i1 at now, requested by ada",)
    assert action.step == world.state.replica(R0).step
    world.steady()
    assert world.incarnations()[R0] == 2
    assert performed(world) == ["i1"]


def test_fault_with_a_time_is_injected_then_without_any_event() -> None:
    world = World(job(faults=[Fault("f0", FaultKind.KILL, R0, FaultTrigger(time=300.0))])).steady()
    since = world.state.running_since
    assert since is not None
    world.play(lambda: bool(performed(world)), timeout_s=1000.0)
    assert world.now == since + 300.0


def test_fault_with_a_phase_waits_for_its_target_to_enter_it() -> None:
    world = World(job(faults=[Fault("f0", FaultKind.KILL, TRAINER, FaultTrigger(phase="checkpoint"))])).steady()
    assert performed(world) == []
    world.happen(ev.PhaseEntered(world.state.replica(R0).incarnation, "checkpoint"))
    assert performed(world) == []
    world.happen(ev.PhaseEntered(world.state.replica(TRAINER).incarnation, "checkpoint"))
    assert performed(world) == ["f0"]


@pytest.mark.parametrize("target", [R0, "n3"])
def test_node_fault_hits_the_named_node_or_the_replicas_node(target: str) -> None:
    world = World(job()).steady()
    node = world.node_of(R0) if target == R0 else target
    planned_order(world, Fault("i1", FaultKind.CRASH, target))
    (action,) = world.decided(InjectFault)
    assert (action.node, action.step, action.incarnation) == (node, "", None)


@pytest.mark.parametrize(
    ("kind", "target"), [(FaultKind.KILL, "manager"), (FaultKind.DISK_FULL, ""), (FaultKind.OUTAGE, "")]
)
def test_manager_and_run_are_always_valid_targets(kind: FaultKind, target: str) -> None:
    world = World(job())
    planned_order(world, Fault("i1", kind, target, seconds=5.0))
    (action,) = world.decided(InjectFault)
    assert (action.node, action.step, action.incarnation) == ("", "", None)


def test_fault_by_signals_waits_for_the_agent_and_others_do_not() -> None:
    world = World(job()).steady()
    agent = ReplicaId(f"agent/{world.node_of(R0)}")
    incarnation = world.state.replica(agent).incarnation
    world.happen(ev.StepEnded(incarnation, world.state.replica(agent).step or "", None, 9, ExitReason.SIGNALED))
    planned_order(world, Fault("i0", FaultKind.KILL, R1))
    assert performed(world) == ["i0"]
    world = World(job()).steady()
    world.slow_to_stop = float("inf")
    world.kill(agent)
    assert world.state.replica(agent).status is not Status.JOINED
    planned_order(world, Fault("i1", FaultKind.KILL, R0))
    planned_order(world, Fault("i2", FaultKind.EXIT, R0, amount=3))
    assert performed(world) == ["i2"]
    world.play(timeout_s=60.0)
    assert performed(world) == ["i2", "i1"]


def test_standby_process_can_be_a_target() -> None:
    world = World(gang_job(1, 1)).steady().warmed()
    standby = ReplicaId(f"standby/{world.node_of(TRAINER)}")
    planned_order(world, Fault("i1", FaultKind.KILL, standby, FaultTrigger(step=1), by="ada"))
    world.wait(30.0)
    assert performed(world) == ["i1"]
    assert (world.state.replica(standby).incarnation_number, world.incarnations()[TRAINER]) == (2, 1)


def test_thousand_pending_faults_are_not_compared_with_all_triggered_ones() -> None:
    """The state has a set of the ids of triggered faults, so that no pending fault is compared with each of them."""
    faults = [Fault(f"r0.{i}", FaultKind.KILL, "manager", FaultTrigger(time=float(i))) for i in range(1000)]
    world = World(job(faults=faults)).steady()
    world.play(lambda: len(performed(world)) > 5, timeout_s=20.0)
    assert performed(world) == sorted(performed(world), key=lambda id: int(id.partition(".")[2]))
