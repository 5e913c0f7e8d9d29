"""The rules of the trajectory store: how it creates, leases, scores, binds, commits and drops trajectories.

Single-threaded and synchronous. Each method evaluates one request and returns its answer. An answer may be sent only
after :meth:`Store.flush`, which makes everything durable at once. The rules are explained in
docs/architecture/trajectories.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...core.run_spec import ExtraSpec, batches_ahead
from ...core.types import TRAINER, DataReport, Incarnation, OutsideKind, OutsideWait, Version, is_trainer, role_of
from ..checkpoints.retention import CommitStatus
from .durable.audit import Audit
from .durable.groups import Group, TrajectoryState, as_item, as_to_score, cut_answers, new_segments
from .durable.log import DurableState
from .durable.records import (
    DropCause,
    Fence,
    GroupDropped,
    Outcomes,
    PackedSegment,
    ScoresRecorded,
    SegmentsAppended,
    is_evaluated,
    pack,
)
from .episodes.rules import Episodes, EpisodeSettings
from .leases import Membership, ScoringQueue, WorkQueue, is_guest
from .partition import Division, cut
from .prompts import GroupMaker, ItemPrompts, ScorerFaults
from .sample_writer import SampleWriter
from .steps.bindings import Bindings
from .steps.evaluations import Evaluations, EvaluationSettings
from .steps.figures import Refill, outcomes_of
from .steps.forecast import Outlook, balance
from .steps.staleness import StalenessLimit
from .types import (
    Balance,
    CommittedState,
    Denied,
    Done,
    Leased,
    NewestVersion,
    NotReady,
    PackedPart,
    PartBound,
    Prompt,
    Score,
    Scoring,
    Segment,
    Share,
    StoredMetrics,
    TrainedStep,
)
from .versions import VersionDirectory

_CREATED_PER_REQUEST = 64
"""Maximum number of groups created per request for work: the store's only thread must make a prompt for each."""


class Store:
    """All trajectories of a run.

    Opening a store supersedes the process that has it open. At most ``(ahead + 1) * groups_per_batch`` groups are
    unbound at a time, which limits how far the rollouts run ahead of the trainer; ``ahead`` is ``max_ahead_batches``,
    or more if the rollouts have more places than that (:func:`rrl.core.run_spec.batches_ahead`).

    Args:
        folder: Folder of the log.
        group_size: Number of trajectories per prompt.
        groups_per_batch: Number of groups that a step trains.
        max_ahead_batches: Number of batches that the rollouts may prepare beyond the next batch.
        fleet_varies: Whether this number may rise with the places of the rollouts.
        max_new_tokens: Maximum number of tokens after a prompt.
        next_prompt: Returns the prompt of an item. If it raises an exception, the item is dropped.
        keep_uncommitted: Maximum number of steps that may be finished while a checkpoint is written.
        checkpoint_every: Maximum number of steps of one commit.
        staleness: Limit on the age of tokens in training steps (:mod:`.steps.staleness`), or None for no limit.
        wait_for_late: True if a step waits for the groups that no later step may train; False if they are dropped.
        groups_per_part: Minimum number of groups of a part, except for the last part of a step. If None, the minimum
            is an eighth of a step.
        max_part_bytes: Size of a part in bytes above which the part is cut into two.
        window: Number of batches among which prompts are ordered by expected length, the longest first.
        compact_from: Size of the log in bytes below which it is not compacted.
        retained_commits: Number of commits whose digests are kept, for ``rrl export``; at least 2.
        extras: The extras of each segment, by name (``[sampling.extras]``).
        episodes: Settings of a job with agents, whose groups have an empty prompt; None for any other job.
        evaluations: Settings of a job with evaluations; None for any other job.
        rollout_roles: Names of the roles that generate beside the guests.
        end_tokens: Tokens that end an answer. An answer with ``max_new_tokens`` tokens, of which the last is none of
            them, was cut.
        refill_limit: Number of groups without signal, as a multiple of ``groups_per_batch``, that are dropped between
            two steps; None if groups are trained without signal, too.
        ignores_truncated: Whether answers that were cut give a group no signal.
        samples: Keeps samples of the committed steps; None to keep none.

    Raises:
        LogDamaged: Durable records cannot be read.
        LogFormatError: The log was written by a version of rrl whose records this version cannot read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group_size: int,
        groups_per_batch: int,
        max_ahead_batches: int,
        fleet_varies: bool = True,
        max_new_tokens: int,
        next_prompt: Callable[[int], Prompt],
        keep_uncommitted: int = 1,
        checkpoint_every: int = 1,
        staleness: int | None = None,
        wait_for_late: bool = True,
        groups_per_part: int | None = None,
        max_part_bytes: int = 255 * 2**20,
        window: int = 1,
        compact_from: int = 32 * 2**20,
        retained_commits: int = 0,
        extras: Mapping[str, ExtraSpec] | None = None,
        episodes: EpisodeSettings | None = None,
        evaluations: EvaluationSettings | None = None,
        rollout_roles: Collection[str] = ("rollout",),
        end_tokens: Collection[int] = (),
        refill_limit: float | None = None,
        ignores_truncated: bool = False,
        samples: SampleWriter | None = None,
    ) -> None:
        self._samples = samples
        self._group_size, self._rollout_roles = group_size, rollout_roles
        self._has_agents = episodes is not None
        self._extras = extras or {}
        raised_to = staleness if fleet_varies else None
        self._batches_ahead = partial(batches_ahead, max_ahead_batches, raised_to, group_size * groups_per_batch)
        self._max_new = max_new_tokens
        self._end_tokens = end_tokens
        self._per_batch = groups_per_batch
        self._prompts = ItemPrompts(next_prompt)
        self.newest_weights: int | None = None
        """Step of the newest weights that a rollout has reported to this process in a request for work."""
        self._membership = Membership()
        self._division = Division()
        self._scorer_faults = ScorerFaults()
        self._versions = VersionDirectory()
        self._durable = DurableState(folder, compact_from, max_new_tokens, retained_commits)
        self._state = self._durable.state
        self._scoring = ScoringQueue(self._state.trajectories)
        self._groups = GroupMaker(
            self._durable, self._prompts, group_size, window * groups_per_batch if window > 1 else 1
        )
        self._staleness = StalenessLimit(self._state, staleness, groups_per_batch, wait_for_late)
        self._refill = Refill(self._state, (refill_limit or 0.0) * groups_per_batch, ignores_truncated, self.drop)
        self._bindings = Bindings(
            self._durable,
            self._staleness,
            groups_per_batch=groups_per_batch,
            groups_per_part=groups_per_part,
            max_part_bytes=max_part_bytes,
            keep_uncommitted=keep_uncommitted + checkpoint_every - 1,
            checkpoint_every=checkpoint_every,
            ignores_truncated=ignores_truncated,
        )
        self._work = WorkQueue(self._state, self._staleness, groups_per_batch)
        self.evaluations = Evaluations(
            self._durable, evaluations, lambda: self.newest_version, self._end_leases, end_tokens
        )
        self.episodes = Episodes(self, self._durable, self._staleness, self._work, self.evaluations, episodes)
        self.evaluations.end_abandoned()
        self.evaluations.finish()  # earlier settings or a crash may have prevented this record
        self._index()
        self.episodes.rebuild()
        if samples is not None:  # the process before this one may have died between a commit and its samples
            samples.take(self._state, self._state.committed)
        self._drop_untrainable()  # after a change of the limits, or after a crash just before a drop

    def _index(self) -> None:
        """Build the queues from the state: trajectories to extend, trajectories to score, complete groups to bind."""
        self._scoring.rebuild()
        self._work.rebuild()
        self._bindings.rebuild()

    def flush(self) -> None:
        """Make the records behind all answers since the last flush durable.

        After OSError or Superseded this store is unusable, and none of these answers may be sent.
        """
        self._durable.flush()
        if self._samples is not None:
            self._samples.write(self._state.committed)

    @property
    def changed_turns(self) -> set[int]:
        """The turns that have changed (:attr:`.durable.episode_records.EpisodeRecords.changed`)."""
        return self._state.episode_records.changed

    def audit(self) -> Audit:
        """Compute the fate of every trajectory from the durable records."""
        return self._durable.audit()

    def close(self) -> None:
        """Close the log."""
        self._durable.close()

    # ── membership ─────────────────────────────────────────────────────────────────────────────────────────────────
    def update_membership(self, current: Iterable[Incarnation]) -> None:
        """Replace the current incarnations by those that the manager reports.

        Leases of all other incarnations end, and older trainers are fenced.
        """
        self._membership.update(current)
        for gang in {incarnation.gang for incarnation in self._membership.current}:
            if self._state.fences.get(gang.replica, gang.number) < gang.number:
                self._durable.write(Fence(gang.replica, gang.number))
        self.evaluations.end_abandoned()
        self._work.release_departed(self._membership.current)
        self.episodes.release_departed(self._membership.current)
        self.evaluations.release_departed(self._membership.current)
        self._scoring.release_departed(self._membership.current)
        self._versions.remove(lambda incarnation: self._membership.fenced_reason(incarnation) is not None)

    def check_worker(self, incarnation: Incarnation) -> Denied | NotReady | None:
        """Return why a request of a rollout or reward replica is not served; None if it is served."""
        return self._membership.check_worker(incarnation)

    def _check_trainer(self, incarnation: Incarnation) -> Denied | None:
        rejection = self._membership.check_trainer(incarnation, self._durable)
        self.evaluations.end_abandoned()
        return rejection

    # ── weight versions ────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def newest_version(self) -> NewestVersion | None:
        """The newest weight version and its sources."""
        return self._versions.newest

    def report_versions(self, source: Incarnation, versions: tuple[Version, ...]) -> Denied | NotReady | None:
        """Record the versions that ``source`` serves, if any. Return why the report is rejected; None if accepted.

        A report is denied if its sender is fenced, or if a trainer reports a version of another incarnation.
        """
        if not is_trainer(source.replica):
            rejection: Denied | NotReady | None = self.check_worker(source)
        elif source != source.gang or any(one.incarnation != source.number for one in versions):
            rejection = Denied(f"{source} is not the publisher of {versions[0] if versions else 'any version'}")
        else:
            rejection = self._check_trainer(source)
        if rejection is None and versions:
            self._versions.report(source, versions)
        return rejection

    # ── rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def lease(
        self,
        incarnation: Incarnation,
        at_most: int,
        holding: Sequence[int] | None = (),
        weights: int | None = None,
        now: float | None = None,
        open_until: float = -math.inf,
    ) -> Leased | Denied | NotReady:
        """Lease unfinished trajectories, in the order of the last steps that may train their groups.

        Answers of an evaluation come before all trajectories, and are never leased together with them.
        Trajectories that are leased to this incarnation but not in ``holding`` come next, unless ``holding`` is None.
        A trajectory is not leased if tokens sampled with weights of step ``weights`` would make its group too old.
        ``now`` is the time of the request in seconds; None if the time is unknown. Without work the request stays open
        until the time ``open_until`` (s).
        """
        if rejection := self.check_worker(incarnation):
            return rejection
        if evaluated := self.evaluations.lease(incarnation, at_most, holding, weights):
            return Leased(evaluated)
        for trajectory in holding or ():
            if not self._work.may_write(incarnation, trajectory):
                continue
            current = self._state.answers[trajectory]
            if not current.finished:
                self._work.leases.assign(trajectory, incarnation)  # a restart of the store ended this lease
                if self._staleness.allows(current.group, weights):
                    self._work.mark_begun(current.group, weights)
        if weights is not None:
            self.newest_weights = max(weights, self.newest_weights or 0)
        leased_before = () if holding is None else self._work.leases.leased_to(incarnation) - set(holding)
        again = sorted(leased_before)[:at_most]
        tracks = [self._state.answers[trajectory] for trajectory in again]
        self._work.requested(incarnation, at_most, weights, open_until)
        shared = False
        while len(tracks) < at_most and not shared:
            self._create_groups(weights)
            leased = self._work.lease(incarnation, at_most - len(tracks), weights, now)
            tracks += leased
            shared = self._work.by_length or not leased
        if self._extras:
            tracks = self._work.within_message(tracks)
        first = self._work.first()
        waits = self._may_begin_group if first is None else not self._staleness.allows(first.group, weights)
        outdated = not tracks and at_most > 0 and waits
        items = (self.evaluations.as_leased(as_item(track, self._max_new), track) for track in tracks)
        return Leased(tuple(items), outdated)

    def _create_groups(self, weights: int | None) -> None:
        """Create a group if no trajectory waits for a rollout and the limits allow it.

        If lengths are expected to differ, all groups of the batch are created, so that the longest can be leased first.
        """
        if not self._staleness.allows(None, weights):
            return
        created = 0
        while self._may_begin_group and created < _CREATED_PER_REQUEST:
            begun_batch = self._work.by_length and self._state.next_group % self._per_batch
            if self._work.first() is not None and not begun_batch:
                return
            self.create_group()
            created += 1

    @property
    def _may_begin_group(self) -> bool:
        """True if a request for work may create a group. With agents, only requests for episodes create groups."""
        return self._may_create_group and not self._has_agents

    @property
    def _may_create_group(self) -> bool:
        """True if fewer groups are unbound than allowed; the groups that the open step lacks are always allowed."""
        return self._state.unbound < max(self._most_unbound, self._bindings.lacking)

    @property
    def _most_unbound(self) -> int:
        return (self._batches_ahead(self._work.places) + 1) * self._per_batch

    def create_group(self) -> bool:
        """Create a group if the limits allow it, offer its trajectories to rollouts, and return True if created."""
        if not self._may_create_group:
            return False
        for track in self._groups.create().answers:
            self._work.offer(track)
        return True

    def append(
        self,
        incarnation: Incarnation,
        segments: Sequence[Segment],
        finished: Sequence[int] = (),
        now: float | None = None,
    ) -> Done | Denied | NotReady:
        """Append all segments, or none; repeating the request changes nothing.

        A trajectory whose new tokens are too old for its group to be trained in time is taken away from its rollout
        (see :meth:`_check_staleness`). ``now`` is the time of the request in seconds; None if the time is unknown.
        """
        if rejection := self.check_worker(incarnation):
            return rejection
        try:
            packed_segments = [pack(segment, self._extras) for segment in segments]
        except (OverflowError, TypeError, ValueError) as error:
            return Denied(f"malformed segment: {error}")
        append_evaluated, lost = self.evaluations.append(incarnation, packed_segments, finished)
        packed_segments = [packed for packed in packed_segments if not is_evaluated(packed.trajectory)]
        finished = [trajectory for trajectory in finished if not is_evaluated(trajectory)]
        lost |= {packed.trajectory for packed in packed_segments if not self._check_staleness(incarnation, packed)}
        written = {*(packed.trajectory for packed in packed_segments), *finished}
        lost.update(trajectory for trajectory in written if not self._work.may_write(incarnation, trajectory))
        new, ends = new_segments(self._state.answers, packed_segments, finished, lost, self._max_new)
        if lost:
            text = f"a trajectory is not leased to {incarnation}, or is stored with other tokens at the same position"
            return Denied(text, lost=tuple(sorted(lost)))
        append_evaluated()
        if new or ends:
            truncated = cut_answers(self._state.answers, new, ends, self._max_new, self._end_tokens)
            self._durable.write(SegmentsAppended(incarnation, tuple(new), tuple(sorted(ends)), truncated))
        for packed in new:
            self._work.leases.assign(packed.trajectory, incarnation)
        for trajectory in ends & self._state.trajectories.keys():
            self._scoring.offer(trajectory)
        if times := self._work.appended(incarnation, new, ends, now):
            self._durable.write(times)
        return Done()

    def hand_over(self, incarnation: Incarnation) -> None:
        """End all leases of a rollout, so that other rollouts continue its trajectories."""
        self._work.hand_over(incarnation)
        self.evaluations.hand_over(incarnation)

    def _check_staleness(self, incarnation: Incarnation, packed: PackedSegment) -> bool:
        """Return whether the trajectory's group can still be trained in time with this segment.

        If not, this method drops the group or, with ``wait_for_late``, offers the trajectory to another rollout. An
        evaluation accepts the tokens of its own weights.
        """
        if not self._work.may_write(incarnation, packed.trajectory):
            return False
        track = self._state.answers[packed.trajectory]
        group = track.group
        if group.is_evaluated:
            if self._state.evaluations.accepts(packed):
                return True
            self._work.withdraw([track])
            self._work.offer(track)
            return False
        if group.bound is not None or self._staleness.allows(group, packed.step):
            self._work.mark_begun(group, packed.step)
            return True
        if self._staleness.wait_for_late:
            self._work.withdraw([track])
            self._work.offer(track)
            return False
        if self._staleness.too_old(packed.step):
            self.drop(group, self._staleness.reason, DropCause.STALE)
            return False
        self._work.mark_begun(group, packed.step)
        return True

    # ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def lease_scoring(
        self, incarnation: Incarnation, at_most: int, holding: Sequence[int] = ()
    ) -> Scoring | Denied | NotReady:
        """Lease the oldest finished trajectories without a score."""
        if rejection := self.check_worker(incarnation):
            return rejection
        evaluated = self.evaluations.lease_scoring(incarnation, at_most, holding)
        tracks = self._scoring.lease(incarnation, at_most - len(evaluated), holding)
        return Scoring((*evaluated, *map(as_to_score, tracks)))

    def post_scores(
        self,
        incarnation: Incarnation,
        scores: Sequence[Score],
        failed: Mapping[int, str] | None = None,
        faulty: Sequence[int] = (),
    ) -> Done | Denied | NotReady:
        """Record scores, all of which must be finite. Ignore second scores, and scores of dropped trajectories."""
        if rejection := self.check_worker(incarnation):
            return rejection
        tracks = self._state.trajectories
        by_trajectory = {
            score.trajectory: score
            for score in reversed(scores)
            if score.trajectory in tracks and not is_evaluated(score.trajectory)
        }
        if not all(tracks[trajectory].finished for trajectory in by_trajectory):
            return Denied("one of the scored trajectories is not finished")
        if not all(score.is_finite for score in scores):
            return Denied("a score is not finite; report the trajectory as failed instead")
        if any(score.agents for score in scores):
            return Denied("a score has agents; only the agent of an episode gives rewards by name")
        self.evaluations.post_scores(scores, failed or ())
        new = tuple(score for score in by_trajectory.values() if tracks[score.trajectory].score is None)
        if new:
            self._durable.write(ScoresRecorded(new))
        self.scored(score.trajectory for score in new)
        for trajectory, reason in (failed or {}).items():
            known = trajectory in tracks and not is_evaluated(trajectory)
            if known and tracks[trajectory].finished and tracks[trajectory].score is None:
                self._scorer_faults.group_dropped(faulty=trajectory in faulty)
                self.drop(tracks[trajectory].group, reason, DropCause.UNSCORED)
        return Done(faulty_groups=self._scorer_faults.prevailing if faulty else 0)

    def scored(self, trajectories: Iterable[int]) -> None:
        """Count trajectories that were scored; a group whose trajectories all have a score can be bound."""
        groups: dict[Group, None] = {}
        for trajectory in trajectories:
            self._scoring.release(trajectory)
            groups[self._state.trajectories[trajectory].group] = None
        for group in groups:
            if not group.unscored:
                self._scorer_faults.group_scored()
                self._staleness.mark_complete(group)
                self._bindings.add(group)
        self._refill.drop_from(groups)

    def offer_scoring(self, trajectory: int) -> None:
        """Offer a complete trajectory to reward replicas."""
        self._scoring.offer(trajectory)

    def drop(self, group: Group, reason: str, cause: DropCause = DropCause.OTHER) -> None:
        """Drop a group without training on it.

        GRPO compares the trajectories of a group with each other, so an incomplete group cannot be trained. An
        evaluated episode counts as unscored.
        """
        if group.is_evaluated:
            self.evaluations.fail((group.created.group,))
            return
        if group.bound is None:
            if not group.unscored:
                self._bindings.remove(group)
            self._staleness.forget(group, complete=not group.unscored)
        self._end_leases(group)
        outcomes = outcomes_of(group) if cause is DropCause.NO_SIGNAL else Outcomes()
        self._durable.write(GroupDropped(group.created.group, len(group.trajectories), reason, cause, outcomes))

    def _end_leases(self, group: Group) -> None:
        self._work.withdraw(list(group.answers))
        self.episodes.forget(group)
        for track in group.trajectories:
            self._scoring.release(track.id)

    def _drop_untrainable(self) -> None:
        for group in list(self._staleness.untrainable()):
            self.drop(group, self._staleness.reason, DropCause.STALE)
        self._refill.drop_from(list(self._state.groups.values()))  # the limit may have kept some before

    def warning(self) -> str | None:
        """Return a warning for people that no earlier call has returned; None if there is none."""
        return self._prompts.warning() or self._staleness.warning()

    def drop_uncommitted(self, reason: str) -> None:
        """Drop all groups that no committed step trained, because the run is complete."""
        for group in list(self._state.groups.values()):
            if group.bound is None or group.bound > self._state.committed:
                self.drop(group, reason)
        self._index()

    # ── trainer ────────────────────────────────────────────────────────────────────────────────────────────────────
    def committed(self, incarnation: Incarnation) -> CommittedState | Denied:
        """Return the newest commit.

        The request fences all older trainers, so that none of them can commit afterwards.
        """
        return self._check_trainer(incarnation) or self._bindings.committed()

    @property
    def commit_status(self) -> CommitStatus:
        """The newest commit and the folder of each commit. All of them are durable only after :meth:`flush`."""
        return self._bindings.commit_status()

    def metrics(self, incarnation: Incarnation, after: int) -> StoredMetrics | Denied:
        """Return stored metrics of the committed steps after ``after``, as many as fit into one answer."""
        return self._check_trainer(incarnation) or self._bindings.metrics(after)

    def part(
        self, incarnation: Incarnation, number: int, index: int | None = None, share: Share | None = None
    ) -> PartBound | NotReady | Denied:
        """Return part ``index`` of step ``number``, or its whole batch; each member of a gang may request it.

        The part has the tokens of ``share`` only, or all tokens if ``share`` is None.
        """
        return self.bind(incarnation, number, index, share) or PartBound(cut(self.bound(number, index), share))

    def bound(self, number: int, index: int | None) -> PackedPart:
        """Return a part that is bound, or all parts of a bound step if ``index`` is None."""
        return self._state.part(number, index)

    def bind(
        self, incarnation: Incarnation, number: int, index: int | None = None, share: Share | None = None
    ) -> NotReady | Denied | None:
        """Bind to step ``number`` all groups that it lacks or, if ``index`` is given, the groups of its next part.

        Returns None if the step, or the part, is bound now or was already. Returns Denied if the trainer is fenced, the
        request is out of order, or ``share`` is of another division than that of the incarnation's other ranks. Returns
        NotReady while too few groups can be bound (:mod:`.steps.bindings`).
        """
        if rejection := self._check_trainer(incarnation) or self._division.check(incarnation, share):
            return rejection
        if self.evaluations.awaited(number - 1, incarnation.number):
            return NotReady()
        latest, answer = self._state.latest, self._bindings.bind(number, index)
        if self._state.latest != latest:
            self._drop_untrainable()
        return answer

    def balance(
        self, incarnation: Incarnation, number: int, train_s: float, back_s: float, *, lent: bool
    ) -> Balance | Denied:
        """Return whether a step of which the trainer has trained nothing is balanced (:mod:`.steps.forecast`).

        ``lent`` is whether the trainer has lent its GPUs.
        """
        if rejection := self._check_trainer(incarnation):
            return rejection
        outlook = self._bindings.outlook(number)
        if isinstance(outlook, Denied):
            return outlook
        size, missing, has_part = outlook
        evaluated = not self.evaluations.awaited(number - 1, incarnation.number)
        answers, has_work = 0, self._has_work_for_guests(number - 1)
        if number > self.evaluations.last_step:
            missing, has_work = 0, False
        if not evaluated:
            answers, is_free = self.evaluations.unfinished(number - 1, lambda one: one is None or is_guest(one))
            has_work = has_work or is_free
        tokens_per_s = self._work.tokens_per_second(self._most_unbound * self._group_size)
        per_group = self._state.tokens_per_group
        step = Outlook(
            size=size,
            there=size - missing,
            has_part=has_part,
            missing=missing,
            evaluation=answers / self._group_size,
            evaluated=evaluated,
            has_rollouts=any(role_of(one.replica) in self._rollout_roles for one in self._membership.current),
            pace=tokens_per_s / per_group if per_group else None,
            has_work=has_work,
        )
        return balance(step, train_s, back_s, lent=lent)

    def _has_work_for_guests(self, step: int) -> bool:
        """Return whether guests have leases, or could lease trajectories with the weights of ``step``.

        The trainer has finished this step, and may still be publishing its weights.
        """
        if any(self._work.leases.leased_to(one) for one in self._membership.current if is_guest(one)):
            return True
        first = self._work.first()
        may_begin = self._may_begin_group and self._staleness.allows(None, step)
        return may_begin or (first is not None and self._staleness.allows(first.group, step))

    def wait_reason(self, number: int, index: int | None = None) -> str | None:
        """Return a text for people that says why batch ``number``, or a part of it, cannot be bound yet.

        Returns None if it can be bound.
        """
        published = self.newest_version is not None
        if published and (reason := self.evaluations.wait_reason(number - 1)):
            return reason
        return self._bindings.wait_reason(number, index, self._work.leases.holder, self.newest_weights, published)

    def data_report(self, number: int, index: int | None, now: float, waited_s: float, opens: bool) -> DataReport:
        """Return who holds what batch ``number``, or a part of it, lacks.

        A group that lacks anything from outside of the run can only be completed outside.

        Args:
            number: Step that the trainer requests.
            index: Part that it requests; None for the batch.
            now: Time (s) of the clock of :meth:`Episodes.expire`.
            waited_s: Seconds for which the trainer has waited for the data.
            opens: True if the request of an outside agent for an episode waits, so that the run holds it up.
        """
        if self.newest_version is None or self.evaluations.awaited(number - 1, self._state.fences.get(TRAINER, -1)):
            return DataReport(outside=self.episodes.evaluation_held_outside(now))
        groups, lacking = self._bindings.incomplete(index)
        missing = [[track for track in group.trajectories if track.score is None] for group in groups]
        waits = [[one for track in tracks if (one := self._held_outside(track, now, opens))] for tracks in missing]
        if waits.count([]) < lacking and (len(groups) >= lacking or not self._begins_groups(opens)):
            begun = [wait for each in waits for wait in each if wait.episode is not None]
            free = OutsideWait(OutsideKind.EPISODE, seconds=waited_s)
            return DataReport(outside=max(begun, key=lambda wait: wait.seconds, default=free))
        holders = {holder for tracks in missing for track in tracks for holder in self._holders(track)}
        known = frozenset(holder.replica for holder in holders if holder is not None)
        return DataReport(holders=known, only_holders=0 < lacking <= len(groups) and None not in holders)

    def _begins_groups(self, opens: bool) -> bool:
        """Return whether the run can begin a group now; ``opens`` as in :meth:`data_report`."""
        own = not self._has_agents or self.episodes.own_agents or opens
        return own and self._may_create_group and self._staleness.allows(None, self.newest_weights)

    def _held_outside(self, track: TrajectoryState, now: float, opens: bool) -> OutsideWait | None:
        outside = None if track.episode is None else self.episodes.held_outside(track, now)
        return None if opens and outside is not None and outside.kind is OutsideKind.EPISODE else outside

    def _holders(self, track: TrajectoryState) -> list[Incarnation | None]:
        """Return who extends or scores a trajectory; None stands for work that nobody has taken."""
        if track.finished:
            return [self._scoring.holder(track.id)]
        return [self._work.leases.holder(track.id)] if track.episode is None else self.episodes.holders(track)

    def has_data(self) -> bool:
        """Return whether a trainer that requests data would get data (:meth:`.steps.bindings.Bindings.has_data`)."""
        waits = self.evaluations.awaited(self._state.latest, self._state.fences.get(TRAINER, -1))
        return not waits and self._bindings.has_data()

    def commit(
        self,
        incarnation: Incarnation,
        number: int,
        manifest: dict[str, Any],
        digest: str,
        metrics: dict[str, float] | None = None,
        earlier: Iterable[TrainedStep] = (),
    ) -> Done | Denied:
        """Commit steps up to ``number`` for a gang (:meth:`.steps.bindings.Bindings.commit`); may be repeated."""
        if rejection := self._check_trainer(incarnation):
            return rejection
        if incarnation != incarnation.gang:
            return Denied(f"{incarnation} cannot commit: only the first member of its gang, {incarnation.gang}, can")
        if self._samples is not None:
            self._samples.take(self._state, number)
        answer = self._bindings.commit(incarnation, number, manifest, digest, metrics or {}, earlier)
        self.evaluations.finish()
        return answer
