"""The summary of a run, computed from its events alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core import faults
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, tag_of
from rrl.core.phases import ClockReading, PhaseTime, idle_cause
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, Outcome, ReplicaId, Verdict, Version, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Finish, InjectFault, Launch, Rung, Why
from rrl.manager.model.reducer import fold
from rrl.manager.reporting.summary import (
    EpisodeCounts,
    Recovery,
    StreamSummary,
    Summary,
    stream_summary,
    summarize,
    write_summary,
)
from rrl.manager.storage.journal import Journal
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, RUN, STORE, TRAINER, job
from rrl.tests.support.manager.world import found, lost

At = tuple[float, ev.Event]
R0, R1 = ROLLOUTS
N1, N2, N3, N4, N5 = (NodeName(f"n{i}") for i in range(1, 6))
NODES = {STORE: N1, REWARD: N1, TRAINER: N2, R0: N3, R1: N4}
WHY = Why(("it ended",))
FAULT = Fault("f0", FaultKind.KILL, R0, faults.FaultTrigger(step=1))


METRICS = (
    "reward",
    "tokens",
    "parts",
    "length_bias",
    "recall20",
    "long_groups",
    "longest_expected",
    "tokens_aged_3",
    "token_age_max",
    "token_age_run_max",
    "stale_groups",
    "stale_share",
    "unscored_groups",
    "unscored_share",
    "episodes_at_work",
    "episodes_finished",
    "episodes_dropped",
    "turns",
    "branches",
    "token_drift",
)


def launch(incarnation: Incarnation, node: NodeName) -> ev.Intended:
    return ev.Intended(Launch(incarnation, tag_of(RUN, incarnation), "pool", node, WHY))


def fence(incarnation: Incarnation, rung: Rung) -> ev.Decided:
    return ev.Decided(Fence(incarnation, rung, WHY))


def ended(incarnation: Incarnation) -> ev.StepEnded:
    return ev.StepEnded(incarnation, tag_of(RUN, incarnation), None, 9, ExitReason.SIGNALED)


def up(at: float, incarnation: Incarnation, node: NodeName) -> list[At]:
    """Return the events by which an incarnation joins and works from ``at`` on."""
    phase = {"rollout": "generate", "trainer": "train", "reward": "score"}.get(role_of(incarnation.replica), "serve")
    return [(at, ev.Joined(incarnation, node, node, 1)), (at, ev.PhaseEntered(incarnation, phase))]


def perform(incarnation: Incarnation, fault: Fault = FAULT) -> ev.Intended:
    return ev.Intended(InjectFault(fault, tag_of(RUN, incarnation), NODES[incarnation.replica], WHY))


def summary(*parts: At | Sequence[At]) -> Summary:
    timed_events = [(0.0, ev.RunStarted(RUN, job())), *_flat(parts)]
    return summarize(ev.Stamped(seq, at, 1, event) for seq, (at, event) in enumerate(timed_events, 1))


def _flat(values: Sequence[At | Sequence[At]]) -> list[At]:
    flat: list[At] = []
    for part in values:
        if isinstance(part, tuple) and isinstance(part[0], float):
            flat.append(part)
        else:
            flat.extend(part)  # type: ignore[arg-type]
    return flat


def started(at: float = 20.0) -> list[At]:
    """Return events by which all five replicas are launched at 10 s and work from ``at`` on."""
    begun: list[At] = [(0.0, ev.ManagerStarted("login", 1))]
    begun += [(10.0, launch(Incarnation(id, 1), node)) for id, node in NODES.items()]
    for id, node in NODES.items():
        begun += up(at, Incarnation(id, 1), node)
    return begun


def finished(at: float, given_back: float) -> list[At]:
    why = Why(("step 3 of 3 is committed",))
    return [(at, ev.Decided(Finish(Outcome.COMPLETED, why))), (given_back, ev.RunEnded(Outcome.COMPLETED, "done"))]


def committed(at: float, step: int, reward: float | None = None) -> At:
    metrics = {} if reward is None else {"reward": reward}
    return at, ev.StepCommitted(Incarnation(TRAINER, 1), step, metrics)


def test_run_without_faults_has_no_recovery() -> None:
    got = summary(started(20.0), committed(50.0, 1), finished(100.0, 110.0))
    assert (got.run, got.outcome, got.why, got.steps, got.epochs) == (RUN, "completed", "done", 1, 1)
    assert (got.run_seconds, got.ettr) == (110.0, None)
    assert (got.faults, got.recoveries) == (0, [])


def test_running_run_is_summarised_up_to_its_newest_record() -> None:
    got = summary(started(20.0), committed(50.0, 1), (50.0, ev.EttrEstimated(0.5)), (50.0, ev.EttrEstimated(0.6)))
    assert (got.outcome, got.run_seconds, got.ettr) == ("running", 50.0, 0.6)


def clocks(at: float, number: int, **seconds: float) -> At:
    """Return a report of the trainer's clock: seconds by phase since its incarnation joined."""
    times = tuple(PhaseTime(phase, idle_cause(phase, None), int(spent * 1e9)) for phase, spent in seconds.items())
    return at, ev.ClocksRecorded(((Incarnation(TRAINER, number), ClockReading(number, 0, times)),))


def test_stream_has_idle_shares_and_seconds_of_all_incarnations_as_the_state_has_them() -> None:
    events = [
        *started(20.0),
        clocks(40.0, 1, train=15, wait_data=5),
        clocks(45.0, 1, train=16, wait_data=8),
        clocks(400.0, 2, train=20),
        clocks(800.0, 2, train=56, wait_data=20),
    ]
    got = summary(events).stream
    assert got.seconds == {"trainer": {"train": 72.0, "wait_data": 28.0}}
    assert got.idle == {"trainer": {"rollouts": 0.28}}
    assert got.recent_idle == {"trainer": {"rollouts": round(20 / 56, 4)}}
    state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, job())))
    for seq, (at, event) in enumerate(events, 2):
        state = fold(state, ev.Stamped(seq, at, 1, event))
    assert stream_summary(state.job, state.idle_times, state.stream_figures) == got


def test_stream_has_the_figures_of_the_committed_steps_as_the_state_has_them() -> None:
    metrics = [
        {"parts": 4.0, "tokens_aged_0": 100.0, "tokens_aged_1": 20.0, "length_bias": 1.1},
        {
            "parts": 1.0,
            "tokens_aged_0": 50.0,
            "length_bias": 1.01234,
            "recall20": 0.75,
            "long_groups": 2.0,
            "longest_expected": 900.4,
        },
        {"loss": 1.0},
    ]
    events = [
        *started(20.0),
        *((30.0 + step, ev.StepCommitted(Incarnation(TRAINER, 1), step, each)) for step, each in enumerate(metrics, 1)),
    ]
    got = summary(events).stream
    assert (got.parts, got.most_parts) == (2.5, 4)
    assert (got.ages, got.max_age) == ({0: 150, 1: 20}, 1)
    assert (got.length_bias, got.recall20) == (1.0123, 0.75)
    assert (got.long_groups, got.longest_expected) == (0, 0), (
        "these figures are not of the newest step, which reported none"
    )
    state = fold(None, ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, job())))
    for seq, (at, event) in enumerate(events, 2):
        state = fold(state, ev.Stamped(seq, at, 1, event))
    assert stream_summary(state.job, state.idle_times, state.stream_figures) == got


EPISODES = {
    "episodes_at_work": 5.0,
    "episodes_finished": 40.0,
    "episodes_retried": 3.0,
    "episodes_replayed": 2.0,
    "episodes_dropped": 4.0,
    "turns": 120.0,
    "branches": 60.0,
    "given_tokens": 900.0,
    "untrained_turns": 1.0,
    "token_drift": 7.0,
}


def test_episodes_are_counted_as_of_the_newest_step_however_late_an_older_one_is_reported() -> None:
    older = {name: count / 2 for name, count in EPISODES.items()}
    steps = ((2, EPISODES), (1, older), (3, {"loss": 1.0}))
    commits = [(30.0, ev.StepCommitted(Incarnation(TRAINER, 1), step, metrics)) for step, metrics in steps]
    got = summary([*started(20.0), *commits])
    assert got.episodes == EpisodeCounts(finished=40, retried=3, replayed=2, dropped=4)
    assert (got.turns, got.branches, got.given_tokens, got.untrained_turns, got.token_drift) == (120, 60, 900, 1, 7)


@pytest.mark.parametrize(
    ("audit", "reasons"),
    [
        (
            b'{"made": 9, "dropped": {"no reward within 1h": 3, "broken tool": 1}}',
            {"no reward within 1h": 3, "broken tool": 1},
        ),
        (b'{"dropped": {"broken tool": 1, "no signal": 8}, "expected": ["no signal"]}', {"broken tool": 1}),
        (None, {}),
        (b"half", {}),
    ],
)
def test_summary_file_has_the_reasons_for_dropped_episodes_that_the_store_has_left(
    tmp_path: Path, audit: bytes | None, reasons: dict[str, int]
) -> None:
    run = RunDir(tmp_path / RUN)
    run.create()
    journal = Journal(run, 1)
    events = [*started(20.0), (30.0, ev.StepCommitted(Incarnation(TRAINER, 1), 1, EPISODES))]
    journal.append(ev.Stamped(1, 0.0, 1, ev.RunStarted(RUN, job())))
    for seq, (at, event) in enumerate(events, 2):
        journal.append(ev.Stamped(seq, at, 1, event))
    journal.flush()
    journal.close()
    if audit is not None:
        run.audit.write_bytes(audit)
    write_summary(run)
    written = msgspec.json.decode(run.summary.read_bytes(), type=Summary)
    assert written.episodes == EpisodeCounts(40, 3, 2, 4, reasons)


def test_run_without_readings_has_an_empty_stream() -> None:
    assert summary(started()).stream == StreamSummary(kinds={role.name: role.kind for role in job().roles})


def test_no_events_raise_value_error() -> None:
    with pytest.raises(ValueError, match="no events"):
        summarize([])


def test_rewards_are_means_over_the_first_and_last_ten_steps_each_counted_once() -> None:
    steps = [committed(20.0 + step, step, step / 100) for step in range(1, 26)]
    got = summary(started(), steps, committed(50.0, 25, 9.0), committed(51.0, 3, 9.0))
    assert (got.steps, got.reward_first10, got.reward_last10) == (25, 0.055, 0.205)
    few = summary(started(), committed(30.0, 1, 0.2), committed(31.0, 2))
    assert (few.steps, few.reward_first10, few.reward_last10) == (2, 0.2, 0.2)
    assert summary(started()).reward_first10 is None


def test_summary_has_the_age_of_the_oldest_token_even_of_unreported_steps() -> None:
    def age_reported(step: int, oldest: float, of_run: float) -> At:
        metrics = {"token_age_max": oldest, "token_age_run_max": of_run}
        return 20.0 + step, ev.StepCommitted(Incarnation(TRAINER, 1), step, metrics)

    assert summary(started(), age_reported(1, 2.0, 2.0), age_reported(2, 0.0, 2.0)).max_age == 2
    unreported = (25.0, ev.StepCommitted(Incarnation(TRAINER, 1), 5))
    assert summary(started(), age_reported(1, 2.0, 2.0), unreported, age_reported(6, 1.0, 4.0)).max_age == 4
    assert summary(started(), unreported).max_age is None


def test_unscored_groups_are_those_of_the_newest_step_that_reported_any() -> None:
    def reported(step: int, **metrics: float) -> At:
        return 20.0 + step, ev.StepCommitted(Incarnation(TRAINER, 1), step, metrics)

    reports = (
        reported(3, unscored_groups=9.0, unscored_share=0.3),
        reported(2, unscored_groups=5.0, unscored_share=0.2),
        reported(4, reward=1.0),
    )
    got = summary(started(), *reports)
    assert (got.unscored_groups, got.unscored_share) == (9, 0.3)
    assert (summary(started()).unscored_groups, summary(started()).unscored_share) == (0, 0.0)


def test_stale_groups_are_those_of_the_newest_step() -> None:
    def stale_reported(step: int, groups: float, share: float) -> At:
        return 20.0 + step, ev.StepCommitted(
            Incarnation(TRAINER, 1), step, {"stale_groups": groups, "stale_share": share}
        )

    got = summary(started(), stale_reported(3, 9.0, 0.3), stale_reported(4, 12.0, 1 / 3), stale_reported(2, 5.0, 0.2))
    assert (got.stale_groups, got.stale_share) == (12, 0.3333)
    assert (summary(started()).stale_groups, summary(started()).stale_share) == (0, 0.0)


KILLED: list[At] = [
    (40.0, perform(Incarnation(R0, 1))),
    (40.1, ev.FaultInjected("f0", Incarnation(R0, 1), True)),
    (40.3, ended(Incarnation(R0, 1))),
    (40.5, found(Incarnation(R0, 1), "exit_record", 40.3)),
    (40.6, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    (40.7, launch(Incarnation(R0, 2), N3)),
    (42.6, ev.Joined(Incarnation(R0, 2), N3, N3, 2)),
    (44.1, ev.VersionAvailable(Incarnation(R0, 2), Version(1, 1))),
    (44.1, ev.PhaseEntered(Incarnation(R0, 2), "generate")),
    (44.6, ev.FirstWorkDone(Incarnation(R0, 2))),
]


def test_recovery_of_a_rollout_has_the_duration_of_each_stage() -> None:
    got = summary(started(), KILLED)
    assert got.faults == 1
    assert got.recoveries == [
        Recovery(
            replica="rollout/0",
            failed=1,
            incarnation=2,
            cause="it ended",
            detector="exit_record",
            rung="restart in place",
            injected=True,
            node_before="n3",
            node_after="n3",
            detect_s=0.5,
            decide_s=0.1,
            start_s=2.0,
            weights_s=1.5,
            first_work_s=0.5,
            total_s=4.6,
        )
    ]


def test_failure_of_the_trainer_that_was_not_injected_is_a_recovery() -> None:
    trainer = Incarnation(TRAINER, 1)
    killed: list[At] = [
        (50.5, ended(trainer)),
        (51.0, found(trainer, "exit_record", 50.5)),
        (51.2, fence(trainer, Rung.SPARE)),
        (51.2, launch(Incarnation(TRAINER, 2), N5)),
        *up(70.0, Incarnation(TRAINER, 2), N5),
        (70.0, ev.FirstWorkDone(Incarnation(TRAINER, 2))),
    ]
    got = summary(started(20.0), committed(30.0, 1), killed, finished(100.0, 110.0))
    (recovery,) = got.recoveries
    assert (recovery.rung, recovery.injected, recovery.node_before, recovery.node_after) == (
        "spare node",
        False,
        "n2",
        "n5",
    )
    assert (recovery.detect_s, recovery.decide_s, recovery.start_s) == (0.5, 0.2, 18.8)
    assert (recovery.weights_s, recovery.first_work_s, recovery.total_s) == (None, 0.0, 19.5)


def test_fault_that_was_not_performed_explains_no_failure() -> None:
    later: list[At] = [
        (90.0, ended(Incarnation(R0, 1))),
        (90.5, found(Incarnation(R0, 1), "exit_record", 90.0)),
        (90.6, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    ]
    for answer in (
        ev.FaultInjected("f0", Incarnation(R0, 1), False, "gone"),
        ev.IntentSettled("fault:f0", False, "its manager died"),
    ):
        got = summary(started(), (40.0, perform(Incarnation(R0, 1))), (41.0, answer), later)
        assert got.faults == 0
        assert (got.recoveries[0].injected, got.recoveries[0].detect_s) == (False, 0.5)


def test_failure_long_after_a_faults_end_is_unprovoked() -> None:
    frozen = Fault("f0", FaultKind.FREEZE, R0, faults.FaultTrigger(step=1), seconds=5.0)
    incarnation = Incarnation(R0, 1)
    begins: list[At] = [(40.0, perform(incarnation, frozen)), (40.1, ev.FaultInjected("f0", incarnation, True))]
    over = (45.0, ev.FaultInjected("f0", incarnation, True, ended=True))
    for at, injected in ((46.0, True), (90.0, False)):
        fails: list[At] = [
            (at, found(incarnation, "worker_silence", at - 1.0)),
            (at + 0.1, fence(incarnation, Rung.IN_PLACE)),
        ]
        got = summary(started(), begins, over, fails)
        assert (got.faults, got.recoveries[0].injected, got.unprovoked) == (1, injected, int(not injected))


def test_node_crash_explains_failures_on_that_node_only() -> None:
    crash = InjectFault(Fault("f0", FaultKind.CRASH, STORE), "", N1, WHY)
    fails: list[At] = [
        (60.0, lost(N1, 50.0)),
        (60.1, ev.Decided(Exclude(N1, WHY))),
        (60.1, fence(Incarnation(STORE, 1), Rung.SPARE)),
        (60.1, fence(Incarnation(REWARD, 1), Rung.SPARE)),
        (61.0, found(Incarnation(R0, 1), "exit_record", 61.0)),
        (61.1, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    ]
    injected = ev.FaultInjected("f0", None, True, "n1 is gone", node=N1)
    got = summary(started(), (50.0, ev.Intended(crash)), (50.1, injected), fails)
    assert {r.replica: (r.injected, r.detect_s) for r in got.recoveries} == {
        STORE: (True, 10.0),
        REWARD: (True, 10.0),
        R0: (False, 0.0),
    }
    assert got.unprovoked == 1


def test_failure_while_the_disk_is_filled_is_injected() -> None:
    full = InjectFault(Fault("f0", FaultKind.DISK_FULL, seconds=20.0), "", NodeName(""), WHY)
    fails: list[At] = [
        (55.0, found(Incarnation(R0, 1), "exit_record", 55.0)),
        (55.1, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    ]
    got = summary(started(), (50.0, ev.Intended(full)), (50.1, ev.FaultInjected("f0", None, True)), fails)
    assert [r.injected for r in got.recoveries] == [True]


@pytest.mark.parametrize("performed", [True, False])
def test_really_full_disk_is_unprovoked_after_an_injected_one_without_end(performed: bool) -> None:
    full = InjectFault(Fault("f0", FaultKind.DISK_FULL, seconds=20.0), "", NodeName(""), WHY)
    events: list[At] = [(50.0, ev.Intended(full))]
    if performed:  # and then its manager died
        events.append((50.1, ev.FaultInjected("f0", None, True)))
    fails: list[At] = []
    for at, id in ((300.0, STORE), (300.5, TRAINER)):
        fails += [(at, found(Incarnation(id, 1), "exit_record", at)), (at, fence(Incarnation(id, 1), Rung.IN_PLACE))]
    got = summary(started(), events, fails)
    assert ([r.injected for r in got.recoveries], got.unprovoked) == ([False, False], 2)


def test_failure_of_a_launch_after_an_injected_node_crash_is_unprovoked() -> None:
    crash = InjectFault(Fault("f0", FaultKind.CRASH, STORE), "", N1, WHY)
    events: list[At] = [
        (50.0, ev.Intended(crash)),
        (50.1, ev.FaultInjected("f0", None, True, node=N1)),
        (60.0, lost(N1, 50.0)),
        (60.1, fence(Incarnation(STORE, 1), Rung.SPARE)),
        (90.0, launch(Incarnation(STORE, 2), N1)),
        *up(95.0, Incarnation(STORE, 2), N1),  # the node is back
        (200.0, found(Incarnation(STORE, 2), "exit_record", 200.0)),
        (200.1, fence(Incarnation(STORE, 2), Rung.IN_PLACE)),
    ]
    got = summary(started(), events)
    assert [r.injected for r in got.recoveries] == [True, False]
    assert got.unprovoked == 1


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_failure_that_ends_the_run_is_unprovoked_without_a_recovery(outcome: Outcome) -> None:
    why = Why(("No space left on device",))
    fails: list[At] = [
        (at, found(Incarnation(id, 1), "exit_record", at)) for at, id in ((70.0, STORE), (70.5, TRAINER))
    ]
    end: list[At] = [(71.0, ev.Decided(Finish(outcome, why))), (72.0, ev.RunEnded(outcome, "No space left"))]
    got = summary(started(), fails, end)
    assert got.recoveries == []
    assert got.unprovoked == (2 if outcome is Outcome.FAILED else 0)


def test_injected_failure_that_ends_the_run_is_not_unprovoked() -> None:
    incarnation = Incarnation(R0, 1)
    struck: list[At] = [
        (40.0, perform(incarnation)),
        (40.1, ev.FaultInjected("f0", incarnation, True)),
        (41.0, found(incarnation, "exit_record", 41.0)),
    ]
    end = (42.0, ev.Decided(Finish(Outcome.FAILED, WHY)))
    assert summary(started(), struck, end).unprovoked == 0


def test_fault_triggered_by_an_api_call_is_measured_from_that_call() -> None:
    raised = Fault("f0", FaultKind.EXCEPTION, R0)
    incarnation = Incarnation(R0, 1)
    fails: list[At] = [(71.0, found(incarnation, "exit_record", 71.0)), (71.0, fence(incarnation, Rung.IN_PLACE))]
    got = summary(
        started(), (40.0, perform(incarnation, raised)), (70.0, ev.FaultInjected("f0", incarnation, True)), fails
    )
    assert (got.recoveries[0].injected, got.recoveries[0].detect_s) == (True, 1.0)


def test_fault_with_unknown_result_explains_failures_but_is_not_counted() -> None:
    incarnation = Incarnation(R0, 1)
    fails: list[At] = [(41.0, found(incarnation, "exit_record", 41.0)), (41.0, fence(incarnation, Rung.IN_PLACE))]
    unknown = ev.FaultInjected("f0", incarnation, False, unknown=True)
    got = summary(started(), (40.0, perform(incarnation)), (40.5, unknown), fails)
    assert (got.faults, got.recoveries[0].injected) == (0, True)


def test_lost_node_fails_its_replicas_from_its_first_symptom_on() -> None:
    moved: list[At] = [
        (60.0, lost(N1, 50.0)),
        (60.1, ev.Decided(Exclude(N1, WHY))),
        (60.1, fence(Incarnation(STORE, 1), Rung.SPARE)),
        (60.1, fence(Incarnation(REWARD, 1), Rung.SPARE)),
        (60.2, launch(Incarnation(STORE, 2), N5)),
        (60.2, launch(Incarnation(REWARD, 2), N5)),
    ]
    got = summary(started(), moved)
    assert [(r.replica, r.detect_s, r.decide_s, r.node_after) for r in got.recoveries] == [
        (STORE, 10.0, 0.1, "n5"),
        (REWARD, 10.0, 0.1, "n5"),
    ]
    assert all(r.start_s is None and r.total_s is None for r in got.recoveries)


def test_restart_tried_twice_is_summarised_with_the_incarnation_that_joined() -> None:
    again: list[At] = [
        (40.0, ended(Incarnation(R0, 1))),
        (40.5, found(Incarnation(R0, 1), "exit_record", 40.0)),
        (40.6, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
        (40.7, launch(Incarnation(R0, 2), N3)),
        (40.8, ev.IntentSettled(tag_of(RUN, Incarnation(R0, 2)), False, "no such node")),
        (41.8, launch(Incarnation(R0, 3), N5)),
        (43.6, ev.Joined(Incarnation(R0, 3), N5, N5, 2)),
    ]
    (recovery,) = summary(started(), again).recoveries
    assert (recovery.incarnation, recovery.node_after, recovery.start_s) == (3, "n5", 3.0)


def test_detection_counts_from_the_first_symptom() -> None:
    trainer = Incarnation(TRAINER, 1)
    hung: list[At] = [
        (90.0, found(trainer, "phase_overdue", 30.0)),
        (90.2, fence(trainer, Rung.IN_PLACE)),
        (91.0, launch(Incarnation(TRAINER, 2), N2)),
        *up(95.0, Incarnation(TRAINER, 2), N2),
    ]
    got = summary(started(20.0), committed(25.0, 1), hung, finished(100.0, 110.0))
    assert (got.recoveries[0].detect_s, got.recoveries[0].decide_s) == (60.0, 0.2)


def test_cleared_finding_is_no_symptom_of_a_later_failure() -> None:
    wrong = found(Incarnation(R0, 1), "worker_silence", 30.0)
    cleared = ev.FindingChanged(msgspec.structs.replace(wrong.finding, verdict=Verdict.OK, evidence=()))
    dies: list[At] = [
        (80.0, ended(Incarnation(R0, 1))),
        (80.5, found(Incarnation(R0, 1), "exit_record", 80.0)),
        (80.6, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    ]
    got = summary(started(20.0), (40.0, wrong), (45.0, cleared), dies, finished(100.0, 110.0))
    assert got.recoveries[0].detect_s == 0.5


def test_replica_fenced_again_before_it_joined_is_one_recovery() -> None:
    lost_node: list[At] = [
        (60.0, lost(N3, 50.0)),
        (60.1, ev.Decided(Exclude(N3, WHY))),
        (60.1, fence(Incarnation(R0, 1), Rung.REPLACEMENT)),
        (900.0, fence(Incarnation(R0, 1), Rung.DEGRADED)),
    ]
    (recovery,) = summary(started(), lost_node).recoveries
    assert (recovery.rung, recovery.detect_s, recovery.start_s) == ("go on degraded", 10.0, None)
    refused: list[At] = [
        (40.0, ended(Incarnation(R0, 1))),
        (40.6, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
        (40.7, launch(Incarnation(R0, 2), N3)),
        (40.8, ev.IntentSettled(tag_of(RUN, Incarnation(R0, 2)), False, "no such node")),
        (40.9, fence(Incarnation(R0, 2), Rung.DEGRADED)),
    ]
    assert [r.rung for r in summary(started(), refused).recoveries] == ["go on degraded"]


def test_replica_that_fails_again_after_it_joined_is_another_recovery() -> None:
    again: list[At] = [(60.0, ended(Incarnation(R0, 2))), (60.1, fence(Incarnation(R0, 2), Rung.DEGRADED))]
    assert [r.rung for r in summary(started(), KILLED, again).recoveries] == ["restart in place", "go on degraded"]


def test_steps_committed_without_a_manager_may_be_recorded_in_any_order() -> None:
    events = [committed(40.0, 5), *(committed(40.0, step, step / 10) for step in (3, 2, 4, 5))]
    got = summary(started(), committed(30.0, 1, 0.1), events)
    assert (got.steps, got.reward_first10, got.reward_last10) == (5, 0.3, 0.3)
    words = [committed(40.0, 30), *(committed(41.0, step, step / 100) for step in range(29, 0, -1))]
    got = summary(started(), words)
    assert (got.steps, got.reward_first10, got.reward_last10) == (30, 0.055, 0.245)


def test_agents_and_the_runs_end_are_not_recoveries() -> None:
    agent = Incarnation(ReplicaId("agent/n3"), 1)
    got = summary(
        started(),
        (15.0, launch(agent, N3)),
        (30.0, fence(agent, Rung.IN_PLACE)),
        finished(40.0, 50.0)[0],
        (41.0, ended(Incarnation(R0, 1))),
        (42.0, fence(Incarnation(R0, 1), Rung.IN_PLACE)),
    )
    assert got.recoveries == []


def test_managers_are_counted() -> None:
    got = summary(started(20.0), (60.0, ev.ManagerStarted("other", 2)), finished(100.0, 110.0))
    assert got.epochs == 2


def test_the_summary_is_written_from_the_journal(tmp_path: Path) -> None:
    run = RunDir(tmp_path / RUN)
    run.create()
    journal = Journal(run, 1)
    events: list[At] = [(0.0, ev.RunStarted(RUN, job())), *started(), *KILLED, *finished(100.0, 110.0)]
    for seq, (at, event) in enumerate(events, 1):
        journal.append(ev.Stamped(seq, at, 1, event))
    journal.close()
    written = write_summary(run)
    assert written == summarize((ev.Stamped(s, at, 1, e) for s, (at, e) in enumerate(events, 1)), str(run.path))
    assert msgspec.json.decode(run.summary.read_bytes(), type=Summary) == written


def test_replica_down_at_the_runs_end_is_not_recovered_by_its_resumption() -> None:
    lost_at_the_end: list[At] = [(50.0, ended(Incarnation(R0, 1))), (50.0, fence(Incarnation(R0, 1), Rung.IN_PLACE))]
    again: list[At] = [(300.0, ev.Resumed("ada", "r1", job())), (310.0, launch(Incarnation(R0, 2), N3))]
    again += [*up(320.0, Incarnation(R0, 2), N3), (321.0, ev.FirstWorkDone(Incarnation(R0, 2)))]
    (got,) = summary(started(20.0), lost_at_the_end, finished(51.0, 60.0), again).recoveries
    assert (got.replica, got.start_s, got.total_s) == (R0, None, None)


def test_time_between_the_runs_end_and_resumption_does_not_count() -> None:
    again = (300.0, ev.Resumed("ada", "r1", job()))
    relaunched = [(310.0, launch(Incarnation(id, 2), node)) for id, node in NODES.items()]
    works = [event for id, node in NODES.items() for event in up(320.0, Incarnation(id, 2), node)]
    over = (400.0, ev.RunEnded(Outcome.FAILED, "x"))
    got = summary(started(20.0), committed(50.0, 1), finished(100.0, 110.0), again, relaunched, works, over)
    assert (got.outcome, got.why, got.run_seconds) == ("failed", "x", 210.0)


def test_outage_tokens_are_counted_within_one_epoch() -> None:
    def counted(at: float, total: int, away: bool) -> At:
        return at, ev.TokensCounted(total, away)

    one = [counted(60.0, 1000, True), counted(62.0, 1100, True), counted(70.0, 1700, False)]
    two = [counted(80.0, 2000, True), (81.0, ev.ManagerStarted("login", 2)), counted(90.0, 400, False)]
    got = summary(started(20.0), one, two)
    assert got.outage_tokens == 700


def test_moved_or_gang_restarted_member_is_no_recovery() -> None:
    moved = (40.0, ev.Decided(Fence(Incarnation(R0, 1), Rung.REPLACEMENT, WHY, target_node=N5, charged=False)))
    again = [(41.0, launch(Incarnation(R0, 2), N5)), *up(45.0, Incarnation(R0, 2), N5)]
    got = summary(started(20.0), committed(30.0, 1), moved, again, finished(100.0, 110.0))
    assert got.recoveries == []


@given(st.dictionaries(st.sampled_from(METRICS), st.floats()))
def test_summary_is_written_with_any_reported_metrics(metrics: dict[str, float]) -> None:
    got = summary(started(20.0), (50.0, ev.StepCommitted(Incarnation(TRAINER, 1), 1, metrics)), finished(100.0, 110.0))
    assert msgspec.json.decode(msgspec.json.encode(got))["steps"] == 1
