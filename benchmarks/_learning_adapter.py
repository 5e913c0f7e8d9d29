"""The size of a checkpoint of a run with adapters (LoRA), against that of a run that trains all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.committed_run import CommittedRun

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""The widths of SmolLM2-135M, with 4 of its 30 layers. Its embedding is left out, which no adapter changes."""
RANK = 16


def measure(folder: Path) -> tuple[dict[str, float], dict[str, list[float]]]:
    model = {"path": str(folders.tied_llama(folder / "model", **SMOLLM2))}
    sizes = []
    for name, lora in (("all", None), ("adapters", {"rank": RANK, "alpha": 2.0 * RANK})):
        written = CommittedRun(folder / name, model, lora=lora).commit(1)
        sizes.append(sum(path.stat().st_size for path in written.iterdir() if path.is_file()))
    return {"adapter_checkpoint_share": sizes[1] / sizes[0]}, {}
