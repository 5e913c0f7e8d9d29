"""An agent that records each of its calls, in the run or outside of the run (``python -m``).

Each episode is a conversation of some turns. If the agent streams, every other answer is a stream. The agent's
questions depend only on the item and the answers, so that a replay makes the same requests. In the run, the agent acts
as if it had a tool that fails: once each time the benchmark creates the file :data:`TOOL_GONE`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
from msgspec import Struct

FOLDER_ENV = "RRL_BENCH_CALLS"
"""Environment variable with the folder of the records."""
FORMS_ENV = "RRL_BENCH_FORMS"
"""Environment variable with the forms of the calls, one of which each episode has; without it, all have ``chat``."""
TURNS = 4
TOOL_GONE = "tool-gone"
"""Name of a file in the folder of the records. The agent that removes this file acts as if its tool had failed."""
MODEL = "policy"
OPEN_TIMEOUT_S = 90.0
"""Seconds that the request for an episode may take: the endpoint waits up to 30 s for a free episode."""


class WatchedCall(Struct, frozen=True, omit_defaults=True):
    """A call of an agent, with the answer or error that its client got."""

    api_key: str
    turn: int
    stream: bool
    seconds: float
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    """Tokens of the answer that arrived, including those that arrived before the call failed."""
    error: str = ""
    """The exception of the client; empty if the call succeeded."""
    status: int | None = None
    """HTTP status of the server's error; None if the server did not answer with an error."""


class ToolGone(Exception):
    """The tool of an agent has failed."""


class CallLog:
    """Appends calls to a file, with one call on each line.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, call: WatchedCall) -> None:
        """Append a call."""
        self._file.write(msgspec.json.encode(call) + b"\n")


def read_calls(folder: Path, name: str = "*") -> list[WatchedCall]:
    """Return the recorded calls of all processes, or only of those with this name; skip lines that a kill cut off."""
    lines = [line for path in sorted(folder.glob(f"calls-{name}.jsonl")) for line in path.read_bytes().splitlines(True)]
    return [msgspec.json.decode(line, type=WatchedCall) for line in lines if line.endswith(b"\n")]


async def play(client: openai.AsyncOpenAI, item: str, log: CallLog, *, streams: bool) -> int:
    """Play an episode; return the number of sampled tokens, or of characters in the forms other than ``chat``."""
    messages: list[Any] = [{"role": "user", "content": item}]
    tokens = 0
    forms = os.environ.get(FORMS_ENV, "chat").split(",")
    form = forms[zlib.crc32(item.encode()) % len(forms)]
    for turn in range(TURNS):
        stream = streams and (turn % 2 == 1 or form != "chat")
        text, count = await watched_call(client, messages, turn, log, stream=stream, form=form)
        tokens += count
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(turn)}]
    return tokens


async def watched_call(
    client: openai.AsyncOpenAI,
    messages: list[Any],
    turn: int,
    log: CallLog,
    *,
    stream: bool,
    form: str = "chat",
    **options: Any,
) -> tuple[str, int]:
    """Make a call and record it; return the text of the answer and the number of its tokens.

    In a ``form`` other than ``chat``, the tokens are not known; the number is that of the characters.
    """
    prompt: list[int] = []
    tokens: list[int] = []
    text, error, status, started = "", "", None, time.monotonic()
    create: Any = client.chat.completions.create
    asked = {"model": MODEL, "messages": messages, "extra_body": {"return_token_ids": True}} | options
    try:
        if form != "chat":
            async for piece in _pieces(client, messages, form, stream):
                text += piece
        elif stream:
            async for event in await create(**asked, stream=True):
                prompt += (event.model_extra or {}).get("prompt_token_ids") or []
                for choice in event.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
                    text += choice.delta.content or ""
        else:
            reply = await create(**asked)
            prompt, tokens = reply.model_extra["prompt_token_ids"], reply.choices[0].model_extra["token_ids"]
            text = reply.choices[0].message.content
    except Exception as raised:  # of OpenAI's or Anthropic's client, or of HTTP
        error, status = f"{type(raised).__name__}: {raised}"[:200], getattr(raised, "status_code", None)
        raise
    finally:
        if error or text or tokens:  # empty if the call was cancelled before its first token
            seconds = round(time.monotonic() - started, 4)
            log.write(WatchedCall(client.api_key, turn, stream, seconds, tuple(prompt), tuple(tokens), error, status))
    return text, len(tokens) if form == "chat" else len(text)


async def _pieces(client: openai.AsyncOpenAI, messages: list[Any], form: str, stream: bool) -> AsyncIterator[str]:
    """Yield the pieces of the text of an answer, over responses or messages."""
    if form == "responses" and stream:
        async with client.responses.stream(model=MODEL, input=messages) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    yield event.delta
                ended = event.type in ("response.completed", "response.incomplete")  # the client raises for the latter
        assert ended, "the stream has ended without its last event"
    elif form == "responses":
        yield (await client.responses.create(model=MODEL, input=messages)).output_text
    else:
        import anthropic  # only make setup-clients installs it

        url = str(client.base_url).rstrip("/").removesuffix("/v1")
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key=client.api_key, max_retries=client.max_retries
        ) as api:
            asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 64}
            if stream:
                async with api.messages.stream(**asked) as answer:
                    async for piece in answer.text_stream:
                        yield piece
            else:
                yield (await api.messages.create(**asked)).content[0].text


# ── in the run ─────────────────────────────────────────────────────────────────────────────────────────────────────
_CLIENT = openai.AsyncOpenAI(base_url="http://unset", api_key="unset")  # all episodes share its connections
_LOG: list[CallLog] = []


async def run(item: str, base_url: str, api_key: str) -> float:
    """Play an episode of the run; its reward is the number of tokens."""
    folder = Path(os.environ[FOLDER_ENV])
    if not _LOG:
        _LOG.append(CallLog(folder / f"calls-agents-{os.getpid()}.jsonl"))
    client = _CLIENT.with_options(base_url=base_url, api_key=api_key)
    tokens = await play(client, item, _LOG[0], streams=True)
    try:
        (folder / TOOL_GONE).unlink()
    except FileNotFoundError:
        return float(tokens)
    raise ToolGone("the tool is gone")


# ── outside of the run ─────────────────────────────────────────────────────────────────────────────────────────────
async def play_outside(base_url: str, run_key: str, count: int, log: CallLog, *, streams: bool, retries: int) -> None:
    """Keep ``count`` episodes at work until this process is killed."""

    async def player() -> None:
        async with httpx2.AsyncClient(timeout=OPEN_TIMEOUT_S) as http:
            while True:
                opened = await _post(http, base_url, "", run_key, {})
                if opened is None:
                    continue
                client = openai.AsyncOpenAI(base_url=base_url, api_key=opened["api_key"], max_retries=retries)
                tokens = await play(client, str(opened["item"]), log, streams=streams)
                await client.close()
                await _post(http, base_url, "/finish", opened["api_key"], {"reward": float(tokens)})

    await asyncio.gather(*(player() for _ in range(count)))


async def _post(http: httpx2.AsyncClient, base_url: str, action: str, key: str, body: Any) -> dict[str, Any] | None:
    """Open or finish an episode; repeat the request until the endpoint answers. Return None if there is no episode."""
    url = f"{base_url.removesuffix('/v1')}/rrl/v1/episodes{action}"
    while True:
        try:
            reply = await http.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
        except httpx2.TransportError:
            await asyncio.sleep(0.3)
            continue
        if reply.status_code == 503:
            return None
        reply.raise_for_status()
        content: dict[str, Any] = reply.json()
        return content


def main() -> None:
    """Play episodes from outside of the run until this process is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base_url")
    parser.add_argument("run_key")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--retries", type=int, default=openai.DEFAULT_MAX_RETRIES)
    given = parser.parse_args()
    log = CallLog(given.log)
    asyncio.run(
        play_outside(given.base_url, given.run_key, given.count, log, streams=given.streams, retries=given.retries)
    )


if __name__ == "__main__":
    main()
