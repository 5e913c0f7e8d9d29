"""An answer that the limit on its length cut is marked, whoever sampled it, and the mark reaches every trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.roles.trajectories.durable.log import Log
from rrl.roles.trajectories.durable.records import pack, pack_tokens
from rrl.roles.trajectories.episodes.requests import EndTurn, MarkAnswer
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done
from rrl.tests.support.roles.trajectories.agents import AGENTS, ask, episodes, finish, open_agents_store, sample, turn
from rrl.tests.support.roles.trajectories.crew import ROLLOUT, bind, figures_of, lease, open_store, score, segment

END = 1
FULL, CUT, EARLY = (5, 5, 5, END), (5, 5, 5, 5), (5, 5)
"""An answer that ends with its last permitted token; one that is cut; one that the rollout ended without an end
token."""


def _restarted(store: Store, folder: Path, opened: Any) -> Store:
    for _ in range(2):
        store.flush()
        store.close()
        store = opened(folder, end_tokens=(END,))
    return store


@pytest.mark.parametrize("restarts", [False, True])
def test_answer_of_full_length_without_its_end_is_marked_for_the_trainer(tmp_path: Path, restarts: bool) -> None:
    store = open_store(tmp_path, end_tokens=(END,))
    leased = [item.trajectory for item in lease(store, at_most=4)]
    answers = dict(zip(leased, (FULL, CUT, EARLY, CUT), strict=True))
    store.append(ROLLOUT, [segment(number, 0, tokens[:2]) for number, tokens in answers.items()])
    rest = [segment(number, 2, tokens[2:]) for number, tokens in answers.items() if tokens[2:]]
    for _ in range(2):  # the request is repeated
        assert store.append(ROLLOUT, rest, leased) == Done()
    score(store)
    if restarts:
        store = _restarted(store, tmp_path, open_store)
    batch = bind(store, 1)
    expected = [False, True, False, True]
    assert [one.truncated for one in batch.trajectories] == expected
    assert batch.arrays.truncated.tolist() == batch.arrays.whole.truncated.tolist() == expected
    assert figures_of(store, 1)["truncated"] == 0.5


@pytest.mark.parametrize("restarts", [False, True])
def test_sample_of_an_episode_is_marked_if_an_answer_in_it_was_cut(tmp_path: Path, restarts: bool) -> None:
    store = open_agents_store(tmp_path, end_tokens=(END,))
    ended, cut, branched, stopped = episodes(store, 4)
    first = turn(store, ended, (2, 3), FULL)
    turn(store, ended, (2,), (5, END), first, 6)
    first = turn(store, cut, (2, 3), CUT)  # the agent goes on after the cut
    turn(store, cut, (2,), (5, END), first, 6)
    first = turn(store, branched, (2, 3), CUT)  # one branch begins before the cut, so only the other one has it
    turn(store, branched, (2,), (5, END), first, 4)
    number = ask(store, stopped)
    sample(store, number, CUT)
    assert answer(store, EndTurn(AGENTS, number, 3)) == Done()  # at a stop text
    unused = turn(store, stopped, (2, 3, 3), CUT)
    assert answer(store, MarkAnswer(AGENTS, unused, False)) == Done()
    for item in (ended, cut, branched, stopped):
        finish(store, item)
    if restarts:
        store = _restarted(store, tmp_path, open_agents_store)
    batch = bind(store, 1)
    marked = {(one.id, one.truncated) for one in batch.trajectories}
    assert marked == {
        (ended.episode, False),
        (cut.episode, True),
        (branched.episode, True),
        (branched.episode, False),
        (stopped.episode, False),
    }
    assert figures_of(store, 1)["truncated"] == 0.5


def test_log_of_format_4_is_read_and_none_of_its_answers_is_marked(tmp_path: Path) -> None:
    appended = [msgspec.structs.astuple(pack(segment(number, 0, CUT), {})) for number in range(4)]
    writer = msgspec.to_builtins(ROLLOUT)
    log = Log(tmp_path)
    records: list[Any] = [["head", 4, 0, 0]]
    records += [["group_created", n, 2 * n, 2, n, pack_tokens((2, 3)), None] for n in range(2)]
    records += [
        ["segments_appended", writer, appended, [0, 1, 2, 3]],
        ["scores_recorded", [[n, 1.0, 0.5] for n in range(4)]],
    ]
    log.rewrite(msgspec.msgpack.encode(record) for record in records)
    log.close()
    batch = bind(open_store(tmp_path, end_tokens=(END,)), 1)
    assert [(one.truncated, one.training) for one in batch.trajectories] == [(False, 0.5)] * 4
