"""The rules of the trajectory store: what is made, leased, grown, scored, bound, committed, dropped, and for whom.

Single-threaded and synchronous. Each method judges a request and answers; nothing that it answered may be told to
anybody before :meth:`Store.flush`, which makes all of it durable at once. The rules on the way of a batch are numbered
as in docs/architecture.md, "Exactly once".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import msgspec

from ...core.types import Incarnation
from ...transport.messages import WeightSource
from .leases import Leases, Membership
from .log import DurableState
from .prompts import NO_PROMPT, ItemPrompts
from .records import (
    Audit,
    DropCause,
    Fence,
    GroupCreated,
    GroupDropped,
    Metrics,
    PackedSegment,
    ScoresRecorded,
    SegmentsAppended,
    StepCommitted,
    pack,
    pack_tokens,
)
from .staleness import StalenessLimit
from .state import Group, TrajectoryState, as_item, as_to_score
from .types import (
    Bound,
    CommittedState,
    Denied,
    Done,
    Leased,
    NewestVersion,
    NotReady,
    Prompt,
    Score,
    Scoring,
    Segment,
    StepMetrics,
    StoredMetrics,
)
from .versions import VersionDirectory, is_publisher

METRICS_PER_ANSWER = 256
"""steps: about 100 KB, where a trainer tells a dozen figures"""


class Store:
    """All trajectories of a run, in ``folder``. ``next_prompt(i)`` gives the i-th prompt; an item that it fails at is
    dropped.

    At most ``(max_ahead_batches + 1) * groups_per_batch`` groups are under way beyond what is bound: back-pressure on
    the rollouts. ``staleness`` bounds the age of tokens (:mod:`rrl.roles.trajectories.staleness`; None: no limit);
    ``waits``: a step waits for the groups that no later step may train, else these are dropped.
    The trainer may be in a step while ``keep_uncommitted`` before it are done and not committed: so many bindings, and
    one more, are ahead of the committed step.
    Opening it supersedes whoever has it open. Raises LogDamaged when what was durable cannot be read.
    ``compact_from``: bytes of log below which it is not compacted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group_size: int,
        groups_per_batch: int,
        max_ahead_batches: int,
        max_new_tokens: int,
        next_prompt: Callable[[int], Prompt],
        keep_uncommitted: int = 1,
        staleness: int | None = None,
        wait_for_late: bool = True,
        compact_from: int = 32 * 2**20,
    ) -> None:
        self._group_size = group_size
        self._per_batch = groups_per_batch
        self._max_unbound = (max_ahead_batches + 1) * groups_per_batch
        self._max_new = max_new_tokens
        self._prompts = ItemPrompts(next_prompt)
        self._keep_uncommitted = keep_uncommitted
        self._newest_weights: int | None = None
        """step of the newest weights that a rollout had when it asked for work, in this life"""
        self._membership = Membership()
        self._work_leases = Leases()
        self._scoring_leases = Leases()
        self._versions = VersionDirectory()
        self._durable = DurableState(folder, compact_from)
        self._state = self._durable.state
        self._staleness = StalenessLimit(self._state, staleness, groups_per_batch, wait_for_late)
        self._index()
        self._drop_untrainable()  # the run goes on with another limit, or a crash came between a binding and the drop

    def _index(self) -> None:
        """Heaps for finding quickly what comes first; entries that no longer fit are skipped when they come up.

        Unfinished trajectories and complete groups come in the order of their group's last step, then of their number:
        without a limit by number alone."""
        tracks, groups = self._state.trajectories.values(), self._state.groups
        begun = self._staleness.begun_with
        self._unfinished = [(begun(track.group), track.id) for track in tracks if not track.finished]
        self._unscored = [track.id for track in tracks if track.finished and track.score is None]
        self._ready = [
            (begun(group), number) for number, group in groups.items() if group.bound is None and not group.unscored
        ]
        self._unbound = sum(group.bound is None for group in groups.values())
        heapify(self._unfinished)
        heapify(self._unscored)
        heapify(self._ready)

    def flush(self) -> None:
        """Make everything answered so far durable. After OSError or Superseded this store must be thrown away and
        none of those answers may be told."""
        self._durable.flush()

    def audit(self) -> Audit:
        """What became of every trajectory, from the durable records."""
        return self._durable.audit()

    def close(self) -> None:
        self._durable.close()

    # ── who is believed ────────────────────────────────────────────────────────────────────────────────────────────
    def update_membership(self, current: Iterable[Incarnation]) -> None:
        """The manager's word on who lives. What others have leased is free again; older trainers are fenced."""
        self._membership.update(current)
        for gang in {incarnation.gang for incarnation in self._membership.current}:
            if self._state.fences.get(gang.replica, gang.number) < gang.number:
                self._durable.write(Fence(gang.replica, gang.number))
        for trajectory in self._work_leases.release_departed(self._membership.current):
            self._offer(self._state.trajectories[trajectory])
        for trajectory in self._scoring_leases.release_departed(self._membership.current):
            heappush(self._unscored, trajectory)
        self._versions.remove(lambda incarnation: self._membership.fenced_reason(incarnation) is not None)

    def _check_worker(self, incarnation: Incarnation) -> Denied | NotReady | None:
        if why := self._membership.fenced_reason(incarnation):
            return Denied(why, fenced=True)
        return None if incarnation in self._membership.current else NotReady()

    def _check_trainer(self, incarnation: Incarnation) -> Denied | None:
        """Rule 7: the first word of a newer trainer fences the older ones, durably, before it is answered. The members
        of a gang share an incarnation, and are fenced as one."""
        gang = incarnation.gang
        why = self._membership.fenced_reason(gang)
        fence = self._state.fences.get(gang.replica, -1)
        if gang.number < fence:
            why = f"{incarnation} was succeeded by incarnation {fence}"
        if why:
            return Denied(why, fenced=True)
        if gang.number > fence:
            self._membership.observe(gang)
            self._durable.write(Fence(gang.replica, gang.number))
        return None

    # ── weight versions ────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def newest_version(self) -> NewestVersion | None:
        """The newest weight version and who serves it; another object after each change."""
        return self._versions.newest

    def report_version(self, source: WeightSource) -> Denied | NotReady | None:
        """Take note of the version that ``holder`` serves, if it serves one. None: the report counts. A trainer that
        was succeeded is denied, and so is a version that its trainer says another incarnation published."""
        incarnation, version = source.incarnation, source.version
        if not is_publisher(incarnation):
            no: Denied | NotReady | None = self._check_worker(incarnation)
        elif incarnation != incarnation.gang or (version is not None and version.incarnation != incarnation.number):
            no = Denied(f"{incarnation} does not publish {version}")
        else:
            no = self._check_trainer(incarnation)
        if no is None:
            self._versions.report(source)
        return no

    # ── rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def lease(
        self, incarnation: Incarnation, at_most: int, holding: Sequence[int] = (), weights: int | None = None
    ) -> Leased | Denied | NotReady:
        """Unfinished trajectories, those of the group with the earliest last step first, with what was made of them;
        new groups as far as there is room. None that a rollout with these ``weights`` (a step's) may not work on."""
        if no := self._check_worker(incarnation):
            return no
        for trajectory in holding:
            track = self._state.trajectories.get(trajectory)
            if track is not None and not track.finished and self._is_leased_to(track, incarnation):
                self._work_leases.assign(trajectory, incarnation)  # again, after we restarted
                if self._staleness.allows(track.group, weights):
                    self._mark_begun(track.group, weights)
        if weights is not None:
            self._newest_weights = max(weights, self._newest_weights or 0)
        again = sorted(self._work_leases.leased_to(incarnation).difference(holding))[:at_most]
        tracks = [self._state.trajectories[trajectory] for trajectory in again]
        while len(tracks) < at_most and (track := self._next_unfinished(weights)) is not None:
            self._work_leases.assign(track.id, incarnation)
            self._mark_begun(track.group, weights)
            tracks.append(track)
        outdated = not tracks and at_most > 0 and (self._first_unfinished() is not None or self._may_create_group)
        return Leased(tuple(as_item(track, self._max_new) for track in tracks), outdated)

    def _next_unfinished(self, weights: int | None) -> TrajectoryState | None:
        """The next trajectory that nobody holds; one of a new group if there is none and there is room for a group.
        None also where a rollout with these weights may not work on it: then it may not work on any later one."""
        if (
            (first := self._first_unfinished()) is None
            and self._may_create_group
            and self._staleness.allows(None, weights)
        ):
            self._create_group()
            first = self._first_unfinished()
        if first is None or not self._staleness.allows(first.group, weights):
            return None
        heappop(self._unfinished)
        return first

    def _first_unfinished(self) -> TrajectoryState | None:
        """The unfinished trajectory that nobody holds and that comes first; it stays in the heap."""
        while self._unfinished:
            begun, trajectory = self._unfinished[0]
            track = self._state.trajectories.get(trajectory)
            free = track is not None and not track.finished and self._work_leases.holder(trajectory) is None
            if track is not None and free and begun == self._staleness.begun_with(track.group):
                return track
            heappop(self._unfinished)
        return None

    @property
    def _may_create_group(self) -> bool:
        """Whether another group may be made."""
        return self._unbound < self._max_unbound

    def _offer(self, track: TrajectoryState) -> None:
        """Put an unfinished trajectory that nobody holds into the heap."""
        heappush(self._unfinished, (self._staleness.begun_with(track.group), track.id))

    def _mark_begun(self, group: Group, weights: int | None) -> None:
        """Count the group as begun with these weights; its other trajectories move up in the heap."""
        if self._staleness.mark_begun(group, weights):
            for track in group.trajectories:
                if not track.finished and self._work_leases.holder(track.id) is None:
                    self._offer(track)

    def _create_group(self) -> None:
        """Of the next item that has a prompt; those before it are dropped, and take nobody's turn."""
        while (prompt := self._next_prompt(self._state.next_group)) is None:
            pass
        number, first = self._state.next_group, self._state.next_trajectory
        self._durable.write(GroupCreated(number, first, self._group_size, prompt.item, pack_tokens(prompt.tokens)))
        self._unbound += 1
        for track in self._state.groups[number].trajectories:
            self._offer(track)

    def _next_prompt(self, number: int) -> Prompt | None:
        """None: there is none, and the item is dropped. Raises ValueError when that is so of ALL_UNASKABLE in a row."""
        prompt = self._prompts.prompt(number)
        if prompt is None:
            self._durable.write(GroupCreated(number, self._state.next_trajectory, self._group_size, number, b""))
            self._durable.write(GroupDropped(number, self._group_size, NO_PROMPT))
        return prompt

    def _is_leased_to(self, track: TrajectoryState, incarnation: Incarnation) -> bool:
        """Leased to it; or to nobody, and nobody else has written since: its lease was lost when we restarted."""
        holder = self._work_leases.holder(track.id)
        return holder == incarnation or (holder is None and track.writer in (None, incarnation))

    def append(
        self, incarnation: Incarnation, segments: Sequence[Segment], finished: Sequence[int] = ()
    ) -> Done | Denied | NotReady:
        """All of it or nothing. The same words again change nothing. A trajectory whose new tokens are too old for its
        group to be trained in time is lost to whoever works on it (:meth:`_keep_fresh`)."""
        if no := self._check_worker(incarnation):
            return no
        try:
            pieces = [pack(segment) for segment in segments]
        except (OverflowError, ValueError) as error:
            return Denied(f"malformed segment: {error}")
        lost = {piece.trajectory for piece in pieces if not self._check_staleness(incarnation, piece)}
        lost.update(piece.trajectory for piece in pieces if not self._may_write(incarnation, piece.trajectory))
        lost.update(trajectory for trajectory in finished if not self._may_write(incarnation, trajectory))
        fresh, ends = self._new_segments(pieces, finished, lost)
        if lost:
            return Denied(f"not leased to {incarnation}, or grown otherwise", lost=tuple(sorted(lost)))
        if fresh or ends:
            self._durable.write(SegmentsAppended(incarnation, tuple(fresh), tuple(sorted(ends))))
        for piece in fresh:
            self._work_leases.assign(piece.trajectory, incarnation)
        for trajectory in ends:
            self._work_leases.release(trajectory)
            heappush(self._unscored, trajectory)
        return Done()

    def _check_staleness(self, incarnation: Incarnation, piece: PackedSegment) -> bool:
        """Whether the trajectory's group can still be trained in time with this piece in it. If not, the trajectory is
        offered to another rollout (``waits``), or the group is dropped."""
        if not self._may_write(incarnation, piece.trajectory):
            return False
        track = self._state.trajectories[piece.trajectory]
        group = track.group
        if group.bound is not None or self._staleness.allows(group, piece.step):
            self._mark_begun(group, piece.step)
            return True
        if self._staleness.wait_for_late:
            self._work_leases.release(track.id)
            self._offer(track)
            return False
        if self._staleness.too_old(piece.step):
            self._drop(group, self._staleness.reason, DropCause.STALE)
            return False
        self._mark_begun(group, piece.step)
        return True

    def _may_write(self, incarnation: Incarnation, trajectory: int) -> bool:
        track = self._state.trajectories.get(trajectory)
        return track is not None and self._is_leased_to(track, incarnation)

    def _new_segments(
        self, pieces: Iterable[PackedSegment], finished: Iterable[int], lost: set[int]
    ) -> tuple[list[PackedSegment], set[int]]:
        """What is new in an append: pieces and ends. Adds to ``lost`` what neither continues nor repeats."""
        fresh: list[PackedSegment] = []
        lengths: dict[int, int] = {}
        for piece in pieces:
            if piece.trajectory in lost:
                continue
            track = self._state.trajectories[piece.trajectory]
            length = lengths.get(track.id, track.length)
            if piece.offset == length and length < piece.end <= self._max_new and not track.finished:
                fresh.append(piece)
                lengths[track.id] = piece.end
            elif piece not in track.segments:
                lost.add(track.id)
        ends = {trajectory for trajectory, length in lengths.items() if length == self._max_new}
        ends |= {t for t in finished if t not in lost and not self._state.trajectories[t].finished}
        return fresh, ends

    # ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def lease_scoring(
        self, incarnation: Incarnation, at_most: int, holding: Sequence[int] = ()
    ) -> Scoring | Denied | NotReady:
        """The oldest finished trajectories without a score."""
        if no := self._check_worker(incarnation):
            return no
        again = sorted(self._scoring_leases.leased_to(incarnation).difference(holding))[:at_most]
        tracks = [self._state.trajectories[trajectory] for trajectory in again]
        while len(tracks) < at_most and self._unscored:
            track = self._state.trajectories.get(heappop(self._unscored))
            if track is not None and track.score is None and self._scoring_leases.holder(track.id) is None:
                self._scoring_leases.assign(track.id, incarnation)
                tracks.append(track)
        return Scoring(tuple(as_to_score(track) for track in tracks))

    def post_scores(
        self, incarnation: Incarnation, scores: Sequence[Score], failed: Mapping[int, str] | None = None
    ) -> Done | Denied | NotReady:
        """The first score of a trajectory stands; one of a trajectory that is no more is ignored."""
        if no := self._check_worker(incarnation):
            return no
        tracks = self._state.trajectories
        by_trajectory = {score.trajectory: score for score in reversed(scores) if score.trajectory in tracks}
        if not all(tracks[trajectory].finished for trajectory in by_trajectory):
            return Denied("a score of an unfinished trajectory")
        if not all(math.isfinite(score.reward) and math.isfinite(score.training) for score in by_trajectory.values()):
            return Denied("a score that is not finite; say why it failed instead")
        fresh = tuple(score for score in by_trajectory.values() if tracks[score.trajectory].score is None)
        if fresh:
            self._durable.write(ScoresRecorded(fresh))
        for score in fresh:
            self._scoring_leases.release(score.trajectory)
        for group in {tracks[score.trajectory].group for score in fresh}:
            if not group.unscored:
                self._staleness.mark_complete(group)
                heappush(self._ready, (self._staleness.begun_with(group), group.created.group))
        for trajectory, why in (failed or {}).items():
            if trajectory in tracks and tracks[trajectory].finished and tracks[trajectory].score is None:
                self._drop(tracks[trajectory].group, why)
        return Done()

    def _drop(self, group: Group, reason: str, cause: DropCause = DropCause.OTHER) -> None:
        """Rule 8: the other end of a trajectory. A GRPO group is whole or of no use."""
        if group.bound is None:
            self._unbound -= 1
            if not group.unscored:
                self._ready.remove((self._staleness.begun_with(group), group.created.group))
                heapify(self._ready)
            self._staleness.forget(group, complete=not group.unscored)
        for track in group.trajectories:
            self._work_leases.release(track.id)
            self._scoring_leases.release(track.id)
        self._durable.write(GroupDropped(group.created.group, len(group.trajectories), reason, cause))

    def _drop_untrainable(self) -> None:
        for group in list(self._staleness.untrainable()):
            self._drop(group, self._staleness.reason, DropCause.STALE)

    def warning(self) -> str | None:
        """Something that a person should know of, once."""
        return self._prompts.warning() or self._staleness.warning()

    def drop_uncommitted(self, reason: str) -> None:
        """The run is complete: drop all that no committed step holds."""
        for group in list(self._state.groups.values()):
            if group.bound is None or group.bound > self._state.committed:
                self._drop(group, reason)
        self._index()

    # ── trainer ────────────────────────────────────────────────────────────────────────────────────────────────────
    def committed(self, incarnation: Incarnation) -> CommittedState | Denied:
        """What counts. Asking makes the asker the current incarnation: nothing can be committed behind its back."""
        if no := self._check_trainer(incarnation):
            return no
        newest = self._state.commitments.get(self._state.committed)
        return CommittedState(newest.number, newest.manifest) if newest else CommittedState(None, None)

    def metrics(self, incarnation: Incarnation, after: int) -> StoredMetrics | Denied:
        """Metrics of committed steps after ``after``, as many as one answer holds."""
        if no := self._check_trainer(incarnation):
            return no
        kept = self._state.metrics
        steps = range(max(after, min(kept, default=0) - 1) + 1, self._state.committed + 1)
        return StoredMetrics(tuple(StepMetrics(step, kept.get(step, {})) for step in steps[:METRICS_PER_ANSWER]))

    def batch(self, incarnation: Incarnation, number: int) -> Bound | NotReady | Denied:
        """The batch of step ``number``, the same one for ever; each member of a gang may ask."""
        return self.bind(incarnation, number) or Bound(self._state.batch(number))

    def bind(self, incarnation: Incarnation, number: int) -> NotReady | Denied | None:
        """Rule 2: choose the groups of step ``number``, those with the earliest last step first; they stay its groups
        for ever. Returns None once they are chosen, and :meth:`batch` has them. NotYet while too few are complete, or
        while a group is not that no later step can train in time. Where steps do not wait for such groups
        (``waits``), those that are too old for the step after ``number`` are dropped."""
        if no := self._check_trainer(incarnation):
            return no
        if number in self._state.bindings:
            return None
        committed, latest = self._state.committed, self._state.latest
        if number != latest + 1:
            return Denied(f"batch {number} is out of order: {committed} is committed, {latest} the latest bound")
        if latest - committed > self._keep_uncommitted or len(self._ready) < self._per_batch:
            return NotReady()
        if self._staleness.blocking_weights() is not None:
            return NotReady()
        chosen = tuple(heappop(self._ready)[1] for _ in range(self._per_batch))
        for group in chosen:
            self._staleness.forget(self._state.groups[group], complete=True)
        self._durable.write(self._state.bind(number, chosen))
        self._unbound -= len(chosen)
        if not self._staleness.wait_for_late:
            self._drop_untrainable()
        return None

    def wait_reason(self, number: int) -> str | None:
        """What a trainer that asks for batch ``number`` waits for, in words for a person; None: the batch is there."""
        if number in self._state.bindings:
            return None
        if self._state.latest - self._state.committed > self._keep_uncommitted:
            return f"the trainer waits for the commit of step {self._state.committed + 1}"
        if (weights := self._staleness.blocking_weights()) is not None:
            return f"the trainer waits for {self._staleness.describe(weights, self._work_leases.holder)}"
        if (missing := self._per_batch - len(self._ready)) <= 0:
            return None
        oldest, newest = self._staleness.oldest_allowed, self._newest_weights
        if oldest is not None and newest is not None and newest < oldest:
            return (
                f"the trainer waits for step {number}, the rollouts for weights newer than step {newest}'s: publish at"
                f" least once in {self._staleness.publish_every} steps"
            )
        return f"the trainer waits for {missing} more of the {self._per_batch} groups of step {number}"

    def commit(
        self,
        incarnation: Incarnation,
        number: int,
        manifest: dict[str, Any],
        digest: str,
        metrics: dict[str, float] | None = None,
    ) -> Done | Denied:
        """Rule 4: checkpoint and consumption of step ``number`` in one record. The same words again are right. The
        ``metrics`` come before: of a step that is not committed nobody asks."""
        if no := self._check_trainer(incarnation):
            return no
        if incarnation != incarnation.gang:
            return Denied(f"{incarnation} cannot commit: {incarnation.gang} does for its gang")
        before, binding = self._state.commitments.get(number), self._state.bindings.get(number)
        if number <= self._state.committed:
            if before and before.digest == digest and _canonical(before.manifest) == _canonical(manifest):
                return Done()
            return Denied(f"step {number} was committed with other words")
        if number != self._state.committed + 1 or binding is None:
            return Denied(f"commit of step {number} is out of order: {self._state.committed} is committed")
        if digest != binding.digest:
            return Denied(f"step {number} is bound to {binding.digest}, not to {digest}")
        self._durable.write(Metrics(number, metrics or {}))
        self._durable.write(StepCommitted(number, incarnation, manifest, digest))
        return Done()


def _canonical(manifest: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(manifest, order="deterministic")
