"""Measures what a whole run gains when its trainer keeps failing, against restarts of the whole job, on a real Slurm.

The same job, with real roles in torch at a fixed pace (benchmarks/_pace.py), is run by each arm in turn, on a cluster
of several slurmd on this machine. The same faults hit each arm: SIGKILL of the trainer from outside, one in each tenth
of the steps, at a step and a moment drawn by the seed (benchmarks/_ettr_faults.py). Arms:

- ``clean``, ``clean_ft``: no faults, with every protection off (no standby process, snapshot or spare node), and on.
- ``role``: rrl as shipped.
- ``role_cold``: without standby processes and snapshots: what isolation alone is worth.
- ``job``: policy ``job``: every role restarts in place from the last checkpoint, as RobustRL ran ByteRobust.
- ``requeue``, ``submitit``: Slurm restarts the job (benchmarks/_ettr_batch.py). The time in the queue cannot be
  shortened as steps are. So only the outage of a kill is measured, and the ETTR is computed from it for the step of
  RobustRL's experiment (42 s).

The clock of a run covers all of the time from its first training to the commit of its last step. The *strict ETTR* of
a run is the clock of ``clean`` with the same seed divided by its own: work that is done again, waiting and protection
are losses. A pilot sets the length of a step so that ``job`` comes to 0.60; it measures what a fault costs ``job`` at a
step of one second. Budgets in seconds are shortened as steps are, alike in all arms.

Chosen before the first figure: ``real_*_strict`` are medians over the seeds; ``outage_ratio`` is the median outage of
``role`` divided by that of ``job``; ``outage_over_slowest_start`` divides by the median outage of ``role_cold``, in
which only one process starts (in ``job`` all roles start on the same two cores, where a cluster has a node for each);
``time_saved`` is 1 - clock of ``role`` / clock of ``job``; ``ft_overhead`` is clock of ``clean_ft`` / clock of
``clean`` - 1. An outage is the time from the kill until the trainer trains again.

Prints tables, and one JSON object as its last line (benchmarks/_provenance.py); ``raw`` names the file of all samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from typing import Any

from rrl.benchmarks import _ettr_batch as batch
from rrl.benchmarks._ettr_arms import ARMS, PAPER_STEP_S, Arm, budgets, job
from rrl.benchmarks._ettr_faults import Fault, run_to_end, schedule
from rrl.benchmarks._ettr_figures import Sample, commits_of, outage_median, outages, share_at, strict
from rrl.benchmarks._pace import overrun, recorded
from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.types import Outcome
from rrl.tests.support.runs import submit_on
from rrl.tests.support.slurm.lab import SlurmLab

NODES = 7
"""Trainer, two rollouts, store, reward, a spare, and the node of the manager's job."""
SEEDS, STEPS, FAULTS = 3, 100, 10
QUICK_STEPS, QUICK_FAULTS = 30, 3
PILOT_STEP_S, PILOT_STEPS, PILOT_FAULTS = 1.0, 16, 2
TARGET_JOB_STRICT = 0.60
REQUEUES = 2
"""Kills of each arm in which Slurm restarts the job."""
UNCOMMITTED = 1
"""K, the default of ``[roles.trainer] uncommitted``."""
RUN_TIMEOUT_S = 1800.0
PARTS = ("rates", "batch")


def measure_run(lab: SlurmLab, arm: Arm, name: str, steps: int, step_s: float, seed: int,
                faults: list[Fault]) -> Sample:  # fmt: skip
    """Run one arm to its end; return its measured values."""
    record = lab.user_home / f"{name}-pace"
    lab.call_as_user(record.mkdir)
    run = submit_on(lab, name, job(arm, "slurm", steps, step_s, seed, record))
    state, kills = run_to_end(run, faults, step_s, RUN_TIMEOUT_S)
    assert state.outcome is Outcome.COMPLETED, f"{name}: {state.outcome}: {state.why}"
    assert len(kills) == len(faults), f"{name}: {len(kills)} of {len(faults)} faults"
    events = run.events()
    began, commits = commits_of(events)
    run.wait_gone(120.0)
    lab.clear()
    sample = Sample(
        arm.name, seed, round(commits[-1] - began, 3), tuple(round(at - began, 3) for at in commits),
        outages(run.run, events, kills, UNCOMMITTED),
        (round(overrun(recorded(record, "trainer")), 4), round(overrun(recorded(record, "rollout")), 4)),
        round(os.getloadavg()[0], 1),
    )  # fmt: skip
    print(f"{name}: {sample.seconds:.1f} s, outages {[outage.seconds for outage in sample.outages]}, "
          f"overrun {sample.overrun}, load {sample.load}", flush=True)  # fmt: skip
    return sample


def pilot(lab: SlurmLab) -> float:
    """Return the length of a step (s) at which ``job`` should come to the target, with one fault in every ten steps.

    A fault costs ``job`` an outage, which does not depend on the step, and work done again, which grows with it.
    """
    clean = measure_run(lab, ARMS["clean"], "pilot-clean", PILOT_STEPS, PILOT_STEP_S, 0, [])
    faults = schedule(PILOT_STEPS, PILOT_FAULTS, 0)
    failing = measure_run(lab, ARMS["job"], "pilot-job", PILOT_STEPS, PILOT_STEP_S, 0, faults)
    outage_s = statistics.mean(outage.seconds for outage in failing.outages)
    cost = (failing.seconds - clean.seconds) / PILOT_FAULTS
    again = max(0.0, (cost - outage_s) / PILOT_STEP_S)
    per_fault = STEPS / FAULTS * (1 / TARGET_JOB_STRICT - 1)
    step_s = round(outage_s / (per_fault - again), 3)
    print(f"pilot: an outage of {outage_s:.2f} s, {again:.2f} steps done again: steps of {step_s} s", flush=True)
    return step_s


def measure_rates(lab: SlurmLab, seeds: Sequence[int], steps: int, faults: int) -> tuple[float, list[Sample]]:
    """Run every arm with every seed, the arms in turn; return the length of a step, and the samples."""
    step_s = pilot(lab)
    samples = [
        measure_run(lab, arm, f"{arm.name}-{seed}", steps, step_s, seed,
                    schedule(steps, faults, seed) if arm.faults else [])
        for seed in seeds
        for arm in ARMS.values()
    ]  # fmt: skip
    return step_s, samples


def measure_batch(lab: SlurmLab) -> dict[str, list[float]]:
    """Return the outages (s) of the arms in which Slurm restarts the job, in turn."""
    found: dict[str, list[float]] = {kind: [] for kind in batch.KINDS}
    for turn in range(REQUEUES):
        for kind in batch.KINDS:
            found[kind].append(round(batch.outage(lab, kind, f"{kind}-{turn}", PILOT_STEP_S), 1))
            print(f"{kind}-{turn}: {found[kind][-1]} s from the kill to training", flush=True)
    return found


def figures(step_s: float | None, samples: Sequence[Sample], requeues: dict[str, list[float]],
            steps_per_fault: float) -> dict[str, Any]:  # fmt: skip
    """Return the content of the JSON object that is printed last."""
    found: dict[str, Any] = {"step_s": step_s}
    shares = {arm: [strict(each, samples) for each in samples if each.arm == arm] for arm in ARMS}
    for arm in ("role", "role_cold", "job"):
        found[f"real_{arm}_strict"] = round(statistics.median(shares[arm]), 4) if shares[arm] else None
    for kind in batch.KINDS:
        times = requeues.get(kind)
        share = share_at(PAPER_STEP_S, steps_per_fault, statistics.median(times)) if times else None
        found[f"real_{kind}_strict"] = None if share is None else round(share, 4)
    role, cold, whole = (outage_median(samples, arm) for arm in ("role", "role_cold", "job"))
    pairs = [({each.arm: each.seconds for each in samples if each.seed == seed})
             for seed in sorted({each.seed for each in samples})]  # fmt: skip
    return found | {
        "outage_ratio": None if not role or not whole else round(role / whole, 4),
        "outage_over_slowest_start": None if not role or not cold else round(role / cold, 4),
        "time_saved": spread([1 - pair["role"] / pair["job"] for pair in pairs]) if pairs else None,
        "ft_overhead": spread([pair["clean_ft"] / pair["clean"] - 1 for pair in pairs]) if pairs else None,
        "strict": {arm: spread(values) for arm, values in shares.items() if values},
        "steps_lost_max": max((each.lost_steps for sample in samples for each in sample.outages), default=0),
    }


def print_arms(samples: Sequence[Sample], requeues: dict[str, list[float]], steps_per_fault: float) -> None:
    """Print a row for each arm: clock, strict ETTR, outage, and its ETTR at the step of RobustRL's experiment."""
    rows = []
    for arm in ARMS:
        own = [sample for sample in samples if sample.arm == arm]
        outage_s = outage_median(samples, arm)
        if own:
            shares = [strict(sample, samples) for sample in own]
            rows.append([
                arm, f"{statistics.median(each.seconds for each in own):.1f}", f"{statistics.median(shares):.3f}",
                f"{min(shares):.3f}-{max(shares):.3f}", "-" if outage_s is None else f"{outage_s:.2f}",
                "-" if outage_s is None else f"{share_at(PAPER_STEP_S, steps_per_fault, outage_s):.3f}",
            ])  # fmt: skip
    for kind, times in requeues.items():
        outage_s = statistics.median(times)
        rows.append(
            [kind, "-", "-", "-", f"{outage_s:.1f}", f"{share_at(PAPER_STEP_S, steps_per_fault, outage_s):.3f}"]
        )
    print_table(["arm", "clock s", "strict ETTR", "range", "outage s", f"at {PAPER_STEP_S:.0f} s steps"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--quick", action="store_true",
                        help=f"one seed, {QUICK_FAULTS} faults in {QUICK_STEPS} steps, no part batch")  # fmt: skip
    options = parser.parse_args()
    check_requirements("ettr")
    seeds, steps, faults = options.seeds, STEPS, FAULTS
    parts = options.part or PARTS
    if options.quick:
        seeds, steps, faults, parts = 1, QUICK_STEPS, QUICK_FAULTS, options.part or ("rates",)
    step_s: float | None = None
    samples: list[Sample] = []
    requeues: dict[str, list[float]] = {}
    with SlurmLab.start(nodes=NODES) as lab:
        version = ".".join(map(str, lab.version))
        if "rates" in parts:
            step_s, samples = measure_rates(lab, range(seeds), steps, faults)
        if "batch" in parts:
            requeues = measure_batch(lab)
    print(f"Slurm {version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {steps} steps, {faults} faults")
    if step_s is not None:
        print("budgets of all arms but policy and full_restarts:", budgets(ARMS["role"], step_s).replace("\n", "; "))
    print_arms(samples, requeues, steps / faults)
    raw = raw_samples("ettr", [_as_json(sample) for sample in samples])
    print(json.dumps(figures(step_s, samples, requeues, steps / faults)
                     | {"slurm": version, "requeue_s": requeues, **provenance(), "raw": str(raw)}))  # fmt: skip


def _as_json(sample: Sample) -> dict[str, Any]:
    return {
        "arm": sample.arm, "seed": sample.seed, "seconds": sample.seconds, "committed": sample.committed,
        "outages": [[outage.seconds, outage.lost_steps] for outage in sample.outages], "overrun": sample.overrun,
        "load": sample.load,
    }  # fmt: skip


if __name__ == "__main__":
    main()
