from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, Qwen3MoeConfig

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.policy import blocks, build_model, compute_dtype, load_weights, materialise, skeleton, weights
from rrl.roles.models.tensors import pack, unpack
from rrl.tests.support.roles import folders
from rrl.transport.weights.manifest import layout

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def _spec(path: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> ModelSpec:
    return ModelSpec(str(path), dtype)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(24).view(2, 12) % 40, use_cache=False).logits
    return logits


def _of(config: Any) -> Callable[[Path], Path]:
    """Return a function that saves a model of this configuration in a folder, without a tokenizer."""

    def save(path: Path) -> Path:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        return path

    return save


_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = Gemma3TextConfig(**_SMALL, layer_types=["sliding_attention", "full_attention", "full_attention"])
GPT2 = GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1)
MOE = Qwen3MoeConfig(**_SMALL, num_experts=4, moe_intermediate_size=8)


@pytest.mark.parametrize(
    ("save", "layers", "tied"),
    [
        pytest.param(folders.qwen3, 2, set(), id="Qwen3"),
        pytest.param(folders.tied_llama, 2, {"lm_head.weight"}, id="Llama, tied"),
        pytest.param(_of(GEMMA), 3, {"lm_head.weight"}, id="Gemma 3, rotary frequencies of two kinds"),
        pytest.param(_of(GPT2), 3, {"lm_head.weight"}, id="GPT-2, other names"),
    ],
)
def test_logits_of_a_folders_model_equal_those_of_transformers(
    tmp_path: Path, save: Callable[[Path], Path], layers: int, tied: set[str]
) -> None:
    folder = save(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ours = build_model(_spec(folder), 40, seed=0)
    assert torch.equal(_logits(ours), _logits(theirs))
    assert len(list(blocks(ours))) == layers
    assert ours.state_dict().keys() - weights(ours).keys() == tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout_computes_with_the_weights_that_a_trainer_sends_of_a_tied_model(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    """The tied weights are sent once, in the dtype of the rollout, and the rollout ties them again."""
    spec = _spec(folders.tied_llama(tmp_path / "model"), dtype)
    trainer = build_model(spec, folders.VOCABULARY, seed=0)
    packed = pack({name: tensor.to(compute_dtype(spec)) for name, tensor in weights(trainer).items()})
    assert "lm_head.weight" not in [name for name, *_ in packed]
    specs, nbytes = layout([(name, kind, shape, content.nbytes) for name, kind, shape, content in packed])
    flat = memoryview(bytearray(nbytes))
    for each, (*_, content) in zip(specs, packed, strict=True):
        flat[each.offset : each.offset + each.nbytes] = content

    rollout = skeleton(spec, folders.VOCABULARY, compute_dtype(spec))
    materialise(rollout, CPU)
    load_weights(rollout, unpack(specs, flat))
    flat[:] = bytes(nbytes)  # they were copied
    assert {tensor.dtype for tensor in rollout.parameters()} == {compute_dtype(spec)}
    assert rollout.model.rotary_emb.inv_freq.dtype == torch.float32  # type: ignore[union-attr]
    expected = AutoModelForCausalLM.from_pretrained(spec.path, dtype=compute_dtype(spec)).eval()
    assert torch.equal(_logits(rollout), _logits(expected))


def test_tied_tensor_may_be_loaded_under_each_of_its_names(tmp_path: Path) -> None:
    spec = _spec(folders.tied_llama(tmp_path / "model"))
    one, other = (build_model(spec, folders.VOCABULARY, seed=0) for _ in range(2))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(2)
    load_weights(other, one.state_dict().items())
    assert torch.equal(_logits(one), _logits(other))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda given: given.pop("model.norm.weight"), r"they lack the tensors \['model.norm.weight'\]"),
        (lambda given: given.update(more=torch.zeros(1)), r"the model does not have the tensors \['more'\]"),
        (
            lambda given: given.update({"model.norm.weight": torch.zeros(7)}),
            r"norm.weight has the shape \(7,\), but \(32,\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused_and_none_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], why: str
) -> None:
    model = build_model(_spec(folders.qwen3(tmp_path / "model")), folders.VOCABULARY, seed=0)
    before = _logits(model)
    given = {name: torch.zeros_like(tensor) for name, tensor in weights(model).items()}
    change(given)
    with pytest.raises(ValueError, match=why):
        load_weights(model, given.items())
    assert torch.equal(_logits(model), before)


# ── folders ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_only_the_files_of_the_index_are_read(tmp_path: Path) -> None:
    """The folder may also have a file of another format, such as Mistral's consolidated.safetensors."""
    folder = folders.qwen3(tmp_path / "model")
    expected = _logits(build_model(_spec(folder), folders.VOCABULARY, seed=0))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(_logits(build_model(_spec(folder), folders.VOCABULARY, seed=0)), expected)


def test_folder_of_a_tied_model_with_only_the_output_head_is_read(tmp_path: Path) -> None:
    folder = folders.tied_llama(tmp_path / "model")
    expected = _logits(build_model(_spec(folder), folders.VOCABULARY, seed=0))
    file = folder / "model.safetensors"
    stored = load_file(file)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # old folders have them
    save_file(stored, file)
    assert torch.equal(_logits(build_model(_spec(folder), folders.VOCABULARY, seed=0)), expected)


def _without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)

    return spoil


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(_without("model.norm.weight"), r"lacks \['model.norm.weight'\]", id="a tensor less"),
        pytest.param(
            lambda folder: folders.rewrite(folder / "config.json", intermediate_size=16),
            r"has the shape \(64, 32\), but config.json requires \(16, 32\)",
            id="another shape",
        ),
        pytest.param(
            lambda folder: folders.rewrite(folder / "config.json", model_type="bert"),
            "is no causal language model that transformers knows|lacks",
            id="another kind of model",
        ),
        pytest.param(
            lambda folder: (folder / "model.safetensors").unlink(), "contains no \\*.safetensors", id="no weights"
        ),
        pytest.param(_cut, "model: ", id="a broken file"),
        pytest.param(
            lambda folder: folders.rewrite(folder / "config.json", vocab_size=99),
            "tokenizer of .* has 260 ids, but its model embeds only 99",
            id="a smaller vocabulary",
        ),
        pytest.param(
            lambda folder: shutil.copytree(_of(MOE)(folder / "moe"), folder, dirs_exist_ok=True),
            r"lacks \[.*experts.*rrl supports only checkpoints",
            id="a mixture of experts",
        ),
    ],
)
def test_unsuitable_model_folder_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    folder = folders.qwen3(tmp_path / "model")
    spoil(folder)
    vocabulary = 40 if (folder / "moe").exists() else folders.VOCABULARY
    with pytest.raises(ValueError, match=why):
        build_model(_spec(folder), vocabulary, seed=0)
