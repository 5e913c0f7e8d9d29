"""Summarise a run from its events alone: recoveries with the times of their stages, effective training time, rewards,
and the nodes that an administrator should drain.

ETTR as RobustRL computes it (docs/sources.md): the time in which the trainer works counts whole; while it is restored
and rollouts go on, an interval counts #rollouts / (#rollouts + #trainers); with everything down it counts 0.
``ettr_strict`` counts only intervals in which every replica works. A failed replica counts as down from the first
symptom of its failure, whatever it reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from ...core.faults import FAULT_TRAITS, Fault, TargetKind
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


class DrainRequest(Struct, frozen=True):
    node: str
    cause: str
    """``gpu``, ``node`` ...; empty: a person wants it"""
    evidence: list[str]
    at: float
    """wall clock (s) of the node's exclusion"""
    requested_by: str
    """by whom; empty: by the run itself"""
    drain_error: str
    """why the cluster did not drain it"""


class DrainRequests:
    def __init__(self) -> None:
        self._excluded: dict[NodeName, tuple[Exclude, float]] = {}
        self._pending_drains: dict[str, Drain] = {}
        """by tag"""
        self._open: dict[NodeName, DrainRequest] = {}

    def apply(self, stamped: ev.Stamped) -> None:
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
        return list(self._open.values())


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
    """injected faults that were performed, by plan or by order"""
    recoveries: list[Recovery]
    unprovoked: int
    """failures that nobody injected: those that were recovered from, and those that ended the run"""
    ettr: float
    ettr_strict: float
    run_seconds: float
    epochs: int
    """managers that this run has had"""
    outage_tokens: int = 0
    """that rollouts generated while the trainer was away, and that are kept; of outages under one manager"""
    max_age: int | None = None
    """age of the oldest token that was trained on, in weight versions; None: no step told"""
    stale_groups: int = 0
    """that were dropped because a token was older than ``[sampling] staleness`` allows"""
    stale_share: float = 0.0
    """of all groups that were trained or dropped for it"""
    drain_requests: list[DrainRequest] = []
    """nodes that should be drained and that we may not drain"""


def _escaped(value: Any) -> Any:
    """A document of plain values whose text cannot command a terminal: evidence is what roles and nodes wrote, and a
    summary is looked at with ``cat``."""
    if isinstance(value, str):
        return escaped_lines(value)
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    return value


def write_summary(run: RunDir) -> Summary:
    """Replay the run's journal and leave ``summary.json``."""
    summary = summarize(replay(run), str(run.path))
    document = _escaped(msgspec.to_builtins(summary))
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return summary


def summarize(events: Iterable[ev.Stamped], run_dir: str = "") -> Summary:
    """The whole account. Raises ValueError when there are no events."""
    builder: _SummaryBuilder | None = None
    for stamped in events:
        if isinstance(stamped.event, ev.RunStarted):
            builder = _SummaryBuilder(stamped.event.run, stamped.event.job, stamped.at)
        if builder is not None:
            builder.apply(stamped)
    if builder is None:
        raise ValueError("the journal has no events")
    return builder.summary(run_dir)


class _InjectedFault(Struct):
    """One fault from its intent on, and whom it can have hit until when."""

    fault: Fault
    at: float
    incarnation: Incarnation | None
    node: str
    ended_at: float = inf
    """when it was over: whoever is launched on its node later was not hit"""
    effects_until: float = inf
    """what it can have done is found by then"""
    performed: bool = False

    def set_performed_at(self, at: float, silence: float) -> None:
        """It was performed at ``at``, and lasts for its ``seconds``. Its end may never be journaled, as on a disk that
        stays full, or after a manager's death; ``silence`` is what finding its effect may take."""
        if self.fault.seconds:
            self.ended_at = at + self.fault.seconds
            self.effects_until = self.ended_at + silence
        else:
            self.ended_at = at

    def may_have_hit(self, incarnation: Incarnation, node: str, launched_at: float, failed_at: float) -> bool:
        """Whether a failure of this life on this node can be its doing: what it was about, at that time."""
        if not self.at <= failed_at <= self.effects_until:
            return False
        hits = FAULT_TRAITS[self.fault.kind].target_kind
        on_node = hits is TargetKind.NODE and node == self.node and launched_at <= self.ended_at
        return hits is TargetKind.RUN or incarnation == self.incarnation or on_node


class _RecoveryTrace:
    """One failure of one replica, as it unfolds."""

    def __init__(self, fence: Fence, at: float) -> None:
        self.fence, self.fenced_at = fence, at
        self.rung = fence.rung
        self.incarnation = fence.incarnation.number + 1
        self.failed_at: float | None = None
        self.found_at: float | None = None
        self.injected = False
        self.node_before = self.node_after = ""
        self.joined_at: float | None = None
        self.weights_at: float | None = None
        self.worked_at: float | None = None

    def recovery(self) -> Recovery:
        needs_weights = role_of(self.fence.incarnation.replica) == "rollout"
        ready = self.weights_at if needs_weights else self.joined_at
        return Recovery(
            replica=self.fence.incarnation.replica,
            incarnation=self.incarnation,
            cause="; ".join(self.fence.why.evidence),
            rung=self.rung.value,
            injected=self.injected,
            node_before=self.node_before,
            node_after=self.node_after,
            detect_s=_duration(self.failed_at, self.found_at),
            decide_s=_duration(self.found_at, self.fenced_at),
            start_s=_duration(self.fenced_at, self.joined_at),
            weights_s=_duration(self.joined_at, self.weights_at) if needs_weights else None,
            first_work_s=_duration(ready, self.worked_at),
            total_s=_duration(self.failed_at, self.worked_at),
        )


class _SummaryBuilder:
    def __init__(self, run: str, job: RunSpec, at: float) -> None:
        self.run, self.job, self.began, self.now = run, job, at, at
        self.rewards: dict[int, float] = {}
        """by step"""
        self.step, self.faults, self.epochs = 0, 0, 0
        self.fatal_failures = 0
        """failures that nobody injected, and that ended the run"""
        self.outcome, self.outcome_reason = "running", ""
        self.failures: dict[Incarnation, float] = {}
        """when something about a life first went wrong"""
        self.findings: dict[str, tuple[Finding, float]] = {}
        """what stands against somebody now, and when it was found; by Finding.key"""
        self.injected: dict[str, _InjectedFault] = {}
        """by fault; those that were certainly not performed are left out"""
        self.nodes: dict[Incarnation, str] = {}
        self.launched: dict[Incarnation, float] = {}
        """when their launch was decided"""
        self.incarnations: dict[ReplicaId, Incarnation] = {}
        self.launches_by_tag: dict[str, Incarnation] = {}
        self.traces: list[_RecoveryTrace] = []
        self.traces_before_resume = 0
        """of these, before the run was resumed: who was not back by its end is not brought back by the next start"""
        self.fenced: dict[Incarnation, _RecoveryTrace] = {}
        """by the life that failed"""
        self.open_traces: dict[Incarnation, _RecoveryTrace] = {}
        """by the life that replaces"""
        self.work_intervals = WorkIntervals()
        self.committed_at: float | None = None
        """the first step"""
        self.end_decided_at: float | None = None
        """since when the run's end is decided"""
        self.ended: float | None = None
        self.drain_requests = DrainRequests()
        self.outage_tokens = 0
        self.max_age: float | None = None
        self.stale = 0, 0.0
        """groups dropped as stale, and their share, as of the newest step that told"""
        self.tokens_before: dict[int, int] = {}
        """when the trainer went; by epoch"""
        self.ended_s = 0.0
        """s from ends of the run until it was resumed"""

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
        if event.trainer_down:  # perhaps several times before it works again
            self.tokens_before.setdefault(self.epochs, event.total)
        else:
            before = self.tokens_before.get(self.epochs, event.total)
            self.outage_tokens += event.total - before
            self.tokens_before.clear()

    def _resumed(self, event: ev.Resumed, at: float) -> None:
        """The time since the run's end is not the run's."""
        for replica in self.incarnations:
            self.work_intervals.end(replica, at if self.end_decided_at is None else self.end_decided_at)
        self.ended_s += at - (at if self.ended is None else self.ended)
        self.job, self.outcome, self.outcome_reason, self.end_decided_at = event.job, "running", "", None
        self.findings.clear()
        self.traces_before_resume = len(self.traces)

    def _intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, InjectFault):  # just before the deed: detection is counted from here
            incarnation = action.incarnation or self.incarnations.get(ReplicaId(action.fault.target))
            self.injected[action.fault.id] = injected = _InjectedFault(action.fault, at, incarnation, action.node)
            injected.set_performed_at(at, self.job.limits.silence)
        elif isinstance(action, Launch):
            self.incarnations[action.incarnation.replica] = action.incarnation
            self.nodes[action.incarnation], self.launched[action.incarnation] = action.node, at
            self.launches_by_tag[action.step] = action.incarnation
            recent = reversed(self.traces[self.traces_before_resume :])
            trace = next((one for one in recent if one.fence.incarnation.replica == action.incarnation.replica), None)
            if trace is not None and trace.joined_at is None:
                trace.node_after, trace.incarnation = action.node, action.incarnation.number
                self.open_traces[action.incarnation] = trace

    def _on_rejected(self, tag: str) -> None:
        incarnation = self.launches_by_tag.get(tag)
        if incarnation is not None and incarnation in self.open_traces:  # it never lived: the failure before it goes on
            self.fenced[incarnation] = self.open_traces[incarnation]
        if tag.startswith("fault:"):
            self.injected.pop(tag.removeprefix("fault:"), None)

    def _injection(self, event: ev.FaultInjected, at: float) -> None:
        injected = self.injected.get(event.fault)
        if injected is None:
            return
        if not (event.ok or event.unknown):  # what fails later is not its doing
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
                injected.at = at  # it struck when the role called its API, perhaps long after the order

    def _fenced(self, fence: Fence, at: float) -> None:
        incarnation = fence.incarnation
        if role_of(incarnation.replica) in (AGENT, STANDBY_ROLE) or self.end_decided_at is not None:
            return
        if not fence.charged:  # it has not failed: it moves, or another member of its gang did
            self._mark_idle(incarnation, at)
            return
        if incarnation in self.fenced:  # given up before it came back
            self.fenced[incarnation].rung = fence.rung
            return
        trace = self.fenced[incarnation] = _RecoveryTrace(fence, at)
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
        """When the faults struck that can have made this life fail."""
        launched_at = self.launched.get(incarnation, self.began)
        return [one.at for one in self.injected.values() if one.may_have_hit(incarnation, node, launched_at, found_at)]

    def _end_decided(self, action: Finish, at: float) -> None:
        """The run's end is decided: nobody is fenced any more, so what failed last has no recovery."""
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
        """Seconds of effective training, and of everybody at work. A trainer of several ranks works while all do."""
        wanted = sum(role.replicas for role in self.job.kind("trainer"))
        ranks = sum(role.replicas * role.ranks for role in self.job.kind("trainer"))
        everybody = sum(role.replicas * role.ranks for role in self.job.roles)
        effective = strict = 0.0
        for start, end, at_work in self.work_intervals.intervals(
            self.now if self.end_decided_at is None else self.end_decided_at
        ):
            span, rollouts = end - start, at_work["rollout"]
            if ranks and at_work["trainer"] >= ranks:
                effective += span
            elif rollouts and self.committed_at is not None:
                effective += max(0.0, end - max(start, self.committed_at)) * rollouts / (rollouts + wanted)
            if at_work.total() == everybody:
                strict += span
        return effective, strict

    def summary(self, run_dir: str) -> Summary:
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


def _duration(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 3)


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
