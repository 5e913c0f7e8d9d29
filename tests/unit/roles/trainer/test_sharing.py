"""Members of a gang as threads, which say what they have over queues instead of gloo: when they end, and what they tell
the manager meanwhile. What they learn of real batches stands in test_gang."""

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
from rrl.roles.trajectories.types import PackedBatch, PackedTrajectory

pytestmark = pytest.mark.torch

STEPS, WORLD, BY = 3, 3, 30.0
GANG = ReplicaId("trainer/0")


class _Gloo:
    """Between the threads of one test."""

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
    """Who is asked to stop at the end of step ``stops``, or while it waits for the batch after it."""

    def __init__(self, rank: int, stops: int) -> None:
        incarnation = Incarnation(member_id(GANG, rank), 1)
        self.launch = SimpleNamespace(incarnation=incarnation)
        self.job = SimpleNamespace(steps=STEPS)
        self.stopping = threading.Event()
        self.requests: list[int] = []
        self.phases: list[tuple[str, str | None]] = []
        self.done = 0
        self.stops = stops

    def packed_batch(self, number: int) -> PackedBatch | None:
        self.requests.append(number)
        if self.stopping.is_set():
            return None
        each = [PackedTrajectory(i, 0, pack_tokens((i,)), b"\0\0\0\0", ((1, 0, 1),), 1.0, 1.0) for i in range(5)]
        return PackedBatch(number, (0,), f"digest {number}", (pack_tokens((1,)),), tuple(each))

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        self.phases.append((name, waits_for))
        yield

    def progress(self, units: int) -> None:
        self.done += units


def _play(monkeypatch: pytest.MonkeyPatch, **stops: int) -> tuple[list[_Member], list[list[str]]]:
    """What each member was given. ``stops``: after which step a member (``r0``, ``r1``, …) is asked to stop."""
    gloo = _Gloo()
    monkeypatch.setattr(dist, "send", gloo.send)
    monkeypatch.setattr(dist, "recv", gloo.recv)
    members = [_Member(rank, stops.get(f"r{rank}", -1)) for rank in range(WORLD)]

    def incarnations(rank: int) -> list[str]:
        gloo.here.rank, me, given = rank, members[rank], []
        gang: Any = _Gang(gloo, rank)
        who: Any = me
        for batch in process_group.batches(who, gang, after=0):
            assert [each.tokens for each in batch.trajectories[rank::WORLD]] == [(i,) for i in range(rank, 5, WORLD)]
            given.append(batch.digest)
            if batch.number == me.stops:
                me.stopping.set()
        return given

    with ThreadPoolExecutor(WORLD) as pool:
        given = list(pool.map(incarnations, range(WORLD), timeout=BY))
    return members, given


def test_all_members_get_the_same_batches_and_only_rank_0_requests_them(monkeypatch: pytest.MonkeyPatch) -> None:
    members, given = _play(monkeypatch)
    assert given == [["digest 1", "digest 2", "digest 3"]] * WORLD
    assert [member.requests for member in members] == [[1, 2, 3], [], []]
    assert [member.done for member in members] == [STEPS] * WORLD


def test_the_others_say_that_they_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    members, _ = _play(monkeypatch)
    assert members[0].phases == []  # it says so itself, of the store
    assert members[1].phases == members[2].phases == [("wait_data", GANG)] * STEPS


@pytest.mark.parametrize("rank", range(WORLD))
def test_whichever_member_is_asked_to_stop_all_end_after_the_same_step(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    _, given = _play(monkeypatch, **{f"r{rank}": 1})
    assert given == [["digest 1"]] * WORLD
