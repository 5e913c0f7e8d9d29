"""Serves an endpoint: its real server over a stand-in for the store, or over the real store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.endpoint.turns.turn_context import Paths
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trajectories.episodes.requests import Turn
from rrl.tests.support.roles.endpoint.fake_turns import FakeTurns
from rrl.tests.support.roles.endpoint.tool_folders import END

RUN = "guess-1"
SECRET = bytes(range(32))
CHAT = open_chat(
    ModelSpec(
        tokenizer=TokenizerSpec(
            (*"0123456789", "12", "<", ">", "=", "?"), chat={"user": "?{content}=", "assistant": "{content}"}
        )
    )
)
MAX_LENGTH = 24
DEADLINE_S = 30.0
"""Seconds after which a wait fails. Only a broken build takes so long."""
USER: list[Any] = [{"role": "user", "content": "7"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER},
    "completions": {"prompt": "7"},
    "responses": {"input": "7"},
    "messages": {"messages": USER, "max_tokens": 4},
}
"""For each form, what its body has besides model and stream."""


class Scene:
    """A served endpoint over a stand-in for the store."""

    def __init__(self, chat: ModelChat = CHAT, **changed: Any) -> None:
        self.chat = chat
        self.turns = FakeTurns(self._opened)
        self.opened: list[Turn] = []
        self.policy: Callable[[Turn], None] | None = None
        """A function that samples each turn when it is opened; None if the test samples turns itself."""
        self._changed = threading.Condition()
        run: dict[str, Any] = {"policy": Policy(1.0), "max_new": 4, "max_length": MAX_LENGTH, **changed}
        self.endpoint = Endpoint(ServedRun(RUN, SECRET, **run), chat, self.turns)
        self.server = EndpointServer(self.endpoint.application)
        self.server.start()

    def _opened(self, turn: Turn) -> None:
        with self._changed:
            self.opened.append(turn)
            self._changed.notify_all()
        if self.policy is not None:
            self.policy(turn)

    def answers(self, *texts: str, end: int | None = EOS) -> None:
        """Answer each new turn with the next of these texts; the last text is repeated."""
        waiting = [list(self.chat.tokenizer.encode(text)) for text in texts]

        def sample(turn: Turn) -> None:
            tokens = waiting.pop(0) if len(waiting) > 1 else list(waiting[0])
            self.turns.sample(turn.id, *tokens, *([] if end is None else [end]), finished=True)

        self.policy = sample

    def wait_opened(self, count: int) -> Turn:
        """Wait until ``count`` turns are opened, and return the last of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.opened) >= count, DEADLINE_S)
            return self.opened[count - 1]

    def key(self, episode: int = 0, attempt: int = 1, secret: bytes = SECRET) -> str:
        return encode_key(EpisodeKey(RUN, episode, attempt), secret)

    def client(self, **more: Any) -> Any:
        options: dict[str, Any] = {"base_url": self.server.base_url, "api_key": self.key(), "timeout": DEADLINE_S}
        return openai.OpenAI(**options | more)

    def create(self, messages: list[Any] = USER, **more: Any) -> Any:
        return self.client().chat.completions.create(model="any", messages=messages, **more)

    def paths(self) -> Paths:
        return Paths(tuple(self.turns.turns.values()))


class ToolScene(Scene):
    """An endpoint of a model with tools."""

    def says(self, *texts: str) -> None:
        """Answer each new turn with the next of these texts, in tokens that differ from those of the encoded text."""
        waiting = list(texts)

        def sample(turn: Turn) -> None:
            text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            encode = self.chat.tokenizer.encode
            tokens = [token for piece in text.replace("12", "1|2").split("|") for token in encode(piece)]
            self.turns.sample(turn.id, *tokens, *encode(END), finished=True)

        self.policy = sample

    def sampled(self, number: int) -> tuple[int, ...]:
        return self.turns.turns[self.opened[number].id].sampled
