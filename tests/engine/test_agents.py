"""The shipped example and an agent that was not written for rrl run with vLLM, without changes of their code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rrl.examples.smollm2 import make_model
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import TurnCreated, decode
from rrl.tests.support.engine.engines import ATOL
from rrl.tests.support.runs import TestRun, check_sound, submit_here

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

THIRD_PARTY = Path(__file__).parents[2] / "examples" / "third_party_agent"
TIMEOUT_S = 2400.0
"""Time limit of a run (s); a run takes three minutes on two idle cores."""
LAYERS = 4
"""Layers, of 30, that are left of the model whose answers are of no use anyway."""


@pytest.fixture(autouse=True, scope="module")
def smollm2() -> None:
    """Make the model's folders as ``make smollm2`` does; once per machine."""
    subprocess.run([sys.executable, make_model.__file__], check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the test's folder, and remove it afterwards.

    pytest would keep the folders of three sessions, and each step of SmolLM2 leaves a checkpoint of 1.6 GB.
    """
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_third_party_agent_runs_unchanged_and_its_turns_are_trained(folder: Path) -> None:
    shutil.copy(THIRD_PARTY / "agent.py", folder)
    job = (THIRD_PARTY / "job.toml").read_text()
    model = tomllib.loads(job)["model"]["path"]
    assert model == str(make_model.FOLDER)
    _save_first_layers(make_model.FOLDER.expanduser(), folder / "model")
    run = submit_here(folder, job.replace(model, str(folder / "model")))
    state = run.wait_end(TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", 2), state.why
    run.wait_gone(120)
    check_sound(run.run)
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["trained"] == 2 * 2
    assert set(audit["dropped"]) <= {"the run is complete"}, "an agent failed"
    turns = turns_by_episode(run)
    assert max(turns.values()) > 1, "the agent made no second call"


def test_trained_tokens_of_branching_conversations_are_those_that_vllm_sampled(folder: Path) -> None:
    from rrl.benchmarks import _agents_drift

    # more than three steps: rollouts may sample three steps before the first new weights arrive
    drift = _agents_drift.measure(folder, steps=5)
    print(drift)
    assert drift.token_drift == 0
    assert drift.max_logprob_error < ATOL
    assert drift.trained_tokens > 500
    assert drift.turns > 2 * drift.episodes, "an episode has no second turn"
    assert drift.samples > drift.episodes, "no episode has a branch"
    assert drift.versions > 1, "no tokens were sampled with new weights"


def _save_first_layers(source: Path, folder: Path) -> None:
    """Save a model of the first layers of another one, with its tokenizer and its chat template."""
    model = AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=LAYERS)
    model.save_pretrained(folder)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def turns_by_episode(run: TestRun) -> Counter[int]:
    """Return the number of turns of each episode in the store's log."""
    log = max(run.run.store.glob("log.*[0-9]"), key=lambda path: int(path.suffix[1:]))
    return Counter(each.episode for each in map(decode, read_frames(log)) if isinstance(each, TurnCreated))
