"""A run on the local cluster survives single failures and its manager's death, and ends without leaving processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.core.samples_file import read_steps
from rrl.core.types import NodeName, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.manager.model.state import Status
from rrl.tests.support.local_cluster import crash
from rrl.tests.support.runs import (
    LIGHT,
    RRL,
    TIMEOUT_S,
    TestRun,
    cancel,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_here,
    wait_for_run,
    without_replicas,
    write_job,
)

VICTIM = ReplicaId("rollout/1")


def _end_well(run: TestRun) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)


def test_killed_rollout_restarts_alone_and_its_prompts_continue_from_their_prefix(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False))
    before = joined_incarnations(run)
    pid = before[VICTIM][1]
    assert pid is not None
    run.hold_in_the_middle(1)
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    run.let_go(1)
    after = run.wait_back_alone(before, VICTIM)
    run.wait(lambda _: any(one.event == ev.FirstWorkDone(after[VICTIM][0]) for one in run.events()))
    run.wait_steps(run.state().step + 4)
    cancel(run)
    assert run.continued(dead=-101.0), "no trajectory that the dead rollout began was continued"
    recovery = run.summary()["recoveries"]
    assert [(r["replica"], r["rung"]) for r in recovery] == [("rollout/1", "restart in place")]
    assert None not in (recovery[0]["detect_s"], recovery[0]["weights_s"], recovery[0]["first_work_s"])


def test_killed_store_trainer_and_launcher_each_restart_alone(tmp_path: Path) -> None:
    """The store restarts from its log, the trainer from its commit, and the role of a killed launcher as a whole.

    While the store or the trainer is away no step is committed, so that the run cannot end before the last kill.
    """
    run = submit_here(tmp_path, light_job("local", 40, spares=0, warm=False))
    for replica in (ReplicaId("trajectories/0"), ReplicaId("trainer/0")):
        before = joined_incarnations(run)
        pid = before[replica][1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        run.wait_back_alone(before, replica)
    before = current_incarnations(run.state())
    step = run.state().replica(VICTIM).step
    mark = f"rrl.roles.launcher.step {run.run.launch_file(step or '')}"
    launchers = [pid for pid, command in run.processes().items() if mark in command]
    assert len(launchers) == 1
    os.kill(launchers[0], signal.SIGKILL)
    run.wait_back_alone(before, VICTIM)
    _end_well(run)
    steps = [s.event.step for s in run.events() if isinstance(s.event, ev.StepCommitted)]
    assert steps == sorted(set(steps)), "a step was committed twice"
    assert read_steps(run.run.samples, lambda _: [])[0] == list(range(1, 41)), "a step has no samples"


def _last_lines(run: TestRun) -> list[str]:
    """Return the lines of the crashed rollout that ``rrl logs --failed`` shows."""
    reported = run.call("logs", str(run.run.path), str(VICTIM), "--failed", "--json", stdout=subprocess.PIPE)
    [failure] = [json.loads(line) for line in reported.communicate(timeout=60)[0].splitlines()]
    return [line["text"] for line in failure["lines"]]


@pytest.mark.long  # test_standby.py, test_faults.py and Slurm's test_runs.py crash nodes, too
def test_a_crashed_node_is_excluded_and_its_rollout_moves_to_the_spare(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, warm=False))
    before = current_incarnations(run.wait_steps(15))
    node = before[VICTIM][2]
    assert node is not None
    crash(run.run, node)
    after = run.wait_back_alone(before, VICTIM, ReplicaId(f"agent/{node}"))
    assert after[VICTIM][2] != node
    assert run.state().nodes[NodeName(node)].excluded
    run.wait_steps(run.state().step + 4)
    cancel(run)
    assert f"{before[VICTIM][0]} is here" in _last_lines(run)


@pytest.mark.long
def test_rollout_leaves_a_third_crashed_node_although_the_breaker_keeps_that_node(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, spares=3))
    after = joined_incarnations(run)
    nodes: list[NodeName] = []
    for _ in range(3):
        before = after
        nodes.append(NodeName(before[VICTIM][2] or ""))
        crash(run.run, nodes[-1])
        after = run.wait_back_alone(before, VICTIM, *(ReplicaId(f"agent/{node}") for node in nodes))
    assert after[VICTIM][2] not in nodes
    assert [run.state().nodes[node].excluded is None for node in nodes] == [False, False, True]
    cancel(run)
    assert [recovery["rung"] for recovery in run.summary()["recoveries"]] == ["spare node"] * 3


@pytest.mark.long  # in test_manager_away.py, the next manager replaces a stopped rollout and no other role
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGUSR2], ids=["killed", "warned of its walltime"])
def test_next_manager_adopts_the_running_steps(tmp_path: Path, end: signal.Signals) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False))
    before = joined_incarnations(run)
    holder = json.loads((run.run.epochs / "000001").read_text())
    os.kill(holder["pid"], end)
    step = run.state().step
    with run.call("manage", run.run.id):
        adopted = run.wait(lambda s: s.epoch == 2 and s.step > step + 3)
        kept, now = without_replicas(before, current_incarnations(adopted), [])
        assert now == kept, "a role was replaced when the manager changed"
        cancel(run)
    assert run.summary()["recoveries"] == []


def test_ctrl_c_in_the_foreground_cancels_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path, light_job("local", 10_000, spares=0, warm=False, one_node=True))
    env = {**os.environ, RUNS_ENV: str(tmp_path / "runs")}
    argv = [RRL, "submit", "--foreground", str(job)]
    with subprocess.Popen(argv, env=env, text=True, stdout=subprocess.DEVNULL) as process:
        run = TestRun(wait_for_run(tmp_path / "runs"), lambda *_: process)
        run.wait_steps(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    assert run.state().outcome == "cancelled"
    run.wait_gone()


@pytest.mark.long  # long, because in test_user_code.py a rollout that never joins has its job rejected, too
def test_a_role_that_has_never_worked_rejects_the_job_with_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    toml = light_job("local", 10, extra='[recovery]\nfirst_start = 2\nbackoff = "100ms"\n')
    toml = toml.replace("[roles.reward]", '[roles.reward]\ncommand = ["false"]')
    run = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert state.outcome == "rejected"
    assert "2 starts of reward/0 failed, and it has never joined" in state.why, state.why
    run.wait_gone()


ROLLOUT_WITH_A_MISTAKE = """
import rrl

def load(weights):
    raise TypeError(f"Expected state_dict to be dict-like, got {type(weights).__name__}")

with rrl.join() as me:
    for work in me.work():
        load(me.new_weights())
"""


def test_exception_in_the_users_rollout_ends_the_run_within_three_starts(tmp_path: Path) -> None:
    (tmp_path / "rollout.py").write_text(ROLLOUT_WITH_A_MISTAKE)
    toml = light_job("local", 10, rollouts=1, spares=0, warm=False, one_node=True)
    run = submit_here(tmp_path, toml.replace(f"{LIGHT}/light_rollout.py", "rollout.py"))
    state = run.wait_end()
    assert state.outcome == "failed"
    mistake = "rollout/0: TypeError: Expected state_dict to be dict-like, got NewWeights (rollout.py:5)"
    assert state.why.startswith(f"{mistake}; this exception ended 3 starts in a row"), state.why
    assert state.replica(ReplicaId("rollout/0")).incarnation_number == 3
    run.wait_gone()
    check_sound(run.run)


def test_configuration_that_a_role_finds_invalid_rejects_the_run_at_its_first_start(tmp_path: Path) -> None:
    toml = light_job("local", 10, rollouts=1, spares=0, warm=False, one_node=True).replace(
        'function = "light_task:make"', 'dataset = "no_such_dataset"'
    )
    env = {**os.environ, RUNS_ENV: str(tmp_path / "runs")}
    argv = [RRL, "submit", "--wait", str(write_job(tmp_path, toml))]
    ended = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=TIMEOUT_S)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    run = TestRun(wait_for_run(tmp_path / "runs"), subprocess.Popen[str])
    state = run.state()
    assert state.outcome == "rejected"
    assert re.match(
        r"(reward|trajectories)/0: \[task\] dataset: \"no_such_dataset\" is not a dataset of reasoning-gym", state.why
    ), state.why
    assert {replica.incarnation_number for replica in state.replicas.values()} == {1}
    assert all(line in ended.stdout for line in ("rejected", "no_such_dataset"))
    run.wait_gone()


def test_no_replica_has_two_current_incarnations(tmp_path: Path) -> None:
    """A frozen rollout is replaced, and exits once it continues, because it receives the message that it is fenced."""
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False, one_node=True))
    before = joined_incarnations(run)
    pid = before[VICTIM][1]
    assert pid is not None
    os.killpg(os.getpgid(pid), signal.SIGSTOP)
    run.wait(lambda s: s.replica(VICTIM).incarnation_number == 2)
    fenced: list[Any] = [s.event.action for s in run.events() if isinstance(s.event, ev.Decided)]
    assert [a.incarnation.number for a in fenced if isinstance(a, Fence)] == [1]
    run.wait(lambda s: s.replica(VICTIM).status is Status.JOINED)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    check_sound(run.run)
