"""``rrl samples`` shows what the store of a run has kept of a step, while the store has its files open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import rrl
from rrl.cli import main
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec, SamplesSpec, TokenizerSpec
from rrl.roles.trajectories.sample_writer import SampleWriter
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Done, Score, Scoring
from rrl.tests.support.cli.json_keys import assert_fits_its_schema
from rrl.tests.support.cli.story import Story, job_view
from rrl.tests.support.roles.trajectories.agents import CREW, episodes, finish, open_agents_store, turn
from rrl.tests.support.roles.trajectories.crew import BATCH, GROUP, REWARD, bind, commit, generate, open_store

RUN = "small-7"
HOSTILE = "\x1b]0;owned\x07 \u202etxt [red]x[/red] <script>alert(1)</script>"
PER_STEP = 2


def job() -> RunSpec:
    made = job_view()
    pieces = ("one", "two", "three", "four", HOSTILE, "six")  # the tokens from 2 on
    model = msgspec.structs.replace(made.model, tokenizer=TokenizerSpec(pieces, join=" "))
    return msgspec.structs.replace(made, model=model, samples=SamplesSpec(PER_STEP))


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("COLUMNS", "200")
    return Story(RUN, job()).written(root)


@pytest.fixture
def store(run: RunDir) -> Iterator[Store]:
    opened = open_store(run.store, samples=SampleWriter(run.samples, job()))
    yield opened
    opened.close()


def trained(store: Store, number: int, token: int = 0) -> None:
    """Train a step of two groups; the rewards of its trajectories are 0, 1, 2 and 3."""
    generate(store, at_most=BATCH * GROUP, tokens=(token or number % 6 + 2, 7, 1))
    answer = store.lease_scoring(REWARD, BATCH * GROUP)
    assert isinstance(answer, Scoring)
    scores = [Score(item.trajectory, index, index, {"style": index / 2}) for index, item in enumerate(answer.items)]
    assert store.post_scores(REWARD, scores) == Done()
    commit(store, bind(store, number))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main.run(["samples", RUN, *words]) == 0
    return capsys.readouterr().out


def test_the_newest_step_is_shown_with_text_scores_and_advantage(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        trained(store, number)
    out = shown(capsys)
    assert out.startswith(f"step 2 of {RUN}   2 of 4 trajectories\n")
    for text in ("prompt\n  one two", "answer\n  three six <eos>\n", "advantage +0.", "style 1.50", "weights v0"):
        assert text in out
    assert "<eos>" not in shown(capsys, "2", "--tokens")
    assert "  4 7 1\n" in shown(capsys, "2", "--tokens")


def test_json_has_every_field_of_every_selected_trajectory(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    trained(store, 1)
    document = json.loads(shown(capsys, "1", "--best", "9", "--json"))
    assert_fits_its_schema("samples", document)
    assert (document["run"], document["step"], document["trajectories"], document["kept"]) == (RUN, 1, 4, 4)
    assert [one["reward"] for one in document["samples"]] == [3, 2, 1, 0]
    assert document["samples"][0]["turns"][1] == {
        "sampled": True,
        "trained": True,
        "text": "two six <eos>",
        "tokens": [],
    }


def test_programs_get_the_samples_that_the_command_prints(store: Store) -> None:
    trained(store, 1)
    found = rrl.run(RUN).samples(1, best=2, grep="two SIX")
    assert (found.step, found.trajectories, [one.reward for one in found.samples]) == (1, 4, [3, 2])
    assert found.samples[0].answer == "two six <eos>"
    assert rrl.run(RUN).samples(tokens=True).samples[0].turns[1].tokens == (3, 7, 1)
    with pytest.raises(rrl.UsageError, match="exclude each other"):
        rrl.run(RUN).samples(best=1, worst=1)


@pytest.mark.parametrize(
    ("words", "trajectories"),
    [
        ((), 2),
        (("--best", "1"), [3]),
        (("--worst", "2"), [0, 1]),
        (("--group", "1"), [2, 3]),
        (("--grep", "TWO six"), [0, 1, 2, 3]),
        (("--grep", "absent"), []),
        (("--group", "1", "--worst", "1"), [2]),
    ],
)
def test_selection_looks_through_all_trajectories_that_the_store_has(
    store: Store, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], trajectories: list[int] | int
) -> None:
    trained(store, 1)
    found = [one["trajectory"] for one in json.loads(shown(capsys, "1", *words, "--json"))["samples"]]
    assert found == trajectories or len(found) == trajectories


def test_an_older_step_is_shown_from_what_was_kept(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 6):
        store = open_store(run.store, samples=SampleWriter(run.samples, job()))
        trained(store, number)
        store.close()
    found = json.loads(shown(capsys, "1", "--best", "4", "--json"))
    assert (found["trajectories"], found["kept"], len(found["samples"])) == (4, PER_STEP, PER_STEP)
    assert "only 2 trajectories of the step are kept" in shown(capsys, "1", "--best", "1")
    assert shown(capsys, "5").startswith("step 5")


def test_conversation_of_an_agent_is_shown_turn_by_turn(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_agents_store(run.store, CREW, samples=SampleWriter(run.samples, job()))
    for item in episodes(store, 4):
        first = turn(store, item, (2, 3), (4, 5))
        turn(store, item, (7,), (2, 1), first, 4)
        finish(store, item)
    commit(store, bind(store, 1))
    assert "prompt\n  one two\nanswer\n  three four\ngiven\n  six\nanswer\n  one <eos>\n" in shown(capsys)


def test_text_of_the_model_cannot_command_the_terminal(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    trained(store, 1, token=6)
    for words in ((), ("--json",)):
        out = shown(capsys, *words)
        assert not set(out) & {"\x1b", "\x07", "\u202e"}
        assert "[red]x[/red] <script>alert(1)</script>" in out


# ── what is wrong ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("9",), f"step 9 of {RUN} is not committed; its newest committed step is 6"),
        (("1",), f"no samples of step 1 of {RUN} are kept; kept are steps 2-6"),
        (("6", "--group", "99"), f"step 6 of {RUN} has no group 99; it has groups 10-11"),
        (("6", "--best", "1", "--worst", "1"), "best and worst exclude each other; give one of them"),
        (("6", "--grep", "x", "--tokens"), "grep looks for text, and with tokens there is none; give one of them"),
        (("6", "--best", "0"), '--best: must be at least 1, not "0"; see: rrl samples --help'),
    ],
)
def test_invalid_request_is_one_line_and_exit_code_2(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    for number in range(1, 7):
        first = number < 4  # the store that is opened then still has the tokens of steps 2 and 3
        store = open_store(run.store, samples=None if first else SampleWriter(run.samples, job()))
        trained(store, number)
        store.close()
    assert main.run(["samples", RUN, *words]) == 2
    assert capsys.readouterr().err == f"rrl: {message}\n"


def test_run_without_a_committed_step_is_one_line_and_exit_code_2(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["samples", RUN]) == 2
    assert capsys.readouterr().err == f"rrl: {RUN} has no committed step yet\n"


def test_tokenizer_that_cannot_be_opened_here_is_one_line_and_tokens_are_shown(
    run: RunDir, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(store, 1)
    elsewhere = msgspec.structs.replace(job().model, path="/nowhere/model")
    run.run_spec.write_bytes(msgspec.json.encode(msgspec.structs.replace(job(), model=elsewhere)))
    assert main.run(["samples", RUN]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rrl: the tokenizer of {RUN} cannot be opened here: ")
    assert line.endswith(f"; to see the tokens: rrl samples {RUN} --tokens")
    assert "  3 7 1\n" in shown(capsys, "--tokens")


def test_file_that_is_being_written_is_read_without_error(
    run: RunDir, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(store, 1)
    trained(store, 2)
    [path] = run.samples.iterdir()
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert shown(capsys, "2", "--best", "1").startswith("step 2")
        assert shown(capsys, "--tokens").startswith("step ")
