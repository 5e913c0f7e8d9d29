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
    """The paths of an episode's turns, each computed once.

    Args:
        turns: The turns; each parent of a turn is among them.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns: Mapping[int, Turn] = {turn.id: turn for turn in turns}
        self._paths: dict[int, tuple[int, ...]] = {}

    def path(self, turn: int) -> tuple[int, ...]:
        """Return the tokens from the beginning of the conversation to the newest sampled token of a turn."""
        missing: list[Turn] = []
        parent: int | None = turn
        while parent is not None and parent not in self._paths:
            missing.append(self._turns[parent])
            parent = missing[-1].parent
        for step in reversed(missing):
            before = () if step.parent is None else self._paths[step.parent][: step.offset]
            self._paths[step.id] = before + step.given + step.sampled
        return self._paths[turn]

    def context(self, turn: int) -> tuple[int, ...]:
        """Return the tokens after which a turn was sampled."""
        begun = self._turns[turn]
        return self.before(begun.parent, begun.offset, begun.given)

    def before(self, parent: int | None, offset: int, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of a context: the kept tokens of the parent's path, and the given tokens."""
        return given if parent is None else self.path(parent)[:offset] + given


def chat_context(call: Call, turns: Sequence[Turn], chat: Chat) -> Context:
    """Return the context of an answer to a conversation.

    Args:
        call: The call, with its messages.
        turns: Turns of the attempt.
        chat: The chat format, which already contains the tools.

    Raises:
        ValueError: The conversation cannot be encoded.
    """
    messages = call.messages or ()
    paths = Paths(turns)
    answered, turn = _newest_answer(call.hashes, turns, paths, chat)
    if turn is not None:
        tokens = chat.extend(paths.context(turn.id), turn.sampled, messages, answered)
        if tokens is not None:
            path = paths.path(turn.id)
            offset = len(path) if tokens[: len(path)] == path else _common_length(tokens, path)
            return Context(turn.id, offset, tokens[offset:], call.conversation, tokens)
    return _branch(chat.prompt(messages), turns, call.conversation)


def plain_context(tokens: Sequence[int], turns: Sequence[Turn]) -> Context:
    """Return the context of a completion of ``tokens``, which are a prompt without messages."""
    return _branch(tuple(tokens), turns, "")


def _newest_answer(hashes: Sequence[str], turns: Sequence[Turn], paths: Paths, chat: Chat) -> tuple[int, Turn | None]:
    """Find the recorded answer after which the fewest messages follow.

    If two turns gave equal answers to the same messages, return the turn with the lower number. An answer without its
    reasoning is also found, because an agent may leave the reasoning out.

    Returns:
        Number of messages up to the answer, and its turn; (0, None) if the conversation has no recorded answer.
    """
    known = {prefix: count for count, prefix in enumerate(hashes, start=1)}
    answered, found = 0, None
    for turn in sorted(turns, key=lambda turn: turn.id):
        asked = known.get(turn.conversation)
        if not turn.finished or asked is None or asked < answered:
            continue
        form = AnswerFormat.decode(turn.options)
        shown = shown_answer(turn.id, paths.context(turn.id), turn.sampled, form, chat)
        forms = {shown, msgspec.structs.replace(shown, reasoning="")}
        count = max(known.get(next_hash(turn.conversation, form), 0) for form in forms)
        if count > answered:
            answered, found = count, turn
    return answered, found


def _branch(tokens: tuple[int, ...], turns: Sequence[Turn], conversation: str) -> Context:
    """Return ``tokens`` as a context that branches off the turn whose path shares the longest prefix with them."""
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
    return Context(parent, offset, tokens[offset:], conversation, tokens)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that both sequences share."""
    low, high = 0, min(len(first), len(second)) + 1  # they share ``low`` tokens, and fewer than ``high``
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low
