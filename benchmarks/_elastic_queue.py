"""How often a run asks a queue that gives nothing, in virtual time: the planner of a run, without processes.

Six hours of a run whose trainer waits half of the time, so that the rule always wants more replicas. The queue keeps
the requests of the elastic pool for ever, refuses them for now, or rejects them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rrl.benchmarks._elastic_runs import ELASTIC, PLACES, POOL, TOKEN_S, growth_job
from rrl.cluster.base import RejectReason
from rrl.config.job.document import JobDocument
from rrl.config.job.load import job_from
from rrl.config.job.resolve import resolve
from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.run_spec import RunSpec
from rrl.core.types import TRAINER, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Request
from rrl.tests.support.manager.world import World
from rrl.tests.support.runs import write_job

HOURS = 6
STEP_S = 60.0
KINDS = ("closed", "refused for now", "rejected")


def spec_of(toml: str) -> RunSpec:
    """Return the run spec of a job."""
    with tempfile.TemporaryDirectory() as folder:
        return resolve(job_from(JobDocument([write_job(Path(folder), toml)]), Path(folder)), "python")


def requests_per_hour(kind: str) -> float:
    """Return how many nodes per hour the run requests for its elastic pool."""
    toml = growth_job(ELASTIC, 0, "local")
    for old, new in (
        ('walltime = "30min"', 'walltime = "24h"'),
        ("steps = 75", "steps = 1000000"),
        (f"node_hours = {ELASTIC.node_hours}", "node_hours = 1000.0"),
    ):
        assert old in toml, old
        toml = toml.replace(old, new)
    world = World(spec_of(toml), nodes=100)
    if kind == "closed":
        world.closed[POOL] = "Priority"
    world.steady()
    if kind.startswith("re"):
        world.refuse = "no"
        world.refuse_reason = RejectReason.REFUSED_FOR_NOW if kind == "refused for now" else RejectReason.REFUSED
    rollout_tokens, train_s = int(STEP_S * PLACES / TOKEN_S), STEP_S / 2
    step = 0
    while step * STEP_S < HOURS * 3600:
        step += 1
        world.wait(STEP_S)
        trained = rollout_tokens * sum(one.role == "rollout" for one in world.state.workers)
        world.record(ev.StepCommitted(world.state.replica(TRAINER).incarnation, step, {"tokens": float(trained)}))
        readings = []
        for replica in world.state.workers:
            role = role_of(replica.id)
            busy = train_s if role == "trainer" else STEP_S
            times = (
                PhaseTime("train" if role == "trainer" else "generate", "", int(step * busy * 1e9)),
                PhaseTime("wait_data", "rollouts", int(step * (STEP_S - busy) * 1e9)),
            )
            readings.append((replica.incarnation, ClockReading(1, step * rollout_tokens, times)))
        world.happen(ev.ClocksRecorded(tuple(readings)))
        assert not world.over, f"{kind}: the run ended"
    asked = sum(
        one.node_group == POOL
        for action in world.decided(Request)
        for one in (action.request, *action.request.further_components)
    )
    return asked / HOURS
