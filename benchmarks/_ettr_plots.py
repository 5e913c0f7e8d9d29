"""Draws the plots of docs/benchmarks.md from the samples of benchmarks/ettr.py.

python -m rrl.benchmarks._ettr_plots SAMPLES.json docs/benchmarks
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec

from rrl.benchmarks._ettr_arms import ARMS, PAPER_STEP_S
from rrl.benchmarks._ettr_figures import Sample, outage_median, run_of, share_at, strict
from rrl.benchmarks._ettr_paper import LONG, MIXED_PLAN, RATES
from rrl.benchmarks._ettr_runs import FAULTS, STEPS

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "rrl"  # so that equal samples give equal files

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

COLOURS = {"clean": "#777777", "clean_ft": "#999999", "role": "#0072b2", "role_cold": "#56b4e9", "job": "#d55e00"}
PUBLISHED = {"role": 0.80, "job": 0.60}
"""Published ETTR with one fault in ten steps, by the arm that it is compared with. RobustRL (``role``) has more than
this value, ByteRobust (``job``) about this value."""
FACTORS = [0.25 * 1.1**power for power in range(60)]
"""Lengths of a step for the curves, as multiples of the measured length."""


def draw_arms(axes: Axes, samples: Sequence[Sample], _: float) -> None:
    """Draw the strict ETTR of each arm: a point for each seed, a line for the median."""
    for place, arm in enumerate(ARMS):
        values = [strict(each, samples) for each in samples if (each.plan, each.arm) == (RATES.name, arm)]
        axes.plot([place] * len(values), values, "o", color=COLOURS[arm], alpha=0.6)
        if values:
            axes.hlines(statistics.median(values), place - 0.3, place + 0.3, color=COLOURS[arm])
        if arm in PUBLISHED:
            axes.plot([place + 0.35], [PUBLISHED[arm]], marker="_", markersize=12, color="black")
    axes.set_xticks(range(len(ARMS)), list(ARMS))
    axes.set_ylim(0, 1.1)
    axes.set_ylabel("strict ETTR (black: published)")


def draw_sliding(axes: Axes, samples: Sequence[Sample], _: float) -> None:
    """Draw the strict ETTR as it is estimated over a sliding window, for the first run of each arm."""
    for arm in ("role", "role_cold", "job"):
        sample = run_of(samples, RATES.name, arm)
        if sample is not None:
            times, shares = zip(*sample.account.sliding, strict=True) if sample.account.sliding else ((), ())
            axes.plot(times, shares, color=COLOURS[arm], label=f"{arm} (window {sample.account.window_s:.0f} s)")
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("seconds since the first training")
    axes.set_ylabel("sliding ETTR")
    axes.legend()


def draw_step_length(axes: Axes, samples: Sequence[Sample], step_s: float) -> None:
    """Draw the strict ETTR over the length of a step, both as measured and as computed from the median outage."""
    for arm in ("role", "role_cold", "job"):
        rates = [each for each in samples if (each.plan, each.arm) == (RATES.name, arm)]
        outage_s = outage_median(rates, arm)
        if outage_s is None:
            continue
        lengths = [step_s * factor for factor in FACTORS]
        axes.plot(
            lengths, [share_at(length, STEPS / FAULTS, outage_s) for length in lengths], color=COLOURS[arm], label=arm
        )
        for plan, factor in ((RATES.name, 1.0), (LONG.name, LONG.step_factor)):
            values = [strict(each, samples) for each in samples if (each.plan, each.arm) == (plan, arm)]
            axes.plot([step_s * factor] * len(values), values, "o", color=COLOURS[arm])
    axes.axvline(PAPER_STEP_S, color="black", linewidth=0.5)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.1)
    axes.set_xlabel(f"seconds of a step (line: RobustRL's {PAPER_STEP_S:.0f} s)")
    axes.set_ylabel("strict ETTR, one fault in ten steps")
    axes.legend()


def draw_tokens(axes: Axes, samples: Sequence[Sample], _: float) -> None:
    """Draw tokens per second in the runs with mixed faults.

    The axis ends at twice the median rate. Steps that were reported together seem to have far higher rates.
    """
    typical = 0.0
    for arm in ("role", "job"):
        sample = run_of(samples, MIXED_PLAN.name, arm)
        if sample is not None:
            times, tokens = zip(*sample.account.tokens, strict=True)
            axes.step(times, tokens, where="pre", color=COLOURS[arm], label=arm)
            typical = max(typical, statistics.median(tokens))
            for at, target in sample.faults:
                axes.axvline(at, color=COLOURS[arm], linewidth=0.5)
                if arm == "role":
                    axes.text(at, 0.1, target, rotation=90, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set_xlabel("seconds since the first training (lines: faults)")
    axes.set_ylabel("trained tokens per second")
    if typical:
        axes.set_ylim(0, 2 * typical)
        axes.legend(loc="upper right")


PLOTS: Mapping[str, Callable[[Axes, Sequence[Sample], float], None]] = {
    "ettr-arms": draw_arms,
    "ettr-sliding": draw_sliding,
    "ettr-step-length": draw_step_length,
    "ettr-tokens": draw_tokens,
}


def main() -> None:
    """Draw all plots of a file of samples into a folder."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    data = source.read_bytes()
    content: dict[str, Any] = json.loads(data)
    origin = f"{source.name}, SHA-256 {hashlib.sha256(data).hexdigest()}"  # a test compares it with the samples
    samples = msgspec.convert(content["samples"]["runs"], list[Sample])
    folder.mkdir(exist_ok=True)
    for name, draw in PLOTS.items():
        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        draw(axes, samples, float(content["samples"]["step_s"]))
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Source": origin})
        plt.close(figure)


if __name__ == "__main__":
    main()
