from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.policy import build_model
from rrl.roles.trainer import utilization
from rrl.roles.trainer.utilization import Utilization, peak_of, work

WIDE = ModelSpec(hidden_size=128, intermediate_size=256, layers=3, heads=8, kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA Q9000", None),
    ],
)
def test_peak_is_that_of_the_gpu_with_this_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_work_is_what_torch_counts_without_the_masked_half_of_attention() -> None:
    model: Any = build_model(WIDE, 300, 0)
    model.set_attn_implementation("eager")
    length = 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None]).logits.sum().backward()
    per_token, per_pair = work(model)
    assert per_token * length + 2 * per_pair * length**2 == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_frozen_weights_are_not_multiplied_for_a_gradient() -> None:
    model = build_model(WIDE, 300, 0)
    whole, _ = work(model)
    assert work(model.requires_grad_(False))[0] == pytest.approx(whole * 4 / 6)


def test_step_has_its_utilization_only_on_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = build_model(WIDE, 300, 0), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")

    def metrics(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        found = Utilization(model, device, 2, dtype)
        found.count([100, 200], 0.25)
        found.count([300], 0.25)
        return found.take()

    per_token, per_pair = work(model)
    flop = per_token * 600 + per_pair * (100**2 + 200**2 + 300**2)
    assert metrics(model, gpu, torch.bfloat16) == {"mfu": pytest.approx(flop / 0.5 / (2 * 989e12))}
    assert metrics(model, gpu, torch.float32) == {}
    assert metrics(model, torch.device("cpu"), torch.bfloat16) == {}
    monkeypatch.setattr(utilization, "PEAKS", {})
    assert metrics(model, gpu, torch.bfloat16) == {}
