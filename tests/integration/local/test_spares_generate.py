"""Spare nodes generate, and the trainer takes the node of such an extra, in whole runs of light roles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Resize
from rrl.manager.model.state import State
from rrl.tests.support.local_cluster import crash
from rrl.tests.support.runs import TestRun, all_work, current_incarnations, light_job, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.standbys import TRAINER, adoptions, end_well, standbys

EXTRA, MARK = ReplicaId("rollout/2"), -201.0
"""The rollout beyond the two that the job asks for, and what its first incarnation records with its tokens."""
SPARES_GENERATE = '[tags]\nspare = ["rollout", "train"]\nrollout = []\n'


def extra_works_beside_a_standby(state: State) -> bool:
    node = state.replica(EXTRA).node
    return all_work(state) and node is not None and any(one.node == node for one in standbys(state))


def trainer_takes_the_extras_node(run: TestRun, lose: Callable[[NodeName], None]) -> None:
    """Lose the trainer's node while the extra generates.

    The trainer continues in the standby process on the extra's node, and no replica changes but these two.
    """
    run.wait(lambda state: state.replica(EXTRA).ever_worked)
    run.hold_in_the_middle(2)
    state = run.wait(extra_works_beside_a_standby)
    before, spare = current_incarnations(state), state.replica(EXTRA).node
    node = state.replica(TRAINER).node
    assert node is not None
    lose(node)
    after = run.wait_back_alone(before, TRAINER, EXTRA, ReplicaId(f"agent/{node}"))
    (adoption,) = adoptions(run)
    assert (adoption.incarnation, adoption.node) == (Incarnation(TRAINER, 2), spare)
    assert (after[TRAINER][0], after[TRAINER][2]) == (Incarnation(TRAINER, 2), spare)
    assert EXTRA not in run.state().replicas
    run.let_go(2)


def check_the_extras_work(run: TestRun) -> None:
    """Check that its tokens were trained, and that others finished what it had begun when it had to leave."""
    resizes = [s.event.action for s in run.events() if isinstance(s.event, ev.Decided)]
    assert [(one.start, one.stop) for one in resizes if isinstance(one, Resize)] == [((EXTRA,), ()), ((), (EXTRA,))]
    assert run.continued(MARK)
    [recovery] = run.summary()["recoveries"]
    assert (recovery["replica"], recovery["incarnation"], recovery["rung"]) == (TRAINER, 2, "warm standby")


def test_spare_generates_until_the_trainer_of_a_lost_node_takes_it(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 60, step_seconds=0.3, extra=SPARES_GENERATE))
    trainer_takes_the_extras_node(run, lambda node: crash(run.run, node))
    end_well(run)
    check_the_extras_work(run)


@pytest.mark.long
@pytest.mark.slurm
def test_slurm_spare_generates_until_the_trainer_of_a_lost_node_takes_it(slurm_lab: SlurmLab) -> None:
    """The step of the extra has all CPUs of the spare, beside the standby process of the trainer."""
    job = light_job("slurm", 60, step_seconds=0.3, extra=SPARES_GENERATE).replace(
        'light_rollout.py"]\nmem', 'light_rollout.py"]\ncpus = 2\nmem'
    )
    run = submit_on(slurm_lab, "extras", job)
    try:
        trainer_takes_the_extras_node(run, slurm_lab.crash)
        end_well(run)
        check_the_extras_work(run)
    finally:
        slurm_lab.clear()
