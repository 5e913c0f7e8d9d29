"""A run survives nodes that lose their network connection and get it back.

These tests are collected only if network namespaces are possible.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rrl.cluster.base import NodeState
from rrl.core.launch import ExitReason, read_exit
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Shrink, StopStep
from rrl.manager.storage.lease import holder
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.runs import (
    TestRun,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.long  # rrl.tests.support.slurm.versions -- -m slurm runs these tests on each version

ROLLOUTS = (ReplicaId("rollout/0"), ReplicaId("rollout/1"))


def test_delayed_rollout_is_kept_and_a_cut_off_one_is_replaced_and_stopped_later(isolated_lab: SlurmLab) -> None:
    run = submit_on(isolated_lab, "cut", light_job("slurm", 100_000, spares=1))
    before = joined_incarnations(run)
    manager = holder(run.run)
    assert manager is not None
    victim = next(rollout for rollout in ROLLOUTS if before[rollout][2] != manager.host)
    incarnation, pid, node = before[victim]
    replica = run.state().replica(victim)
    step, first_process = replica.step, replica.admitted_process
    assert pid is not None
    assert node is not None
    assert step is not None
    assert first_process is not None
    isolated_lab.delay(node, 100)
    begun = run.state().step
    delayed = current_incarnations(run.wait(lambda state: state.step > begun + 5))
    assert delayed == before, "a replica was replaced because its node was delayed"
    isolated_lab.cut(node)
    try:
        after = run.wait_back_alone(before, victim, ReplicaId(f"agent/{node}"))
        assert after[victim][2] != node
        assert _runs(pid), "the process ended while its node was cut off"
    finally:
        isolated_lab.heal(node)
    isolated_lab.wait_for(lambda: not _runs(pid), f"{incarnation} keeps running")
    ended_by = _ended_by(run, incarnation, node, step, first_process.pid)
    assert ended_by, (read_exit(run.run.exit_file(step)), run.events()[-100:])
    healed_at = run.state().step
    run.wait(lambda state: state.step > healed_at + 3)
    kept, now = without_replicas(after, current_incarnations(run.state()), [ReplicaId(f"agent/{node}")])
    assert now == kept, "another replica was affected by the node that came back"
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    check_sound(run.run)


def _ended_by(run: TestRun, incarnation: Incarnation, node: str, step: str, first_process: int) -> str:
    """Return which component ended the incarnation on the node that came back, or "" if none did.

    The first process of the incarnation's step, with the pid ``first_process``, records how it ended. The record is
    missing if Slurm killed the whole step, for one of these reasons:

    - Slurm had set the node down.
    - The manager requested the stop of the step.
    - The manager had removed the node from the allocation (Shrink), so that slurmd ended the job on the returned node.
      In this case the first process must be gone.
    """
    until = time.monotonic() + 120
    while (record := read_exit(run.run.exit_file(step))) is None and time.monotonic() < until:
        for stamped in run.events():
            match stamped.event:
                case ev.NodeChanged(node=changed, status=status) if (changed, status.state) == (node, NodeState.DOWN):
                    return "Slurm"
                case ev.Intended(action=StopStep(step=stopped)) if stopped == step:
                    return "Slurm"
                case ev.Intended(action=Shrink(nodes=removed)) if node in removed and not _runs(first_process):
                    return "Slurm"
        time.sleep(0.5)
    if record is None:
        return ""
    if record.code == FENCED_EXIT or record.reason in (ExitReason.NOT_ADMITTED, ExitReason.FENCED, ExitReason.STOPPED):
        return "the manager"  # the manager ended the step itself, or let Slurm end it
    logs = "".join(path.read_text() for path in run.run.logs.glob(f"{step}*"))
    return "the store" if f"{incarnation} was succeeded" in logs else ""


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
