"""The reports of nodes and roles when they join, and the output of a step that has never joined."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rrl.cluster.base import RejectReason
from rrl.core.launch import ExitReason, tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import Cause, Incarnation, NodeName, ReplicaId, Verdict
from rrl.manager.intake.admission import MEMLOCK_DEFAULT, GpuRegistry, check_memlock
from rrl.manager.intake.message_handler import last_output, with_reason
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch, Why
from rrl.manager.model.queries import finding_about
from rrl.manager.model.state import NEVER_APPEARED, Replica, State, Status
from rrl.tests.support.manager.handling import HELLO, LAUNCHED, R1, STEP, Handling
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, job
from rrl.transport.messages import AgentHello, Hello, StepVanished, Welcome

N1, N2 = NodeName("n1"), NodeName("n2")
ONE, TWO = (Incarnation(ReplicaId(f"rollout/{i}"), 1) for i in range(2))


def believing(*incarnations: Incarnation) -> State:
    replicas = {
        incarnation.replica: Replica(incarnation.replica, Status.JOINED, incarnation.number)
        for incarnation in incarnations
    }
    return State(RUN, job(), replicas=replicas)


def hello(incarnation: Incarnation, *gpus: str, node: NodeName = N1) -> Hello:
    return Hello(incarnation, "tag", node, "host", 5, "starting", gpus=gpus)


def test_gpu_of_another_current_incarnation_fails_the_claim_and_names_both() -> None:
    taken, state = GpuRegistry(), believing(ONE, TWO)
    assert taken.claim(hello(ONE, "GPU-a", "GPU-b"), state, 1.0) is None
    finding = taken.claim(hello(TWO, "GPU-b"), state, 2.0)
    assert finding is not None
    assert (finding.verdict, finding.cause, finding.incarnation) == (Verdict.FAIL, Cause.GPU, TWO)
    assert finding.evidence[0].text == "rollout/1#1 and rollout/0#1 were both given GPU GPU-b of n1"


def test_gpu_is_owned_on_its_node_while_its_owner_is_current() -> None:
    taken = GpuRegistry()
    assert taken.claim(hello(ONE, "0"), believing(ONE, TWO), 1.0) is None
    # the replica repeats its Hello to a new manager
    assert taken.claim(hello(ONE, "0"), believing(ONE, TWO), 2.0) is None
    assert taken.claim(hello(TWO, "0", node=N2), believing(ONE, TWO), 3.0) is None
    assert taken.claim(hello(TWO, "0"), believing(TWO), 4.0) is None
    assert taken.claim(hello(ONE), believing(ONE, TWO), 5.0) is None


def test_hello_with_the_gpu_of_another_replica_gets_no_welcome_and_a_fail(tmp_path: Path) -> None:
    other = Incarnation(ROLLOUTS[1], 1)
    launched = ev.Intended(Launch(other, tag_of(RUN, other), "pool", N1, Why(("because",))))
    hearing = Handling(tmp_path, *LAUNCHED, launched)
    first = msgspec.structs.replace(HELLO, gpus=("GPU-a",))
    assert isinstance(hearing.handle(first)[-1], Welcome)
    second = msgspec.structs.replace(first, incarnation=other, tag=tag_of(RUN, other), pid=43)
    assert hearing.handle(second) == []
    assert isinstance(hearing.events[-1], ev.FindingChanged)
    assert hearing.events[-1].finding.cause is Cause.GPU
    state = hearing.state
    assert state is not None
    assert state.replica(other.replica).status is Status.LAUNCHING
    assert finding_about(state, other) == hearing.events[-1].finding


def test_agent_hello_is_recorded(tmp_path: Path) -> None:
    agent = Incarnation(ReplicaId("agent/n1"), 1)
    launched = ev.Intended(Launch(agent, tag_of(RUN, agent), "pool", N1, Why(("because",))))
    hearing = Handling(tmp_path, *LAUNCHED, launched)
    rdma, keeps = ("mlx5_0",), "tcp://10.0.0.1:5"
    hearing.handle(AgentHello(agent, tag_of(RUN, agent), N1, "host", 9, "boot", "no torch", 65536, 1024, rdma, keeps))
    warned, joined = hearing.events
    assert joined == ev.AgentJoined(agent, N1, "host", 9, "no torch", keeps)
    assert isinstance(warned, ev.FindingChanged)
    assert (warned.finding.detector, warned.finding.verdict) == ("memlock", Verdict.WARN)


def test_vanished_step_is_recorded_with_its_last_output(tmp_path: Path) -> None:
    hearing = Handling(tmp_path, *LAUNCHED)
    (hearing.run.logs / f"{STEP}.step.log.0").write_text("slurmstepd: error: Detected 1 oom-kill event(s)\n")
    hearing.handle(StepVanished(R1, STEP, N1))
    detail = "reported by the agent of n1: slurmstepd: error: Detected 1 oom-kill event(s)"
    assert hearing.events == [ev.StepEnded(R1, STEP, None, None, ExitReason.LOST, detail=detail)]


def agent(memlock: int, *rdma: str) -> AgentHello:
    return AgentHello(Incarnation(ReplicaId("agent/n1"), 1), "tag", N1, "host", 5, "boot", "", memlock, 1024, rdma)


def test_low_memlock_limit_warns_on_nodes_with_rdma() -> None:
    finding = check_memlock(agent(65536, "mlx5_0"), "auto", 1.0)
    assert finding is not None
    assert (finding.verdict, finding.node) == (Verdict.WARN, N1)
    assert "64 KiB" in finding.evidence[0].text
    assert check_memlock(agent(-1, "mlx5_0"), "ucx", 1.0) is None
    assert check_memlock(agent(MEMLOCK_DEFAULT + 1, "mlx5_0"), "ucx", 1.0) is None
    assert check_memlock(agent(65536), "ucx", 1.0) is None
    assert check_memlock(agent(65536, "mlx5_0"), "tcp", 1.0) is None


def test_step_that_never_appeared_is_explained_by_its_launchers_output(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    never = ev.IntentSettled("t.1", False, NEVER_APPEARED, reason=RejectReason.NEVER_APPEARED)
    assert with_reason(run, never) == never
    (run.logs / "t.1.step.log.srun").write_text("srun: error: n1: task 0: Exited with exit code 2\n")
    assert last_output(run, "t.1") == "srun: error: n1: task 0: Exited with exit code 2"
    (run.logs / "t.1.step.log.0").write_text("slurmstepd: error: execve(): /v/bin/python: No such file or directory\n")
    error_line = "slurmstepd: error: execve(): /v/bin/python: No such file or directory"
    assert with_reason(run, never) == ev.IntentSettled(
        "t.1", False, f"not started: {error_line}", reason=RejectReason.NOT_STARTED
    )
    (run.logs / "t.1.step.log.0").write_text("slurmstepd: error: Detected 1 oom-kill event(s)\n\n")
    assert with_reason(run, never) == ev.IntentSettled(
        "t.1",
        False,
        f"{NEVER_APPEARED}: slurmstepd: error: Detected 1 oom-kill event(s)",
        reason=RejectReason.NEVER_APPEARED,
    )
    assert with_reason(run, ev.IntentSettled("t.1", True)) == ev.IntentSettled("t.1", True)


def test_guests_work_on_the_trainers_gpus_and_on_no_others() -> None:
    trainer, standby, guest, rollout = (
        Incarnation(ReplicaId(name), 1) for name in ("trainer/0", "trainer/0.1", "guest/n1:0", "rollout/0")
    )
    taken, state = GpuRegistry(), believing(trainer, standby, guest, rollout)
    assert taken.claim(hello(trainer, "GPU-a", "GPU-b"), state, 1.0) is None
    assert taken.claim(hello(guest, "GPU-a"), state, 2.0) is None
    assert taken.claim(hello(rollout, "GPU-a"), state, 3.0) is not None
    assert taken.claim(hello(rollout, "GPU-c"), state, 4.0) is None
    assert taken.claim(hello(guest, "GPU-c"), state, 5.0) is not None, "the GPU of a rollout is not the trainer's"
    assert taken.unreported(standby, N1, state, ()) == [], "a guest has no GPUs of its own"
    assert taken.assign(standby, N1, ("GPU-a", "GPU-d"), 1, state) == ("GPU-d",)
    again = GpuRegistry()  # the next manager hears the guest first
    assert again.claim(hello(guest, "GPU-a"), state, 6.0) is None
    assert again.claim(hello(trainer, "GPU-a"), state, 7.0) is None
