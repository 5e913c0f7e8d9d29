"""Starts snapshot servers without an agent, in a thread (:func:`snapshot_server`) or in a process (:func:`process`).

``python -m rrl.tests.support.roles.snapshots.servers KEYS NODE`` prints the server's address and serves until its
standard input is closed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rrl.core.types import NodeName, ReplicaId
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.mapping import Pinning
from rrl.roles.snapshots.server import SnapshotServer
from rrl.tests.support.roles.snapshots.writer import GANG, NODE, RUN
from rrl.transport.keys import RunKeys

FAR = NodeName("n2")


@contextlib.contextmanager
def snapshot_server(keys: RunKeys, node: NodeName = NODE) -> Iterator[SnapshotServer]:
    made = SnapshotServer(RUN, node, keys, "127.0.0.1")
    made.start()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def process(keys: RunKeys, folder: Path, node: NodeName = NODE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server that can be killed or stopped; provide its process and its address."""
    file = folder / "keys.json"
    if not file.exists():
        keys.save(file)
    argv = [sys.executable, "-m", "rrl.tests.support.roles.snapshots.servers", str(file), node]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


@contextlib.contextmanager
def member(
    keys: RunKeys,
    incarnation: int = 1,
    rank: int = 0,
    node: NodeName = NODE,
    gang: ReplicaId = GANG,
    pinning: Pinning | None = None,
) -> Iterator[SnapshotClient]:
    client = SnapshotClient(RUN, node, keys, gang, rank, incarnation, pinning)
    try:
        yield client
    finally:
        client.close()


def keep(client: SnapshotClient, step: int, size: int = 1000) -> bytes:
    """Seal a snapshot of ``size`` bytes for the step; return the bytes."""
    content = bytes([step % 251]) * size
    client.buffer(size, step)[:] = content
    client.seal(step, b"step %d" % step).result()
    return content


if __name__ == "__main__":
    with snapshot_server(RunKeys.load(Path(sys.argv[1])), NodeName(sys.argv[2])) as server:
        print(server.address, flush=True)
        sys.stdin.read()
