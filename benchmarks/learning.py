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
  model that is already good at its task, of the worst of three seeds. ``quickstart_reward``: the mean reward of the
  quickstart's last ten of 300 steps.
- ``path``: ``path_learns`` (bar: at least 0.05): what the 30 steps of examples/first_run.toml (SmolLM2) change in its
  evaluation.
- ``samples``: ``samples_store_cpu_share`` (bar: 0.03): the share of the store's CPU that samples take.

``path`` needs the model of ``make smollm2`` and vLLM. The last line is one JSON object
(benchmarks/_provenance.py); a figure of a part that was not run is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pkgutil import resolve_name

from rrl.benchmarks._parts import measure_parts
from rrl.benchmarks._requirements import check_requirements

PARTS: Mapping[str, str] = {
    "loss": "rrl.benchmarks._learning_loss:measure",
    "memory": "rrl.benchmarks._learning_memory:measure",
    "adapter": "rrl.benchmarks._learning_adapter:measure",
    "policy": "rrl.benchmarks._learning_policy:measure",
    "path": "rrl.benchmarks._learning_policy:measure_path",
    "samples": "rrl.benchmarks._learning_samples:measure",
}
"""What measures each part (:data:`rrl.benchmarks._parts.Measure`)."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    given = parser.parse_args()
    check_requirements("learning")
    measure_parts("learning", (resolve_name(PARTS[part]) for part in given.part or PARTS), BARS, AT_LEAST)


if __name__ == "__main__":
    main()
