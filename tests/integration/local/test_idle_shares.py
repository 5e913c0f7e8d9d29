"""The clocks of a run in which a rollout dies show how its processes spent their time."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise

import pytest

from rrl.core.phases import STANDBY
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.intake.interval_recorders import COMMIT_RECORD_INTERVAL_S
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch
from rrl.manager.model.figures.idle_times import phase_times
from rrl.tests.support.runs import TestRun, check_sound, light_job, submit_here

KILLED = ReplicaId("rollout/1")
TRAINER = ReplicaId("trainer/0")
STEP_SECONDS = 0.1
"""Time (s) that the light trainer sleeps in each step."""
KILL = f'[[faults.planned]]\nkind = "kill"\ntarget = "{KILLED}"\nat = "step=3"\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    run = submit_here(
        tmp_path_factory.mktemp("idle"),
        light_job("local", 4000, spares=0, warm=False, one_node=True, step_seconds=STEP_SECONDS, extra=KILL),
    )
    run.wait(lambda state: KILLED in state.idle_times.newest and state.idle_times.newest[KILLED].number == 2)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    run.wait_gone()
    check_sound(run.run)
    return run


def total_s(run: TestRun, role: str) -> float:
    return sum(time.ns for time in phase_times(run.state().idle_times, role)) / 1e9


def launched_and_ended(run: TestRun, replica: ReplicaId, number: int = 1) -> tuple[float, float]:
    """Return the time at which an incarnation's launch was decided, and the time at which the run ended (s)."""
    events = run.events()
    me = Incarnation(replica, number)
    launched = next(
        one.at
        for one in events
        if isinstance(one.event, ev.Intended)
        and isinstance(one.event.action, Launch)
        and one.event.action.incarnation == me
    )
    return launched, events[-1].at


def test_times_of_the_trainer_add_up_to_its_lifetime(run: TestRun) -> None:
    launched, ended = launched_and_ended(run, TRAINER)
    steps = run.state().step
    seconds = run.summary()["stream"]["seconds"]["trainer"]
    assert seconds["train"] >= steps * STEP_SECONDS, "the phase `train` is shorter than the sleeps of its steps"
    assert sum(seconds.values()) == pytest.approx(total_s(run, "trainer"), abs=0.01)
    assert steps * STEP_SECONDS < total_s(run, "trainer") < ended - launched


def test_last_report_of_the_killed_rollout_counts_beside_those_of_its_successor(run: TestRun) -> None:
    times = run.state().idle_times
    assert times.newest[KILLED].number == 2
    killed = sum(time.ns for time in times.replaced["rollout"].times)
    assert killed > 0
    alive = sum(time.ns for id, held in times.newest.items() if id.startswith("rollout/") for time in held.clock.times)
    assert total_s(run, "rollout") == (killed + alive) / 1e9


def test_phases_that_are_too_short_to_be_reported_are_counted(run: TestRun) -> None:
    seconds = run.summary()["stream"]["seconds"]
    assert seconds["trainer"].keys() >= {"starting", "wait_data", "train", "checkpoint", "publish"}
    assert seconds["rollout"].keys() >= {"generate", "wait_work"}
    assert all(spent > 0 for spent in (seconds["trainer"]["publish"], seconds["reward"]["score"]))
    reported = {one.event.phase for one in run.events() if isinstance(one.event, ev.PhaseEntered)}
    assert reported <= {*(phase for role in seconds.values() for phase in role), STANDBY}


def test_idle_shares_name_what_each_role_waited_for(run: TestRun) -> None:
    stream = run.summary()["stream"]
    idle = stream["idle"]
    assert idle["trainer"].keys() >= {"rollouts", "store"}, (
        "the commits in the trainer's own thread did not count as idle time"
    )
    assert "work" in idle["rollout"]
    assert "work" in idle["reward"]
    assert "requests" in idle["trajectories"]
    for role, causes in idle.items():
        assert all(0 <= share <= 1 for share in causes.values()), role
        assert sum(causes.values()) <= 1.001, role
    waited = stream["seconds"]["trainer"]["wait_data"] / sum(stream["seconds"]["trainer"].values())
    assert idle["trainer"]["rollouts"] == pytest.approx(waited, abs=0.001)


def test_status_and_summary_have_the_same_idle_shares(run: TestRun) -> None:
    shown = run.call("status", str(run.run.path), "--json", stdout=subprocess.PIPE)
    out, _ = shown.communicate(timeout=60)
    assert json.loads(out)["stream"] == run.summary()["stream"]
    text, _ = run.call("status", str(run.run.path), stdout=subprocess.PIPE).communicate(timeout=60)
    assert "idle (waits for rollouts" in text


def test_clock_readings_in_the_journal_are_few(run: TestRun) -> None:
    records = [one for one in run.events() if isinstance(one.event, ev.ClocksRecorded)]
    gaps = [after.at - before.at for before, after in pairwise(records)]
    assert all(gap >= COMMIT_RECORD_INTERVAL_S for gap in gaps[:-1]), (
        "a record besides the last one came before COMMIT_RECORD_INTERVAL_S had passed"
    )
    assert isinstance(run.events()[-1].event, ev.RunEnded)
