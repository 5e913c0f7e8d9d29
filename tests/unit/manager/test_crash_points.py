"""The manager is killed at any record, and the run ends as without the kill.

No action is repeated, and nothing is left behind. The real manager (journal, lease, reconciliation, executor,
detectors, planner) runs in :class:`Site` in virtual time. Together the scripts contain every action and decision:
rollouts and members of a gang are killed, nodes die and are replaced, users send commands, and the whole run restarts,
ends and is resumed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Struct

from rrl.core.run_spec import HealthSpec, Recovery
from rrl.core.task_spec import EvalSpec
from rrl.core.types import AGENT, STANDBY_ROLE, Outcome, ReplicaId, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import (
    Decision,
    ExternalAction,
    Fence,
    Launch,
    Release,
    Request,
    StopStep,
    WithdrawGuests,
)
from rrl.manager.model.state import State, Status
from rrl.tests.support.manager.jobs import (
    REWARD,
    ROLLOUTS,
    RUN,
    STORE,
    TRAINER,
    command,
    commands,
    gang_job,
    in_node_groups,
    job,
    with_pool,
)
from rrl.tests.support.manager.scripted_runs import (
    COMPLETES,
    FAULT,
    LIMITS,
    Script,
    assert_ended_well,
    assert_over,
    recorded_lifetimes_ns,
    reported_lifetimes_ns,
    run_to_end,
    starts,
)
from rrl.tests.support.manager.site import Site

NODE_GROUPS = in_node_groups(limits=LIMITS, faults=[FAULT])
R0, R1 = ROLLOUTS
MEMBER = ReplicaId("trainer/0.1")
SPARSE = 29
"""``make test`` kills the manager at every ``SPARSE``-th record, and ``make test-long`` at each record."""
SPARSE_FIRST = 5
"""Number in place of ``SPARSE`` for the simplest script and for a rotation, which are short and need a closer test."""


ELSEWHERE: set[type] = {
    ev.ManagerStopped,
    ev.FaultRequested,
    ev.StacksCollected,
    ev.BaselinesLearned,
    ev.NoteChanged,
    ev.ValuesLogged,
    ev.WeightsRecorded,
    ev.GpuUseRecorded,
    ev.OutsideWaitChanged,
    ev.ClusterUnknown,
}
"""Events that the scripts need not contain, because other events cause the same actions."""


def _dies(id: ReplicaId) -> Callable[[Site], None]:
    return lambda site: site.working()[id][0].die()


def _commands(command: str, **more: Any) -> Callable[[Site], None]:
    return lambda site: site.send_command(command, **more)


def _loses_a_node(site: Site) -> None:
    site.crash(site.working()[R1][-1].node)


def _drained_and_used_again(site: Site) -> None:
    """Drain an idle node, and undrain it as soon as it is drained and released."""
    node = site.idle_node()
    site.send_command("drain", target=node, reason="its fan is loud")
    site.when(lambda: node in site.drained and node in site.shrunk, lambda: site.send_command("undrain", target=node))


IN_NODE_GROUPS = Script(Outcome.COMPLETED, granted=5, crash_at=2, job=NODE_GROUPS)
IS_CANCELLED = Script(Outcome.CANCELLED, granted=1, cancel_at=2)
_GANG = msgspec.structs.replace(
    gang_job(2, 1, rollouts=2, spares=2, steps=8, limits=LIMITS),
    cluster="slurm",
    health=HealthSpec(admission=False),  # otherwise the order of the agents' messages would decide the placement
)
IS_REPAIRED = Script(
    Outcome.COMPLETED,
    granted=1,
    job=_GANG,
    at_step={2: _commands("restart", target=R0), 3: _dies(MEMBER), 5: _drained_and_used_again, 7: _loses_a_node},
)
RESTARTS_WHOLE = Script(
    Outcome.COMPLETED,
    granted=1,
    job=msgspec.structs.replace(job(spares=0, limits=LIMITS, recovery=Recovery(policy="job")), eval=EvalSpec(every=1)),
    at_step={2: _dies(R0)},
)
IS_RESUMED = Script(
    Outcome.COMPLETED,
    granted=2,
    cancel_at=2,
    job=job(spares=0, limits=LIMITS),
    resumed=job(spares=0, limits=LIMITS, steps=4),
)
IS_RESIZED = Script(
    Outcome.COMPLETED,
    granted=2,
    job=with_pool(job(spares=0, limits=LIMITS, steps=30), 0, 2),
    at_step={2: _commands("resize", target="burst", replicas=1)},
)
SCRIPTS = {
    "completes": COMPLETES,
    "is cancelled": IS_CANCELLED,
    "in parts": IN_NODE_GROUPS,
    "is repaired": IS_REPAIRED,
    "restarts whole": RESTARTS_WHOLE,
    "is resumed": IS_RESUMED,
    "is resized": IS_RESIZED,
}


def _worked(site: Site) -> dict[ReplicaId, int]:
    """Return how many incarnations of each replica have worked."""
    return dict(Counter(incarnation.replica for incarnation in sorted(site.worked)))


def _facts(site: Site, state: State) -> dict[str, object]:
    """Return the facts at the end that must not depend on the managers.

    Nodes that were excluded do not count as released: a node that is lost shortly before the end may be released with
    its allocation, because the run may end before a manager can release it alone.
    """
    excluded = sorted(name for name, node in state.nodes.items() if node.excluded is not None)
    return {
        "orders taken": sorted(state.handled_commands),
        "orders left": (state.requested_restarts, state.node_commands, state.requested_faults),
        "drained": sorted(site.drained),
        "given back": sorted(set(site.shrunk).difference(excluded)),
        "excluded": excluded,
        "restarts of the whole": len(state.full_restarts),
        "evaluated": [one.step for one in state.evaluations],
        "statuses": {one.id: one.status for one in state.workers},
    }


def _assert_same_end(script: Script, site: Site, outcome: Outcome, state: State, unharmed: Unharmed) -> None:
    """Check that the run has ended as without the kill.

    If a launch was lost with its manager, the next manager launches one more incarnation, but never one less.
    """
    if not script.at_step and script.resumed is None:
        assert_ended_well(script, site, outcome, state)
        return
    assert_over(script, site, outcome, state)
    assert _facts(site, state) == unharmed.facts
    worked = _worked(site)
    assert worked.keys() == unharmed.worked.keys()
    for replica, incarnations in unharmed.worked.items():
        together = (
            script is not IS_REPAIRED or incarnations > 1
        )  # a replica that fails together with others may fail once more
        assert incarnations <= worked[replica] <= incarnations + together, (replica, worked)


class Unharmed(Struct):
    """The results of a run whose manager is not killed."""

    script: Script
    records: list[ev.Stamped]
    facts: dict[str, object]
    worked: dict[ReplicaId, int]
    recorded_ns: dict[str, int]
    """Time of all processes of each role, from the journal's records."""
    reported_ns: dict[str, int]


@functools.cache
def unharmed(name: str) -> Unharmed:
    script = SCRIPTS[name]
    site, outcome, state = run_to_end(script)
    assert site.managers == 1 + (script.resumed is not None)
    assert_over(script, site, outcome, state)
    return Unharmed(
        script,
        site.records,
        _facts(site, state),
        _worked(site),
        recorded_lifetimes_ns(state),
        reported_lifetimes_ns(site),
    )


def test_scripts_contain_every_event_that_a_crash_could_hit() -> None:
    events = [stamped.event for name in SCRIPTS for stamped in unharmed(name).records]
    assert {type(event) for event in events} >= set(get_args(ev.Event)) - ELSEWHERE
    assert {type(event.action) for event in events if isinstance(event, ev.Intended)} == set(get_args(ExternalAction))
    decided = {type(event.action) for event in events if isinstance(event, ev.Decided)}
    assert decided == set(get_args(Decision)) - {WithdrawGuests}  # planner/capacity/test_guests.py
    launches = [e.action for e in events if isinstance(e, ev.Intended) and isinstance(e.action, Launch)]
    assert {(role_of(one.incarnation.replica), one.standby is not None) for one in launches} >= {
        (AGENT, False),
        (STANDBY_ROLE, False),
        ("trainer", False),
        ("trainer", True),
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_clocks_have_the_lifetimes_of_all_processes(name: str) -> None:
    run = unharmed(name)
    assert run.recorded_ns == run.reported_ns, (
        "the journal lacks the last reports of killed, fenced or stopped processes"
    )


def test_script_without_crashes_affects_only_its_targets() -> None:
    for name in ("completes", "is cancelled", "in parts"):
        site, outcome, state = run_to_end(SCRIPTS[name])
        assert_ended_well(SCRIPTS[name], site, outcome, state)
        assert starts(site)["rollout-0"] == 2
    repaired = unharmed("is repaired").worked
    assert repaired == {STORE: 1, REWARD: 1, TRAINER: 2, MEMBER: 2, R0: 2, R1: 2}


def _die_over(name: str, before: bool, numbers: Iterable[int]) -> None:
    """Kill the manager at each of these records, and check that the run ends as without the kill.

    A manager that is killed before it writes the record has carried out all earlier actions, and loses results that are
    not durable yet. A manager that is killed after it has written the record has not carried out the action in it.
    """
    whole = unharmed(name)
    for kill_at in numbers:

        def doomed(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.before = at, before

        try:
            site, outcome, state = run_to_end(whole.script, doomed)
            assert site.managers == 2 + (whole.script.resumed is not None)
            _assert_same_end(whole.script, site, outcome, state, whole)
        except BaseException as error:
            error.add_note(f"killed {'before' if before else 'after'} record {kill_at}: {whole.records[kill_at - 1]}")
            raise


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_manager_killed_at_a_record_does_not_change_the_outcome(name: str, before: bool) -> None:
    distance = SPARSE_FIRST if name == "completes" and not before else SPARSE
    _die_over(name, before, range(1 + before, len(unharmed(name).records) + 1, distance))


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_manager_killed_at_any_record_does_not_change_the_outcome(name: str, before: bool) -> None:
    _die_over(name, before, range(1, len(unharmed(name).records) + 1))


@pytest.mark.parametrize("kill_every", [14, 19, 31])
def test_managers_killed_repeatedly_complete_the_run_together(kill_every: int) -> None:
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "kill_every", kill_every))
    assert site.managers > 3
    assert_ended_well(COMPLETES, site, outcome, state)


def test_tokens_are_counted_from_the_trainers_end_to_its_next_work() -> None:
    events = [stamped.event for stamped in unharmed("restarts whole").records]
    assert [event.trainer_down for event in events if isinstance(event, ev.TokensCounted)] == [False, True, False]


def test_manager_absent_for_a_long_time_misses_nothing() -> None:
    def away(site: Site) -> None:
        site.kill_at, site.gap = 60, 900.0

    site, outcome, state = run_to_end(prepared=away)
    assert_ended_well(COMPLETES, site, outcome, state)


def test_steps_committed_without_a_manager_are_recorded_in_order_with_metrics() -> None:
    def away(site: Site) -> None:
        site.at_step[2] = lambda site: setattr(site, "kill_at", len(site.records) + 1)
        site.gap = 30.0  # a step takes two seconds

    script = msgspec.structs.replace(COMPLETES, crash_at=-1, job=job(spares=0, steps=40, limits=LIMITS))
    site, outcome, _ = run_to_end(script, away)
    assert (outcome, site.managers) == (Outcome.COMPLETED, 2)
    commits = [event for event in (one.event for one in site.records) if isinstance(event, ev.StepCommitted)]
    assert [event.step for event in commits] == list(range(1, 41))
    assert {event.metrics["reward"] for event in commits} == {0.5}


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_jump_of_an_hour_between_managers_repeats_no_action(hours: int) -> None:
    records = unharmed("completes").records
    for kill_at in range(1, len(records) + 1, SPARSE):

        def jumping(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.meanwhile = at, lambda: setattr(site, "clock_jump", 3600.0 * hours)

        site, outcome, state = run_to_end(prepared=jumping)
        assert_ended_well(COMPLETES, site, outcome, state)
        times = [stamped.at for stamped in site.records]
        assert times == sorted(times), "the time of a record is before that of its predecessor"


@pytest.mark.parametrize("hours", [-1, 1])
def test_clock_jump_of_an_hour_under_a_manager_changes_no_record(hours: int) -> None:
    def jumping(site: Site) -> None:
        site.at_step[1] = lambda site: setattr(site, "clock_jump", 3600.0 * hours)

    assert run_to_end(prepared=jumping)[0].records == run_to_end()[0].records


def test_lost_replies_of_the_cluster_repeat_no_action() -> None:
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "lose_answers", True))
    assert_ended_well(COMPLETES, site, outcome, state)


def test_request_that_did_not_reach_the_cluster_is_repeated_after_the_quiet_period() -> None:
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "deaf", 2))
    assert_ended_well(COMPLETES, site, outcome, state)
    asked = [s for s in site.records if isinstance(s.event, ev.Intended) and isinstance(s.event.action, Request)]
    assert [round(later.at - earlier.at) >= LIMITS.quiet for earlier, later in pairwise(asked[:3])] == [True, True]


def test_cluster_that_answers_every_other_poll_changes_nothing() -> None:
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "blink", True))
    assert_ended_well(COMPLETES, site, outcome, state)


@pytest.mark.parametrize(
    "prepared",
    [
        lambda site: setattr(site, "lose_answers", True),
        lambda site: setattr(site, "deaf", 3),
        lambda site: setattr(site, "blink", True),
        lambda site: setattr(site, "kill_every", 17),
    ],
    ids=["answers lost", "deaf", "seen every other time", "managers that die again and again"],
)
def test_requests_of_several_components_are_made_once(prepared: Callable[[Site], None]) -> None:
    site, outcome, state = run_to_end(IN_NODE_GROUPS, prepared)
    assert_ended_well(IN_NODE_GROUPS, site, outcome, state)


SOON = msgspec.structs.replace(LIMITS, quiet=6.0, rotate=30.0)
SHARDS = Script(Outcome.COMPLETED, granted=1, job=commands(command("shard", 3), limits=LIMITS))


@pytest.mark.parametrize("kill_every", [0, 9, 13])
def test_commands_are_carried_out_once_across_managers(kill_every: int) -> None:
    site, outcome, state = run_to_end(SHARDS, lambda site: setattr(site, "kill_every", kill_every))
    assert (outcome, site.allocations) == (Outcome.COMPLETED, {})
    assert {name: n for name, n in starts(site).items() if not name.startswith("agent")} == {
        "shard-0": 1,
        "shard-1": 1,
        "shard-2": 1,
    }
    assert epochs_of(site, ev.FindingChanged) == []
    assert {one.status for one in state.workers} == {Status.COMPLETED}


ROTATES = Script(Outcome.COMPLETED, granted=5, job=in_node_groups(steps=62, limits=SOON, terms={"trainer": 120.0}))


@pytest.mark.parametrize("distance", [SPARSE_FIRST, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_manager_killed_during_a_rotation_moves_the_trainer_once(before: bool, distance: int) -> None:
    records = run_to_end(ROTATES)[0].records
    asked = first(records, lambda event: isinstance(event, ev.Intended) and event.action.tag == f"{RUN}.trainer-1")
    left = first(records, lambda event: isinstance(event, ev.AllocationChanged) and event.status is None)
    assert any(isinstance(s.event, ev.Decided) and isinstance(s.event.action, Fence) for s in records[asked:left])
    for kill_at in range(asked, left + 1, distance):

        def doomed(site: Site, at: int = kill_at) -> None:
            site.kill_at, site.before = at, before

        site, outcome, state = run_to_end(ROTATES, doomed)
        assert (outcome, state.step, site.managers) == (Outcome.COMPLETED, ROTATES.job.steps, 2)
        assert (site.allocations, len(site.granted)) == ({}, 5), (kill_at, site.granted)
        started = {name: count for name, count in starts(site).items() if not name.startswith("agent")}
        assert started == {"trajectories-0": 1, "reward-0": 1, "trainer-0": 2, "rollout-0": 1, "rollout-1": 1}, kill_at


def test_replica_that_dies_without_a_manager_is_found_by_the_next() -> None:
    def doomed(site: Site) -> None:
        site.kill_at = 44  # everybody has joined
        site.meanwhile = lambda: site.working()[R1][0].die() if site.managers == 1 else None

    site, outcome, _ = run_to_end(prepared=doomed)
    assert (outcome, len(site.granted)) == (Outcome.COMPLETED, 2)
    assert starts(site)["rollout-1"] == 3  # the rollout is killed, and later its node fails
    assert [starts(site)[name] for name in ("trajectories-0", "reward-0", "trainer-0")] == [1, 1, 1]
    first = next(s for s in site.records if isinstance(s.event, ev.StepEnded) and s.event.incarnation.replica == R1)
    assert first.epoch == 2


def test_loss_of_a_rollout_and_of_a_node_affects_no_other_replica() -> None:
    site, _, _ = run_to_end()
    incarnations = {
        s.event.incarnation.replica: s.event.incarnation.number for s in site.records if isinstance(s.event, ev.Joined)
    }
    assert incarnations == {STORE: 1, REWARD: 1, TRAINER: 1, R0: 2, R1: 2}


def epochs_of(site: Site, kind: type[ev.Event]) -> list[ev.Stamped]:
    return [stamped for stamped in site.records if isinstance(stamped.event, kind)]


def first(records: list[ev.Stamped], matches: Callable[[ev.Event], bool]) -> int:
    """Return the number of the first record that matches, counted from 1."""
    return next(number for number, stamped in enumerate(records, 1) if matches(stamped.event))


def test_recorded_end_without_a_decision_is_handled_at_once_by_the_next_manager() -> None:
    records = run_to_end()[0].records
    ended = first(records, lambda event: isinstance(event, ev.StepEnded))
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "kill_at", ended))
    assert_ended_well(COMPLETES, site, outcome, state)
    started = epochs_of(site, ev.ManagerStarted)[1]
    fenced = next(s for s in epochs_of(site, ev.Decided) if s.epoch == 2)
    assert fenced.at - started.at < 5.0  # at once, and not after the join deadline


@pytest.mark.parametrize("kind", [Release, StopStep])
def test_action_intended_on_a_full_disk_is_carried_out_once_there_is_space(kind: type[ExternalAction]) -> None:
    records = run_to_end()[0].records
    intended = first(records, lambda event: isinstance(event, ev.Intended) and isinstance(event.action, kind))
    site, outcome, state = run_to_end(prepared=lambda site: setattr(site, "full_after", intended))
    assert_ended_well(COMPLETES, site, outcome, state)


def test_last_record_is_written_once_whichever_manager_dies_at_it() -> None:
    records = run_to_end()[0].records
    site, _, _ = run_to_end(prepared=lambda site: setattr(site, "kill_at", len(records)))
    assert len(epochs_of(site, ev.RunEnded)) == 1


def test_the_time_without_a_manager_is_in_the_journal() -> None:
    site, _, _ = run_to_end(prepared=lambda site: setattr(site, "kill_at", 60))
    (second,) = (s for s in epochs_of(site, ev.ManagerStarted) if s.epoch == 2)
    assert second.at - site.records[59].at >= LIMITS.lease
