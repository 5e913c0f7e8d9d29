"""Scenarios agree with scenarios.md in draws, rounds, barriers, queues, and failures that need not be found."""

from __future__ import annotations

from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from rrl.benchmarks.scenarios.baselines import Baseline, FixedTimeout
from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.judge import CurrentIncarnations
from rrl.benchmarks.scenarios.load import ScenarioError, load
from rrl.benchmarks.scenarios.methods import OURS, judge_of
from rrl.benchmarks.scenarios.play import Played, play
from rrl.benchmarks.scenarios.rhythms import Loads
from rrl.benchmarks.scenarios.values import Drawn
from rrl.core.types import DataReport, Incarnation, ReplicaId

QUICK = """
[roles.rollout]
replicas = 2
starts = "5s"
once = []
[roles.trainer]
starts = "5s"
once = []
"""
"""Tables of roles whose first round begins after a few seconds."""


def phase(role: str, name: str, lasts: str, more: str = "") -> str:
    return f'[[roles.{role}.rhythm]]\nphase = "{name}"\nlasts = {lasts}\n{more}\n'


def event(do: str, who: str, at: str, more: str = "") -> str:
    return f'[[event]]\nat = {at}\ndo = "{do}"\nwho = "{who}"\n{more}\n'


def scenario(tmp_path: Path, text: str) -> Scenario:
    file = tmp_path / "one.toml"
    file.write_text(f'about = "x"\nlasts = "12min"\njitter = "0s"\n{text}')
    return load(file)


class Recorder(Baseline):
    """A judge that finds only proofs, and records the contents of every heartbeat and the loads."""

    def __init__(self) -> None:
        super().__init__(FixedTimeout(inf))
        self.phases: dict[str, list[tuple[float, str]]] = {}
        """For each replica, the times at which its heartbeats first named each of its phases."""
        self._newest: dict[str, tuple[Incarnation, str]] = {}
        self.waits_for: dict[tuple[str, str], set[ReplicaId | None]] = {}
        self.loads: dict[tuple[str, str], Loads] = {}

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        super().heartbeat(incarnation, phase, done, waits_for, data, now)
        if self._newest.get(incarnation.replica) != (incarnation, phase):
            self._newest[incarnation.replica] = incarnation, phase
            self.phases.setdefault(incarnation.replica, []).append((now, phase))
        self.waits_for.setdefault((incarnation.replica, phase), set()).add(waits_for)

    def load(self, incarnation: Incarnation, loads: Loads, has_gpu: bool, from_agent: bool, now: float) -> None:
        if passed := self.phases.get(incarnation.replica):
            self.loads[incarnation.replica, passed[-1][1]] = loads

    def begins(self, replica: str, phase: str) -> list[float]:
        return [at for at, name in self.phases[replica] if name == phase]


def recorded(tmp_path: Path, text: str, seed: int = 0) -> Recorder:
    judge = Recorder()
    play("one", scenario(tmp_path, text), seed, judge)
    return judge


# ── draws ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pareto_draws_have_a_least_a_heavy_tail_and_may_be_cut() -> None:
    random = Random(1)
    drawn = [Drawn("pareto", 60.0, 1.5).draw(random) for _ in range(4000)]
    assert min(drawn) >= 60.0
    assert median(drawn) == pytest.approx(60.0 * 2 ** (1 / 1.5), rel=0.1)
    assert max(drawn) > 1800.0
    assert max(Drawn("pareto", 60.0, 1.5, 300.0).draw(random) for _ in range(4000)) == 300.0


def test_mixed_draws_come_from_their_parts_by_weight() -> None:
    random = Random(1)
    both = Drawn("mixed", parts=((3.0, Drawn("fixed", 60.0)), (1.0, Drawn("uniform", 600.0, 900.0))))
    drawn = [both.draw(random) for _ in range(4000)]
    assert {60.0} == {one for one in drawn if one < 600.0}
    assert fmean(one >= 600.0 for one in drawn) == pytest.approx(0.25, abs=0.03)


def test_two_events_share_one_draw_of_each_seed(tmp_path: Path) -> None:
    text = (
        '[draws]\nstall = {uniform = ["1min", "3min"]}\n'
        + event("freeze", "rollout/0", '"2min"', 'for = {draw = "stall"}')
        + event("freeze", "rollout/1", '"2min"', 'for = {draw = "stall"}')
        + event("crash", "rollout/2", '{draw = "stall"}', 'after = "freeze0"')
    ).replace('do = "freeze"', 'do = "freeze"\nname = "freeze0"', 1)
    ends = []
    for seed in (0, 1):
        judge = Gaps()
        play("one", scenario(tmp_path, text), seed, judge)
        ends.append((judge.resumed["rollout/0"], judge.resumed["rollout/1"], judge.ended["rollout/2"]))
    assert [max(each) - min(each) <= 2.0 for each in ends] == [True, True]
    assert abs(ends[0][0] - ends[1][0]) > 2.0


class Gaps(Recorder):
    """A judge that records when heartbeats of a replica came again after 30 s or more, and when the replica ended."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        super().heartbeat(incarnation, phase, done, waits_for, data, now)
        if now - self._heard_at.get(incarnation.replica, now) > 30.0:
            self.resumed[incarnation.replica] = now
        self._heard_at[incarnation.replica] = now

    def exited(
        self, incarnation: Incarnation, code: int | None, signal: int | None, why: str, last_line: str, now: float
    ) -> None:
        super().exited(incarnation, code, signal, why, last_line, now)
        self.ended.setdefault(incarnation.replica, now)


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_phase_with_every_rounds_3_occurs_in_every_third_round_only(tmp_path: Path) -> None:
    rhythm = phase("trainer", "train", '"20s"') + phase("trainer", "checkpoint", '"4s"', "every_rounds = 3")
    judge = recorded(tmp_path, QUICK + rhythm + phase("trainer", "publish", '"2s"'))
    names = [name for _, name in judge.phases["trainer/0"] if name not in ("starting", "publish")]
    assert names[:8] == ["train", "train", "train", "checkpoint", "train", "train", "train", "checkpoint"]


def test_a_replica_that_restarts_begins_the_interrupted_round_again(tmp_path: Path) -> None:
    rhythm = phase("trainer", "train", '"60s"') + phase("trainer", "checkpoint", '"10s"', "every_rounds = 2")
    crash = event("crash", "trainer/0", '"90s"')
    judge = recorded(tmp_path, QUICK + rhythm + phase("trainer", "publish", '"5s"') + crash)
    names = [name for _, name in judge.phases["trainer/0"] if name != "starting"]
    assert names[:7] == ["train", "publish", "train", "train", "checkpoint", "publish", "train"]


# ── barriers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
BARRIER = (
    QUICK
    + phase("rollout", "generate", '{uniform = ["20s", "60s"]}', "rate = 9.0")
    + phase("rollout", "wait_others", '"2s"', 'until = {rollout = "generate"}')
)


def test_replicas_leave_a_barrier_together_when_the_slowest_has_arrived(tmp_path: Path) -> None:
    judge = recorded(tmp_path, BARRIER)
    first, second = (judge.begins(f"rollout/{index}", "generate") for index in (0, 1))
    arrived = [judge.begins(f"rollout/{index}", "wait_others") for index in (0, 1)]
    assert len(first) > 8
    for a, b in zip(first[1:], second[1:], strict=True):
        assert abs(a - b) <= 3.0
        last = max(at for each in arrived for at in each if at <= max(a, b))
        assert max(a, b) - last <= 3.0
    assert judge.loads["rollout/0", "wait_others"].gpu == 0.0


def test_barrier_stays_closed_until_a_failed_replica_has_arrived_again(tmp_path: Path) -> None:
    judge = recorded(tmp_path, BARRIER + event("crash", "rollout/0", '"3min"'))
    waits = [
        end - begin
        for begin, end in zip(
            judge.begins("rollout/1", "wait_others"), judge.begins("rollout/1", "generate")[1:], strict=False
        )
    ]
    generates = [judge.begins(f"rollout/{index}", "generate") for index in (0, 1)]
    assert max(waits) < 120.0
    assert abs(generates[0][-1] - generates[1][-1]) <= 3.0


def test_synchronous_roles_take_turns(tmp_path: Path) -> None:
    text = (
        QUICK
        + phase("rollout", "generate", '{uniform = ["20s", "40s"]}', "rate = 9.0")
        + phase("rollout", "wait_weights", '"0s"', 'until = {trainer = "publish"}\nreports_waits_for = true')
        + phase("trainer", "wait_data", '"0s"', 'until = {rollout = "generate"}')
        + phase("trainer", "train", '"30s"')
        + phase("trainer", "publish", '"5s"')
        + event("crash", "trainer/0", '"4min"')
    )
    judge = recorded(tmp_path, text)
    trains, generates = judge.begins("trainer/0", "train"), judge.begins("rollout/0", "generate")
    assert len(trains) >= 7
    assert not [at for at in generates if any(train <= at < train + 30.0 for train in trains[:2])]
    assert judge.waits_for["rollout/0", "wait_weights"] == {"trainer/0"}
    assert judge.phases["trainer/0"][-1][0] > 600.0


# ── queues ───────────────────────────────────────────────────────────────────────────────────────────────────────────
QUEUE = (
    QUICK
    + "[queues.groups]\nholds = 6\n"
    + phase("rollout", "generate", '"10s"', "rate = 9.0\nputs = {groups = 1}")
    + phase("trainer", "wait_data", '"0s"', "takes = {groups = 4}")
    + phase("trainer", "train", '"30s"')
)


def test_consumer_waits_until_the_queue_has_enough(tmp_path: Path) -> None:
    judge = recorded(tmp_path, QUEUE)
    first = judge.begins("trainer/0", "train")[0]
    puts = sorted(at + 10.0 for index in (0, 1) for at in judge.begins(f"rollout/{index}", "generate"))
    assert first >= 20.0
    assert puts


def test_producers_stop_when_the_queue_is_full(tmp_path: Path) -> None:
    judge = Progress()
    play("one", scenario(tmp_path, QUEUE + event("hang", "trainer/0", '"3min"')), 0, judge)
    assert judge.rises
    assert max(judge.rises) < 260.0
    assert judge.loads["rollout/0", "generate"].gpu == 0.0


class Progress(Recorder):
    """A judge that records when the progress counter of a rollout rose."""

    def __init__(self) -> None:
        super().__init__()
        self.rises: list[float] = []
        self._done: dict[str, int] = {}

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        super().heartbeat(incarnation, phase, done, waits_for, data, now)
        if incarnation.replica.startswith("rollout/") and done > self._done.get(incarnation.replica, 0):
            self.rises.append(now)
        self._done[incarnation.replica] = done


# ── state of a process as the agent reads it ─────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("do", "more", "state"),
    [
        ("freeze", "", "T"),
        ("freeze", 'process_state = "t"', "t"),
        ("hang", "", "S"),
        ("hang", 'process_state = "D"', "D"),
    ],
)
def test_agent_reports_the_state_of_a_process_that_stands_still(tmp_path: Path, do: str, more: str, state: str) -> None:
    judge = States()
    play("one", scenario(tmp_path, event(do, "rollout/1", '"5min"', f'for = "1min"\n{more}')), 0, judge)
    assert {one for at, one in judge.states if 302.0 <= at <= 359.0} == {state}
    assert {one for at, one in judge.states if not 300.0 <= at <= 362.0} == {"R"}


class States(Recorder):
    """A judge that records the process states of rollout/1 that the agent reads."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[float, str]] = []

    def load(self, incarnation: Incarnation, loads: Loads, has_gpu: bool, from_agent: bool, now: float) -> None:
        super().load(incarnation, loads, has_gpu, from_agent, now)
        if incarnation.replica == "rollout/1":
            self.states.append((now, loads.state))


# ── the manager's clock ──────────────────────────────────────────────────────────────────────────────────────────────
def jump(how: str) -> str:
    away = '[[event]]\nat = "5min"\ndo = "manager_restart"\nfor = "60s"\nname = "away"\n'
    return f'[[event]]\nat = "2min"\ndo = "clock_jumps"\n{how}\n{away}'


@pytest.mark.parametrize(("how", "clock"), [('forward = "1h"', 3960.0), ('back = "1h"', 300.0)])
def test_clock_of_the_next_manager_is_that_of_its_node_but_never_earlier(
    tmp_path: Path, how: str, clock: float
) -> None:
    judge = Clock()
    play("one", scenario(tmp_path, jump(how)), 0, judge)
    assert judge.newest_before == pytest.approx(300.0, abs=2.0)
    assert judge.begins_at == pytest.approx(clock, abs=2.0)


class Clock(Recorder):
    """A judge that records the manager's time at the last heartbeat before its restart, and at the restart."""

    newest_before = begins_at = 0.0

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None:
        if not self.begins_at:
            self.newest_before = now

    def restarted(self, current: CurrentIncarnations, now: float, clock_ahead: float) -> None:
        self.begins_at = now


@pytest.mark.parametrize("how", ['forward = "1h"', 'back = "1h"'])
def test_failures_are_found_as_usual_after_a_clock_jump(tmp_path: Path, how: str) -> None:
    lost = event("gpu_lost", "n4", '"9min"') + event("crash", "rollout/0", '"8min"')
    truths = (
        '[[truth]]\nwho = "n4"\ncause = "gpu"\nof = "gpu_lost"\nwithin = "90s"\n'
        '[[truth]]\nwho = "rollout/0"\ncause = "process"\nof = "crash"\nwithin = "30s"\n'
    )
    result = played(tmp_path, jump(how) + lost + truths)
    assert ([one.in_time for one in result.outcomes], result.false, result.broken) == ([True, True], (), "")


# ── expected findings ────────────────────────────────────────────────────────────────────────────────────────────────
def played(tmp_path: Path, text: str) -> Played:
    made = scenario(tmp_path, text)
    return play("one", made, 0, judge_of(OURS, made))


@pytest.mark.parametrize("do", ["crash", "slow"])
def test_truth_that_is_not_required_is_neither_missed_nor_a_false_alarm(tmp_path: Path, do: str) -> None:
    happens = event(do, "rollout/1", '"5min"', "factor = 0.9" if do == "slow" else "")
    truth = '[[truth]]\nwho = "rollout/1"\ncause = "process"\nrequired = false\n'
    result = played(tmp_path, happens + truth)
    assert (result.outcomes, result.false, result.broken) == ((), (), "")
    assert bool(played(tmp_path, happens).false) == (do == "crash")


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        (phase("rollout", "a", '{normal = ["9s", "9s"]}'), "roles.rollout.rhythm.0.lasts: there is no draw normal"),
        (phase("rollout", "a", '{uniform = ["9s", "never"]}'), 'uniform is written {uniform = ["10s", "30s"]}'),
        (phase("rollout", "a", '{lognormal = ["9s", 7]}'), "median, and sigma from 0 to 2"),
        (phase("rollout", "a", '{pareto = ["never", 7]}'), '"never" cannot be in pareto'),
        (phase("rollout", "a", '{pareto = ["9s", 1.5, "5s"]}'), "pareto is written"),
        (phase("rollout", "a", '{mixed = [["9s", 0.5]]}'), "mixed is written"),
        (phase("rollout", "a", '{mixed = [[1, "9"]]}'), "'9' is not a duration"),
        (phase("rollout", "a", '{draw = "nap"}'), "rhythm.0.lasts: there is no nap in [draws]; there are none"),
        (
            'draws = {nap = "9s"}\n'
            + phase("rollout", "a", '{draw = "nop"}')
            + event("hang", "rollout/0", '"9s"', 'for = {draw = "nap"}'),
            'there is no nop in [draws]; did you mean "nap"?',
        ),
        ('draws = {nap = "9s"}\n', 'draws.nap: nothing uses it; write {draw = "nap"}'),
        ('draws = {nap = {draw = "nap"}}\n', "draws.nap: is itself a draw"),
        (phase("rollout", "a", '"9s"', 'until = {rolout = "a"}'), 'there is no role rolout; did you mean "rollout"?'),
        (phase("rollout", "a", '"9s"', 'until = {trainer = "tran"}'), 'no phase tran; did you mean "train"?'),
        (phase("rollout", "a", '"9s"', 'until = {rollout = "a"}'), "a does not come before a, so that a never ends"),
        (phase("rollout", "a", '"9s"', "takes = {groups = 1}"), "no queue groups; there are none: write [queues.NAME]"),
        (
            "queues.groups.holds = 3\n" + phase("rollout", "a", '"9s"', "takes = {groups = 4}"),
            "rhythm.0.takes: 4 of groups are more than the queue holds: 3",
        ),
        ("queues.groups.holds = 3\n", "queues.groups: no phase of a rhythm adds units"),
        (phase("rollout", "a", '"9s"', "takes = {groups = 0.5}"), "takes.groups: must be a whole number"),
        (phase("rollout", "a", '"9s"', "every_rounds = 0"), "every_rounds: must be at least 1, not 0"),
        (phase("rollout", "a", '"9s"', "every_rounds = 2").replace("rhythm", "once"), "is a key of the rhythm"),
        (phase("rollout", "a", '"9s"', "reports_waits_for = true"), "needs waits or until"),
        (event("hang", "rollout/0", '"9s"', 'process_state = "T"'), "process_state of hang must be S or D, not T"),
        (event("crash", "rollout/0", '"9s"', 'process_state = "T"'), "crash has no process_state"),
        ('[[event]]\nat = "9s"\ndo = "clock_jumps"\n', "event.0: clock_jumps needs forward or back"),
        ('[[event]]\nat = "9s"\ndo = "clock_jumps"\nback = "-9s"\n', "event.0.back: '-9s' is not a duration"),
        (
            event("crash", "rollout/0", '"9s"') + '[[truth]]\nwho = "rollout/0"\ncause = "gpu"\nwithin = "9s"\n'
            "required = false\n",
            "truth.0: within has no meaning with required = false",
        ),
    ],
)
def test_mistake_in_a_new_key_is_one_line_with_a_correct_form(tmp_path: Path, text: str, expected_text: str) -> None:
    with pytest.raises(ScenarioError) as error:
        scenario(tmp_path, text)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/one.toml")
    assert expected_text in line
