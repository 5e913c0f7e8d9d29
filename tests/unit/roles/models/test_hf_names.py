"""Names and tensors of models as in their Hugging Face files, of which save_pretrained is the reference."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, core_model_loading

import rrl
from rrl.tests.support.roles.sharded_moe import moe, write_part


def files_of(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(each, expected[name]) for name, each in tensors.items()
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_tensors_of_a_mixture_of_experts_are_those_of_its_files(tmp_path: Path, tied: bool) -> None:
    model = moe(tied)
    expected = files_of(model, tmp_path)
    assert same(dict(rrl.hf_tensors(model)), expected)
    names = rrl.hf_names(model)
    assert {each for of_one in names.values() for each in of_one} == expected.keys()
    assert names["model.layers.1.mlp.experts.down_proj"] == tuple(
        f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(3)
    )


def test_parts_of_a_sharded_model_together_are_its_files(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    members = [processes.Process(target=write_part, args=(rank, 2, str(tmp_path)), daemon=True) for rank in (0, 1)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    parts = [load_file(tmp_path / f"part-{rank}.safetensors") for rank in (0, 1)]
    assert parts[0].keys().isdisjoint(parts[1])
    assert same(parts[0] | parts[1], files_of(moe(), tmp_path))
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(sizes) < 0.6 * sum(sizes)


def test_other_models_keep_their_names(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert same(dict(rrl.hf_tensors(plain)), plain.state_dict())
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, bos_token_id=None, eos_token_id=None)
    )
    assert same(dict(rrl.hf_tensors(model)), files_of(model, tmp_path))


def test_tensor_that_is_made_from_several_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"joined": torch.cat([each.flatten() for each in tensors.values()])} if len(tensors) > 1 else tensors

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", joined)
    with pytest.raises(ValueError, match="joined: transformers makes this tensor from several parameters of Qwen3Moe"):
        rrl.hf_names(moe())
