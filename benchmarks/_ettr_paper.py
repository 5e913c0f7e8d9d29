"""The further comparisons of benchmarks/ettr.py, and tables that print them next to published figures.

The published figures are those of RobustRL's paper (docs/sources.md). They come from 64 to 256 GPUs and steps of about
42 s, ours from two cores and steps of about a second: compare ratios, not seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rrl.benchmarks._ettr_arms import ARMS, GENERATION_BOUND, HEAVY_TAIL
from rrl.benchmarks._ettr_faults import MIXED
from rrl.benchmarks._ettr_figures import Sample, lost_by_stage, outage_median, run_of, strict, time_saved
from rrl.benchmarks._ettr_runs import FAULTS, STEPS, Plan, Runs, checkpointed
from rrl.benchmarks._table import print_table

ROLE, COLD, JOB = ARMS["role"], ARMS["role_cold"], ARMS["job"]
SHORT_STEPS = 50
"""Number of steps in the paper's sensitivity experiment (Figure 14). In 2 to 10 % of them the trainer fails."""
PAPER_CHECKPOINT_EVERY = 5
RATES = Plan("10 %", STEPS, FAULTS)
LOW = Plan("5 %", STEPS, FAULTS // 2)
LONG = Plan("4 x step", 30, 3, step_factor=4.0)
WORKLOADS = (Plan("generation bound", 30, 3, GENERATION_BOUND), Plan("heavy tail", 30, 3, HEAVY_TAIL))
SENSITIVITY = tuple(Plan(f"{2 * faults} % of 50", SHORT_STEPS, faults) for faults in (1, 3, 5))
MIXED_PLAN = Plan("mixed", SHORT_STEPS, len(MIXED), targets=MIXED)


def low(runs: Runs) -> None:
    """Run the arms with as many steps as the main plan (:data:`RATES`) and half as many failures."""
    runs.measure_all(LOW, (ROLE, JOB))


def long(runs: Runs) -> None:
    """Run the arms with steps of four times the length, so that outages cost a smaller share of the time."""
    runs.measure_all(LONG, (ROLE, COLD, JOB))


def workloads(runs: Runs) -> None:
    """Run the workloads of Figure 11: generation takes three times as long as training, or answers have a long tail."""
    for plan in WORKLOADS:
        runs.measure_all(plan, (ROLE, JOB))


def sensitivity(runs: Runs) -> None:
    """Run the experiment of Figure 14: the trainer fails in 2 to 10 % of 50 steps.

    The arm ``job`` writes a checkpoint in every fifth step only.
    """
    for plan in SENSITIVITY:
        runs.measure_all(plan, (ROLE, checkpointed(JOB, PAPER_CHECKPOINT_EVERY)))


def checkpoints(runs: Runs) -> None:
    """Run the experiment of Figure 22: the arms write a checkpoint in every, every third or every fifth step."""
    for every in (1, 3, PAPER_CHECKPOINT_EVERY):
        runs.measure_all(SENSITIVITY[-1], [arm if every == 1 else checkpointed(arm, every) for arm in (ROLE, JOB)])


def mixed(runs: Runs) -> None:
    """Run the mixed plan: a hang of the trainer, and the loss of a rollout, the store, a node and the manager."""
    runs.measure_all(MIXED_PLAN, (ROLE, JOB))


EXPERIMENTS: Mapping[str, Callable[[Runs], None]] = {
    "low": low,
    "long": long,
    "workloads": workloads,
    "sensitivity": sensitivity,
    "checkpoints": checkpoints,
    "mixed": mixed,
}


def print_experiments(samples: Sequence[Sample]) -> None:
    """Print duration, strict ETTR, its estimate, RobustRL's ETTR and median outage of each arm under each plan."""
    rows = []
    for plan, arm in dict.fromkeys((each.plan, each.arm) for each in samples if each.arm != "clean"):
        own = [each for each in samples if (each.plan, each.arm) == (plan, arm)]
        estimates = [each.account.estimate for each in own if each.account.estimate is not None]
        robustrl = [each.account.robustrl for each in own if each.account.robustrl is not None]
        outage_s = outage_median(own, arm)
        rows.append(
            [
                plan,
                arm,
                f"{statistics.median(each.seconds for each in own):.1f}",
                f"{statistics.median(strict(each, samples) for each in own):.3f}",
                f"{statistics.median(estimates):.3f}" if estimates else "-",
                f"{statistics.median(robustrl):.3f}" if robustrl else "-",
                "-" if outage_s is None else f"{outage_s:.2f}",
            ]
        )
    print_table(["plan", "arm", "clock s", "strict ETTR", "estimate", "RobustRL's", "outage s"], rows)


def print_stages(samples: Sequence[Sample]) -> None:
    """Print the seconds that a failure of the trainer costs in each stage (Figure 15)."""
    found = {
        arm: lost_by_stage([each for each in samples if (each.plan, each.arm) == (RATES.name, arm)])
        for arm in ("role", "role_cold", "job")
    }
    stages = list(dict.fromkeys(stage for lost in found.values() for stage in lost))
    if stages:
        rows = [[arm, *(f"{lost.get(stage, 0.0):.2f}" for stage in stages)] for arm, lost in found.items()]
        print_table(["lost s per fault", *stages], rows)


def sliding_minimum(samples: Sequence[Sample], arm: str) -> float | None:
    """Return the lowest sliding estimate of an arm's strict ETTR under the plan :data:`RATES`; None without a run.

    The paper shows about 0.2 for ByteRobust (Figure 12).
    """
    shares = [
        share for each in samples if (each.plan, each.arm) == (RATES.name, arm) for _, share in each.account.sliding
    ]
    return min(shares, default=None)


def reward_difference(samples: Sequence[Sample]) -> float | None:
    """Return the mean reward of the last ten steps in the arm ``role`` minus that in ``clean`` (Figure 13)."""

    def mean(arm: str) -> float | None:
        rewards = [
            value
            for each in samples
            if (each.plan, each.arm) == (RATES.name, arm)
            for value in each.account.reward[-10:]
        ]
        return statistics.mean(rewards) if rewards else None

    with_faults, without = mean("role"), mean("clean")
    return None if with_faults is None or without is None else round(with_faults - without, 4)


def rate_table(samples: Sequence[Sample]) -> list[list[str]]:
    """Return rows (plan, time saved, gain of strict ETTR) of the sensitivity experiment."""
    rows = []
    for plan in SENSITIVITY:
        role, job = (
            run_of(samples, plan.name, arm) for arm in ("role", checkpointed(JOB, PAPER_CHECKPOINT_EVERY).name)
        )
        if role is not None and job is not None:
            saved, gain = 1 - role.seconds / job.seconds, strict(role, samples) - strict(job, samples)
            rows.append([plan.name, f"{saved:.3f}", f"{gain:+.3f}"])
    return rows


def print_published(samples: Sequence[Sample]) -> None:
    """Print the paper's figures next to the figures that were measured here."""
    rates = [each for each in samples if each.plan == RATES.name]
    if rates and {each.arm for each in rates} >= {"role", "job"}:
        role, job = (
            statistics.median(strict(each, samples) for each in rates if each.arm == arm) for arm in ("role", "job")
        )
        saved = time_saved(rates)
        lowest = [sliding_minimum(samples, arm) for arm in ("role", "job")]
        rows = [
            ["ETTR of role, 1 fault in 10 steps (11)", f"{role:.3f}", "> 0.80"],
            ["ETTR of job, 1 fault in 10 steps (11)", f"{job:.3f}", "about 0.60"],
            ["time saved (abstract)", f"{statistics.median(saved):.3f}", "0.084 to 0.174"],
            [
                "lowest sliding ETTR of role, job (12)",
                ", ".join("-" if one is None else f"{one:.2f}" for one in lowest),
                "-, about 0.20",
            ],
            ["reward of role - clean, last ten steps (13)", f"{reward_difference(samples):+.3f}", "no difference"],
        ]
        print_table(["figure of the paper", "here", "published"], rows)
    if rows := rate_table(samples):
        print_table(
            ["2 to 10 % of 50 steps (14)", "time saved", "gain of ETTR"],
            [*rows, ["published", "0.022 to 0.122", "+0.027 to +0.157"]],
        )
