"""The rules of episodes: how the store leases, retries, finishes and drops them. :mod:`.turn_rules` has those of turns.

:class:`Episodes` evaluates one request at a time. It shares records, leases and queues with :class:`..store.Store`.
Which incarnation makes an attempt is durable, so that a restart of the store ends no attempt.

A rollout whose weights are too old for an episode's group may not begin the group (:mod:`..steps.staleness`). In a job
with agents, the age is checked when the episode is leased: the group then counts as begun with the newest weights that
a rollout has reported. So a running agent never waits for the admission of a turn, and agents that occupy all places
cannot block an episode that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ....core.text import on_one_line, shortened
from ....core.types import Incarnation, OutsideKind, OutsideWait
from ....core.units import duration_text
from ...models.rewards import ANY_AGENT, REWARD, Reward, finite_reward
from ..dispatch.lease_table import Leases
from ..durable.episode_records import episode_of
from ..durable.groups import EpisodeState, Group, TrajectoryState, continued, is_foreign
from ..durable.log import DurableState
from ..durable.records import AttemptFailed, AttemptStarted, CallBlamed, DropCause, EpisodeFinished, ScoresRecorded
from ..durable.trained_samples import score_of, trainable_turns
from ..leases import WorkQueue
from ..steps.evaluations import Evaluations
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
    MarkAnswer,
    OpenEpisode,
    OpenTurn,
    PostReward,
)
from .turn_rules import TurnRules, shown_turns

REPLICA_ENDED = "the agents replica that made the attempt has ended"
"""Reason for the end of an attempt whose incarnation is no longer current."""
NO_ANSWER = "the agent ended without a complete answer of the model"
"""Reason for the failure of an attempt that has nothing to train."""
_NO_EPISODES = "the job has no agents"
"""Reason for refusing requests about episodes in a job without agents."""
NO_AGENTS = "the job no longer has agents"
"""Reason for dropping groups of episodes in a job that no longer has agents."""

_MAX_REASON_CHARS = 200
"""Maximum number of characters that are stored of the reason for a failure. The limit exists because a reason comes
from the code of an agent, and the audit counts the dropped trajectories by reason."""


class EpisodeSettings(Struct, frozen=True):
    """Settings of the episodes of a job; the durations are in seconds."""

    retries: int = 2
    """Number of failed attempts at an episode after which another failure drops its group."""
    on_death: Literal["replay", "again", "drop"] = "replay"
    """What happens to an episode if the process that makes an attempt at the episode dies. With ``replay`` the next
    attempt takes over the turns that it repeats. With ``again`` the next attempt begins without turns. With ``drop``
    the group is dropped. The attempt whose process died never counts as failed."""
    timeout: float = 1200.0
    """Duration after which an attempt of an agent outside of the run counts as failed."""
    own_agents: bool = True
    """Whether agents replicas of the run begin episodes; if not, only agents outside of the run do."""
    reward_timeout: float = 3600.0
    """Duration after which a group is dropped if the reward of a finished episode has not come."""


class StoreRules(Protocol):
    """The part of :class:`..store.Store` that :class:`Episodes` uses."""

    newest_weights: int | None

    def check_worker(self, incarnation: Incarnation) -> Denied | NotReady | None:
        """Return why a worker's request is not served; None if it is served."""
        ...

    def create_group(self) -> bool:
        """Create a group if the limits allow it, and return whether it was created."""
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


class _TimeLimits:
    """The time limits of attempts by agents outside of the run, and of rewards that come later.

    Time limits are not durable: after a restart of the store each limit begins again. The caller checks whether an
    expired limit still applies, so that no limit has to be removed when an attempt ends or a reward arrives. Times are
    in seconds of the clock whose time is passed to :meth:`expired`.
    """

    def __init__(self) -> None:
        self._new: list[tuple[float, int, int]] = []
        """(duration in seconds, episode, attempt) of each limit that begins with the next call of :meth:`expired`."""
        self._heap: list[tuple[float, int, int]] = []
        """(time in seconds at which the limit ends, episode, attempt) of each limit that has begun."""

    def begin(self, episode: int, attempt: int, seconds: float) -> None:
        """Begin a time limit of an attempt."""
        self._new.append((seconds, episode, attempt))

    @property
    def due(self) -> float:
        """The time at which :meth:`expired` must be called next; inf if there are no limits."""
        return -math.inf if self._new else self._heap[0][0] if self._heap else math.inf

    def seconds_left(self, now: float) -> dict[tuple[int, int], float]:
        """Return the time (s) until the end of each limit that has begun, by episode and attempt."""
        return {(episode, attempt): end - now for end, episode, attempt in self._heap}

    def expired(self, now: float) -> Iterator[tuple[int, int]]:
        """Yield episode and attempt of each limit that has ended since the last call."""
        for seconds, episode, attempt in self._new:
            heappush(self._heap, (now + seconds, episode, attempt))
        self._new.clear()
        while self._heap and self._heap[0][0] <= now:
            _, episode, attempt = heappop(self._heap)
            yield episode, attempt


class Episodes:
    """The episodes of a store.

    Args:
        rules: The store, whose rules hold for all jobs, with or without agents.
        durable: State and log of the store.
        staleness: Limit on the age of tokens.
        work: The queue of the turns that rollouts extend.
        evaluations: The evaluations, whose episodes these rules hold for, too.
        settings: Settings of the episodes; None for a job without agents.
    """

    def __init__(
        self,
        rules: StoreRules,
        durable: DurableState,
        staleness: StalenessLimit,
        work: WorkQueue,
        evaluations: Evaluations,
        settings: EpisodeSettings | None,
    ) -> None:
        self._rules = rules
        self._evaluations = evaluations
        self._durable = durable
        self._state = durable.state
        self._staleness = staleness
        self._work = work
        self._has_agents = settings is not None
        self._settings = settings or EpisodeSettings()
        self._turns = TurnRules(durable, work)
        self._leases = Leases()
        self._calls: dict[int, tuple[Incarnation, str]] = {}
        """For each episode, the newest call of its agent, and the incarnation that began to prepare it."""
        self._requests: dict[str, int] = {}
        """For each request of an agent outside of the run whose attempt is not over, the episode of the attempt."""
        self._limits = _TimeLimits()
        self._heap: list[tuple[float, int]] = []
        """(step of the weights that the episode's group was begun with, episode) of every episode without an attempt.
        When an entry is popped, it is skipped if the episode has an attempt, and replaced if its step is outdated.
        """

    def rebuild(self) -> None:
        """Build leases and queue from the state; in a job without agents, drop the groups that need agents."""
        for answer in self._state.evaluations.answers.values():
            if answer.episode is not None:
                self._resume(answer.episode, episode_of(answer.episode))
        for group in [group for group in self._state.groups.values() if group.has_episodes]:
            if not self._has_agents and group.unscored:
                self._rules.drop(group, NO_AGENTS, DropCause.OTHER)
                continue
            self._queue(group)
            for track in group.trajectories:
                self._resume(track, episode_of(track))

    def _queue(self, group: Group) -> None:
        for track in group.trajectories:
            if episode_of(track).holder is None:
                heappush(self._heap, (self._staleness.begun_with(group), track.id))

    def _resume(self, track: TrajectoryState, episode: EpisodeState) -> None:
        """Continue an episode that an earlier process of the store began."""
        if track.finished:
            if episode.awaits_reward and track.score is None:
                self._limits.begin(track.id, episode.attempt, self._settings.reward_timeout)
        elif episode.holder is not None:
            self._assign(track, episode.holder)

    def _assign(self, track: TrajectoryState, holder: Incarnation) -> None:
        episode = episode_of(track)
        if episode.request is None:
            self._leases.assign(track.id, holder)
        else:
            self._requests[episode.request] = track.id
            self._limits.begin(track.id, episode.attempt, self._settings.timeout)

    def _release(self, track: TrajectoryState) -> None:
        self._leases.release(track.id)
        self._calls.pop(track.id, None)
        if (request := episode_of(track).request) is not None:
            self._requests.pop(request, None)

    def release_departed(self, current: frozenset[Incarnation]) -> None:
        """End the attempts of all incarnations that are not current."""
        blamed = self._blame(current)
        for number in sorted(self._leases.release_departed(current) | blamed.keys()):
            track = self._state.trajectories.get(number)
            if track is None:
                continue  # an earlier pass of this loop has dropped the episode's group
            if number in blamed:
                count, why = blamed[number]
                self._count_failure(track, why, count - 1)
            elif self._settings.on_death == "drop":
                self._rules.drop(track.group, REPLICA_ENDED, DropCause.FAILED)
            else:
                replay = self._settings.on_death == "replay"
                self._end_attempt(track, REPLICA_ENDED, episode_of(track).failures, replay=replay)

    def _blame(self, current: frozenset[Incarnation]) -> dict[int, tuple[int, str]]:
        """Find the calls right after which more than one process has ended.

        A call is suspected if it was the newest one of its episode, and the agent did not wait for tokens: its body
        was being prepared or, in an agents replica, the agent worked with the answer.

        Returns:
            For each episode with such a call, how many processes have ended, and a text that names the call.
        """
        blamed: dict[int, tuple[int, str]] = {}
        counted: set[tuple[int, str]] = set()
        for number, (incarnation, call) in list(self._calls.items()):
            if incarnation in current:
                continue
            del self._calls[number]
            track = self._state.trajectories[number]
            episode, created, counts = episode_of(track), track.group.created, track.group.blamed
            opened = [turn for turn in episode.made if turn.turn and turn.turn.request.startswith(f"{call}/")]
            if opened and (episode.request is not None or not all(turn.finished for turn in opened)):
                continue
            if (created.group, call) not in counted:
                counted.add((created.group, call))
                self._durable.write(CallBlamed(created.group, call))
            if counts[call] > 1:
                why = f"{incarnation.replica} ended {counts[call]} times right after the same call of item"
                blamed[number] = counts[call], f"{why} {created.item} (digest of the call: {call[:12]}…)"
        return blamed

    def forget(self, group: Group) -> None:
        """End the leases of a group that is dropped."""
        for track in group.trajectories:
            if track.episode is not None:
                self._release(track)

    def answer(self, request: EpisodeRequest) -> EpisodeAnswer | Done | NotReady | Denied:
        """Evaluate a request and return its answer, which may be sent after the next flush."""
        if rejection := self._rules.check_worker(request.incarnation):
            return rejection
        match request:
            case LeaseEpisodes(incarnation, at_most, _, holding):
                return self._lease(incarnation, at_most, holding)
            case OpenEpisode():
                return self._open(request)
            case OpenTurn(_, episode, attempt):
                current = self._current(episode, attempt)
                return current if isinstance(current, Denied) else self._turns.open(request, episode_of(current))
            case EndTurn():
                return self._turns.end(request)
            case MarkAnswer():
                return self._turns.mark(request)
            case Follow(incarnation, turn, offset):
                return self._turns.follow(incarnation, turn, offset)
            case GetEpisode(incarnation, episode, holding, call):
                track = self._state.trajectories.get(episode)
                if call and track is not None and track.is_at_work:
                    self._calls[episode] = incarnation, call
                return self._shown(episode, holding, call)
            case FinishEpisode():
                return self._finish(request)
            case PostReward(_, episode, attempt, reward):
                return self._post_reward(episode, attempt, reward)
            case FailAttempt(_, episode, attempt, why):
                return self._fail(episode, attempt, why)

    # ── attempts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _lease(self, incarnation: Incarnation, at_most: int, holding: Iterable[int]) -> LeasedEpisodes | Denied:
        if not self._has_agents:
            return Denied(_NO_EPISODES)
        leased = sorted(self._leases.leased_to(incarnation) - {*holding})[:at_most]
        while len(leased) < at_most and (track := self._begin(incarnation, None)) is not None:
            leased.append(track.id)
        return LeasedEpisodes(tuple(self._item(self._state.trajectories[number]) for number in leased))

    def _open(self, request: OpenEpisode) -> LeasedEpisodes | Denied:
        """Lease an episode for an agent outside of the run."""
        if not self._has_agents:
            return Denied(_NO_EPISODES)
        number = self._requests.get(request.request)
        track = (
            self._begin(request.incarnation, request.request, evaluated=request.evaluation)
            if number is None
            else self._state.trajectories[number]
        )
        return LeasedEpisodes(() if track is None else (self._item(track),))

    def _begin(
        self, incarnation: Incarnation, request: str | None, *, evaluated: bool = False
    ) -> TrajectoryState | None:
        """Begin an attempt at the next episode. Return the episode, or None if no episode may begin now.

        An agents replica gets the episodes of an evaluation first. An agent outside of the run, which makes a
        ``request``, gets them only if it asks for them (``evaluated``).
        """
        weights = self._state.committed if self._rules.newest_weights is None else self._rules.newest_weights
        if evaluated or request is None:
            track = self._evaluations.free_episode(outside=evaluated)
            if track is not None:
                self._start(track, incarnation, weights, request)
            if track is not None or evaluated:
                return track
        while True:
            track = self._first()
            if not self._staleness.allows(track.group if track else None, weights):
                return None
            if track is not None:
                heappop(self._heap)
                self._start(track, incarnation, weights, request)
                return track
            if not self._create():
                return None

    def _create(self) -> bool:
        number = self._state.next_group
        if not self._rules.create_group():
            return False
        self._queue(self._state.groups[number])
        return True

    def _first(self) -> TrajectoryState | None:
        """Return the next episode to lease, and leave it in the queue."""
        while self._heap:
            begun, number = self._heap[0]
            track = self._state.trajectories.get(number)
            if track is None or episode_of(track).holder is not None:
                heappop(self._heap)
            elif begun == (now := self._staleness.begun_with(track.group)):
                return track
            else:
                heapreplace(self._heap, (now, number))
        return None

    def _start(self, track: TrajectoryState, incarnation: Incarnation, weights: int, request: str | None) -> None:
        self._durable.write(AttemptStarted(track.id, episode_of(track).attempt + 1, incarnation, weights, request))
        self._assign(track, incarnation)
        before = self._staleness.begun_with(track.group)
        self._work.mark_begun(track.group, weights)
        if self._staleness.begun_with(track.group) != before:
            self._queue(track.group)  # the group's other episodes move up in the queue

    def _item(self, track: TrajectoryState) -> EpisodeItem:
        created = track.group.created
        return EpisodeItem(track.id, created.group, created.item, episode_of(track).attempt, track.group.is_evaluated)

    def _end_attempt(self, track: TrajectoryState, reason: str, failures: int, *, replay: bool = False) -> None:
        """End an attempt without a result, so that a replica may begin the next attempt.

        With ``replay``, rollouts continue to extend the turns of the attempt, so that the next attempt can take the
        turns over.
        """
        episode = episode_of(track)
        if not replay:
            self._work.withdraw(list(episode.turns.values()))
        self._release(track)
        self._durable.write(AttemptFailed(track.id, episode.attempt, failures, reason, replay))
        if track.group.is_evaluated:
            self._evaluations.offer(track.id)
        else:
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

    def _count_failure(self, track: TrajectoryState, why: str, failures: int = 0) -> None:
        """End an attempt as failed. ``failures`` is how often its item has failed, if that is more often."""
        failures, reason = max(episode_of(track).failures + 1, failures), on_one_line(why)[:_MAX_REASON_CHARS]
        if failures > self._settings.retries:
            self._rules.drop(track.group, reason, DropCause.FAILED)
        else:
            self._end_attempt(track, reason, failures)

    def _finish(self, request: FinishEpisode) -> Done | Denied:
        number, attempt, reward = request.episode, request.attempt, request.reward
        track = self._state.trajectories.get(number)
        if track is not None and track.finished and track.episode is not None and track.episode.attempt == attempt:
            if isinstance(reward, dict) and track.score != score_of(track, reward):
                return Denied(f"episode {number} was finished with another reward, which cannot change")
            return Done()  # repeated
        current = self._current(number, attempt)
        if isinstance(current, Denied):
            return current
        episode = episode_of(current)
        complete = [turn for turn in episode.made if turn.finished]
        used = continued(episode.made, episode.turns)
        lost = [turn for turn in complete if turn.unused or self._is_lost(turn, episode)]
        unused = tuple(turn.id for turn in lost if turn.id not in used)
        trainable = [turn for turn in complete if turn.length and not is_foreign(turn) and turn.id not in unused]
        if reward is not None and (problem := _reward_problem(reward, episode.made, trainable)):
            return Denied(f"the reward of episode {number} {problem}", wrong_argument=True)
        if not trainable:
            if episode.request is not None or request.failed:
                return Denied(f"{NO_ANSWER}; ask it first, or report that the attempt failed", no_answer=True)
            self._count_failure(current, NO_ANSWER)
            return Done()
        self._work.withdraw([turn for turn in episode.turns.values() if not turn.finished])
        self._release(current)
        counted = tuple(turn.id for turn in complete)
        self._durable.write(
            EpisodeFinished(number, attempt, counted, reward, request.later, unused)
        )  # one record, because a crash may occur between two records
        if reward is not None:
            self._scored(current)
        elif request.later:
            self._limits.begin(number, attempt, self._settings.reward_timeout)
        elif current.group.is_evaluated:
            self._evaluations.offer_scoring(number)
        else:
            self._rules.offer_scoring(number)
        return Done()

    def _scored(self, track: TrajectoryState) -> None:
        if track.group.is_evaluated:
            self._evaluations.finish()
        else:
            self._rules.scored((track.id,))

    def _current(self, number: int, attempt: int) -> TrajectoryState | Denied:
        """Return the episode if ``attempt`` is its newest attempt and is not over; otherwise return the refusal."""
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

    def _shown(self, number: int, holding: Iterable[int], call: str) -> EpisodeTurns | Denied:
        track = self._state.trajectories.get(number)
        if track is None or track.episode is None:
            return Denied(f"episode {number} is not stored: it was dropped or trained", fenced_attempt=True)
        episode = track.episode
        same = [turn for turn in episode.made if turn.turn is not None and turn.turn.request.startswith(f"{call}/")]
        undelivered = {turn.id for turn in same if self._is_undelivered(turn, episode)}
        if undelivered:
            undelivered -= continued(episode.made, episode.turns)
        return replace(shown_turns(episode, frozenset(holding)), undelivered=tuple(sorted(undelivered)))

    def _is_undelivered(self, turn: TrajectoryState, episode: EpisodeState) -> bool:
        """Return whether no agent has got an answer: its endpoint has said so, or has ended without saying anything."""
        asked_by = turn.asked_by or episode.holder
        ended = asked_by is not None and self._rules.check_worker(asked_by) is not None
        return not turn.delivered and (turn.unused or ended)

    def _is_lost(self, turn: TrajectoryState, episode: EpisodeState) -> bool:
        """Return whether no agent can have got an answer.

        An endpoint may die after it has written an answer, and before it has said so. Only an agent that has the answer
        ends its episode instead of calling again.
        """
        read = turn.read_by is not None and turn.read_by == (turn.asked_by or episode.holder)
        return self._is_undelivered(turn, episode) and not read

    # ── rewards that come later ────────────────────────────────────────────────────────────────────────────────────
    def _post_reward(self, number: int, attempt: int, reward: Reward) -> Done | Denied:
        track = self._state.trajectories.get(number)
        if track is None or track.episode is None:
            return Denied(f"episode {number} is not stored: it was dropped or trained", fenced_attempt=True)
        if not track.finished or not track.episode.awaits_reward or attempt != track.episode.attempt:
            current = self._current(number, attempt)
            return current if isinstance(current, Denied) else Denied(f"episode {number} is not finished yet")
        complete = [track.episode.turns[turn] for turn in track.episode.counted]
        if problem := _reward_problem(reward, complete, trainable_turns(track.episode)):
            return Denied(f"the reward of episode {number} {problem}")
        score = score_of(track, reward)
        if track.score is not None:
            known = track.score.agents or track.score.reward
            text = f"the reward of episode {number} is {shortened(known)} and cannot change"
            return Done() if track.score == score else Denied(text)
        self._durable.write(ScoresRecorded((score,)))
        self._scored(track)
        return Done()

    @property
    def own_agents(self) -> bool:
        """Whether agents replicas of the run begin episodes."""
        return self._settings.own_agents

    # ── who holds an episode ───────────────────────────────────────────────────────────────────────────────────────
    def held_outside(self, track: TrajectoryState, now: float) -> OutsideWait | None:
        """Return what an episode lacks from outside of the run; None if processes of the run can continue it now."""
        episode, left = episode_of(track), self._limits.seconds_left(now)
        if track.finished:
            kind, limit_s = OutsideKind.REWARD, self._settings.reward_timeout
            if not episode.awaits_reward or track.score is not None:
                return None
        elif episode.holder is None:
            return None if self._settings.own_agents else OutsideWait(OutsideKind.EPISODE)
        else:
            kind, limit_s = OutsideKind.AGENT, self._settings.timeout
            if episode.request is None or not all(turn.finished for turn in episode.made):
                return None
        return OutsideWait(kind, track.id, limit_s - left.get((track.id, episode.attempt), limit_s))

    def evaluation_held_outside(self, now: float) -> OutsideWait | None:
        """Return what the open evaluation lacks from outside of the run; None if the run can continue it now."""
        lacking = [self.held_outside(episode, now) for episode in self._evaluations.unsettled_episodes]
        waits = [wait for wait in lacking if wait is not None]
        return max(waits, key=lambda wait: wait.seconds) if waits and len(waits) == len(lacking) else None

    def holders(self, track: TrajectoryState) -> list[Incarnation | None]:
        """Return who continues an episode that is not finished; None stands for work that no replica has taken."""
        episode = episode_of(track)
        turns = [self._work.leases.holder(turn.id) for turn in episode.made if not turn.finished]
        return turns or [None] if episode.request is not None else [*turns, episode.holder]

    # ── time limits ────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def due(self) -> float:
        """The time (s) at which :meth:`expire` is to be called; inf if nothing has a time limit."""
        return self._limits.due

    def expire(self, now: float) -> None:
        """Fail the attempts of outside agents that take too long, and drop groups whose rewards do not come in time."""
        for number, attempt in self._limits.expired(now):
            track = self._state.trajectories.get(number)
            if track is None or episode_of(track).attempt != attempt:
                continue
            episode = episode_of(track)
            if not track.finished and episode.request is not None:
                self._count_failure(track, f"the agent did not finish within {duration_text(self._settings.timeout)}")
            elif track.finished and episode.awaits_reward and track.score is None:
                text = f"no reward within {duration_text(self._settings.reward_timeout)}"
                self._rules.drop(track.group, text, DropCause.UNSCORED)


def _reward_problem(
    reward: Reward, called: Iterable[TrajectoryState], trainable: Iterable[TrajectoryState]
) -> str | None:
    """Return why an episode with these turns cannot get a reward; None if it can.

    A name that no call has is wrong only if a call is without a reward: it may be misspelt.
    """
    if finite_reward(reward) is None:
        return f"is {shortened(reward)}; it must be {REWARD}"
    if not isinstance(reward, dict) or ANY_AGENT in reward:
        return None
    trained = _names(trainable)
    wrong, without = sorted(reward.keys() - _names(called)), sorted(trained - reward.keys())
    if not without or (not wrong and len(without) < len(trained)):
        return None
    problem = f"has {shortened(wrong or sorted(reward))}, the model name of no call that is trained"
    return f"{problem}, but not {shortened(without)}; correct the names, or add {ANY_AGENT!r} for all others"


def _names(turns: Iterable[TrajectoryState]) -> set[str]:
    return {turn.turn.agent for turn in turns if turn.turn is not None}
