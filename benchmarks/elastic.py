"""Measures what rollout pools gain and cost: elastic replicas, spares that generate, and unlike rollouts.

All runs are whole runs without a model, at the pace of GPUs that this machine does not have (_elastic_roles.py):
manager, store, leases, weights and nodes are real. Parts:

- ``growth`` (the default): the mean length of answers doubles between steps 15 and 45 of 75, while the trainer's step
  always takes 1 s. At first four fixed rollouts keep up with the trainer; in the end it takes eight. Arms: 0, 2, 4 and
  8 fixed further replicas, and an elastic pool of at most 8, with a budget that does not bind (``elastic``) and one
  that does (``tight``). The arms of a seed run at the same time, half of them at once, so that they share the load of
  this machine. With ``--preempt S`` there is an arm whose elastic nodes are taken away at random, each after S seconds
  on average. With ``--queue never`` there is an arm whose queue grants no node, and the planner of such a run is asked
  for six virtual hours (_elastic_queue.py). With ``--slurm`` the arms run one after the other on a real Slurm of this
  machine.
- ``spares``: two spares and four rollouts, generation as the bottleneck. Spares generate or are idle
  (``[tags] spare``). The node of the trainer is lost, and later that of a rollout (_elastic_spares.py).
- ``unlike``: three rollouts, and a pool of three that take three times as long for a token. Lengths of answers depend
  on the prompt. Leases as shipped are compared with leases first come, first served (_elastic_unlike.py).

These figures and bars were chosen before the first measurement:

- ``time_over_best_fixed``: time of the arm ``elastic`` divided by that of the fastest fixed arm, as means over the
  seeds (at most 1.15). It is the time from the first commit to the last. ``time_over_best_fixed_preempted`` is that of
  the arm with preemptions (at most 1.30).
- ``node_hours_over_fixed_of_same_speed``: node hours of the elastic pool divided by those of a fixed pool with the same
  time, interpolated linearly between the fixed arms of the seed (at most 0.85).
- ``changed_incarnations_of_others``: further incarnations of all workers that are not of the pool, in all elastic arms
  (0).
- ``over_budget_s``: node seconds of an elastic pool beyond its budget; the largest of all runs (0).
- ``lost_trajectories``, ``failures_charged``: in the arm with preemptions, trajectories without a fate, and fences that
  count as failures (0).
- ``time_over_fixed``: time of the arm whose queue grants nothing divided by that of the arm ``fixed 0`` (at most 1.02).
  ``requests_per_hour``: requests for nodes per hour of virtual time, the largest of all kinds of queues (at most 20).
- ``tokens_ratio``: trained tokens per second with spares that generate over those with idle spares, without failures
  (at least 1.4, which is 1 + 0.8 times spares per rollout).
- ``recovery_over_idle_spare``: time from the loss of the trainer's node to its next commit, spares that generate over
  idle spares (at most 1.25).
- ``tokens_lost_share``: tokens that a lost rollout had generated and not appended, and which others generate again,
  divided by those that it generates in a minute (at most 0.02).
- ``step_ratio``: mean time of a step first come, first served over that as shipped (at least 1.15).

Prints tables, keeps the samples in a file, and prints one JSON object as its last line. The figures of what was not run
are null.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rrl.benchmarks import _elastic_queue, _elastic_spares, _elastic_unlike
from rrl.benchmarks._elastic_runs import (
    ELASTIC,
    FIXED,
    NEVER_GRANTED,
    TIGHT,
    Arm,
    Sample,
    by_arm,
    over_seeds,
    preempted,
    run_together,
    shuffled,
)
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import Need, check_requirements, missing
from rrl.benchmarks._table import print_table
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import temporary_runs_folder

SEEDS = 3
AT_ONCE = 3
"""Number of arms that run at the same time: as many as two cores serve without falling behind the pace."""
LAB_NODES = 10
PARTS = ("growth", "spares", "unlike")
BARS: dict[str, tuple[float, bool]] = {
    "time_over_best_fixed": (1.15, True),
    "node_hours_over_fixed_of_same_speed": (0.85, True),
    "changed_incarnations_of_others": (0, True),
    "over_budget_s": (0, True),
    "time_over_best_fixed_preempted": (1.30, True),
    "lost_trajectories": (0, True),
    "failures_charged": (0, True),
    "time_over_fixed": (1.02, True),
    "requests_per_hour": (20, True),
    "tokens_ratio": (1.4, False),
    "recovery_over_idle_spare": (1.25, True),
    "tokens_lost_share": (0.02, True),
    "step_ratio": (1.15, False),
}
"""The bar of each figure, and whether it is an upper bound."""


def node_s_of_same_speed(fixed: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the node seconds with which a fixed pool would take this time.

    Args:
        fixed: Time (s) and node seconds of each fixed arm, in the order of their replicas.
        seconds: The time; the result for a time beyond those of the arms is that of the nearest arm.
    """
    if seconds >= fixed[0][0]:
        return fixed[0][1]
    for (slower, fewer), (faster, more) in pairwise(fixed):
        if faster <= seconds <= slower and faster < slower:
            return fewer + (more - fewer) * (slower - seconds) / (slower - faster)
    return min(fixed)[1]


def growth(seeds: int, preempt_s: float, never: bool, on_slurm: bool) -> list[Sample]:
    """Run the arms of the part ``growth``; return their results."""
    samples: list[Sample] = []
    with temporary_runs_folder() as folder:
        if on_slurm:
            with SlurmLab.start(nodes=LAB_NODES) as lab:
                for seed in range(seeds):
                    _play([*FIXED, ELASTIC], seed, folder, samples, lab)
            return samples
        for seed in range(seeds):
            further = [*([preempted(preempt_s, seed)] if preempt_s else []), *([NEVER_GRANTED] if never else [])]
            _play([*FIXED, ELASTIC, TIGHT, *further], seed, folder, samples)
    return samples


def _play(arms: Sequence[Arm], seed: int, folder: Path, samples: list[Sample], lab: SlurmLab | None = None) -> None:
    arms = shuffled(arms, seed)
    if NEVER_GRANTED in arms:  # it runs beside the arm with which it is compared
        arms.sort(key=lambda arm: arm not in (FIXED[0], NEVER_GRANTED))
    while arms:
        samples += run_together(arms[:AT_ONCE], seed, folder, lab)
        _print_samples(samples[-min(AT_ONCE, len(arms)) :])
        arms = arms[AT_ONCE:]


def _print_samples(samples: Sequence[Sample]) -> None:
    head = ("arm", "seed", "time s", "node s", "trainer waited", "requests", "ended", "others", "charged", "load")
    rows = [
        [
            one.arm,
            str(one.seed),
            f"{one.seconds:.1f}",
            f"{one.node_s:.0f}",
            f"{one.waited:.2f}",
            str(one.requests),
            str(one.ended_allocations),
            str(one.changed_others),
            str(len(one.failures_charged)),
            f"{one.load:.1f}",
        ]
        for one in samples
    ]
    print_table(head, rows)
    for one in samples:
        if one.resizes:
            print(f"{one.arm} {one.seed}: " + ", ".join(f"{count} at {at:.0f} s" for at, count in one.resizes))
        for failure in one.failures_charged:
            print(f"{one.arm} {one.seed}: {failure}")
    print(flush=True)


def growth_figures(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Return the figures of the part ``growth``."""
    arms = by_arm(samples)

    def mean_s(arm: Arm) -> float:
        return statistics.mean(over_seeds(arms[arm.name], lambda one: one.seconds))

    best = min(map(mean_s, FIXED))
    fixed_of = [
        [(one.seconds, one.node_s) for arm in FIXED for one in arms[arm.name] if one.seed == elastic.seed]
        for elastic in arms[ELASTIC.name]
    ]
    ratios = [
        elastic.node_s / max(1e-9, node_s_of_same_speed(fixed, elastic.seconds))
        for elastic, fixed in zip(arms[ELASTIC.name], fixed_of, strict=True)
    ]
    elastic = [one for name, those in arms.items() if not name.startswith("fixed") for one in those]
    taken, never = arms.get("preempted", []), arms.get(NEVER_GRANTED.name)
    return {
        "time_over_best_fixed": mean_s(ELASTIC) / best,
        "node_hours_over_fixed_of_same_speed": statistics.mean(ratios),
        "changed_incarnations_of_others": sum(one.changed_others for one in elastic),
        "over_budget_s": max(one.over_budget_s for one in elastic),
        "time_over_best_fixed_preempted": statistics.mean(one.seconds for one in taken) / best if taken else None,
        "lost_trajectories": sum(one.lost for one in taken) if taken else None,
        "failures_charged": sum(len(one.failures_charged) for one in taken) if taken else None,
        "time_over_fixed": mean_s(NEVER_GRANTED) / mean_s(FIXED[0]) if never else None,
    }


def _print_bars(figures: dict[str, float | None]) -> None:
    for name, (bar, most) in BARS.items():
        if (value := figures.get(name)) is not None:
            met = value <= bar if most else value >= bar
            print(f"{name} {value:g}, bar {'at most' if most else 'at least'} {bar:g}: {'met' if met else 'MISSED'}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument("--part", choices=PARTS, action="append", help="run this part; may be repeated")
    options.add_argument("--preempt", type=float, default=0.0, metavar="S", help="add an arm with preemptions")
    options.add_argument("--queue", choices=("never",), help="add an arm whose queue grants nothing")
    options.add_argument("--slurm", action="store_true", help="run the part growth on a real Slurm of this machine")
    given = options.parse_args()
    parts = given.part or ["growth"]
    if given.slurm and (given.preempt or given.queue or parts != ["growth"]):
        options.error("--slurm runs only the part growth, without --preempt and --queue")
    check_requirements("elastic")
    if given.slurm and (why := missing(Need.SLURM)) is not None:
        options.error(f"--slurm: {why}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    figures: dict[str, float | None] = dict.fromkeys(BARS)
    kept: dict[str, Any] = {}
    if "growth" in parts:
        samples = growth(given.seeds, given.preempt, given.queue is not None, given.slurm)
        figures |= growth_figures(samples)
        kept["growth"] = msgspec.to_builtins(samples)
    if given.queue:
        kept["requests_per_hour"] = {
            kind: round(_elastic_queue.requests_per_hour(kind), 2) for kind in _elastic_queue.KINDS
        }
        figures["requests_per_hour"] = max(kept["requests_per_hour"].values())
    for name, part in (("spares", _elastic_spares), ("unlike", _elastic_unlike)):
        if name in parts:
            found, kept[name] = part.measure(given.seeds)
            figures |= found
    _print_bars(figures)
    rounded = {name: None if value is None else round(value, 4) for name, value in figures.items()}
    print(last_line("elastic", rounded, {}, {**kept, "seeds": given.seeds}))


if __name__ == "__main__":
    main()
