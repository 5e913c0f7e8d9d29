"""Binds complete groups to steps, as a whole or in parts, and commits steps.

The rules on a batch are numbered as in docs/architecture/trajectories.md. The *open step* is the one after the
newest step that is bound completely. The open step may have parts already. A trainer that does not wait for whole
batches requests part 0, 1, … of the step, and each part gets the groups that are complete when it is requested. So the
pace of the trainer determines into which parts a step is cut. A part never changes. The number of groups of a step that
has parts never changes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Any

from ....core.types import TRAINER, Incarnation
from ...checkpoints.retention import CommitStatus
from ..durable.groups import Group
from ..durable.log import DurableState
from ..durable.records import Metrics, StepCommitted
from ..types import CommittedState, Denied, Done, NotReady, StepMetrics, StoredMetrics, TrainedStep
from .figures import step_figures
from .staleness import StalenessLimit

PARTS_PER_STEP = 8
"""Maximum number of parts of a step, unless the job sets the size of a part, or a part does not fit into a message."""
METRICS_PER_ANSWER = 256
"""Maximum number of steps in one answer: about 100 KB if a trainer reports a dozen metrics per step."""


class Bindings:
    """The complete groups that no step trains yet, and the rules by which they are bound.

    Args:
        durable: State and log of the store.
        staleness: Limit on the age of tokens.
        groups_per_batch: Number of groups that a step trains.
        groups_per_part: Minimum number of groups of a part, except for the last part of a step. If None, the minimum
            is an eighth of a step.
        max_part_bytes: Size of a part in bytes above which the part is cut into two. A part of one group is never cut.
        keep_uncommitted: Maximum number of finished, uncommitted steps besides the step that the trainer works on.
        checkpoint_every: Maximum number of steps of one commit.
        ignores_truncated: Whether answers that a limit cut give a group no signal (:func:`.figures.has_signal`).
    """

    def __init__(
        self,
        durable: DurableState,
        staleness: StalenessLimit,
        *,
        groups_per_batch: int,
        groups_per_part: int | None,
        max_part_bytes: int,
        keep_uncommitted: int,
        checkpoint_every: int,
        ignores_truncated: bool,
    ) -> None:
        self._durable = durable
        self._ignores_truncated = ignores_truncated
        self._state = durable.state
        self._staleness = staleness
        self._per_batch = groups_per_batch
        self._per_part = max(1, min(groups_per_part or ceil(groups_per_batch / PARTS_PER_STEP), groups_per_batch))
        self._max_part_bytes = max_part_bytes
        self._keep_uncommitted, self._checkpoint_every = keep_uncommitted, checkpoint_every
        self._ready: list[tuple[float, int]] = []
        """(step of the weights that the group was begun with, group) of every complete group that is not bound."""

    # ── complete groups ────────────────────────────────────────────────────────────────────────────────────────────
    def rebuild(self) -> None:
        """Build the queue of complete groups from the state."""
        groups = self._state.groups.values()
        self._ready = [self._entry(group) for group in groups if group.bound is None and not group.unscored]
        heapify(self._ready)

    def add(self, group: Group) -> None:
        """Add a group that has become complete."""
        heappush(self._ready, self._entry(group))

    def remove(self, group: Group) -> None:
        """Remove a complete group that is dropped."""
        self._ready.remove(self._entry(group))
        heapify(self._ready)

    def _entry(self, group: Group) -> tuple[float, int]:
        return self._staleness.begun_with(group), group.created.group

    @property
    def lacking(self) -> int:
        """Number of groups that the open step lacks."""
        return self._state.lacking(self._per_batch)

    # ── binding ────────────────────────────────────────────────────────────────────────────────────────────────────
    def bind(self, number: int, index: int | None = None) -> NotReady | Denied | None:
        """Bind groups to step ``number``: all that it lacks or, if ``index`` is given, its next part.

        Of the complete groups, those that expire first are bound. A group expires with the last step that its oldest
        token allows (:mod:`.staleness`). A part gets all complete groups that may be bound, but not more than fit into
        a message. Returns None if the part, or the whole step, is bound now or was already. Returns Denied if it is not
        the next part of the open step, or the step is not the open one. Returns NotReady while too many bound steps are
        uncommitted or too few groups are complete. With ``wait_for_late``, also returns NotReady while the binding
        would let an incomplete group miss its last step.
        """
        count, bound = len(self._state.steps.get(number, ())), self._state.is_bound(number)
        if bound if index is None else index in range(count):
            return None
        if bound:
            return Denied(f"part {index} of step {number} does not exist: the number of its parts is {count}")
        if rejection := self._check_order(number):
            return rejection
        if self._state.latest - self._state.committed > self._keep_uncommitted:
            return NotReady()
        if index not in (None, count):
            return Denied(f"part {index} is out of order: the next part of step {number} is part {count}")
        at_most = min(self._bindable(), self.lacking)
        if at_most < self._least(index):
            return NotReady()
        self._write_part(at_most)
        while index is None and not self._state.is_bound(number):  # the rest did not fit into one message
            self._write_part(self.lacking)
        return None

    def _check_order(self, number: int) -> Denied | None:
        committed, latest = self._state.committed, self._state.latest
        if number == latest + 1:
            return None
        return Denied(
            f"batch {number} is out of order: step {committed} was committed last, and step {latest} bound last"
        )

    def outlook(self, number: int) -> Denied | tuple[int, int, bool]:
        """Return what there is of a step; Denied if the step is out of order.

        The result is the number of its groups, how many of them are neither bound nor may be bound now, and whether its
        part 0 is bound or may be bound now.
        """
        if self._state.is_bound(number):
            return len(self._state.groups_of(number)), 0, True
        bindable = max(0, min(self._bindable(), self.lacking))
        bound = sum(len(part.groups) for part in self._state.open_parts)
        has_part = bound > 0 or bindable >= self._least(0)
        return self._check_order(number) or (bound + self.lacking, self.lacking - bindable, has_part)

    def _bindable(self) -> int:
        """Return how many complete groups may be bound to the open step now. The step may need fewer groups."""
        return int(min(len(self._ready), self._staleness.bindable()))

    def _least(self, index: int | None) -> int:
        """Return the minimum number of groups to bind for part ``index``, or for the batch if ``index`` is None."""
        return self.lacking if index is None else min(self._per_part, self.lacking)

    def incomplete(self, index: int | None) -> tuple[list[Group], int]:
        """Return the incomplete groups that a request of the trainer waits for, and how many of them must be completed.

        ``index`` is the part that the trainer requests, or None for the batch. If the number is larger than the number
        of groups, the request needs new groups, too. It is 0 or less if the request waits for something else.
        """
        if self._state.latest - self._state.committed > self._keep_uncommitted:
            return [], 0
        least = self._least(index)
        if (weights := self._staleness.blocking_weights(least)) is not None:
            groups = self._staleness.incomplete(weights)
            return groups, min(len(groups), least - int(self._staleness.bindable()))
        groups = [group for group in self._state.groups.values() if group.bound is None and group.unscored]
        return groups, least - len(self._ready)

    def _take(self, at_most: int) -> tuple[int, ...]:
        """Remove from the queue up to ``at_most`` groups that fit into one message, at least one group."""
        groups: list[int] = []
        left = self._max_part_bytes
        while len(groups) < at_most:
            group = self._ready[0][1]
            left -= self._state.message_bytes(group)
            if groups and left < 0:
                break
            heappop(self._ready)
            self._staleness.forget(self._state.groups[group], complete=True)
            groups.append(group)
        return tuple(groups)

    def _write_part(self, at_most: int) -> None:
        groups = self._take(at_most)
        self._durable.write(self._state.next_part(groups, self.lacking - len(groups)))

    def wait_reason(
        self,
        number: int,
        index: int | None,
        holder: Callable[[int], Incarnation | None],
        newest_weights: int | None,
        published: bool,
    ) -> str | None:
        """Return a text for people that says why batch ``number`` cannot be bound yet, or None if it can be bound.

        Args:
            number: Step that the trainer requested.
            index: Part of the step that the trainer requested; None for the batch.
            holder: Returns the rollout that a trajectory is leased to; None without a lease.
            newest_weights: Step of the newest weights that a rollout has; None if it is not known.
            published: True if the store has learned of a weight version that the trainer has published.
        """
        if self._state.is_bound(number) or (index is not None and index < len(self._state.open_parts)):
            return None
        if self._state.latest - self._state.committed > self._keep_uncommitted:
            step, last = self._state.committed + 1, self._state.committed + self._checkpoint_every
            which, call = (f"step {step}", f"me.commit({step}, files)")
            if last > step:
                which, call = f"one of the steps {step} to {last}", "me.commit(step, files)"
            return f"the trainer waits for the commit of {which}: {call} has not been called, or has not finished"
        least = self._least(index)
        missing = least - len(self._ready)
        if not (published or self._state.groups or self._state.latest):
            return (
                "the trainer waits for answers, and the rollouts wait for its first weights: me.publish(step, tensors)"
                " has not been called; call it before the first batch"
            )
        if (weights := self._staleness.blocking_weights(least)) is not None:
            is_any_welcome = index is not None and missing > 0
            if not is_any_welcome or len(self._staleness.incomplete(weights)) <= self.lacking:
                return f"the trainer waits for {self._staleness.describe(weights, holder)}"
        elif missing <= 0:
            return None
        oldest = self._staleness.oldest_allowed
        if oldest is not None and newest_weights is not None and newest_weights < oldest:
            return (
                f"the trainer waits for step {number}, and the rollouts wait for weights newer than those of step"
                f" {newest_weights}: the trainer must publish at least once in {self._staleness.publish_every} steps"
            )
        bound = sum(len(part.groups) for part in self._state.open_parts)
        rest = f" (bound already: {bound})" if bound else ""
        return f"the trainer waits for {missing} more of the {bound + self.lacking} groups of step {number}{rest}"

    def has_data(self) -> bool:
        """Return whether the trainer could train now, because groups of an uncommitted step are or can be bound."""
        if self._state.latest > self._state.committed or self._state.open_parts:
            return True
        return self._bindable() >= self.lacking

    # ── committing ─────────────────────────────────────────────────────────────────────────────────────────────────
    def commit(
        self,
        incarnation: Incarnation,
        number: int,
        manifest: dict[str, Any],
        digest: str,
        metrics: dict[str, float],
        earlier: Iterable[TrainedStep] = (),
    ) -> Done | Denied:
        """Commit a checkpoint and the consumption of all steps up to ``number`` in one record.

        A commit covers at most ``checkpoint_every`` steps. ``earlier`` contains the steps before ``number``. Each step
        must have been trained on the batch that is bound to it. The request may be repeated. The metrics are written
        before the commit. This is safe, because metrics of an uncommitted step are never read. The method implements
        rule 4 of docs/architecture/trajectories.md.
        """
        before, committed = self._state.commitments.get(number), self._state.committed
        described = {one.number: one for one in (*earlier, TrainedStep(number, digest, metrics))}
        if number <= committed:
            if before and before.digest == digest and before.manifest == manifest:
                return self._done(described)
            return Denied(f"step {number} was committed with another manifest or digest")
        if not self._state.is_bound(number) or number - committed > self._checkpoint_every:
            most = f"; a commit has at most {self._checkpoint_every} steps" if self._checkpoint_every > 1 else ""
            return Denied(f"commit of step {number} is out of order: step {committed} was committed last{most}")
        for step in range(committed + 1, number + 1):
            bound, trained = self._state.steps[step][-1].digest, described.get(step)
            if trained is None:
                return Denied(f"commit of step {number} is out of order: it does not name step {step}")
            if trained.digest != bound:
                return Denied(f"step {step} is bound to the batch {bound}, not to the batch {trained.digest}")
        for step in range(committed + 1, number + 1):
            self._durable.write(Metrics(step, self._with_figures(step, described[step].metrics)))
        self._durable.write(StepCommitted(number, incarnation, manifest, digest))
        return self._done(described)

    def _with_figures(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return the trainer's metrics of a step with the store's own figures, none of which the trainer replaces."""
        figures = step_figures(
            self._state,
            step,
            ages_limited=self._staleness.oldest_allowed is not None,
            ignores_truncated=self._ignores_truncated,
        )
        own = {f"trainer_{name}" if name in figures else name: value for name, value in metrics.items()}
        tokens = sum(sum(part.ages.values()) for part in self._state.steps[step])
        return {"tokens": float(tokens), **own, **figures}

    def _done(self, steps: Iterable[int]) -> Done:
        """Return the answer to a commit: the metrics of its steps. The checkpoint belongs to the last step."""
        *earlier, last = [StepMetrics(step, self._state.metrics.get(step, {})) for step in sorted(steps)]
        return Done(metrics=last.metrics, earlier=tuple(earlier))

    def committed(self) -> CommittedState:
        """Return number and manifest of the newest commit; both are None before the first commit."""
        newest = self._state.commitments.get(self._state.committed)
        return CommittedState(newest.number, newest.manifest) if newest else CommittedState(None, None)

    def commit_status(self) -> CommitStatus:
        """Return the newest commit and the folder of each commit; all are durable only after the log is flushed."""
        folders = {number: commit.manifest.get("folder", "") for number, commit in self._state.commitments.items()}
        return CommitStatus(self._state.committed, self._state.fences.get(TRAINER, -1), folders)

    def metrics(self, after: int) -> StoredMetrics:
        """Return stored metrics of the committed steps after ``after``, as many as fit into one answer."""
        stored = self._state.metrics
        steps = range(max(after, min(stored, default=0) - 1) + 1, self._state.committed + 1)
        return StoredMetrics(tuple(StepMetrics(step, stored.get(step, {})) for step in steps[:METRICS_PER_ANSWER]))
