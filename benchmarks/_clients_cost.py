"""Measures what long episodes and long answers cost the endpoint and the store.

A client calls the endpoint's real server over HTTP. The endpoint asks a real store over the real transport. The store
has a thread of this process, whose CPU time is counted apart; a script in place of an engine appends the tokens. The
CPU time of a call is that of the endpoint's threads and of the processes that prepare calls. The longest time that one
call holds an event loop is the CPU time of one callback, because wall time would also measure what else the machine
does. Callbacks of the store contain the work of the engine's requests, which its own rounds would do apart.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rrl.core.run_spec import ModelSpec, TokenizerSpec
from rrl.core.types import Version
from rrl.examples.smollm2 import make_model
from rrl.roles.endpoint.application import Endpoint, ServedRun
from rrl.roles.endpoint.calls.call import Policy
from rrl.roles.endpoint.http_server import EndpointServer
from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.roles.models.chat import open_chat
from rrl.roles.models.conversation import ModelChat
from rrl.roles.trajectories.client import TrajectoryClient
from rrl.roles.trajectories.episodes.requests import (
    EpisodeItem,
    FinishEpisode,
    Follow,
    GetEpisode,
    OpenEpisode,
    OpenTurn,
    StoreRequest,
    TurnOpened,
)
from rrl.roles.trajectories.server import Server, answer
from rrl.roles.trajectories.types import Append, LeaseWork, Segment
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, open_agents_store
from rrl.tests.support.roles.trajectories.crew import ROLLOUT
from rrl.transport.control.endpoints import Listener
from rrl.transport.keys import RunKeys

WORDS = 60
"""Number of words of each message."""
EARLY, LATE, EPISODE, LONGEST = 30, 240, 400, 2000
"""Turns at which a call is measured, turns of the episode whose log is measured, and of the store's longest episode."""
CALLS = 10
"""Number of calls, about a turn, whose median CPU time is that of the turn."""
STREAM_TOKENS, SEGMENT_TOKENS = 16_000, 16
"""Tokens of the streamed answer, and tokens that an engine appends at once."""
MAX_NEW, MAX_LENGTH = 20_000, 1_000_000
STOPS = ["\n\nObservation:", "</answer>"]
HOSTILE_BYTES = 16 * 2**20
TOOLS, DEPTH = 2000, 100_000
RUN, SECRET = "cost-1", bytes(32)
TIMEOUT_S = 600.0

_random = random.Random(7)
_TEXT = (
    "the of and to in that is was he for it with as his on be at by had not are but from have an they which one you"
    " were all her she there would their been has when who will no more if out said what its about than into them can"
    " only other time new some could these two may first then do any like my now over such our man even most made after"
    " also did many before must well back through years much where your way down should because long each just state"
    " people those little world very year still work life another between without however program question government"
    " something different important against possible children history certain problem general present business number"
    " together interest increase following although experience education activities information development community"
)
_VOCABULARY = _TEXT.split()


def measure(folder: Path) -> dict[str, float]:
    """Return the figures; each is that of the chat template for which it is worse."""
    results = [measure_chat(folder / name, make()) for name, make in CHATS.items()]
    return {key: max(result[key] for result in results) for key in results[0]}


def measure_chat(folder: Path, chat: ModelChat) -> dict[str, float]:
    """Return the figures of one chat template."""
    with _serving(folder, chat) as scene:
        for _ in zip(range(EARLY), scene._calls(scene.store.begin()), strict=False):
            pass  # imports, and the process that prepares long bodies
        with _watched(scene.store) as blocks:
            early, late, log_bytes = scene.episodes()
            streams = [scene.stream(stop) for stop in ([], STOPS)]
            scene.hostile()
            scene.store.play(LONGEST)
    return {
        "cost_turn_30_ms": 1e3 * early,
        "cost_turn_240_ms": 1e3 * late,
        "cost_turn_240_over_30": late / early,
        "stream_16k_cpu_s": streams[0],
        "stream_16k_stop_cpu_s": streams[1],
        "log_bytes_400_turns": float(log_bytes),
        "endpoint_block_ms": blocks["endpoint"],
        "store_block_ms": blocks["store"],
        "longest_block_ms": max(blocks.values()),
    }


def _tiny() -> ModelChat:
    """Return a chat with the pieces of ``[model.tokenizer] chat``: a token for each word."""
    pieces = (*(f" {word}" for word in _VOCABULARY), *map(chr, range(32, 127)), "\n")
    chat = {"user": "?{content}=", "assistant": "{content}\n"}
    return open_chat(ModelSpec(tokenizer=TokenizerSpec(pieces, chat=chat)))


def _smollm2() -> ModelChat:
    return open_chat(ModelSpec(str(make_model.FOLDER.expanduser()), chat=True))


CHATS: dict[str, Callable[[], ModelChat]] = {"smollm2": _smollm2, "tiny": _tiny}


def _words(count: int) -> str:
    return "".join(f" {word}" for word in _random.choices(_VOCABULARY, k=count))


# ── the store and the engine ─────────────────────────────────────────────────────────────────────────────────────────
class _Store:
    """A store with its server in a thread. It samples each turn by a script, a segment for each request for tokens.

    Args:
        folder: Folder of its log.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = open_agents_store(
            folder, CREW, group_size=1, groups_per_batch=64, max_new_tokens=MAX_NEW, compact_from=2**40
        )
        self._evaluate = self._store.episodes.answer
        self._store.episodes.answer = self._answer  # type: ignore[method-assign]
        self.script: Sequence[int] = ()
        """Tokens of the next answer."""
        self._left: dict[int, Sequence[int]] = {}
        self.keys = RunKeys.make()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        """The loop of the client, which is a part of the endpoint."""
        self.thread.start()
        assert self._listening.wait(TIMEOUT_S)
        self._client = TrajectoryClient(self.keys, AGENTS, lambda: self._address, timeout=TIMEOUT_S)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._client.run(), self._loop)

    async def _serve(self) -> None:
        listener = await Listener.open(self.keys, StoreRequest, epoch=1)
        self._server, self._address = Server(self._store, listener), listener.address
        self._server.update_membership(frozenset(CREW))
        self._listening.set()
        await self._server.run()
        await listener.close()

    async def __call__(self, kind: Any, *arguments: Any, **named: Any) -> Any:
        asking = self._client.ask(kind, *arguments, **named)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))

    def ask(self, kind: Any, *arguments: Any) -> Any:
        """Send a request, and wait for its answer."""
        return asyncio.run_coroutine_threadsafe(self._client.ask(kind, *arguments), self._loop).result(TIMEOUT_S)

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Follow) and request.turn in self._left:
            self._append(request.turn, request.offset)
        given = self._evaluate(request)
        if isinstance(given, TurnOpened):
            assert self._ask(LeaseWork(ROLLOUT, 8, 0.0, ())).items[0].trajectory == given.turn
            self._left[given.turn] = self.script
        return given

    def _append(self, turn: int, offset: int) -> None:
        size = SEGMENT_TOKENS if len(self._left[turn]) > 1000 else MAX_NEW
        part = tuple(self._left[turn][offset : offset + size])
        ended = () if offset + len(part) < len(self._left[turn]) else (turn,)
        self._ask(Append(ROLLOUT, (Segment(turn, offset, part, (-0.5,) * len(part), Version(0, 1)),), ended))
        if ended:
            del self._left[turn]

    def _ask(self, request: Any) -> Any:
        given = answer(self._store, request)
        msgspec.msgpack.encode(given)
        return given

    @property
    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("log.*"))

    def begin(self) -> EpisodeItem:
        item: EpisodeItem = self.ask(OpenEpisode, f"{time.monotonic_ns()}").items[0]
        return item

    def end(self, item: EpisodeItem) -> None:
        self.ask(FinishEpisode, item.episode, item.attempt, 1.0)

    def play(self, turns: int) -> None:
        """Play an episode of many turns by requests to the store."""
        item, parent, length, given = self.begin(), None, 0, tuple(range(2, 2 + WORDS))
        self.script = given
        for number in range(turns):
            name = f"{number:032x}"
            opened = self.ask(
                OpenTurn, item.episode, 1, f"{name}/1/0", parent, length, given, MAX_NEW, name, "", None, "policy"
            )
            parent, length = opened.turn, length + 2 * WORDS
            self.ask(Follow, parent, 0)
        self.ask(GetEpisode, item.episode)
        self.end(item)

    def stop(self) -> None:
        self._server.stop()


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Scene:
    """A served endpoint over a store."""

    def __init__(self, store: _Store, chat: ModelChat, port: int) -> None:
        self.store, self._chat, self._port = store, chat, port

    def _cpu_s(self) -> float:
        """Return the CPU time of the endpoint so far: of this process without its store and this thread."""
        store = Path(f"/proc/self/task/{self.store.thread.native_id}/schedstat")
        return _cpu_s("self") - int(store.read_text().split()[0]) / 1e9 - time.thread_time()

    def _post(self, item: EpisodeItem, body: bytes) -> bytes:
        key = encode_key(EpisodeKey(RUN, item.episode, item.attempt), SECRET)
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        client.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
        reply = client.getresponse().read()
        client.close()
        return reply

    def episodes(self) -> tuple[float, float, int]:
        """Play two episodes, whose measured calls alternate, because the machine may become slower meanwhile.

        Returns:
            The endpoint's CPU time (s) of a call at each of the two turns, and the bytes of the late episode's log.
        """
        early, late = self.store.begin(), self.store.begin()
        calls = self._calls(early), self._calls(late)
        size = self.store.log_bytes
        for _ in range(LATE - CALLS // 2):
            next(calls[1])
        size -= self.store.log_bytes
        for _ in range(EARLY - CALLS // 2):
            next(calls[0])
        spent = [(next(calls[0]), next(calls[1])) for _ in range(CALLS)]
        size += self.store.log_bytes
        for _ in range(EPISODE - LATE - CALLS // 2):
            next(calls[1])
        size = self.store.log_bytes - size
        for item in (early, late):
            self.store.end(item)
        costs = [statistics.median(each) for each in zip(*spent, strict=True)]
        return costs[0], costs[1], size * EPISODE // (EPISODE - CALLS)

    def _calls(self, item: EpisodeItem) -> Iterator[float]:
        """Play an episode, and yield the endpoint's CPU time (s) of each call."""
        messages: list[dict[str, str]] = []
        while True:
            text = _words(WORDS)
            self.store.script = (*self._chat.tokenizer.encode(text), self._chat.tokenizer.eos)
            messages.append({"role": "user", "content": _words(WORDS).strip()})
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            before = self._cpu_s()
            reply = self._post(item, body)
            spent = self._cpu_s() - before
            content = json.loads(reply)["choices"][0]["message"]["content"]
            assert content == text, content
            messages.append({"role": "assistant", "content": content})
            yield spent

    def stream(self, stop: list[str]) -> float:
        """Stream a long answer, and return the CPU time (s)."""
        tokens = self._chat.tokenizer.encode(_words(STREAM_TOKENS))[: STREAM_TOKENS - 1]
        self.store.script = (*tokens, self._chat.tokenizer.eos)
        item = self.store.begin()
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, **({"stop": stop} if stop else {})}
        before = self._cpu_s()
        reply = self._post(item, json.dumps({"model": "policy", **body}).encode())
        spent = self._cpu_s() - before
        sent = [json.loads(event[6:]) for event in reply.split(b"\n\n") if event.startswith(b"data: {")]
        text = "".join(choice["delta"]["content"] for event in sent for choice in event["choices"])
        assert text == self._chat.tokenizer.decode(tokens)
        self.store.end(item)
        return spent

    def hostile(self) -> None:
        """Send bodies that take as much of the endpoint as a body can; each gets an answer or a refusal."""
        user = {"role": "user", "content": "a"}
        text, many = "ab " * (HOSTILE_BYTES // 3), [user] * (HOSTILE_BYTES // 64)
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
        self.store.script = (self._chat.tokenizer.eos,)
        for body in (
            {"messages": [{"role": "user", "content": text}]},
            {"messages": many},
            {"messages": many[: 2**12]},
            {"messages": many[:400]},
            {"messages": [{"role": "user", "content": text[:16_000]}]},
            {"messages": [user], "tools": [{"type": "function", "function": function}] * TOOLS},
            {"messages": [user], "stop": ["x" * 1000] * 16},
        ):
            self._post(self.store.begin(), json.dumps({"model": "policy", **body}).encode())
        for nested in (1000, DEPTH):
            self._post(self.store.begin(), b'{"model": "a", "messages": ' + b"[" * nested + b"]" * nested + b"}")


@contextmanager
def _serving(folder: Path, chat: ModelChat) -> Iterator[_Scene]:
    store = _Store(folder)
    endpoint = Endpoint(ServedRun(RUN, SECRET, Policy(1.0), MAX_NEW, MAX_LENGTH), chat, store)
    server = EndpointServer(endpoint.application)
    server.start()
    try:
        yield _Scene(store, chat, int(server.base_url.rpartition(":")[2].partition("/")[0]))
    finally:
        endpoint.close()
        server.stop()
        store.stop()


@contextmanager
def _watched(store: _Store) -> Iterator[dict[str, float]]:
    """Measure the longest CPU time (ms) of a callback of a loop in this process, apart for that of the store."""
    handles: Any = asyncio.events.Handle
    run = handles._run
    blocks = {"endpoint": 0.0, "store": 0.0}

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        where = "store" if threading.current_thread() is store.thread else "endpoint"
        blocks[where] = max(blocks[where], 1e3 * (time.thread_time() - began))

    handles._run = timed
    try:
        yield blocks
    finally:
        handles._run = run


def _cpu_s(process: int | str) -> float:
    """Return the CPU time of a process and its children (s)."""
    used = 0.0
    for task in Path(f"/proc/{process}/task").iterdir():
        used += int((task / "schedstat").read_text().split()[0]) / 1e9
        used += sum(_cpu_s(int(child)) for child in (task / "children").read_text().split())
    return used
