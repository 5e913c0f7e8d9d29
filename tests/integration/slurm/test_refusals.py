"""Runs on a real Slurm outlast a full submit limit, and nodes that are to be rebooted once they are idle."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from rrl.cluster.base import NodeState, RejectReason
from rrl.core.types import NodeName, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Request, Rung
from rrl.manager.model.state import State
from rrl.tests.support.runs import TestRun, all_work, check_sound, current_incarnations, light_job, submit_on
from rrl.tests.support.slurm import accounting
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = [pytest.mark.long, pytest.mark.slurm]
TRAINER, R0 = ReplicaId("trainer/0"), ReplicaId("rollout/0")


@pytest.fixture
def limited(accounting_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield accounting_lab
    accounting.limit(accounting_lab, MaxSubmitJobs=-1)
    accounting_lab.clear()


def small(allocation: str) -> str:
    toml = light_job("slurm", 100_000, rollouts=1, spares=0, warm=False, one_node=True)
    return toml.replace("[limits]\n", f'[limits]\nallocation = "{allocation}"\n')


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.wait(all_work).replica(replica).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def refusals(run: TestRun) -> list[str]:
    settled = [s.event for s in run.events() if isinstance(s.event, ev.IntentSettled)]
    return [event.detail for event in settled if event.reason is RejectReason.REFUSED_FOR_NOW]


def shown(run: TestRun) -> str:
    return str(run.call("status", run.run.id, stdout=subprocess.PIPE).communicate(timeout=60)[0])


def state_of(state: State, node: NodeName) -> NodeState | None:
    status = state.nodes[node].status
    return None if status is None else status.state


def end(run: TestRun) -> None:
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    run.wait_end()
    run.wait_gone()
    check_sound(run.run)


def test_trainer_killed_thrice_at_a_full_submit_limit_returns_to_its_node_and_the_run_goes_on(
    limited: SlurmLab,
) -> None:
    run = submit_on(limited, "full", small("20s"))
    run.wait_steps(2)
    before = current_incarnations(run.state())
    accounting.limit(limited, MaxSubmitJobs=len(limited.jobs()))
    for _ in range(2):
        kill(run, TRAINER)
        run.wait(lambda s, step=run.state().step: s.step > step + 1 and all_work(s))  # type: ignore[misc]
    kill(run, TRAINER)
    run.wait(lambda s: any(allocation.refused for allocation in s.allocations.values()))
    assert "1 more requested (refused for now: " in shown(run)
    assert "AssocMaxSubmitJobLimit" in shown(run)
    state = run.wait(lambda s: all_work(s) and s.replica(TRAINER).incarnation_number == 4)
    run.wait_steps(state.step + 3)
    after = current_incarnations(state)
    assert {id for id in before if after[id][0] != before[id][0]} == {TRAINER}
    assert after[TRAINER][2] == before[TRAINER][2]
    assert len(refusals(run)) > 1
    end(run)


def test_first_request_at_a_full_submit_limit_waits_until_the_limit_is_raised(limited: SlurmLab) -> None:
    accounting.limit(limited, MaxSubmitJobs=2)  # both are jobs of the manager
    run = submit_on(limited, "first", small("10min"))
    run.wait(lambda s: any(allocation.refused for allocation in s.allocations.values()))
    assert "none yet, 1 wanted (refused for now: " in shown(run)
    accounting.limit(limited, MaxSubmitJobs=-1)
    run.wait_steps(2)
    requests = [s.event.action for s in run.events() if isinstance(s.event, ev.Intended)]
    assert len({action.tag for action in requests if isinstance(action, Request)}) == 1
    end(run)


def test_first_request_at_a_full_submit_limit_ends_the_run_after_the_limit_for_allocations(limited: SlurmLab) -> None:
    accounting.limit(limited, MaxSubmitJobs=2)
    run = submit_on(limited, "never", small("15s"))
    state = run.wait_end()
    assert "AssocMaxSubmitJobLimit" in state.why
    assert len(refusals(run)) > 1
    run.wait_gone()


def test_rolling_reboot_moves_a_role_at_its_next_start_and_no_earlier(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "reboot", light_job("slurm", 100_000, rollouts=1, spares=1, warm=False))
    run.wait_steps(2)
    before = current_incarnations(run.state())
    used = {replica.node for replica in run.state().workers}
    (spare,) = (node for node in run.state().nodes if node not in used)
    home = run.state().replica(R0).node
    assert home is not None
    try:
        for node in (home, spare):
            slurm_lab.slurm("scontrol", "reboot", node)
        run.wait(lambda s: state_of(s, home) is state_of(s, spare) is NodeState.LEAVING)
        run.wait_steps(run.state().step + 5)
        assert current_incarnations(run.state()) == before, (
            "a role on a node with a requested reboot was not left alone"
        )
        assert "leaving" in shown(run)
        slurm_lab.slurm("scontrol", "cancel_reboot", spare)
        run.wait(lambda s: state_of(s, spare) is NodeState.UP)
        kill(run, R0)
        state = run.wait(lambda s: all_work(s) and s.replica(R0).incarnation_number == 2)
        assert state.replica(R0).node == spare
        decided = [s.event.action for s in run.events() if isinstance(s.event, ev.Decided)]
        assert [fence.rung for fence in decided if isinstance(fence, Fence)] == [Rung.SPARE]
    finally:
        slurm_lab.slurm("scontrol", "cancel_reboot", home)
        end(run)
        slurm_lab.clear()
