"""The context of an answer in tokens, made from the messages of a request and the existing turns of the episode.

Sampled tokens are never replaced by an encoding of their text. The reason is that decoding and encoding changes many
answers, so that the model would be trained on tokens that it has not sampled. There are two cases:

- The conversation contains a recorded answer, after the same messages as when the answer was sampled. The context
  begins with the path of that answer's turn, and only the messages after the answer are encoded.
- The conversation contains no recorded answer, because the agent has edited the history or the answer, or because the
  prompt is that of a sub-agent. The conversation is encoded as a whole. The context branches off the turn whose path
  shares the most tokens with it. The encoded messages are context, and are not trained.

Messages are compared by rolling hashes from the front; a turn records the hash of its whole conversation. All functions
here are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import msgspec
from msgspec import Struct

from ...models.conversation import Chat
from ...trajectories.episodes.requests import Turn
from ..calls.call import Call, next_hash
from .shown_answer import AnswerFormat, shown_answer


class Context(Struct, frozen=True):
    """The context of a new turn."""

    parent: int | None
    """Turn whose path the context begins with; None if the context shares no token with any turn."""
    offset: int
    """Number of tokens of the parent's path that the context keeps."""
    given: tuple[int, ...]
    """Tokens that follow the kept tokens."""
    conversation: str
    """Hash of the conversation; empty for a plain prompt."""
    tokens: tuple[int, ...]
    """The whole context: the kept tokens of the parent's path, and the given tokens."""

    @property
    def length(self) -> int:
        """Number of tokens of the whole context."""
        return len(self.tokens)


class Paths:
    """The paths of an episode's turns.

    A path is put together when it is asked for: all paths of a long episode would take the square of its length.

    Args:
        turns: The turns; each parent of a turn is among them.
        known: The number of a turn and its context, if this was put together before.
    """

    def __init__(self, turns: Sequence[Turn], known: tuple[int, tuple[int, ...]] | None = None) -> None:
        self._known = known
        self._turns: Mapping[int, Turn] = {turn.id: turn for turn in turns}

    def path(self, turn: int) -> tuple[int, ...]:
        """Return the tokens from the beginning of the conversation to the newest sampled token of a turn."""
        return self.context(turn) + self._turns[turn].sampled

    def context(self, turn: int) -> tuple[int, ...]:
        """Return the tokens after which a turn was sampled."""
        begun = self._turns[turn]
        return self.before(begun.parent, begun.offset, begun.given)

    def before(self, parent: int | None, offset: int, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of a context: the kept tokens of the parent's path, and the given tokens."""
        pieces = [given]
        while parent is not None:
            turn = self._turns[parent]
            if self._known is not None and parent == self._known[0]:
                pieces.append((self._known[1] + turn.sampled)[:offset])
                break
            if offset > turn.offset:
                pieces.append((turn.given + turn.sampled)[: offset - turn.offset])
                offset = turn.offset
            parent = turn.parent
        tokens: list[int] = []
        for piece in reversed(pieces):
            tokens += piece
        return tuple(tokens)


def asked_before(hashes: Sequence[str], turns: Sequence[Turn]) -> list[tuple[Turn, str]]:
    """Return the finished turns after whose conversation a conversation goes on, that of the most messages first.

    Each comes with the hash that the conversation would have after the turn's answer.

    Args:
        hashes: Hash of the conversation up to each message, the last of them if there are very many.
        turns: Turns of the attempt.
    """
    places = {prefix: place for place, prefix in enumerate(hashes[:-1])}
    found = [(-places[turn.conversation], turn.id, turn) for turn in turns if turn.conversation in places]
    return [(turn, hashes[1 - place]) for place, _, turn in sorted(found, key=itemgetter(0, 1)) if turn.finished]


def answer_hashes(turn: Turn, context: tuple[int, ...], chat: Chat) -> tuple[str, ...]:
    """Return the hashes that a conversation may have after a turn's answer.

    There are two, because an agent may leave the reasoning out.
    """
    shown = shown_answer(turn.id, context, turn.sampled, AnswerFormat.decode(turn.options), chat)
    forms = {shown, msgspec.structs.replace(shown, reasoning="")}
    return tuple(next_hash(turn.conversation, form) for form in forms)


def chat_context(call: Call, answered: Turn | None, chat: Chat) -> Context:
    """Return the context of an answer to a conversation.

    Args:
        call: The call, with its messages.
        answered: The turn of the newest recorded answer in the conversation, whose ``given`` is its whole context; None
            if the conversation has no recorded answer.
        chat: The chat format, which already contains the tools.

    Returns:
        The context. If it has no parent, it does not continue the answer, and may begin with the path of any turn
        (:func:`branch`).

    Raises:
        ValueError: The conversation cannot be encoded.
    """
    messages = call.messages or ()
    if answered is not None:
        count = call.hashes.index(answered.conversation) + 2
        tokens = chat.extend(answered.given, answered.sampled, messages, count)
        if tokens is not None:
            path = answered.given + answered.sampled
            offset = len(path) if tokens[: len(path)] == path else _common_length(tokens, path)
            return Context(answered.id, offset, tokens[offset:], call.conversation, tokens)
    return plain_context(chat.prompt(messages), call.conversation)


def plain_context(tokens: Sequence[int], conversation: str = "") -> Context:
    """Return the context of ``tokens``, which continue no recorded answer, before it may begin with a turn's path."""
    return Context(None, 0, tuple(tokens), conversation, tuple(tokens))


def branch(context: Context, turns: Sequence[Turn]) -> Context:
    """Return a context without a parent as one that branches off the turn whose path shares the most tokens with it."""
    tokens = context.tokens
    shared: dict[int | None, int] = {None: 0}
    parent = None
    for turn in sorted(turns, key=lambda turn: turn.id):  # a parent's number is less than its children's
        common = shared[turn.parent]
        if common >= turn.offset:  # the path differs from the tokens not before the turn's own tokens
            own = turn.given + turn.sampled
            common = turn.offset + _common_length(tokens[turn.offset : turn.offset + len(own)], own)
        shared[turn.id] = common
        if common > shared[parent]:
            parent = turn.id
    offset = shared[parent]
    return Context(parent, offset, tokens[offset:], context.conversation, tokens)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that both sequences share."""
    low, high = 0, min(len(first), len(second)) + 1  # they share ``low`` tokens, and fewer than ``high``
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low
