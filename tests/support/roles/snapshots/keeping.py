"""What an agent does for snapshots, without the agent.

``python -m rrl.tests.support.roles.snapshots.keeping KEYS NODE`` prints its address and keeps until its input ends. In
Python: :func:`keeper`, a thread of this process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rrl.core.types import NodeName, ReplicaId
from rrl.roles.snapshots.client import SnapshotClient
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
    """A keeper that can be killed or stopped, and its address."""
    file = folder / "keys.json"
    if not file.exists():
        keys.save(file)
    argv = [sys.executable, "-m", "rrl.tests.support.roles.snapshots.keeping", str(file), node]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


@contextlib.contextmanager
def member(
    keys: RunKeys, incarnation: int = 1, rank: int = 0, node: NodeName = NODE, gang: ReplicaId = GANG
) -> Iterator[SnapshotClient]:
    client = SnapshotClient(RUN, node, keys, gang, rank, incarnation)
    try:
        yield client
    finally:
        client.close()


def keep(client: SnapshotClient, step: int, size: int = 1000) -> bytes:
    """A sealed snapshot; its bytes."""
    content = bytes([step % 251]) * size
    client.buffer(size, step)[:] = content
    client.seal(step, b"step %d" % step).result()
    return content


if __name__ == "__main__":
    with snapshot_server(RunKeys.load(Path(sys.argv[1])), NodeName(sys.argv[2])) as here:
        print(here.address, flush=True)
        sys.stdin.read()
