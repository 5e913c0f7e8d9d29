"""``rrl episodes`` reads the log of a real store while the store has it open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.api.sampled_steps import read_store
from rrl.cli import main
from rrl.cli.views.episode_trees import Episode, episodes_of
from rrl.cli.views.episodes import episode_view, episodes_view
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Version
from rrl.roles.trajectories.episodes.requests import FinishEpisode, LeasedEpisodes, OpenEpisode, OpenTurn, TurnOpened
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, Sampling
from rrl.tests.support.cli.agent_runs import endpoint_job
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored
from rrl.tests.support.roles.trajectories.agents import (
    AGENTS,
    CREW,
    OTHER_AGENTS,
    ask,
    episodes,
    evaluated,
    fail,
    finish,
    open_agents_store,
    sample,
    turn,
)
from rrl.tests.support.roles.trajectories.crew import (
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    figures_of,
    incarnation_of,
    lease,
    segment,
)

RUN = "small-7"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path))
    return Story(RUN, endpoint_job()).written(tmp_path)


@pytest.fixture
def store(run: RunDir) -> Iterator[Store]:
    opened = open_agents_store(run.store)
    yield opened
    opened.close()


def played(store: Store) -> None:
    """Play four episodes: a scored tree of turns, a second attempt at work, a scored turn, and one without a turn."""
    tree, again, other = episodes(store, 3)
    first = turn(store, tree, (2, 3, 4), (5, 6), step=0)
    second = turn(store, tree, (7,), (8, 9, 1), first, 5, step=1)
    turn(store, tree, (7, 7), (4,), first, 4, step=1)  # the agent has changed the end of the first answer
    turn(store, tree, (9, 9, 9), (3, 1), step=2)  # another conversation
    turn(store, tree, (5,), (6, 7), second, 9, step=2)
    finish(store, tree, 0.75)
    fail(store, again)
    (second_attempt,) = episodes(store, 1, holding=(other.episode,))
    number = ask(store, second_attempt, max_new=4)
    lease(store)
    store.append(ROLLOUT, [segment(number, 0, (5, 5), 2)], ())
    only = ask(store, other)
    sample(store, only, (5, 1))
    finish(store, other)
    store.flush()


def read(run: RunDir) -> list[Episode]:
    state = read_store(run, endpoint_job())
    assert state is not None
    return episodes_of(state)


def test_episode_shows_the_turns_of_its_newest_attempt_and_what_is_trained(run: RunDir, store: Store) -> None:
    played(store)
    tree, again, other, unbegun = read(run)
    assert (tree.state, tree.reward, tree.branches, tree.given, tree.sampled, tree.trained) == (
        "scored",
        0.75,
        3,
        10,
        10,
        10,
    )
    shown = [(one.parent, one.offset, one.parent_length, one.given, one.sampled, one.versions) for one in tree.turns]
    assert shown == [
        (None, 0, 0, 3, 2, (0,)),
        (1, 5, 5, 1, 3, (1,)),
        (1, 4, 5, 2, 1, (1,)),
        (None, 0, 0, 3, 2, (2,)),
        (2, 9, 9, 1, 2, (2,)),
    ]
    assert (again.state, again.attempt, again.failures, again.trained) == ("at work", 2, 1, None)
    assert [(one.sampled, one.finished) for one in again.turns] == [(2, False)]
    assert (other.state, other.branches) == ("scored", 1)
    assert (unbegun.state, unbegun.attempt, unbegun.holder, unbegun.turns) == ("waiting", 0, None, ())


def test_trained_episode_names_its_step(run: RunDir, store: Store) -> None:
    leased = episodes(store, 4)
    for item in leased:
        turn(store, item, (2, 3), (5, 1))
        finish(store, item)
    batch = bind(store, 1)
    store.flush()
    assert {one.state for one in read(run)} == {"scored"}
    assert {one.step for one in read(run)} == {1}
    commit(store, batch)
    store.flush()
    assert {one.state for one in read(run)} == {"trained"}


def test_turns_of_a_dead_process_are_shown_as_waiting_for_replay(run: RunDir, store: Store) -> None:
    (item,) = episodes(store, 1)
    first = turn(store, item, (2, 3), (5, 1))
    ask(store, item, "2", (7,), first, 4)
    store.update_membership([each for each in CREW if each != AGENTS])
    store.flush()
    one = read(run)[0]
    assert (one.state, one.attempt, one.holder, one.branches) == ("waiting", 1, None, 0)
    assert [(each.parent, each.recorded, each.finished) for each in one.turns] == [(None, True, True), (1, True, False)]
    matches_stored("episode_recorded", drawn(episode_view(one), 100))


def test_an_answer_of_another_policy_is_context(run: RunDir, store: Store) -> None:
    (item,) = episodes(store, 1)
    greedy = Sampling(temperature=0.0)
    opened = answer(store, OpenTurn(AGENTS, item.episode, 1, "1", None, 0, (2, 3), 4, "h", "", greedy))
    assert isinstance(opened, TurnOpened)
    sample(store, opened.turn, (5, 6))
    turn(store, item, (7,), (8, 1), opened.turn, 4)
    finish(store, item)
    store.flush()
    one = read(run)[0]
    assert [(each.foreign, each.sampled, each.trained) for each in one.turns] == [(True, 2, 0), (False, 2, 2)]
    assert (one.trained, one.branches) == (2, 1)


def test_turns_have_the_names_of_their_agents_and_the_episode_their_rewards(run: RunDir, store: Store) -> None:
    (item,) = episodes(store, 1)
    for agent in ("planner", "coder\x1b[2J", "judge"):
        opened = answer(store, OpenTurn(AGENTS, item.episode, 1, agent, None, 0, (2, 3), 4, agent=agent))
        assert isinstance(opened, TurnOpened)
        sample(store, opened.turn, (5, 6))
    rewards = {"planner": 0.25, "coder\x1b[2J": 1.0}
    assert isinstance(answer(store, FinishEpisode(AGENTS, item.episode, 1, rewards)), Denied)
    assert answer(store, FinishEpisode(AGENTS, item.episode, 1, {"planner": 0.25, "judge": 0.75})) == Done()
    store.flush()
    one = read(run)[0]
    assert [(each.agent, each.trained) for each in one.turns] == [("planner", 2), ("coder\x1b[2J", 0), ("judge", 2)]
    assert (one.reward, one.trained) == (0.5, 4)
    text = drawn(episode_view(one), 120)
    assert "reward 0.50 (judge 0.75, planner 0.25)" in text
    assert "turn 2 of coder\\x1b[2J  given 2, sampled 2 by v0  0 trained, 2 context" in text


def test_an_episode_of_an_outside_agent_may_await_its_reward(run: RunDir, store: Store) -> None:
    replica = incarnation_of("endpoint/0")
    store.update_membership([*CREW, replica])
    opened = answer(store, OpenEpisode(replica, "mine\x1b[2J"))
    assert isinstance(opened, LeasedEpisodes)
    (item,) = opened.items
    turn(store, item, (2, 3), (5, 1))
    store.flush()
    assert [(each.state, each.outside, each.holder) for each in read(run)[:1]] == [("at work", True, "endpoint/0#1")]
    assert "by an outside agent, opened at endpoint/0#1" in drawn(episode_view(read(run)[0]), 100)
    assert answer(store, FinishEpisode(replica, item.episode, 1, None, True)) == Done()
    store.flush()
    assert read(run)[0].state == "awaits reward"


def test_begun_episodes_of_the_open_evaluation_are_listed_and_none_of_their_tokens_is_trained(run: RunDir) -> None:
    store = open_agents_store(run.store, **evaluated("own"))
    assert store.report_versions(TRAINER, (Version(0, 1),)) is None
    item, _ = episodes(store, 2)
    turn(store, item, (2, 3), (5, 1))
    finish(store, item)
    store.flush()
    found = [one for one in read(run) if one.split == "eval"]
    assert [(one.state, one.sampled, one.trained) for one in found] == [("scored", 2, None), ("at work", 0, None)]
    assert "1 scored (eval), 1 at work (eval)" in drawn(episodes_view(found), 100)
    assert "item 0, of the evaluation" in drawn(episode_view(found[0]), 100)


def test_figures_of_a_step_have_the_episodes_in_progress(store: Store) -> None:
    trained, at_work = episodes(store, 4), episodes(store, 1, OTHER_AGENTS)
    for item in trained:
        turn(store, item, (2, 3), (5, 1))
        finish(store, item)
    batch = bind(store, 1)
    figures = figures_of(store, batch.number)
    assert len(at_work) == 1
    assert (figures["episodes_at_work"], figures["episodes_finished"]) == (1.0, 4.0)


def test_list_and_tree_of_episodes_are_drawn(run: RunDir, store: Store) -> None:
    played(store)
    found = read(run)
    matches_stored("episodes_80", drawn(episodes_view(found), 80))
    matches_stored("episode_tree_80", drawn(episode_view(found[0]), 80))
    matches_stored("episode_at_work", drawn(episode_view(found[1]), 100))
    matches_stored("episode_not_begun", drawn(episode_view(found[3]), 100))
    bound = msgspec.structs.replace(found[0], state="trained", step=4)
    foreign, cut = (
        msgspec.structs.replace(found[0].turns[0], **changes) for changes in ({"foreign": True}, {"trained": 1})
    )
    matches_stored("episode_trained", drawn(episode_view(msgspec.structs.replace(bound, turns=(foreign, cut))), 100))


def test_both_forms_print_json_for_programs(run: RunDir, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    played(store)
    assert main.run(["episodes", RUN, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for document in listed:
        assert_fits_its_schema("episodes", document)
    assert [(one["episode"], one["state"], one["turns"]) for one in listed] == [
        (0, "scored", 5),
        (1, "at work", 1),
        (2, "scored", 1),
        (3, "waiting", 0),
    ]
    assert main.run(["episodes", RUN, "0", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert_fits_its_schema("episode", one)
    assert one["turns"][2]["offset"] == 4
    assert {key: value for key, value in one.items() if key != "turns"} == {
        key: value for key, value in listed[0].items() if key != "turns"
    }
    assert main.run(["episodes", RUN, "0"]) == 0
    assert "branches off turn 1 after 4 of its 5 tokens" in capsys.readouterr().out


def test_episodes_that_cannot_be_shown_are_one_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.roles.trajectories.durable.log.RETRY_DELAY_S", 0.0)
    Story("plain-1").written(tmp_path)
    refused: list[tuple[list[str], int, str]] = [
        (["plain-1"], 2, "rrl: plain-1 has no episodes: its job has neither [roles.agents] nor [roles.endpoint]\n"),
        ([RUN, "3"], 2, f"rrl: {RUN} has no episode 3: it has no episodes yet\n"),
        ([RUN, "x"], 2, 'rrl: episode: must be a whole number, not "x"; see: rrl episodes --help\n'),
    ]
    for arguments, code, line in refused:
        assert main.run(["episodes", *arguments]) == code
        assert line in capsys.readouterr().err
    assert main.run(["episodes", RUN]) == 0
    assert capsys.readouterr().out == f"{RUN}: no episodes yet\n"
    store = open_agents_store(run.store)
    episodes(store, 1)
    store.flush()
    assert main.run(["episodes", RUN, "99"]) == 2
    assert f"rrl: the store of {RUN} has no episode 99; list those that it has" in capsys.readouterr().err
    store.close()
    (log,) = run.store.glob("log.*")
    written = log.read_bytes()
    log.write_bytes(b"garbage" + written)
    assert main.run(["episodes", RUN]) == 2
    assert "unreadable from byte 0 on" in capsys.readouterr().err


def test_a_log_that_is_being_written_or_replaced_is_read(run: RunDir, store: Store) -> None:
    played(store)
    before = read(run)
    (log,) = run.store.glob("log.*")
    with log.open("ab") as file:
        file.write(log.read_bytes()[-40:-3])  # a record that is only half written
    assert read(run) == before
    (run.store / "log.2").touch()  # another store has claimed the folder, and has written nothing yet
    (run.store / "log.2.2.new").write_bytes(b"half")
    assert read(run) == before


def test_control_characters_are_escaped(run: RunDir, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    played(store)
    hostile: Any = msgspec.structs.replace(read(run)[0], holder="\x1b]0;owned\x9c")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rrl.cli.agents.episodes.episodes_of", lambda state: [hostile])
        for arguments in (["episodes", RUN], ["episodes", RUN, "0"], ["episodes", RUN, "--json"]):
            assert main.run(arguments) == 0
            out = capsys.readouterr().out
            assert "\x1b" not in out
            assert "\x9c" not in out
