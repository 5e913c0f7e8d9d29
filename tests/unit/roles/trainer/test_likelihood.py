from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rrl.roles.models.policy import log_probs
from rrl.roles.trainer import losses as losses_module
from rrl.roles.trainer.losses import likelihood

pytestmark = pytest.mark.torch


def _plainly(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = log_probs(logits, temperature)
    return every.gather(2, tokens[..., None])[..., 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("piece", [losses_module._LOGITS_PER_PIECE, 40])
def test_values_and_gradients_are_those_of_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, temperature: float, piece: int
) -> None:
    monkeypatch.setattr(losses_module, "_LOGITS_PER_PIECE", piece)
    dice = torch.Generator().manual_seed(0)
    given = 5 * torch.randn(3, 5, 17, generator=dice).to(dtype)
    tokens = torch.randint(17, (3, 5), generator=dice)
    weight_of_chosen, weight_of_entropy = torch.randn(2, 3, 5, generator=dice)
    gradients = []
    values = []
    for compute in (_plainly, likelihood):
        leaf = given.clone().requires_grad_()
        chosen, entropy = compute(leaf * 1, tokens, temperature)
        (chosen * weight_of_chosen + entropy * weight_of_entropy).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad.float())
        values.append((chosen.detach(), entropy.detach()))
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(gradients[0], gradients[1], rtol=rtol, atol=2e-6)


_MEASURED = """
import sys, torch
from pathlib import Path
from rrl.roles.models.policy import log_probs
from rrl.roles.trainer.losses import likelihood
torch.set_num_threads(1)
def status(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
tokens = torch.zeros(8, 64, dtype=torch.long)
def run(shape):
    leaf = torch.zeros(shape, requires_grad=True)
    logits = leaf + torch.zeros(shape[-1])
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    if sys.argv[1] == "pieces":
        chosen, entropy = likelihood(logits, tokens[:shape[0], :shape[1]], 0.9)
    else:
        every = log_probs(logits, 0.9)
        chosen, entropy = every.gather(2, tokens[:shape[0], :shape[1], None])[..., 0], -(every.exp() * every).sum(-1)
    torch.autograd.grad((chosen + entropy).sum(), logits)
    return (status("VmHWM") - before) / (logits.numel() * 4)
run((1, 2, 1000))
print(run((8, 64, 49152)))
"""
"""Program that prints the memory that is used in addition to the logits, as a multiple of their memory.

The logits are those of 8 answers of 64 tokens with SmolLM2's vocabulary (100 MB).
"""


def _beside_the_logits(how: str) -> float:
    words = [sys.executable, "-P", "-c", _MEASURED, how]
    # glibc returns freed memory at once, so that only used memory is measured
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True, env=os.environ | at_once)
    return float(done.stdout)


def test_likelihood_of_a_large_vocabulary_allocates_no_second_logits_tensor() -> None:
    """Only a few pieces of 8 MiB are allocated, because the gradient takes the place of the logits."""
    assert _beside_the_logits("pieces") < 0.6


@pytest.mark.long
def test_plain_likelihood_allocates_four_times_the_logits() -> None:
    assert _beside_the_logits("plainly") > 4


def test_second_backward_through_overwritten_logits_raises() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True) * 1
    chosen, _ = likelihood(logits, torch.zeros(1, 2, dtype=torch.long), 1.0)
    chosen.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        chosen.sum().backward()  # type: ignore[no-untyped-call]
