"""Runs of benchmarks/tags.py: their jobs, and what their journals and their fake GPUs show."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from rrl.benchmarks._pace import Tau, overrun, recorded
from rrl.core.types import GUEST_ROLE, TRAINER
from rrl.manager.model import events as ev
from rrl.manager.model.state import State, Status
from rrl.tests.support import fake_gpu
from rrl.tests.support.runs import TestRun, check_sound, submit_here

ROLLOUTS, RANKS = 2, 2
"""Nodes of the rollouts and of the trainer. The colocated layout has all of them as nodes of the trainer."""
PROMPTS, GROUP_SIZE = 14, 8
PLACES = 8
TAU = Tau(0.011, 0.0055)
"""Seconds of a token: 55 ms with all places occupied, far more than a token takes on a busy core (3 to 10 ms)."""
MEAN_TOKENS, MAX_TOKENS = 6.0, 32
"""Length of answers of a model without training, with six tokens of which one ends the answer. It is geometric: the
longest of a step has five times the mean, and the rollouts have seven answers for each of their places."""
G_S = PROMPTS * GROUP_SIZE * MEAN_TOKENS * TAU(PLACES) / PLACES / ROLLOUTS
"""Time (s) that the rollouts alone need for a step at full throughput: 2.3 s."""
ENDLESS = 100_000
"""Steps of a run, which is cancelled when enough of them were counted."""
LEARNING, COUNTED = 3, 10
"""Steps after the start of all guests in which engines are built and hand-overs are learned, and those that count
afterwards. In all arms of a comparison these are the same steps."""
AHEAD = 8
"""Batches that rollouts may work ahead; only ``staleness`` limits them."""
RUN_TIMEOUT_S = 600.0


class Arm(Struct, frozen=True):
    """One kind of run. ``ratio`` is G/T: how many times as long as training the rollouts alone need for a step."""

    layout: str
    """``disaggregated``, ``multiplexed`` or ``colocated``."""
    ratio: float
    staleness: int

    @property
    def name(self) -> str:
        return f"{self.layout} {self.ratio:g} {self.staleness}"

    @property
    def train_s(self) -> float:
        """Seconds that two nodes train for a step. The longer one of G and T is the same in all arms."""
        return G_S / max(1.0, self.ratio) if self.ratio >= 1 else G_S

    @property
    def tau(self) -> Tau:
        """The seconds of a token; where training is the bottleneck, generation is faster."""
        share = min(1.0, self.ratio)
        return Tau(TAU.first * share, TAU.each * share)


class HandBack(Struct, frozen=True):
    """One take back of the GPUs of a node."""

    took: float
    """Seconds from the leader's request until it had the GPUs."""
    killed: bool


class Sample(Struct):
    """The results of one run."""

    layout: str
    ratio: float
    staleness: int
    seed: int
    first_step: int
    """The first step that counts."""
    step_s: list[float]
    """Seconds of each step that counts, between two commits."""
    lent_s: list[float]
    """The metric of these steps; empty without the tag."""
    lend_cost_s: float | None
    """The hand-over that the trainer has learned in the end, both ways together."""
    rewards: list[float]
    """Mean reward of each step that counts."""
    tokens: float
    """Mean number of answer tokens of these steps."""
    hand_backs: list[HandBack]
    overrun: dict[str, float]
    violations: int
    trainer_incarnations: int
    load: tuple[float, float]

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.step_s)

    @property
    def reward(self) -> float:
        """Mean reward of the steps that count."""
        return statistics.mean(self.rewards)


def job(arm: Arm, seed: int, gpu: Path, record: Path | None, *, extra: str = "") -> str:
    """Return job.toml of a run."""
    colocated = arm.layout == "colocated"
    ranks = RANKS + ROLLOUTS if colocated else RANKS
    token_s = arm.train_s / (PROMPTS * GROUP_SIZE * MEAN_TOKENS) * RANKS / ranks
    tau = (arm.tau.first, arm.tau.each)
    environment = fake_gpu.environment(gpu, token_s=token_s, tau=tau, record=record)
    env = "\n".join(f"env.{name} = {json.dumps(value)}" for name, value in environment.items())
    trainer = "" if arm.layout == "disaggregated" else 'trainer = ["rollout"]'
    return f"""
[run]
name = "tags"
steps = {ENDLESS}
seed = {seed}
[cluster]
kind = "local"
node = {{ cpus = 2, mem = "3GiB" }}
[task]
function = "uneven_task:make"
[model]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 2
max_length = 64
tokenizer = {{ pieces = "0123" }}
[sampling]
prompts_per_step = {PROMPTS}
group_size = {GROUP_SIZE}
max_new_tokens = {MAX_TOKENS}
stream = true
staleness = {arm.staleness}
{f"ahead = {AHEAD}" if arm.staleness else ""}
[tags]
spare = ["train"]
{trainer}
[roles.trainer]
ranks = {ranks}
warm = false
learning_rate = 1e-4
final_learning_rate = 1.0
{env}
[roles.rollout]
replicas = {0 if colocated else ROLLOUTS}
lease = {PLACES}
segment_tokens = 2
{env}
[transport]
weights = "tcp"
[limits]
silence = "30s"
join = "300s"
[recovery]
backoff = "100ms"
per_replica = 20
per_node = 20
{extra}
"""


class Started(Struct):
    """A run, the folder of its fake GPUs, and that of its pace."""

    arm: Arm
    seed: int
    test: TestRun
    gpu: Path
    record: Path


def start(arm: Arm, seed: int, folder: Path, *, extra: str = "") -> Started:
    """Submit a run."""
    place = folder / f"{arm.name.replace(' ', '-')}-{seed}-{time.monotonic_ns()}"
    gpu, record = place / "gpu", place / "pace"
    for each in (gpu, record):
        each.mkdir(parents=True)
    return Started(arm, seed, submit_here(place, job(arm, seed, gpu, record, extra=extra)), gpu, record)


def run_together(arms: Sequence[Arm], seed: int, folder: Path) -> list[Sample]:
    """Run these arms at the same time, so that they see the same load of this machine; return their results."""
    load = os.getloadavg()[0]
    with ExitStack() as runs:
        started = [runs.enter_context(ended(start(arm, seed, folder))) for arm in arms]
        for one in started:
            one.test.wait(_guests_are_there, RUN_TIMEOUT_S)
        first = max(one.test.state().step for one in started) + LEARNING + 2  # after the step at work
        for one in started:
            one.test.wait(lambda state: state.step >= first + COUNTED - 1, RUN_TIMEOUT_S)
    return [sample(one, first, (load, os.getloadavg()[0])) for one in started]


def _guests_are_there(state: State) -> bool:
    there = sum(one.role == GUEST_ROLE and one.status is Status.JOINED for one in state.replicas.values())
    return state.step > 0 and there == state.job.guests


def sample(one: Started, first: int, load: tuple[float, float]) -> Sample:
    """Return the results of a run whose steps count from ``first`` on."""
    commits = {each.event.step: each for each in one.test.events() if isinstance(each.event, ev.StepCommitted)}
    steps = [commits[number] for number in range(first - 1, first + COUNTED)]
    metrics = [each.event.metrics for each in steps[1:] if isinstance(each.event, ev.StepCommitted)]
    costs = [each["lend_cost_s"] for each in metrics if "lend_cost_s" in each]
    return Sample(
        one.arm.layout,
        one.arm.ratio,
        one.arm.staleness,
        one.seed,
        first,
        step_s=[round(after.at - before.at, 3) for before, after in pairwise(steps)],
        lent_s=[round(each["lent_s"], 3) for each in metrics if "lent_s" in each],
        lend_cost_s=round(costs[-1], 4) if costs else None,
        rewards=[round(each["reward"], 4) for each in metrics],
        tokens=round(statistics.mean(each["tokens"] for each in metrics), 1),
        hand_backs=hand_backs(one.gpu),
        overrun={role: round(overrun(recorded(one.record, role)), 4) for role in ("trainer", "rollout")},
        violations=len(fake_gpu.violations(one.gpu)),
        trainer_incarnations=one.test.state().replica(TRAINER).incarnation_number,
        load=(round(load[0], 1), round(load[1], 1)),
    )


def hand_backs(gpu: Path) -> list[HandBack]:
    """Return all take backs from guests that were awake with an engine."""
    found: list[HandBack] = []
    awake: set[str] = set()
    for one in fake_gpu.events(gpu):
        if one["who"].startswith(GUEST_ROLE):
            if one["event"] == "wake":
                awake.add(one["node"])
        elif one["event"] == "taken" and one["node"] in awake:
            awake.discard(one["node"])
            found.append(HandBack(round(one["took"], 4), bool(one["killed"])))
    return found


@contextmanager
def ended(one: Started) -> Iterator[Started]:
    """Cancel a run after the block, and check it."""
    yield one
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    one.test.call("cancel", one.test.run.id, **quiet).wait(RUN_TIMEOUT_S)
    one.test.wait_end(RUN_TIMEOUT_S)
    one.test.wait_gone(60.0)
    check_sound(one.test.run)
    assert not fake_gpu.violations(one.gpu)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
