"""benchmarks/restart.py finds in the journal how a run recovered from a kill of its trainer.

It compares the recoveries of the benchmark's arms by their ratios.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.benchmarks._ettr_faults import Kill
from rrl.benchmarks.restart import ARMS, STAGES, Restart, figures, follow, job
from rrl.config.job.load import load_job
from rrl.core.launch import tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import TRAINER, Cause, Finding, Incarnation, NodeName, Remedy, ReplicaId, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Rung, Why

FIRST, SECOND = Incarnation(TRAINER, 1), Incarnation(TRAINER, 2)
STANDBY = Incarnation(ReplicaId("standby/trainer.0"), 1)
KILLED = 10.0


def _run(tmp_path: Path, continues_from: str) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    standbys = run.log_file(tag_of(run.id, STANDBY))
    standbys.write_text(f"{SECOND} continues from the {continues_from}\n")
    run.log_file(tag_of(run.id, SECOND)).symlink_to(standbys.name)  # as for every promoted member
    return run


def _events(commits: list[tuple[float, int]]) -> list[ev.Stamped]:
    """Return the events of a run with a kill after step 7.

    The new trainer's first work is at 13 s, and ``commits`` follow it.
    """
    finding = Finding("exit_record", Verdict.FAIL, Cause.PROCESS, Remedy.RESTART, 10.5, (), incarnation=FIRST)
    events: list[tuple[float, ev.Event]] = [
        (1.0, ev.Joined(FIRST, NodeName("n1"), "host", 1)),
        (2.0, ev.FirstWorkDone(FIRST)),
        (9.0, ev.StepCommitted(FIRST, 7)),
        (10.5, ev.FindingChanged(finding)),
        (10.75, ev.Decided(Fence(FIRST, Rung.IN_PLACE, Why(("killed",))))),
        (12.0, ev.Joined(SECOND, NodeName("n1"), "host", 2)),
        (13.0, ev.FirstWorkDone(SECOND)),
        *((at, ev.StepCommitted(SECOND, step)) for at, step in commits),
    ]
    return [ev.Stamped(seq, at, 1, event) for seq, (at, event) in enumerate(events, start=1)]


def _restart(at: float = KILLED) -> Restart:
    return Restart(Kill(at, 7, FIRST), standby_ready=False, load=1.0)


def test_recovery_ends_with_the_first_commit_of_a_step_that_was_not_restored(tmp_path: Path) -> None:
    run = _run(tmp_path, "snapshot of step 8")
    restart = follow(_restart(), _events([(13.5, 8), (15.0, 9)]), run)
    assert dict(zip(STAGES, restart.stages(), strict=True)) == {
        "detect": 0.5,
        "decide": 0.25,
        "start": 1.25,
        "work": 1.0,
        "step": 2.0,
    }
    assert (restart.seconds(), restart.lost_steps) == (5.0, 0)


def test_restored_step_that_is_committed_before_the_first_work_is_not_lost(tmp_path: Path) -> None:
    events = _events([(15.0, 9)])
    events.insert(-2, ev.Stamped(99, 12.5, 1, ev.StepCommitted(SECOND, 8)))
    restart = follow(_restart(), events, _run(tmp_path, "snapshot of step 8"))
    assert (restart.seconds(), restart.lost_steps) == (5.0, 0)


def test_steps_beyond_the_restored_commit_count_as_lost(tmp_path: Path) -> None:
    restart = follow(_restart(), _events([(15.0, 8)]), _run(tmp_path, "commit of step 7"))
    assert (restart.seconds(), restart.lost_steps) == (5.0, 1)


def test_ratios_pair_kills_at_equal_moments_and_count_ready_standbys() -> None:
    def restarts(*seconds: float) -> list[Restart]:
        return [Restart(Kill(0.0, 7, FIRST), end < 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, end) for end in seconds]

    found = figures(
        {
            "warm": restarts(0.5, 4.0),
            "in_place": restarts(5.0, 5.0),
            "job": restarts(10.0, 8.0),
            "warm_ready": restarts(0.5, 0.5),
        }
    )
    assert found["warm_over_job"] == {"of_medians": 0.25, "range": [0.05, 0.5]}
    assert found["warm_over_in_place"] == {"of_medians": 0.45, "range": [0.1, 0.8]}
    assert found["warm_kills_with_ready_standby"] == "1 of 2"


@pytest.mark.parametrize("name", ARMS)
def test_job_of_each_arm_has_no_faults_of_its_own(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(job(ARMS[name], "local", ranks=1))
    loaded = load_job(file)
    assert (loaded.recovery.policy, loaded.roles.trainer.warm) == (ARMS[name].policy, ARMS[name].warm)
    assert not loaded.faults.allow
    assert not loaded.faults.planned
