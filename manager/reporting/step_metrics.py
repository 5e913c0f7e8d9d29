"""One row for each committed step, folded from a run's events: for ``rrl metrics`` and for trackers. Pure.

A row is complete once the clock reading that covers its step is recorded, at most a few seconds after the commit
(:mod:`rrl.manager.intake.interval_recorders`). If an evaluation of its weights is due (``[eval]``), the row also waits
for the result. Row 0 has the evaluation of the weights before the first step. Rows come in the order of their steps,
each step once, and a row is the same whenever and wherever the journal is read.

What happened between two commits (failures, restarts, values that roles logged) is part of the row of the later step.
In a run without a trainer each report of logged values is a row of its own, and ``step`` counts these rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.run_spec import RunSpec
from ...core.task_spec import EvalSpec
from ...core.types import TRAINER, Incarnation, Outcome, is_support
from ..model import events as ev
from ..model.figures.stream_figures import trained_tokens
from ..model.figures.token_ages import MAX_METRIC, P50_METRIC
from .failure_records import Failure
from .failure_timeline import FailureTimeline


class MarkKind(StrEnum):
    """The kind of event that a mark records."""

    FAILURE = "failure"
    """An incarnation failed and was fenced, or its failure ended the run."""
    RESTART = "restart"
    """A replica that was down works again."""
    MANAGER = "manager"
    """Another manager took over the run."""
    RESUMED = "resumed"
    """A user resumed the run after its end."""
    ENDED = "ended"
    """The run ended without being complete."""


class Mark(Struct, frozen=True, omit_defaults=True):
    """A failure, a restart, or another event that may have affected the metrics of the run."""

    at: float
    """Manager's time (s since 1970)."""
    kind: MarkKind
    about: str
    """The incarnation (``rollout/1#2``) or replica that the mark is about; ``manager`` or ``run``."""
    text: str
    cause: str = ""
    """Cause of a failure (:class:`rrl.core.types.Cause`); empty if no cause was found."""
    rung: str = ""
    """The repair that was chosen for a failure (:class:`rrl.manager.model.actions.Rung`); empty for other marks."""
    injected: bool = False
    """True if an injected fault can have caused the failure."""
    down_s: float | None = None
    """For a restart: seconds for which the replica did not work. None for other marks."""


class StepRow(Struct, frozen=True):
    """What is known about one committed step. Times are the manager's (s since 1970)."""

    step: int | None
    """The training step; 0 for the weights before the first step, if they were evaluated. None in the last row of a run
    that ended after its newest step, if something happened after this step."""
    at: float
    """When the manager learned of the commit."""
    incarnation: str
    """The incarnation of the trainer that reported the commit; empty if the commit was never reported."""
    seconds: float | None = None
    """Seconds since the previous commit, or for the first step since the trainer joined. Steps that were committed
    while no manager ran share the time of that outage evenly. None if the row belongs to no commit."""
    tokens: int | None = None
    """Tokens that the step trained on; None if its metrics do not contain them."""
    tokens_per_second: float | None = None
    tokens_per_second_gpu: float | None = None
    """The same for each GPU of the trainer; None without GPUs."""
    phase_seconds: dict[str, float] = {}
    """Seconds of the trainer by phase. Its clock is read at most every 5 s, and the steps between two readings share
    the seconds evenly."""
    token_age_p50: float | None = None
    """Median age of the tokens that the step trained on, in training steps (staleness); None if it was not reported."""
    token_age_max: float | None = None
    metrics: dict[str, float] = {}
    """All metrics that were committed with the step."""
    logged: dict[str, dict[str, float]] = {}
    """By replica, the newest values that its role has logged since the previous row (``me.log``)."""
    marks: tuple[Mark, ...] = ()
    """What happened since the previous row."""
    evaluation: dict[str, float] = {}
    """Results of an evaluation, by name; empty if there was none. The result ``step`` is the step whose weights were
    evaluated: this step, or the previous step if the run was resumed and began by evaluating its newest step."""


class StepRows:
    """Folds the events of a run, from the first one on, into rows."""

    def __init__(self) -> None:
        self._timeline = FailureTimeline()
        self._steps = 0
        """``run.steps`` of the job, the last step that can be committed; 0 if the run has no trainer."""
        self._gpus = 0
        """Number of GPUs of the trainer."""
        self._newest = 0
        """Step of the newest row."""
        self._previous_at: float | None = None
        """Time (s) from which the next commit's duration counts: the newest commit, or the trainer's join. None before
        the join."""
        self._eval: EvalSpec | None = None
        self._evaluated_from = 0
        """First step whose row may wait for its evaluation. A resume sets it to the step after the newest row."""
        self._evaluated = -1
        """Newest step with a known evaluation."""
        self._results: dict[int, dict[str, float]] = {}
        """Evaluations that no row contains yet, by step."""
        self._held: list[StepRow] = []
        """Rows that are complete, except that the first of them waits for the evaluation of its step."""
        self._pending: list[StepRow] = []
        """Rows that wait for a reading of the trainer's clock."""
        self._late: tuple[int, float] | None = None
        """Number of pending rows and value of ``_previous_at``, both at the newest change of managers. Rows that are
        added later share the time since this ``_previous_at`` evenly. None once these rows are complete."""
        self._clock: tuple[tuple[int, int], dict[str, int]] = (0, 0), {}
        """(incarnation number, start) of the trainer's process that reported last, and its time (ns) by phase."""
        self._spent = Counter[str]()
        """Time (ns) that the trainer spent in each phase, without the time that a row contains already."""
        self._logged: dict[str, dict[str, float]] = {}
        self._marks: list[Mark] = []

    def apply(self, stamped: ev.Stamped) -> list[StepRow]:
        """Apply an event, and return the rows that it completes."""
        at, event = stamped.at, stamped.event
        changes = self._timeline.apply(stamped)
        if changes.failures and isinstance(event, ev.Decided):
            self._marks += [_failure(failure, at) for failure in changes.failures if _counts(failure)]
        for outage, recovered in changes.ended_outages:
            if recovered:
                self._marks.append(_restart(_incarnation(event, outage.replica), at, outage.since))
        handler = _HANDLERS.get(type(event))
        return [] if handler is None else list(handler(self, event, at) or ())

    def rest(self) -> list[StepRow]:
        """Return the rows that are not complete yet, as far as they are known, without changing anything."""
        results = dict(self._results)
        rows = [_with_evaluation(row, results) for row in (*self._held, *self._with_times())]
        return [row for row in rows if row.step or row.evaluation]

    def _on_run_started(self, event: ev.RunStarted, at: float) -> None:
        self._steps, self._eval, self._gpus = event.job.steps, event.job.eval, _trainer_gpus(event.job)
        if self._eval is not None:
            self._held.append(StepRow(0, at, ""))

    def _on_manager_started(self, event: ev.ManagerStarted, at: float) -> None:
        if self._previous_at is not None:
            self._late = len(self._pending), self._previous_at
            self._marks.append(Mark(at, MarkKind.MANAGER, "manager", f"another manager started on {event.host}"))

    def _on_joined(self, event: ev.Joined, at: float) -> None:
        if event.incarnation.replica == TRAINER and self._previous_at is None:
            self._previous_at = at

    def _on_step_committed(self, event: ev.StepCommitted, at: float) -> None:
        """Add the row of the step, after the rows of earlier committed steps that no trainer has reported."""
        if self._newest < event.step <= self._steps:
            for step in range(self._newest + 1, event.step):
                self._pending.append(StepRow(step, at, ""))
            self._pending.append(row := self._row(event, at))
            self._newest = event.step
            self._previous_at = at if self._previous_at is None else self._previous_at + (row.seconds or 0.0)

    def _row(self, event: ev.StepCommitted, at: float) -> StepRow:
        """Return the row of a step; the steps of one commit share its time evenly."""
        metrics, left = event.metrics, max(event.step, event.commit) - event.step + 1
        logged, marks = self._take_events()
        return StepRow(
            event.step,
            at,
            str(event.incarnation),
            None if self._previous_at is None else (at - self._previous_at) / left,
            trained_tokens(metrics),
            token_age_p50=metrics.get(P50_METRIC),
            token_age_max=metrics.get(MAX_METRIC),
            metrics=metrics,
            logged=logged,
            marks=marks,
        )

    def _take_events(self) -> tuple[dict[str, dict[str, float]], tuple[Mark, ...]]:
        taken = self._logged, tuple(self._marks)
        self._logged, self._marks = {}, []
        return taken

    def _on_clocks_recorded(self, event: ev.ClocksRecorded, at: float) -> Iterator[StepRow]:
        for incarnation, clock in event.readings:
            if incarnation.replica != TRAINER:
                continue
            process = incarnation.number, clock.began
            now: dict[str, int] = {}
            for time in clock.times:
                now[time.phase] = now.get(time.phase, 0) + time.ns
            known, before = self._clock
            for phase, ns in now.items():
                self._spent[phase] += ns - (before.get(phase, 0) if known == process else 0)
            self._clock = process, now
        if self._pending:
            yield from self._complete()

    def _on_evaluated(self, event: ev.Evaluated, at: float) -> Iterator[StepRow]:
        if event.step <= self._evaluated:
            return
        self._evaluated = event.step
        self._results[event.step] = {"step": float(event.step), **event.metrics}
        if self._held and self._held[0].step == event.step == 0:
            self._held[0] = replace(self._held[0], at=at)
        yield from self._released()

    def _is_awaited(self, step: int | None) -> bool:
        """Return whether the row of a step waits for its evaluation."""
        if step is None or self._eval is None or step < self._evaluated_from or step <= self._evaluated:
            return False
        return self._eval.is_due(step, self._steps)

    def _released(self, *, all_of_them: bool = False) -> list[StepRow]:
        """Return the held rows that no longer wait for an evaluation, in order."""
        rows: list[StepRow] = []
        while self._held and (all_of_them or not self._is_awaited(self._held[0].step)):
            row = _with_evaluation(self._held.pop(0), self._results)
            if row.step or row.evaluation:
                rows.append(row)
        return rows

    def _on_values_logged(self, event: ev.ValuesLogged, at: float) -> Iterator[StepRow]:
        replica = str(event.incarnation.replica)
        self._logged[replica] = {**self._logged.get(replica, {}), **event.values}
        if not self._steps:
            logged, marks = self._take_events()
            self._newest += 1
            yield StepRow(self._newest, at, str(event.incarnation), logged=logged, marks=marks)

    def _on_resumed(self, event: ev.Resumed, at: float) -> Iterator[StepRow]:
        yield from self._complete(all_of_them=True)
        self._steps, self._previous_at, self._late = event.job.steps, None, None
        self._gpus = _trainer_gpus(event.job)
        self._eval, self._evaluated_from = event.job.eval, self._newest + 1
        self._marks.append(Mark(at, MarkKind.RESUMED, "run", f"resumed by {event.by}"))

    def _on_run_ended(self, event: ev.RunEnded, at: float) -> Iterator[StepRow]:
        yield from self._complete(all_of_them=True)
        if event.outcome is not Outcome.COMPLETED:
            self._marks.append(Mark(at, MarkKind.ENDED, "run", f"{event.outcome.value}: {event.why}"))
        if self._marks or self._logged:
            logged, marks = self._take_events()
            yield StepRow(None, at, "", logged=logged, marks=marks)

    def _complete(self, *, all_of_them: bool = False) -> list[StepRow]:
        rows = self._with_times()
        if rows:
            self._pending, self._late = [], None
            self._spent.clear()
        self._held += rows
        return self._released(all_of_them=all_of_them)

    def _with_times(self) -> list[StepRow]:
        """Return the pending rows with their shares of the trainer's time, and with their rates."""
        rows, (in_time, since) = self._pending, self._late or (len(self._pending), 0.0)
        shares = {phase: round(ns / 1e9 / len(rows), 6) for phase, ns in sorted(self._spent.items()) if ns > 0 and rows}
        even = (rows[-1].at - since) / (len(rows) - in_time) if len(rows) > in_time else 0.0
        seconds = [*(row.seconds for row in rows[:in_time]), *(even for _ in rows[in_time:])]
        return [_with_times(row, own, shares, self._gpus) for row, own in zip(rows, seconds, strict=True)]


_HANDLERS: dict[type, Callable[[StepRows, Any, float], Iterable[StepRow] | None]] = {
    ev.RunStarted: StepRows._on_run_started,
    ev.ManagerStarted: StepRows._on_manager_started,
    ev.Joined: StepRows._on_joined,
    ev.StepCommitted: StepRows._on_step_committed,
    ev.ClocksRecorded: StepRows._on_clocks_recorded,
    ev.Evaluated: StepRows._on_evaluated,
    ev.ValuesLogged: StepRows._on_values_logged,
    ev.Resumed: StepRows._on_resumed,
    ev.RunEnded: StepRows._on_run_ended,
}


def _trainer_gpus(job: RunSpec) -> int:
    return sum(role.per_member.gpus * role.ranks for role in job.kind("trainer"))


def _with_times(row: StepRow, seconds: float | None, phase_seconds: dict[str, float], gpus: int) -> StepRow:
    if not seconds or seconds < 0:  # the manager learned of this commit and the previous commit at the same time
        return replace(row, seconds=seconds, phase_seconds=phase_seconds)
    rate = None if row.tokens is None else row.tokens / seconds
    return replace(
        row,
        seconds=round(seconds, 6),
        tokens_per_second=None if rate is None else round(rate, 3),
        tokens_per_second_gpu=None if rate is None or not gpus else round(rate / gpus, 3),
        phase_seconds=phase_seconds,
    )


def _with_evaluation(row: StepRow, results: dict[int, dict[str, float]]) -> StepRow:
    """Return the row with its evaluation: the newest one of a step up to the row's step, if there is one.

    This evaluation and all older evaluations are removed from ``results``.
    """
    known = [step for step in results if row.step is not None and step <= row.step]
    taken = {step: results.pop(step) for step in known}
    return replace(row, evaluation=taken[max(taken)]) if taken else row


def _incarnation(event: Any, replica: str) -> str:
    """Return the incarnation whose event ended an outage, or the replica if the event names no incarnation."""
    incarnation = getattr(event, "incarnation", None)
    return str(incarnation) if isinstance(incarnation, Incarnation) else replica


def _restart(about: str, at: float, since: float) -> Mark:
    down_s = round(max(0.0, at - since), 3)
    return Mark(at, MarkKind.RESTART, about, f"works again after {down_s:.1f} s", down_s=down_s)


def _counts(failure: Failure) -> bool:
    """Return whether a failure becomes a mark: it was answered by a fence, or ended the run.

    Failures of agents and standby processes never become marks.
    """
    support = failure.incarnation is not None and is_support(failure.incarnation.replica)
    return not support and (failure.fence is not None or failure.ended_run)


def _failure(failure: Failure, at: float) -> Mark:
    """Return the mark of a failure at its fence, or at the end of the run that it caused."""
    finding, fence = failure.diagnosis.finding, failure.fence
    found = tuple(evidence.text for evidence in finding.evidence) if finding is not None else ()
    evidence = fence.why.evidence if fence is not None else found
    about = str(failure.incarnation) if failure.incarnation is not None else failure.node
    return Mark(
        at,
        MarkKind.FAILURE,
        about,
        "; ".join(evidence),
        cause=finding.cause.value if finding is not None else "",
        rung=failure.rung.value if failure.rung is not None else "",
        injected=failure.injected,
    )


def step_rows(events: Iterable[ev.Stamped]) -> Iterator[StepRow]:
    """Yield the rows of all events, in order, including the rows that are not complete yet."""
    rows = StepRows()
    for stamped in events:
        yield from rows.apply(stamped)
    yield from rows.rest()
