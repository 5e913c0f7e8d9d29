"""The current incarnations, the trajectories that are leased to them, and the order of the next leases.

All of this is volatile: a store that restarts receives the membership again, and grants new leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import exp

from ...core.types import GUEST_ROLE, Incarnation, ReplicaId, role_of
from .dispatch.engines import Engines
from .dispatch.lease_table import Leases
from .dispatch.work_sharing import CONSIDERED, length_class
from .durable.groups import Group, TrajectoryState, parent_of, prompt_length
from .durable.log import DurableState
from .durable.records import Fence, PackedSegment, TimesObserved
from .durable.state import State
from .steps.staleness import StalenessLimit
from .types import Denied, NotReady

MAX_LEASED_EXTRAS = 128 * 2**20
"""Maximum bytes of the extras in an answer to a request for work, unless it has one trajectory: half a message."""
LONG_PREFIX = 4096
"""Number of tokens before a turn above which a guest leaves the turn to another rollout with a free place: the guest
would compute this prefix, and lose it when it hands the GPUs back."""


def is_guest(incarnation: Incarnation) -> bool:
    """Return whether an incarnation is of a guest."""
    return role_of(incarnation.replica) == GUEST_ROLE


class Membership:
    """The current incarnations according to the manager's last report, and the incarnations that are fenced."""

    def __init__(self) -> None:
        self.current: frozenset[Incarnation] = frozenset()
        self._newest: dict[ReplicaId, int] = {}
        self._departed: set[Incarnation] = set()

    def update(self, current: Iterable[Incarnation]) -> None:
        """Replace the current incarnations.

        An incarnation that was current and no longer is counts as fenced, even if it has no successor.
        """
        before, self.current = self.current, frozenset(current)
        self._departed = {
            incarnation for incarnation in (self._departed | before) - self.current if not self._succeeded(incarnation)
        }
        for incarnation in self.current:
            self.observe(incarnation)

    def observe(self, incarnation: Incarnation) -> None:
        """Record that ``incarnation`` exists, which fences every older incarnation of its whole gang."""
        for replica in (incarnation.replica, incarnation.gang.replica):
            self._newest[replica] = max(incarnation.number, self._newest.get(replica, 0))

    def fenced_reason(self, incarnation: Incarnation) -> str | None:
        """Return why ``incarnation`` is fenced; None if it is not.

        An incarnation that the manager has not reported yet is not fenced: its worker may have joined before the
        manager's report arrived.
        """
        if self._succeeded(incarnation):
            return f"{incarnation} was succeeded by incarnation {self._newest[incarnation.replica]}"
        return f"{incarnation} is no longer current (fenced)" if incarnation in self._departed else None

    def check_worker(self, incarnation: Incarnation) -> Denied | NotReady | None:
        """Return why a request of a rollout or reward replica is not served; None if it is served."""
        if reason := self.fenced_reason(incarnation):
            return Denied(reason, fenced=True)
        return None if incarnation in self.current else NotReady()

    def check_trainer(self, incarnation: Incarnation, durable: DurableState) -> Denied | None:
        """Return why a request of a trainer is denied; None if it is accepted.

        The first request of a newer trainer durably fences all older trainers before it is answered. The members of a
        gang share an incarnation number and are fenced together.
        """
        gang = incarnation.gang
        reason = self.fenced_reason(gang)
        fence = durable.state.fences.get(gang.replica, -1)
        if gang.number < fence:
            reason = f"{incarnation} was succeeded by incarnation {fence}"
        if reason:
            return Denied(reason, fenced=True)
        if gang.number > fence:
            self.observe(gang)
            durable.write(Fence(gang.replica, gang.number))
        return None

    def _succeeded(self, incarnation: Incarnation) -> bool:
        return incarnation.number < self._newest.get(incarnation.replica, 0)


class ScoringQueue:
    """The complete trajectories without a score, the oldest first, and their leases to reward replicas.

    Args:
        trajectories: All trajectories by number, which this class only reads.
    """

    def __init__(self, trajectories: Mapping[int, TrajectoryState]) -> None:
        self._trajectories = trajectories
        self._leases = Leases()
        self._heap: list[int] = []

    def rebuild(self) -> None:
        """Build the queue from the trajectories."""
        self._heap = [number for number, track in self._trajectories.items() if _needs_score(track)]
        heapify(self._heap)

    def offer(self, trajectory: int) -> None:
        """Add a complete trajectory."""
        heappush(self._heap, trajectory)

    def lease(self, incarnation: Incarnation, at_most: int, holding: Iterable[int]) -> list[TrajectoryState]:
        """Lease trajectories, first those that were leased to this incarnation and are not in ``holding``."""
        again = sorted(self._leases.leased_to(incarnation) - {*holding})[:at_most]
        tracks = [self._trajectories[trajectory] for trajectory in again]
        while len(tracks) < at_most and self._heap:
            track = self._trajectories.get(heappop(self._heap))
            if track is not None and track.score is None and self._leases.holder(track.id) is None:
                self._leases.assign(track.id, incarnation)
                tracks.append(track)
        return tracks

    def holder(self, trajectory: int) -> Incarnation | None:
        """Return the reward replica that a trajectory is leased to; None without a lease."""
        return self._leases.holder(trajectory)

    def release(self, trajectory: int) -> None:
        """End the lease of a trajectory, if there is one."""
        self._leases.release(trajectory)

    def release_departed(self, current: frozenset[Incarnation]) -> None:
        """End the leases of all incarnations that are not current."""
        for trajectory in self._leases.release_departed(current):
            heappush(self._heap, trajectory)


def _needs_score(track: TrajectoryState) -> bool:
    later = track.episode is not None and track.episode.awaits_reward
    return track.finished and track.score is None and not later and not track.group.is_evaluated


class WorkQueue:
    """The unfinished trajectories of a store: their leases to rollouts, and which trajectory is leased next.

    The trajectories are ordered by the last step that may train their group, then by batch, then by expected length
    (the longest first), then by number. Without a limit on staleness the last step is the same for all trajectories. If
    lengths are not expected to differ, the order within a batch is by number. :mod:`.dispatch.work_sharing` shares the
    first trajectories among rollouts.

    Args:
        state: The store's state, which this class only reads.
        staleness: Limit on the age of tokens.
        groups_per_batch: Number of groups that a step trains.
    """

    def __init__(self, state: State, staleness: StalenessLimit, groups_per_batch: int) -> None:
        self._state = state
        self._staleness = staleness
        self._per_batch = groups_per_batch
        self.leases = Leases()
        self._heap: list[tuple[float, int, int, int]] = []
        """(step of the weights that the trajectory's group was begun with, batch, minus the class of expected length,
        trajectory); an outdated entry is skipped when it is popped. See :mod:`.steps.staleness` for "begun with"."""
        self._engines = Engines(self.leases.leased_to, state.times_of)

    def rebuild(self) -> None:
        """Build the heap from the state."""
        tracks = self._state.answers.values()
        self._heap = [self._entry(track) for track in tracks if not track.finished]
        heapify(self._heap)

    def _entry(self, track: TrajectoryState) -> tuple[float, int, int, int]:
        created = track.group.created
        length = 0 if created.expected is None else length_class(exp(created.expected))
        return self._staleness.begun_with(track.group), created.group // self._per_batch, -length, track.id

    def first(self) -> TrajectoryState | None:
        """Return the first unfinished trajectory that is not leased, and leave it in the queue."""
        while self._heap:
            begun, *_, trajectory = self._heap[0]
            track = self._state.answers.get(trajectory)
            free = track is not None and not track.finished and self.leases.holder(trajectory) is None
            if track is not None and free and begun == self._staleness.begun_with(track.group):
                return track
            heappop(self._heap)
        return None

    def offer(self, track: TrajectoryState) -> None:
        """Add an unfinished trajectory that is not leased."""
        heappush(self._heap, self._entry(track))

    def mark_begun(self, group: Group, weights: int | None) -> None:
        """Count the group as begun with the weights of step ``weights``.

        If this changes the count, the group's trajectories that wait for a rollout move up in the queue.
        """
        if self._staleness.mark_begun(group, weights):
            for track in group.answers:
                if not track.finished and self.leases.holder(track.id) is None:
                    self.offer(track)

    def may_write(self, incarnation: Incarnation, trajectory: int) -> bool:
        """Return whether the trajectory exists and is leased to the incarnation.

        The lease may have been lost in a restart of the store. So a trajectory without a lease counts as leased to its
        last writer or, if it has no token yet, to every incarnation.
        """
        if (track := self._state.answers.get(trajectory)) is None:
            return False
        holder = self.leases.holder(trajectory)
        return holder == incarnation or (holder is None and track.writer in (None, incarnation))

    # ── leases by expected length ──────────────────────────────────────────────────────────────────────────────────
    @property
    def by_length(self) -> bool:
        """True if lengths are expected to differ; if False, trajectories are leased one by one in their order."""
        return self._state.lengths.separates

    @property
    def places(self) -> int:
        """Number of trajectories that all current rollouts together can work on, according to their requests."""
        return self._engines.places

    def requested(self, incarnation: Incarnation, free: int, weights: int | None, open_until: float) -> None:
        """Record that a rollout with the weights of step ``weights`` requests work for ``free`` places.

        The request is open until the time ``open_until`` (s).
        """
        self._engines.requested(incarnation, free, weights, open_until)

    def tokens_per_second(self, answers: int) -> float:
        """Return how many tokens the rollouts beside the guests make in a second of full work; 0 if it is not known.

        At most ``answers`` trajectories are extended at the same time.
        """
        return self._engines.tokens_per_second(lambda engine: not is_guest(engine), answers)

    def lease(
        self, incarnation: Incarnation, at_most: int, weights: int | None, now: float | None
    ) -> list[TrajectoryState]:
        """Lease to a rollout its share of the waiting trajectories, or the first ones if lengths hardly differ.

        Leasing stops at the first trajectory that a rollout with these weights may not work on, but skips the turns of
        an evaluation of other weights. A turn is left to the rollout that has its prefix, if that rollout also requests
        work (:func:`deal`).
        """
        popped: list[tuple[float, int, int, int]] = []
        leased: list[TrajectoryState] = []
        candidates: dict[int, TrajectoryState] = {}
        by_length = self.by_length
        others = {} if by_length else self._engines.open_places(incarnation, now)
        considered = CONSIDERED if by_length else min(CONSIDERED, at_most + sum(others.values())) if others else 0
        while (track := self.first()) is not None and (
            len(candidates) < considered if considered else len(leased) < at_most
        ):
            if track.id not in candidates:
                if not self._staleness.allows(track.group, weights):
                    if not track.group.is_evaluated:
                        break
                    popped.append(heappop(self._heap))
                    continue
                if not considered:
                    leased.append(self._lease(incarnation, track, weights))
                    continue
                candidates[track.id] = track
            popped.append(heappop(self._heap))
        for entry in popped:
            heappush(self._heap, entry)
        if by_length:
            chosen = self._engines.share(incarnation, list(candidates), at_most)
        else:
            waiting = [(number, self._preferred(track, incarnation, others)) for number, track in candidates.items()]
            chosen = deal(waiting, incarnation, at_most, others)
        for trajectory in chosen:
            track = candidates[trajectory]
            if self._staleness.allows(track.group, weights):  # earlier leases may have taken the last places
                leased.append(self._lease(incarnation, track, weights))
        return leased

    def _preferred(
        self, track: TrajectoryState, engine: Incarnation, others: Mapping[Incarnation, int]
    ) -> Incarnation | None:
        """Return the rollout that has a turn's prefix, or that computes it instead of a guest; None for any rollout."""
        cached = self._has_prefix(track)
        if cached is None and is_guest(engine) and track.turn is not None and prompt_length(track) > LONG_PREFIX:
            return max((other for other in others if not is_guest(other)), key=others.__getitem__, default=None)
        return cached

    def _has_prefix(self, track: TrajectoryState) -> Incarnation | None:
        """Return the rollout that has a turn's prefix, computed with its present weights; None if no rollout has."""
        if track.turn is None or track.turn.parent is None:
            return None
        parent = parent_of(track)
        if parent.writer is None or not parent.segments:
            return None
        return parent.writer if self._engines.has_weights(parent.writer, parent.segments[-1].step) else None

    def _lease(self, incarnation: Incarnation, track: TrajectoryState, weights: int | None) -> TrajectoryState:
        self.leases.assign(track.id, incarnation)
        self.mark_begun(track.group, weights)
        self._engines.leased(incarnation)
        return track

    def appended(
        self, incarnation: Incarnation, segments: Iterable[PackedSegment], ended: Iterable[int], now: float | None
    ) -> TimesObserved | None:
        """Record an append, and end the leases of the trajectories that are complete with it.

        Returns the times of the rollout's engine that follow from the append, which the caller must write to the log;
        None if there are none.
        """
        tokens: dict[int, int] = {}
        for packed in segments:
            tokens[packed.trajectory] = tokens.get(packed.trajectory, 0) + packed.end - packed.offset
        ended = tuple(ended)
        for trajectory in ended:
            self.leases.release(trajectory)
        observed = self._engines.appended(incarnation, list(tokens.items()), ended, now)
        return TimesObserved(incarnation, observed) if observed.tokens else None

    def withdraw(self, tracks: Sequence[TrajectoryState]) -> None:
        """End the leases of trajectories or turns that are not extended any further."""
        for track in tracks:
            holder = self.leases.holder(track.id)
            self.leases.release(track.id)
            if holder is not None:
                self._engines.released(holder, (track.id,))

    def within_message(self, tracks: list[TrajectoryState]) -> list[TrajectoryState]:
        """Return the first of the leased trajectories, as many as fit into a message; offer the others again.

        Only the extras of the tokens that they have already can make a message too large.
        """
        left, count = MAX_LEASED_EXTRAS, 0
        while count < len(tracks):
            left -= sum(len(data) for segment in tracks[count].segments for _, _, data in segment.extras)
            if left < 0 and count:
                self.withdraw(tracks[count:])
                for track in tracks[count:]:
                    self.offer(track)
                return tracks[:count]
            count += 1
        return tracks

    def hand_over(self, incarnation: Incarnation) -> None:
        """End all leases of a rollout that works on nothing until its next request, and offer its trajectories."""
        tracks = [self._state.answers[number] for number in sorted(self.leases.leased_to(incarnation))]
        self.withdraw(tracks)
        for track in tracks:
            self.offer(track)
        self._engines.requested(incarnation, 0)

    def release_departed(self, current: frozenset[Incarnation]) -> None:
        """End the leases of all incarnations that are not current."""
        freed = self.leases.release_departed(current)
        self._engines.retain(current)
        for trajectory in freed:
            self.offer(self._state.answers[trajectory])


def deal(
    waiting: Sequence[tuple[int, Incarnation | None]],
    engine: Incarnation,
    places: int,
    others: Mapping[Incarnation, int],
) -> list[int]:
    """Return which of the waiting turns an engine gets, so that a turn continues where its prefix is cached.

    The rollout that sampled the parent of a turn has computed everything before the turn. While its weights stay the
    same, this rollout need not compute these tokens again. So this rollout gets the turn if it requests work now. No
    turn waits for a busy rollout.

    Only the first turns in the order of leases are dealt out: as many as there are free places in all rollouts that
    request work now. Each of these turns is leased at once. So the preference delays no turn, and no turn overtakes
    another.

    Args:
        waiting: The turns in the order of leases, each with the engine that has its prefix, or None if no engine has
            it.
        engine: The engine that requests work.
        places: Free places of this engine.
        others: Free places of the other engines that request work now.
    """
    left = {**others, engine: places}
    dealt = waiting[: sum(left.values())]
    own: list[int] = []
    rest: list[int] = []
    for turn, cached in dealt:
        if cached is None or not left.get(cached):
            rest.append(turn)
            continue
        left[cached] -= 1
        if cached == engine:
            own.append(turn)
    return own + rest[: left[engine]]
