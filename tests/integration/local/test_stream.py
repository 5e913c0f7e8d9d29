"""With ``[sampling] stream``, training of a step begins before the step is complete.

After a death of the trainer, the step has the same parts as before. In test_built_in_trainer.py, the built-in trainer
trains the example in parts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from rrl.core.types import ReplicaId
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_here

TRAINER, STORE = ReplicaId("trainer/0"), ReplicaId("trajectories/0")
SLOW = 1
"""Index of the rollout that is stopped in the middle of its work."""
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
        light_job("local", 30, spares=0, warm=False, one_node=True)
        .replace("prompts_per_step = 2", "prompts_per_step = 3")
        .replace("[sampling]", STREAM)
    )
    run = submit_here(tmp_path, toml)
    run.wait_steps(1)
    run.hold_in_the_middle(SLOW)
    state = run.wait(lambda state: "the trainer waits for" in state.replica(STORE).note)
    first = _parts(run, 1)
    step, index = max(first)
    assert not first[step, index]["last"], (
        "the newest step was already complete without the groups of the stopped rollout"
    )
    assert len({number for number, _ in first}) > 1

    pid = state.replica(TRAINER).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(TRAINER).incarnation_number == 2 and all_work(state))
    run.wait(lambda _: (step, index) in _parts(run, 2))
    second = _parts(run, 2)
    assert second == {key: part for key, part in first.items() if key[0] == step}, (
        "the restarted trainer did not receive exactly the earlier parts of the open step"
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
    assert third[step, 0]["groups"][: len(begun)] == begun, (
        "the groups that were bound to the step are no longer its first groups"
    )
    assert set(third) == {(number, 0) for number in range(step, 31)}
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert audit["max_age"] <= 1
    assert set(audit["dropped"]) <= {"the run is complete"}
