"""Properties of the order of the sources from which a receiver pulls, whatever the receivers know."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.core.types import Incarnation, NodeName, ReplicaId, Version, guest_id, natural_sort_key
from rrl.transport.weights.pull import WeightSource, select_sources

OLD, NEW = Version(6, 1), Version(7, 1)
PUBLISHER = WeightSource(Incarnation(ReplicaId("trainer/0"), 1), "tcp://t:1", (NEW,))


def rollout(index: int, *versions: Version) -> WeightSource:
    return WeightSource(Incarnation(ReplicaId(f"rollout/{index}"), 1), f"tcp://r{index}:1", versions or (OLD,))


def rollouts(count: int, complete: Sequence[int] = ()) -> list[WeightSource]:
    return [rollout(index, NEW if index in complete else OLD) for index in range(count)]


def requested_sources(index: int, holders: Sequence[WeightSource], chain: int = 8, version: Version = NEW) -> list[str]:
    me = ReplicaId(f"rollout/{index}")
    return [each.incarnation.replica for each in select_sources(me, holders, version, chain)]


def names(*indices: int) -> list[ReplicaId]:
    return [ReplicaId(f"rollout/{index}") for index in indices]


runs = st.tuples(st.sets(st.integers(0, 250), max_size=200), st.integers(1, 20))


# ── the order ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_replica_names_are_in_natural_order() -> None:
    members = [ReplicaId("rollout/1.10"), ReplicaId("rollout/1.9")]
    assert sorted([*names(10, 2, 1), *members], key=natural_sort_key) == [
        "rollout/1",
        "rollout/1.9",
        "rollout/1.10",
        "rollout/2",
        "rollout/10",
    ]


def test_chain_head_pulls_from_publisher_and_others_from_predecessor() -> None:
    holders = [PUBLISHER, *rollouts(4)]
    assert requested_sources(0, holders) == ["trainer/0"]
    assert requested_sources(3, holders) == [*names(2, 1, 0), "trainer/0"]


def test_two_chains_begin_at_the_publisher_and_two_at_each_end_of_a_chain() -> None:
    holders = [PUBLISHER, *rollouts(60)]
    assert [requested_sources(head, holders)[0] for head in range(0, 56, 8)] == [
        "trainer/0",
        "trainer/0",
        *names(7, 7, 15, 15, 23),
    ]
    assert requested_sources(56, holders) == [
        *names(23, 22, 21, 20, 19, 18, 17, 16, 7, 6, 5, 4, 3, 2, 1, 0),
        "trainer/0",
    ]


def test_guests_are_the_last_receivers_of_a_chain() -> None:
    guests = [WeightSource(Incarnation(guest_id(NodeName(f"n{n}")), 1), "tcp://g:1", (OLD,)) for n in range(2)]
    holders = [PUBLISHER, *guests, *rollouts(2)]
    assert requested_sources(0, holders) == ["trainer/0"]
    assert requested_sources(1, holders) == [*names(0), "trainer/0"]
    sources = select_sources(guests[1].incarnation.replica, holders, NEW, 8)
    assert [each.incarnation.replica for each in sources] == ["guest/n0", *names(1, 0), "trainer/0"]


def test_late_receiver_prefers_neighbour_then_holders_then_publisher() -> None:
    holders = [PUBLISHER, *rollouts(6, complete=[0, 1, 2, 4, 5])]
    assert requested_sources(3, holders) == [*names(2, 4, 5, 0, 1), "trainer/0"]
    late = [PUBLISHER, *rollouts(6, complete=[1, 2, 3, 4, 5])]
    assert requested_sources(0, late)[0] == "rollout/1"
    assert requested_sources(0, late)[-1] == "trainer/0"


def test_receivers_begin_at_different_holders() -> None:
    holders = [PUBLISHER, *rollouts(16, complete=[8, 9, 10, 11])]
    assert len({requested_sources(index, holders)[1] for index in (1, 2, 3, 4)}) == 4


def test_holder_of_a_newer_version_is_requested_for_its_older_one_if_it_has_that() -> None:
    newer = Version(8, 1)
    holders = [rollout(0), rollout(1, newer, NEW), rollout(2), rollout(3, newer)]
    assert requested_sources(0, holders) == names(1)


def test_holders_that_also_have_the_base_of_the_receiver_come_first_and_are_shared_equally() -> None:
    """A holder without the base can send whole chunks only, however new it is."""
    holders = [
        PUBLISHER,
        rollout(0),
        *(rollout(index, NEW) for index in range(1, 5)),
        *(rollout(i, NEW, OLD) for i in (5, 6)),
    ]
    plans = [
        [one.incarnation.replica for one in select_sources(ReplicaId(f"rollout/{me}"), holders, NEW, 8, base=OLD)]
        for me in (0, 7)
    ]
    assert plans[0] == [*names(5, 6, 1, 2, 3, 4), "trainer/0"]
    assert plans[1] == [*names(6, 5, 4, 1, 2, 3, 0), "trainer/0"]
    other = select_sources(ReplicaId("rollout/0"), holders, NEW, 8, base=Version(5, 1))
    assert [one.incarnation.replica for one in other] == [*names(1, 2, 3, 4, 5, 6), "trainer/0"]


def test_without_a_publisher_complete_holders_are_requested_first() -> None:
    holders = rollouts(5, complete=[2, 4])
    assert requested_sources(0, holders) == names(2, 4)
    assert requested_sources(3, holders) == names(2, 4, 1, 0)


def test_overtaken_receiver_pulls_from_the_publisher_first() -> None:
    holders = [PUBLISHER, *rollouts(3, complete=[0])]
    direct = select_sources(ReplicaId("rollout/2"), holders, NEW, 8, direct=True)
    assert [each.incarnation.replica for each in direct] == ["trainer/0", *names(1, 0)]


# ── invariants ─────────────────────────────────────────────────────────────────────────────────────────────────────
@settings(max_examples=30, deadline=None)
@given(runs)
def test_publisher_is_the_first_source_of_at_most_two_and_every_receiver_reaches_it(
    drawn: tuple[set[int], int],
) -> None:
    there, chain = drawn
    holders = [PUBLISHER, *map(rollout, sorted(there))]
    plans = {index: requested_sources(index, holders, chain) for index in there}
    first = Counter(plan[0] for plan in plans.values())
    assert first["trainer/0"] == min(len(there), 2) if chain == 1 else first["trainer/0"] <= 2
    assert all(plan[-1] == "trainer/0" for plan in plans.values())
    assert all(times <= (2 if one == "trainer/0" else 3) for one, times in first.items())
    for index in there:  # follows the way of the bytes back to the trainer
        hops, at = 0, f"rollout/{index}"
        while at != "trainer/0":
            hops, at = hops + 1, plans[int(at.partition("/")[2])][0]
        assert hops <= chain * (1 + len(there).bit_length())


@settings(max_examples=30, deadline=None)
@given(runs, st.randoms(use_true_random=False))
def test_no_knowledge_of_receivers_leads_to_a_cycle_of_waits(
    drawn: tuple[set[int], int], chance: random.Random
) -> None:
    """A receiver that lacks the version knows the address of some others, and that some of these are complete."""
    there, chain = drawn
    complete = {index for index in there if chance.random() < 0.3}
    waits: dict[int, list[int]] = {}
    for index in there - complete:
        announced = [
            rollout(one, NEW if one in complete and chance.random() < 0.5 else OLD)
            for one in there
            if chance.random() < 0.8 or one == index
        ]
        chance.shuffle(announced)
        plan = requested_sources(index, [PUBLISHER, *announced] if chance.random() < 0.5 else announced, chain)
        assert len(plan) == len(set(plan))
        assert f"rollout/{index}" not in plan
        numbers = [int(one.partition("/")[2]) for one in plan if one != "trainer/0"]
        waits[index] = [number for number in numbers if number not in complete]
    assert all(number < index for index, numbers in waits.items() for number in numbers)


@settings(max_examples=30, deadline=None)
@given(runs, st.integers(0, 250), st.booleans())
def test_receiver_that_is_not_listed_yet_has_its_place_in_the_chain(
    drawn: tuple[set[int], int], me: int, publisher: bool
) -> None:
    there, chain = drawn
    holders = [*([PUBLISHER] if publisher else []), *map(rollout, sorted(there - {me}))]
    plan = requested_sources(me, holders, chain)
    assert plan == requested_sources(me, [*holders, rollout(me)], chain)
    assert ("trainer/0" in plan) == publisher


@settings(max_examples=30, deadline=None)
@given(runs, st.randoms(use_true_random=False))
def test_every_complete_holder_is_among_the_requested_sources(
    drawn: tuple[set[int], int], chance: random.Random
) -> None:
    there, chain = drawn
    complete = {index for index in there if chance.random() < 0.5}
    holders = [rollout(index, NEW if index in complete else OLD) for index in sorted(there)]
    for index in there - complete:
        assert set(names(*complete)) <= set(requested_sources(index, holders, chain))
