"""Runs on the local cluster with vLLM rollouts survive deaths; all other roles are the usual ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrl.core.launch import LAUNCH_ENV
from rrl.core.processes import read_process
from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, all_work, check_sound, submit_here

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TIMEOUT_S = 400.0
"""Time limit for a condition (s). vLLM takes 10 s to start on two idle cores, and minutes on busy cores."""
ROLLOUT, VICTIM = ReplicaId("rollout/0"), ReplicaId("rollout/1")


def _job(steps: int, rollouts: int, *, vllm: str = "", extra: str = "") -> str:
    return f"""
[run]
name = "vllm"
steps = {steps}
[cluster]
kind = "local"
spares = 0
node = {{ cpus = 2, mem = "4GiB" }}
[task]
dataset = "spiral_matrix"
args = {{ min_n = 2, max_n = 2 }}
prompt = "{{metadata[matrix]}}="
[model]
head_dim = 32
tokenizer = {{ pieces = "0123456789=", join = " ", ignore = "[], " }}
[sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 12
temperature = 0.9
[roles.trainer]
warm = false
[roles.rollout]
replicas = {rollouts}
engine = "vllm"
vllm = {{ {vllm} }}
mem = "2GiB"
segment_tokens = 4
[limits]
heartbeat = "1s"
silence = "60s"
poll = "2s"
step_grace = "60s"
{extra}
"""


@pytest.mark.long  # test_examples.py has a run in which a rollout is killed
def test_run_learns_from_vllm_rollouts_and_continues_while_a_killed_one_restarts(tmp_path: Path) -> None:
    with _running(tmp_path, _job(100_000, 2)) as run:
        victim = run.wait(lambda s: s.step >= 3 and all_work(s), timeout_s=TIMEOUT_S).replica(VICTIM)
        os.kill(victim.pid or 0, signal.SIGKILL)
        back = victim.incarnation_number + 1
        run.wait(
            lambda s: s.replica(VICTIM).incarnation_number == back and s.replica(VICTIM).weight_version is not None,
            TIMEOUT_S,
        )
        held = run.state().step
        run.wait(lambda s: s.step >= held + 3, timeout_s=TIMEOUT_S)
    check_sound(run.run)
    drifts = [s.event.metrics["drift"] for s in run.events() if isinstance(s.event, ev.StepCommitted)]
    print(f"{len(drifts)} steps; drift of the last: {drifts[-1]:.1e}")
    ends = [s.event for s in run.events() if isinstance(s.event, ev.StepEnded)]
    assert [end.incarnation.replica for end in ends if end.signal == signal.SIGKILL] == [VICTIM], (
        "a replica besides the victim was killed by SIGKILL"
    )
    assert not [end.incarnation.replica for end in ends if end.code], "a replica failed that the test had not killed"


def test_rollout_ends_with_all_its_vllm_workers_when_one_of_them_dies(tmp_path: Path) -> None:
    with _running(tmp_path, _job(100_000, 1, vllm="tensor_parallel_size = 2")) as run:
        first = run.wait(lambda s: s.step >= 1, timeout_s=TIMEOUT_S).replica(ROLLOUT)
        workers = _workers(run, first.step or "")
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        _wait_gone(workers)
        second = run.wait(lambda s: s.replica(ROLLOUT).incarnation_number == first.incarnation_number + 1, TIMEOUT_S)
        ended = next(s.event for s in run.events() if isinstance(s.event, ev.StepEnded) and s.event.step == first.step)
        assert ended.code not in (0, None)
        second = run.wait(lambda s: s.replica(ROLLOUT).weight_version is not None and s.step > second.step, TIMEOUT_S)
        workers = _workers(run, second.replica(ROLLOUT).step or "")
        assert len(workers) == 2
        os.kill(second.replica(ROLLOUT).pid or 0, signal.SIGKILL)
        _wait_gone(workers)


@contextmanager
def _running(folder: Path, toml: str) -> Iterator[TestRun]:
    """Yield a run; after the block, cancel it and wait for its end, even if the test has failed."""
    run = submit_here(folder, toml)
    try:
        yield run
    finally:
        if run.state().outcome is None:
            with run.call("cancel", run.run.id) as process:
                assert process.wait(120) == 0
        run.wait_gone(120)


def _workers(run: TestRun, step: str) -> list[int]:
    """Return vLLM's worker processes of one step, which carry the step's mark in their environment."""
    mark = f"{LAUNCH_ENV}={run.run.launch_file(step)}".encode()
    found = []
    for pid, command in run.processes().items():
        try:
            marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marked and command.startswith("VLLM::Worker"):
            found.append(pid)
    return found


def _wait_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while left := [pid for pid in pids if read_process(pid) is not None]:
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.1)
