"""Plays scripted runs of the real manager in virtual time, to their end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from msgspec import Struct

from rrl.core.faults import Fault, FaultKind, FaultTrigger
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import Limits, RunSpec
from rrl.core.types import Outcome, role_of
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import read_state, replay
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, job
from rrl.tests.support.manager.site import Site, prepare
from rrl.transport.keys import RunKeys

LIMITS = Limits(heartbeat=2.0, silence=8.0, join=40.0, quiet=20.0, poll=10.0, lease=10.0)
FAULT = Fault("f0", FaultKind.KILL, ROLLOUTS[0], FaultTrigger(step=1))
JOB = job(spares=0, limits=LIMITS, faults=[FAULT])
KEYS = RunKeys.make()


class Script(Struct, frozen=True):
    """What happens in a run, and how the run must end."""

    outcome: Outcome
    granted: int
    """Number of allocations that the cluster grants in total."""
    crash_at: int = -1
    """Training step at whose commit the node of rollout/1 fails; with -1 it never fails."""
    cancel_at: int = -1
    """Training step at whose commit a user cancels the run; with -1 no user cancels it."""
    job: RunSpec = JOB
    at_step: dict[int, Callable[[Site], None]] = {}
    """Functions by training step; each is called with the site when its step is committed."""
    resumed: RunSpec | None = None
    """Job with which a user resumes the ended run."""


COMPLETES = Script(Outcome.COMPLETED, granted=2, crash_at=2)


def run_to_end(
    script: Script = COMPLETES, prepared: Callable[[Site], None] = lambda site: None
) -> tuple[Site, Outcome, State]:
    """Play a run to its end; return its site, its outcome and the fold of its journal."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)  # no script has a power cut, so no write is lost
        run = RunDir(Path(folder) / RUN)
        run.create()
        KEYS.save(run.keys)

        async def live() -> tuple[Site, Outcome]:
            site = Site(run, script.job, 8, script.crash_at, script.cancel_at)
            site.at_step = dict(script.at_step)
            prepared(site)
            prepare(site, patch)
            outcome = await site.manage()
            if script.resumed is not None:
                await site.to_rest()
                site.resume(script.resumed)
                outcome = await site.manage()
            assert site.actors == {}, "some steps have outlived the run"
            assert site.doubled == [], "a tag was requested or launched twice"
            await site.to_rest()
            return site, outcome

        site, outcome = virtual.run(live())
        state = None
        for stamped in replay(run):
            state = fold(state, stamped)
        assert state is not None
        assert state == read_state(run)
        assert run.summary.exists()
        assert not run.manager.exists()
        return site, outcome, state


def starts(site: Site) -> Counter[str]:
    """Return the number of started steps by replica."""
    return Counter(tag.removeprefix(f"{RUN}.").rpartition(".")[0] for tag in site.started)


def assert_ended_well(script: Script, site: Site, outcome: Outcome, state: State) -> None:
    assert_over(script, site, outcome, state)
    started = starts(site)
    assert started.pop("rollout-0") in (1, 2)  # 1 if the planned fault was lost with its manager
    for node in range(1, 6):  # 0 if the launch was lost with its manager, and not repeated before the end
        assert started.pop(f"agent-n{node}", 0) in (0, 1)
    again = 1 + (script.crash_at >= 0)
    assert started == {"trajectories-0": 1, "reward-0": 1, "trainer-0": 1, "rollout-1": again}


def recorded_lifetimes_ns(state: State) -> dict[str, int]:
    """Return the summed lifetimes (ns) of each role's processes, as the manager recorded them."""
    return {role: point.total_ns for role, point in state.idle_times.now.roles.items()}


def reported_lifetimes_ns(site: Site) -> Counter[str]:
    """Return the summed lifetimes (ns) of each role's processes, as each process last reported it."""
    reported = Counter[str]()
    for incarnation, spent in site.lifetimes_ns.items():
        reported[role_of(incarnation.replica)] += spent
    return reported


def assert_over(script: Script, site: Site, outcome: Outcome, state: State) -> None:
    assert (outcome, state.outcome) == (script.outcome, script.outcome)
    assert (site.allocations, state.allocations, state.intents) == ({}, {}, {})
    assert sorted(site.free) == [f"n{i}" for i in range(1, 9)]
    assert list(site.run.mailbox.glob("*")) == []
    assert len(site.granted) == script.granted, site.granted
    recorded, reported = recorded_lifetimes_ns(state), reported_lifetimes_ns(site)
    assert all(spent <= reported[role] for role, spent in recorded.items()), "a clock was counted twice"
    if script.outcome is Outcome.COMPLETED:
        assert state.step == site.job.steps
