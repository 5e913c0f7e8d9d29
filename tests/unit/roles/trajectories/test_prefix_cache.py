"""A turn goes to the rollout that has its prefix, if this rollout requests work.

No turn waits for a rollout, and no turn overtakes another one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.types import Incarnation
from rrl.roles.trajectories.episodes.requests import EpisodeItem
from rrl.roles.trajectories.leases import LONG_PREFIX, deal
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Leased
from rrl.tests.support.roles.trajectories.agents import CREW, ask, episodes, open_agents_store
from rrl.tests.support.roles.trajectories.crew import OTHER, ROLLOUT, incarnation_of, segment

A, B, C = (incarnation_of(f"rollout/{index}") for index in range(3))
ENGINES = (A, B, C)


def test_engine_gets_turns_that_it_has_cached_and_those_cached_nowhere() -> None:
    waiting = [(1, None), (2, A), (3, B), (4, C)]
    assert deal(waiting, A, 4, {B: 1}) == [2, 1, 4]
    assert deal(waiting, B, 4, {A: 1}) == [3, 1, 4]


def test_engine_with_more_cached_turns_than_places_leaves_the_last_to_others() -> None:
    waiting = [(1, B), (2, B), (3, B)]
    assert deal(waiting, A, 2, {B: 1}) == [2, 3]
    assert deal(waiting, B, 1, {A: 2}) == [1]


def test_turn_is_not_overtaken_by_one_whose_prefix_is_cached() -> None:
    assert deal([(1, None), (2, A)], A, 1, {}) == [1]


@given(
    st.lists(st.sampled_from([None, *ENGINES]), max_size=12),
    st.dictionaries(st.sampled_from(ENGINES), st.integers(1, 5)),
)
def test_engines_together_get_the_first_waiting_turns_each_once(
    cached: list[Incarnation | None], places: dict[Incarnation, int]
) -> None:
    waiting = list(enumerate(cached))
    total, left = sum(places.values()), dict(places)
    leased: dict[int, Incarnation] = {}
    for engine in places:
        got = deal(waiting, engine, left.pop(engine), left)
        assert len(got) <= places[engine]
        leased |= dict.fromkeys(got, engine)
        waiting = [each for each in waiting if each[0] not in got]
    assert sorted(leased) == list(range(min(total, len(cached))))
    for turn, engine in leased.items():
        if cached[turn] in places and cached[turn] != engine:
            assert sum(cached[other] == cached[turn] for other in leased) > places[cached[turn]]  # type: ignore[index]


# ── in the store ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


def _lease(
    store: Store,
    who: Incarnation,
    at_most: int = 4,
    weights: int = 0,
    open_until: float = 1.0,
    holding: tuple[int, ...] = (),
) -> list[int]:
    leased = store.lease(who, at_most, holding, weights, now=0.0, open_until=open_until)
    assert isinstance(leased, Leased)
    return [item.trajectory for item in leased.items]


def _turn_of(store: Store, item: EpisodeItem, who: Incarnation, step: int = 0) -> int:
    number = ask(store, item)
    assert _lease(store, who) == [number]
    store.append(who, [segment(number, 0, (5, 6), step)], (number,))
    return number


def test_next_turn_goes_back_to_the_rollout_that_waits_for_work(store: Store) -> None:
    one, other = episodes(store, 2)
    first, second = _turn_of(store, one, ROLLOUT), _turn_of(store, other, OTHER)
    assert _lease(store, ROLLOUT) == _lease(store, OTHER) == []
    of_second, of_first = ask(store, other, "2", (7,), second, 4), ask(store, one, "2", (7,), first, 4)
    assert _lease(store, ROLLOUT) == [of_first]
    assert _lease(store, OTHER) == [of_second]


@pytest.mark.parametrize("why", ["new weights", "its request is over", "it has ended", "it has no place"])
def test_next_turn_goes_to_any_rollout_if_the_one_that_has_its_prefix_cannot_take_it(store: Store, why: str) -> None:
    (item,) = episodes(store, 1)
    first = _turn_of(store, item, ROLLOUT)
    places = 0 if why == "it has no place" else 4
    assert (
        _lease(store, ROLLOUT, places, int(why == "new weights"), -1.0 if why == "its request is over" else 1.0) == []
    )
    if why == "it has ended":
        store.update_membership([each for each in CREW if each != ROLLOUT])
    number = ask(store, item, "2", (7,), first, 4)
    assert _lease(store, OTHER) == [number]


def test_turn_is_kept_for_the_waiting_rollout_with_its_prefix_until_that_has_work(store: Store) -> None:
    (item,) = episodes(store, 1)
    first = _turn_of(store, item, ROLLOUT)
    assert _lease(store, ROLLOUT, 1) == []
    one, other = (ask(store, item, f"next {place}", (7,), first, 4) for place in range(2))
    assert _lease(store, OTHER, 1) == [other], (
        "the other rollout did not get the turn for which the first one has no place"
    )
    assert _lease(store, ROLLOUT, 1) == [one]
    last = ask(store, item, "last", (7,), first, 4)
    assert _lease(store, OTHER, 1, holding=(other,)) == [last]


GUEST = incarnation_of("guest/n1")


@pytest.mark.parametrize(("tokens", "of_guest"), [(LONG_PREFIX, True), (LONG_PREFIX + 1, False)])
def test_guest_leaves_a_turn_with_a_long_prefix_to_a_rollout_with_a_free_place(
    tmp_path: Path, tokens: int, of_guest: bool
) -> None:
    store = open_agents_store(tmp_path, (*CREW, GUEST))
    (item,) = episodes(store, 1)
    for who in (ROLLOUT, GUEST):
        assert _lease(store, who, 1) == []
    number = ask(store, item, given=(2,) * tokens)
    assert _lease(store, GUEST, 1) == ([number] if of_guest else [])
    assert _lease(store, ROLLOUT, 1) == ([] if of_guest else [number])
    if not of_guest:
        last = ask(store, item, "2", given=(3,) * tokens)
        assert _lease(store, GUEST, 1) == [last], "a turn waits although no other rollout has a place for it"
