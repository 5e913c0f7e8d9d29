from __future__ import annotations

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind, FaultTrigger, InvalidFault
from rrl.core.run_spec import RunSpec
from rrl.core.types import STANDBY_ROLE, Outcome
from rrl.manager.intake.user_commands import Command, rejection, to_events
from rrl.manager.model import events as ev
from rrl.manager.model.state import State
from rrl.tests.support.cli.status_scenes import pools
from rrl.tests.support.manager.jobs import ROLLOUTS, gang_job, job, with_guests, with_pool
from rrl.tests.support.manager.world import World

R0, R1 = ROLLOUTS
KILL = Fault("i1", FaultKind.KILL, R0)


def text_of(wrong: InvalidFault | None) -> str:
    return wrong.text if wrong is not None else ""


def allowing(**changes: object) -> RunSpec:
    return msgspec.structs.replace(job(), faults_allowed=True, **changes)


def running() -> State:
    return World(allowing()).steady().state


def test_fault_request_is_recorded_with_its_user() -> None:
    recorded = to_events(Command("inject", "ada", "c1", KILL), running())
    assert recorded == [ev.FaultRequested(msgspec.structs.replace(KILL, by="ada"), "ada", "c1")]


def test_rejected_fault_is_recorded_with_the_reason_and_never_injected() -> None:
    world = World(job()).steady()
    ordered, injected = to_events(Command("inject", "ada", "c1", KILL), world.state)
    assert isinstance(injected, ev.FaultInjected)
    assert not injected.ok
    assert (
        injected.detail
        == "rejected: the job spec of this run allows no faults on demand; they need allow = true in [faults]"
    )
    world.record(ordered)
    world.record(injected)
    assert (world.state.requested_faults, world.state.handled_commands) == ((), ("c1",))
    world.play(timeout_s=60.0)
    assert world.incarnations()[R0] == 1


def test_fault_requested_twice_is_recorded_once() -> None:
    state = World(allowing()).steady()
    for event in to_events(Command("inject", "ada", "c1", KILL), state.state):
        state.record(event)
    assert to_events(Command("inject", "ada", "c2", KILL), state.state) == [ev.CommandReceived("inject", "ada", "c2")]


def test_other_commands_request_no_fault() -> None:
    assert to_events(Command("cancel", "ada", "c1"), running()) == [ev.CommandReceived("cancel", "ada", "c1")]


def test_resize_is_recorded_with_its_pool_and_number() -> None:
    for replicas in (6, 0, None):
        (event,) = to_events(Command("resize", "ada", "c1", target="burst", replicas=replicas), running())
        assert event == ev.CommandReceived("resize", "ada", "c1", "burst", replicas=replicas)


def test_fault_hits_only_a_replica_that_an_elastic_pool_has() -> None:
    state = pools().recorded()
    spec = msgspec.structs.replace(state.job, faults_allowed=True)
    assert rejection(Fault("i", FaultKind.KILL, "burst/8"), spec, state) is None
    assert text_of(rejection(Fault("i", FaultKind.KILL, "burst/9"), spec, state)) == "burst has no replica burst/9 now"
    never = text_of(rejection(Fault("i", FaultKind.KILL, "burst/12"), spec, state))
    assert never == 'no replica "burst/12"; role burst has 12, the last is "burst/11"'


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault("i", FaultKind.KILL, "judge/0"), 'no role "judge"; there are trajectories, reward, trainer, rollout'),
        (Fault("i", FaultKind.KILL, "rollout/7"), 'no replica "rollout/7"; role rollout has 2, the last is'),
        (Fault("i", FaultKind.KILL, "rollout"), '"rollout" is not a valid replica; a replica is written "rollout/0"'),
        (Fault("i", FaultKind.KILL), '"" is not a valid replica'),
        (Fault("i", FaultKind.CRASH, "n77"), 'no node "n77" in this run; it has n1, n2, n3, n4'),
        (Fault("i", FaultKind.CRASH), 'no node ""'),
        (Fault("i", FaultKind.KILL, "agent/n77"), 'no node "n77" in this run'),
        (Fault("i", FaultKind.EXIT, "agent/n1"), "an agent can only be the target of kill, freeze, slow, not of exit"),
        (Fault("i", FaultKind.FREEZE, "manager"), "the manager can only be the target of kill, not of freeze"),
        (Fault("i", FaultKind.CUT, R0), "cut needs seconds"),
        (Fault("i", FaultKind.KILL, R0, seconds=3.0), "kill is permanent: it takes no seconds"),
        (Fault("i", FaultKind.KILL, R0, amount=3.0), "kill takes no amount"),
        (Fault("i", FaultKind.SLOW, R0), "slow needs amount"),
        (Fault("i", FaultKind.DISK_FULL, R0, seconds=3.0), "disk_full takes no target"),
        (Fault("i", FaultKind.CRASH, R0, FaultTrigger(phase="train")), "at phase=train needs a replica as target"),
    ],
)
def test_invalid_fault_target_is_rejected_with_the_valid_ones(fault: Fault, why: str) -> None:
    state = running()
    wrong = rejection(fault, state.job, state)
    assert wrong is not None
    assert wrong.text.startswith(why)


@pytest.mark.parametrize(
    "fault",
    [
        KILL,
        Fault("i", FaultKind.CRASH, "n1"),
        Fault("i", FaultKind.CRASH, R0),
        Fault("i", FaultKind.KILL, "agent/n1"),
        Fault("i", FaultKind.KILL, "manager"),
        Fault("i", FaultKind.DISK_FULL, seconds=1.0),
        Fault("i", FaultKind.EXIT, R1, FaultTrigger(phase="generate"), amount=3.0),
        Fault("i", FaultKind.EXIT, R1),
    ],
)
def test_valid_fault_is_accepted(fault: Fault) -> None:
    state = running()
    assert rejection(fault, state.job, state) is None


def test_ranks_and_running_standbys_are_valid_fault_targets() -> None:
    state = World(msgspec.structs.replace(gang_job(), faults_allowed=True)).steady().warmed().state
    standbys = sorted(one.id for one in state.replicas.values() if one.role == STANDBY_ROLE and one.is_current)
    for target in ("trainer/0.3", standbys[0]):
        assert rejection(Fault("i", FaultKind.KILL, target), state.job, state) is None
    why = text_of(rejection(Fault("i", FaultKind.KILL, "standby/n77"), state.job, state))
    assert why == f'no standby process "standby/n77" in this run; there are {", ".join(standbys)}'
    cold = World(allowing()).state
    assert text_of(rejection(Fault("i", FaultKind.KILL, standbys[0]), cold.job, cold)).endswith("there is none now")


def test_program_without_the_worker_api_accepts_only_faults_by_signals() -> None:
    roles = tuple(msgspec.structs.replace(role, watch="activity") for role in job().roles)
    state = World(allowing(roles=roles)).steady().state
    assert rejection(KILL, state.job, state) is None
    why = text_of(rejection(Fault("i", FaultKind.EXIT, R0, amount=1.0), state.job, state))
    assert why == "exit needs the worker API, but rollout/0 does not use it"


def test_ending_or_ended_run_rejects_faults() -> None:
    world = World(allowing()).steady()
    world.cancel()
    assert text_of(rejection(KILL, world.state.job, world.state)) == "the run is ending (cancelled)"
    world.record(ev.RunEnded(Outcome.CANCELLED, "asked"))
    assert text_of(rejection(KILL, world.state.job, world.state)) == "the run has ended already: cancelled"


def test_replica_that_an_elastic_pool_does_not_have_now_is_no_fault_target() -> None:
    state = World(with_pool(allowing(), 1, 3)).state
    assert rejection(Fault("i", FaultKind.KILL, "burst/0"), state.job, state) is None
    wrong = rejection(Fault("i", FaultKind.KILL, "burst/2"), state.job, state)
    assert text_of(wrong) == "burst has no replica burst/2 now"
    assert "the last is" in text_of(rejection(Fault("i", FaultKind.KILL, "burst/3"), state.job, state))


def test_resize_is_recorded_with_its_number() -> None:
    state = World(with_pool(job(), 1, 3)).state
    for replicas in (2, None):
        (event,) = to_events(Command("resize", "ada", "c1", target="burst", replicas=replicas), state)
        assert event == ev.CommandReceived("resize", "ada", "c1", "burst", replicas=replicas)


def test_running_guests_are_targets_of_faults_by_signals() -> None:
    job = msgspec.structs.replace(with_guests(gang_job(2, 1)), faults_allowed=True)
    state = World(job).steady().wait(10.0).state
    for kind, amount in ((FaultKind.KILL, 0.0), (FaultKind.FREEZE, 0.0), (FaultKind.SLOW, 0.5)):
        assert rejection(Fault("i", kind, "guest/n2", amount=amount), state.job, state) is None
    why = text_of(rejection(Fault("i", FaultKind.EXCEPTION, "guest/n2"), state.job, state))
    assert why == "a guest can only be the target of kill, freeze, slow, not of exception"
    why = text_of(rejection(Fault("i", FaultKind.KILL, "guest/n7"), state.job, state))
    assert why == 'no guest "guest/n7" in this run; there are guest/n2, guest/n3'
