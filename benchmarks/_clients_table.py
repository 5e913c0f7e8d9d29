"""The clients that play the scripted episode: how each is started, and what its model answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from rrl.tests.support.clients.house import FLOORS
from rrl.tests.support.clients.native import BINARIES, look_command

FOLDER = Path(__file__).parents[1] / "tests" / "support" / "clients"
REASONING = "<think>\nThe next one.\n</think>\n\n"
DONE = "There are 60 chairs: 5 * 12."


class Client(Struct, frozen=True):
    """A client, in one of its modes."""

    package: str
    form: str
    """Form of its calls: chat, responses or messages."""
    command: tuple[str, ...]
    answers: tuple[str, ...]
    """What the model answers, turn by turn."""
    streams: bool = False
    constrained: bool = False
    """Whether its calls ask for a schema or a forced tool."""
    linear: bool = True
    """Whether each of its calls continues the one before. Some rewrite answers, or force a tool only at first."""
    repeats: bool = True
    """Whether the client, or the program that uses it, repeats a call whose stream breaks."""
    binary: bool = False
    """Whether it is one of the two large native programs."""

    @property
    def name(self) -> str:
        return self.package if self.binary else " ".join((self.package, *self.command[2:]))


def call(tool: str, **arguments: object) -> str:
    """Return an answer that calls a tool."""
    return f"{REASONING}<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def walk(last: str, tool: str = "look", key: str = "floor", command: Callable[[str], str] = str) -> tuple[str, ...]:
    """Return the six answers of an episode: a call for each floor, and then ``last``."""
    return (*(call(tool, **{key: command(floor)}) for floor in FLOORS), last)


def _script(package: str, form: str, file: str, *modes: str, answers: Sequence[str], **more: bool) -> Client:
    return Client(package, form, (sys.executable, str(FOLDER / file), *modes), tuple(answers), **more)


TEXT = walk(DONE)
TYPED_TEXT = walk('{"chairs": 60}')
_PYDANTIC = walk(call("final_result", chairs=60))
_LANGCHAIN = walk(call("House", chairs=60))
_SHELL = walk(call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), "bash", "command", "echo {}".format)

_NATIVE = {"streams": True, "binary": True}

CLIENTS: tuple[Client, ...] = (
    _script("openai", "chat", "openai_sdk.py", "chat", "create", answers=TEXT),
    _script("openai", "chat", "openai_sdk.py", "chat", "stream", answers=TEXT, streams=True),
    _script("openai", "chat", "openai_sdk.py", "chat", "parse", answers=TYPED_TEXT, constrained=True),
    _script("openai", "responses", "openai_sdk.py", "responses", "create", answers=TEXT),
    _script("openai", "responses", "openai_sdk.py", "responses", "stream", answers=TEXT, streams=True),
    _script("openai", "responses", "openai_sdk.py", "responses", "parse", answers=TYPED_TEXT, constrained=True),
    _script("openai-agents", "responses", "agents_sdk.py", "plain", answers=TEXT),
    _script("openai-agents", "responses", "agents_sdk.py", "streamed", answers=TEXT, streams=True, repeats=False),
    _script("openai-agents", "responses", "agents_sdk.py", "typed", answers=TYPED_TEXT, constrained=True),
    _script("openai-agents", "responses", "agents_sdk.py", "required", answers=TEXT, constrained=True, linear=False),
    _script("pydantic-ai", "chat", "pydantic_agent.py", "openai-chat", "text", answers=TEXT),
    _script("pydantic-ai", "chat", "pydantic_agent.py", "openai-chat", "typed", answers=_PYDANTIC, constrained=True),
    _script("pydantic-ai", "responses", "pydantic_agent.py", "openai", "text", answers=TEXT),
    _script("pydantic-ai", "responses", "pydantic_agent.py", "openai", "typed", answers=_PYDANTIC, constrained=True),
    _script("pydantic-ai", "messages", "pydantic_agent.py", "anthropic", "text", answers=TEXT),
    _script("pydantic-ai", "messages", "pydantic_agent.py", "anthropic", "typed", answers=_PYDANTIC, constrained=True),
    _script("langchain-openai", "chat", "langchain_agent.py", "chat", "plain", answers=TEXT),
    _script("langchain-openai", "responses", "langchain_agent.py", "responses", "plain", answers=TEXT),
    _script(
        "langchain-openai",
        "responses",
        "langchain_agent.py",
        "responses",
        "streamed",
        answers=TEXT,
        streams=True,
        repeats=False,
    ),
    _script(
        "langchain-openai",
        "responses",
        "langchain_agent.py",
        "responses",
        "typed",
        answers=_LANGCHAIN,
        constrained=True,
    ),
    _script("langchain-anthropic", "messages", "langchain_agent.py", "messages", "plain", answers=TEXT),
    _script(
        "langchain-anthropic",
        "messages",
        "langchain_agent.py",
        "messages",
        "streamed",
        answers=TEXT,
        streams=True,
        repeats=False,
    ),
    _script(
        "langchain-anthropic",
        "messages",
        "langchain_agent.py",
        "messages",
        "typed",
        answers=_LANGCHAIN,
        constrained=True,
    ),
    _script("anthropic", "messages", "anthropic_sdk.py", "create", answers=TEXT),
    _script("anthropic", "messages", "anthropic_sdk.py", "stream", answers=TEXT, streams=True),
    _script(
        "smolagents",
        "chat",
        "smol_agent.py",
        answers=walk(call("final_answer", answer=DONE)),
        constrained=True,
        linear=False,
    ),
    _script("mini-swe-agent", "responses", "mini_swe.py", "litellm_response", answers=_SHELL),
    _script("mini-swe-agent", "chat", "mini_swe.py", "litellm", answers=_SHELL),
    _script(
        "codex", "responses", "native.py", "codex", answers=walk(DONE, "exec_command", "cmd", look_command), **_NATIVE
    ),
    _script(
        "claude-code", "messages", "native.py", "claude", answers=walk(DONE, "Bash", "command", look_command), **_NATIVE
    ),
)


def installed() -> list[Client]:
    """Return the clients; the two large programs only if they are installed."""
    return [client for client in CLIENTS if not client.binary or (BINARIES / client.command[2]).exists()]
