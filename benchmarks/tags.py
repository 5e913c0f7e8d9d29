"""Measures what it gains that idle nodes of the trainer generate (``[tags] trainer = ["rollout"]``), and what it costs.

All runs are whole runs on the local cluster: the built-in roles in torch, with two rollouts and a trainer of two ranks
on two nodes, at the pace of GPUs that this machine does not have (tests/support/fake_gpu.py, which also checks that
trainer and guest never have tensors resident at the same time). G is the time that the rollouts alone need for a step
at full throughput, T that of its training. Both arms of a comparison stream, have one seed and run at the same time.
``ahead`` is large enough for every staleness. Parts:

- ``gain``: G/T of 0.5, 1, 2 and 3, at staleness 0, 1 and 4; with and without lending.
- ``layouts``: four nodes as two rollouts and two trainer nodes (disaggregated), the same with lending (multiplexed),
  and as four trainer nodes that lend, without rollouts (colocated; trains twice as fast); at staleness 4, G = T and 2T.
- ``faults``: a guest that is stopped, one that is killed, and a trainer that is killed while its GPUs are lent.

The time of a step is the time between two commits. Ten steps count, the same in all arms of a comparison, from three
steps after the start of all guests on. These figures and bars were chosen before the first
measurement; the headline is ``gain.staleness_4_2T``:

- ``gain``: seconds a step without lending over those with lending, as means over the seeds. Bars: 1.15 at staleness 4
  and G = 2T, 1.25 at G = 3T, 1.08 at staleness 0 and 1.04 at staleness 1 and G = 2T.
- ``worst_cell``: the least of these ratios over all cells (at least 0.95); ``mean_no_gain``: the mean of those with G
  at most T (at least 0.99).
- ``lent_s_half``: the most that a run with G = T/2 lent in a counted step (0).
- ``layouts``: for each G/T, seconds a step and rewards of the counted steps. Bars: rewards equal within 0.05, and
  multiplexed at least 0.97 times as fast as the better of the other two.
- ``handback_p99_s``: time from a leader's request until it has the GPUs of a guest with an engine (at most 0.3).
- ``trainer_late_s``: the same until the trainer can train, if the guest is stopped (at most ``handback`` + 1 = 6).
- ``recovery_over_not_lent``: time until the trainer can train after a member was killed while the GPUs are lent, over
  that of a run that does not lend (at most 1.1).
- ``trainer_incarnations``: the trainer's incarnation after a guest was stopped and another was killed (1).
- ``both_resident``: violations of the exclusion in all runs (0).

Prints tables, keeps the samples in a file, and prints one JSON object as its last line. The figures of what was not run
are null. The part ``gain`` takes 45 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from rrl.benchmarks import _tags_faults
from rrl.benchmarks._provenance import last_line, raw_samples
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks._tags_runs import AHEAD, COUNTED, G_S, Arm, Sample, percentile, run_together
from rrl.core.run_spec import TagsSpec
from rrl.tests.support.supervisor import temporary_runs_folder

SEEDS = 3
RATIOS = (0.5, 1.0, 2.0, 3.0)
STALENESS = (0, 1, 4)
LAYOUT_RATIOS, LAYOUT_STALENESS = (1.0, 2.0), 4
PARTS = ("gain", "layouts", "faults")
GAIN_BARS = {
    "staleness_4_2T": (4, 2.0, 1.15),
    "staleness_4_3T": (4, 3.0, 1.25),
    "staleness_0_2T": (0, 2.0, 1.08),
    "staleness_1_2T": (1, 2.0, 1.04),
}
"""Staleness, G/T and bar of each figure of ``gain``."""
MIN_WORST_CELL, MIN_MEAN_NO_GAIN = 0.95, 0.99
MAX_REWARD_DIFFERENCE, MIN_MULTIPLEXED = 0.05, 0.97
MAX_HANDBACK_S, MAX_RECOVERY = 0.3, 1.1
MAX_TRAINER_LATE_S = TagsSpec().handback + 1.0
OTHERS = """\
Others, over other baselines (docs/sources.md):
  BiDiRL       1.37, 1.31, 1.19, 1.05, 1.01 tokens/s at staleness 0, .5, 1, 2, 4, lent over not; 4 + 12 GPUs
  verl         -12.6 % time over itself without lending (24 H100), -15.3 % over its best static split (32 H20); on Ray
  SeamlessFlow claims twice the tokens/s and -62 % time over verl, setup unknown"""

Cell = tuple[float, int]


def pair(ratio: float, staleness: int) -> list[Arm]:
    """Return the two arms of a cell."""
    return [Arm(layout, ratio, staleness) for layout in ("disaggregated", "multiplexed")]


def step_s(samples: Sequence[Sample], layout: str, cell: Cell) -> float:
    """Return the mean seconds a step over the seeds."""
    return statistics.mean(one.mean_s for one in samples if (one.layout, one.ratio, one.staleness) == (layout, *cell))


def ratios(samples: Sequence[Sample]) -> dict[Cell, float]:
    """Return for each cell the seconds a step without lending over those with lending."""
    cells = {(one.ratio, one.staleness) for one in samples if one.layout == "multiplexed"}
    return {
        cell: step_s(samples, "disaggregated", cell) / step_s(samples, "multiplexed", cell) for cell in sorted(cells)
    }


def gain_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of the part ``gain``; those of cells that were not run are None."""
    found = ratios(samples)
    no_gain = [ratio for (g_over_t, _), ratio in found.items() if g_over_t <= 1]
    half = [max(one.lent_s) for one in samples if one.layout == "multiplexed" and one.ratio < 1]
    return {
        "gain": {name: _rounded(found.get((ratio, staleness))) for name, (staleness, ratio, _) in GAIN_BARS.items()},
        "worst_cell": round(min(found.values()), 4),
        "mean_no_gain": round(statistics.mean(no_gain), 4) if no_gain else None,
        "lent_s_half": max(half, default=None),
    }


def layout_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return for each G/T the seconds a step and the rewards of the three layouts, and how the multiplexed one did."""
    figures: dict[str, Any] = {}
    for ratio in sorted({one.ratio for one in samples if one.layout == "colocated"}):
        those = [one for one in samples if (one.ratio, one.staleness) == (ratio, LAYOUT_STALENESS)]
        names = ("disaggregated", "multiplexed", "colocated")
        seconds = {name: step_s(those, name, (ratio, LAYOUT_STALENESS)) for name in names}
        rewards = {name: statistics.mean(one.reward for one in those if one.layout == name) for name in names}
        figures["T" if ratio == 1 else f"{ratio:g}T"] = {
            "step_s": {name: round(value, 3) for name, value in seconds.items()},
            "reward": {name: round(value, 4) for name, value in rewards.items()},
            "reward_difference": round(max(rewards.values()) - min(rewards.values()), 4),
            "multiplexed_over_best": round(
                min(seconds["disaggregated"], seconds["colocated"]) / seconds["multiplexed"], 4
            ),
        }
    return figures


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _print_samples(samples: Sequence[Sample]) -> None:
    head = ("arm", "seed", "staleness", "G/T", "T s", "step s", "lent s", "hand-over s", "reward", "overrun", "load")
    print_table(
        head,
        [
            [
                one.layout,
                str(one.seed),
                str(one.staleness),
                f"{one.ratio:g}",
                f"{Arm(one.layout, one.ratio, one.staleness).train_s:.2f}",
                f"{one.mean_s:.3f}",
                f"{statistics.mean(one.lent_s):.2f}" if one.lent_s else "",
                "" if one.lend_cost_s is None else f"{one.lend_cost_s:.3f}",
                f"{one.reward:.3f}",
                f"{one.overrun['trainer']:.2f} {one.overrun['rollout']:.2f}",
                f"{one.load[1]:.1f}",
            ]
            for one in samples
        ],
    )
    print(flush=True)


def _print_bars(figures: dict[str, Any]) -> None:
    gain = figures["gain"] or {}
    bars: list[tuple[str, float | None, float, bool]] = [
        *((f"gain {name}", gain.get(name), bar, False) for name, (_, _, bar) in GAIN_BARS.items()),
        ("worst_cell", figures["worst_cell"], MIN_WORST_CELL, False),
        ("mean_no_gain", figures["mean_no_gain"], MIN_MEAN_NO_GAIN, False),
        ("lent_s_half", figures["lent_s_half"], 0.0, True),
        ("handback_p99_s", figures["handback_p99_s"], MAX_HANDBACK_S, True),
        ("trainer_late_s", figures["trainer_late_s"], MAX_TRAINER_LATE_S, True),
        ("recovery_over_not_lent", figures["recovery_over_not_lent"], MAX_RECOVERY, True),
        ("trainer_incarnations", figures["trainer_incarnations"], 1, True),
        ("both_resident", figures["both_resident"], 0, True),
    ]
    for name, each in (figures["layouts"] or {}).items():
        bars.append((f"layouts {name}: reward difference", each["reward_difference"], MAX_REWARD_DIFFERENCE, True))
        bars.append((f"layouts {name}: multiplexed", each["multiplexed_over_best"], MIN_MULTIPLEXED, False))
    for name, value, bar, most in bars:
        if value is not None:
            met = value <= bar if most else value >= bar
            print(f"{name} {value:g}, bar {'at most' if most else 'at least'} {bar:g}: {'met' if met else 'MISSED'}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    options.add_argument("--quick", action="store_true", help="one seed and one cell of each part, to see that it runs")
    given = options.parse_args()
    check_requirements("tags")
    parts = given.part or PARTS
    seeds = range(1 if given.quick else given.seeds)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; G or T {G_S:.2f} s, {COUNTED} steps, ahead {AHEAD}")
    cells = [(ratio, staleness) for ratio in RATIOS for staleness in STALENESS]
    layouts = [(ratio, LAYOUT_STALENESS) for ratio in LAYOUT_RATIOS]
    if given.quick:
        cells, layouts = [(2.0, LAYOUT_STALENESS)], [(2.0, LAYOUT_STALENESS)]
    samples: list[Sample] = []
    faults: _tags_faults.Faults | None = None
    raw, began = None, time.monotonic()
    with temporary_runs_folder() as folder:
        for seed in seeds:
            for cell in cells if "gain" in parts else layouts if "layouts" in parts else []:
                samples += run_together(pair(*cell), seed, folder)
                _print_samples(samples[-2:])
                raw = raw_samples("tags", msgspec.to_builtins(samples), raw)
            for cell in layouts if "layouts" in parts else []:
                samples += run_together([Arm("colocated", *cell)], seed, folder)
                _print_samples(samples[-1:])
                raw = raw_samples("tags", msgspec.to_builtins(samples), raw)
        print(f"{time.monotonic() - began:.0f} s")
        if "faults" in parts:
            faults = _tags_faults.measure(folder, 1 if given.quick else _tags_faults.KILLS)
            print(faults, flush=True)
    figures: dict[str, Any] = dict.fromkeys(("gain", "worst_cell", "mean_no_gain", "lent_s_half"))
    if "gain" in parts:
        figures |= gain_figures(samples)
    took = [each.took for one in samples for each in one.hand_backs]
    figures |= {
        "layouts": layout_figures(samples) if "layouts" in parts else None,
        "handback_p99_s": percentile(took, 0.99) if took else None,
        "trainer_late_s": faults and faults.trainer_late_s,
        "recovery_over_not_lent": faults and round(faults.recovery_over_not_lent, 4),
        "trainer_incarnations": faults
        and max(faults.trainer_incarnations, *(one.trainer_incarnations for one in samples), 1),
        "both_resident": sum(one.violations for one in samples),
    }
    print(OTHERS)
    _print_bars(figures)
    kept = {"runs": msgspec.to_builtins(samples), "faults": msgspec.to_builtins(faults), "seeds": len(seeds)}
    print(last_line("tags", figures, {}, kept))


if __name__ == "__main__":
    main()
