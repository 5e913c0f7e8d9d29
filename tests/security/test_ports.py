"""Attacks have no lasting effect on any kind of port of a run; each kind has a process of its own here."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.snapshots.format import SnapshotError
from rrl.roles.trajectories.types import Answer, GetCommitted, NotReady
from rrl.tests.support.proxy import Proxy
from rrl.tests.support.roles.snapshots.servers import member
from rrl.tests.support.security import attacks
from rrl.tests.support.security.attacks import Footprint, barrage, half_open, member_gone_mad, ports_of
from rrl.tests.support.security.victim import SIZE
from rrl.tests.support.weights.source import VERSION, content
from rrl.tests.support.weights.transports import KINDS as PIPES
from rrl.transport.control.endpoints import Address, Dialer
from rrl.transport.keys import RunKeys
from rrl.transport.messages import AdmissionRequest, Admitted, FromManager
from rrl.transport.streams.connection import TransportError
from rrl.transport.weights.select import open_transport

SOON = 30.0
"""Time limit in seconds, which only a broken build reaches."""
FRAMES = 400
HALF_OPEN = 200
BOUND = 180
"""Maximum number of descriptors for connections without a proof at a port. It is the larger one of two limits (64 and
128), plus 50 for connections that are being accepted."""
ROUNDS = 3
"""Number of rounds of an attack. The first rounds fill the memory pools of libraries, so only the cost of the last
round counts.
"""
GROWTH = 3 * 2**20
"""Bytes by which an attack may increase the memory: 5 % of a manager's memory."""
KINDS = ["manager", "store", *PIPES, "snapshots"]
WANTED = AdmissionRequest(Incarnation(ReplicaId("rollout/0"), 1), "tag", NodeName("n1"), 1)


class Victim:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.keys = RunKeys.make()
        self.keys.save(folder / "keys.json")
        argv = [sys.executable, "-m", "rrl.tests.support.security.victim", kind, str(folder / "keys.json")]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        self.pid = self._process.pid
        self.ports = ports_of(self.pid)
        """All ports on which the process listens."""

    @property
    def weights(self) -> bool:
        """Whether the port has the proofs and limits of a weight transport. The port for snapshots has them, too."""
        return self.kind in ("tcp", "ucx", "nixl", "snapshots")

    @property
    def port(self) -> tuple[str, int]:
        """Return the address and port that the process announces."""
        return "127.0.0.1", int(self.endpoint.rpartition(":")[2])

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.pid)

    async def serve_a_member(self) -> None:
        """Send a valid request, as a process of the run, and check the answer."""
        if self.kind == "snapshots":
            await asyncio.to_thread(self._request_stored_keys)
            return
        if self.weights:
            await self._pull()
            return
        async with dialling(self, self.endpoint) as dialer:
            if self.kind == "manager":
                assert await dialer.request(WANTED, SOON) == Admitted("answered", True)
            else:
                assert await dialer.request(GetCommitted(WANTED.incarnation), SOON) == NotReady()

    async def _pull(self) -> None:
        """Pull a version; repeat an attempt that the attack disturbs, as ``rrl.transport.weights.pull.pull`` does."""
        pipe, into = open_transport(self.kind, self.keys.secret, trusted_network=True), memoryview(bytearray(SIZE))
        try:
            async with asyncio.timeout(SOON):
                while True:
                    with contextlib.suppress(TransportError):
                        await pipe.fetch(self.endpoint, VERSION, range(SIZE), into, SOON)
                        break
        finally:
            await pipe.close()
        assert into == content(SIZE)

    def _request_stored_keys(self) -> None:
        deadline = time.monotonic() + SOON
        with member(self.keys) as client:
            while True:
                try:
                    assert client.list_snapshots(self.endpoint) == []
                    return
                except SnapshotError:
                    assert time.monotonic() < deadline

    def recorded(self) -> bytes:
        """Return every byte that a member sent while its request was served."""

        async def record() -> bytes:
            async with Proxy(self.port[1]) as proxy:
                if self.kind == "snapshots":
                    with member(self.keys) as client:
                        await asyncio.to_thread(client.list_snapshots, f"tcp://127.0.0.1:{proxy.port}")
                elif self.weights:  # a connection of ucx begins with the same bytes as one of tcp
                    kind = "tcp" if self.kind == "ucx" else self.kind
                    pipe = open_transport(kind, self.keys.secret, trusted_network=True)
                    try:
                        if kind == self.kind:
                            await pipe.manifest(f"{kind}://127.0.0.1:{proxy.port}", VERSION, SOON)
                        else:
                            with pytest.raises(TransportError):
                                await pipe.manifest(f"{kind}://127.0.0.1:{proxy.port}", VERSION, 0.5)
                    finally:
                        await pipe.close()
                else:
                    async with dialling(self, f"tcp://127.0.0.1:{proxy.port}") as dialer:
                        message = WANTED if self.kind == "manager" else GetCommitted(WANTED.incarnation)
                        await dialer.request(message, SOON)
                return bytes(proxy.from_client)

        return asyncio.run(record())

    def close(self) -> None:
        self._process.communicate("", timeout=SOON)


@asynccontextmanager
async def dialling(victim: Victim, endpoint: str) -> AsyncIterator[Dialer]:
    dialer = Dialer(victim.keys, FromManager if victim.kind == "manager" else Answer, lambda: Address(0, endpoint))
    task = asyncio.create_task(dialer.run())
    try:
        yield dialer
    finally:
        await dialer.close()
        await task


@pytest.fixture(params=KINDS, scope="module")
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Yield one process for all tests of a kind, because a test fails if it has a lasting effect on the process."""
    if request.param == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    made = Victim(request.param, tmp_path_factory.mktemp("victim"))
    try:
        asyncio.run(made.serve_a_member())  # libraries open descriptors at the first connection, and keep them
        yield made
    finally:
        made.close()


def until(what: Callable[[], bool], failure_text: str = "") -> None:
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline, failure_text
        time.sleep(0.05)


def until_back(victim: Victim, before: Footprint) -> None:
    """Wait until the process has no more open descriptors than before."""
    until(
        lambda: victim.footprint.descriptors <= before.descriptors,
        f"the process keeps descriptors open; before the attack: {before}",
    )


def test_attacks_have_no_lasting_effect_and_members_are_served_during_them(victim: Victim) -> None:
    """Attacks have no lasting effect, and members are served during them.

    UCX's own port is not attacked, because it accepts connections only in the milliseconds in which a member connects.
    A foreign connection that it accepted would stay open permanently (docs/sources.md).
    """
    recorded = victim.recorded()
    hearing = [port for port in victim.ports if not attacks.deaf(port)]
    assert victim.port in hearing

    def attack(seed: int) -> None:
        for port in hearing:
            barrage(port, FRAMES, seed, recorded)
        if not victim.weights:
            member_gone_mad(victim.endpoint, victim.keys, FRAMES, seed)

    for seed in range(ROUNDS):
        before = victim.footprint
        with half_open(victim.port, HALF_OPEN, victim.weights):
            storm = threading.Thread(target=attack, args=(seed,))
            storm.start()
            asyncio.run(victim.serve_a_member())
            assert victim.footprint.descriptors - before.descriptors <= BOUND * len(victim.ports)
            storm.join()
        until_back(victim, before)
    after = victim.footprint
    assert after.memory <= before.memory + GROWTH, (before, after)
    asyncio.run(victim.serve_a_member())


def test_connection_that_is_silent_before_authentication_is_closed(victim: Victim) -> None:
    before = victim.footprint
    for port in victim.ports:
        with half_open(port, HALF_OPEN, victim.weights) as connections:
            assert len(connections) == (0 if attacks.deaf(port) else HALF_OPEN)
            until(lambda: victim.footprint.descriptors - before.descriptors <= BOUND)
            if port == victim.port:
                asyncio.run(victim.serve_a_member())
            until_back(victim, before)


def test_slowly_sent_bytes_do_not_keep_an_unauthenticated_connection_open(victim: Victim) -> None:
    printed = attacks.greeting() + bytes(500)
    with socket.create_connection(victim.port) as slow:
        ended = threading.Event()

        def drip() -> None:
            for byte in printed:
                if ended.wait(0.1):
                    return
                try:
                    slow.send(bytes([byte]))
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            until(lambda: _cut(slow))
        finally:
            ended.set()
            dripping.join()
    asyncio.run(victim.serve_a_member())


def test_replayed_session_receives_only_the_challenge(victim: Victim) -> None:
    recorded = victim.recorded()
    assert len(recorded) > 64
    with socket.create_connection(victim.port) as replayer:
        replayer.sendall(recorded)
        reported = b""
        while select.select([replayer], [], [], SOON)[0]:
            try:
                piece = replayer.recv(65536)
            except ConnectionError:
                break
            if not piece:
                break
            reported += piece
        else:
            raise AssertionError("the connection was not cut off")
    # a weight transport sends its nonce and proof (nixl in a frame); the control port sends greeting, WELCOME and ERROR
    assert len(reported) <= (64 + 9 * (victim.kind == "nixl") if victim.weights else 64 + 170 + 64), reported
    asyncio.run(victim.serve_a_member())


def _cut(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection."""
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


# ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_member_of_another_run_gets_no_reply(victim: Victim) -> None:
    other = RunKeys.make()

    async def ask() -> None:
        if victim.kind == "snapshots":
            with member(other) as client, pytest.raises(SnapshotError):
                await asyncio.to_thread(client.list_snapshots, victim.endpoint)
            return
        if victim.weights:
            pipe = open_transport(victim.kind, other.secret, trusted_network=True)
            try:
                with pytest.raises(TransportError):
                    await pipe.manifest(victim.endpoint, VERSION, SOON)
            finally:
                await pipe.close()
            return
        victims_server = msgspec.structs.replace(other, server_public=victim.keys.server_public)
        for keys in (other, victims_server):  # the second one: an attacker who knows the server's public key
            dialer = Dialer(keys, FromManager, lambda: Address(0, victim.endpoint))
            task = asyncio.create_task(dialer.run())
            with pytest.raises(TimeoutError):
                await dialer.request(WANTED, 0.5)
            assert not dialer.connected
            await dialer.close()
            await task

    asyncio.run(ask())
    asyncio.run(victim.serve_a_member())
