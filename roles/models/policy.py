"""The policy as a torch module: a small Qwen3-architecture transformer that is built here with random weights, or any
causal language model of a Hugging Face folder. Nothing is downloaded.

Trainer and rollouts make it from the same ``[model]`` table, so that names and shapes agree: those of the Hugging Face
files. The values that count come from the folder, a checkpoint, or the weight plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from ...config.model_folder import BUILT_MAX_LENGTH
from .safetensors import copy_into


class ModelSpec(Struct, frozen=True):
    """The ``[model]`` table of job.toml (defaults and reasons: :class:`rrl.config.job.schema.ModelTable`). With
    ``path`` the shape is that of its config.json, and what stands here of it counts for nothing."""

    hidden_size: int = 0
    intermediate_size: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    max_length: int | None = None
    initializer_range: float = 0.0
    path: str | None = None
    dtype: str = "float32"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Also the dtype in which weights are published and rollouts hold them."""
        return cast(torch.dtype, getattr(torch, self.dtype))


def model_spec(model: Mapping[str, Any]) -> ModelSpec:
    """Of the resolved ``[model]``."""
    return msgspec.convert(model, ModelSpec)


def build_model(spec: ModelSpec, vocabulary: int, seed: int) -> nn.Module:
    """A float32 model on the CPU with its initial weights: those of ``path``, else random ones: the same seed gives the
    same weights, bit for bit.

    The global random state is left as it was. Raises ValueError when the folder is not fit.
    """
    if spec.path is not None:
        model = skeleton(spec, vocabulary)
        materialise(model, torch.device("cpu"))
        load_initial(model, spec)
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model(spec, vocabulary, torch.float32)


def skeleton(spec: ModelSpec, vocabulary: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model without memory for its tensors: for whoever loads them (:func:`materialise`). Raises ValueError
    when the folder is not fit, or the tokenizer has more than the ``vocabulary`` that the model embeds."""
    with torch.device("meta"):
        return _model(spec, vocabulary, dtype)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a :func:`skeleton` (sharded or not) its memory. Parameters hold anything until they are loaded.

    Tied parameters are tied again: they get a memory each. Buffers that no state dict carries, such as rotary
    frequencies, would stay uninitialised, and nothing would say so (docs/sources.md, torch): they are computed as
    transformers does when it has loaded a model. Raises ValueError when there is one that it does not compute.
    """
    model.to_empty(device=device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    missing = []
    for place, module in model.named_modules():
        own = [f"{place}.{name}".lstrip(".") for name in _uncarried(module)]
        if own and not _computed(_owner(model, place), module):
            missing += own
    if missing:
        raise ValueError(f"buffers that no checkpoint carries and nobody computes: {sorted(missing)}")


def _uncarried(module: nn.Module) -> list[str]:
    """Its own buffers that are in no state dict."""
    return [name for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set]  # fmt: skip


def _owner(model: nn.Module, place: str) -> nn.Module:
    """The innermost model that the module at ``place`` is a part of: it knows how to initialise it."""
    parts = place.split(".") if place else []
    above = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return next((each for each in reversed(above) if isinstance(each, PreTrainedModel)), model)


def _computed(owner: nn.Module, module: nn.Module) -> bool:
    """Whether each of the module's uncarried buffers has got its values. What is not written stays as it is marked: all
    NaN, or the smallest whole number."""
    buffers = [module._buffers[name] for name in _uncarried(module)]
    marks = [torch.nan if each.is_floating_point() else _smallest(each) for each in buffers if each is not None]
    for each, mark in zip(buffers, marks, strict=True):
        cast(Tensor, each).fill_(mark)
    if isinstance(owner, PreTrainedModel):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            owner._init_weights(module)
    return not any(
        bool((each.isnan() if each.is_floating_point() else each == mark).all())
        for each, mark in zip(cast("list[Tensor]", buffers), marks, strict=True)
    )


def _smallest(buffer: Tensor) -> int:
    return 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min


def _model(spec: ModelSpec, vocabulary: int, dtype: torch.dtype) -> nn.Module:
    if spec.path is not None:
        return _from_folder(Path(spec.path), vocabulary, dtype)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_length or BUILT_MAX_LENGTH,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cast(nn.Module, Qwen3ForCausalLM._from_config(config, dtype=dtype).eval())


def _from_folder(folder: Path, vocabulary: int, dtype: torch.dtype) -> nn.Module:
    """By config.json; no code of the folder is run."""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"[model] path: {folder} is no causal language model that transformers knows: {why}") from None
    if (embeds := model.get_input_embeddings().weight.shape[0]) < vocabulary:
        raise ValueError(f"[model] path: the tokenizer of {folder} has {vocabulary} ids, and its model embeds {embeds}")
    return cast(nn.Module, model.eval())


# ── its tensors, by name ───────────────────────────────────────────────────────────────────────────────────────────
def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a version of the weights consists of: live tensors by Hugging Face's names, sharded if the model is. A tied
    one is there once, under its first name, as in Hugging Face's files; whoever loads it has it tied too."""
    tied = _tied(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a complete set of :func:`weights` into the model, one after another: ``tensors`` may be views of memory that
    goes away afterwards, and may be of another dtype. A tied one may be there under each of its names.

    Raises ValueError when names or shapes are not the model's; then nothing is loaded."""
    have, given = weights(model), fitting(model, tensors)
    with torch.no_grad():
        for name, tensor in have.items():
            tensor.copy_(given[name])


def fitting(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The given ones in the order and under the names of the model's :func:`weights`. Raises ValueError when names or
    shapes are not the model's."""
    given, have = dict(tensors), weights(model)
    if wrong := (given.keys() - _tied(model)) ^ have.keys():
        raise ValueError(f"not this model's tensors: {sorted(wrong)[:4]} differ")
    for name, tensor in have.items():
        if given[name].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(given[name].shape)}, here {tuple(tensor.shape)}")
    return {name: given[name] for name in have}


def load_initial(model: nn.Module, spec: ModelSpec) -> None:
    """The weights of ``path`` into the model, of which each process reads its own shards alone. Raises ValueError."""
    assert spec.path is not None
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$")
    copy_into(weights(model), Path(spec.path), tied=_tied(model), ignored=ignored)


def _tied(model: nn.Module) -> set[str]:
    """Names of tensors that are another one's too, but for the first name of each."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer's layers: the longest way through a model, which is where it is divided."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if lists:
        yield from max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of every token, ``[..., vocabulary]`` -> ``[..., vocabulary]``: what a rollout samples from."""
    return torch.log_softmax(logits.float() / temperature, dim=-1)
