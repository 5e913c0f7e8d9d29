"""The rules of episodes: how the store leases, retries, finishes and drops them, and opens and shows their turns.

Evaluates one request at a time, as :class:`..store.Store` does, whose records, leases and queues it shares. Which
incarnation makes an attempt is durable, so that a restart of the store ends no attempt.

A rollout with weights that are too old for an episode's group may not begin it (:mod:`..steps.staleness`). In a job
with agents this is decided when the episode is leased: it counts as begun with the newest weights that a rollout has
reported. An agent that works therefore never waits for the admission of a turn, and agents whose places are all taken
cannot keep an episode waiting that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from typing import Protocol

from msgspec import Struct

from ....core.text import on_one_line
from ....core.types import Incarnation, Version
from ..durable.groups import EpisodeState, Group, TrajectoryState, path_length, sampled_tokens
from ..durable.log import DurableState
from ..durable.records import (
    AttemptFailed,
    AttemptStarted,
    DropCause,
    EpisodeFinished,
    TurnCreated,
    pack_tokens,
    unpack,
    unpack_tokens,
)
from ..leases import Leases, WorkQueue
from ..steps.staleness import StalenessLimit
from ..types import Denied, Done, NotReady
from .requests import (
    EndTurn,
    EpisodeAnswer,
    EpisodeItem,
    EpisodeRequest,
    EpisodeTurns,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    LeaseEpisodes,
    OpenEpisode,
    OpenTurn,
    PostReward,
    Turn,
    TurnOpened,
    TurnTokens,
)

REPLICA_ENDED = "the agents replica that made the attempt has ended"
"""Reason for the end of an attempt whose incarnation is no longer current."""
NO_ANSWER = "the agent ended without a complete answer of the model"
"""Reason for the failure of an attempt that has nothing to train."""
NO_AGENTS = "the job has no agents any more"
"""Reason for dropping the groups of agents in a job without them."""

_MAX_REASON_CHARS = 200
"""Characters of the reason for a failure that are stored: a reason comes from the code of an agent, and the audit
counts the dropped trajectories by reason."""


class EpisodeSettings(Struct, frozen=True):
    """Settings of the episodes of a job.

    Attributes:
        retries: Number of failed attempts at an episode after which another failure drops its group.
        drop_on_death: True if the group is dropped when the process dies that makes an attempt; otherwise the episode
            is attempted again, and the attempt does not count as failed.
    """

    retries: int = 2
    drop_on_death: bool = False


class StoreRules(Protocol):
    """The rules of the store that those of episodes need."""

    newest_weights: int | None

    def check_worker(self, incarnation: Incarnation) -> Denied | NotReady | None:
        """Return why a request of a worker is not served, or None."""
        ...

    def create_group(self) -> bool:
        """Create a group if the limits allow it, and return whether it exists."""
        ...

    def drop(self, group: Group, reason: str, cause: DropCause) -> None:
        """Drop a group without training on it."""
        ...

    def scored(self, trajectories: Iterable[int]) -> None:
        """Count trajectories that were scored."""
        ...

    def offer_scoring(self, trajectory: int) -> None:
        """Offer a complete trajectory to reward replicas."""
        ...


class Episodes:
    """The episodes of a store.

    Args:
        rules: The other rules of the store.
        durable: State and log of the store.
        staleness: Limit on the age of tokens.
        work: The queue of what rollouts extend.
        settings: Settings of the episodes; None for a job without agents.
    """

    def __init__(
        self, rules: StoreRules, durable: DurableState, staleness: StalenessLimit, work: WorkQueue,
        settings: EpisodeSettings | None,
    ) -> None:  # fmt: skip
        self._rules = rules
        self._durable = durable
        self._state = durable.state
        self._staleness = staleness
        self._work = work
        self._settings = settings
        self._leases = Leases()
        self._heap: list[tuple[float, int]] = []
        """(step of the weights that the episode's group was begun with, episode) of every episode without an attempt.
        An entry of an episode that is not free is skipped when it is popped, and one with an outdated step is replaced.
        """

    def rebuild(self) -> None:
        """Build leases and queue from the state; in a job without agents, drop the groups that only agents complete."""
        for group in list(self._state.groups.values()):
            if group.has_episodes and self._settings is None and group.unscored:
                self._rules.drop(group, NO_AGENTS, DropCause.OTHER)
            elif group.has_episodes:
                self._add(group)

    def _add(self, group: Group) -> None:
        for track in group.trajectories:
            holder = _episode(track).holder
            if holder is None:
                heappush(self._heap, (self._staleness.begun_with(group), track.id))
            elif not track.finished:
                self._leases.assign(track.id, holder)

    def release_departed(self, current: frozenset[Incarnation]) -> None:
        """End the attempts of all incarnations that are not current."""
        for number in sorted(self._leases.release_departed(current)):
            track = self._state.trajectories.get(number)
            if track is None:
                continue  # its group was dropped together with an episode before
            if self._settings is not None and self._settings.drop_on_death:
                self._rules.drop(track.group, REPLICA_ENDED, DropCause.FAILED)
            else:
                self._end_attempt(track, REPLICA_ENDED, _episode(track).failures)

    def forget(self, group: Group) -> None:
        """End the leases of a group that is dropped."""
        for track in group.trajectories:
            self._leases.release(track.id)

    def answer(self, request: EpisodeRequest) -> EpisodeAnswer | Done | NotReady | Denied:
        """Evaluate a request and return its answer, which may be sent after the next flush."""
        if rejection := self._rules.check_worker(request.incarnation):
            return rejection
        match request:
            case LeaseEpisodes(incarnation, at_most, _, holding):
                return self._lease(incarnation, at_most, holding)
            case OpenTurn():
                return self._open_turn(request)
            case Follow(_, turn, offset):
                return self._follow(turn, offset)
            case GetEpisode(_, episode, holding):
                return self._turns(episode, frozenset(holding))
            case FinishEpisode(_, episode, attempt, reward):
                return self._finish(episode, attempt, reward)
            case EndTurn() | OpenEpisode() | PostReward():
                return Denied("this store does not serve such a request")
            case FailAttempt(_, episode, attempt, why):
                return self._fail(episode, attempt, why)

    # ── attempts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _lease(self, incarnation: Incarnation, at_most: int, holding: Iterable[int]) -> LeasedEpisodes | Denied:
        if self._settings is None:
            return Denied("the job has no agents")
        leased = sorted(self._leases.leased_to(incarnation) - {*holding})[:at_most]
        weights = self._state.committed if self._rules.newest_weights is None else self._rules.newest_weights
        while len(leased) < at_most:
            track = self._first()
            if not self._staleness.allows(track.group if track else None, weights):
                break
            if track is not None:
                heappop(self._heap)
                self._start(track, incarnation, weights)
                leased.append(track.id)
            elif not self._create():
                break
        return LeasedEpisodes(tuple(self._item(self._state.trajectories[number]) for number in leased))

    def _create(self) -> bool:
        number = self._state.next_group
        if not self._rules.create_group():
            return False
        self._add(self._state.groups[number])
        return True

    def _first(self) -> TrajectoryState | None:
        """Return the next episode to lease, and leave it in the queue."""
        while self._heap:
            begun, number = self._heap[0]
            track = self._state.trajectories.get(number)
            if track is None or _episode(track).holder is not None:
                heappop(self._heap)
            elif begun == (now := self._staleness.begun_with(track.group)):
                return track
            else:
                heapreplace(self._heap, (now, number))
        return None

    def _start(self, track: TrajectoryState, incarnation: Incarnation, weights: int) -> None:
        self._durable.write(AttemptStarted(track.id, _episode(track).attempt + 1, incarnation, weights))
        self._leases.assign(track.id, incarnation)
        before = self._staleness.begun_with(track.group)
        self._work.mark_begun(track.group, weights)
        if self._staleness.begun_with(track.group) != before:
            self._add(track.group)  # its other episodes move up in the queue

    def _item(self, track: TrajectoryState) -> EpisodeItem:
        created = track.group.created
        return EpisodeItem(track.id, created.group, created.item, _episode(track).attempt)

    def _end_attempt(self, track: TrajectoryState, reason: str, failures: int) -> None:
        """End an attempt without a result, so that another replica may begin the next one."""
        episode = _episode(track)
        self._work.withdraw(list(episode.turns.values()))
        self._leases.release(track.id)
        self._durable.write(AttemptFailed(track.id, episode.attempt, failures, reason))
        heappush(self._heap, (self._staleness.begun_with(track.group), track.id))

    def _fail(self, number: int, attempt: int, why: str) -> Done | Denied:
        track = self._state.trajectories.get(number)
        if track is not None and track.episode is not None:
            episode = track.episode
            if attempt == episode.attempt and episode.holder is None:
                return Done()  # repeated
        current = self._current(number, attempt)
        if isinstance(current, Denied):
            return current
        self._count_failure(current, why)
        return Done()

    def _count_failure(self, track: TrajectoryState, why: str) -> None:
        failures, reason = _episode(track).failures + 1, on_one_line(why)[:_MAX_REASON_CHARS]
        if failures > (self._settings or EpisodeSettings()).retries:
            self._rules.drop(track.group, reason, DropCause.FAILED)
        else:
            self._end_attempt(track, reason, failures)

    def _finish(self, number: int, attempt: int, reward: float | None) -> Done | Denied:
        track = self._state.trajectories.get(number)
        if track is not None and track.finished and track.episode is not None and track.episode.attempt == attempt:
            return Done()  # repeated
        current = self._current(number, attempt)
        if isinstance(current, Denied):
            return current
        if reward is not None and not math.isfinite(reward):
            return Denied(f"the reward of episode {number} is {reward}; it must be a finite number")
        turns = _episode(current).turns
        counted = tuple(sorted(turn.id for turn in turns.values() if turn.finished))
        if not any(turns[turn].length for turn in counted):
            self._count_failure(current, NO_ANSWER)
            return Done()
        self._work.withdraw([turn for turn in turns.values() if not turn.finished])
        self._leases.release(number)
        self._durable.write(
            EpisodeFinished(number, attempt, counted, reward)
        )  # one record: a crash may come between two
        if reward is None:
            self._rules.offer_scoring(number)
        else:
            self._rules.scored((number,))
        return Done()

    def _current(self, number: int, attempt: int) -> TrajectoryState | Denied:
        """Return an episode whose newest attempt is ``attempt`` and goes on, or the refusal of the request."""
        track = self._state.trajectories.get(number)
        if track is None or track.episode is None:
            return Denied(f"episode {number} is not stored: it was dropped or trained", fenced_attempt=True)
        episode = track.episode
        if attempt > episode.attempt or attempt < 1:
            return Denied(f"episode {number} has no attempt {attempt}")
        if attempt < episode.attempt:
            text = f"attempt {attempt} at episode {number} was succeeded by attempt {episode.attempt}"
            return Denied(text, fenced_attempt=True)
        if track.finished or episode.holder is None:
            ended = "finished" if track.finished else "failed"
            return Denied(f"attempt {attempt} at episode {number} has {ended}", fenced_attempt=True)
        return track

    # ── turns ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _open_turn(self, request: OpenTurn) -> TurnOpened | Denied:
        track = self._current(request.episode, request.attempt)
        if isinstance(track, Denied):
            return track
        turns = _episode(track).turns
        try:
            given = pack_tokens(request.given)
        except (OverflowError, TypeError) as error:
            return Denied(f"malformed tokens: {error}")
        wanted = request.parent, request.offset, given, request.max_new, request.options, request.sampling
        for known in turns.values():
            if known.turn is not None and known.turn.request == request.request:
                if _content(known.turn) == wanted:
                    return TurnOpened(known.id)
                return Denied(f"the request of turn {known.id} was repeated with other tokens")
        if problem := _problem(request, turns):
            return Denied(problem)
        if not 1 <= request.max_new <= self._state.lengths.limit:
            return Denied(f"max_new is {request.max_new}; it must be 1 to {self._state.lengths.limit}")
        number = self._state.next_turn
        self._durable.write(
            TurnCreated(number, request.episode, request.attempt, request.request, request.parent, request.offset,
                        given, request.max_new, request.messages, request.options, request.sampling)
        )  # fmt: skip
        self._work.offer(turns[number])
        return TurnOpened(number)

    def _follow(self, number: int, offset: int) -> TurnTokens | NotReady | Denied:
        turn = self._state.answers.get(number)
        if turn is None or turn.turn is None:
            return Denied(f"turn {number} is not stored: its attempt is over", fenced_attempt=True)
        if not 0 <= offset <= turn.length:
            return Denied(f"turn {number} has {turn.length} sampled tokens, so none from {offset} on")
        if offset == turn.length and not turn.finished:
            return NotReady()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[Version] = []
        for packed in turn.segments:
            if packed.end > offset:
                segment = unpack(packed)
                new = slice(max(0, offset - segment.offset), None)
                tokens += segment.tokens[new]
                logprobs += segment.logprobs[new]
                versions += [segment.version] * len(segment.tokens[new])
        return TurnTokens(tuple(tokens), tuple(logprobs), tuple(versions), turn.finished)

    def _turns(self, number: int, holding: frozenset[int]) -> EpisodeTurns | Denied:
        track = self._state.trajectories.get(number)
        if track is None or track.episode is None:
            return Denied(f"episode {number} is not stored: it was dropped or trained", fenced_attempt=True)
        episode = track.episode
        return EpisodeTurns(
            episode.attempt, tuple(_shown(turn) for turn in episode.turns.values() if turn.id not in holding)
        )


def _problem(request: OpenTurn, turns: dict[int, TrajectoryState]) -> str | None:
    """Return why the tokens before a turn are invalid, or None."""
    longest = 0
    if request.parent is not None:
        if request.parent not in turns:
            return f"turn {request.parent} is not one of attempt {request.attempt} at episode {request.episode}"
        longest = path_length(turns[request.parent])
    if not 0 <= request.offset <= longest:
        return f"offset is {request.offset}; the path of the parent has {longest} tokens"
    if not request.offset and not request.given:
        return "a turn needs at least one token before its answer"
    return None


def _shown(turn: TrajectoryState) -> Turn:
    created = turn.turn
    assert created is not None
    return Turn(
        turn.id, created.parent, created.offset, unpack_tokens(created.given), sampled_tokens(turn), turn.finished,
        created.messages, created.attempt, created.request, created.options, created.sampling,
    )  # fmt: skip


def _content(created: TurnCreated) -> tuple[object, ...]:
    """Return what an agent's request determines of a turn beside the name of the request."""
    return created.parent, created.offset, created.given, created.max_new, created.options, created.sampling


def _episode(track: TrajectoryState) -> EpisodeState:
    assert track.episode is not None
    return track.episode
