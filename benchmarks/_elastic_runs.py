"""Runs of benchmarks/elastic.py: their jobs, and what their journals and stores show."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.core.types import AGENT, STANDBY_ROLE, Outcome, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Request, Resize
from rrl.manager.model.state import State
from rrl.tests.support.queue_cluster import NEVER, Queue, submit_to
from rrl.tests.support.runs import TestRun, check_sound, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

POOL = "burst"
STEPS = 75
DOUBLE = (15, 45)
"""Steps of the weights between which the mean length of answers doubles."""
STEP_S = 1.0
"""Seconds that the trainer takes for a step."""
ROLLOUTS, PLACES, TOKEN_S, TOKENS, CHUNK = 4, 8, 0.025, 36.0, 10
"""The fixed rollouts take 0.9 s for the answers of a step at first, and 1.8 s in the end. So four further rollouts are
needed in the end, and none at first."""
PROMPTS, GROUP_SIZE = 8, 4
MAX_REPLICAS = 8
NODE_HOURS = 4.0
"""Budget that does not bind: the reserved walltime of all replicas."""
TIGHT_NODE_HOURS = 240.0 / 3600
"""Budget of the arm ``tight``: four nodes for a minute. It binds."""
ELASTIC_JOIN_S = 10
"""``[limits] join`` of elastic arms (s). A pool does not grow in the last three times this long of a run."""
RUN_TIMEOUT_S = 600.0


class Arm(Struct, frozen=True):
    """One kind of run. The pool has ``fixed`` replicas, or is elastic with this budget."""

    name: str
    fixed: int = 0
    node_hours: float = 0.0
    queue: Queue | None = None

    @property
    def is_elastic(self) -> bool:
        return self.node_hours > 0


FIXED = tuple(Arm(f"fixed {count}", count) for count in (0, 2, 4, 8))
ELASTIC, TIGHT = Arm("elastic", node_hours=NODE_HOURS), Arm("tight", node_hours=TIGHT_NODE_HOURS)


def preempted(mean_s: float, seed: int) -> Arm:
    """Return an elastic arm whose nodes are taken away at random, after ``mean_s`` seconds on average."""
    return Arm("preempted", node_hours=NODE_HOURS, queue=Queue(POOL, lifetime_s=mean_s, seed=seed))


NEVER_GRANTED = Arm("never granted", node_hours=NODE_HOURS, queue=Queue(POOL, wait_s=NEVER))


class Sample(Struct):
    """The results of one run."""

    arm: str
    seed: int
    seconds: float
    """Time (s) between the commits of the first and the last step."""
    step_s: list[float]
    node_s: float
    """Node seconds of the pool between these commits."""
    spent_s: float
    """Node seconds of the pool in the whole run."""
    over_budget_s: float
    changed_others: int
    """Number of further incarnations of workers that are not of the pool."""
    failures_charged: list[str]
    """The evidence of each fence of a worker that counts as a failure."""
    lost: int
    """Number of trajectories that are neither trained nor dropped nor open."""
    requests: int
    ended_allocations: int
    """Number of the pool's allocations that ended before the run."""
    resizes: list[tuple[float, int]]
    """For each resize, the seconds since the first commit, and the replicas that the pool has afterwards."""
    waited: float
    """Share of the time in which the trainer waited for data."""
    load: float
    """Load of this machine (1 minute) at the end of the run."""


def role_command(role: str, **options: float | str | Sequence[int] | bool) -> str:
    """Return the command of a role of benchmarks/_elastic_roles.py, as in job.toml."""
    argv = [sys.executable, "-m", "rrl.benchmarks._elastic_roles", role]
    for name, value in options.items():
        values = [] if value is True else list(value) if isinstance(value, tuple | list) else [value]
        argv += [f"--{name.replace('_', '-')}", *map(str, values)]
    return json.dumps(argv)


def job(
    seed: int,
    *,
    cluster: str = "local",
    steps: int = STEPS,
    prompts: int = PROMPTS,
    rollouts: int = ROLLOUTS,
    sampling: str = "",
    one_node: bool = True,
    cluster_keys: str = "spares = 0",
    trainer: str = "",
    rollout: str = "",
    store: str = "",
    extra: str = "",
    join_s: int = 60,
) -> str:
    """Return job.toml of a run without a model; ``trainer``, ``rollout`` and ``store`` are the keys of these roles."""
    exclusive = json.dumps(not one_node)
    return f"""
[run]
name = "elastic"
steps = {steps}
seed = {seed}
[cluster]
kind = "{cluster}"
walltime = "30min"
node = {{ cpus = {8 if one_node else 2}, mem = "{3 if one_node else 1}GiB" }}
{cluster_keys}
[task]
function = "light_task:make"
[model]
tokenizer = {{ pieces = "0123456789" }}
max_length = 512
[sampling]
prompts_per_step = {prompts}
group_size = {GROUP_SIZE}
max_new_tokens = 400
{sampling}
[roles.trainer]
exclusive = {exclusive}
mem = "256MiB"
{trainer}
[roles.rollout]
replicas = {rollouts}
exclusive = {exclusive}
mem = "256MiB"
{rollout}
[roles.trajectories]
mem = "256MiB"
{store}
[roles.reward]
mem = "256MiB"
[transport]
weights = "tcp"
[limits]
heartbeat = "500ms"
silence = "10s"
poll = "1s"
lease = "5s"
quiet = "10s"
step_grace = "3s"
join = "{join_s}s"
{extra}
"""


def growth_job(arm: Arm, seed: int, cluster: str) -> str:
    """Return job.toml of an arm whose answers double."""
    pool = ""
    if arm.is_elastic:
        pool = f"[rollouts.{POOL}]\nreplicas = {{ min = 0, max = {MAX_REPLICAS} }}\nnode_hours = {arm.node_hours}\n"
    elif arm.fixed:
        pool = f"[rollouts.{POOL}]\nreplicas = {arm.fixed}\n"
    generating = role_command("rollout", places=PLACES, token_s=TOKEN_S, tokens=TOKENS, chunk=CHUNK, double=DOUBLE)
    return job(
        seed,
        cluster=cluster,
        trainer=f"warm = false\ncommand = {role_command('trainer', step_s=STEP_S)}",
        rollout=f"lease = {PLACES}\ncommand = {generating}",
        extra=pool,
        join_s=ELASTIC_JOIN_S if arm.is_elastic else 60,
    )


def run_together(arms: Sequence[Arm], seed: int, folder: Path, lab: SlurmLab | None) -> list[Sample]:
    """Run these arms at the same time, or one after the other on the lab; return their results."""
    samples: list[Sample] = []
    for together in [[arm] for arm in arms] if lab is not None else [list(arms)]:
        runs = [_submit(arm, seed, folder, lab) for arm in together]
        for arm, run in zip(together, runs, strict=True):
            state = run.wait_end(RUN_TIMEOUT_S)
            assert state.outcome is Outcome.COMPLETED, f"{run.run.id}: {state.outcome} {state.why}"
            run.wait_gone(60.0)
            samples.append(sample(arm, seed, run))
    return samples


def _submit(arm: Arm, seed: int, folder: Path, lab: SlurmLab | None) -> TestRun:
    name = f"{arm.name.replace(' ', '-')}-{seed}"
    toml = growth_job(arm, seed, "local" if lab is None else "slurm")
    if lab is not None:
        return submit_on(lab, name, toml)
    (folder / name).mkdir()
    return submit_here(folder / name, toml) if arm.queue is None else submit_to(arm.queue, folder / name, toml)


def sample(arm: Arm, seed: int, run: TestRun) -> Sample:
    """Return the results of a finished run."""
    check_sound(run.run)
    events, state = run.events(), run.state()
    commits = commit_times(events)
    first, last = commits[1], commits[max(commits)]
    spans = pool_spans(events)
    spent = sum(until - since for since, until in spans)
    decisions = [(each.at, each.event.action) for each in events if isinstance(each.event, ev.Decided)]
    count, resizes = 0, []
    for at, action in decisions:
        if isinstance(action, Resize):
            count += len(action.start) - len(action.stop)
            resizes.append((round(at - first, 1), count))
    audit = msgspec.json.decode((run.run.store / "audit.json").read_bytes())
    steps = [commits[step] for step in sorted(commits)]
    return Sample(
        arm.name,
        seed,
        seconds=round(last - first, 2),
        step_s=[round(after - before, 3) for before, after in pairwise(steps)],
        node_s=round(sum(max(0.0, min(until, last) - max(since, first)) for since, until in spans), 1),
        spent_s=round(spent, 1),
        over_budget_s=round(max(0.0, spent - arm.node_hours * 3600), 1) if arm.is_elastic else 0.0,
        changed_others=sum(one.incarnation_number - 1 for one in state.workers if one.role != POOL),
        failures_charged=[
            f"{action.incarnation}: {' '.join(action.why.evidence)}"
            for _, action in decisions
            if isinstance(action, Fence)
            and action.charged
            and role_of(action.incarnation.replica) not in (AGENT, STANDBY_ROLE)
        ],
        lost=abs(audit["made"] - audit["trained"] - sum(audit["dropped"].values()) - audit["open"]),
        requests=len(_requests(events)),
        ended_allocations=sum(until < last for _, until in spans),
        resizes=resizes,
        waited=round(waited_share(state), 3),
        load=round(os.getloadavg()[0], 1),
    )


def commit_times(events: Sequence[ev.Stamped]) -> dict[int, float]:
    """Return the time (s) of each step's commit, by step."""
    times: dict[int, float] = {}
    for each in events:
        if isinstance(each.event, ev.StepCommitted):
            times.setdefault(each.event.step, each.at)
    return times


def waited_share(state: State) -> float:
    """Return the share of the whole run in which the trainer was idle."""
    ns = state.idle_times.now.roles["trainer"].ns
    return 1.0 - ns.get("", 0) / max(1, sum(ns.values()))


def _requests(events: Sequence[ev.Stamped]) -> dict[str, float]:
    """Return the time (s) of each request for nodes of the pool, by tag."""
    requests = {}
    for each in events:
        if isinstance(each.event, ev.Intended) and isinstance(each.event.action, Request):
            request = each.event.action.request
            for one in (request, *request.further_components):
                if one.node_group == POOL:
                    requests[one.tag] = each.at
    return requests


def pool_spans(events: Sequence[ev.Stamped]) -> list[tuple[float, float]]:
    """Return from when until when (s) each node of the pool was the run's."""
    requests, since, spans = _requests(events), dict[str, float](), list[tuple[float, float]]()
    for each in events:
        if not isinstance(each.event, ev.AllocationChanged) or each.event.tag not in requests:
            continue
        tag, status = each.event.tag, each.event.status
        if status is not None and status.state in ("running", "suspended", "ending"):
            since.setdefault(tag, each.at)
        elif tag in since:
            spans.append((since.pop(tag), each.at))
    return spans + [(began, events[-1].at) for began in since.values()]


def shuffled(arms: Sequence[Arm], seed: int) -> list[Arm]:
    """Return the arms in an order that depends on the seed."""
    return random.Random(f"order {seed}").sample(arms, len(arms))


def by_arm(samples: Sequence[Sample]) -> Mapping[str, list[Sample]]:
    """Return the samples of each arm, by name."""
    found: dict[str, list[Sample]] = {}
    for each in samples:
        found.setdefault(each.arm, []).append(each)
    return found


def over_seeds(samples: Sequence[Sample], of: Callable[[Sample], float]) -> list[float]:
    """Return a value of each sample, in the order of the seeds."""
    return [of(each) for each in sorted(samples, key=lambda each: each.seed)]
