"""Replay: the attempt after the death of a process takes over the turns of the attempt before it.

No turn is sampled twice.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.core.types import Incarnation
from rrl.roles.trajectories.batches import decode
from rrl.roles.trajectories.durable.records import FIRST_TURN
from rrl.roles.trajectories.episodes.requests import EpisodeItem, Follow, OpenTurn, TurnOpened
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Bound, Denied, Done, Sampling, Trajectory
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    ask,
    episodes,
    fail,
    finish,
    follow,
    is_over,
    open_agents_store,
    reopened,
    sample,
    turn,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    ROLLOUT,
    TRAINER,
    incarnation_of,
    lease,
    segment,
)


@pytest.fixture
def item(store: Store) -> EpisodeItem:
    return episodes(store, 1)[0]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_agents_store(tmp_path)


def _members(agents: Incarnation) -> tuple[Incarnation, ...]:
    """Return the members of the run, with another incarnation of the first replica of ``agents``."""
    return (*(each for each in CREW if each != AGENTS), agents)


def _next(store: Store, number: int) -> tuple[Incarnation, EpisodeItem]:
    """Let the replica of ``agents`` die, and lease its episode to the replica's incarnation ``number``."""
    successor = incarnation_of("agents/0", number)
    store.update_membership(_members(successor))
    (item,) = episodes(store, 1, successor)
    return successor, item


def _samples(store: Store, item: EpisodeItem, who: Incarnation) -> tuple[Trajectory, ...]:
    """Finish the episode and all others of the first batch. Return the samples of the episode."""
    finish(store, item, 0.5, who)
    for other in episodes(store, BATCH * GROUP - 1, OTHER_AGENTS):
        turn(store, other, (2,), (5, 1), who=OTHER_AGENTS)
        finish(store, other, 0.25, OTHER_AGENTS)
    bound = store.batch(TRAINER, 1)
    assert isinstance(bound, Bound)
    return tuple(one for one in decode(bound.batch).trajectories if one.id == item.episode)


def test_next_attempt_gets_the_recorded_turns_by_repeating_their_requests(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    second = turn(store, item, (7,), (8,), first, 4)
    who, again = _next(store, 2)
    shown = turns_of(store, item.episode, who)
    assert (again.attempt, shown.attempt, shown.turns) == (2, 2, ())
    assert [(each.id, each.sampled, each.attempt) for each in shown.recorded] == [(first, (5, 6), 1), (second, (8,), 1)]
    assert turn(store, again, (2, 3), (5, 6), who=who) == first
    assert follow(store, first, 0, who).finished
    store = reopened(store, tmp_path, _members(who))
    shown = turns_of(store, item.episode, who)
    assert ([each.id for each in shown.turns], [each.id for each in shown.recorded]) == ([first], [second])
    assert ask(store, again, "(7,) None 4", (7,), first, 4, who=who) != second, (
        "a request with another name got the recorded turn"
    )
    assert ask(store, again, f"(7,) {first} 4", (7,), first, 4, who=who) == second
    assert lease(store, OTHER)[0].trajectory != second


def test_open_turn_is_sampled_to_its_end_while_no_process_executes_the_attempt(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    number = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6))])
    store.update_membership([each for each in CREW if each != AGENTS])
    assert store.append(ROLLOUT, [segment(number, 2, (7,))]) == Done()
    store = reopened(store, tmp_path, tuple(each for each in CREW if each != AGENTS))
    store.append(ROLLOUT, [segment(number, 3, (1,))], (number,))
    who, again = _next(store, 2)
    assert ask(store, again, who=who) == number
    assert follow(store, number, 0, who).tokens == (5, 6, 7, 1)


def test_open_turn_moves_to_another_rollout_while_no_process_makes_the_attempt(store: Store, item: EpisodeItem) -> None:
    number = ask(store, item)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 6))])
    alone = [each for each in CREW if each != AGENTS]
    store.update_membership(alone)
    store.update_membership([each for each in alone if each != ROLLOUT])
    (work,) = lease(store, OTHER)
    assert (work.trajectory, work.so_far[0].tokens) == (number, (5, 6))


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("parent", FIRST_TURN + 1),
        ("offset", 1),
        ("given", (2, 4)),
        ("max_new", 3),
        ("options", "{}"),
        ("sampling", Sampling(seed=1)),
        ("request", "other"),
    ],
)
def test_request_that_differs_in_any_field_is_sampled_again(store: Store, changed: str, value: object) -> None:
    (item,) = episodes(store, 1)
    roots = [turn(store, item, (9, place), (4, 4)) for place in range(2)]
    wanted = OpenTurn(AGENTS, item.episode, 1, "x", roots[0], 2, (2, 3), 4)
    recorded = answer(store, wanted)
    who, again = _next(store, 2)
    for place in range(2):
        turn(store, again, (9, place), (4, 4), who=who)
    wanted = msgspec.structs.replace(wanted, incarnation=who, attempt=2)
    opened = answer(store, msgspec.structs.replace(wanted, **{changed: value}))
    assert isinstance(opened, TurnOpened), opened
    assert opened != recorded
    if changed != "request":
        assert answer(store, wanted) == Denied(f"the request of turn {opened.turn} was repeated with other tokens")
    else:
        assert answer(store, wanted) == recorded


def test_turns_that_the_finished_attempt_did_not_use_are_not_trained(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    turn(store, item, (7,), (8,), first, 4)
    left = ask(store, item, "left", (9,), first, 4)
    lease(store)
    who, again = _next(store, 2)
    turn(store, again, (2, 3), (5, 6), who=who)
    turn(store, again, (6,), (4,), first, 4, who=who)
    samples = _samples(store, again, who)
    assert [one.tokens for one in samples] == [(5, 6, 6, 4)]
    late = store.append(ROLLOUT, [segment(left, 0, (7,))])
    assert isinstance(late, Denied)
    assert late.lost == (left,)
    assert store.audit().ages == {}
    shown = turns_of(store, item.episode, who)
    assert (len(shown.turns), shown.recorded) == (2, ())


def test_failed_attempt_is_not_replayed(store: Store, item: EpisodeItem) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    who, again = _next(store, 2)
    fail(store, again, who=who)
    (third,) = episodes(store, 1, who)
    assert turns_of(store, item.episode, who).recorded == ()
    assert ask(store, third, "(2, 3) None 0", who=who) > first


def test_job_with_on_death_again_records_no_turns(tmp_path: Path) -> None:
    store = open_agents_store(tmp_path, episodes=EpisodeSettings(on_death="again"))
    (item,) = episodes(store, 1)
    first = turn(store, item, (2, 3), (5, 6))
    who, again = _next(store, 2)
    assert turns_of(store, item.episode, who).recorded == ()
    assert ask(store, again, "(2, 3) None 0", who=who) > first


def test_replay_continues_after_the_death_of_a_replaying_attempt(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    second = turn(store, item, (7,), (8,), first, 4)
    who, again = _next(store, 2)
    turn(store, again, (2, 3), (5, 6), who=who)
    third = turn(store, again, (6,), (4,), first, 4, who=who)
    who, again = _next(store, 3)
    store = reopened(store, tmp_path, _members(who))
    assert [each.id for each in turns_of(store, item.episode, who).recorded] == [first, second, third]
    assert turn(store, again, (2, 3), (5, 6), who=who) == first
    assert turn(store, again, (6,), (4,), first, 4, who=who) == third
    assert turn(store, again, (7,), (8,), first, 4, who=who) == second
    assert [one.tokens for one in _samples(store, again, who)] == [(5, 6, 7, 8), (4,)]


def test_turns_may_be_replayed_in_another_order_than_they_were_recorded(
    store: Store, tmp_path: Path, item: EpisodeItem
) -> None:
    """Two sub-agents have contexts with a common beginning.

    The turn of the second one is a branch of the first one's turn, and is requested first in the replay.
    """
    one = turn(store, item, (2, 3), (5, 6))
    two = turn(store, item, (9,), (7, 1), one, 2)
    who, again = _next(store, 2)
    assert turn(store, again, (9,), (7, 1), one, 2, who=who) == two
    store = reopened(store, tmp_path, _members(who))
    assert [each.id for each in turns_of(store, item.episode, who).turns] == [two]
    samples = _samples(store, again, who)
    assert [(each.prompt, each.tokens) for each in samples] == [((2, 3, 9), (7, 1))]


def test_recorded_turn_is_neither_followed_nor_continued_until_it_is_taken_over(
    store: Store, item: EpisodeItem
) -> None:
    first = turn(store, item, (2, 3), (5, 6))
    who, again = _next(store, 2)
    assert is_over(answer(store, Follow(who, first, 0)))
    refused = answer(store, OpenTurn(who, again.episode, 2, "new", first, 4, (9,), 4))
    assert isinstance(refused, Denied)
    assert "is not a turn of attempt 2" in refused.why


def test_replayed_attempts_are_counted_apart_from_restarted_ones(store: Store) -> None:
    items = episodes(store, 2)
    turn(store, items[0], (2, 3), (5, 6))
    turn(store, items[1], (2, 3), (5, 6))
    fail(store, items[1])
    (again,) = episodes(store, 1, OTHER_AGENTS)
    assert (again.episode, again.attempt) == (items[1].episode, 2)
    _, replayed = _next(store, 2)
    assert replayed.episode == items[0].episode
    counted = store.audit().episodes
    assert (counted["episodes_retried"], counted["episodes_replayed"]) == (1, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["ask", "branch", "sample", "die", "reopen", "diverge"]), max_size=14), st.data())
def test_deterministic_agent_reads_the_same_answers_again_after_any_death(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], data: st.DataObject
) -> None:
    """Every attempt of this agent makes the same requests.

    Each request gets the same turn in every attempt, and the turn's answer was sampled once.
    """
    folder = tmp_path_factory.mktemp("store")
    store = open_agents_store(folder)
    who, number = AGENTS, 1
    (item,) = episodes(store, 1)
    opened: dict[str, int] = {}
    """The turn of each request, over all attempts."""
    asked: list[str] = []
    """Requests of the newest attempt."""

    def request(name: str, parent: int | None, offset: int) -> None:
        turn = ask(store, item, name, (2, 3), parent, offset, who=who)
        assert opened.setdefault(name, turn) == turn
        asked.append(name)

    for step in steps:
        if step == "ask":
            request(f"root {len(asked)}", None, 0)
        elif step == "branch" and asked:
            parent = opened[data.draw(st.sampled_from(sorted(set(asked))))]
            request(f"{parent} branch", parent, 1)
        elif step == "sample":
            for work in lease(store):
                sample(store, work.trajectory, (work.trajectory % 1000, 1))
        elif step == "die":
            number += 1
            who, item = _next(store, number)
            asked.clear()
        elif step == "reopen":
            store = reopened(store, folder, _members(who))
        elif step == "diverge":
            request(f"other {number} {len(asked)}", None, 0)
    shown = turns_of(store, item.episode, who)
    assert {each.request for each in shown.turns} == set(asked)
    assert {each.id for each in (*shown.turns, *shown.recorded)} == set(opened.values())
    for each in (*shown.turns, *shown.recorded):
        assert each.sampled in ((), (each.id % 1000, 1))
    store.close()
