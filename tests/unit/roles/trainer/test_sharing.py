"""Members of a gang as threads, which exchange values over queues instead of gloo.

The tests check when members end, and what they report to the manager. test_gang.py trains on real parts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from rrl.core.types import Incarnation, ReplicaId, member_id
from rrl.roles.trainer import process_group
from rrl.roles.trajectories.durable.records import pack_tokens
from rrl.roles.trajectories.types import PackedPart, PackedTrajectory

pytestmark = pytest.mark.torch

STEPS, PARTS, WORLD, BY = 3, 2, 3, 30.0
GANG = ReplicaId("trainer/0")


class _Gloo:
    """Replaces gloo between the threads of one test."""

    def __init__(self) -> None:
        self.meets = threading.Barrier(WORLD)
        self.sent: dict[int, bool] = {}
        self.connections: dict[int, Queue[torch.Tensor]] = {rank: Queue() for rank in range(WORLD)}
        self.here = threading.local()

    def send(self, data: torch.Tensor, dst: int, group: object) -> None:
        self.connections[dst].put(data)

    def recv(self, into: torch.Tensor, src: int, group: object) -> None:
        into.copy_(self.connections[self.here.rank].get(timeout=BY))


class _Gang:
    def __init__(self, gloo: _Gloo, rank: int) -> None:
        self.rank, self.world, self.control_group, self._gloo = rank, WORLD, None, gloo

    def all(self, mine: bool) -> bool:
        self._gloo.sent[self.rank] = mine
        self._gloo.meets.wait(BY)
        every = all(self._gloo.sent.values())
        self._gloo.meets.wait(BY)
        return every


class _Member:
    """A member that gets a stop request after the part ``stops``, or while it waits for the next part."""

    def __init__(self, rank: int, stops: str) -> None:
        incarnation = Incarnation(member_id(GANG, rank), 1)
        self.launch = SimpleNamespace(incarnation=incarnation)
        self.job = SimpleNamespace(steps=STEPS)
        self.stopping = threading.Event()
        self.requests: list[tuple[int, int]] = []
        self.phases: list[tuple[str, str | None]] = []
        self.done = 0
        self.stops = stops

    def packed_part(self, number: int, index: int) -> PackedPart | None:
        self.requests.append((number, index))
        if self.stopping.is_set():
            return None
        each = [PackedTrajectory(i, 0, pack_tokens((i,)), b"\0\0\0\0", ((1, 0, 1),), 1.0, 1.0) for i in range(5)]
        last = index == PARTS - 1
        return PackedPart(number, (0,), f"{number}.{index}", (pack_tokens((1,)),), tuple(each), index, last)

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        self.phases.append((name, waits_for))
        yield

    def progress(self, units: int) -> None:
        self.done += units


def _play(monkeypatch: pytest.MonkeyPatch, **stops: str) -> tuple[list[_Member], list[list[str]]]:
    """Return the members and the data that each has received.

    ``stops`` maps a member (``r0``, ``r1``, …) to the part after which it gets a stop request.
    """
    gloo = _Gloo()
    monkeypatch.setattr(dist, "send", gloo.send)
    monkeypatch.setattr(dist, "recv", gloo.recv)
    members = [_Member(rank, stops.get(f"r{rank}", "")) for rank in range(WORLD)]

    def incarnations(rank: int) -> list[str]:
        gloo.here.rank, me, given = rank, members[rank], []
        gang: Any = _Gang(gloo, rank)
        who: Any = me
        for part in process_group.parts(who, gang, after=0):
            assert [each.tokens for each in part.trajectories[rank::WORLD]] == [(i,) for i in range(rank, 5, WORLD)]
            given.append(part.digest)
            if part.digest == me.stops:
                me.stopping.set()
        return given

    with ThreadPoolExecutor(WORLD) as pool:
        given = list(pool.map(incarnations, range(WORLD), timeout=BY))
    return members, given


def test_all_members_get_the_same_parts_and_only_rank_0_requests_them(monkeypatch: pytest.MonkeyPatch) -> None:
    members, given = _play(monkeypatch)
    assert given == [["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]] * WORLD
    assert [member.requests for member in members] == [[(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)], [], []]
    assert [member.done for member in members] == [STEPS * PARTS] * WORLD


def test_other_members_report_that_they_wait_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    members, _ = _play(monkeypatch)
    assert members[0].phases == []  # rank 0 reports by itself that it waits for the store
    assert members[1].phases == members[2].phases == [("wait_data", GANG)] * STEPS * PARTS


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("part", ["1.0", "1.1"])
def test_stop_request_to_any_member_ends_all_members_after_the_same_part(
    monkeypatch: pytest.MonkeyPatch, rank: int, part: str
) -> None:
    _, given = _play(monkeypatch, **{f"r{rank}": part})
    assert given == [["1.0", "1.1"][: 1 + ["1.0", "1.1"].index(part)]] * WORLD
