"""A cluster that is unreachable, slow or wrong, or a full run directory, during recoveries.

No action is repeated, no replica or node counts as failed because of the disturbance, and the cluster is not polled
more often than usual.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from rrl.cluster.base import ClusterSnapshot, Unanswered
from rrl.core.types import Outcome
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Fence, Launch, Request
from rrl.manager.storage.journal import Journal
from rrl.manager.storage.space_reserve import RELEASE_BYTES, RESERVE_BYTES, fill_reserve
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import REWARD, ROLLOUTS, STORE, TRAINER
from rrl.tests.support.manager.scripted_runs import COMPLETES, LIMITS, assert_ended_well, run_to_end, starts
from rrl.tests.support.manager.site import Site

AWAY = 60.0
"""Duration of an outage (s)."""


class Outage:
    """An outage of slurmctld from the commit of a step on, in which polls and commands time out.

    ``polls`` are the times of the polls.
    """

    def __init__(self, site: Site, at: int, lasts: float = AWAY) -> None:
        self.site, self.at, self.lasts = site, at, lasts
        self.began: float | None = None
        self.polls: list[float] = []
        self._commit, self._observe = site.commit, site.observe
        for name in ("commit", "observe"):
            setattr(site, name, getattr(self, name))

    @property
    def away(self) -> bool:
        return self.began is not None and virtual.Clock.monotonic() < self.began + self.lasts

    def commit(self) -> None:
        if self.site.committed + 1 == self.at:
            self.began = virtual.Clock.monotonic()
        self._commit()

    def observe(self) -> ClusterSnapshot:
        self.polls.append(virtual.Clock.monotonic())
        return ClusterSnapshot(None, None, None, "squeue: timed out") if self.away else self._observe()


def during(outage: Outage) -> list[float]:
    assert outage.began is not None
    return [at for at in outage.polls if outage.began <= at < outage.began + outage.lasts]


def out_at(step: int, crash: bool, held: list[Outage], commands: bool = True) -> Callable[[Site], None]:
    def prepared(site: Site) -> None:
        if not crash:
            site.crash_at = -1
        outage = Outage(site, step)
        held.append(outage)
        if commands:
            patch_commands(site, outage)

    return prepared


def patch_commands(site: Site, outage: Outage) -> None:
    """Let requests during the outage have no effect on the cluster."""
    for name in ("request", "launch"):
        real = getattr(site, name)

        def asked(what: object, real: Callable[[object], None] = real) -> None:
            if outage.away:
                raise Unanswered("timed out")
            real(what)

        setattr(site, name, asked)


def test_cluster_outage_of_a_minute_fails_no_replica() -> None:
    held: list[Outage] = []
    site, outcome, state = run_to_end(COMPLETES, out_at(1, crash=False, held=held))
    assert (outcome, site.managers, state.step) == (Outcome.COMPLETED, 1, 3)
    started = starts(site)
    assert started[f"{STORE}".replace("/", "-")] == started[f"{TRAINER}".replace("/", "-")] == 1
    fenced = {
        s.event.action.incarnation.replica
        for s in site.records
        if isinstance(s.event, ev.Decided) and isinstance(s.event.action, Fence)
    }
    assert fenced <= {ROLLOUTS[0]}, "a replica other than the target of the planned fault was fenced"
    assert site.granted == ["small-1.pool"]
    failures = [one.why for one in state.replica(ROLLOUTS[0]).failures]
    assert failures == ["ended by signal 9 (SIGKILL)"], "the missing answers of the cluster count as a failure"


def test_node_lost_during_a_cluster_outage_is_replaced_once_afterwards() -> None:
    held: list[Outage] = []
    site, outcome, state = run_to_end(COMPLETES, out_at(2, crash=True, held=held))
    assert_ended_well(COMPLETES, site, outcome, state)


def test_unreachable_cluster_is_recorded_once_with_its_beginning_and_its_end() -> None:
    held: list[Outage] = []
    site, _, _ = run_to_end(COMPLETES, out_at(2, crash=True, held=held))
    (outage,) = held
    first, second, *_ = during(outage)
    (begun_at, begun), (over_at, over) = [
        (s.at, s.event) for s in site.records if isinstance(s.event, ev.ClusterUnknown)
    ]
    assert (begun.why, over.why) == ("squeue: timed out", "")
    assert begun_at - begun.since == pytest.approx(second - first, abs=0.5)
    assert AWAY <= over.since - begun.since + LIMITS.poll <= AWAY + 2 * LIMITS.poll
    assert over_at >= over.since


def test_single_unanswered_poll_is_not_recorded() -> None:
    def prepared(site: Site) -> None:
        site.crash_at = -1
        real, polls = site.observe, iter(range(10**6))
        site.observe = lambda: ClusterSnapshot(None, None, None, "busy") if next(polls) % 2 else real()  # type: ignore[method-assign]

    site, outcome, _ = run_to_end(COMPLETES, prepared)
    assert outcome is Outcome.COMPLETED
    assert not [s for s in site.records if isinstance(s.event, ev.ClusterUnknown)]


def test_unreachable_cluster_is_polled_less_often() -> None:
    held: list[Outage] = []
    run_to_end(COMPLETES, out_at(2, crash=True, held=held))
    (outage,) = held
    looks = during(outage)
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert len(looks) <= AWAY / LIMITS.poll + 5, f"{len(looks)} looks"
    assert max(pauses) <= LIMITS.poll + 1.0, "the pause between two polls is longer than usual"
    assert all(later >= earlier - 0.5 for earlier, later in pairwise(pauses))


# ── the run directory ────────────────────────────────────────────────────────────────────────────────────────────────
ACTIONS: dict[str, Callable[[ev.Event], bool]] = {
    "fence": lambda e: isinstance(e, ev.Decided) and isinstance(e.action, Fence),
    "exclusion": lambda e: isinstance(e, ev.Decided) and isinstance(e.action, Exclude),
    "replacement": lambda e: isinstance(e, ev.Intended) and isinstance(e.action, Request) and ".more" in e.action.tag,
    "relaunch": lambda e: (
        isinstance(e, ev.Intended) and isinstance(e.action, Launch) and e.action.incarnation.number == 2
    ),
    "rejoined": lambda e: isinstance(e, ev.Joined) and e.incarnation.number == 2,
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
@pytest.mark.parametrize("moment", ACTIONS)
def test_no_action_of_a_recovery_precedes_its_durable_intent(
    moment: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = ACTIONS[moment]
    bad = {"flushes": 0, "began": 0}
    flush = Journal.flush

    def failing(self: Journal) -> None:
        site = held[0]
        if not bad["began"] and any(trouble(stamped.event) for stamped in site.records):
            bad["began"], bad["flushes"] = 1, 25
            bad["granted"], bad["launched"] = len(site.granted), len(site.launched)
            bad["committed"] = site.committed
        if bad["flushes"]:
            bad["flushes"] -= 1
            assert (len(site.granted), len(site.launched)) == (bad["granted"], bad["launched"]), (
                "an action was carried out before its intent was durable"
            )
            raise OSError(number, os.strerror(number))
        flush(self)

    held: list[Site] = []
    monkeypatch.setattr(Journal, "flush", failing)
    site, outcome, state = run_to_end(COMPLETES, held.append)
    assert bad["began"], "no record of this action was written"
    assert_ended_well(COMPLETES, site, outcome, state)


def test_roles_continue_while_the_run_directory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory is full for a minute.

    The trainer commits during this minute, and the manager records the commits once it can write again.
    """
    steps = 40
    longer = msgspec.structs.replace(COMPLETES.job, steps=steps)
    script = msgspec.structs.replace(COMPLETES, crash_at=-1, granted=1, job=longer)
    held: list[Site] = []
    marks: dict[str, float] = {}
    flush = Journal.flush

    def failing(self: Journal) -> None:
        site, now = held[0], virtual.Clock.monotonic()
        if site.committed >= 2 and now < marks.setdefault("until", now + AWAY):
            raise OSError(errno.ENOSPC, "No space left on device")
        marks.setdefault("committed", site.committed) if "until" in marks else None
        flush(self)

    monkeypatch.setattr(Journal, "flush", failing)
    site, outcome, state = run_to_end(script, held.append)
    assert (outcome, state.step, site.managers) == (Outcome.COMPLETED, steps, 1)
    assert marks["committed"] > 10, "the roles trained too few steps while the run directory was full"
    assert {r: n for r, n in starts(site).items() if not r.startswith(("agent", "rollout-0"))} == {
        "trajectories-0": 1,
        f"{REWARD}".replace("/", "-"): 1,
        "trainer-0": 1,
        "rollout-1": 1,
    }


def test_cancelled_run_ends_from_its_reserve_while_the_run_directory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush needs a third of the space of one release, so that a single release is not enough."""
    longer = msgspec.structs.replace(COMPLETES.job, steps=40)
    script = msgspec.structs.replace(COMPLETES, crash_at=-1, granted=1, cancel_at=3, job=longer)
    held: list[Site] = []
    taken = 0
    flush = Journal.flush

    def in_a_full_directory(self: Journal) -> None:
        nonlocal taken
        run = held[0].run
        if held[0].committed >= 2 and self.unwritten and run.space_reserve.exists():
            if taken + RELEASE_BYTES // 3 > RESERVE_BYTES - run.space_reserve.stat().st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken += RELEASE_BYTES // 3
        flush(self)

    def prepare(site: Site) -> None:
        fill_reserve(site.run)
        held.append(site)

    monkeypatch.setattr(Journal, "flush", in_a_full_directory)
    site, outcome, state = run_to_end(script, prepare)
    assert (outcome, state.outcome, site.managers) == (Outcome.CANCELLED, Outcome.CANCELLED, 1)
    assert taken > RELEASE_BYTES
    assert not site.run.space_reserve.exists()
