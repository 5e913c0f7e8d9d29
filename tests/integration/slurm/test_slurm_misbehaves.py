"""If Slurm is unreachable, slow, incomplete or out of date, no node is excluded and nothing starts twice.

The roles continue. The tests use a real Slurm; tests/support/slurm/fake_slurm_commands can make its commands fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Release
from rrl.tests.support.runs import (
    TIMEOUT_S,
    TestRun,
    all_work,
    cancel,
    current_incarnations,
    joined_incarnations,
    light_job,
    submit_on,
    without_replicas,
)
from rrl.tests.support.slurm.fake_slurm import FakeSlurm
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.long

VICTIM = ReplicaId("rollout/1")
OUTAGE_S = 60.0
"""Duration of an outage of slurmctld (s)."""


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()


def kill(run: TestRun, replica: ReplicaId) -> None:
    pid = run.state().replica(replica).pid
    assert pid is not None
    os.killpg(os.getpgid(pid), signal.SIGKILL)


def no_node_was_excluded(run: TestRun) -> None:
    assert not [s for s in run.events() if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Exclude)]


def no_job_is_doubled(lab: SlurmLab, run: TestRun) -> None:
    names = sorted(line.split()[1] for line in lab.jobs() if "COMPLETING" not in line)
    assert names == [f"{run.run.id}.manager", f"{run.run.id}.manager", f"{run.run.id}.pool"]


def test_launch_lost_to_a_frozen_slurmctld_is_repeated_without_the_quiet_period(lab: SlurmLab) -> None:
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
def test_outage_of_slurmctld_is_waited_out_while_roles_keep_running(lab: SlurmLab, how: str) -> None:
    fake = FakeSlurm(lab, f"away-{how}")
    toml = light_job("slurm", 100_000, spares=1, extra="").replace('poll = "1s"', 'poll = "5s"')
    run = submit_on(lab, f"away-{how}", toml, fake.shell)
    before = joined_incarnations(run)
    calm = time.time()
    time.sleep(OUTAGE_S / 2)
    calm_calls = len([at for at in fake.calls("squeue") if at > calm])
    assert calm_calls, "the manager did not call squeue, whose calls are counted"
    with lab.controller_stopped() if how == "deaf" else lab.controller_down():
        began = time.time()
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        run.wait(lambda s: s.cluster_unknown != "")
        with run.call("status", run.run.id, stdout=subprocess.PIPE) as status:
            shown = status.communicate(timeout=TIMEOUT_S)[0]
        assert re.search(r"cluster +no complete answer for \d+s \(", shown), shown
        time.sleep(max(0.0, began + OUTAGE_S - time.time()))
        outage_calls = len([at for at in fake.calls("squeue") if at > began])
    assert outage_calls <= 2 * calm_calls + 2, "Slurm is polled more often during the outage than before"
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s) and not s.cluster_unknown)
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept, "another replica was affected by the outage of Slurm"
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    cancel(run)


def test_slow_slurm_commands_start_nothing_twice(lab: SlurmLab) -> None:
    fake = FakeSlurm(lab, "slow")
    run = submit_on(lab, "slow", light_job("slurm", 100_000, spares=1), fake.shell)
    before = joined_incarnations(run)
    with fake.doing("delay 30", "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue"):
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        time.sleep(OUTAGE_S)
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    alive = [command for command in run.processes().values() if "light_rollout" in command]
    assert len(alive) == 2, alive
    cancel(run)


@pytest.mark.parametrize("fault", ["fail Unable to contact slurm controller", "fail Unspecified error"])
def test_failing_slurm_commands_count_neither_as_done_nor_as_refused(lab: SlurmLab, fault: str) -> None:
    name = f"fails-{len(fault)}"
    fake = FakeSlurm(lab, name)
    run = submit_on(lab, name, light_job("slurm", 100_000, spares=1), fake.shell)
    before = joined_incarnations(run)
    with fake.doing(fault, "sbatch", "salloc", "srun", "scancel", "scontrol", "squeue"):
        kill(run, VICTIM)
        step = run.state().step
        run.wait(lambda s: s.step > step + 10)
        time.sleep(OUTAGE_S / 2)
    state = run.wait(lambda s: s.replica(VICTIM).incarnation_number > 1 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    no_job_is_doubled(lab, run)
    cancel(run)


def test_step_that_is_refused_for_a_moment_costs_neither_its_node_nor_another_incarnation(lab: SlurmLab) -> None:
    fake = FakeSlurm(lab, "memory")
    run = submit_on(lab, "memory", light_job("slurm", 100_000, spares=1), fake.shell)
    before = joined_incarnations(run)
    calls = len(fake.calls("srun"))
    with fake.doing("fail Unable to create step for job 1: Memory required by task is not available", "srun"):
        kill(run, VICTIM)
        lab.wait_for(lambda: len(fake.calls("srun")) >= calls + 4, "the refused step was not repeated")
    after = run.wait_back_alone(before, VICTIM)
    assert (after[VICTIM][0].number, after[VICTIM][2]) == (2, before[VICTIM][2])
    assert run.state().replica(VICTIM).failures[1:] == ()
    cancel(run)


@pytest.mark.parametrize(("late", "in_time"), [(4, True), (25, False)])
def test_timed_out_request_that_takes_effect_later_is_used_or_released(lab: SlurmLab, late: int, in_time: bool) -> None:
    """A request that timed out and takes effect later is either used or released.

    If it takes effect within ``limits.quiet`` (10 s), it is found by its tag and used. If it takes effect later,
    another request has replaced it, and its nodes are released.
    """
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
    orphans = [
        s.event.action.allocation
        for s in run.events()
        if isinstance(s.event, ev.Intended)
        and isinstance(s.event.action, Release)
        and "was granted after" in s.event.action.why.evidence[0]
    ]
    assert bool(orphans) is not in_time, orphans
    names = [line.split()[1] for line in lab.jobs() if "COMPLETING" not in line]
    assert sum(".more" in name for name in names) == 1, names
    cancel(run)
    lab.up(node)


@pytest.mark.parametrize("fault", ["omit .pool", "omit rollout-1", "old 8"])
def test_incomplete_or_stale_squeue_output_changes_nothing(lab: SlurmLab, fault: str) -> None:
    name = f"squeue-{fault.split()[0]}-{fault.split()[1].strip('.')}"
    fake = FakeSlurm(lab, name)
    run = submit_on(lab, name, light_job("slurm", 100_000, spares=1), fake.shell)
    before = joined_incarnations(run)
    for _ in range(3):
        with fake.doing(fault, "squeue"):
            time.sleep(6.0)  # several polls, less than limits.quiet
        time.sleep(2.0)
    assert current_incarnations(run.state()) == before
    with fake.doing(fault if fault.startswith("old") else "omit rollout", "squeue"):
        kill(run, VICTIM)
        state = run.wait(lambda s: s.replica(VICTIM).incarnation_number == 2 and all_work(s))
    kept, now = without_replicas(before, current_incarnations(state), [VICTIM])
    assert now == kept
    no_node_was_excluded(run)
    cancel(run)
