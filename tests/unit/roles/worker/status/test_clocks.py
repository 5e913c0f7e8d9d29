"""The clock of a worker counts each moment of its process exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import rrl
from rrl.core.phases import MAX_CLOCK_ENTRIES, WAIT_EXTERNAL, PhaseTime, idle_cause
from rrl.core.run_spec import TagsSpec
from rrl.core.types import ReplicaId
from rrl.roles.worker.status import external_waits
from rrl.roles.worker.status.clocks import PhaseClock, boot_time_ns
from rrl.roles.worker.status.work_status import CurrentPhase, entered_phase
from rrl.tests.support.listening_manager import TIMEOUT_S
from rrl.tests.support.roles.worker_scene import JOB

Times = dict[tuple[str, str], int]


class Fake:
    """A phase clock with settable time (ns), and with a settable wait for external services."""

    def __init__(self) -> None:
        self.now, self.waited = 1_000, 0
        self.clock = PhaseClock("starting", lambda: self.now, lambda now: self.waited)

    def passes(self, ns: int, *, external: int = 0) -> None:
        self.now += ns
        self.waited += external

    @property
    def times(self) -> Times:
        return {(one.phase, one.idle_cause): one.ns for one in self.clock.read().times}


@pytest.fixture
def fake() -> Fake:
    return Fake()


def in_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join(TIMEOUT_S)


def test_nested_phases_are_counted_once(fake: Fake) -> None:
    fake.passes(5)
    fake.clock.enter("generate")
    fake.passes(7)
    fake.clock.enter("loading_weights", "weights")
    fake.passes(11)
    fake.clock.enter("generate")
    fake.passes(13)
    assert fake.times == {("starting", ""): 5, ("generate", ""): 20, ("loading_weights", "weights"): 11}


def test_phase_shorter_than_any_report_is_counted(fake: Fake) -> None:
    for _ in range(1000):
        fake.clock.enter("publish")
        fake.passes(3)
        fake.clock.enter("between")
    assert fake.times == {("publish", ""): 3000}


def test_time_in_which_the_process_was_stopped_counts_to_its_phase(fake: Fake) -> None:
    fake.clock.enter("train")
    fake.passes(3_600_000_000_000)
    fake.clock.enter("between")
    assert fake.times == {("train", ""): 3_600_000_000_000}


def test_clock_of_the_machine_contains_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime_ns", {time.CLOCK_BOOTTIME: 5}.__getitem__)
    assert boot_time_ns() == 5, "the clock is not CLOCK_BOOTTIME, the only one that runs while the machine is suspended"


def test_wait_of_the_thread_at_work_is_idle_and_that_of_another_thread_is_not(fake: Fake) -> None:
    fake.clock.enter("checkpoint")
    with fake.clock.idle("commits"):
        fake.passes(5)
        with fake.clock.idle("disk"):
            fake.passes(2)
    fake.passes(1)

    def saver() -> None:
        with fake.clock.idle("store"):
            fake.passes(100)

    in_thread(saver)
    assert fake.times == {("checkpoint", ""): 101, ("checkpoint", "commits"): 5, ("checkpoint", "disk"): 2}


def test_phase_that_is_a_wait_keeps_its_own_cause(fake: Fake) -> None:
    fake.clock.enter("wait_data", "rollouts")
    with fake.clock.idle("store"):
        fake.passes(9)
    assert fake.times == {("wait_data", "rollouts"): 9}


def test_phase_of_another_thread_replaces_that_of_the_first(fake: Fake) -> None:
    fake.clock.enter("train")
    with fake.clock.idle("commits"):
        fake.passes(1)
        in_thread(lambda: fake.clock.enter("publish"))
        fake.passes(2)
    assert fake.times == {("train", "commits"): 1, ("publish", ""): 2}


def test_external_wait_counts_instead_of_the_phase_around_it(fake: Fake) -> None:
    fake.clock.enter("score")
    fake.passes(10, external=4)
    fake.clock.enter("wait_work", "work")
    fake.passes(1)
    assert fake.times == {(WAIT_EXTERNAL, "external"): 4, ("score", ""): 6, ("wait_work", "work"): 1}


def test_external_wait_that_was_measured_late_is_counted_later(fake: Fake) -> None:
    """A wait and the clock have separate locks, so that a wait may end between the two readings of one count."""
    fake.clock.enter("score")
    fake.passes(10, external=12)
    assert fake.times == {(WAIT_EXTERNAL, "external"): 10}
    fake.passes(5)
    assert fake.times == {(WAIT_EXTERNAL, "external"): 12, ("score", ""): 3}


def test_external_waits_are_measured_however_short_they_are() -> None:
    before = external_waits.waited_ns(boot_time_ns())
    with rrl.waiting("judge"):
        first = boot_time_ns()
        with rrl.waiting("judge"):
            pass
        last = boot_time_ns()
        assert external_waits.waited_ns(last) - before >= last - first
    ended = external_waits.waited_ns(boot_time_ns())
    assert ended - before >= last - first
    assert external_waits.waited_ns(boot_time_ns()) == ended


def test_restarted_clock_starts_from_zero(fake: Fake) -> None:
    fake.clock.enter("standby")
    fake.passes(10, external=3)
    fake.clock.restart("starting")
    fake.passes(2)
    reading = fake.clock.read(7)
    assert (reading.began, reading.done, reading.times) == (1_010, 7, (PhaseTime("starting", "", 2),))


def test_reading_has_a_bounded_size_for_any_number_of_phases(fake: Fake) -> None:
    for number in range(10 * MAX_CLOCK_ENTRIES):
        fake.clock.enter(f"shard {number}")
        fake.passes(1)
    assert len(fake.times) == MAX_CLOCK_ENTRIES
    assert sum(fake.times.values()) == 10 * MAX_CLOCK_ENTRIES


PHASES = st.sampled_from(["train", "wait_data", "checkpoint", "publish", "my eval"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), PHASES),
            st.tuples(st.just("enter elsewhere"), PHASES),
            st.tuples(st.just("wait"), st.sampled_from(["commits", "store"])),
            st.tuples(st.just("wait elsewhere"), st.sampled_from(["commits", "store"])),
            st.tuples(st.just("external"), st.integers(0, 50)),
            st.tuples(st.just("read"), st.just(0)),
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 100), min_size=40, max_size=40),
)
def test_times_add_up_to_the_lifetime_after_any_sequence_of_events(
    events: list[tuple[str, object]], gaps: list[int]
) -> None:
    fake = Fake()

    def waits(cause: str, ns: int) -> None:
        with fake.clock.idle(cause):
            fake.passes(ns)

    def happens(kind: str, value: object, ns: int) -> None:
        if kind.startswith("enter"):
            fake.clock.enter(str(value), idle_cause(str(value), None))
        elif kind.startswith("wait"):
            waits(str(value), ns)
        elif kind == "external":
            fake.waited += int(str(value))
        else:
            fake.clock.read()

    for (kind, value), ns in zip(events, gaps, strict=False):
        fake.passes(ns)
        if kind.endswith("elsewhere"):
            in_thread(lambda kind=kind, value=value, ns=ns: happens(kind, value, ns))  # type: ignore[misc]
        else:
            happens(kind, value, ns)
    reading = fake.clock.read()
    assert sum(one.ns for one in reading.times) == fake.now - reading.began
    assert all(one.ns > 0 for one in reading.times)


@pytest.mark.parametrize(
    ("name", "waits_for", "expected"),
    [
        ("wait_data", None, CurrentPhase("wait_data", None, "rollouts")),  # with two rollouts, no single one is named
        ("wait_data", "trainer/0", CurrentPhase("wait_data", ReplicaId("trainer/0"), "rollouts")),
        ("wait_weights", None, CurrentPhase("wait_weights", ReplicaId("trainer/0"), "weights")),
        ("train", None, CurrentPhase("train", None, "")),
        ("my eval", "reward", CurrentPhase("my eval", ReplicaId("reward/0"), "reward")),
        ("my eval", "rollout", CurrentPhase("my eval", None, "rollout")),
    ],
)
def test_phase_names_the_replica_it_waits_for_and_its_idle_cause(
    name: str, waits_for: str | None, expected: CurrentPhase
) -> None:
    assert entered_phase(JOB, name, waits_for) == expected


def test_single_rollout_is_not_awaited_alone_where_spares_may_generate() -> None:
    roles = tuple(replace(role, replicas=1) for role in JOB.roles)
    assert entered_phase(replace(JOB, roles=roles), "wait_data", None).waits_for == "rollout/0"
    generating = replace(JOB, roles=roles, tags=TagsSpec(spare=("rollout",)))
    assert entered_phase(generating, "wait_data", None).waits_for is None
