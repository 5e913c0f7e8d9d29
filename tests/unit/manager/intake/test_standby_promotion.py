"""Shadows and what they become: told once it is durable, told again, and heard under either name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, ExitRecord, read_launch, tag_of
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import Resources
from rrl.core.types import Life, NodeName, Outcome, ReplicaId
from rrl.manager.cluster.base import AllocationSeen, AllocationState, Ask, Refused
from rrl.manager.execute.launch import write_launch
from rrl.manager.intake.standby_promotion import mark_log
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, Launch, Perform, Request, Rung, Why
from rrl.manager.model.queries import named_by, owner_of
from rrl.manager.model.state import Allocation, State, Status
from rrl.tests.support.manager.jobs import NODE, RUN, TRAINER, gang_job
from rrl.tests.unit.manager.intake import test_message_handler as test_hearing
from rrl.tests.unit.manager.intake.test_message_handler import Hearing
from rrl.transport import messages as msg

N1 = NodeName("n1")
WHY = Why(("because",))
SHADOW = Life(ReplicaId("shadow/n1"), 3)
OLD, MEMBER = Life(TRAINER, 1), Life(TRAINER, 2)
STEP = tag_of(RUN, SHADOW)
AGENT = Life(ReplicaId("agent/n1"), 1)
STANDS_BY: tuple[ev.Event, ...] = (
    ev.Intended(Request(Ask("pool", 1, NODE, 60.0), WHY)),
    ev.AllocationChanged("pool", AllocationSeen(AllocationState.RUNNING, "7", (N1,))),
    ev.Intended(Launch(AGENT, tag_of(RUN, AGENT), "pool", N1, WHY)),
    ev.Intended(Launch(OLD, tag_of(RUN, OLD), "pool", N1, WHY)),
    ev.Intended(Launch(SHADOW, STEP, "pool", N1, WHY)),
)
ADOPTION = Launch(MEMBER, STEP, "pool", N1, WHY, shadow=SHADOW)
WANTED = msg.Wanted(SHADOW, STEP, N1, 41)
HELLO = msg.Hello(SHADOW, STEP, N1, "host", 42, "standby")
AS_MEMBER = msgspec.structs.replace(HELLO, life=MEMBER, phase="starting")
BECOME = msg.Become(SHADOW, MEMBER, STEP)


def adopted(hearing: Hearing) -> Hearing:
    hearing.fold(ev.Decided(Fence(OLD, Rung.IN_PLACE, WHY)))
    hearing.fold(ev.Intended(ADOPTION))
    return hearing


@pytest.fixture
def standing(tmp_path: Path) -> Hearing:
    """A shadow that stands by."""
    hearing = Hearing(tmp_path, *STANDS_BY)
    hearing.hear(WANTED, peer=b"first")
    hearing.hear(HELLO, peer=b"worker")
    return hearing


def state_of(hearing: Hearing) -> State:
    assert hearing.state is not None
    return hearing.state


# ── told ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_shadow_is_welcome_stands_by_and_is_told_what_it_becomes(standing: Hearing) -> None:
    assert state_of(standing).replica(SHADOW.replica).phase == "standby"
    adopted(standing).sent.clear()
    asyncio.run(standing.ear.adoptions.adopt(ADOPTION))
    assert standing.sent == [BECOME]
    (welcome,) = standing.hear(AS_MEMBER, peer=b"worker")
    assert isinstance(welcome, msg.Welcome)
    assert welcome.life == MEMBER
    member = state_of(standing).replica(TRAINER)
    assert (member.status, member.step, member.pid) == (Status.JOINED, STEP, 42)
    assert STEP not in state_of(standing).intents, "heard as what it became, its launch is settled"


def test_what_it_says_as_a_shadow_before_it_heard_is_no_reason_to_fence_it(standing: Hearing) -> None:
    adopted(standing)
    assert standing.hear(msg.Beat(SHADOW, "standby", 0), msg.Entered(SHADOW, "standby", 0), peer=b"worker") == []


@pytest.mark.parametrize("managers", [1, 2])
def test_a_shadow_that_says_hello_although_it_was_adopted_is_told_again(standing: Hearing, managers: int) -> None:
    adopted(standing)
    if managers == 2:
        standing.next_manager()
    assert standing.hear(HELLO, peer=b"again") == [BECOME]
    assert STEP in state_of(standing).intents


def test_a_shadow_that_is_not_connected_cannot_become_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.manager.intake.standby_promotion.RECONNECT", 0.05)
    hearing = adopted(Hearing(tmp_path, *STANDS_BY))
    with pytest.raises(Refused, match="shadow/n1#3 on n1 is not connected"):
        asyncio.run(hearing.ear.adoptions.adopt(ADOPTION))
    assert hearing.sent == []


def test_a_manager_that_has_just_begun_waits_for_the_shadow_to_dial_it(tmp_path: Path) -> None:
    hearing = adopted(Hearing(tmp_path, *STANDS_BY))

    async def story() -> None:
        adoption = asyncio.create_task(hearing.ear.adoptions.adopt(ADOPTION))
        await asyncio.sleep(0)
        await hearing.hear_now(HELLO, peer=b"worker")
        await adoption

    asyncio.run(story())
    assert set(map(type, hearing.sent)) == {msg.Become}


def test_a_shadow_whose_member_was_fenced_meanwhile_is_fenced_too(standing: Hearing) -> None:
    adopted(standing)
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    (fenced,) = standing.hear(HELLO, peer=b"worker")
    assert isinstance(fenced, msg.Fenced)
    assert standing.sent == [fenced]


def test_a_process_of_another_step_is_not_taken_for_a_life(standing: Hearing) -> None:
    """One that was told by a manager whose word did not last, and the life was launched elsewhere since."""
    standing.fold(ev.Decided(Fence(OLD, Rung.IN_PLACE, WHY)))
    standing.fold(ev.Intended(Launch(MEMBER, tag_of(RUN, MEMBER), "pool", N1, WHY)))
    (fenced,) = standing.hear(AS_MEMBER, peer=b"worker")
    assert isinstance(fenced, msg.Fenced)
    assert state_of(standing).replica(TRAINER).status is Status.LAUNCHING


# ── heard under the name of the shadow ─────────────────────────────────────────────────────────────────────────────
def test_its_first_process_asks_the_next_manager_as_the_shadow_and_is_admitted(standing: Hearing) -> None:
    adopted(standing).next_manager()
    assert standing.hear(WANTED, peer=b"first") == [msg.Admitted(STEP, True)]
    assert standing.steps == {STEP: b"first"}
    assert STEP in state_of(standing).intents, "that it is there does not mean that it has become something"


def test_it_is_not_wanted_any_more_once_its_member_is_fenced(standing: Hearing) -> None:
    adopted(standing)
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    (answer,) = standing.hear(WANTED, peer=b"first")
    assert not answer.ok


ENDS = (
    msg.StepExit(SHADOW, STEP, None, 9, ExitReason.SIGNALED),
    msg.Gone(SHADOW, STEP, N1),
    ExitRecord(STEP, SHADOW, N1, None, 9, ExitReason.SIGNALED, 0.0),
)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
@pytest.mark.parametrize("joined", [True, False])
def test_its_end_is_the_end_of_what_it_became(standing: Hearing, end: object, joined: bool) -> None:
    adopted(standing)
    if joined:
        standing.hear(AS_MEMBER, peer=b"worker")
    if isinstance(end, ExitRecord):
        standing.run.exit_file(STEP).write_bytes(msgspec.json.encode(end))
        asyncio.run(standing.ear.exit_records())
    else:
        standing.hear(end, peer=b"first")
    ended = standing.events[-1]
    assert isinstance(ended, ev.StepEnded)
    assert (ended.life, ended.step) == (MEMBER, STEP)
    assert state_of(standing).replica(TRAINER).step is None
    assert state_of(standing).replica(SHADOW.replica).status is Status.WANTED
    seen = standing.watch.replicas[TRAINER]
    assert seen.life == MEMBER
    assert seen.ended


def test_an_end_that_an_earlier_manager_recorded_is_read_under_the_shadows_tag(standing: Hearing) -> None:
    adopted(standing)
    record = ExitRecord(STEP, SHADOW, N1, 7, None, ExitReason.EXITED, 0.0)
    standing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    standing.ear.ended_before(MEMBER)
    exit = standing.watch.replicas[TRAINER].exit
    assert exit is not None
    assert exit.code == 7


def test_when_the_run_ends_its_first_process_is_asked_to_leave_by_its_tag(standing: Hearing) -> None:
    adopted(standing)
    standing.hear(AS_MEMBER, peer=b"worker")
    standing.fold(ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    standing.next_manager()
    admitted, stop = standing.hear(WANTED, peer=b"first")
    assert admitted.ok
    assert (stop.life, stop.tag) == (MEMBER, STEP)


def test_a_fault_that_hits_its_step_is_its_own(standing: Hearing) -> None:
    fault = Fault("f1", FaultKind.KILL, TRAINER)
    standing.fold(ev.Ordered(fault, "ada", "1"))
    adopted(standing).fold(ev.Intended(Perform(fault, STEP, N1, WHY, MEMBER)))
    standing.hear(msg.Injected(fault, True, "killed", SHADOW, N1), peer=b"agent")
    told = standing.events[-1]
    assert isinstance(told, ev.FaultInjected)
    assert told.life == MEMBER


# ── fenced ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_fenced_its_worker_and_its_first_process_are_told_and_else_its_agent(standing: Hearing) -> None:
    adopted(standing)
    standing.hear(AS_MEMBER, peer=b"worker")
    standing.fold(ev.Decided(Fence(MEMBER, Rung.IN_PLACE, WHY)))
    told = msg.Fenced(MEMBER, "why", STEP)
    standing.steps[tag_of(RUN, AGENT)] = b"agent"
    for peers, steps in ((((b"worker", ""), (b"first", STEP))), {}), (((b"agent", STEP),), {STEP: None}):
        standing.sent_to.clear()
        if steps:
            del standing.steps[STEP]
        asyncio.run(standing.ear.fence(MEMBER, "why"))
        assert [(peer, message.tag) for peer, message in standing.sent_to] == list(peers)
        assert all(msgspec.structs.replace(message, tag=STEP) == told for _, message in standing.sent_to)


# ── GPUs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hearing:
    """The old trainer and a rollout have one GPU each; the shadow sees all four of the node."""
    job = gang_job(2, 2)
    roles = tuple(msgspec.structs.replace(one, each=Resources(1, 1)) if one.warm else one for one in job.roles)
    monkeypatch.setattr(test_hearing, "job", lambda: msgspec.structs.replace(job, roles=roles))
    rollout = Life(ReplicaId("rollout/0"), 1)
    launched = ev.Intended(Launch(rollout, tag_of(RUN, rollout), "pool", N1, WHY))
    hearing = Hearing(tmp_path, *STANDS_BY, launched)
    for life, gpu in ((OLD, "GPU-a"), (rollout, "GPU-b")):
        hello = msg.Hello(life, tag_of(RUN, life), N1, "host", 50, "starting", gpus=(gpu,))
        hearing.hear(hello, peer=str(life).encode())
    seen = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    hearing.hear(msgspec.structs.replace(HELLO, gpus=seen), peer=b"worker")
    assert not state_of(hearing).findings, "a shadow takes no GPU from anybody"
    return hearing


def test_it_is_given_a_gpu_that_no_other_life_has(with_gpus: Hearing) -> None:
    asyncio.run(adopted(with_gpus).ear.adoptions.adopt(ADOPTION))
    (told,) = [message for message in with_gpus.sent if isinstance(message, msg.Become)]
    assert told.gpus == ("GPU-a",), "its predecessor's, which is no longer believed"
    with_gpus.hear(msgspec.structs.replace(AS_MEMBER, gpus=told.gpus), peer=b"worker")
    assert not state_of(with_gpus).findings


def test_two_that_become_something_at_once_are_not_given_the_same_one_and_each_the_same_one_again(
    with_gpus: Hearing,
) -> None:
    other, second = Life(ReplicaId("shadow/n1:1"), 1), Life(ReplicaId("trainer/0.1"), 2)
    step = tag_of(RUN, other)
    with_gpus.fold(ev.Intended(Launch(other, step, "pool", N1, WHY)))
    hello = msgspec.structs.replace(HELLO, life=other, tag=step, pid=43, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    with_gpus.hear(hello, peer=b"other")
    adopted(with_gpus).fold(ev.Intended(Launch(second, step, "pool", N1, WHY, shadow=other)))
    for _ in range(2):
        assert [told.gpus for told in with_gpus.hear(HELLO_WITH_GPUS, peer=b"worker")] == [("GPU-a",)]
        assert [told.gpus for told in with_gpus.hear(hello, peer=b"other")] == [("GPU-c",)]


# a rollout's: it has its own from the start
ENGINE, LATER = Life(ReplicaId("shadow/n1:rollout"), 1), Life(ReplicaId("rollout/1"), 2)


def says_hello(hearing: Hearing, life: Life, *gpus: str, phase: str = "standby") -> list[object]:
    hello = msg.Hello(life, tag_of(RUN, ENGINE), N1, "host", 60, phase, gpus=gpus)
    return hearing.hear(hello, peer=b"engine")


def test_an_engine_has_its_gpu_from_the_start_keeps_it_and_no_other_life_gets_it(with_gpus: Hearing) -> None:
    step = tag_of(RUN, ENGINE)
    with_gpus.fold(ev.Intended(Launch(ENGINE, step, "pool", N1, WHY)))
    assert [type(one) for one in says_hello(with_gpus, ENGINE, "GPU-c")] == [msg.Welcome]
    adopted(with_gpus).hear(msgspec.structs.replace(HELLO, gpus=("GPU-b", "GPU-c")), peer=b"worker")
    with pytest.raises(Refused, match="sees no free GPU for trainer/0#2"):
        asyncio.run(with_gpus.ear.adoptions.adopt(ADOPTION))
    with_gpus.fold(ev.Intended(Launch(LATER, step, "pool", N1, WHY, shadow=ENGINE)))
    told = says_hello(with_gpus, ENGINE, "GPU-c")
    assert [(one.life, one.gpus) for one in told if isinstance(one, msg.Become)] == [(LATER, ("GPU-c",))]
    assert [type(one) for one in says_hello(with_gpus, LATER, "GPU-c", phase="starting")] == [msg.Welcome]
    assert not state_of(with_gpus).findings


def test_an_engine_that_was_given_the_gpu_of_another_life_is_failed_for_it(with_gpus: Hearing) -> None:
    with_gpus.fold(ev.Intended(Launch(ENGINE, tag_of(RUN, ENGINE), "pool", N1, WHY)))
    assert says_hello(with_gpus, ENGINE, "GPU-b") == []
    (finding,) = state_of(with_gpus).findings.values()
    assert (finding.detector, finding.life) == ("gpu_taken", ENGINE)


HELLO_WITH_GPUS = msgspec.structs.replace(HELLO, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))


# ── its log ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_link_says_whose_log_a_shadows_is(standing: Hearing) -> None:
    asyncio.run(adopted(standing).ear.adoptions.adopt(ADOPTION))
    link = standing.run.log_file(tag_of(RUN, MEMBER))
    assert os.readlink(link) == f"{STEP}.log"
    mark_log(standing.run, MEMBER, SHADOW)  # told again, it is made again
    assert os.readlink(link) == f"{STEP}.log"
    assert named_by(state_of(standing), MEMBER) == SHADOW
    assert named_by(state_of(standing), OLD) == OLD
    owner = owner_of(state_of(standing), STEP)
    assert owner is not None
    assert owner.id == TRAINER


# ── launched ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_shadow_is_launched_as_the_role_that_is_kept_warm_beside_everything_on_its_node(tmp_path: Path) -> None:
    job = gang_job(2, 2)
    each = Resources(2, 1, 2**30)
    roles = tuple(msgspec.structs.replace(one, each=each, env={"A": "1"}) if one.warm else one for one in job.roles)
    job = msgspec.structs.replace(job, roles=roles, cluster="slurm")
    held = Allocation("pool", Ask("pool", 1, Resources(8, 4, 2**33), 60.0), 0.0)
    state = State(RUN, job, allocations={"pool": held})
    run = RunDir(tmp_path / RUN)
    run.create()
    step = write_launch(run, state, Launch(SHADOW, STEP, "pool", N1, WHY), "/job")
    launch = read_launch(step.launch_file)
    assert (launch.life, launch.tag, launch.standby, launch.watch) == (SHADOW, STEP, True, "api")
    assert (launch.argv, launch.env["A"], launch.env["OMP_NUM_THREADS"]) == (("run", "trainer"), "1", "2")
    assert (step.overlap, step.agent) == (True, False)
    assert step.each == Resources(8, 4, 2**30), "all CPUs and GPUs of the node, for it cannot know yet which are free"
    trainer = write_launch(run, state, Launch(OLD, tag_of(RUN, OLD), "pool", N1, WHY), "/job")
    assert (trainer.overlap, trainer.each) == (False, each)
    assert not read_launch(trainer.launch_file).standby


def test_a_rollout_that_is_kept_ready_is_launched_as_the_rollout_that_it_becomes(tmp_path: Path) -> None:
    job = gang_job(1, 1, engines=True)
    each = Resources(2, 1, 2**30)
    roles = tuple(msgspec.structs.replace(one, each=each) if one.name == "rollout" else one for one in job.roles)
    job = msgspec.structs.replace(job, roles=roles, cluster="slurm")
    held = Allocation("pool", Ask("pool", 1, Resources(8, 4, 2**33), 60.0), 0.0)
    run = RunDir(tmp_path / RUN)
    run.create()
    state, tag = State(RUN, job, allocations={"pool": held}), tag_of(RUN, ENGINE)
    step = write_launch(run, state, Launch(ENGINE, tag, "pool", N1, WHY), "/job")
    launch = read_launch(step.launch_file)
    assert (launch.life, launch.standby, launch.argv, launch.gpus) == (ENGINE, True, ("run", "rollout"), 1)
    assert (step.overlap, step.each) == (False, each), "what it takes nobody else is given"
