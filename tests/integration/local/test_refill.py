"""With ``[sampling] refill`` each step drops as many groups without signal as the limit says, whatever is killed.

All answers of the light roles are right, so no group has a signal, and the limit ends each wait.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.core.types import ReplicaId
from rrl.roles.trajectories.durable.records import NO_SIGNAL
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_here

STEPS, GROUPS, SIZE, TOKENS = 16, 2, 4, 5
DROPPED = 3
"""Number of groups that a step drops."""
REFILL = f"[sampling]\nstream = true\nrefill = true\nrefill_limit = {DROPPED / GROUPS}"


def _kill(run: TestRun, victim: ReplicaId, after: int) -> None:
    """Kill a replica once a step is committed, and wait for its next incarnation."""
    before = run.wait(lambda state: state.step >= after and all_work(state)).replica(victim)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(victim).incarnation_number > before.incarnation_number)


@pytest.mark.timeout(600)
def test_each_step_drops_the_same_number_of_groups_after_kills_of_store_and_trainer(tmp_path: Path) -> None:
    extra = '[recovery]\nbackoff = "100ms"\nper_node = 50\nper_replica = 50\n'
    toml = light_job("local", STEPS, spares=0, warm=False, one_node=True, extra=extra)
    run = submit_here(tmp_path, toml.replace("[sampling]", REFILL))
    for step, victim in ((1, "trajectories/0"), (3, "trainer/0"), (5, "trajectories/0"), (7, "rollout/0")):
        _kill(run, ReplicaId(victim), step)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)

    out = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    steps = [row["metrics"] for row in map(json.loads, out.splitlines()) if row["step"]]
    figures = [(one["reward"], one["no_signal"], one["truncated"], one["sampled_tokens"]) for one in steps]
    assert figures == [(1.0, 1.0, 0.0, (GROUPS + DROPPED) * SIZE * TOKENS)] * STEPS
    dropped = json.loads((run.run.store / "audit.json").read_bytes())["dropped"][NO_SIGNAL]
    assert dropped // SIZE in range(STEPS * DROPPED, (STEPS + 1) * DROPPED + 1)
