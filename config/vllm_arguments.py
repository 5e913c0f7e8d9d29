"""``[roles.rollout] vllm``: which arguments of vLLM's engine (EngineArgs) no user sets, because rrl does, or because a
rollout would no longer record what it sampled; and which ones a vLLM has.

What is refused was read, and partly tried, in vLLM 0.32 (docs/sources.md, vLLM). No vLLM is imported here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

_ONE_NODE = "a rollout is one step on one node: use tensor_parallel_size"
_REPLICAS = "ask for more replicas"
_SAMPLING = "[sampling] says how to sample"
_TRAINER = "weights come from the trainer"
_OLD_CACHE = "what was computed under older weights would be used again"
_ONE_MODEL = "trainer and rollouts have one model: that of [model]"
_DRAFT = "a draft model gets no new weights"

RESERVED_ARGUMENTS = {
    "model": "it is [model] path, or built from [model]",
    "model_weights": _TRAINER,
    "tokenizer": "prompts and answers are tokens",
    "skip_tokenizer_init": "prompts and answers are tokens",
    "load_format": _TRAINER,
    "weight_transfer_config": _TRAINER,
    "worker_extension_cls": _TRAINER,
    "enable_lora": _TRAINER,
    "dtype": "it is [model] dtype",
    "max_model_len": "it is [model] max_length",
    "hf_config_path": _ONE_MODEL,
    "hf_overrides": _ONE_MODEL,
    "model_class_overrides": _ONE_MODEL,
    "seed": "each life has one of its own, made of [run] seed",
    "logprobs_mode": "the trainer needs those of the distribution sampled from",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logits_processors": _SAMPLING,
    "watermark_config": _SAMPLING,
    "async_scheduling": "new weights come between two steps",
    "stream_interval": "tokens that vLLM holds back would count as the next version's",
    "speculative_config": _DRAFT,
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    "kv_transfer_config": _OLD_CACHE,
    "kv_offloading_size": _OLD_CACHE,
    "kv_offloading_backend": _OLD_CACHE,
    "worker_cls": "rrl drives vLLM's own",
    "scheduler_cls": "rrl drives vLLM's own",
    "distributed_executor_backend": _ONE_NODE,
    "pipeline_parallel_size": _ONE_NODE,
    "prefill_context_parallel_size": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "device_ids": "a rollout has the GPUs that it was given: gpus says how many",
    **dict.fromkeys(
        (
            "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
            "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb", "data_parallel_backend",
        ),
        _REPLICAS,
    ),
}  # fmt: skip
"""arguments that no user sets, and why, or what says it instead"""
TENSOR_PARALLEL_SIZE = "tensor_parallel_size"


def installed_arguments() -> frozenset[str]:
    """The arguments of the vLLM in this environment, read in its source: to import it takes 10 s. None at all where
    there is no vLLM, or one whose EngineArgs stand elsewhere."""
    try:
        found = find_spec("vllm")
        if found is None or found.origin is None:
            return frozenset()
        source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
        classes = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    fields = (each for one in classes if one.name == "EngineArgs" for each in one.body)
    return frozenset(
        each.target.id for each in fields if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )


def unknown_argument_text(name: str, known: Collection[str], owner: str) -> str:
    """What is said of a name that is not among ``known``."""
    close = difflib.get_close_matches(name, sorted(set(known) - RESERVED_ARGUMENTS.keys()), 1)
    return f"{owner} has no such argument (EngineArgs){f'; did you mean {close[0]}?' if close else ''}"
