"""The promotion of a standby process is sent once it is durable, and repeated if it was lost.

The process is accepted under its old and its new name.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, Refused
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, ExitRecord, read_launch, tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, Outcome, ReplicaId, Resources
from rrl.manager.execute.launch import write_launch
from rrl.manager.intake.standby_promotion import link_log
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, InjectFault, Launch, Request, Rung, Why
from rrl.manager.model.queries import owner_of, step_alias
from rrl.manager.model.state import Allocation, State, Status
from rrl.tests.support.manager.handling import Handling
from rrl.tests.support.manager.jobs import NODE, RUN, TRAINER, gang_job
from rrl.transport import messages as msg

N1 = NodeName("n1")
WHY = Why(("because",))
STANDBY_PROCESS = Incarnation(ReplicaId("standby/n1"), 3)
OLD, MEMBER = Incarnation(TRAINER, 1), Incarnation(TRAINER, 2)
STEP = tag_of(RUN, STANDBY_PROCESS)
AGENT = Incarnation(ReplicaId("agent/n1"), 1)
STANDS_BY: tuple[ev.Event, ...] = (
    ev.Intended(Request(AllocationRequest("pool", 1, NODE, 60.0), WHY)),
    ev.AllocationChanged("pool", AllocationStatus(AllocationState.RUNNING, "7", (N1,))),
    ev.Intended(Launch(AGENT, tag_of(RUN, AGENT), "pool", N1, WHY)),
    ev.Intended(Launch(OLD, tag_of(RUN, OLD), "pool", N1, WHY)),
    ev.Intended(Launch(STANDBY_PROCESS, STEP, "pool", N1, WHY)),
)
PROMOTION = Launch(MEMBER, STEP, "pool", N1, WHY, standby=STANDBY_PROCESS)
WANTED = msg.AdmissionRequest(STANDBY_PROCESS, STEP, N1, 41)
HELLO = msg.Hello(STANDBY_PROCESS, STEP, N1, "host", 42, "standby")
AS_MEMBER = msgspec.structs.replace(HELLO, incarnation=MEMBER, phase="starting")
PROMOTE = msg.Promote(STANDBY_PROCESS, MEMBER, STEP)


def promoted(handling: Handling) -> Handling:
    handling.fold(ev.Decided(Fence(OLD, Rung.IN_PLACE, WHY)))
    handling.fold(ev.Intended(PROMOTION))
    return handling


@pytest.fixture
def standing(tmp_path: Path) -> Handling:
    """Return a handler with a ready standby process."""
    hearing = Handling(tmp_path, *STANDS_BY)
    hearing.handle(WANTED, peer=b"first")
    hearing.handle(HELLO, peer=b"worker")
    return hearing


def state_of(handling: Handling) -> State:
    assert handling.state is not None
    return handling.state


# ── sending ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_standby_is_welcomed_and_promoted(standing: Handling) -> None:
    assert state_of(standing).replica(STANDBY_PROCESS.replica).phase == "standby"
    promoted(standing).sent.clear()
    asyncio.run(standing.handler.standby_promoter.promote(PROMOTION))
    assert standing.sent == [PROMOTE]
    (welcome,) = standing.handle(AS_MEMBER, peer=b"worker")
    assert isinstance(welcome, msg.Welcome)
    assert welcome.incarnation == MEMBER
    member = state_of(standing).replica(TRAINER)
    assert (member.status, member.step, member.pid) == (Status.JOINED, STEP, 42)
    assert STEP not in state_of(standing).intents, "the launch is still open after the Hello of the member"


def test_message_sent_as_standby_before_its_promotion_does_not_fence_it(standing: Handling) -> None:
    promoted(standing)
    assert (
        standing.handle(
            msg.Heartbeat(STANDBY_PROCESS, "standby", 0),
            msg.PhaseEntered(STANDBY_PROCESS, "standby", 0),
            peer=b"worker",
        )
        == []
    )


@pytest.mark.parametrize("managers", [1, 2])
def test_promoted_standby_that_sends_hello_is_sent_its_promotion_again(standing: Handling, managers: int) -> None:
    promoted(standing)
    if managers == 2:
        standing.next_manager()
    assert standing.handle(HELLO, peer=b"again") == [PROMOTE]
    assert STEP in state_of(standing).intents


def test_unconnected_standby_cannot_be_promoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.manager.intake.standby_promotion.RECONNECT_TIMEOUT_S", 0.05)
    hearing = promoted(Handling(tmp_path, *STANDS_BY))
    with pytest.raises(Refused, match="standby/n1#3 on n1 is not connected"):
        asyncio.run(hearing.handler.standby_promoter.promote(PROMOTION))
    assert hearing.sent == []


async def test_new_manager_waits_for_the_standby_to_connect(tmp_path: Path) -> None:
    hearing = promoted(Handling(tmp_path, *STANDS_BY))

    adoption = asyncio.create_task(hearing.handler.standby_promoter.promote(PROMOTION))
    await asyncio.sleep(0)
    await hearing.handle_now(HELLO, peer=b"worker")
    await adoption

    assert set(map(type, hearing.sent)) == {msg.Promote}


def test_standby_of_a_fenced_member_is_fenced_too(standing: Handling) -> None:
    promoted(standing)
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    (fenced,) = standing.handle(HELLO, peer=b"worker")
    assert isinstance(fenced, msg.Fenced)
    assert standing.sent == [fenced]


def test_process_of_another_step_is_not_accepted_as_the_incarnation(standing: Handling) -> None:
    """The manager that promoted the process had no durable intent, and the member was launched elsewhere since then."""
    standing.fold(ev.Decided(Fence(OLD, Rung.IN_PLACE, WHY)))
    standing.fold(ev.Intended(Launch(MEMBER, tag_of(RUN, MEMBER), "pool", N1, WHY)))
    (fenced,) = standing.handle(AS_MEMBER, peer=b"worker")
    assert isinstance(fenced, msg.Fenced)
    assert state_of(standing).replica(TRAINER).status is Status.LAUNCHING


# ── messages under the standby id ──────────────────────────────────────────────────────────────────────────────────
def test_promoted_step_is_admitted_by_the_next_manager_under_its_standby_id(standing: Handling) -> None:
    promoted(standing).next_manager()
    assert standing.handle(WANTED, peer=b"first") == [msg.Admitted(STEP, True)]
    assert standing.context.connections.steps == {STEP: b"first"}
    assert STEP in state_of(standing).intents, "the promotion was settled by a request for admission alone"


def test_promoted_step_is_not_admitted_once_its_member_is_fenced(standing: Handling) -> None:
    promoted(standing)
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    (answer,) = standing.handle(WANTED, peer=b"first")
    assert not answer.ok


RECORD = ExitRecord(STEP, STANDBY_PROCESS, N1, None, 9, ExitReason.SIGNALED, 0.0)


@pytest.mark.parametrize(
    "end", [RECORD, msg.StepVanished(STANDBY_PROCESS, STEP, N1), None], ids=lambda end: type(end).__name__
)
@pytest.mark.parametrize("joined", [True, False])
def test_end_of_a_promoted_step_is_the_end_of_its_member(standing: Handling, end: object, joined: bool) -> None:
    promoted(standing)
    if joined:
        standing.handle(AS_MEMBER, peer=b"worker")
    if end is None:  # only the file reports it
        standing.run.exit_file(STEP).write_bytes(msgspec.json.encode(RECORD))
        asyncio.run(standing.handler.read_exit_records())
    else:
        standing.handle(end, peer=b"first")
    ended = standing.events[-1]
    assert isinstance(ended, ev.StepEnded)
    assert (ended.incarnation, ended.step) == (MEMBER, STEP)
    assert state_of(standing).replica(TRAINER).step is None
    assert state_of(standing).replica(STANDBY_PROCESS.replica).status is Status.WANTED
    view = standing.monitor.replicas[TRAINER]
    assert view.incarnation == MEMBER
    assert view.ended


def test_recorded_end_is_restored_under_the_standbys_tag(standing: Handling) -> None:
    promoted(standing)
    record = ExitRecord(STEP, STANDBY_PROCESS, N1, 7, None, ExitReason.EXITED, 0.0)
    standing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    standing.handler.restore_step_end(MEMBER)
    exit = standing.monitor.replicas[TRAINER].exit
    assert exit is not None
    assert exit.code == 7


def test_promoted_step_is_stopped_by_its_tag_at_the_runs_end(standing: Handling) -> None:
    promoted(standing)
    standing.handle(AS_MEMBER, peer=b"worker")
    standing.fold(ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    standing.next_manager()
    admitted, stop = standing.handle(WANTED, peer=b"first")
    assert admitted.ok
    assert (stop.incarnation, stop.tag) == (MEMBER, STEP)


def test_fault_in_a_promoted_step_is_attributed_to_its_member(standing: Handling) -> None:
    fault = Fault("f1", FaultKind.KILL, TRAINER)
    standing.fold(ev.FaultRequested(fault, "ada", "1"))
    promoted(standing).fold(ev.Intended(InjectFault(fault, STEP, N1, WHY, MEMBER)))
    standing.handle(msg.Injected(fault, True, "killed", STANDBY_PROCESS, N1), peer=b"agent")
    event = standing.events[-1]
    assert isinstance(event, ev.FaultInjected)
    assert event.incarnation == MEMBER


# ── fences ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_fence_notifies_worker_and_first_process_or_else_the_agent(standing: Handling) -> None:
    promoted(standing)
    standing.handle(AS_MEMBER, peer=b"worker")
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    fenced = msg.Fenced(MEMBER, "why", STEP)
    standing.context.connections.steps[tag_of(RUN, AGENT)] = b"agent"
    for peers, steps in ((((b"worker", ""), (b"first", STEP))), {}), (((b"agent", STEP),), {STEP: None}):
        standing.sent_to.clear()
        if steps:
            del standing.context.connections.steps[STEP]
        asyncio.run(standing.handler.fence(MEMBER, "why"))
        assert [(peer, message.tag) for peer, message in standing.sent_to] == list(peers)
        assert all(msgspec.structs.replace(message, tag=STEP) == fenced for _, message in standing.sent_to)


# ── GPUs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Handling:
    """Return a handler with a standby process that sees all four GPUs of its node.

    The old trainer and a rollout have one GPU each.
    """
    job = gang_job(2, 2)
    roles = tuple(
        msgspec.structs.replace(role, per_member=Resources(1, 1)) if role.name in ("trainer", "rollout") else role
        for role in job.roles
    )
    rollout = Incarnation(ReplicaId("rollout/0"), 1)
    launched = ev.Intended(Launch(rollout, tag_of(RUN, rollout), "pool", N1, WHY))
    hearing = Handling(tmp_path, *STANDS_BY, launched, job=msgspec.structs.replace(job, roles=roles))
    for incarnation, gpu in ((OLD, "GPU-a"), (rollout, "GPU-b")):
        hello = msg.Hello(incarnation, tag_of(RUN, incarnation), N1, "host", 50, "starting", gpus=(gpu,))
        hearing.handle(hello, peer=str(incarnation).encode())
    visible = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    hearing.handle(msgspec.structs.replace(HELLO, gpus=visible), peer=b"worker")
    assert not state_of(hearing).findings, "a GPU of a role counts as taken by the standby process"
    return hearing


def test_promoted_standby_gets_a_gpu_that_no_other_incarnation_has(with_gpus: Handling) -> None:
    asyncio.run(promoted(with_gpus).handler.standby_promoter.promote(PROMOTION))
    (promotion,) = [message for message in with_gpus.sent if isinstance(message, msg.Promote)]
    assert promotion.gpus == ("GPU-a",), "the promoted process did not get the GPU of its fenced predecessor"
    with_gpus.handle(msgspec.structs.replace(AS_MEMBER, gpus=promotion.gpus), peer=b"worker")
    assert not state_of(with_gpus).findings


def test_two_promotions_at_once_get_different_gpus_and_keep_them(with_gpus: Handling) -> None:
    other, second = Incarnation(ReplicaId("standby/n1:1"), 1), Incarnation(ReplicaId("trainer/0.1"), 2)
    step = tag_of(RUN, other)
    with_gpus.fold(ev.Intended(Launch(other, step, "pool", N1, WHY)))
    hello = msgspec.structs.replace(
        HELLO, incarnation=other, tag=step, pid=43, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    )
    with_gpus.handle(hello, peer=b"other")
    promoted(with_gpus).fold(ev.Intended(Launch(second, step, "pool", N1, WHY, standby=other)))
    for _ in range(2):
        assert [promotion.gpus for promotion in with_gpus.handle(HELLO_WITH_GPUS, peer=b"worker")] == [("GPU-a",)]
        assert [promotion.gpus for promotion in with_gpus.handle(hello, peer=b"other")] == [("GPU-c",)]


@pytest.fixture
def restarted(with_gpus: Handling) -> Handling:
    """Return the handler of the next manager, to which the rollout with GPU-b has not reported yet."""
    promoted(with_gpus).next_manager()
    return with_gpus


def rollout_hello() -> msg.Hello:
    rollout = Incarnation(ReplicaId("rollout/0"), 1)
    return msg.Hello(rollout, tag_of(RUN, rollout), N1, "host", 50, "starting", gpus=("GPU-b",))


def test_next_manager_postpones_a_promotion_until_gpus_in_use_are_reported(restarted: Handling) -> None:
    visible = msgspec.structs.replace(HELLO, gpus=("GPU-b", "GPU-c"))
    assert restarted.handle(visible, peer=b"worker") == []
    promotion, welcome = restarted.handle(rollout_hello(), peer=b"rollout")
    assert (promotion.incarnation, promotion.gpus) == (MEMBER, ("GPU-c",))
    assert isinstance(welcome, msg.Welcome)
    assert [repeated.gpus for repeated in restarted.handle(visible, peer=b"worker")] == [("GPU-c",)]
    assert not state_of(restarted).findings


def test_two_standbys_with_postponed_promotions_get_different_gpus(restarted: Handling) -> None:
    other, second = Incarnation(ReplicaId("standby/n1:1"), 1), Incarnation(ReplicaId("trainer/0.1"), 2)
    step = tag_of(RUN, other)
    restarted.fold(ev.Intended(Launch(other, step, "pool", N1, WHY)))
    restarted.fold(ev.Intended(Launch(second, step, "pool", N1, WHY, standby=other)))
    restarted.handle(rollout_hello(), peer=b"rollout")
    assert restarted.handle(HELLO_WITH_GPUS, peer=b"worker") == [], (
        "a GPU was assigned before the other promoted process has reported"
    )
    hello = msgspec.structs.replace(HELLO_WITH_GPUS, incarnation=other, tag=step, pid=43)
    assert sorted(promotion.gpus for promotion in restarted.handle(hello, peer=b"other")) == [("GPU-a",), ("GPU-c",)]


def test_promotion_is_refused_without_a_charge_if_gpus_stay_unreported(
    with_gpus: Handling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.manager.intake.standby_promotion.RECONNECT_TIMEOUT_S", 0.05)
    starting = Incarnation(ReplicaId("trainer/0.1"), 2)
    promoted(with_gpus).fold(ev.Intended(Launch(starting, tag_of(RUN, starting), "pool", N1, WHY)))
    text = "standby/n1#3 is not used: trainer/0.1#2 on n1 has not reported its GPUs"
    with pytest.raises(Refused, match=text) as refused:
        asyncio.run(with_gpus.handler.standby_promoter.promote(PROMOTION))
    failures = state_of(with_gpus).replica(TRAINER).failures
    with_gpus.fold(ev.IntentSettled(PROMOTION.tag, False, text, reason=refused.value.reason))
    replica = state_of(with_gpus).replica(TRAINER)
    assert (replica.status, replica.preferred_node, replica.failures) == (Status.WANTED, N1, failures)


HELLO_WITH_GPUS = msgspec.structs.replace(HELLO, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))


# ── log of a promoted process ──────────────────────────────────────────────────────────────────────────────────────
def test_log_of_a_promoted_standby_is_linked_to_its_member(standing: Handling) -> None:
    asyncio.run(promoted(standing).handler.standby_promoter.promote(PROMOTION))
    link = standing.run.log_file(tag_of(RUN, MEMBER))
    assert os.readlink(link) == f"{STEP}.log"
    link_log(standing.run, MEMBER, STANDBY_PROCESS)  # a repeated promotion links again
    assert os.readlink(link) == f"{STEP}.log"
    assert step_alias(state_of(standing), MEMBER) == STANDBY_PROCESS
    assert step_alias(state_of(standing), OLD) == OLD
    owner = owner_of(state_of(standing), STEP)
    assert owner is not None
    assert owner.id == TRAINER


# ── launches ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_standby_is_launched_with_its_role_overlapping_other_steps(tmp_path: Path) -> None:
    job = gang_job(2, 2)
    each = Resources(2, 1, 2**30)
    roles = tuple(
        msgspec.structs.replace(one, per_member=each, env={"A": "1"}) if one.warm else one for one in job.roles
    )
    job = msgspec.structs.replace(job, roles=roles, cluster="slurm")
    held = Allocation("pool", AllocationRequest("pool", 1, Resources(8, 4, 2**33), 60.0), 0.0)
    state = State(RUN, job, allocations={"pool": held})
    run = RunDir(tmp_path / RUN)
    run.create()
    step = write_launch(run, state, Launch(STANDBY_PROCESS, STEP, "pool", N1, WHY), "/job")
    launch = read_launch(step.launch_file)
    assert (launch.incarnation, launch.tag, launch.standby, launch.watch) == (STANDBY_PROCESS, STEP, True, "api")
    assert (launch.argv, launch.env["A"], launch.env["OMP_NUM_THREADS"]) == (("run", "trainer"), "1", "2")
    assert (step.overlap, step.agent) == (True, False)
    assert step.resources == Resources(8, 4, 2**30), (
        "the step of a standby trainer does not have all CPUs and GPUs of its node"
    )
    trainer = write_launch(run, state, Launch(OLD, tag_of(RUN, OLD), "pool", N1, WHY), "/job")
    assert (trainer.overlap, trainer.resources) == (False, each)
    assert not read_launch(trainer.launch_file).standby
