"""The time of committed training steps: the part of a run's time that counts, and its ETTR. Pure.

*ETTR* (effective training time ratio) estimates the duration of a clean run divided by the duration of this run, for
equal numbers of committed steps. A clean run has no faults and no protection: no standby process, no snapshot, one
checkpoint at the end. A duration lasts from the first ``train`` to the commit of the last step, and includes the time
in which a run had ended before it was resumed.

The estimate needs this run alone. Each committed step counts with the duration of the attempt that was committed, but
with no more than the median duration of the undisturbed steps. The first commit of a run counts in full if it was
undisturbed, because a clean run also loads libraries, compiles and waits for its first data. The estimate is the sum of
these times divided by the duration of this run. Training that was done again, waits and the time of every interruption
are losses. The cost of the protection in each step is part of the median, so the estimate does not show this cost.

These rules apply to attempts and steps:

- An attempt begins at the previous commit or, after an interruption, at the trainer's first ``train``. It ends with the
  commit.
- If a restarted trainer commits a step before it has trained, it commits the work of its predecessor, which a snapshot
  has kept. In this case the predecessor's attempt counts.
- If a commit covers several steps (``checkpoint_every``), a restarted trainer may continue from a snapshot of a step
  between two commits. The first weights that the restarted trainer publishes show which step this is. The attempt of
  its predecessor counts up to the time at which the predecessor published the same step.
- The steps of one commit share its time evenly. Steps that were committed while no manager ran also share their time
  evenly.
- A step is undisturbed if, since the previous commit, no replica was interrupted and the manager did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....core.types import TRAINER
from ...model import events as ev
from .interruptions import TRAIN, Interruption, Interruptions

REPORTED_TOGETHER_S = 0.1
"""Maximum time (s) between the first and the last report of steps that were committed while no manager ran. The store
reports all of them to the next manager at once (within 0.005 s for 12 steps, measured)."""


class Attempt(Struct, frozen=True):
    """An attempt at a step, or a part of an attempt, that an interruption ended before the commit.

    Times are the manager's (s).
    """

    since: float
    until: float
    ended_by: Interruption


class CommittedStep(Struct, frozen=True):
    """A commit of one or several steps, or several commits that were reported together. Times are the manager's (s)."""

    step: int
    """Newest of the committed steps."""
    count: int
    since: float
    """Time of the previous commit, or of the first ``train``."""
    at: float
    attempt_since: float
    attempt_until: float
    """Time at which the committed attempt ended; it began at ``attempt_since``."""
    discarded: tuple[Attempt, ...]
    """Attempts since the previous commit, as far as their work was lost."""
    disturbed: bool
    first: bool
    """True for the first commit of the run, whose duration is part of no median."""
    evaluated: bool
    """True if the trainer waited for an evaluation before this step."""
    kept_s: float = 0.0
    """Seconds of earlier attempts at these steps, as far as snapshots kept their work."""

    @property
    def first_step(self) -> int:
        """Return the oldest of the committed steps."""
        return self.step - self.count + 1

    def useful_s(self, medians: StepMedians) -> float:
        """Return how many seconds of the attempts at this commit count in the ETTR.

        At most the sum of the medians of the commit's steps counts. An undisturbed first commit counts in full.
        """
        attempted = self.kept_s + self.attempt_until - self.attempt_since
        if self.first and not self.disturbed:
            return attempted
        most = (self.count - 1) * medians.plain_s + (medians.evaluated_s if self.evaluated else medians.plain_s)
        return min(attempted, most)


class StepMedians(Struct, frozen=True):
    """Median seconds of the undisturbed steps; steps after a wait for an evaluation have a median of their own.

    A wait for an evaluation is not lost time, because a run without failures waits for evaluations, too.
    """

    plain_s: float
    evaluated_s: float


class CommittedSteps:
    """Collects the committed steps of a run, from its first event on.

    Each event must be applied to ``interruptions`` first.
    """

    def __init__(self, interruptions: Interruptions) -> None:
        self.steps: list[CommittedStep] = []
        self.began: float | None = None
        """Time (s) of the first ``train``. If no ``train`` was recorded before the first commit, time of the trainer's
        join. None before either is known."""
        self.began_with_train = False
        self._interruptions = interruptions
        self._newest = 0
        self._joined_at: float | None = None
        self._previous_at = 0.0
        self._attempt_since: float | None = None
        """Begin of the current attempt; None until the trainer has begun one."""
        self._discarded: list[Attempt] = []
        self._kept: list[tuple[int, Attempt]] = []
        """Attempts since the newest commit, as (step, attempt). Snapshots have kept their work up to ``step``."""
        self._published: list[tuple[int, float]] = []
        """Steps whose weights were published in the newest attempt, and when (s)."""
        self._disturbed = False
        self._evaluated = False
        self._reported_since: float | None = 0.0
        """Time (s) of the first commit that was reported after the newest change of managers or resume. None between
        the change and this commit; 0 if there was no change."""

    def apply(self, stamped: ev.Stamped, begun: Sequence[Interruption]) -> None:
        """Apply an event; ``begun`` are the interruptions that the event begins."""
        for interruption in begun:
            self._on_interruption(interruption, stamped.at)
        handler = _HANDLERS.get(type(stamped.event))
        if handler is not None:
            handler(self, stamped.event, stamped.at)

    @property
    def ended(self) -> float | None:
        """Return the time (s) of the newest commit; None before the first commit."""
        return self.steps[-1].at if self.steps else None

    @property
    def wall_s(self) -> float:
        """Return the seconds from the first ``train`` to the newest commit; 0 before the first commit."""
        return 0.0 if self.began is None or self.ended is None else self.ended - self.began

    @property
    def discarded_since_last_commit_s(self) -> float:
        """Return the seconds of the discarded attempts since the newest commit."""
        return sum(attempt.until - attempt.since for attempt in self._discarded)

    @property
    def step_s(self) -> float | None:
        """Return the median seconds of the undisturbed steps without an evaluation; None if no step is undisturbed."""
        medians = self.medians
        return None if medians is None else medians.plain_s

    @property
    def medians(self) -> StepMedians | None:
        """Return the medians of the undisturbed steps; None if no step is undisturbed.

        Steps after a wait for an evaluation are one kind of step, all others the other kind. If a kind has no
        undisturbed step, the median of the other kind is used.
        """
        undisturbed = [step for step in self.steps if not (step.disturbed or step.first)]
        if not undisturbed:
            return None
        plain = [(step.at - step.since) / step.count for step in undisturbed if not step.evaluated]
        plain_s = median(plain or [(step.at - step.since) / step.count for step in undisturbed])
        evaluated = [step.at - step.since - (step.count - 1) * plain_s for step in undisturbed if step.evaluated]
        return StepMedians(plain_s, median(evaluated) if evaluated else plain_s)

    @property
    def ettr(self) -> float | None:
        """Return the ETTR; None if no step is undisturbed."""
        medians, wall_s = self.medians, self.wall_s
        if medians is None or wall_s <= 0:
            return None
        return sum(step.useful_s(medians) for step in self.steps) / wall_s

    def _on_interruption(self, interruption: Interruption, at: float) -> None:
        self._disturbed = True
        if interruption.replica == TRAINER and self._attempt_since is not None:
            until = max(self._attempt_since, min(interruption.failed_at, at))
            self._discarded.append(Attempt(self._attempt_since, until, interruption))
            self._attempt_since = None

    def _on_disturbance(self, event: ev.ManagerStarted | ev.Resumed, at: float) -> None:
        self._disturbed = True
        if self.steps:
            self._reported_since = None

    def _on_evaluated(self, event: ev.Evaluated, at: float) -> None:
        self._evaluated = True

    def _on_joined(self, event: ev.Joined, at: float) -> None:
        if self._joined_at is None and event.incarnation.replica == TRAINER:
            self._joined_at = at

    def _on_phase(self, event: ev.PhaseEntered, at: float) -> None:
        if event.phase == TRAIN and event.incarnation.replica == TRAINER:
            if self.began is None:
                self.began, self._previous_at, self.began_with_train = at, at, True
                self._disturbed = bool(self._interruptions.open)  # interruptions that have ended do not count
            self._begin_attempt(at)

    def _on_version(self, event: ev.VersionAvailable, at: float) -> None:
        if event.incarnation.replica != TRAINER:
            return
        step = event.version.step
        if self._attempt_since is not None:
            self._published.append((step, at))
        elif self._discarded or self._kept:
            self._on_restored(step)

    def _on_restored(self, step: int) -> None:
        """Divide the work of the earlier attempts into kept and lost work, once the trainer has restored ``step``."""
        lost = [attempt for until, attempt in self._kept if until > step]
        self._kept = [kept for kept in self._kept if kept[0] <= step]
        if self._discarded and step > max([self._newest, *(until for until, _ in self._kept)]):
            last = self._discarded.pop()
            until = next((at for published, at in self._published if published >= step), last.until)
            self._kept.append((step, Attempt(last.since, min(until, last.until), last.ended_by)))
            if until < last.until:
                lost.append(Attempt(until, last.until, last.ended_by))
        self._discarded += lost

    def _on_first_work(self, event: ev.FirstWorkDone, at: float) -> None:
        if event.incarnation.replica == TRAINER and self.began is not None:
            self._begin_attempt(at)

    def _begin_attempt(self, at: float) -> None:
        if self._attempt_since is None and TRAINER not in self._interruptions.open:
            self._attempt_since, self._published = at, []

    def _on_committed(self, event: ev.StepCommitted, at: float) -> None:
        if event.step <= self._newest or not event.completes_commit:
            return
        if self._reported_since is None:
            self._reported_since = at
        elif self.steps and at < self._reported_since + REPORTED_TOGETHER_S:
            self._extend_newest(event.step, at)
            return
        if self.began is None:
            self.began = self._previous_at = self._attempt_since = at if self._joined_at is None else self._joined_at
        if self._attempt_since is not None:
            since, until = self._attempt_since, at
        elif self._kept:  # a snapshot has kept the work of the predecessor
            since, until = self._kept[-1][1].since, self._kept.pop()[1].until
        elif self._discarded:  # a snapshot has kept this work, but no weights of it were reported
            kept = self._discarded.pop()
            since, until = kept.since, kept.until
        else:
            since, until = self._previous_at, at
        disturbed = self._disturbed or bool(self._interruptions.open)
        self.steps.append(
            CommittedStep(
                event.step,
                event.step - self._newest,
                self._previous_at,
                at,
                since,
                until,
                tuple(self._discarded),
                disturbed,
                not self.steps,
                self._evaluated,
                sum(attempt.until - attempt.since for _, attempt in self._kept),
            )
        )
        self._newest, self._previous_at = event.step, at
        self._attempt_since = None if TRAINER in self._interruptions.open else at
        self._discarded, self._kept, self._published = [], [], []
        self._disturbed, self._evaluated = bool(self._interruptions.open), False

    def _extend_newest(self, step: int, at: float) -> None:
        """Add the steps up to ``step`` to the newest commit, because both commits were reported together."""
        newest = self.steps.pop()
        self.steps.append(
            replace(
                newest,
                step=step,
                count=newest.count + step - self._newest,
                at=at,
                attempt_until=max(newest.attempt_until, at),
                evaluated=newest.evaluated or self._evaluated,
            )
        )
        self._newest, self._previous_at, self._evaluated = step, at, False
        self._attempt_since = None if TRAINER in self._interruptions.open else at


_HANDLERS: dict[type, Callable[[CommittedSteps, Any, float], None]] = {
    ev.ManagerStarted: CommittedSteps._on_disturbance,
    ev.Resumed: CommittedSteps._on_disturbance,
    ev.Evaluated: CommittedSteps._on_evaluated,
    ev.Joined: CommittedSteps._on_joined,
    ev.PhaseEntered: CommittedSteps._on_phase,
    ev.FirstWorkDone: CommittedSteps._on_first_work,
    ev.VersionAvailable: CommittedSteps._on_version,
    ev.StepCommitted: CommittedSteps._on_committed,
}
