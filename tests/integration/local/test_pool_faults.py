"""What further rollout pools cannot do to a run: it goes on if they cannot start, or if their budget ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rrl.core.types import Outcome, ReplicaId
from rrl.manager.model.pools import spent_node_s
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import TestRun, cancel, check_sound, light_job, submit_here

BURST = ReplicaId("burst/0")
BROKEN = json.dumps([sys.executable, "-c", "raise SystemExit('no kernel image for this GPU')"])
BUDGET_S = 70.0
"""Node seconds of an elastic pool: more than the shortest walltime of a request (60 s)."""


def _job(steps: int, pool: str, rollouts: int = 1, name: str = "burst") -> str:
    extra = f"[rollouts.{name}]\n{pool}\n"
    return light_job("local", steps, rollouts=rollouts, spares=0, warm=False, one_node=True, extra=extra)


def _elastic(most: int = 2, node_s: float = BUDGET_S) -> str:
    return f"replicas = {{ min = 0, max = {most} }}\nnode_hours = {node_s / 3600:.6f}"


def _works(state: State, replica: ReplicaId) -> bool:
    one = state.replicas.get(replica)
    return one is not None and one.status is Status.JOINED and one.weight_version is not None


def _others(state: State) -> dict[ReplicaId, int]:
    """Return the incarnation numbers of all workers that are not of the pool."""
    return {one.id: one.incarnation_number for one in state.workers if one.role != "burst"}


def _resume(run: TestRun, folder: Path, toml: str) -> None:
    job = folder / "again.toml"
    job.write_text(toml)
    process = run.call("resume", run.run.id, "--job", str(job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    shown, _ = process.communicate(timeout=180)
    assert process.returncode == 0, shown
    run.wait_resumed()


def test_a_pool_whose_engine_cannot_start_is_retired_and_the_run_completes(tmp_path: Path) -> None:
    run = submit_here(tmp_path, _job(150, f"replicas = 1\ncommand = {BROKEN}"))
    retired = run.wait(lambda state: BURST in state.replicas and state.replica(BURST).status is Status.RETIRED)
    assert retired.outcome is None
    state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, 150), state.why
    assert set(_others(state).values()) == {1}
    run.wait_gone()
    check_sound(run.run)


def test_a_run_whose_only_pool_cannot_start_is_rejected(tmp_path: Path) -> None:
    run = submit_here(tmp_path, _job(100, f"replicas = 1\ncommand = {BROKEN}", rollouts=0))
    state = run.wait_end()
    assert state.outcome is Outcome.REJECTED, state.why
    assert "burst" in state.why, state.why
    assert state.step == 0
    run.wait_gone()


@pytest.mark.long  # lasts a minute, the shortest walltime; tests/unit/manager/planner/capacity has its plan
def test_a_budget_that_ends_in_the_middle_of_a_step_costs_no_token_and_is_kept_by_a_resume(tmp_path: Path) -> None:
    run = submit_here(tmp_path, _job(100_000, _elastic()))
    run.wait_steps(1)
    run.resize("burst", 1)
    before = _others(run.wait(lambda state: _works(state, BURST)))
    run.hold_in_the_middle("burst-0")
    state = run.wait(lambda state: BURST not in state.replicas, 2 * BUDGET_S + 60)
    run.let_go("burst-0")
    assert _others(run.wait_steps(state.step + 5)) == before, "the end of the budget changed another role"
    state = run.wait(lambda state: not [a for a in state.allocations.values() if a.request.node_group == "burst"])
    spent = spent_node_s(state, "burst", run.events()[-1].at)
    assert 30 < spent <= BUDGET_S
    cancel(run)
    assert run.continued(dead=-10_001.0), "no trajectory of the stopped rollout was continued"

    _resume(run, tmp_path, _job(100_000, _elastic(most=3)))
    state = run.wait_steps(state.step + 3)
    assert spent_node_s(state, "burst", run.events()[-1].at) >= spent, "a resume forgets what was spent"
    assert not [a for a in state.allocations.values() if a.request.node_group == "burst"], "nothing is left to spend"
    cancel(run)


def test_a_run_is_resumed_with_another_table_of_pools(tmp_path: Path) -> None:
    run = submit_here(tmp_path, _job(100_000, _elastic(node_s=7200.0)))
    run.wait_steps(1)
    run.resize("burst", 2)
    run.wait(lambda state: _works(state, BURST) and _works(state, ReplicaId("burst/1")))
    cancel(run)
    step = run.state().step

    _resume(run, tmp_path, _job(100_000, "replicas = 1", name="other"))
    state = run.wait(lambda state: state.step > step + 2 and _works(state, ReplicaId("other/0")))
    assert {one.role for one in state.workers} == {"trainer", "rollout", "trajectories", "reward", "other"}
    cancel(run)
    step = run.state().step

    _resume(run, tmp_path, _job(100_000, _elastic(most=1, node_s=7200.0)))
    state = run.wait(lambda state: state.step > step + 2)
    assert not {one.role for one in state.workers} & {"other"}
    assert ReplicaId("burst/1") not in state.replicas
    assert spent_node_s(state, "burst", run.events()[-1].at) > 0, "the pool that came back has lost its record"
    run.resize("burst", 1)
    state = run.wait(lambda state: _works(state, BURST))
    assert state.replica(BURST).incarnation_number > 1, "an incarnation number was used twice"
    cancel(run)
    audit = msgspec.json.decode((run.run.store / "audit.json").read_bytes())
    assert audit["trained"] > 0
