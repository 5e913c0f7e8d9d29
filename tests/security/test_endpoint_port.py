"""Attackers and slow readers have no lasting effect on an endpoint, which has a process of its own here."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rrl.roles.endpoint.key import EpisodeKey, encode_key
from rrl.tests.support.roles.endpoint.served import RUN, USER
from rrl.tests.support.security.attacks import Footprint, barrage
from rrl.transport.keys import RunKeys

SOON = 60.0
"""Time limit in seconds, which only a broken build reaches."""
FRAMES = 400
HALF_OPEN = 200
MIN_ROUNDS, MAX_ROUNDS = 3, 8
"""Number of rounds of an attack. The first rounds fill the memory pools of libraries, and on a busy machine more rounds
do so than on an idle one. With a leak the memory grows in each round.
"""
GROWTH = 3 * 2**20
"""Bytes by which an attack may increase the memory permanently."""
READERS = 16
READER_BYTES = 2**19
"""Maximum bytes of memory for a stream whose reader does not read: twice the buffers of asyncio and h11, and one event.
"""
BODY = {"model": "any", "messages": USER}


class Victim:
    """A process with an endpoint that closes a connection without a complete request head after two seconds."""

    def __init__(self, folder: Path, kind: str = "endpoint") -> None:
        self.keys = RunKeys.make()
        self.keys.save(folder / "keys.json")
        argv = [sys.executable, "-m", "rrl.tests.support.security.victim", kind, str(folder / "keys.json")]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = "127.0.0.1", int(self._process.stdout.readline().strip().rpartition(":")[2])

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self._process.pid)

    def key(self, episode: int) -> str:
        return encode_key(EpisodeKey(RUN, episode, 1), self.keys.secret)

    def serve_an_agent(self) -> None:
        """Send a valid request, as agents do, and check the answer."""
        status, reply = self.post(1, json.dumps(BODY).encode())
        assert (status, json.loads(reply)["choices"][0]["message"]["content"]) == (200, "0")

    def post(self, episode: int, body: bytes, path: str = "chat/completions") -> tuple[int, bytes]:
        """Send a request with the key of an episode, and return status and body of the reply."""
        connection = http.client.HTTPConnection(*self.port, timeout=SOON)
        headers = {"authorization": f"Bearer {self.key(episode)}", "connection": "close"}
        connection.request("POST", f"/v1/{path}", body, headers)
        reply = connection.getresponse()
        try:
            return reply.status, reply.read()
        finally:
            connection.close()

    def stream(self, episode: int, headers: bytes = b"") -> socket.socket:
        """Begin a stream whose answer never ends, and read none of it."""
        body = json.dumps({**BODY, "stream": True, "logprobs": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(self.port)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
            + self.key(episode).encode()
            + b"\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        return connection

    def cpu_ticks(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def close(self) -> None:
        self._process.communicate("", timeout=SOON)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Yield one process for all tests, because a test fails if it has a lasting effect on the process."""
    made = Victim(tmp_path_factory.mktemp("victim"))
    try:
        made.serve_an_agent()
        yield made
    finally:
        made.close()


def until(holds: Callable[[], bool], failure_text: str) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline, failure_text
        time.sleep(0.05)


def until_back(victim: Victim, before: Footprint) -> None:
    """Wait until the process has no more open descriptors than before."""
    until(
        lambda: victim.footprint.descriptors <= before.descriptors,
        f"the process keeps descriptors open; before the attack: {before}",
    )


def requests_of_strangers(seed: int) -> Iterator[bytes]:
    """Yield requests that are malformed, endless or without a valid key."""
    chance = random.Random(seed)
    line = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    while True:
        yield chance.choice(
            [
                line,
                line + b"content-length: 99999999999\r\n\r\n" + bytes(4096),
                line + b"transfer-encoding: chunked\r\n\r\n" + b"ffffffff\r\n" + bytes(4096),
                line + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n",
                line + b"x: " + b"a" * 200_000 + b"\r\n\r\n",
                line + b"authorization: Bearer " + b"rrl-" + b"A" * chance.randrange(5000) + b"\r\n\r\n",
                line + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
                b"POST /rrl/v1/episodes HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
                chance.randbytes(chance.randrange(1, 5000)),
            ]
        )


def attack(victim: Victim, seed: int) -> None:
    barrage(victim.port, FRAMES, seed)
    for _, request in zip(range(FRAMES), requests_of_strangers(seed), strict=False):
        with contextlib.suppress(OSError), socket.create_connection(victim.port, SOON) as stranger:
            stranger.sendall(request)
            stranger.setblocking(False)
            stranger.recv(4096)


def test_attacks_have_no_lasting_effect_and_agents_are_served_during_them(victim: Victim) -> None:
    growths: list[int] = []
    while len(growths) < MIN_ROUNDS or (growths[-1] > GROWTH and len(growths) < MAX_ROUNDS):
        before, seed = victim.footprint, len(growths)
        with ExitStack() as silent:
            for _ in range(HALF_OPEN):
                silent.enter_context(socket.create_connection(victim.port, SOON)).sendall(b"POST /v1/chat")
            storm = threading.Thread(target=attack, args=(victim, seed))
            storm.start()
            victim.serve_an_agent()
            storm.join()
        until_back(victim, before)
        growths.append(victim.footprint.memory - before.memory)
    assert growths[-1] <= GROWTH, growths
    victim.serve_an_agent()


@pytest.mark.parametrize("begin", [b"", b"GET", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"])
@pytest.mark.parametrize("proved", [False, True])
def test_a_connection_that_does_not_complete_a_request_is_cut_off(victim: Victim, begin: bytes, proved: bool) -> None:
    """A connection that does not complete a request is cut off.

    Some of the connections send a byte now and then; others have completed a request before.
    """
    with socket.create_connection(victim.port, SOON) as slow:
        if proved:
            key = victim.key(1).encode()
            slow.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n\r\n")
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        slow.sendall(begin)
        slow.settimeout(0.1)
        deadline = time.monotonic() + SOON
        while True:
            assert time.monotonic() < deadline, "the connection was not cut off"
            try:
                if begin:
                    slow.sendall(b"a")
                if not slow.recv(4096):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    victim.serve_an_agent()


def test_streams_without_a_reader_stop_and_take_little_memory(victim: Victim) -> None:
    with victim.stream(0) as reader:
        assert reader.recv(15) == b"HTTP/1.1 200 OK"  # the first stream loads modules, whose memory stays in use
    before = victim.footprint
    with ExitStack() as readers:
        for episode in range(READERS):
            readers.enter_context(victim.stream(2 * episode))
        until_idle(victim)
        after = victim.footprint
        assert after.memory <= before.memory + READERS * READER_BYTES, (before, after)
        victim.serve_an_agent()
    until_back(victim, before)


def until_idle(victim: Victim) -> None:
    """Wait until the process has used almost no processor time for a second."""
    deadline = time.monotonic() + SOON
    used, since = victim.cpu_ticks(), time.monotonic()
    while time.monotonic() - since < 1.0:
        assert time.monotonic() < deadline, "the process keeps working on streams that no client reads"
        time.sleep(0.05)
        if (now := victim.cpu_ticks()) > used + 1:
            used, since = now, time.monotonic()


# ── large bodies ─────────────────────────────────────────────────────────────────────────────────────────────────────
def conversation(*texts: str) -> bytes:
    return json.dumps({"model": "any", "messages": [{"role": "user", "content": text} for text in texts]}).encode()


HUGE = {
    "one text": (conversation("word " * 3_000_000), "chat/completions"),
    "empty messages": (conversation(*[""] * 350_000), "chat/completions"),
    "token ids": (json.dumps({"model": "any", "prompt": [200] * 2_000_000}).encode(), "completions"),
    "objects": (b'{"messages": [' + b",".join([b"{}"] * 4_000_000) + b"]}", "chat/completions"),
    "tools": (
        json.dumps(
            {
                "model": "any",
                "messages": USER,
                "tools": [
                    {"type": "function", "function": {"name": f"f{number}", "description": "d" * 100_000}}
                    for number in range(100)
                ],
            }
        ).encode(),
        "chat/completions",
    ),
}
"""Bodies of 9 to 15 MB with their paths."""
LONG_WORK = ("one text", "empty messages", "tools", "all")
"""The attacks that keep a process busy until its time is over."""
MOST_MORE_S = 0.5
"""Seconds that an attack may add to a call of another episode. It is asserted for the median of the calls: a call that
other programs delay says nothing."""


@pytest.fixture(scope="module")
def folder_victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made = Victim(tmp_path_factory.mktemp("folder"), "endpoint-folder")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", ["all", *(pytest.param(one, marks=pytest.mark.long) for one in HUGE)])
def test_huge_bodies_delay_no_call_of_another_episode(folder_victim: Victim, name: str) -> None:
    """While huge bodies of other episodes are in work, an episode gets answers to short and long calls."""
    long, episode = conversation("hello " * 5000), 11 + 100 * [*HUGE, "all"].index(name)
    bodies = [*HUGE.values()] if name == "all" else [HUGE[name]] * 4
    replies: list[tuple[int, bytes]] = []

    def attack(place: int) -> None:  # the first two bodies are of one episode
        replies.append(folder_victim.post(episode + max(place, 1), *bodies[place]))

    def times() -> list[float]:
        """Make a short and a long call, and return how long each took."""
        began = [time.monotonic()]
        for each in (conversation("hello"), long):
            assert folder_victim.post(1, each)[0] == 200
            began.append(time.monotonic())
        return [began[1] - began[0], began[2] - began[1]]

    times()  # starts the process for long calls
    alone = [times() for _ in range(50)]
    attackers = [threading.Thread(target=attack, args=(place,)) for place in range(len(bodies))]
    for thread in attackers:
        thread.start()
    beside, before_first = [], 0
    while any(thread.is_alive() for thread in attackers):
        beside.append(times())
        before_first += not replies
    for kind, usual, now in zip(("short", "long"), zip(*alone, strict=True), zip(*beside, strict=True), strict=True):
        more = statistics.median(now) - statistics.median(usual)
        print(
            f"{name}: {len(now)} {kind} calls took {more:+.3f} s more (median); the longest {max(now):.3f} s, and"
            f" {max(usual):.3f} s of {len(usual)} without an attack"
        )
        assert more < MOST_MORE_S
    assert {status for status, _ in replies} <= {400, 413}, [reply[:200] for _, reply in replies]
    assert before_first >= (3 if name in LONG_WORK else 0)
    assert all(len(reply) < 2000 for _, reply in replies)


def test_a_key_with_many_huge_bodies_takes_the_memory_of_one(folder_victim: Victim) -> None:
    body = b"{" + b" " * 15 * 2**20
    folder_victim.post(91, body)
    before = folder_victim.footprint
    attack = [threading.Thread(target=folder_victim.post, args=(91, body)) for _ in range(12)]
    for thread in attack:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in attack):
        most = max(most, folder_victim.footprint.memory - before.memory)
    assert most < 6 * len(body), f"{most >> 20} MiB"
