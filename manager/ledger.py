"""What a run cost and gained, from its events alone: recoveries with stage times, effective training time, rewards.

ETTR as RobustRL computes it (docs/sources.md): the time in which the trainer works counts whole; while it is being
restored and rollouts go on, an interval counts #rollouts / (#rollouts + #trainers); with everything down it counts 0.
``ettr_strict`` counts only intervals in which every replica works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from rrl.manager import events as ev
from rrl.manager.actions import Fence, Launch, Perform
from rrl.manager.journal import replay
from rrl.spec.jobview import JobView
from rrl.spec.phases import phase
from rrl.spec.rundir import RunDir, write_atomically
from rrl.spec.words import AGENT, Life, ReplicaId, Verdict, role_of


class Recovery(Struct, frozen=True):
    """One replica's way from its failure back to work. Stage times in s; None = that stage has not happened (yet)."""

    replica: str
    incarnation: int
    """of the life that replaced the failed one"""
    cause: str
    rung: str
    injected: bool
    node_before: str
    node_after: str
    detect_s: float | None
    """fault (or, if it was not ours, its first trace) → finding"""
    decide_s: float | None
    """finding → the old life fenced"""
    start_s: float | None
    """fenced → the new life's worker has joined"""
    weights_s: float | None
    """joined → it holds a complete weight version"""
    first_work_s: float | None
    """holding weights → first unit of work (a rollout's first token)"""
    total_s: float | None


class Summary(Struct, frozen=True):
    run: str
    run_dir: str
    outcome: str
    why: str
    steps: int
    reward_first10: float | None
    reward_last10: float | None
    faults: int
    """planned faults that were performed"""
    recoveries: list[Recovery]
    ettr: float
    ettr_strict: float
    run_seconds: float
    epochs: int
    """managers that this run has had"""


def write_summary(run: RunDir) -> Summary:
    """Replay the run's journal and leave ``summary.json``."""
    summary = account(replay(run), str(run.path))
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return summary


def account(events: Iterable[ev.Stamped], run_dir: str = "") -> Summary:
    """The whole account. Raises ValueError when there are no events."""
    ledger: _Ledger | None = None
    for stamped in events:
        if isinstance(stamped.event, ev.RunStarted):
            ledger = _Ledger(stamped.event.run, stamped.event.job, stamped.at)
        if ledger is not None:
            ledger.enter(stamped)
    if ledger is None:
        raise ValueError("the journal has no events")
    return ledger.summary(run_dir)


class _Trace:
    """One failure of one replica, as it unfolds."""

    def __init__(self, fence: Fence, at: float) -> None:
        self.fence, self.fenced_at = fence, at
        self.incarnation = fence.life.incarnation + 1
        self.failed_at: float | None = None
        self.found_at: float | None = None
        self.injected = False
        self.node_before = self.node_after = ""
        self.joined_at: float | None = None
        self.held_at: float | None = None
        self.worked_at: float | None = None

    def recovery(self) -> Recovery:
        needs_weights = role_of(self.fence.life.replica) == "rollout"
        ready = self.held_at if needs_weights else self.joined_at
        return Recovery(
            replica=self.fence.life.replica,
            incarnation=self.incarnation,
            cause="; ".join(self.fence.why.evidence),
            rung=self.fence.rung.value,
            injected=self.injected,
            node_before=self.node_before,
            node_after=self.node_after,
            detect_s=_between(self.failed_at, self.found_at),
            decide_s=_between(self.found_at, self.fenced_at),
            start_s=_between(self.fenced_at, self.joined_at),
            weights_s=_between(self.joined_at, self.held_at) if needs_weights else None,
            first_work_s=_between(ready, self.worked_at),
            total_s=_between(self.failed_at, self.worked_at),
        )


class _Ledger:
    def __init__(self, run: str, job: JobView, at: float) -> None:
        self.run, self.job, self.began, self.now = run, job, at, at
        self.rewards: list[float] = []
        self.step, self.faults, self.epochs = 0, 0, 0
        self.outcome, self.why = "running", ""
        self.failures: dict[Life, float] = {}
        """when something about a life first went wrong"""
        self.found: dict[Life, float] = {}
        self.injected: dict[Life, str] = {}
        """by which fault; from its intent on"""
        self.nodes: dict[Life, str] = {}
        self.lives: dict[ReplicaId, Life] = {}
        self.traces: list[_Trace] = []
        self.open: dict[Life, _Trace] = {}
        """by the life that replaces"""
        self.working: set[ReplicaId] = set()
        self.effective = self.strict = 0.0
        self.over = False

    def enter(self, stamped: ev.Stamped) -> None:
        self._time(stamped.at)
        event = stamped.event
        if isinstance(event, ev.Intended):
            self._intended(event, stamped.at)
        elif isinstance(event, ev.Decided) and isinstance(event.action, Fence):
            self._fenced(event.action, stamped.at)
        elif isinstance(event, ev.StepEnded):
            self.failures.setdefault(event.life, stamped.at)
            self._down(event.life)
        elif isinstance(event, ev.FindingChanged):
            self._found(event, stamped.at)
        elif isinstance(event, ev.Joined | ev.VersionHeld | ev.FirstWorkDone):
            self._came_back(event, stamped.at)
        elif isinstance(event, ev.PhaseEntered) and phase(event.phase).useful:
            if self.lives.get(event.life.replica) == event.life:
                self.working.add(event.life.replica)
        else:
            self._rest(event)

    def _rest(self, event: Any) -> None:
        if isinstance(event, ev.StepCommitted) and event.step > self.step:
            self.step = event.step
            if "reward" in event.metrics:
                self.rewards.append(event.metrics["reward"])
        elif isinstance(event, ev.FaultInjected):
            self.faults += event.ok
            if not event.ok:
                self._not_injected(event.fault)
        elif isinstance(event, ev.Done) and event.tag.startswith("fault:") and not event.ok:
            self._not_injected(event.tag.removeprefix("fault:"))
        elif isinstance(event, ev.ManagerStarted):
            self.epochs += 1
        elif isinstance(event, ev.RunEnded):
            self.outcome, self.why = event.outcome.value, event.why
        elif isinstance(event, ev.Decided):  # Finish, or a node out of use
            self.over = self.over or hasattr(event.action, "outcome")

    def _intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, Perform):  # just before the deed: detection is counted from here
            life = self.lives.get(ReplicaId(action.fault.target))
            if life is not None:
                self.failures[life] = at
                self.injected[life] = action.fault.id
        elif isinstance(action, Launch):
            self.lives[action.life.replica] = action.life
            self.nodes[action.life] = action.node
            trace = next((t for t in reversed(self.traces) if t.fence.life.replica == action.life.replica), None)
            if trace is not None and trace.joined_at is None:
                trace.node_after, trace.incarnation = action.node, action.life.incarnation
                self.open[action.life] = trace

    def _not_injected(self, fault: str) -> None:
        """It was not performed after all: what fails later is not its doing."""
        for life in [life for life, by in self.injected.items() if by == fault]:
            del self.injected[life]
            self.failures.pop(life, None)

    def _fenced(self, fence: Fence, at: float) -> None:
        if role_of(fence.life.replica) == AGENT or self.over:
            return
        trace = _Trace(fence, at)
        trace.node_before = self.nodes.get(fence.life, "")
        trace.found_at = self.found.get(fence.life, at)
        trace.failed_at = self.failures.get(fence.life, trace.found_at)
        trace.injected = fence.life in self.injected
        self.traces.append(trace)
        self._down(fence.life)

    def _found(self, event: ev.FindingChanged, at: float) -> None:
        finding = event.finding
        if finding.verdict is not Verdict.FAIL:
            return
        if finding.life is not None:
            self.found.setdefault(finding.life, at)
        else:
            for life, node in self.nodes.items():
                if node == finding.node and self.lives.get(life.replica) == life:
                    self.found.setdefault(life, at)
                    self.failures.setdefault(life, finding.since)

    def _came_back(self, event: ev.Joined | ev.VersionHeld | ev.FirstWorkDone, at: float) -> None:
        trace = self.open.get(event.life)
        if trace is None:
            return
        if isinstance(event, ev.Joined):
            trace.joined_at = trace.joined_at or at
        elif isinstance(event, ev.VersionHeld):
            trace.held_at = trace.held_at or at
        else:
            trace.worked_at = trace.worked_at or at

    def _down(self, life: Life) -> None:
        if self.lives.get(life.replica) == life:
            self.working.discard(life.replica)

    def _time(self, at: float) -> None:
        """Credit the interval up to ``at`` by who was working in it."""
        span, self.now = at - self.now, at
        if self.over:
            return
        rollouts = sum(role_of(id) == "rollout" for id in self.working)
        trainers = sum(role_of(id) == "trainer" for id in self.working)
        wanted = sum(role.replicas for role in self.job.kind("trainer"))
        if trainers:
            self.effective += span
        elif rollouts and self.step:
            self.effective += span * rollouts / (rollouts + wanted)
        if len(self.working) == sum(role.replicas for role in self.job.roles):
            self.strict += span

    def summary(self, run_dir: str) -> Summary:
        wall = max(self.now - self.began, 1e-9)
        return Summary(
            run=self.run,
            run_dir=run_dir,
            outcome=self.outcome,
            why=self.why,
            steps=self.step,
            reward_first10=_mean(self.rewards[:10]),
            reward_last10=_mean(self.rewards[-10:]),
            faults=self.faults,
            recoveries=[trace.recovery() for trace in self.traces],
            ettr=round(self.effective / wall, 4),
            ettr_strict=round(self.strict / wall, 4),
            run_seconds=round(wall, 2),
            epochs=self.epochs,
        )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 3)


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
