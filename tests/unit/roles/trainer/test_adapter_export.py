"""Exports of runs that train adapters: the merged model, and peft's files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rrl.roles.trainer.checkpoint_export import ExportFailed, ExportRefused, export_checkpoint
from rrl.tests.support.roles import folders
from rrl.tests.support.roles.trainer.committed_run import CommittedRun

pytestmark = pytest.mark.torch

LORA = {"rank": 2, "alpha": 1.0, "targets": ["q_proj", "down_proj"]}
_TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture
def run(tmp_path: Path) -> CommittedRun:
    made = CommittedRun(tmp_path / "run", {"path": str(folders.tied_llama(tmp_path / "llama"))}, lora=LORA)
    made.commit(1)
    return made


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=_TOKENS).logits
    return logits


def test_merged_model_and_adapter_in_peft_compute_as_the_trainer(tmp_path: Path, run: CommittedRun) -> None:
    done = export_checkpoint(run.run, None, tmp_path / "merged")
    assert done.dtype == "float32"
    expected = _logits(run.models[1])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.allclose(_logits(merged), expected, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype="auto")
    assert not torch.allclose(_logits(base), expected, atol=1e-2)
    export_checkpoint(run.run, 1, tmp_path / "adapter", adapter=True)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.allclose(_logits(loaded), expected, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 1.0, ["down_proj", "q_proj"])
    assert config["base_model_name_or_path"] == str(tmp_path / "llama")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merged_weights_have_the_dtype_of_the_model_whatever_the_base_has(
    tmp_path: Path, stored: torch.dtype, dtype: str
) -> None:
    folder = folders.qwen3(tmp_path / "qwen3")
    weights = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    run = CommittedRun(tmp_path / "run", {"path": str(folder), "dtype": dtype}, lora=LORA)
    run.commit(1)
    assert export_checkpoint(run.run, None, tmp_path / "out").dtype == dtype
    adapters = {name: tensor.detach() for name, tensor in run.models[1].state_dict().items() if ".lora_" in name}
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        expected, module = weights[name].float(), name.removesuffix("weight")
        if (a := adapters.get(f"{module}lora_A.default.weight")) is not None:
            expected = expected + 0.5 * adapters[f"{module}lora_B.default.weight"] @ a
        assert tensor.dtype == getattr(torch, dtype)
        step = 2.0**-7 if dtype == "bfloat16" else 1e-6  # sums of another order round to another value
        assert torch.allclose(tensor.float(), expected, rtol=step, atol=1e-6), name


def test_changed_base_is_refused(tmp_path: Path, run: CommittedRun) -> None:
    file = tmp_path / "llama" / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    for adapter in (True, False):
        with pytest.raises(ExportFailed, match="have changed since the run began"):
            export_checkpoint(run.run, None, tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_adapter_of_a_run_without_one_is_refused(tmp_path: Path) -> None:
    made = CommittedRun(tmp_path / "run")
    made.commit(1)
    with pytest.raises(ExportRefused, match="trains no adapter"):
        export_checkpoint(made.run, None, tmp_path / "out", adapter=True)


def test_checkpoint_has_the_bytes_of_the_adapter_and_its_moments(run: CommittedRun) -> None:
    files = list(run.folders[1].glob("*.safetensors"))
    trained = sum(tensor.numel() for tensor in run.models[1].parameters() if tensor.requires_grad)
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert sum(math.prod(tensor.shape) for tensor in tensors) == 3 * trained
