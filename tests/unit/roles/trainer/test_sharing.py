"""Members of a gang as threads: when they end, and what they report to the manager while they wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rrl.core.types import STORE
from rrl.roles.trainer import process_group
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.types import By

pytestmark = pytest.mark.torch

STEPS, PARTS, WORLD, BY = 3, 2, 3, 30.0


class _Gang:
    def __init__(self, rank: int, meets: threading.Barrier, sent: dict[int, bool]) -> None:
        self.rank, self.world, self._meets, self._sent = rank, WORLD, meets, sent

    def all(self, mine: bool) -> bool:
        self._sent[self.rank] = mine
        self._meets.wait(BY)
        every = all(self._sent.values())
        self._meets.wait(BY)
        return every


class _Member:
    """A member that gets a stop request after the part ``stops``."""

    def __init__(self, rank: int, stops: str) -> None:
        self.stopping = threading.Event()
        self.asked: list[object] = []
        self.phases: list[tuple[str, str | None]] = []
        self.rank, self.stops = rank, stops

    def parts(self, after: int, share: tuple[int, int], by: By) -> Iterator[Part]:
        self.asked.append((after, share, by))
        for number in range(after + 1, STEPS + 1):
            for index in range(PARTS):
                if self.stopping.is_set():
                    return
                yield Part(number, (0,), f"{number}.{index}", (), index, index == PARTS - 1)

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        self.phases.append((name, waits_for))
        yield


def _play(**stops: str) -> tuple[list[_Member], list[list[str]]]:
    """Return the members and the data that each has received.

    ``stops`` maps a member (``r0``, ``r1``, …) to the part after which it gets a stop request.
    """
    meets, sent = threading.Barrier(WORLD), dict[int, bool]()
    members = [_Member(rank, stops.get(f"r{rank}", "")) for rank in range(WORLD)]

    def incarnations(rank: int) -> list[str]:
        me, given = members[rank], []
        gang: Any = _Gang(rank, meets, sent)
        who: Any = me
        for part in process_group.parts(who, gang, after=0):
            given.append(part.digest)
            if part.digest == me.stops:
                me.stopping.set()
        return given

    with ThreadPoolExecutor(WORLD) as pool:
        given = list(pool.map(incarnations, range(WORLD), timeout=BY))
    return members, given


def test_each_member_requests_its_share_and_all_get_the_same_parts() -> None:
    members, given = _play()
    assert given == [["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]] * WORLD
    assert [member.asked for member in members] == [[(0, (rank, WORLD), "sequence")] for rank in range(WORLD)]


def test_member_that_has_its_share_waits_for_the_store_which_the_others_wait_for() -> None:
    members, _ = _play()
    for member in members:
        assert set(member.phases) == {("wait_data", STORE)}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("part", ["1.0", "1.1"])
def test_stop_request_to_any_member_ends_all_members_after_the_same_part(rank: int, part: str) -> None:
    _, given = _play(**{f"r{rank}": part})
    assert given == [["1.0", "1.1"][: 1 + ["1.0", "1.1"].index(part)]] * WORLD
