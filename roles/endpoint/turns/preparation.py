"""The work on the body of a call before its turn is opened: parse it, and find the context of the answer.

This work grows with the body, and any key of an episode can send a large one. The endpoint does it for a small body in
its event loop, and for any other in a process (:mod:`..preparation_processes`). It gives the same result in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat

import msgspec
from msgspec import Struct, structs

from ....config.model_folder import TextTooLong
from ...models.conversation import ASSISTANT, Chat, Message, ModelChat, ToolsUnsupported
from ...trajectories.episodes.requests import Turn
from ...trajectories.types import Sampling
from ..calls.call import Call, Policy, as_untrained, is_untrained
from ..calls.constraint import Constraint
from ..calls.errors import ApiError, wrong
from .constrained import AskedChat, compile_problem, grammar_of, key_of
from .turn_context import Context, chat_context, plain_context

_MARK = 10**12
"""First of the numbers that replace the contents of messages to find out whether a template shows them."""
_MAX_SEQUENCES = 4096
"""Maximum number of sequences of roles that are remembered. Agents choose the roles."""
_MAX_HASHES = 2**16
"""Maximum number of hashes of a conversation that a process returns. So an answer that more messages follow is not
found. It bounds the work of the event loop."""


class Work(Struct, frozen=True):
    """A call to prepare."""

    parse: Callable[[bytes, Policy], Call]
    """Translates the body; a function of a module, which a process can import."""
    body: bytes
    untrained: bool = False
    """True if the agent has said that the answer must not be trained."""
    finds_context: bool = False
    """True if the context is found, too; False if the call is only parsed."""
    answered: Turn | None = None
    """The answer that the conversation continues (:func:`.turn_context.chat_context`)."""
    left_out: int = 0
    """Number of tokens of this answer and its context that are left out, because the chat does not read them."""


class Preparation:
    """Prepares calls.

    Args:
        chat: Tokenizer and chat template of the model.
        policy: The job's settings of sampling.
    """

    def __init__(self, chat: ModelChat, policy: Policy) -> None:
        self._chat, self._policy = chat, policy
        self._decode: Callable[[Sequence[int]], str] | None = getattr(chat.tokenizer, "decode_all", None)
        self._parsed: tuple[Work, Call] | None = None
        self._shown: set[tuple[str, ...]] = set()
        """Sequences of roles in which the template is known to show the content of the message in the middle."""

    def prepare(self, work: Work) -> tuple[Call, Context | None]:
        """Parse a call, and find its context. The call that was parsed last is remembered.

        Returns:
            The call, without its messages and prompt and with its last hashes, and the context of its answers, without
            the tokens that it keeps of its parent's path.

        Raises:
            ApiError: The call cannot be served.
        """
        asked = msgspec.structs.replace(work, finds_context=False, answered=None, left_out=0)
        if self._parsed is None or self._parsed[0] != asked:
            self._parsed = asked, self.parse(asked)
        call, context = self._parsed[1], None
        if work.finds_context:
            context = self.context(call, self.chat_of(call), work.answered, work.left_out)
            context = msgspec.structs.replace(context, tokens=context.given)
        messages = None if call.messages is None else ()
        hashes = call.hashes[-1:] if work.finds_context else call.hashes[-_MAX_HASHES:]
        return msgspec.structs.replace(call, messages=messages, prompt="", hashes=hashes), context

    def parse(self, work: Work) -> Call:
        """Parse a call. One that is not trained may ask for any sampling. Raises ApiError."""
        as_asked = structs.replace(self._policy, foreign="context")
        call = work.parse(work.body, as_asked)
        if work.untrained or is_untrained(call, self._policy):
            return as_untrained(call)
        return call if call.sampling is None or as_asked == self._policy else work.parse(work.body, self._policy)

    def chat_of(self, call: Call) -> Chat:
        """Return the format of a call's conversation, with its tools and its constraint. Raises ApiError."""
        try:
            chat = self._chat.with_tools(call.tools) if call.tools else self._chat
            constraint = Constraint.decode(call.constraint)
            return AskedChat(chat, constraint, has_tools=bool(call.tools)) if call.constraint else chat
        except ToolsUnsupported as error:
            raise ApiError(400, f"tools: {error}", code="unsupported_value", param="tools") from None
        except ValueError as error:
            raise ApiError(400, f"tools: {error}", code="invalid_value", param="tools") from None

    def masked(self, call: Call, chat: Chat) -> Call:
        """Return a call with the mask of its constraint, if the job enforces constraints. Raises ApiError."""
        if not call.constraint or self._policy.constraints != "enforce":
            return call
        constraint = Constraint.decode(call.constraint)
        key = key_of(constraint, call.wire)
        try:
            grammar = grammar_of(constraint, call.tools if call.may_call else "", chat)
        except (ValueError, RecursionError) as error:
            raise wrong(key, f'{error}; with [roles.endpoint] constraints = "ask" such a call is served') from None
        if problem := compile_problem(grammar):
            raise wrong(key, f"it cannot be enforced: {problem}")
        sampling = msgspec.structs.replace(call.sampling or Sampling(), constraint=grammar)
        return msgspec.structs.replace(call, sampling=sampling)

    def context(self, call: Call, chat: Chat, answered: Turn | None, left_out: int = 0) -> Context:
        """Return the context of the answers to a call (:func:`.turn_context.chat_context`). Raises ApiError."""
        param = "prompt" if call.messages is None else "input" if call.wire == "responses" else "messages"
        try:
            if call.messages is not None:
                context = chat_context(call, answered, chat)
                self._check_shown(call.messages, chat, bool(call.tools), param, counts=call.wire == "chat")
            else:
                prompt = chat.tokenizer.encode(call.prompt) if isinstance(call.prompt, str) else call.prompt
                if any(token >= chat.tokenizer.size for token in prompt):
                    raise wrong("prompt", "a token id is beyond the vocabulary")
                context = plain_context(prompt)
            before = 0 if context.parent is None else left_out
            if before + context.length >= self._policy.max_length:
                raise TextTooLong(f"the request has {before + context.length}")
        except TextTooLong as error:
            most = f"this model's maximum context length is {self._policy.max_length:g} tokens"
            problem = f"{most}; {error}, and an answer needs one more"
            raise ApiError(400, problem, code="context_length_exceeded", param=param) from None
        except ValueError as error:
            raise wrong(param, str(error)) from None
        return msgspec.structs.replace(context, offset=before + context.offset)

    def _check_shown(self, messages: Sequence[Message], chat: Chat, tools: bool, key: str, *, counts: bool) -> None:
        """Refuse a conversation if the chat template of the model's folder drops one of its messages.

        The error names the ``key`` of the conversation and, if it ``counts`` messages as the body does, the place.

        A template decides by the role of a message and of its neighbours whether it shows the message, so each sequence
        of three roles is tried once. The content of an answer with tool calls may be dropped, as in vLLM.
        """
        roles = [message.role + "+" * bool(message.tool_calls) for message in messages]
        sequences = set(zip(repeat(str(tools)), [str(tools), *roles], roles, [*roles[1:], ""], strict=False))
        if self._decode is None or self._shown.issuperset(sequences):
            return
        marked = [_marked(message, place) for place, message in enumerate(messages)]
        text = self._decode(chat.prompt(marked))
        for place, (message, mark) in enumerate(zip(messages, marked, strict=True)):
            if mark is not message and mark.content not in text:
                without = [*messages[:place], mark, *messages[place + 1 :]]
                if chat.prompt(without) == chat.prompt(messages):
                    problem = f"the model's chat template drops this message of role {message.role!r}"
                    raise wrong(f"{key}[{place}]" if counts else key, f"{problem}; use another role, or another place")
        if len(self._shown) > _MAX_SEQUENCES:
            self._shown.clear()
        self._shown.update(sequences)


def _marked(message: Message, place: int) -> Message:
    """Return a message whose content is a number of its own, if it has a content that must be shown."""
    if not message.content or (message.role == ASSISTANT and message.tool_calls):
        return message
    return msgspec.structs.replace(message, content=str(_MARK + place), parts=())
