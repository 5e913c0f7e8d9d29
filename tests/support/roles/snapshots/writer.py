"""A member that writes snapshots until it is killed.

``python -m rrl.tests.support.roles.snapshots.writer KEYS PROGRESS`` reads lines ``<incarnation> <where>``. For each
line it forks a member and prints the member's pid. Every byte of a snapshot is the number of its step. ``where`` is the
point of the third step at which the member kills itself, or ``never``. The points are ``copy`` (half of the bytes are
new), ``digest``, ``head`` (half of the head is written) and ``sealed``. PROGRESS is a file of 8 bytes with the newest
step that was begun.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
from pathlib import Path
from unittest import mock

from rrl.core.types import NodeName, ReplicaId
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.format import Head
from rrl.roles.snapshots.mapping import MappedBuffer
from rrl.transport.keys import RunKeys

RUN, NODE, GANG = "run-1", NodeName("n1"), ReplicaId("trainer/0")
SIZE = 5 * 2**20 + 17
"""Bytes of a snapshot, which has two chunks; the second chunk is shorter."""
_LAST = 3
"""Number of the step in which an incarnation kills itself."""
_CHUNK_BYTES = 64 * 2**10


def main() -> None:
    keys = RunKeys.load(Path(sys.argv[1]))
    with open(sys.argv[2], "r+b") as file:
        progress = mmap.mmap(file.fileno(), 8)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: nobody waits for killed members
    for line in sys.stdin:
        incarnation, where = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                _member(keys, progress, int(incarnation), where)
            finally:
                os._exit(1)
        print(pid, flush=True)


def _member(keys: RunKeys, progress: mmap.mmap, incarnation: int, where: str) -> None:
    client = SnapshotClient(RUN, NODE, keys, GANG, 0, incarnation)
    kept = client.list_snapshots()
    done = kept[0].step if kept else 0
    last = 2**63 if where == "never" else done + _LAST
    for step in range(done + 1, last + 1):
        client.wait_until_sealed()
        if step == last and where == "digest":
            mock.patch("rrl.roles.snapshots.client.digest_of", _die).start()
        if step == last and where == "head":
            mock.patch.object(MappedBuffer, "commit", _half_a_head).start()
        view = client.buffer(SIZE, step)  # the snapshot of the previous step is sealed now
        progress[:] = struct.pack("<Q", step)  # pack_into writes zeros first, and a kill may come between
        whole = bytes([step % 251]) * _CHUNK_BYTES
        for start in range(0, SIZE, _CHUNK_BYTES):
            if step == last and where == "copy" and start > SIZE // 2:
                _die()
            view[start : start + _CHUNK_BYTES] = whole[: min(_CHUNK_BYTES, SIZE - start)]
        client.seal(step, struct.pack("<Q", step))
        if step == last:
            client.wait_until_sealed()
            _die()


def _half_a_head(mapped: MappedBuffer, head: Head) -> None:
    written = head.encode()
    mapped.view[: len(written) // 2] = written[: len(written) // 2]
    _die()


def _die(*_: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    main()
