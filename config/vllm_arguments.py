"""Define which arguments of vLLM's engine (EngineArgs) a job may set in ``vllm`` of a rollout pool.

rrl refuses arguments that it sets itself, and arguments with which a rollout would record other tokens or
log-probabilities than it sampled. The list was made from the source of vLLM 0.32, and partly tried (docs/sources.md,
vLLM). This module does not import vLLM.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ONE_NODE = "a rollout is one step on one node: use tensor_parallel_size"
_REPLICAS = "set replicas instead"
_SAMPLING = "[sampling] defines the sampling"
_TRAINER = "weights come from the trainer"
_OLD_CACHE = "results computed with older weights would be reused"
_ONE_MODEL = "trainer and rollouts share the model of [model]"
_DRAFT = "a draft model would get no new weights"

ROUTED_EXPERTS = "routed_experts"
"""Name of the extra (``[sampling.extras]``) with the experts that the model's routers chose."""
_ROUTING = "[sampling.extras.routed_experts] asks for the routing"

RESERVED_ARGUMENTS = {
    "model": "rrl sets it from [model]",
    "model_weights": _TRAINER,
    "tokenizer": "prompts and answers are tokens",
    "skip_tokenizer_init": "prompts and answers are tokens",
    "load_format": _TRAINER,
    "weight_transfer_config": _TRAINER,
    "worker_extension_cls": _TRAINER,
    "enable_lora": _TRAINER,
    "dtype": "rrl sets it from [model] dtype",
    "max_model_len": "rrl sets it from [model] max_length",
    "hf_config_path": _ONE_MODEL,
    "hf_overrides": _ONE_MODEL,
    "model_class_overrides": _ONE_MODEL,
    "seed": "each incarnation has its own seed, derived from [run] seed",
    "logprobs_mode": "the trainer needs the log-probabilities of the distribution that was sampled",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logits_processors": _SAMPLING,
    "watermark_config": _SAMPLING,
    "async_scheduling": "new weights are loaded between two steps",
    "stream_interval": "tokens that vLLM holds back would be attributed to the next weight version",
    "speculative_config": _DRAFT,
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    "kv_transfer_config": _OLD_CACHE,
    "kv_offloading_size": _OLD_CACHE,
    "kv_offloading_backend": _OLD_CACHE,
    "enable_return_routed_experts": _ROUTING,
    "aux_output_config": _ROUTING,
    "enable_sleep_mode": "rrl sets it for guests of the trainer",
    "worker_cls": "rrl uses vLLM's own class",
    "scheduler_cls": "rrl uses vLLM's own class",
    "distributed_executor_backend": _ONE_NODE,
    "pipeline_parallel_size": _ONE_NODE,
    "prefill_context_parallel_size": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "device_ids": "a rollout uses the GPUs that it was given; gpus sets their number",
    **dict.fromkeys(
        (
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_backend",
        ),
        _REPLICAS,
    ),
}
"""Arguments that a job cannot set, with the reason or the key that replaces them."""
_TENSOR_PARALLEL_SIZE = "tensor_parallel_size"


def check(arguments: Mapping[str, Any], gpus: int) -> tuple[tuple[str, ...], str] | None:
    """Return a mistake: an argument that rrl itself sets or refuses, or one that would leave GPUs idle.

    Args:
        arguments: The arguments of the job.
        gpus: Number of GPUs of each rollout.

    Returns:
        Key below the table of the rollouts and text of the first mistake; None if there is none.
    """
    at = "vllm"
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            return (at, name), f"cannot be set: {RESERVED_ARGUMENTS[name]}; remove this key"
    degree = arguments.get(_TENSOR_PARALLEL_SIZE, 1)
    if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
        return (at, _TENSOR_PARALLEL_SIZE), "must be a whole number, 1 or more: the GPUs that share the model"
    if gpus and degree != gpus:
        return (
            (at, _TENSOR_PARALLEL_SIZE) if _TENSOR_PARALLEL_SIZE in arguments else ("gpus",),
            f"vLLM would compute on {degree} of the GPUs of each replica, but gpus = {gpus};"
            f" make {_TENSOR_PARALLEL_SIZE} and gpus the same number",
        )
    return None


def installed_arguments() -> frozenset[str]:
    """Return the arguments of the vLLM in this environment, parsed from its source, since importing it takes 10 s.

    Return an empty set if there is no vLLM, or if its EngineArgs are defined elsewhere.
    """
    try:
        module = find_spec("vllm")
        if module is None or module.origin is None:
            return frozenset()
        source = (Path(module.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    fields = (field for node in classes if node.name == "EngineArgs" for field in node.body)
    return frozenset(
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def unknown_arguments(arguments: Collection[str]) -> list[tuple[str, str]]:
    """Return the arguments that the vLLM of this machine lacks, each with a text about it; none if it is not known."""
    known = installed_arguments()
    unknown = [name for name in arguments if known and name not in known]
    return [(name, unknown_argument_text(name, known, "the vLLM of this machine")) for name in unknown]


def unknown_argument_text(name: str, known: Collection[str], owner: str) -> str:
    """Return the message about an argument that is not in ``known``, with the nearest known argument.

    Args:
        name: The argument.
        known: All arguments of the installed vLLM.
        owner: Text by which the message names the vLLM that lacks the argument.
    """
    close = difflib.get_close_matches(name, sorted(set(known) - RESERVED_ARGUMENTS.keys()), 1)
    return f"{owner} has no such argument (EngineArgs){f'; did you mean {close[0]}?' if close else ''}"
