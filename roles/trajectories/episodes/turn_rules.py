"""The rules of turns: how they are opened, taken over from an earlier attempt, ended, followed and shown.

A request takes over a recorded turn of an earlier attempt if it equals the request that opened the turn. The parent of
the turn may still be a recorded turn, because agents that run concurrently in an episode may send their requests in
another order than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from msgspec.structs import asdict

from ....core.types import Incarnation, Version
from ..durable.groups import EpisodeState, TrajectoryState, path_length, sampled_tokens
from ..durable.log import DurableState
from ..durable.records import TurnCreated, TurnEnded, TurnTaken, TurnUnused, pack_tokens, unpack, unpack_tokens
from ..leases import WorkQueue
from ..types import Denied, Done, NotReady, Sampling
from .requests import EndTurn, EpisodeTurns, MarkAnswer, OpenTurn, Turn, TurnOpened, TurnTokens

MAX_TURNS = 2**14
"""Maximum number of turns of an attempt. It bounds the work on a call, at the endpoint and here: both look at all turns
of the attempt."""


class TurnRules:
    """The turns of a store's episodes.

    Args:
        durable: State and log of the store.
        work: The queue of the turns that rollouts extend.
    """

    def __init__(self, durable: DurableState, work: WorkQueue) -> None:
        self._durable = durable
        self._state = durable.state
        self._work = work

    def open(self, request: OpenTurn, episode: EpisodeState) -> TurnOpened | Denied:
        """Open a turn of the newest attempt at an episode, or take over the recorded turn that the request repeats."""
        try:
            given = pack_tokens(request.given)
        except (OverflowError, TypeError) as error:
            return Denied(f"malformed tokens: {error}")
        wanted = (
            request.request,
            request.parent,
            request.offset,
            given,
            request.max_new,
            request.options,
            request.sampling,
            request.agent,
        )
        for known in episode.made:
            assert known.turn is not None
            if known.turn.request == request.request:
                if _content(known.turn) == wanted:
                    known.asked_by = request.incarnation
                    if known.unused:
                        self._durable.write(TurnUnused(known.id, request.episode, False, known.delivered))
                    return TurnOpened(known.id)
                return Denied(f"the request of turn {known.id} was repeated with other tokens")
        for number in sorted(episode.recorded, reverse=True):
            recorded = episode.turns[number].turn
            if recorded is not None and _content(recorded) == wanted:
                self._durable.write(TurnTaken(number, request.episode))
                episode.turns[number].asked_by = request.incarnation
                return TurnOpened(number)
        if problem := _problem(request, episode) or sampling_problem(request.sampling):
            return Denied(problem)
        if not 1 <= request.max_new <= self._state.lengths.limit:
            return Denied(f"max_new is {request.max_new}; it must be 1 to {self._state.lengths.limit}")
        if len(episode.turns) >= MAX_TURNS:
            return Denied(f"an attempt has at most {MAX_TURNS} answers")
        number = self._state.next_turn
        self._durable.write(
            TurnCreated(
                number,
                request.episode,
                request.attempt,
                request.request,
                request.parent,
                request.offset,
                given,
                request.max_new,
                request.conversation,
                request.options,
                request.sampling,
                request.agent,
            )
        )
        episode.turns[number].asked_by = request.incarnation
        self._work.offer(episode.turns[number])
        return TurnOpened(number)

    def end(self, request: EndTurn) -> Done | Denied:
        """End the answer of a turn after the number of tokens that the request names, and end the turn's lease."""
        turn = self._current(request.turn)
        if isinstance(turn, Denied):
            return turn
        if not 1 <= request.length <= turn.length:
            return Denied(f"turn {turn.id} cannot end after {request.length} tokens: give 1 to {turn.length}")
        if turn.finished and request.length == turn.length:
            return Done()  # the request is repeated, or the answer ended at this token by itself
        assert turn.turn is not None
        if self._state.trajectories[turn.turn.episode].finished:
            return Denied(f"turn {turn.id} cannot be ended: its episode is finished", fenced_attempt=True)
        self._work.withdraw([turn])
        self._durable.write(TurnEnded(turn.id, turn.turn.episode, request.length))
        return Done()

    def mark(self, request: MarkAnswer) -> Done | Denied:
        """Note whether the agent has got the answer of a turn, and has used it."""
        turn = self._current(request.turn)
        if isinstance(turn, Denied):
            return turn
        assert turn.turn is not None
        unused = request.repeated or not request.delivered
        asked_elsewhere = turn.asked_by not in (None, request.incarnation)
        unknown = request.repeated and not turn.delivered  # another endpoint may still be giving the answer
        void = asked_elsewhere and (unknown or not request.delivered)
        known = (turn.unused, turn.delivered) == (unused, request.delivered)
        if not void and not known and not self._state.trajectories[turn.turn.episode].finished:
            self._durable.write(TurnUnused(turn.id, turn.turn.episode, unused, request.delivered))
        return Done()

    def follow(self, incarnation: Incarnation, number: int, offset: int) -> TurnTokens | NotReady | Denied:
        """Return the sampled tokens of a turn from ``offset`` on; NotReady while there are none."""
        turn = self._current(number)
        if isinstance(turn, Denied):
            return turn
        if not 0 <= offset <= turn.length:
            return Denied(f"offset is {offset}; it must be 0 to {turn.length}, the sampled tokens of turn {number}")
        if offset == turn.length and not turn.finished:
            return NotReady()
        if turn.finished:
            turn.read_by = incarnation
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

    def _current(self, number: int) -> TrajectoryState | Denied:
        """Return a turn of the newest attempt at its episode, or the refusal of the request."""
        turn = self._state.answers.get(number)
        if turn is None or turn.turn is None:
            return Denied(f"turn {number} is not stored: its attempt is over", fenced_attempt=True)
        episode = self._state.trajectories[turn.turn.episode].episode
        if episode is not None and number in episode.recorded:
            text = f"turn {number} is of an attempt that has ended, and the newest attempt has not adopted this turn"
            return Denied(text, fenced_attempt=True)
        return turn


def shown_turns(episode: EpisodeState, without: AbstractSet[int]) -> EpisodeTurns:
    """Return the newest attempt at an episode, its turns and the recorded turns, except the turns in ``without``."""
    recorded = [episode.turns[number] for number in sorted(episode.recorded)]
    made = sorted(episode.made, key=lambda turn: turn.id)
    return EpisodeTurns(episode.attempt, _shown(made, without), _shown(recorded, without))


def _shown(turns: Iterable[TrajectoryState], without: AbstractSet[int]) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            turn.id,
            created.parent,
            created.offset,
            unpack_tokens(created.given),
            sampled_tokens(turn),
            turn.finished,
            created.conversation,
            created.attempt,
            created.request,
            created.options,
            created.sampling,
            created.agent,
        )
        for turn in turns
        if turn.id not in without and (created := turn.turn) is not None
    )


def _content(created: TurnCreated) -> tuple[object, ...]:
    """Return the fields of a turn's request by which a repeated request is recognized."""
    return (
        created.request,
        created.parent,
        created.offset,
        created.given,
        created.max_new,
        created.options,
        created.sampling,
        created.agent,
    )


def sampling_problem(sampling: Sampling | None) -> str | None:
    """Return a text that names an invalid field of a turn's sampling and its valid values; None if all are valid."""
    given = {} if sampling is None else asdict(sampling)
    for name, (accepts, words) in ACCEPTED.items():
        value = given.get(name)
        if value is not None and not accepts(value):
            return f"{name} is {value}; it must be {words}"
    return None


_PENALTY: tuple[Callable[[float], bool], str] = (lambda value: -2 <= value <= 2, "-2 to 2")
ACCEPTED: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value == 0 or 1e-30 <= value <= 1e30, "0, or 1e-30 to 1e30"),
    "top_p": (lambda value: 1e-30 <= value <= 1, "1e-30 to 1"),
    "top_k": (lambda value: -1 <= value < 2**31, "-1 or 0 for all tokens, or a number of tokens"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (lambda value: 1e-3 <= value <= 1e3, "1e-3 to 1e3"),
    "seed": (lambda value: -(2**63) <= value < 2**63, "an integer of 64 bits"),
}
"""For each number in :class:`..types.Sampling`, a test whether vLLM accepts a value, and the accepted values in words.
vLLM raises an error for any other value, or 32 bits cannot compute with it, which would end a torch engine."""


def _problem(request: OpenTurn, episode: EpisodeState) -> str | None:
    """Return why the tokens before a turn are invalid; None if they are valid."""
    longest = 0
    if request.parent is not None:
        if request.parent not in episode.turns or request.parent in episode.recorded:
            return f"parent {request.parent} is not a turn of attempt {request.attempt} at episode {request.episode}"
        longest = path_length(episode.turns[request.parent])
    if not 0 <= request.offset <= longest:
        return f"offset is {request.offset}; it must be 0 to {longest}, the number of tokens of the parent's path"
    if not request.offset and not request.given:
        return "a turn needs at least one token before its answer"
    return None
