"""A Slurm that is away, slow, forgetful or out of date: nobody is condemned for it, nothing is started twice, and the
roles go on. On a real Slurm; what its commands do wrong is in tests/support/slurm/fake_slurm_commands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Release
from rrl.tests.support.runs import (
    TestRun,
    all_work,
    check_sound,
    current_incarnations,
    light_job,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.fake_slurm import FakeSlurm
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.long

VICTIM = ReplicaId("rollout/1")
AWAY = 60.0
"""s"""


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()


def cancel(run: TestRun) -> None:
    with run.call("cancel", run.run.id) as process:
        assert process.wait(90) == 0
    assert run.wait_end().outcome == "cancelled"
    run.wait_gone()
    check_sound(run.run)


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.state().replica(replica).pid
    assert pid is not None
    os.killpg(os.getpgid(pid), signal.SIGKILL)


def no_node_was_excluded(run: TestRun) -> None:
    assert not [s for s in run.events() if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Exclude)]


def no_job_is_doubled(lab: SlurmLab, run: TestRun) -> None:
    names = sorted(line.split()[1] for line in lab.jobs() if "COMPLETING" not in line)
    assert names == [f"{run.run.id}.manager", f"{run.run.id}.manager", f"{run.run.id}.pool"]


def test_a_launch_whose_srun_gave_up_on_a_frozen_slurmctld_is_made_again_without_the_quiet_period(
    lab: SlurmLab,
) -> None:
    toml = light_job("slurm", 100_000, spares=0).replace('quiet = "10s"', 'quiet = "1h"')
    run = submit_on(lab, "srun-ended", toml)
    before = run.wait_steps(3)
    with lab.controller_stopped():
        kill(run, VICTIM)
        run.wait(lambda s: s.replica(VICTIM).incarnation_number > before.replica(VICTIM).incarnation_number)
        tag = run.state().replica(VICTIM).step
        run.wait(lambda _: any(f"--job-name={tag}" in command for command in run.processes().values()))
        run.wait(lambda _: not any(f"--job-name={tag}" in command for command in run.processes().values()))
    run.wait(lambda s: s.replica(VICTIM).incarnation_number > 2 and all_work(s))
    cancel(run)


@pytest.mark.parametrize("how", ["deaf", "down"])
def test_a_slurmctld_that_is_away_for_a_minute_is_waited_for_while_the_roles_go_on(lab: SlurmLab, how: str) -> None:
    fake = FakeSlurm(lab, f"away-{how}")
    toml = light_job("slurm", 100_000, spares=1, extra="").replace('poll = "1s"', 'poll = "5s"')
    run = submit_on(lab, f"away-{how}", toml, fake.shell)
    before = current_incarnations(run.wait_steps(3))
    calm = time.time()
    time.sleep(AWAY / 2)
    asked = len([at for at in fake.calls("squeue") if at > calm])
    assert asked, "the manager does not use the commands that are counted"
    with lab.controller_stopped() if how == "deaf" else lab.controller_down():
        began = time.time()
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        time.sleep(max(0.0, began + AWAY - time.time()))
        away = len([at for at in fake.calls("squeue") if at > began])
    assert away <= 2 * asked + 2, "it is asked more often than when all is well"
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept, "somebody was touched because Slurm was away"
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    cancel(run)


def test_commands_that_take_half_a_minute_start_nothing_twice(lab: SlurmLab) -> None:
    fake = FakeSlurm(lab, "slow")
    run = submit_on(lab, "slow", light_job("slurm", 100_000, spares=1), fake.shell)
    before = current_incarnations(run.wait_steps(3))
    with fake.doing("delay 30", "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue"):
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        time.sleep(AWAY)
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    alive = [command for command in run.processes().values() if "light_rollout" in command]
    assert len(alive) == 2, alive
    cancel(run)


@pytest.mark.parametrize("order", ["fail Unable to contact slurm controller", "fail Unspecified error"])
def test_commands_that_fail_for_a_while_are_not_believed_to_have_done_or_refused_anything(
    lab: SlurmLab, order: str
) -> None:
    name = f"fails-{len(order)}"
    fake = FakeSlurm(lab, name)
    run = submit_on(lab, name, light_job("slurm", 100_000, spares=1), fake.shell)
    before = current_incarnations(run.wait_steps(3))
    with fake.doing(order, "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue"):
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        time.sleep(AWAY / 2)
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    cancel(run)


@pytest.mark.parametrize(("late", "in_time"), [(4, True), (25, False)])
def test_a_request_whose_answer_timed_out_and_that_lands_later_is_used_or_given_back(
    lab: SlurmLab, late: int, in_time: bool
) -> None:
    """``limits.quiet`` is 10 s here: what lands within it is found by its tag; what lands later has been made up for,
    and is given back."""
    fake = FakeSlurm(lab, f"late-{late}")
    run = submit_on(lab, f"late-{late}", light_job("slurm", 100_000, rollouts=1, spares=0), fake.shell)
    run.wait_steps(2)
    node = run.state().replica(ReplicaId("rollout/0")).node
    assert node is not None
    with fake.doing("fail Unable to allocate resources: they are busy", "salloc"):
        with fake.doing(f"late {late}", "sbatch"):
            lab.crash(node)
            run.wait(lambda s: any(tag.partition(".")[2].startswith("more") for tag in s.allocations))
            time.sleep(2.0)
        run.wait(lambda s: s.replica(ReplicaId("rollout/0")).incarnation_number > 1 and all_work(s))
        time.sleep(max(0.0, late + 5.0))
    run.wait(lambda s: not any(allocation.orphan for allocation in s.allocations.values()))
    strays = [
        s.event.action.allocation
        for s in run.events()
        if isinstance(s.event, ev.Intended)
        and isinstance(s.event.action, Release)
        and "was granted after" in s.event.action.why.evidence[0]
    ]
    assert bool(strays) is not in_time, strays
    names = [line.split()[1] for line in lab.jobs() if "COMPLETING" not in line]
    assert sum(".more" in name for name in names) == 1, names
    cancel(run)
    lab.up(node)


@pytest.mark.parametrize("order", ["omit .pool", "omit rollout-1", "old 8"])
def test_a_squeue_that_leaves_something_out_or_answers_from_an_old_cache_changes_nothing(
    lab: SlurmLab, order: str
) -> None:
    name = f"lies-{order.split()[0]}-{order.split()[1].strip('.')}"
    fake = FakeSlurm(lab, name)
    run = submit_on(lab, name, light_job("slurm", 100_000, spares=1), fake.shell)
    before = current_incarnations(run.wait_steps(3))
    for _ in range(3):
        with fake.doing(order, "squeue"):
            time.sleep(6.0)  # several looks, less than limits.quiet
        time.sleep(2.0)
    assert current_incarnations(run.state()) == before
    with fake.doing(order if order.startswith("old") else "omit rollout", "squeue"):
        kill(run, VICTIM)
        state = run.wait(lambda s: s.replica(VICTIM).incarnation_number == 2 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    cancel(run)
