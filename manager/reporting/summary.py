"""Summarise a run from its events alone.

The summary has the recoveries with the durations of their stages, effective training time, rewards, and the nodes that
an administrator should drain.

ETTR is computed as in RobustRL (docs/sources.md): an interval in which the trainer works counts whole; while the
trainer is restored and rollouts continue, it counts #rollouts / (#rollouts + #trainers); with everything down it counts
0. ``ettr_strict`` counts only intervals in which every replica works. A failed replica counts as down from the first
symptom of its failure, whatever it reported afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from ...core.faults import FAULT_TRAITS, TargetKind
from ...core.phases import phase
from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import RunSpec
from ...core.text import escaped_lines
from ...core.types import AGENT, STANDBY_ROLE, Finding, Incarnation, NodeName, Outcome, ReplicaId, Verdict, role_of
from ..model import events as ev
from ..model import token_ages
from ..model.actions import Drain, Exclude, Fence, Finish, InjectFault, Launch, Readmit, RestartAll
from ..storage.journal import replay
from .downtime import WorkIntervals
from .recoveries import InjectedFault, Recovery, RecoveryTrace


class DrainRequest(Struct, frozen=True):
    """A node that an administrator should drain."""

    node: str
    cause: str
    """Cause such as ``gpu`` or ``node``; empty if a user requested the drain."""
    evidence: list[str]
    at: float
    """Wall clock (s) at the node's exclusion."""
    requested_by: str
    """User who requested it; empty for the run itself."""
    drain_error: str
    """Reason why the cluster did not drain the node."""


class DrainRequests:
    """Drains that the cluster refused, collected from events."""

    def __init__(self) -> None:
        self._excluded: dict[NodeName, tuple[Exclude, float]] = {}
        self._pending_drains: dict[str, Drain] = {}
        """Drains whose intent is open, by tag."""
        self._open: dict[NodeName, DrainRequest] = {}

    def apply(self, stamped: ev.Stamped) -> None:
        """Apply an event: a refused drain opens a request; a later drain or a readmission closes it."""
        event = stamped.event
        if isinstance(event, ev.Decided) and isinstance(event.action, Exclude):
            self._excluded[event.action.node] = event.action, stamped.at
        elif isinstance(event, ev.Decided) and isinstance(event.action, Readmit):
            self._open.pop(event.action.node, None)
        elif isinstance(event, ev.Intended) and isinstance(event.action, Drain):
            self._pending_drains[event.action.tag] = event.action
        elif isinstance(event, ev.IntentSettled) and (drain := self._pending_drains.pop(event.tag, None)) is not None:
            self._open.pop(drain.node, None)
            if not event.ok:
                self._open[drain.node] = self._request(drain, event.detail, stamped.at)

    def _request(self, drain: Drain, drain_error: str, at: float) -> DrainRequest:
        exclude, at = self._excluded.get(drain.node, (None, at))
        cause = exclude.cause.value if exclude is not None and exclude.cause is not None else ""
        by = exclude.by if exclude is not None else ""
        return DrainRequest(drain.node, cause, list(drain.why.evidence), at, by, drain_error)

    @property
    def requests(self) -> list[DrainRequest]:
        """Return the drain requests that no administrator has fulfilled yet."""
        return list(self._open.values())


class Summary(Struct, frozen=True):
    """The content of ``summary.json``."""

    run: str
    run_dir: str
    outcome: str
    why: str
    steps: int
    reward_first10: float | None
    reward_last10: float | None
    faults: int
    """Injected faults that were performed, planned or requested."""
    recoveries: list[Recovery]
    unprovoked: int
    """Failures that were not injected: those recovered from, and those that ended the run."""
    ettr: float
    ettr_strict: float
    run_seconds: float
    epochs: int
    """Managers that this run has had."""
    outage_tokens: int = 0
    """Tokens that rollouts generated while the trainer was down, and that were kept; of outages within one manager's
    epoch."""
    max_age: int | None = None
    """Age of the oldest token that was trained on, in weight versions; None if no step reported it."""
    stale_groups: int = 0
    """Groups that were dropped because a token was older than ``[sampling] staleness`` allows."""
    stale_share: float = 0.0
    """Share of these among all groups that were trained or dropped for their age."""
    drain_requests: list[DrainRequest] = []
    """Nodes that should be drained and that the run may not drain."""


def _escaped(value: Any) -> Any:
    """Return a document of plain values without control characters.

    Evidence is written by roles and nodes, and a summary may be shown by ``cat``: it must not be able to control the
    terminal.
    """
    if isinstance(value, str):
        return escaped_lines(value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return value


def write_summary(run: RunDir) -> Summary:
    """Replay the run's journal, write ``summary.json`` and return the summary."""
    summary = summarize(replay(run), str(run.path))
    document = _escaped(msgspec.to_builtins(summary))
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return summary


def summarize(events: Iterable[ev.Stamped], run_dir: str = "") -> Summary:
    """Return the summary of all events. Raise ValueError if there are none."""
    builder: _SummaryBuilder | None = None
    for stamped in events:
        if isinstance(stamped.event, ev.RunStarted):
            builder = _SummaryBuilder(stamped.event.run, stamped.event.job, stamped.at)
        if builder is not None:
            builder.apply(stamped)
    if builder is None:
        raise ValueError("the journal has no events")
    return builder.summary(run_dir)


class _SummaryBuilder:
    """Collects the summary of one run, event by event."""

    def __init__(self, run: str, job: RunSpec, at: float) -> None:
        self.run, self.job, self.began, self.now = run, job, at, at
        self.rewards: dict[int, float] = {}
        """Mean reward by training step."""
        self.step, self.faults, self.epochs = 0, 0, 0
        self.fatal_failures = 0
        """Failures that were not injected and ended the run."""
        self.outcome, self.outcome_reason = "running", ""
        self.failures: dict[Incarnation, float] = {}
        """Time (s) of the first sign of an incarnation's failure."""
        self.findings: dict[str, tuple[Finding, float]] = {}
        """Standing FAIL findings and when they were recorded, by the findings' keys."""
        self.injected: dict[str, InjectedFault] = {}
        """Injected faults by id, without those that were certainly not performed."""
        self.nodes: dict[Incarnation, str] = {}
        self.launched: dict[Incarnation, float] = {}
        """Time (s) of each incarnation's launch intent."""
        self.incarnations: dict[ReplicaId, Incarnation] = {}
        self.launches_by_tag: dict[str, Incarnation] = {}
        self.traces: list[RecoveryTrace] = []
        self.traces_before_resume = 0
        """Number of traces from before the run was resumed: the next start does not count as the recovery of these."""
        self.fenced: dict[Incarnation, RecoveryTrace] = {}
        """Traces by the incarnation that failed."""
        self.open_traces: dict[Incarnation, RecoveryTrace] = {}
        """Traces by the incarnation that replaces it."""
        self.work_intervals = WorkIntervals()
        self.committed_at: float | None = None
        """Time (s) of the first commit."""
        self.end_decided_at: float | None = None
        """Time (s) at which the run's end was decided."""
        self.ended: float | None = None
        self.drain_requests = DrainRequests()
        self.outage_tokens = 0
        self.max_age: float | None = None
        self.stale = 0, 0.0
        """Groups dropped as stale, and their share, as of the newest step that reported them."""
        self.tokens_before: dict[int, int] = {}
        """Token count at the beginning of the trainer's present outage, by epoch."""
        self.ended_s = 0.0
        """Seconds between an end of the run and its resumption, in all."""

    def apply(self, stamped: ev.Stamped) -> None:
        self.now = at = stamped.at
        event = stamped.event
        self.drain_requests.apply(stamped)
        if isinstance(event, ev.Intended):
            self._intended(event, at)
        elif isinstance(event, ev.Decided) and isinstance(event.action, Fence | RestartAll):
            for fence in event.action.fences if isinstance(event.action, RestartAll) else (event.action,):
                self._fenced(fence, at)
        elif isinstance(event, ev.StepEnded):
            self.failures.setdefault(event.incarnation, at)
            self._mark_idle(event.incarnation, at)
        elif isinstance(event, ev.FindingChanged):
            self._finding_changed(event.finding, at)
        elif isinstance(event, ev.Joined | ev.VersionAvailable | ev.FirstWorkDone):
            self._on_recovery_stage(event, at)
        elif isinstance(event, ev.PhaseEntered):
            self._phase(event, at)
        else:
            self._apply_other(event, at)

    def _apply_other(self, event: Any, at: float) -> None:
        if isinstance(event, ev.StepCommitted):
            if "stale_groups" in event.metrics and event.step >= self.step:
                self.stale = int(event.metrics["stale_groups"]), round(event.metrics.get("stale_share", 0.0), 4)
            ages = [
                event.metrics[name]
                for name in (token_ages.MAX_METRIC, token_ages.RUN_MAX_METRIC)
                if name in event.metrics
            ]
            self.max_age = max(ages if self.max_age is None else [self.max_age, *ages], default=None)
            self.step = max(self.step, event.step)
            self.committed_at = at if self.committed_at is None else self.committed_at
            if "reward" in event.metrics:
                self.rewards.setdefault(event.step, event.metrics["reward"])
        elif isinstance(event, ev.FaultInjected):
            self._injection(event, at)
        elif isinstance(event, ev.IntentSettled) and not event.ok:
            self._on_rejected(event.tag)
        elif isinstance(event, ev.ManagerStarted):
            self.epochs += 1
        elif isinstance(event, ev.RunEnded):
            self.outcome, self.outcome_reason, self.ended = event.outcome.value, event.why, at
        elif isinstance(event, ev.Resumed):
            self._resumed(event, at)
        elif isinstance(event, ev.TokensCounted):
            self._tokens_counted(event)
        elif isinstance(event, ev.Decided) and isinstance(event.action, Finish) and self.end_decided_at is None:
            self._end_decided(event.action, at)

    def _tokens_counted(self, event: ev.TokensCounted) -> None:
        if event.trainer_down:  # may be recorded several times before the trainer works again
            self.tokens_before.setdefault(self.epochs, event.total)
        else:
            before = self.tokens_before.get(self.epochs, event.total)
            self.outage_tokens += event.total - before
            self.tokens_before.clear()

    def _resumed(self, event: ev.Resumed, at: float) -> None:
        """Continue after the run was resumed: the time since its end does not count as run time."""
        for replica in self.incarnations:
            self.work_intervals.end(replica, at if self.end_decided_at is None else self.end_decided_at)
        self.ended_s += at - (at if self.ended is None else self.ended)
        self.job, self.outcome, self.outcome_reason, self.end_decided_at = event.job, "running", "", None
        self.findings.clear()
        self.traces_before_resume = len(self.traces)

    def _intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, InjectFault):  # recorded just before the injection: detection is measured from here
            incarnation = action.incarnation or self.incarnations.get(ReplicaId(action.fault.target))
            self.injected[action.fault.id] = injected = InjectedFault(action.fault, at, incarnation, action.node)
            injected.set_performed_at(at, self.job.limits.silence)
        elif isinstance(action, Launch):
            self.incarnations[action.incarnation.replica] = action.incarnation
            self.nodes[action.incarnation], self.launched[action.incarnation] = action.node, at
            self.launches_by_tag[action.step] = action.incarnation
            replica = action.incarnation.replica
            recent = reversed(self.traces[self.traces_before_resume :])
            trace = next((trace for trace in recent if trace.fence.incarnation.replica == replica), None)
            if trace is not None and trace.joined_at is None:
                trace.node_after, trace.incarnation = action.node, action.incarnation.number
                self.open_traces[action.incarnation] = trace

    def _on_rejected(self, tag: str) -> None:
        """Undo a launch that was rejected, and forget a fault that was not injected."""
        incarnation = self.launches_by_tag.get(tag)
        # A rejected launch never ran: the recovery of the earlier failure continues.
        if incarnation is not None and incarnation in self.open_traces:
            self.fenced[incarnation] = self.open_traces[incarnation]
        if tag.startswith("fault:"):
            self.injected.pop(tag.removeprefix("fault:"), None)

    def _injection(self, event: ev.FaultInjected, at: float) -> None:
        """Apply the report of an injected fault."""
        injected = self.injected.get(event.fault)
        if injected is None:
            return
        if not (event.ok or event.unknown):  # later failures are not caused by it
            del self.injected[event.fault]
        elif event.ended:
            injected.ended_at = min(injected.ended_at, at)
            injected.effects_until = min(injected.effects_until, at + self.job.limits.silence)
        elif event.ok and not injected.performed:
            injected.performed = True
            injected.set_performed_at(at, self.job.limits.silence)
            self.faults += 1
            if (
                not FAULT_TRAITS[injected.fault.kind].by_signals
                and FAULT_TRAITS[injected.fault.kind].target_kind is TargetKind.REPLICA
            ):
                injected.at = at  # it took effect when the role called its API, perhaps long after the request

    def _fenced(self, fence: Fence, at: float) -> None:
        """Open the trace of a failure, dated by its first symptom or by the fault that caused it."""
        incarnation = fence.incarnation
        if role_of(incarnation.replica) in (AGENT, STANDBY_ROLE) or self.end_decided_at is not None:
            return
        if not fence.charged:  # it has not failed: it is moved, or another member of its gang failed
            self._mark_idle(incarnation, at)
            return
        if incarnation in self.fenced:  # fenced again before it recovered
            self.fenced[incarnation].rung = fence.rung
            return
        trace = self.fenced[incarnation] = RecoveryTrace(fence, at)
        self.traces.append(trace)
        node = trace.node_before = self.nodes.get(incarnation, "")
        failures = [
            (f, found_at)
            for f, found_at in self.findings.values()
            if f.incarnation == incarnation or (f.node and f.node == node)
        ]
        traced = [finding.since for finding, _ in failures]
        trace.found_at = min((found_at for _, found_at in failures), default=at)
        failed = [self.failures[incarnation]] if incarnation in self.failures else []
        trace.failed_at = min([*failed, *traced, trace.found_at])
        if by := self._injected_by(incarnation, node, trace.found_at):
            trace.injected, trace.failed_at = True, max(by)
        self._mark_idle(incarnation, min([*traced, at]))
        self.findings = {
            key: finding_at for key, finding_at in self.findings.items() if finding_at[0].incarnation != incarnation
        }

    def _injected_by(self, incarnation: Incarnation, node: str, found_at: float) -> list[float]:
        """Return the times (s) of the faults that can have caused this incarnation's failure."""
        launched_at = self.launched.get(incarnation, self.began)
        return [
            fault.at for fault in self.injected.values() if fault.may_have_hit(incarnation, node, launched_at, found_at)
        ]

    def _end_decided(self, action: Finish, at: float) -> None:
        """Count failures that end the run: replicas are no longer fenced, so these failures have no recovery."""
        self.end_decided_at = at
        if action.outcome not in (Outcome.FAILED, Outcome.REJECTED):
            return
        failed = {
            finding.incarnation: found_since
            for finding, found_since in self.findings.values()
            if finding.incarnation is not None
        }
        for incarnation, found_at in failed.items():
            if self.incarnations.get(incarnation.replica) == incarnation and role_of(incarnation.replica) not in (
                AGENT,
                STANDBY_ROLE,
            ):
                self.fatal_failures += not self._injected_by(incarnation, self.nodes.get(incarnation, ""), found_at)

    def _finding_changed(self, finding: Finding, at: float) -> None:
        if finding.verdict is not Verdict.FAIL:
            self.findings.pop(finding.key, None)
        elif finding.key not in self.findings:
            self.findings[finding.key] = finding, at

    def _on_recovery_stage(self, event: ev.Joined | ev.VersionAvailable | ev.FirstWorkDone, at: float) -> None:
        trace = self.open_traces.get(event.incarnation)
        if trace is None:
            return
        if isinstance(event, ev.Joined):
            trace.joined_at = trace.joined_at or at
        elif isinstance(event, ev.VersionAvailable):
            trace.weights_at = trace.weights_at or at
        else:
            trace.worked_at = trace.worked_at or at

    def _phase(self, event: ev.PhaseEntered, at: float) -> None:
        if self.incarnations.get(event.incarnation.replica) != event.incarnation or event.incarnation in self.fenced:
            return
        if phase(event.phase).useful:
            self.work_intervals.begin(event.incarnation.replica, at)
        else:
            self.work_intervals.end(event.incarnation.replica, at)

    def _mark_idle(self, incarnation: Incarnation, at: float) -> None:
        if self.incarnations.get(incarnation.replica) == incarnation:
            self.work_intervals.end(incarnation.replica, at)

    def _effective(self) -> tuple[float, float]:
        """Return the seconds of effective training, and of all replicas working.

        A gang works while all of its ranks do.
        """
        wanted = sum(role.replicas for role in self.job.kind("trainer"))
        ranks = sum(role.replicas * role.ranks for role in self.job.kind("trainer"))
        all_members = sum(role.replicas * role.ranks for role in self.job.roles)
        effective = strict = 0.0
        for start, end, at_work in self.work_intervals.intervals(
            self.now if self.end_decided_at is None else self.end_decided_at
        ):
            span, rollouts = end - start, at_work["rollout"]
            if ranks and at_work["trainer"] >= ranks:
                effective += span
            elif rollouts and self.committed_at is not None:
                effective += max(0.0, end - max(start, self.committed_at)) * rollouts / (rollouts + wanted)
            if at_work.total() == all_members:
                strict += span
        return effective, strict

    def summary(self, run_dir: str) -> Summary:
        """Return the summary as of the newest event."""
        wall = max(self.now - self.began - self.ended_s, 1e-9)
        effective, strict = self._effective()
        rewards = [reward for _, reward in sorted(self.rewards.items())]
        return Summary(
            run=self.run,
            run_dir=run_dir,
            outcome=self.outcome,
            why=self.outcome_reason,
            steps=self.step,
            reward_first10=_mean(rewards[:10]),
            reward_last10=_mean(rewards[-10:]),
            faults=self.faults,
            recoveries=[trace.recovery() for trace in self.traces],
            unprovoked=sum(not trace.injected for trace in self.traces) + self.fatal_failures,
            ettr=round(effective / wall, 4),
            ettr_strict=round(strict / wall, 4),
            run_seconds=round(wall, 2),
            epochs=self.epochs,
            outage_tokens=self.outage_tokens,
            max_age=None if self.max_age is None else int(self.max_age),
            stale_groups=self.stale[0],
            stale_share=self.stale[1],
            drain_requests=self.drain_requests.requests,
        )


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
