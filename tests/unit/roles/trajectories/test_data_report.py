"""What the store reports about the data that the trainer needs next: who holds what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rrl.core.types import DataReport, Incarnation, OutsideKind, OutsideWait, Version
from rrl.roles.trajectories.episodes.requests import EpisodeItem, FinishEpisode, LeasedEpisodes, OpenEpisode
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done
from rrl.tests.support.roles.trajectories.agents import AGENTS, CREW, ask, episodes, finish, open_agents_store, turn
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    generate,
    incarnation_of,
    lease,
    open_store,
    score,
)

ENDPOINT = incarnation_of("endpoint/0")
NOW, WAITED_S = 500.0, 40.0
INSIDE = DataReport()


def of_endpoint(folder: Path, **changed: object) -> Store:
    """Return the store of a job whose agents are all outside of the run; the trainer has published weights."""
    settings = EpisodeSettings(timeout=60.0, reward_timeout=90.0, own_agents=False)
    return published(open_agents_store(folder, (*CREW, ENDPOINT), episodes=settings, **changed))


def published(store: Store) -> Store:
    assert store.report_versions(TRAINER, (Version(0, TRAINER.number),)) is None
    return store


def report(store: Store, opens: bool = False, index: int | None = None) -> DataReport:
    return store.data_report(1, index, NOW, WAITED_S, opens)


def opened(store: Store, count: int) -> list[EpisodeItem]:
    items: list[EpisodeItem] = []
    for number in range(count):
        leased = answer(store, OpenEpisode(ENDPOINT, f"agent {number}"))
        assert isinstance(leased, LeasedEpisodes)
        items += leased.items
    store.episodes.expire(NOW - 10.0)
    return items


def held_by(*replicas: Incarnation) -> DataReport:
    return DataReport(holders=frozenset(one.replica for one in replicas), only_holders=True)


def end_later(store: Store, item: EpisodeItem, who: Incarnation) -> None:
    turn(store, item, (2,), (5, 1), who=who)
    assert answer(store, FinishEpisode(who, item.episode, item.attempt, None, later=True)) == Done()
    store.episodes.expire(NOW - 30.0)


# ── agents outside of the run ────────────────────────────────────────────────────────────────────────────────────────
def test_run_that_no_agent_calls_waits_for_an_episode_to_be_opened(tmp_path: Path) -> None:
    store = of_endpoint(tmp_path)
    assert report(store) == DataReport(outside=OutsideWait(OutsideKind.EPISODE, None, WAITED_S))
    assert report(store, opens=True) == INSIDE, "an agent asks for an episode, and the run does not give it one"


def test_agent_that_is_silent_between_two_calls_holds_up_the_run_from_outside(tmp_path: Path) -> None:
    store = of_endpoint(tmp_path)
    items = opened(store, BATCH * GROUP)
    turn(store, items[0], (2,), (5, 1), who=ENDPOINT)
    assert report(store) == DataReport(outside=OutsideWait(OutsideKind.AGENT, items[0].episode, 10.0))


def test_open_call_of_an_agent_is_work_of_the_run(tmp_path: Path) -> None:
    store = of_endpoint(tmp_path)
    items = opened(store, BATCH * GROUP)
    for item in items:
        ask(store, item, who=ENDPOINT)
    assert report(store) == INSIDE, "no rollout has taken the turns yet"
    lease(store, ROLLOUT)
    assert report(store) == held_by(ROLLOUT)


def test_groups_that_only_the_run_holds_up_are_enough_for_a_part(tmp_path: Path) -> None:
    store = of_endpoint(tmp_path, groups_per_part=1)
    items = opened(store, BATCH * GROUP)
    for item in items[:GROUP]:
        turn(store, item, (2,), (5, 1), who=ENDPOINT)
        finish(store, item, None, ENDPOINT)
    assert report(store, index=0) == INSIDE, "the first group only waits to be scored"
    assert report(store).outside is not None, "the batch needs the second group, too"


# ── rewards that come later ──────────────────────────────────────────────────────────────────────────────────────────
def test_run_whose_own_agents_have_ended_waits_for_their_rewards(tmp_path: Path) -> None:
    settings = EpisodeSettings(reward_timeout=90.0)
    store = published(open_agents_store(tmp_path, episodes=settings, max_ahead_batches=0))
    items = episodes(store)
    for item in items[:-1]:
        end_later(store, item, AGENTS)
    assert report(store) == DataReport(outside=OutsideWait(OutsideKind.REWARD, items[0].episode, 30.0))


def test_agents_of_the_run_that_may_begin_another_group_can_complete_the_step(tmp_path: Path) -> None:
    store = published(open_agents_store(tmp_path, episodes=EpisodeSettings(reward_timeout=90.0)))
    for item in episodes(store, GROUP):
        end_later(store, item, AGENTS)
    assert report(store) == INSIDE


# ── holders in the run ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("scored", [0, GROUP])
def test_holders_are_the_replicas_with_leases_of_all_that_the_step_lacks(tmp_path: Path, scored: int) -> None:
    store = published(open_store(tmp_path, ALL, max_ahead_batches=0))
    generate(store, ROLLOUT, GROUP)
    lease(store, OTHER)
    assert not report(store).only_holders, "nobody has taken the complete answers to score them"
    if scored:
        score(store, at_most=scored)
    else:
        store.lease_scoring(REWARD, GROUP)
    assert report(store) == (held_by(OTHER) if scored else held_by(OTHER, REWARD))


def test_nothing_is_reported_before_the_first_weights_and_while_the_trainer_has_to_commit(tmp_path: Path) -> None:
    settings = EpisodeSettings(own_agents=False)
    assert report(open_agents_store(tmp_path / "a", (*CREW, ENDPOINT), episodes=settings)) == INSIDE
    store = published(open_store(tmp_path / "b", ALL, max_ahead_batches=3, keep_uncommitted=1))
    for number in (1, 2):
        complete(store, generate(store, ROLLOUT, BATCH * GROUP))
        assert store.bind(TRAINER, number) is None
    lease(store, OTHER)
    assert store.data_report(3, None, NOW, WAITED_S, opens=False) == INSIDE


def complete(store: Store, trajectories: Sequence[int]) -> None:
    assert score(store) == list(trajectories)
