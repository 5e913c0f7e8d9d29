"""Each due step of a run gets one evaluation result, whatever is killed, and no step trains on the answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.storage.lease import holder
from rrl.roles.trajectories.durable.records import FIRST_EVALUATED
from rrl.tests.support.runs import RRL, TestRun, all_work, check_sound, light_job, submit_here
from rrl.tests.support.trackers.sent_steps import sent

STEPS, EVERY, COUNT, SAMPLES = 12, 4, 40, 2
DUE = [0, 4, 8, 12]
EVALUATION = f"""
[recovery]
backoff = "100ms"
[eval]
every = {EVERY}
count = {COUNT}
samples = {SAMPLES}
temperature = 1.0
task = {{ function = "light_task:make" }}
"""
"""Tables for an evaluation that lasts over a second, so that a kill happens during it.

It has 80 answers of five tokens of 50 ms, in rounds of 16.
"""


def _wait_evaluating(run: TestRun, step: int) -> None:
    """Wait until all roles work, and the evaluation of a step has no result yet."""
    run.wait(lambda state: state.step >= step and state.evaluated < step and all_work(state))


def _kill(run: TestRun, replica: str) -> None:
    before = run.state().replica(ReplicaId(replica))
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    run.wait(lambda state: state.replica(ReplicaId(replica)).incarnation_number > before.incarnation_number)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.long)], ids=["batches", "parts"])
def test_each_evaluation_is_there_once_after_kills_of_every_role_and_the_manager(tmp_path: Path, stream: bool) -> None:
    toml = light_job("local", STEPS, spares=0, warm=False, one_node=True, extra=EVALUATION)
    run = submit_here(tmp_path, toml.replace("[sampling]", f"[sampling]\nstream = {str(stream).lower()}"))
    for step, victims in ((0, ["rollout/0"]), (4, ["trajectories/0", "reward/0"]), (8, ["trainer/0"])):
        _wait_evaluating(run, step)
        for victim in victims:
            _kill(run, victim)
    _wait_evaluating(run, STEPS)
    managing = holder(run.run)
    assert managing is not None
    os.kill(managing.pid, signal.SIGKILL)
    with run.call("manage", run.run.id, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)

    recorded = [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.Evaluated)]
    assert [event.step for event in recorded] == DUE
    for event in recorded:
        shares = dict.fromkeys(("reward", "pass@1", "avg@2", "pass@2"), 1.0)
        assert event.metrics == {"count": COUNT * SAMPLES, **shares, "completion_len": 5.0, "truncated": 0.0}
    for path in (run.run.path / "batches").glob("*.json"):
        assert all(one["id"] < FIRST_EVALUATED for one in json.loads(path.read_text()))
    assert [one["step"] for one in run.summary()["evaluations"]] == DUE

    out = run.call("metrics", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows if row["step"] is not None] == list(range(STEPS + 1))
    assert {row["step"]: row["evaluation"]["step"] for row in rows if row["evaluation"]} == {step: step for step in DUE}
    shown = run.call("status", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0]
    assert f"step {STEPS} · pass@1 1.00 (1.00 at step 0)" in shown
    done = subprocess.run([RRL, "track", str(run.run.path), "--to", "tensorboard"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sent(run.run, "tensorboard", "eval/reward") == [(step, 1.0) for step in DUE]
