"""Ranks of a trainer that request shares of batches and parts from the store."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import Incarnation, member_id
from rrl.roles.trajectories.batches import Part, decode
from rrl.roles.trajectories.client import WrongArgument
from rrl.roles.trajectories.partition import shares_of
from rrl.roles.trajectories.server import _Parts
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import By, Denied, GetPart, NotReady, PartBound, PostScores, Score, Share
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    REWARD,
    ROLLOUT,
    TRAINER,
    commit,
    generate,
    incarnation_of,
    manifest,
    open_store,
    score,
    segment,
)
from rrl.tests.support.roles.trajectories.store_process import StoreProcess, lease_scoring, open_clients

SECOND = incarnation_of(member_id(TRAINER.replica, 1))
RANKS = (TRAINER, SECOND)


def _share(store: Store, who: Incarnation, share: Share, number: int = 1, index: int | None = None) -> Part:
    answer = store.part(who, number, index, share)
    assert isinstance(answer, PartBound), answer
    store.flush()
    return decode(answer.part, share)


def _ready(folder: Path) -> Store:
    """Return a store with the batches of two steps."""
    store = open_store(folder, [*ALL, SECOND], keep_uncommitted=2)
    generate(store)
    score(store)
    return store


@pytest.mark.parametrize("by", ["group", "sequence"])
def test_ranks_together_get_the_batch_that_the_first_request_bound(tmp_path: Path, by: By) -> None:
    store = _ready(tmp_path)
    parts = [_share(store, who, Share(rank, 2, by)) for rank, who in reversed(list(enumerate(RANKS)))]
    whole = store.part(TRAINER, 1)
    assert isinstance(whole, PartBound)
    assert {(part.digest, part.groups) for part in parts} == {(whole.part.digest, whole.part.groups)}
    ids = [one for part in parts for one in part.arrays.ids.tolist()]
    assert sorted(ids) == sorted(one.id for one in whole.part.trajectories)
    assert sum(len(part.arrays.tokens) for part in parts) == len(decode(whole.part).arrays.tokens)
    commit(store, whole.part)
    assert _share(store, SECOND, Share(1, 2, by)).digest == whole.part.digest, "the late rank gets another batch"
    assert isinstance(store.commit(SECOND, 1, manifest(1), whole.part.digest), Denied)


def test_rank_may_request_the_next_step_before_the_others_and_the_same_share_twice(tmp_path: Path) -> None:
    store = _ready(tmp_path)
    ahead = [_share(store, SECOND, Share(1, 2), number) for number in (1, 2)]
    behind = [_share(store, TRAINER, Share(0, 2), number) for number in (1, 2)]
    assert [part.digest for part in behind] == [part.digest for part in ahead]
    again = [_share(store, TRAINER, Share(1, 2), number) for number in (1, 2)]
    for one, other in zip(again, ahead, strict=True):  # the rank of a share need not be that of the process
        assert one.arrays.tokens.tolist() == other.arrays.tokens.tolist() != []


@pytest.mark.parametrize("other", [Share(1, 3), Share(1, 2, "sequence")])
def test_rank_that_divides_otherwise_is_denied_and_binds_nothing(tmp_path: Path, other: Share) -> None:
    store = _ready(tmp_path)
    _share(store, TRAINER, Share(0, 2))
    denied = store.part(SECOND, 2, None, other)
    assert isinstance(denied, Denied)
    assert denied.wrong_argument
    assert denied.why == (
        f"trainer/0.1#1 asks for a share of {other.world} by {other.by}, but another rank has asked for a share of 2 by"
        " group: all ranks must pass the same world and the same by"
    )
    assert store.audit().steps.keys() == {1}
    assert isinstance(store.part(SECOND, 1), PartBound), "a whole batch is no share"


def test_next_incarnation_may_divide_otherwise_and_the_fenced_one_changes_nothing(tmp_path: Path) -> None:
    store = _ready(tmp_path)
    first = _share(store, TRAINER, Share(0, 2))
    new = [Incarnation(who.replica, 2) for who in RANKS]
    store.update_membership([*ALL[:3], *new])
    assert _share(store, new[1], Share(1, 3)).digest == first.digest
    fenced = store.part(TRAINER, 1, None, Share(0, 2))
    assert isinstance(fenced, Denied)
    assert fenced.fenced
    assert _share(store, new[0], Share(0, 3)).digest == first.digest


def test_share_of_a_part_whose_group_is_another_ranks_has_no_tokens(tmp_path: Path) -> None:
    store = open_store(tmp_path, [*ALL, SECOND], groups_per_part=1)
    generate(store)
    score(store, at_most=GROUP)
    for index, owner in enumerate((0, 1)):
        if index:
            assert store.part(TRAINER, 1, 1, Share(0, 2)) == NotReady()
            score(store, at_most=GROUP)
        parts = [_share(store, who, Share(rank, 2), 1, index) for rank, who in enumerate(RANKS)]
        assert [len(part.arrays.ids) for part in parts] == ([GROUP, 0] if owner == 0 else [0, GROUP])


def test_encoded_parts_of_a_round_do_not_wait_for_a_garbage_collection(tmp_path: Path) -> None:
    store = _ready(tmp_path)
    _share(store, TRAINER, Share(0, 2))
    gc.collect()
    gc.disable()
    try:
        parts = _Parts(store)
        assert parts.encoded(1, None, Share(0, 2)) is parts.encoded(1, None, Share(0, 2))
        kept = weakref.ref(parts)
        del parts
        assert kept() is None
    finally:
        gc.enable()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    process = StoreProcess(tmp_path)
    yield process
    process.kill()


async def test_rank_gets_its_share_of_the_same_batch_although_the_store_dies_between_two_ranks(
    process: StoreProcess,
) -> None:
    members = [*ALL, SECOND]
    process.start(members)
    async with open_clients(60.0, process, ROLLOUT, REWARD, *RANKS) as (rollout, reward, first, second):
        items = await rollout.lease(BATCH * GROUP)
        await rollout.append([segment(item.trajectory) for item in items], [item.trajectory for item in items])
        scored = await lease_scoring(reward, BATCH * GROUP)
        await reward.ask(PostScores, tuple(Score(item.trajectory, 1.0, 1.0) for item in scored))
        got: list[Any] = [await first.ask(GetPart, 1, None, 5.0, Share(0, 2))]
        process.kill()
        await asyncio.to_thread(process.start, members)
        got.append(await second.ask(GetPart, 1, None, 5.0, Share(1, 2)))
        assert got[0].part.digest == got[1].part.digest
        shares = shares_of(got[0].part, Share(0, 2))
        for rank, bound in enumerate(got):
            mine = [place for place, one in enumerate(bound.part.trajectories) if one.tokens]
            assert mine == shares[rank]
        with pytest.raises(WrongArgument, match="share of 2 by group"):  # the restarted store knows the newer division
            await first.ask(GetPart, 1, None, 5.0, Share(0, 3))
