from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.trajectories.partition import micro_batches, partition, shares_of
from rrl.roles.trajectories.types import By, PackedPart, PackedTrajectory, Share

SIZES = st.lists(st.integers(0, 40_000), max_size=200)
WORLDS = st.integers(1, 40)


def _part(sizes: list[int], group_size: int, index: int = 0) -> PackedPart:
    trajectories = tuple(
        PackedTrajectory(place, place // group_size, b"", b"", ((size, 1, 1),), 1.0, 1.0, 3)
        for place, size in enumerate(sizes)
    )
    groups = tuple(dict.fromkeys(one.group for one in trajectories))
    return PackedPart(1, groups, "", (b"",) * len(groups), trajectories, index)


@given(SIZES, WORLDS, st.integers(0, 100))
def test_shares_have_each_unit_once_and_are_balanced_in_number_and_size(sizes: list[int], world: int, by: int) -> None:
    shares = partition(sizes, world, by)
    assert len(shares) == world
    assert sorted(unit for share in shares for unit in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    counts, sums = [len(share) for share in shares], [sum(sizes[unit] for unit in share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert max(sums) - min(sums) <= max(sizes, default=0)


@given(SIZES, WORLDS, st.integers(1, 9))
def test_share_by_group_has_whole_groups_in_the_order_of_the_part(sizes: list[int], world: int, group: int) -> None:
    part = _part(sizes, group)
    by_group = [shares_of(part, Share(rank, world, "group")) for rank in range(world)]
    assert all(shares == by_group[0] for shares in by_group), "the ranks compute different shares"
    for share in by_group[0]:
        assert share == sorted(share)
        for place in share:
            own = part.trajectories[place].group
            assert {i for i, one in enumerate(part.trajectories) if one.group == own} <= set(share)


def test_units_of_equal_size_go_round_and_the_next_part_begins_with_the_next_rank() -> None:
    assert partition([5, 5, 5, 5], 3) == [[0, 3], [1], [2]]
    by: By = "group"
    for index, rank in enumerate((0, 1, 2, 0)):
        shares = shares_of(_part([9, 2], 2, index), Share(0, 3, by))
        assert shares[rank] == [0, 1]
        assert sum(map(len, shares)) == 2


@given(SIZES, st.integers(1, 8), st.integers(1, 50_000))
def test_all_ranks_get_equally_many_micro_batches_which_hold_their_share(
    sizes: list[int], world: int, at_most: int
) -> None:
    shares = partition(sizes, world)
    divided = [micro_batches(sizes, shares, rank, at_most) for rank in range(world)]
    assert len({len(each) for each in divided}) == 1
    for share, batches in zip(shares, divided, strict=True):
        assert [place for batch in batches for place in batch] == list(range(len(share)))
        for batch in batches:
            assert len(batch) <= 1 or sum(sizes[share[place]] for place in batch) <= at_most
    assert not divided[0] or any(each[-1] for each in divided), "the last micro-batch is empty in every rank"
