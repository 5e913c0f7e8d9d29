"""A member that is killed at any moment leaves the complete snapshot of its last step or of the step before it."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.roles.snapshots.servers import member, snapshot_server
from rrl.tests.support.roles.snapshots.writer import SIZE
from rrl.transport.keys import RunKeys

WHERE = ("copy", "digest", "head", "sealed")
PATIENCE = 30.0
LATEST = 0.05
"""Latest time (s) of the kill after the start of a member, which makes some steps of 5 MB within this time."""


class Members:
    def __init__(self, folder: Path) -> None:
        self.keys = RunKeys.make()
        self.keys.save(folder / "keys.json")
        self._progress = folder / "progress"
        self._progress.write_bytes(bytes(8))
        files = (str(folder / "keys.json"), str(self._progress))
        argv = [sys.executable, "-m", "rrl.tests.support.roles.snapshots.writer", *files]
        self._forks = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def begun(self) -> int:
        """Return the newest step that a member has begun."""
        return int(struct.unpack("<Q", self._progress.read_bytes())[0])

    def start(self, incarnation: int, where: str) -> int:
        """Start a member, and return its pidfd."""
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(f"{incarnation} {where}\n")
        self._forks.stdin.flush()
        return os.pidfd_open(int(self._forks.stdout.readline()))

    def close(self) -> None:
        self._forks.communicate(timeout=PATIENCE)


def live_and_die(members: Members, incarnation: int, where: str, chance: random.Random) -> None:
    before = members.begun
    process = members.start(incarnation, where)
    try:
        if where == "never":
            wait_until(lambda: members.begun != before)
            time.sleep(chance.random() * LATEST)
            signal.pidfd_send_signal(process, signal.SIGKILL)
        assert select.select([process], [], [], PATIENCE)[0], "the member does not end"
    finally:
        os.close(process)


def check(members: Members, incarnation: int, where: str) -> None:
    """Check that the next incarnation finds only complete snapshots."""
    begun = members.begun
    with member(members.keys, incarnation + 1) as successor:
        kept = successor.list_snapshots()
        assert kept or begun == 1, (where, begun)
        for each in kept:
            meta, data = successor.read(each)
            assert struct.unpack("<Q", meta) == (each.step,)
            assert data == bytes([each.step % 251]) * SIZE, f"a mixture of {each.step} after {where}"
        if kept:
            assert kept[0].step in ({begun} if where == "sealed" else {begun - 1, begun}), (where, begun, kept)
            if where in ("copy", "digest", "head"):
                assert kept[0].step == begun - 1, where


def kill_many(folder: Path, kills: int) -> None:
    members, chance = Members(folder), random.Random(7)
    try:
        with snapshot_server(members.keys):
            for incarnation in range(1, kills + 1):
                where = chance.choice((*WHERE, "never", "never"))
                live_and_die(members, incarnation, where, chance)
                check(members, incarnation, where)
    finally:
        members.close()


def test_member_killed_at_any_time_leaves_a_complete_snapshot_of_its_last_steps(tmp_path: Path) -> None:
    kill_many(tmp_path, 50)


@pytest.mark.long
def test_each_of_500_killed_members_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    kill_many(tmp_path, 500)
