"""``[sampling] stream`` in whole runs: a step begins before it is complete, and is the same after its trainer died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_here

TRAINER, STORE = ReplicaId("trainer/0"), ReplicaId("trajectories/0")
SLOW = 1
"""Index of the rollout that is stopped in the middle of its work."""
EXAMPLES = Path(__file__).parents[3] / "examples"
TORCH_TIMEOUT_S = 240.0
STREAM = "[sampling]\nstream = true\nstaleness = 1"


def _parts(run: TestRun, incarnation: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the content of each part that this incarnation of the trainer received, by (step, index)."""
    found = {}
    for path in (run.run.path / "parts").glob(f"[0-9]*.{incarnation}.json"):
        step, index, _, _ = path.name.split(".")
        found[int(step), int(index)] = json.loads(path.read_text())
    return found


def test_open_step_outlives_its_trainer_and_a_resume_that_waits_for_whole_batches(tmp_path: Path) -> None:
    toml = (
        light_job("local", 30, spares=0, warm=False)
        .replace("prompts_per_step = 2", "prompts_per_step = 3")
        .replace("[sampling]", STREAM)
    )
    run = submit_here(tmp_path, toml)
    run.wait_steps(1)
    run.hold_in_the_middle(SLOW)
    state = run.wait(lambda state: "the trainer waits for" in state.replica(STORE).note)
    first = _parts(run, 1)
    step, index = max(first)
    assert not first[step, index]["last"], "the step waits for the groups of the stopped rollout, but began before"
    assert len({number for number, _ in first}) > 1

    pid = state.replica(TRAINER).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation_number == 2 and all_work(state))
    run.wait(lambda _: (step, index) in _parts(run, 2))
    second = _parts(run, 2)
    assert second == {key: part for key, part in first.items() if key[0] == step}, (
        "the same parts come again, no others"
    )

    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    assert run.wait_end().step == step - 1
    run.let_go(SLOW)
    other = tmp_path / "other.toml"
    other.write_text(toml.replace("stream = true", "stream = false"))
    with run.call("resume", run.run.id, "--job", str(other), stdout=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
    run.wait_resumed()
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 30), state.why
    run.wait_gone()
    check_sound(run.run)
    third = _parts(run, state.replica(TRAINER).incarnation_number)
    assert [third[step, 0]["last"], len(third[step, 0]["groups"])] == [True, 3]
    begun = [group for key in sorted(second) for group in second[key]["groups"]]
    assert third[step, 0]["groups"][: len(begun)] == begun, "what was bound to the step stays bound to it"
    assert set(third) == {(number, 0) for number in range(step, 31)}
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["max_age"] <= 1
    assert set(audit["dropped"]) <= {"the run is complete"}


@pytest.mark.torch
def test_example_trains_in_parts_although_its_trainer_dies(tmp_path: Path) -> None:
    toml = (EXAMPLES / "stream.toml").read_text()
    for old, new in (
        ("\nsteps = 300", "\nsteps = 16"), ('at = "step=60"', 'at = "step=4"'),
        ("spares = 1", "spares = 0"), ("replicas = 2", "replicas = 1"),  # each process loads torch: 4 s of CPU
    ):  # fmt: skip
        assert toml.count(old) == 1, old
        toml = toml.replace(old, new)
    run = submit_here(tmp_path, toml)
    state = run.wait_end(TORCH_TIMEOUT_S)
    assert (state.outcome, state.step) == ("completed", 16), state.why
    assert state.replica(TRAINER).incarnation_number == 2
    run.wait_gone()
    check_sound(run.run)
    commits = {one.event.step: one.event.metrics for one in run.events() if isinstance(one.event, ev.StepCommitted)}
    assert max(metrics["parts"] for metrics in commits.values() if metrics) > 1, "every step waited for its last group"
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["max_age"] <= state.job.sampling.staleness
    assert set(audit["dropped"]) <= {"the run is complete"}
