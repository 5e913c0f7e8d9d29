"""Measures what the built-in trainer learns, and what its losses, its memory and its samples cost.

Parts, each of which can be chosen by ``--part``:

- ``loss``: ``loss_grad_error_vs_trl`` (bar: 1e-5): the largest difference of a loss's gradient from that of TRL's own
  code, relative to the largest component, over all losses and normalisations that TRL has. ``outlier_share`` (bar:
  0.05): the largest share of the gradient of 800 tokens that one token has whose log-probability the sampler has 0.1 to
  8 nats too low, with a negative advantage and the defaults of each loss.
- ``memory``: ``logits_bytes_over_piece`` (bar: 1.1): the bytes of the largest tensor of logits in a forward and a
  backward pass over those of a piece. ``saved_bytes_ratio`` (bar: 0.2): the bytes that exist between the two passes
  with activation checkpointing over those without. ``padded_share`` (bar: 0): the share of padding in a pass.
  ``packed_over_unpacked`` (bar: 0.75): the time of a step over that of padded rectangles. ``packed_grad_error`` (bar:
  1e-5): the largest difference of a gradient of packed sequences from that of single ones, relative to the largest.
- ``adapter``: ``adapter_checkpoint_share`` (bar: 0.05): the bytes of a checkpoint of adapters of rank 16 (LoRA), of
  layers with SmolLM2's widths, over those of a checkpoint of all weights.
- ``policy``: ``good_stays_good`` (bar: at least -0.03): what 40 steps with all defaults change in the evaluation of a
  model that is already good at its task, of the worst of three seeds. ``path_learns`` (bar: at least 0.05): the same of
  SmolLM2 with the settings of its example, after 30 steps. ``quickstart_reward``: the mean reward of the quickstart's
  last ten of 300 steps.
- ``samples``: ``samples_store_cpu_share`` (bar: 0.03): the share of the store's CPU that samples take.

``policy`` needs the model of ``make smollm2`` and vLLM for ``path_learns``. The last line is one JSON object
(benchmarks/_provenance.py); a figure of a part that was not run is null.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_bars
from rrl.tests.support.supervisor import temporary_runs_folder

PARTS: Mapping[str, str] = {
    "loss": "rrl.benchmarks._learning_loss",
    "memory": "rrl.benchmarks._learning_memory",
    "adapter": "rrl.benchmarks._learning_adapter",
    "policy": "rrl.benchmarks._learning_policy",
    "samples": "rrl.benchmarks._learning_samples",
}
"""The module of each part. Its ``measure(folder)`` returns the figures, and the samples of those that have several."""
BARS = {
    "loss_grad_error_vs_trl": 1e-5,
    "outlier_share": 0.05,
    "logits_bytes_over_piece": 1.1,
    "saved_bytes_ratio": 0.2,
    "padded_share": 0.0,
    "packed_over_unpacked": 0.75,
    "packed_grad_error": 1e-5,
    "adapter_checkpoint_share": 0.05,
    "good_stays_good": -0.03,
    "path_learns": 0.05,
    "quickstart_reward": None,
    "samples_store_cpu_share": 0.03,
}
"""The bar of each figure; None for a figure without one."""
AT_LEAST = {"good_stays_good", "path_learns"}
"""Figures whose bar is a minimum."""

Figures = dict[str, Any]
Samples = dict[str, list[float]]


def measure(parts: Iterable[str]) -> tuple[Figures, Samples]:
    figures: Figures = {}
    samples: Samples = {}
    for part in parts:
        with temporary_runs_folder() as folder:
            found, of_part = importlib.import_module(PARTS[part]).measure(folder)
        figures |= found
        samples |= of_part
    return figures, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    given = parser.parse_args()
    check_requirements("learning")
    figures, samples = measure(given.part or PARTS)
    print_bars(figures, BARS, AT_LEAST)
    print(last_line("learning", {name: figures.get(name) for name in BARS}, samples))


if __name__ == "__main__":
    main()
