"""Model FLOPs utilization (MFU; PaLM, arXiv:2204.02311): which share of the GPUs' peak the work of a step takes.

The work is that of the forward and backward passes over the tokens of the batch. What is computed twice, by activation
checkpointing or for the logits, counts once, and the time of the step includes everything but waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

PEAKS = {
    "V100": 125e12,
    "A10": 125e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Dense FLOP/s of 16-bit matrix products by the words in a GPU's name, from the makers' data sheets."""


def peak_of(name: str) -> float | None:
    """Return the peak (FLOP/s) of a GPU with this name; None if it is not known."""
    words = set(re.split(r"[\s-]+", name))
    known = [key for key in PEAKS if words.issuperset(key.split())]
    return PEAKS[max(known, key=len)] if known else None


class Utilization:
    """Computes the utilization of each step.

    Args:
        model: The model that is trained.
        device: Device of a member; all members have equal ones.
        world: Number of members.
        dtype: Type in which the model computes.
    """

    def __init__(self, model: nn.Module, device: torch.device, world: int, dtype: torch.dtype) -> None:
        dense = all(each.dim() <= 2 for each in model.parameters())  # experts are stacked
        name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype.itemsize == 2 and dense else ""
        peak = peak_of(name)
        self._peak = None if peak is None else peak * world
        self._per_token, self._per_pair = (0.0, 0.0) if peak is None else work(model)
        self._flop = self._seconds = 0.0

    def count(self, lengths: Iterable[int], seconds: float) -> None:
        """Add a part of a step: the lengths of its sequences, and the time (s) of its training."""
        self._flop += sum(self._per_token * length + self._per_pair * length**2 for length in lengths)
        self._seconds += seconds

    def take(self) -> dict[str, float]:
        """Return the metric ``mfu`` of the step, and begin the next one; nothing if the peak is not known."""
        flop, seconds, self._flop, self._seconds = self._flop, self._seconds, 0.0, 0.0
        return {} if self._peak is None or not seconds else {"mfu": flop / seconds / self._peak}


def work(model: nn.Module) -> tuple[float, float]:
    """Return the FLOP of training for each token of a sequence, and for each pair of its tokens.

    A token is multiplied by each weight of the matrices: once in the forward pass, and twice in the backward pass, or
    once if the weight is frozen. Causal attention has half of all pairs. The model must be dense.
    """
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    embedded -= {id(each.weight) for each in model.modules() if isinstance(each, nn.Linear)}  # tied to the head
    matrices = [each for each in model.parameters() if each.dim() > 1 and id(each) not in embedded]
    config: Any = model.config
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    per_token = sum(each.numel() * (6 if each.requires_grad else 4) for each in matrices)
    return float(per_token), 6.0 * text.num_hidden_layers * width
