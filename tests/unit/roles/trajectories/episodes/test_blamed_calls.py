"""A call right after which processes end again and again is blamed, and no other call is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.types import Incarnation
from rrl.roles.trajectories.episodes.requests import EpisodeItem, GetEpisode, LeasedEpisodes, OpenEpisode
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.tests.support.roles.trajectories.agents import (
    CREW,
    ask,
    episodes,
    is_over,
    open_agents_store,
    reopened,
    sample,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import GROUP, incarnation_of

CALL, OTHER_CALL = "a" * 32, "b" * 32
SETTINGS = EpisodeSettings(retries=1)
ROLE = "agents/0"


class Deaths:
    """A store, and a replica whose process ends again and again."""

    def __init__(self, folder: Path, role: str = ROLE) -> None:
        self.folder, self.role = folder, role
        self.count = 0
        self.store = open_agents_store(folder, self.members, episodes=SETTINGS)

    @property
    def process(self) -> Incarnation:
        return incarnation_of(self.role, self.count + 1)

    @property
    def members(self) -> list[Incarnation]:
        return [*(each for each in CREW if each.replica != ROLE), self.process]

    def begin(self) -> EpisodeItem:
        """Begin an attempt at the first episode that needs one, or return the attempt that has outlived a process."""
        if self.role == ROLE:
            return episodes(self.store, 1, self.process)[0]
        leased = answer(self.store, OpenEpisode(self.process, "outside"))
        assert isinstance(leased, LeasedEpisodes)
        return leased.items[0]

    def call(self, item: EpisodeItem, call: str = CALL) -> None:
        """Begin to prepare a call."""
        turns_of_call = answer(self.store, GetEpisode(self.process, item.episode, (), call))
        assert not is_over(turns_of_call)

    def answered(self, item: EpisodeItem, call: str = CALL, *, complete: bool = True) -> None:
        self.call(item, call)
        number = ask(self.store, item, f"{call}/1/0", who=self.process)
        if complete and not any(turn.finished for turn in turns_of(self.store, item.episode, self.process).turns):
            sample(self.store, number, (5, 1))

    def die(self) -> None:
        self.count += 1
        self.store.update_membership(self.members)
        self.store = reopened(self.store, self.folder, self.members, episodes=SETTINGS)

    @property
    def dropped(self) -> dict[str, int]:
        return self.store.audit().dropped


@pytest.mark.parametrize("role", [ROLE, "endpoint/0"])
def test_call_whose_preparation_ends_processes_fails_its_attempt_and_then_drops_its_group(
    tmp_path: Path, role: str
) -> None:
    deaths = Deaths(tmp_path, role)
    made: list[tuple[int, int]] = []
    while not deaths.dropped:
        item = deaths.begin()
        made.append((item.episode, item.attempt))
        deaths.call(item)
        deaths.die()
        assert len(made) < 10, "the item is never blamed"
    first = 1 if role == ROLE else 0  # the attempt of an outside agent outlives the first death
    assert made == [(0, 1), (0, 1 + first), (0, 2 + first)]
    (reason,) = deaths.dropped
    assert reason.startswith(f"{role} ended 3 times right after the same call of item 0")
    assert CALL[:12] in reason
    assert deaths.dropped == {reason: GROUP}


def test_agent_that_ends_its_process_with_the_answer_to_a_call_is_blamed(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    for _ in range(3):
        deaths.answered(deaths.begin())
        deaths.die()
    assert deaths.dropped.popitem()[1] == GROUP


def test_agents_that_wait_for_tokens_or_make_other_calls_are_not_blamed(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    for number in range(6):
        item = deaths.begin()
        if number % 2:
            deaths.answered(item, complete=False)
        else:
            deaths.call(item, f"{number}" * 32)
        deaths.die()
    assert deaths.dropped == {}
    assert deaths.begin().attempt == 7


def test_answer_at_an_outside_agent_does_not_blame_it_for_the_end_of_the_endpoint(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path, "endpoint/0")
    for _ in range(6):
        deaths.answered(deaths.begin())
        deaths.die()
    assert deaths.dropped == {}
    assert deaths.begin().attempt == 1


def test_deaths_of_several_episodes_of_an_item_count_together(tmp_path: Path) -> None:
    """A group has two episodes, whose agents make the same first call."""
    deaths = Deaths(tmp_path)
    for _ in range(3):
        for item in episodes(deaths.store, GROUP, deaths.process):
            deaths.call(item)
        deaths.die()
    assert deaths.dropped.popitem()[1] == GROUP
    (item,) = episodes(deaths.store, 1, deaths.process)
    deaths.call(item, OTHER_CALL)
    deaths.die()
    assert len(deaths.dropped) == 1
