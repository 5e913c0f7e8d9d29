"""Makes runs from a list of events, as input of views and commands."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus, NodeState, NodeStatus
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.launch import ExitReason
from rrl.core.phases import ClockReading, PhaseTime, idle_cause
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import (
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    Outcome,
    Remedy,
    ReplicaId,
    Resources,
    Verdict,
    Version,
    WeightTraffic,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, Launch, Request, Resize, Rung, StopStep, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.reporting.accounting.run_report import account
from rrl.manager.reporting.summary import write_summary
from rrl.manager.storage.journal import Journal
from rrl.tests.support.job_toml import JOB

BEGAN = 1_800_000_000.0
DEFAULT_RUN = "small-1120-064114"
REPLICAS = ("trajectories/0", "reward/0", "trainer/0", "rollout/0", "rollout/1")
NO_REASON = Why(())
NODES = dict(zip(REPLICAS, ("n1", "n1", "n2", "n3", "n4"), strict=True))


def job_view(steps: int = 40, cluster: str = "local") -> RunSpec:
    view = resolve(Job.model_validate(tomllib.loads(JOB)), "/venv/bin/python")
    return msgspec.structs.replace(view, steps=steps, cluster=cluster)


POOLS = """
[rollouts.h20]

[rollouts.burst]
replicas = { max = 12 }
node_hours = 200
"""


def pools_view(cluster: str = "slurm") -> RunSpec:
    """Return the small job with a pool of one rollout on nodes of its own, and an elastic pool of up to twelve."""
    view = resolve(Job.model_validate(tomllib.loads(JOB + POOLS)), "/venv/bin/python")
    return msgspec.structs.replace(view, steps=40, cluster=cluster)


class Story:
    """Builds a run event by event; ``wait`` advances ``at``, the time of the next event (s since the beginning)."""

    def __init__(self, run: str = DEFAULT_RUN, job: RunSpec | None = None) -> None:
        self.run, self.job, self.at, self.epoch = run, job or job_view(), 0.0, 1
        self.stamped: list[ev.Stamped] = []
        self.state: State | None = None
        self.incarnations: dict[str, int] = {}
        self.written_count = 0
        """Number of records that are in the journal of the run directory."""
        self.record(ev.RunStarted(run, self.job), ev.ManagerStarted("login1", 4711))

    def record(self, *events: ev.Event) -> Story:
        for event in events:
            stamped = ev.Stamped(len(self.stamped) + 1, BEGAN + self.at, self.epoch, event)
            self.stamped.append(stamped)
            self.state = fold(self.state, stamped)
        return self

    def wait(self, seconds: float) -> Story:
        self.at += seconds
        return self

    @property
    def now(self) -> float:
        return BEGAN + self.at

    def recorded(self) -> State:
        assert self.state is not None
        return self.state

    def incarnation(self, replica: str) -> Incarnation:
        return Incarnation(ReplicaId(replica), self.incarnations[replica])

    # ── chapters ──────────────────────────────────────────────────────────────────────────────────────────────────
    def requests_nodes(self, detail: str = "") -> Story:
        ask = AllocationRequest(f"{self.run}.pool", 5, self.job.node_groups[0].node, 3600.0)
        self.record(ev.Intended(Request(ask, Why(()))))
        return self.record(ev.AllocationChanged(ask.tag, AllocationStatus(AllocationState.PENDING, "77", (), detail)))

    def gets_nodes(self) -> Story:
        names = tuple(NodeName(f"n{i}") for i in range(1, 6))
        tag = f"{self.run}.pool"
        self.record(ev.AllocationChanged(tag, AllocationStatus(AllocationState.RUNNING, "77", names)))
        for name in names:
            self.record(ev.NodeChanged(name, NodeStatus(NodeState.UP)))
            self.launches(f"agent/{name}", name)
            self.record(ev.AgentJoined(self.incarnation(f"agent/{name}"), name, name, 99))
        return self

    def resizes(self, pool: str, start: Sequence[int] = (), stop: Sequence[int] = (), why: str = "load") -> Story:
        """Add the decision to start and to stop the replicas of a pool with these indices."""
        started, stopped = (tuple(ReplicaId(f"{pool}/{index}") for index in indices) for indices in (start, stop))
        return self.record(ev.Decided(Resize(pool, started, stopped, Why((why,), expects="the replicas join"))))

    def requests_for(self, pool: str, index: int) -> str:
        """Add the request for a node of a further pool, which waits in the queue; return its tag."""
        tag = f"{self.run}.{pool}-{index}"
        ask = AllocationRequest(tag, 1, self.job.node_group(pool).node, 7200.0, node_group=pool)
        queued = AllocationStatus(AllocationState.PENDING, f"{800 + index}", (), "Priority")
        self.record(ev.Intended(Request(ask, Why(("a replica has no node",)))), ev.AllocationChanged(tag, queued))
        return tag

    def grants(self, tag: str, node: str) -> Story:
        """Add the grant of the node that was requested under this tag."""
        self.record(ev.AllocationChanged(tag, AllocationStatus(AllocationState.RUNNING, "801", (NodeName(node),))))
        return self.record(ev.NodeChanged(NodeName(node), NodeStatus(NodeState.UP)))

    def grows(self, pool: str, index: int, node: str) -> Story:
        """Add the request for a node of a further pool, its grant, and the join of a replica there."""
        tag, replica = self.requests_for(pool, index), f"{pool}/{index}"
        self.grants(tag, node).launches(replica, node, allocation=tag).joins(replica, "generate")
        return self.record(ev.FirstWorkDone(self.incarnation(replica)))

    def launches(
        self, replica: str, node: str | None = None, why: Why = NO_REASON, allocation: str | None = None
    ) -> Story:
        self.incarnations[replica] = self.incarnations.get(replica, 0) + 1
        incarnation, where = self.incarnation(replica), NodeName(node or NODES[replica])
        step = f"{self.run}.{replica.replace('/', '-')}.{incarnation.number}"
        return self.record(ev.Intended(Launch(incarnation, step, allocation or f"{self.run}.pool", where, why)))

    def joins(self, replica: str, phase: str, waits_for: str | None = None) -> Story:
        held = self.recorded().replica(ReplicaId(replica))
        incarnation, node = self.incarnation(replica), held.node or NodeName("")
        self.record(ev.Admitted(incarnation, held.step or "", node, 123), ev.Joined(incarnation, node, node, 124))
        return self.enters(replica, phase, waits_for)

    def enters(self, replica: str, phase: str, waits_for: str | None = None) -> Story:
        whom = None if waits_for is None else ReplicaId(waits_for)
        return self.record(ev.PhaseEntered(self.incarnation(replica), phase, whom))

    def works(self) -> Story:
        """Add the nodes, the start of all replicas, and twelve training steps."""
        self.requests_nodes().gets_nodes().wait(2)
        for replica in REPLICAS:
            self.launches(replica)
        self.wait(5).joins("trajectories/0", "serve").joins("reward/0", "wait_work", "trajectories/0")
        self.joins("trainer/0", "wait_data", "rollout/0")
        for rollout in ("rollout/0", "rollout/1"):
            self.joins(rollout, "generate").record(ev.VersionAvailable(self.incarnation(rollout), Version(0, 1)))
            self.record(ev.FirstWorkDone(self.incarnation(rollout)))
        for step in range(1, 13):
            self.commits(step)
        return self

    def commits(self, step: int) -> Story:
        self.wait(3)
        metrics = {"reward": min(0.95, 0.1 + 0.07 * step), "loss": 0.5 / step, "entropy": 1.25}
        self.record(ev.StepCommitted(self.incarnation("trainer/0"), step, metrics))
        for replica in ("trainer/0", "rollout/0", "rollout/1"):
            if self.recorded().is_current(self.incarnation(replica)):
                self.record(ev.VersionAvailable(self.incarnation(replica), Version(step, 1)))
        return self

    def pulls(self, replica: str, step: int, received: int, nbytes: int, fallbacks: int = 0) -> Story:
        """Add a record of a replica's weights, with the bytes and fallbacks of all versions that it has received."""
        of = self.incarnation(replica)
        return self.record(ev.WeightsRecorded(((of, Version(step, 1)),), (WeightTraffic(received, nbytes, fallbacks),)))

    def clocks(self, replica: str, done: int = 0, **seconds: float) -> Story:
        """Add a report of one replica's clock; :meth:`reading` describes the arguments."""
        return self.record(ev.ClocksRecorded((self.reading(replica, done, **seconds),)))

    def reading(self, replica: str, done: int = 0, **seconds: float) -> tuple[Incarnation, ClockReading]:
        """Return the clock of a replica with these seconds by phase.

        A keyword such as ``checkpoint__commits`` names a phase and an idle cause. ``done`` is the number of units of
        work that the process has reported.
        """
        times = []
        for name, spent in seconds.items():
            phase, _, cause = name.partition("__")
            times.append(PhaseTime(phase, cause or idle_cause(phase, None), int(spent * 1e9)))
        return self.incarnation(replica), ClockReading(self.incarnations[replica], done, tuple(times))

    def loses(self, replica: str, evidence: str = "its step ended by signal 9 (SIGKILL)") -> Finding:
        """Record that the replica failed, before the planner decides on a repair; return the finding."""
        finding = Finding(
            "exit_record",
            Verdict.FAIL,
            Cause.PROCESS,
            Remedy.RESTART,
            self.now,
            (Evidence("step", evidence, self.now),),
            incarnation=self.incarnation(replica),
            proof=True,
        )
        self.record(ev.StepEnded(self.incarnation(replica), f"{self.run}.x", None, 9, ExitReason.SIGNALED))
        self.record(ev.FindingChanged(finding))
        return finding

    def fences(self, replica: str, evidence: str = "killed by signal 9") -> Story:
        return self.record(ev.Decided(Fence(self.incarnation(replica), Rung.IN_PLACE, Why((evidence,), Rung.IN_PLACE))))

    def recovers(self, replica: str) -> Story:
        self.loses(replica)
        self.wait(0.1).fences(replica).wait(0.2).launches(replica).wait(3).joins(replica, "loading_weights")
        self.wait(1).record(ev.VersionAvailable(self.incarnation(replica), Version(12, 1))).enters(replica, "generate")
        return self.wait(0.5).record(ev.FirstWorkDone(self.incarnation(replica)))

    def loses_node(self, node: str) -> Story:
        finding = Finding(
            "node_lost",
            Verdict.FAIL,
            Cause.NODE,
            Remedy.EXCLUDE,
            self.now,
            (Evidence("manager", "agent and all replicas silent for 10 s", self.now),),
            node=NodeName(node),
        )
        self.record(ev.FindingChanged(finding), ev.NodeChanged(NodeName(node), NodeStatus(NodeState.DOWN, "DOWN*")))
        return self.record(ev.Decided(Exclude(NodeName(node), Why(("node lost: silent",)))))

    def drains(self, replica: str, why: str = "new fan") -> Story:
        """Add a user's drain of the replica's node: the replica moves to another node, and the run leaves the node."""
        node = self.recorded().replica(ReplicaId(replica)).node or NodeName("")
        moves = Why((f"{node} is to be drained, requested by ada: {why}",), Rung.REPLACEMENT)
        self.record(ev.CommandReceived("drain", "ada", "drain-1", target=node, reason=why))
        self.record(ev.Decided(Fence(self.incarnation(replica), Rung.REPLACEMENT, moves, charged=False)))
        return self.wait(1).record(ev.Decided(Exclude(node, Why((f"drain requested by ada: {why}",)))))

    def stops(self, outcome: Outcome, why: str) -> Story:
        """Add the decision to end the run; all steps are being stopped."""
        self.record(ev.Decided(Finish(outcome, Why((why,)))))
        for replica in REPLICAS:
            step = self.recorded().replica(ReplicaId(replica)).step or ""
            self.record(ev.Intended(StopStep(step, self.incarnation(replica), 5.0, Why(("the run is ending",)))))
        return self

    def ends(self, outcome: Outcome, why: str) -> Story:
        self.record(ev.Decided(Finish(outcome, Why((why,)))))
        return self.wait(1).estimates_ettr().record(ev.RunEnded(outcome, why))

    def estimates_ettr(self) -> Story:
        """Record the ETTR as of the newest commit, as a manager does at intervals and at the end."""
        ettr = account(self.stamped).steps.ettr
        return self if ettr is None else self.record(ev.EttrEstimated(round(ettr, 4)))

    # ── on the disk ───────────────────────────────────────────────────────────────────────────────────────────────
    def goes_on(self, run: RunDir, *events: ev.Event, epoch: int = 2) -> None:
        """Record events, and write all that is new into the journal, as the run's next manager does."""
        self.record(*events)
        journal = Journal(run, epoch)
        for stamped in self.stamped[self.written_count :]:
            journal.append(msgspec.structs.replace(stamped, epoch=epoch))
        journal.close()
        self.written_count = len(self.stamped)

    def written(self, root: Path) -> RunDir:
        """Return the run directory of this story under ``root``, as its manager would have left it."""
        self.written_count = len(self.stamped)
        run = RunDir(root / self.run)
        run.create()
        run.run_spec.write_bytes(msgspec.json.encode(self.job))
        run.resolved.write_bytes(b"{}")
        journal = Journal(run, self.epoch)
        for stamped in self.stamped:
            journal.append(stamped)
        journal.flush()
        if self.recorded().outcome is not None:
            journal.rotate(self.recorded())
            write_summary(run)
        journal.close()
        return run


def at_work(run: str, replicas: int, steps: int = 40) -> Story:
    """Return a run at work with ``replicas`` replicas: the usual five, and further rollouts."""
    rollouts = 2 + replicas - len(REPLICAS)
    job = job_view(steps)
    roles = tuple(
        msgspec.structs.replace(one, replicas=rollouts) if one.name == "rollout" else one for one in job.roles
    )
    story = Story(run, msgspec.structs.replace(job, roles=roles)).works()
    for index in range(2, rollouts):
        story.launches(f"rollout/{index}", f"n{3 + index % 2}").joins(f"rollout/{index}", "generate")
        story.record(ev.VersionAvailable(story.incarnation(f"rollout/{index}"), Version(12, 1)))
    return story


def completed(run: str = DEFAULT_RUN, steps: int = 12) -> Story:
    return Story(run, job_view(steps)).works().recovers("rollout/0").ends(Outcome.COMPLETED, "all steps are done")


def wide() -> RunSpec:
    """Return the small job with rollouts of four GPUs each, on nodes of eight."""
    view = job_view(cluster="slurm")
    gpus = {"rollout": Resources(1, 4, 0), "trainer": Resources(1, 8, 0)}
    roles = tuple(msgspec.structs.replace(one, per_member=gpus.get(one.name, one.per_member)) for one in view.roles)
    parts = tuple(msgspec.structs.replace(one, node=Resources(8, 8, 2**34)) for one in view.node_groups)
    return msgspec.structs.replace(view, roles=roles, node_groups=parts)
