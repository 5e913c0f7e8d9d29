"""A cache of an episode's turns: a complete turn is fetched from the store, and shown, only once.

The cache only saves work: everything can be read from the store again. It is bounded in size, and is valid for one
attempt at an episode, because the next attempt has other turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct, structs

from ...models.conversation import Chat
from ...models.tokenizer import Tokenizer
from ...trajectories.client import AskStore
from ...trajectories.episodes.requests import EpisodeTurns, GetEpisode, Turn
from .shown_answer import AnswerFormat, end_at_stop
from .turn_context import Paths, answer_hashes, asked_before

MAX_WEIGHT = 2**20
"""Maximum memory of all turns that are kept, in tokens (:func:`_weight`). A token takes up to 48 bytes, so these turns
take up to 50 MB."""


class _Kept(Struct):
    attempt: int
    turns: dict[int, Turn]
    hashes: dict[int, tuple[str, ...]]
    """The hashes after the answers of turns (:func:`.turn_context.answer_hashes`), as far as they were needed."""
    newest: tuple[int, tuple[int, ...]] | None = None
    """The newest answered turn, and its context: the path of the next turn begins with them."""
    weight: int = 0


class KnownTurns:
    """Reads the turns of episodes, and caches the complete turns of the episodes that were read most recently.

    Args:
        ask: Sends requests to the store.
        tokenizer: Tokenizer of the model.
        max_weight: Maximum memory of all turns that are kept, in tokens (:func:`_weight`).
    """

    def __init__(self, ask: AskStore, tokenizer: Tokenizer, max_weight: int = MAX_WEIGHT) -> None:
        self._ask, self._tokenizer, self._max_weight = ask, tokenizer, max_weight
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self.weight = 0
        """Memory of all turns that are kept, in tokens (:func:`_weight`)."""

    async def read(self, episode: int, call: str = "") -> EpisodeTurns:
        """Return the newest attempt at an episode with all of its turns, to prepare the call with this digest.

        Raises:
            FencedAttempt: The episode is over.
        """
        kept = self._kept.get(episode)
        read = await self._ask(GetEpisode, episode, tuple(kept.turns) if kept is not None else (), call)
        if kept is not None and read.attempt != kept.attempt:
            self._forget(episode)
            kept = None
            read = await self._ask(GetEpisode, episode, (), call)
        turns = {} if kept is None else dict(kept.turns)
        await self._keep(episode, read)
        turns |= {turn.id: turn for turn in read.turns}
        return structs.replace(read, turns=tuple(turns[number] for number in sorted(turns)))

    async def newest_answer(
        self, episode: int, hashes: Sequence[str], turns: Sequence[Turn], chat: Chat
    ) -> Turn | None:
        """Return the turn of the recorded answer after which the fewest messages of a conversation follow.

        If two turns gave equal answers to the same messages, return the turn with the lower number.

        Args:
            episode: The episode.
            hashes: As for :func:`.turn_context.asked_before`.
            turns: Turns of the newest attempt.
            chat: Format of the conversation, with its tools.

        Returns:
            The turn with its whole context as ``given``, and without a parent; None if there is no such turn.
        """
        kept = self._kept.get(episode)
        paths = Paths(turns, None if kept is None else kept.newest)
        for turn, after in asked_before(hashes, turns):
            context = None
            known = None if kept is None else kept.hashes.get(turn.id)
            if known is None:
                context = paths.context(turn.id)
                known = answer_hashes(turn, context, chat)
                if kept is not None and turn.id in kept.turns:
                    kept.hashes[turn.id] = known
                await asyncio.sleep(0)  # after a restart, these may be all turns of the episode
            if after in known:
                context = paths.context(turn.id) if context is None else context
                if kept is not None:
                    kept.newest = turn.id, context
                return structs.replace(turn, parent=None, offset=0, given=context)
        return None

    async def _keep(self, episode: int, read: EpisodeTurns) -> None:
        """Keep the turns that are complete."""
        complete = []
        for turn in read.turns:
            if self._is_complete(turn):
                complete.append(turn)
            await asyncio.sleep(0)  # as above
        kept = self._kept.setdefault(episode, _Kept(read.attempt, {}, {}))
        self._kept.move_to_end(episode)
        for turn in complete:
            if turn.id not in kept.turns:
                kept.turns[turn.id] = turn
                kept.weight += _weight(turn)
                self.weight += _weight(turn)
        while self.weight > self._max_weight:
            self._forget(next(iter(self._kept)))

    def _forget(self, episode: int) -> None:
        if (kept := self._kept.pop(episode, None)) is not None:
            self.weight -= kept.weight

    def _is_complete(self, turn: Turn) -> bool:
        """Return whether a turn cannot change: it is finished, and has no token after a stop text."""
        if not turn.finished:
            return False
        end = end_at_stop(turn.sampled, AnswerFormat.decode(turn.options).stop, self._tokenizer)
        return end is None or end.length == len(turn.sampled)


def _weight(turn: Turn) -> int:
    """Return the approximate memory of a turn, in tokens."""
    return 32 + len(turn.given) + len(turn.sampled)
