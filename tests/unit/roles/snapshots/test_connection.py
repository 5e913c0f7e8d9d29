"""Authentication at an agent's sockets for snapshots, and the effects of unauthenticated or faulty clients.

tests/security has further attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rrl.core.types import NodeName
from rrl.roles.snapshots import messages as msg
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.connection import local_key, remote_key, socket_name
from rrl.roles.snapshots.format import SnapshotError, SnapshotInfo
from rrl.roles.snapshots.server import SnapshotServer
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until
from rrl.tests.support.roles.snapshots.servers import FAR, keep, member, snapshot_server
from rrl.tests.support.roles.snapshots.writer import GANG, NODE, RUN
from rrl.transport.keys import RunKeys
from rrl.transport.streams import framing
from rrl.transport.streams.connection import Connection, TransportError, authenticate
from rrl.transport.streams.unix import UnixConnection, UnixListener, abstract_address, dial_unix
from rrl.transport.weights.tcp import dial

STRANGERS = 400
BOUND = 200
"""Descriptors that unauthenticated clients may take.

The limit is 128. The rest allows for connections that the server has accepted, 16 in each round of its loop, and is
closing.
"""


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys.make()


@pytest.fixture
def here(keys: RunKeys) -> Iterator[SnapshotServer]:
    with snapshot_server(keys) as made:
        yield made


def name_of(keys: RunKeys, node: NodeName = NODE) -> str:
    return socket_name(RUN, node, keys.secret)


def _stored(client: SnapshotClient) -> list[SnapshotInfo]:
    """Store a snapshot and return all stored ones, or an empty list if unauthenticated clients occupy the agent."""
    try:
        client._agent._not_before = 0.0
        keep(client, 1)
        return client.list_snapshots()
    except SnapshotError:
        return []


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_unauthenticated_local_connections_are_few_and_short_and_members_are_served(
    keys: RunKeys, here: SnapshotServer
) -> None:
    before, connections = descriptors(), []
    for number in range(STRANGERS):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(abstract_address(name_of(keys)))
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.send([b"", b"\1", bytes(31), bytes(100), b"\xff" * 5000][number % 5] or b"\0")
        connections.append(stranger)
        assert descriptors() - before - len(connections) <= BOUND
    with member(keys) as client:
        wait_until(lambda: len(_stored(client)) == 1)
    for stranger in connections:
        stranger.close()
    wait_until(lambda: len(here._buffers.snapshots(GANG)) == 1 and descriptors() <= before + 4)


def test_silent_connection_at_the_local_socket_is_closed(keys: RunKeys, here: SnapshotServer) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(abstract_address(name_of(keys)))
        assert select.select([silent], [], [], TIMEOUT_S)[0]
        assert silent.recv(100) == b""


def test_clients_of_another_run_are_rejected_at_both_sockets(keys: RunKeys, here: SnapshotServer) -> None:
    async def knock(secret: bytes) -> None:
        for line, key in (
            (await dial_unix(name_of(keys)), local_key(NODE, secret)),
            (await dial(here.address, "tcp"), remote_key(secret)),
        ):
            try:
                await authenticate(line, key, dialled=True)
                await framing.send_message(line, msg.ListSnapshots(msg.Member(GANG, 0, 1)))
                assert await framing.receive_message(line, msg.Answer) == msg.SnapshotList(())
            finally:
                line.abort()

    asyncio.run(knock(keys.secret))
    with pytest.raises(TransportError, match="does not know this run's secret"):
        asyncio.run(knock(RunKeys.make().secret))
    with member(RunKeys.make()) as client, pytest.raises(SnapshotError):
        client.list_snapshots(here.address)


def test_proof_for_weights_or_for_another_node_is_rejected(keys: RunKeys, here: SnapshotServer) -> None:
    async def knock(local: bytes, remote: bytes) -> None:
        for dialling, key in ((dial_unix(name_of(keys)), local), (dial(here.address, "tcp"), remote)):
            line = await dialling
            with pytest.raises(TransportError, match="does not know this run's secret"):
                await authenticate(line, key, dialled=True)
            line.abort()

    asyncio.run(knock(local_key(FAR, keys.secret), keys.secret))
    asyncio.run(knock(remote_key(keys.secret), local_key(NODE, keys.secret)))


async def test_process_with_the_socket_name_of_an_agent_gets_and_serves_no_snapshot(keys: RunKeys) -> None:
    answering = []

    def meet(line: Connection) -> None:
        answering.append(asyncio.create_task(answer(line)))

    async def answer(line: Connection) -> bytes:
        heard = bytearray(32)
        await line.receive(memoryview(heard))
        await line.send(os.urandom(64))
        with pytest.raises(TransportError):
            await line.receive(memoryview(bytearray(1)))
        return bytes(heard)

    listener = UnixListener(name_of(keys), meet)
    try:
        with member(keys) as client, pytest.raises(SnapshotError, match="does not know this run's secret"):
            await asyncio.to_thread(client.buffer, 1000, 1)
        await asyncio.gather(*answering)
    finally:
        listener.close()


def test_socket_name_that_is_still_in_use_is_tried_again(keys: RunKeys) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(abstract_address(name_of(keys)))
        frozen.listen()
        with snapshot_server(keys) as late:
            assert late.address
            frozen.close()
            with member(keys) as client:
                deadline = time.monotonic() + TIMEOUT_S
                while True:
                    try:
                        keep(client, 1)
                        break
                    except SnapshotError:
                        assert time.monotonic() < deadline


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_connections_between_different_users_are_refused(keys: RunKeys, here: SnapshotServer) -> None:
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1])\n"
        "try:\n s.sendall(bytes(32)); s.settimeout(30); print(s.recv(1) or 'let go')\n"
        "except ConnectionError: print('let go')"
    )
    nobody: Any = {"user": 65534, "group": 65534, "extra_groups": []}
    received = subprocess.run(
        ["/usr/bin/env", "python3", "-I", "-c", code, name_of(keys)], capture_output=True, text=True, cwd="/", **nobody
    )
    assert received.stdout == "let go\n", received
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen();"
        "print(flush=True); sys.stdin.read()"
    )
    argv = ["/usr/bin/env", "python3", "-I", "-c", code, name_of(keys, FAR)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", **nobody) as theirs:
        assert theirs.stdout is not None
        theirs.stdout.readline()
        with member(keys, node=FAR) as client, pytest.raises(SnapshotError, match="belongs to another user"):
            client.list_snapshots()
        theirs.communicate(timeout=TIMEOUT_S)


# ── invalid messages of members ────────────────────────────────────────────────────────────────────────────────────
_WHO = msg.Member(GANG, 0, 5)
_STORED = SnapshotInfo(GANG, 0, 1, 5, 10, bytes(16), True)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (msg.MapSnapshot(_WHO, _STORED), "step 1 of trainer/0#5, rank 0 is not stored on this node"),
        (msg.Resize(_WHO, 0, 10), "no snapshot buffer for rank 0 of trainer/0#5, slot 0"),
        (msg.Resize(_WHO, 7, 10), "no snapshot buffer for rank 0 of trainer/0#5, slot 7"),
    ],
)
def test_invalid_request_is_refused_and_the_connection_continues(
    keys: RunKeys, here: SnapshotServer, request_: msg.Request, why: str
) -> None:
    with member(keys, 5) as client:
        for _ in range(2):
            with pytest.raises(SnapshotError, match=why):
                client._agent.call(request_)
        assert client.list_snapshots() == []


def test_copy_of_another_incarnation_and_missing_snapshot_are_refused(keys: RunKeys, here: SnapshotServer) -> None:
    with member(keys, 5) as client:
        with pytest.raises(SnapshotError, match="does not belong to the member that sent it"):
            client._call_remote(here.address, msg.Upload(msg.Member(GANG, 1, 5), _STORED, 0))
        with pytest.raises(SnapshotError, match=r"the metadata of .* has \d+ bytes"):
            client._call_remote(here.address, msg.Upload(_WHO, _STORED, 2**40))
        with pytest.raises(SnapshotError, match="does not fit"):
            client._call_remote(here.address, msg.Upload(_WHO, SnapshotInfo(GANG, 0, 1, 5, 2**50, bytes(16), True), 0))
        with pytest.raises(SnapshotError, match="is not stored on this node"):
            client.fetch(here.address, _STORED)


@pytest.mark.parametrize(
    "expected_text", [b"\xc1", b"\x91" * 500, b"", random.Random(0).randbytes(100), b"\x93\xa4Lend"]
)
def test_undecodable_request_closes_only_its_own_connection(
    keys: RunKeys, here: SnapshotServer, expected_text: bytes
) -> None:
    async def rave(length: int) -> None:
        for line, key in (
            (await dial_unix(name_of(keys)), local_key(NODE, keys.secret)),
            (await dial(here.address, "tcp"), remote_key(keys.secret)),
        ):
            await authenticate(line, key, dialled=True)
            await line.send(length.to_bytes(4, "little") + expected_text)
            with pytest.raises(TransportError):
                await line.receive(memoryview(bytearray(1)))
            line.abort()

    asyncio.run(rave(len(expected_text)))
    asyncio.run(rave(2**32 - 1))
    with member(keys) as client:
        assert client.list_snapshots() == client.list_snapshots(here.address) == []


async def test_missing_descriptors_raise_an_error() -> None:
    left, right = (UnixConnection(end) for end in socket.socketpair(socket.AF_UNIX))
    await left.send_descriptors([0])
    before = descriptors()
    with pytest.raises(TransportError, match="received 1 file descriptors instead of 2"):
        await right.receive_descriptors(2)
    assert descriptors() == before
    await left.send(b"x")
    waiting = asyncio.create_task(right.receive(memoryview(bytearray(2))))
    await asyncio.sleep(0)
    right.abort()
    with pytest.raises(TransportError):
        await waiting
    assert left.broken
    assert right.broken
    left.abort()
    assert descriptors() == before - 2


def test_socket_name_is_short_enough_for_any_run_name(keys: RunKeys) -> None:
    assert len(abstract_address(socket_name("x" * 200, NODE, keys.secret))) <= 108
    with pytest.raises(ValueError, match="longer than 107 bytes"):
        abstract_address("x" * 108)
