"""Nodes that a run excludes on a real Slurm are vacated, drained where permitted, released and used again."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Drain, Exclude, Readmit, Shrink, Undrain
from rrl.tests.support.runs import (
    TIMEOUT_S,
    TestRun,
    all_work,
    check_sound,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = [pytest.mark.long, pytest.mark.slurm]

R0, R1, STORE = ReplicaId("rollout/0"), ReplicaId("rollout/1"), ReplicaId("trajectories/0")


def output_of(run: TestRun, *words: str) -> str:
    process = run.call(words[0], run.run.id, *words[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, f"{err}\n{run._account()}"
    return str(out)


def shown(lab: SlurmLab, node: str) -> str:
    text = lab.slurm("scontrol", "show", "node", "-o", node)
    return text.partition(" State=")[2].split()[0] + ": " + text.partition(" Reason=")[2].partition(" [")[0].strip()


def node_actions(run: TestRun) -> list[str]:
    """Return the tags of the actions of the run that concern single nodes."""
    kinds = (Exclude, Readmit, Drain, Undrain, Shrink)
    actions = [s.event.action for s in run.events() if isinstance(s.event, ev.Intended | ev.Decided)]
    return [action.tag for action in actions if isinstance(action, kinds)]


def node_of(run: TestRun, replica: ReplicaId) -> NodeName:
    node = run.state().replica(replica).node
    assert node is not None
    return node


def end(run: TestRun) -> None:
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    run.wait_end()
    run.wait_gone()
    check_sound(run.run)


def test_plain_user_can_exclude_a_node_which_the_run_gives_back(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "leave", light_job("slurm", 100_000, spares=1))
    before = joined_incarnations(run)
    node = node_of(run, R0)
    out = output_of(run, "drain", node, "--reason", "fan is loud")
    try:
        if slurm_lab.user == "root":
            return
        assert out.startswith(f"this run no longer uses {node}; its drain is requested in summary.json"), out
        state = run.wait(lambda s: all_work(s) and s.nodes[node].allocation == "")
        assert node_of(run, R0) != node
        assert state.replica(R0).failures == ()
        kept, now = without_replicas(before, current_incarnations(state), [R0, ReplicaId(f"agent/{node}")])
        assert now == kept, "another replica was affected"
        assert node_actions(run) == [f"{node}!exclude", f"{node}!drain", f"{run.run.id}.pool!shrink:{node}"]
        slurm_lab.wait_states({node: "idle"})
        run.wait_steps(state.step + 3)
    finally:
        end(run)
        slurm_lab.clear()
    (request,) = run.summary()["drain_requests"]
    assert (request["node"], request["requested_by"]) == (node, f"{slurm_lab.user}: fan is loud")
    assert "this user may not drain nodes" in request["drain_error"]


def test_replica_restarts_on_its_node_after_its_job_has_lost_another_node(slurm_lab: SlurmLab) -> None:
    """A replica restarts on its node although Slurm 22.05 does not free the cores of its previous step.

    The reason is that the job has become smaller since the start of that step, the first one of the store.
    """
    run = submit_on(slurm_lab, "smaller", light_job("slurm", 100_000, spares=1))
    joined_incarnations(run)
    node = node_of(run, R0)
    try:
        output_of(run, "drain", node)
        store = run.wait(lambda s: all_work(s) and s.nodes[node].allocation == "").replica(STORE)
        assert store.pid is not None
        assert store.incarnation is not None
        os.kill(store.pid, signal.SIGKILL)
        successor = Incarnation(STORE, store.incarnation.number + 1)
        state = run.wait(lambda s: all_work(s) and s.replica(STORE).incarnation not in (None, store.incarnation))
        assert (state.replica(STORE).incarnation, state.replica(STORE).node) == (successor, store.node)
        run.wait_steps(state.step + 3)
    finally:
        end(run)
        slurm_lab.clear()


def test_administrators_run_drains_and_undrains_a_lost_node_but_no_other() -> None:
    """The run of an administrator drains and undrains a lost node, but no other node.

    Slurm sets the lost node down long after the run has excluded it. Otherwise Slurm would take the node from the run
    at once, without a drain. The exclusion lasts longer than the restart of the rollout on another node, after which
    the lost node is released.
    """
    recovery = '[recovery]\nbackoff = "100ms"\nexclusion = "45s"\nbreaker = 1.0\n'
    with SlurmLab.start(nodes=6, accounting=True, slurmd_timeout=int(2 * TIMEOUT_S)) as lab:
        lab.slurm("sacctmgr", "-i", "modify", "user", lab.user, "set", "adminlevel=Administrator")
        run = submit_on(lab, "admin", light_job("slurm", 100_000, spares=1, extra=recovery))
        run.wait_steps(2)
        node = node_of(run, R0)
        own_reason = f"rrl:{run.run.id}:node: node lost: manager: agent agent/{node} 1 is silent"[:60]
        lab.crash(node)
        run.wait(lambda s: s.nodes[node].drain_reason)
        assert shown(lab, node).partition(": ")[2].startswith(own_reason.partition(" agent/")[0])
        run.wait(lambda s: all_work(s) and s.nodes[node].allocation == "")
        lab.up(node)
        run.wait(lambda s: s.nodes[node].excluded is None and not s.nodes[node].drain_reason)
        lab.wait_states({node: "idle"})
        other = node_of(run, R1)
        lab.slurm("scontrol", "update", f"NodeName={other}", "State=DRAIN", "Reason=bad fan")
        out = output_of(run, "drain", other)
        assert "bad fan" in out, out
        run.wait(all_work)
        assert node_of(run, R1) != other
        assert node_actions(run)[:5] == [
            f"{node}!exclude",
            f"{node}!drain",
            f"{run.run.id}.pool!shrink:{node}",
            f"{node}!readmit",
            f"{node}!undrain",
        ]
        end(run)
        assert "bad fan" in shown(lab, other)
