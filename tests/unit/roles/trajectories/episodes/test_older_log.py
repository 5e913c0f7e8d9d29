"""A log of an older version of rrl is read, and its run continues."""

from __future__ import annotations

import shutil
from pathlib import Path

from rrl.roles.trajectories.episodes.requests import GetEpisode, OpenTurn
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.types import CommittedState
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    episodes,
    finish,
    follow,
    is_over,
    open_agents_store,
    sample,
    turn,
    turns_of,
)
from rrl.tests.support.roles.trajectories.crew import TRAINER, bind, commit, incarnation_of, manifest, score

RECORDED = Path(__file__).parents[4] / "data" / "recorded" / "trajectories"
EPISODE = 14
"""Number of the episode that is at work in the recorded log."""
NEXT_AGENTS = incarnation_of("agents/0", 2)
MEMBERS = (*(each for each in CREW if each != AGENTS), NEXT_AGENTS)


def test_log_from_before_replay_is_read_completely_and_its_open_turn_goes_on(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "log.1", tmp_path)
    store = open_agents_store(tmp_path, MEMBERS)
    audit = store.audit()
    assert (audit.made, audit.trained, audit.dropped) == (16, 12, {"broken tool": 2})
    assert store.committed(TRAINER) == CommittedState(3, manifest(3))
    first, second = turns_of(store, EPISODE, NEXT_AGENTS).turns
    assert (first.given, first.sampled, first.finished) == ((2, 3), (5, 6), True)
    assert (second.parent, second.offset, second.request, second.options) == (first.id, 4, "open", "")
    again = OpenTurn(OTHER_AGENTS, EPISODE, 1, "open", first.id, 4, (7,), 4, ("hash open",))
    assert answer(store, again) == answer(store, again)
    assert is_over(answer(store, GetEpisode(NEXT_AGENTS, 0))), "an episode of a trained step is not over"
    sample(store, second.id, (8, 1), step=3)
    assert follow(store, second.id, 0, NEXT_AGENTS).tokens == (8, 1)
    (item,) = [each for each in episodes(store, 1, OTHER_AGENTS) if each.episode == EPISODE]
    finish(store, item, 1.0, OTHER_AGENTS)
    for other in episodes(store, 3, NEXT_AGENTS):
        turn(store, other, (2,), (5, 1), step=3, who=NEXT_AGENTS)
        finish(store, other, 0.0, NEXT_AGENTS)
    score(store)
    batch = bind(store, 4)
    commit(store, batch)
    assert [one.tokens for one in batch.trajectories if one.id == EPISODE] == [(5, 6, 7, 8, 1)]
    assert store.audit().trained == 16
