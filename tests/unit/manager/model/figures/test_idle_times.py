"""Totals of the processes' clocks stay correct over restarts, repeated reports and replays."""

from __future__ import annotations

import random
from itertools import accumulate

import msgspec
import pytest

from rrl.core.phases import OTHER_PHASE, ClockReading, PhaseTime
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.model.figures import idle_times
from rrl.manager.model.figures.idle_times import (
    MAX_PHASES,
    POINT_INTERVAL_S,
    RECENT_S,
    START,
    IdleTimes,
    idle_shares,
    phase_times,
    rate,
    with_readings,
    with_step,
)

TRAINER, R0, R1 = (ReplicaId(name) for name in ("trainer/0", "rollout/0", "rollout/1"))
S = 10**9


def reading(began: int = 1, done: int = 0, **seconds: float) -> ClockReading:
    """Return a reading with these seconds by phase. ``wait_data`` and ``wait_work`` are idle."""
    causes = {"wait_data": "rollouts", "wait_work": "work"}
    times = tuple(PhaseTime(phase, causes.get(phase, ""), int(spent * S)) for phase, spent in seconds.items())
    return ClockReading(began, done, times)


def reported(times: IdleTimes, at: float, replica: ReplicaId, number: int, clock: ClockReading) -> IdleTimes:
    return with_readings(times, at, [(Incarnation(replica, number), clock)])


def seconds(times: IdleTimes, role: str) -> dict[str, float]:
    return {time.phase: time.ns / S for time in phase_times(times, role)}


def test_readings_of_several_replicas_are_added_up_by_role() -> None:
    both = [(Incarnation(R0, 1), reading(generate=6, wait_work=2)), (Incarnation(R1, 1), reading(generate=2))]
    times = with_readings(IdleTimes(), 10.0, both)
    assert seconds(times, "rollout") == {"generate": 8, "wait_work": 2}
    assert idle_shares(times.now, START, "rollout") == {"work": 0.2}
    assert idle_shares(times.now, START, "trainer") == {}


def test_totals_of_a_replaced_process_stay() -> None:
    times = reported(IdleTimes(), 10.0, R0, 1, reading(done=30, generate=6, wait_work=2))
    times = reported(times, 20.0, R0, 2, reading(began=9, done=5, generate=1))
    times = reported(times, 30.0, R0, 2, reading(began=9, done=9, generate=4, wait_work=1))
    assert seconds(times, "rollout") == {"generate": 10, "wait_work": 3}
    assert times.now.roles["rollout"].done == 39


def test_last_reports_of_a_killed_process_count_also_beside_those_of_its_successor() -> None:
    both = [(Incarnation(R0, 2), reading(began=9, generate=1)), (Incarnation(R0, 1), reading(generate=6))]
    assert seconds(with_readings(IdleTimes(), 10.0, both), "rollout") == {"generate": 7}


def test_second_process_of_one_incarnation_starts_new_totals() -> None:
    """The command of a role may run one worker program after another."""
    times = reported(IdleTimes(), 10.0, R0, 1, reading(began=5, generate=6))
    times = reported(times, 20.0, R0, 1, reading(began=8, generate=2))
    assert seconds(times, "rollout") == {"generate": 8}


@pytest.mark.parametrize(
    ("number", "late"),
    [
        (2, reading(began=5, generate=2)),
        (2, reading(began=5, generate=1)),
        (2, reading(began=4, generate=9)),
        (1, reading(began=7, generate=9)),
    ],
    ids=["repeated", "older", "earlier process", "earlier incarnation"],
)
def test_outdated_report_changes_nothing(number: int, late: ClockReading) -> None:
    times = reported(IdleTimes(), 10.0, R0, 2, reading(began=5, generate=2))
    assert seconds(reported(times, 20.0, R0, number, late), "rollout") == {"generate": 2}


def test_replay_with_repeated_and_grouped_records_gives_the_same_totals() -> None:
    """A replay gets the newest totals again. It does not matter which readings were recorded together."""
    chance = random.Random(5)
    history: list[tuple[Incarnation, ClockReading]] = []
    for number in range(1, 5):
        spent = list(accumulate(chance.randint(1, 9) for _ in range(5)))
        history += [
            (Incarnation(R0, number), reading(began=number * 100, generate=one, wait_work=one)) for one in spent
        ]
    one_by_one = IdleTimes()
    for at, one in enumerate(history):
        one_by_one = with_readings(one_by_one, float(at), [one])
    grouped, position = IdleTimes(), 0
    while position < len(history):
        end = position + chance.randint(1, 6)
        latest = {(one[0], one[1].began): one for one in history[max(0, position - 2) : end]}
        grouped, position = with_readings(grouped, float(end), latest.values()), end
    assert phase_times(grouped, "rollout") == phase_times(one_by_one, "rollout")
    assert grouped.now.roles == one_by_one.now.roles


def test_recent_shares_are_those_of_the_last_minutes() -> None:
    times = IdleTimes()
    for minute in range(60):  # half an hour without a wait, then half an hour of waiting
        worked, waited = 60.0 * min(minute, 30), 60.0 * max(0, minute - 30)
        times = reported(times, 60.0 * minute, TRAINER, 1, reading(train=worked + 1, wait_data=waited))
    assert idle_shares(times.now, times.before, "trainer") == {"rollouts": 1.0}
    assert idle_shares(times.now, START, "trainer")["rollouts"] == pytest.approx(29 / 59, abs=0.001)
    assert times.now.at - times.before.at == RECENT_S


def test_points_are_few_and_reach_over_the_last_minutes() -> None:
    times = IdleTimes()
    for at in range(0, 3600, 5):
        times = reported(times, float(at), TRAINER, 1, reading(train=at + 1))
        assert len(times.points) <= RECENT_S / POINT_INTERVAL_S + 3
    assert RECENT_S <= times.now.at - times.before.at <= RECENT_S + 2 * POINT_INTERVAL_S
    assert times.now.at == 3595.0


def test_before_the_second_point_the_recent_shares_are_those_of_the_run() -> None:
    times = reported(IdleTimes(), 10.0, TRAINER, 1, reading(train=3, wait_data=1))
    assert idle_shares(times.now, times.before, "trainer") == {"rollouts": 0.25}
    assert rate(100, times.now, times.before) is None


def test_rates_are_units_per_second_of_the_manager_between_two_points() -> None:
    times = with_step(IdleTimes(), {"tokens": 50.0})
    times = reported(times, 100.0, R0, 1, reading(done=1000, generate=5))
    times = with_step(with_step(times, {"tokens": 150.0}), {})
    times = reported(times, 150.0, R0, 1, reading(done=2500, generate=6))
    new, old = times.now, times.before
    assert rate(new.roles["rollout"].done - old.roles["rollout"].done, new, old) == 30.0
    assert (old.trained_tokens, new.trained_tokens) == (50, 200)


def test_totals_of_a_role_stay_small_however_many_phases_it_makes_up() -> None:
    times = IdleTimes()
    for number in range(1, 2 * MAX_PHASES):
        clock = ClockReading(number, 0, (PhaseTime(f"shard {number}", "", S),))
        times = reported(times, float(number), R0, number, clock)
    spent = seconds(times, "rollout")
    assert len(spent) <= MAX_PHASES + 1
    assert spent[OTHER_PHASE] > 1
    assert sum(spent.values()) == 2 * MAX_PHASES - 1


def test_times_survive_the_encodings_of_the_journal_and_of_json() -> None:
    times = reported(
        with_step(IdleTimes(), {"tokens": 3.0}), 10.0, R0, 1, reading(began=2**60, generate=6, wait_work=2)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(times), type=idle_times.IdleTimes) == times
    assert msgspec.json.decode(msgspec.json.encode(times), type=idle_times.IdleTimes) == times
