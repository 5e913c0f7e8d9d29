"""Sends malformed frames and unfinished handshakes, as from an attacker without keys or from a faulty member.

All functions block and wait for no answer, so they run in a thread or process of their own.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct

from rrl.transport.keys import RunKeys
from rrl.transport.messages import PROTOCOL_VERSION

CONNECT_BY = 4.0
"""Timeout (s) of a connection attempt. With a full backlog, the kernel retries after 1 s, and again 2 s later."""
SEND_TIMEOUT_MS = 60_000
"""A process that reads no frame for this time (ms) counts as ended, because even a busy process reads some frames."""
_DEAF = 1.2
"""Seconds without a connection after which a port counts as closed. The kernel has retried once in this time."""
_AT_ONCE = 50
"""Number of connections of one barrage that are open at the same time; with many more, the attacker would run out of
ports."""


# ── messages of the attacker ───────────────────────────────────────────────────────────────────────────────────────
def greeting(mechanism: bytes = b"CURVE", major: int = 3) -> bytes:
    """Return a ZMTP 3.1 greeting (ZeroMQ RFC 37): signature, version, mechanism, as-server, filler."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + bytes([major, 1]) + mechanism.ljust(20, b"\0") + bytes(32)


def _command(body: bytes) -> bytes:
    return bytes([4, len(body)]) + body if len(body) < 256 else b"\x06" + len(body).to_bytes(8, "big") + body


def half_handshakes(weights: bool) -> list[bytes]:
    """Return beginnings of a handshake: nothing, a byte, a greeting, half a handshake.

    The attacker sends nothing after them.
    """
    if weights:
        return [b"", b"\1", bytes(31), bytes(32), bytes(32) + bytes(16)]
    return [b"", b"\xff", greeting()[:40], greeting(), greeting() + _command(b"\x05HELLO" + bytes(194))[:100]]


def malformed(chance: random.Random, recorded: bytes = b"") -> bytes:
    """Return one message with which no process of rrl would begin.

    ``recorded`` is the session of a member, of which the message may replay a part.
    """
    noise = chance.randbytes(chance.randrange(1, 200))
    hello = b"\x05HELLO"
    kinds: list[bytes] = [
        noise,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(4096),
        b"\xff" * 4096,
        greeting()[: chance.randrange(1, 64)],
        greeting(b"NULL") + _command(b"\x05READY" + noise[:50]),
        greeting(b"PLAIN") + _command(hello + b"\x01a\x01b"),
        greeting(major=chance.choice((0, 1, 2, 9))) + noise,
        greeting() + _command(hello + chance.randbytes(194)),  # with the key of another run, or without any key
        greeting() + _command(hello + chance.randbytes(chance.randrange(150))),
        greeting() + _command(b"\x08INITIATE" + chance.randbytes(260)),
        greeting() + b"\x06" + (2 ** chance.randrange(21, 63)).to_bytes(8, "big") + noise,
        greeting() + b"\x02" + (2**20 - 1).to_bytes(8, "big") + bytes(8192),
        chance.randbytes(32) + chance.randbytes(32),
        chance.randbytes(33 + 64),
        recorded[: chance.randrange(len(recorded) + 1)] or noise,
        recorded or noise,
    ]
    return chance.choice(kinds)


def mad_frame(chance: random.Random) -> bytes:
    """Return one frame that a faulty member or a member with another version of rrl might send."""
    good = msgspec.msgpack.encode(
        (PROTOCOL_VERSION, 0, None, {"type": "Heartbeat", "incarnation": ["x/0", 1], "phase": "x", "done": 1})
    )
    kinds: tuple[bytes, ...] = (
        b"",
        b"\xc1",
        b"\x91" * 500,
        good[: chance.randrange(1, len(good))],
        chance.randbytes(100),
        b"\xff" * 500,
        msgspec.msgpack.encode((PROTOCOL_VERSION + 1, 0, None, {"type": "Heartbeat"})),
        msgspec.msgpack.encode((PROTOCOL_VERSION, 0, None, {"type": "NoSuchWord"})),
        msgspec.msgpack.encode((PROTOCOL_VERSION, "epoch", None, None)),
    )
    return chance.choice(kinds)


# ── ways to send them ──────────────────────────────────────────────────────────────────────────────────────────────
def barrage(at: tuple[str, int], frames: int, seed: int = 0, recorded: bytes = b"") -> int:
    """Send ``frames`` malformed messages, each on a connection of its own; half of these are closed, half are reset.

    Returns the number of messages that could be sent, which is 0 if the port accepts no connection.
    """
    chance, reported = random.Random(seed), 0
    open_now: list[socket.socket] = []
    if deaf(at):
        return 0
    for _ in range(frames):
        try:
            connection = socket.create_connection(at, CONNECT_BY)
        except TimeoutError:  # it has become deaf
            break
        except OSError:
            continue
        open_now.append(connection)
        with contextlib.suppress(OSError):
            connection.sendall(malformed(chance, recorded))
            reported += 1
        if len(open_now) >= _AT_ONCE:
            _hang_up(open_now, chance)
    _hang_up(open_now, chance)
    return reported


def deaf(at: tuple[str, int]) -> bool:
    """Return whether the port accepts no connection.

    UCX closes a port together with the connection that uses it.
    """
    try:
        socket.create_connection(at, _DEAF).close()
    except (TimeoutError, ConnectionRefusedError):
        return True
    return False


def _hang_up(connections: list[socket.socket], chance: random.Random) -> None:
    for connection in connections:
        if chance.random() < 0.5:  # closes with a reset
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    connections.clear()


@contextlib.contextmanager
def half_open(at: tuple[str, int], count: int, weights: bool) -> Iterator[list[socket.socket]]:
    """Provide ``count`` connections that begin a handshake and then send nothing until the block ends."""
    beginnings = half_handshakes(weights)
    connections: list[socket.socket] = []
    try:
        for number in range(0 if deaf(at) else count):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(at, CONNECT_BY)
                connections.append(connection)
                connection.sendall(beginnings[number % len(beginnings)])
        yield connections
    finally:
        for connection in connections:
            connection.close()


def member_gone_mad(endpoint: str, keys: RunKeys, frames: int, seed: int = 0) -> None:
    """Send unreadable frames as a member of the run that has its keys.

    Raises:
        zmq.Again: The process at the endpoint reads no more frames, for example because it has ended.
    """
    chance = random.Random(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as socket_:
        socket_.set(zmq.LINGER, 5000)
        socket_.set(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket_.set(zmq.CURVE_SERVERKEY, keys.server_public.encode())
        socket_.set(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
        socket_.set(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
        socket_.connect(endpoint)
        for _ in range(frames):
            socket_.send_multipart([mad_frame(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))])
    context.term()


LATER_CONNECTIONS = 3
"""Maximum number of the run's own connections that an attacked process may open or accept during an attack. A rollout
connects to a source of weights at its first pull from it, and keeps the connection: to the trainer, to the other
rollout, and from the other rollout."""


# ── cost of the attack ─────────────────────────────────────────────────────────────────────────────────────────────
class Footprint(Struct, frozen=True):
    """Resources of one process."""

    memory: int
    """Bytes in memory (``Rss`` of /proc/<pid>/smaps_rollup)."""
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Measure a process. Raises OSError if it has ended."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return cls(sizes["Rss"], len(os.listdir(f"/proc/{pid}/fd")))


def ports_of(pid: int) -> list[tuple[str, int]]:
    """Return every TCP port on which the process listens, each with an address to connect to."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:
            address, port = local.split(":")
            ip = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            found.append(("127.0.0.1" if ip == "0.0.0.0" else ip, int(port, 16)))
    return sorted(set(found))
