"""Measures how much sooner a run with a failing trainer ends if only the trainer restarts, not the whole job (Slurm).

Each arm in turn runs one job, with real roles in torch at a fixed pace (benchmarks/_pace.py), on a cluster of several
slurmd on this machine. The same faults hit each arm: in each tenth of the steps, the trainer is killed by SIGKILL from
outside. Step and moment are drawn with the seed (benchmarks/_ettr_faults.py). Arms:

- ``clean``, ``clean_ft``: no faults. In ``clean`` every protection is off: no standby process, snapshot or spare node,
  and only one checkpoint, at the end. In ``clean_ft`` every protection is on.
- ``role``: rrl as shipped.
- ``role_cold``: ``role`` without standby processes and snapshots, which shows the effect of isolation alone.
- ``job``: the policy ``job``. Every role restarts in place from the last checkpoint. RobustRL ran ByteRobust like this.
- ``requeue``, ``submitit``: Slurm restarts the job (benchmarks/_ettr_batch.py). These arms do not run to the end,
  because the job waits in Slurm's queue after each kill, and this wait cannot be shortened in proportion to the steps.
  Only the outage of a kill is measured. From it, the ETTR is computed for steps of 42 s, as in RobustRL's experiment.

The clock of a run covers all of the time from its first training to the commit of its last step. The *strict ETTR* of a
run is the clock of ``clean`` with the same seed divided by the run's own clock. So repeated work, waiting and
protection count as losses. A pilot measures what a fault costs ``job`` at a step of one second. From this cost it sets
the length of a step with which ``job`` has a strict ETTR of 0.60. In all arms, budgets in seconds are shortened in
proportion to the steps.

Beside the headline (part ``rates``: 10 faults in 100 steps) there are comparisons like those of RobustRL's paper
(benchmarks/_ettr_paper.py): half as many faults, steps of four times the length, other workloads, fault rates from 2 to
10 %, checkpoints in every first, third and fifth step, and a mixed plan of faults. On two otherwise idle cores, part
``rates`` takes about 40 minutes, and all parts take twice as long.

An outage is the time from the kill until the trainer trains again. These figures were chosen before the first
measurement:

- ``real_*_strict``: median of the strict ETTR of the arm over the seeds. For ``requeue`` and ``submitit`` it is
  computed from the median outage.
- ``outage_ratio``: median outage of ``role`` divided by that of ``job``. In ``job`` all roles start on the same two
  cores; a cluster has a node for each of them.
- ``outage_over_slowest_start``: median outage of ``role`` divided by that of ``role_cold``, in which only one process
  starts.
- ``time_saved``: 1 - clock of ``role`` / clock of ``job``.
- ``ft_overhead``: clock of ``clean_ft`` / clock of ``clean`` - 1.
- ``estimate_error``: largest difference between the strict ETTR of a run and the estimate from that run alone
  (``rrl report``).

Prints tables, and one JSON object as its last line. The object names a file with the samples of all runs, which is
written after each run. A benchmark that was stopped continues with ``--continue FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rrl.benchmarks import _ettr_batch as batch
from rrl.benchmarks._ettr_arms import ARMS, PAPER_STEP_S, budgets
from rrl.benchmarks._ettr_figures import Sample, outage_median, share_at, strict, time_saved
from rrl.benchmarks._ettr_paper import EXPERIMENTS, RATES, print_experiments, print_published, print_stages
from rrl.benchmarks._ettr_runs import FAULTS, PILOT_STEP_S, STEPS, Plan, Runs
from rrl.benchmarks._provenance import provenance, spread
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm.root import ensure

NODES = 7
"""Number of nodes: for the trainer, two rollouts, store, reward, a spare, and the manager's job."""
SEEDS = 3
QUICK = Plan(RATES.name, 30, 3)
REQUEUES = 2
"""Number of kills in each arm in which Slurm restarts the job."""
REQUEUE_DELAY_S, REQUEUE_DELAY_VERSION = 5, "26.05"
SHORT_REQUEUE = f"requeue, delay {REQUEUE_DELAY_S} s"
PARTS = ("rates", *EXPERIMENTS, "batch")


def measure_batch(lab: SlurmLab) -> dict[str, list[float]]:
    """Measure in turn the arms in which Slurm restarts the job; return the outages (s) by arm.

    Slurm holds a requeued job, for about 120 s by default. From version 25.11 on, ``SchedulerParameters=requeue_delay``
    sets this time. If Slurm :data:`REQUEUE_DELAY_VERSION` is available, ``requeue`` is also measured with a delay of
    :data:`REQUEUE_DELAY_S`.
    """
    found = _outages(lab, dict.fromkeys(batch.KINDS, REQUEUES))
    try:
        root = ensure(REQUEUE_DELAY_VERSION)
    except RuntimeError as error:
        print(f"requeue_delay is left out: {error}", flush=True)
        return found
    with SlurmLab.start(nodes=1, root=root, requeue_delay=REQUEUE_DELAY_S) as short:
        return found | {SHORT_REQUEUE: _outages(short, {"requeue": REQUEUES})["requeue"]}


def _outages(lab: SlurmLab, counts: Mapping[str, int]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in counts}
    for turn in range(max(counts.values())):
        for kind in counts:
            found[kind].append(round(batch.outage(lab, kind, f"{kind}-{turn}", PILOT_STEP_S), 1))
            print(f"{kind}-{turn}: {found[kind][-1]} s from the kill to training", flush=True)
    return found


def figures(samples: Sequence[Sample], requeues: dict[str, list[float]]) -> dict[str, Any]:
    """Return the headline figures: those of part ``rates``, and those of the arms in which Slurm restarts the job."""
    rates = [each for each in samples if each.plan == RATES.name]
    shares = {arm: [strict(each, samples) for each in rates if each.arm == arm] for arm in ARMS}
    found: dict[str, Any] = {}
    for arm in ("role", "role_cold", "job"):
        found[f"real_{arm}_strict"] = round(statistics.median(shares[arm]), 4) if shares[arm] else None
    for kind in batch.KINDS:
        times = requeues.get(kind)
        share = share_at(PAPER_STEP_S, STEPS / FAULTS, statistics.median(times)) if times else None
        found[f"real_{kind}_strict"] = None if share is None else round(share, 4)
    role, cold, whole = (outage_median(rates, arm) for arm in ("role", "role_cold", "job"))
    pairs = [
        {each.arm: each.seconds for each in rates if each.seed == seed}
        for seed in sorted({each.seed for each in rates})
    ]
    errors = [
        abs(strict(each, samples) - each.account.estimate) for each in samples if each.account.estimate is not None
    ]
    return found | {
        "outage_ratio": None if not role or not whole else round(role / whole, 4),
        "outage_over_slowest_start": None if not role or not cold else round(role / cold, 4),
        "time_saved": spread(time_saved(rates)) if rates else None,
        "ft_overhead": spread([pair["clean_ft"] / pair["clean"] - 1 for pair in pairs]) if pairs else None,
        "strict": {arm: spread(values) for arm, values in shares.items() if values},
        "steps_lost_max": max((each.lost_steps for sample in rates for each in sample.outages), default=0),
        "estimate_error": round(max(errors), 4) if errors else None,
    }


def print_arms(samples: Sequence[Sample], requeues: dict[str, list[float]]) -> None:
    """Print a row for each arm of part ``rates``: duration, strict ETTR, outage, strict ETTR with the paper's steps."""
    rows = []
    for arm in ARMS:
        own = [each for each in samples if (each.plan, each.arm) == (RATES.name, arm)]
        outage_s = outage_median(own, arm)
        if own:
            shares = [strict(sample, samples) for sample in own]
            rows.append(
                [
                    arm,
                    f"{statistics.median(each.seconds for each in own):.1f}",
                    f"{statistics.median(shares):.3f}",
                    f"{min(shares):.3f}-{max(shares):.3f}",
                    "-" if outage_s is None else f"{outage_s:.2f}",
                    "-" if outage_s is None else f"{share_at(PAPER_STEP_S, STEPS / FAULTS, outage_s):.3f}",
                ]
            )
    for kind, times in requeues.items():
        outage_s = statistics.median(times)
        rows.append([kind, "-", "-", "-", f"{outage_s:.1f}", f"{share_at(PAPER_STEP_S, STEPS / FAULTS, outage_s):.3f}"])
    print_table(["arm", "clock s", "strict ETTR", "range", "outage s", f"at {PAPER_STEP_S:.0f} s steps"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of part rates; other parts have one")
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument(
        "--continue",
        dest="earlier",
        type=Path,
        metavar="SAMPLES",
        help="file of samples of a stopped benchmark; its runs are not repeated",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"only part rates: one seed, {QUICK.faults} faults in {QUICK.steps} steps"
    )
    options = parser.parse_args()
    check_requirements("ettr")
    parts = ("rates",) if options.quick else options.part or PARTS
    with SlurmLab.start(nodes=NODES) as lab:
        version = ".".join(map(str, lab.version))
        runs = Runs(lab)
        if options.earlier:
            runs.load(options.earlier)
        elif set(parts) - {"batch"}:
            runs.pilot()
        if "rates" in parts:
            plan, seeds = (QUICK, 1) if options.quick else (RATES, options.seeds)
            for seed in range(seeds):
                runs.measure_all(plan, ARMS.values(), seed)
        for name, experiment in EXPERIMENTS.items():
            if name in parts:
                experiment(runs)
        if "batch" in parts:
            runs.requeue_s = measure_batch(lab)
    print(f"Slurm {version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, steps of {runs.step_s} s")
    print(
        "budgets of all arms without policy and full_restarts:", budgets(ARMS["role"], runs.step_s).replace("\n", "; ")
    )
    print_arms(runs.samples, runs.requeue_s)
    print_experiments(runs.samples)
    print_stages(runs.samples)
    print_published(runs.samples)
    print(
        json.dumps(
            figures(runs.samples, runs.requeue_s)
            | {
                "step_s": runs.step_s,
                "slurm": version,
                "requeue_s": runs.requeue_s,
                **provenance(),
                "raw": str(runs.save()),
            }
        )
    )


if __name__ == "__main__":
    main()
