"""The policy as a torch module: a small Qwen3 transformer with random weights, or the model of a folder.

The folder is a Hugging Face folder with any causal language model; nothing is downloaded. Trainer and rollouts build
the model from the same ``[model]`` table, so that the names and shapes of its tensors agree. The names are the same as
in Hugging Face's files. The values come from the folder, a checkpoint, or the weight transport.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from ...config.model_folder import max_length
from ...core.run_spec import ModelSpec
from .safetensors import copy_into

_ADAPTED = ".base_layer."
"""Part of the name of a weight that peft has put into an adapted module."""
_ADAPTER_KEY = re.compile(r"\.(lora_[AB])\.default\.")
"""Part of the name of an adapter's tensor; ``default`` is peft's name of the only adapter."""


def compute_dtype(spec: ModelSpec) -> torch.dtype:
    """Return the dtype of the model's computations, of published weights, and of the weights in rollouts."""
    return cast(torch.dtype, getattr(torch, spec.dtype))


def build_model(spec: ModelSpec, vocabulary: int, seed: int) -> nn.Module:
    """Build a float32 model on the CPU with its initial weights, from ``path`` or random.

    Random weights depend only on the seed, bit for bit. The global random state does not change.

    Raises:
        ValueError: The folder cannot be used.
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
    """Build the model without memory for its tensors (see :func:`materialise`).

    Raises:
        ValueError: The folder cannot be used, or the model of the folder embeds fewer than ``vocabulary`` tokens.
    """
    with torch.device("meta"):
        return _model(spec, vocabulary, dtype)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate the memory of a :func:`skeleton`, sharded or not; parameters are undefined until they are loaded.

    Tied parameters are tied again, because the allocation gives each parameter its own memory. Buffers that no state
    dict contains, such as rotary frequencies, would stay uninitialised without an error (docs/sources.md, torch). They
    are therefore computed here, as transformers does after it has loaded a model.

    Raises:
        ValueError: Transformers does not compute one of these buffers.
    """
    model.to_empty(device=device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    missing = []
    for path, module in model.named_modules():
        own = [f"{path}.{name}".lstrip(".") for name in _non_persistent_buffers(module)]
        if own and not _computed(_owner(model, path), module):
            missing += own
    if missing:
        raise ValueError(
            f"[model] path: the model is not supported: its buffers {sorted(missing)} are neither stored in checkpoints"
            " nor computed by transformers"
        )


def _non_persistent_buffers(module: nn.Module) -> list[str]:
    """Return the names of the module's own buffers that a state dict does not contain."""
    return [
        name
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]


def _owner(model: nn.Module, path: str) -> nn.Module:
    """Return the innermost transformers model that contains the module at ``path``; ``model`` if there is none.

    The returned model can initialise the module.
    """
    parts = path.split(".") if path else []
    ancestors = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    return next((module for module in reversed(ancestors) if isinstance(module, PreTrainedModel)), model)


def _computed(owner: nn.Module, module: nn.Module) -> bool:
    """Compute the module's non-persistent buffers, and return whether all of them were written.

    Each buffer is first filled with a mark (NaN or the smallest integer). A buffer that keeps the mark was not written.
    """
    buffers = [module._buffers[name] for name in _non_persistent_buffers(module)]
    marks = [torch.nan if buffer.is_floating_point() else _smallest(buffer) for buffer in buffers if buffer is not None]
    for buffer, mark in zip(buffers, marks, strict=True):
        cast(Tensor, buffer).fill_(mark)
    if isinstance(owner, PreTrainedModel):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            owner._init_weights(module)
    return not any(
        bool((tensor.isnan() if tensor.is_floating_point() else tensor == mark).all())
        for tensor, mark in zip(cast("list[Tensor]", buffers), marks, strict=True)
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
        max_position_embeddings=max_length(None, spec.max_length),
        initializer_range=spec.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return cast(nn.Module, Qwen3ForCausalLM._from_config(config, dtype=dtype).eval())


def _from_folder(folder: Path, vocabulary: int, dtype: torch.dtype) -> nn.Module:
    """Build the model of a folder's config.json; no code of the folder is run."""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"[model] path: {folder} is not a causal language model that transformers supports: {reason}"
        ) from None
    if (embeds := model.get_input_embeddings().weight.shape[0]) < vocabulary:
        raise ValueError(
            f"[model] path: the tokenizer of {folder} has {vocabulary} ids, but its model embeds only {embeds}"
        )
    return cast(nn.Module, model.eval())


# ── tensors by name ────────────────────────────────────────────────────────────────────────────────────────────────
def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a weight version: the live tensors by Hugging Face name, sharded if the model is sharded.

    A tied tensor is included once, under its first name, as in Hugging Face's files; the process that loads the weights
    ties it again. Of a model with adapters, these are the tensors without the adapters, under the same names.
    """
    tied, state = _tied(model), model.state_dict()
    return {
        name.replace(_ADAPTED, "."): tensor
        for name, tensor in state.items()
        if name not in tied and not _ADAPTER_KEY.search(name)
    }


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name: those of the adapters as peft's files name them, else all."""
    named = model.named_parameters()
    return {_ADAPTER_KEY.sub(r".\1.", name): parameter for name, parameter in named if parameter.requires_grad}


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a complete set of :func:`weights` into the model, one tensor at a time.

    ``tensors`` may have another dtype, and may be views of memory that is freed afterwards. A tied tensor may be given
    under each of its names.

    Raises:
        ValueError: Names or shapes do not fit the model; nothing is loaded then.
    """
    own, given = weights(model), fitting(model, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])


def fitting(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the given tensors that belong to the model's :func:`weights`, in the order of the weights.

    Raises:
        ValueError: Names or shapes do not fit the model.
    """
    given, own = dict(tensors), weights(model)
    present = given.keys() - _tied(model)
    if missing := own.keys() - present:
        raise ValueError(f"the weights do not fit the model: they lack the tensors {sorted(missing)[:4]}")
    if extra := present - own.keys():
        raise ValueError(f"the weights do not fit the model: the model does not have the tensors {sorted(extra)[:4]}")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise ValueError(f"{name} has the shape {tuple(given[name].shape)}, but {tuple(tensor.shape)} in the model")
    return {name: given[name] for name in own}


def load_initial(model: nn.Module, spec: ModelSpec) -> None:
    """Load the weights of ``[model] path`` into the model; each process reads only its own shards.

    Raises:
        ValueError: The folder does not fit the model.
    """
    assert spec.path is not None
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$")
    copy_into(weights(model), Path(spec.path), tied=_tied(model), ignored=ignored)


def _tied(model: nn.Module) -> set[str]:
    """Return the names of tied tensors, without the first name of each tensor."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the transformer (its largest module list), which are sharded one by one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if lists:
        yield from max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities from which a rollout samples.

    Args:
        logits: [..., vocabulary], any floating dtype.
        temperature: Sampling temperature.

    Returns:
        [..., vocabulary], float32.
    """
    return torch.log_softmax(logits.float() / temperature, dim=-1)
