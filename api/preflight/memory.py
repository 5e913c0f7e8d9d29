"""Estimate the memory that a rank of the built-in trainer needs, and how a job could lower it, for ``rrl check``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ...cluster.traits import traits_of
from ...config.model_folder import max_length
from ...config.model_size import Shape, adapted_shapes, shape_of, weight_count
from ...core.run_spec import LoraSpec, RoleSpec, RunSpec
from ...core.types import TRAINER, role_of
from ...core.units import size_text
from .local_machine import DTYPE_BYTES, TORCH_BYTES

_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32
_STATE = _FLOAT32 + _MOMENTS
"""Bytes of a trained weight in the state of a step: the float32 weight, and the two moments of AdamW."""
_SNAPSHOT_COPIES = 2
"""Copies of a rank's state in the memory of its own node, and of another node if there is one (docs/restart.md)."""
_VERSIONS = 2
"""Versions of the weights in the memory of the first rank while it publishes."""
_PIECE_ROWS, _PIECE_LOGITS = 512, 2**21
"""Rows of a piece of logits, or logits of it if these are more (:mod:`rrl.roles.trainer.likelihood`)."""
_GATHERED_LAYERS = 2
"""Layers whose weights FSDP has gathered: the one that computes, and the next one."""
_WORTH = 0.05
"""Share of the memory that a change of the job must save to be named."""


class RankMemory(Struct, frozen=True):
    """The memory that a rank needs at its peak, in bytes by what it holds; parts that are 0 are left out."""

    device: dict[str, int]
    """On the device that computes: the GPU, or the host if the rank has none."""
    host: dict[str, int]
    """In host memory besides."""
    published: int
    """In host memory of the first rank besides: the versions that are published."""

    def on_gpu(self, trainer: RoleSpec) -> int:
        """Return the bytes on the GPU of a rank of ``trainer``."""
        return sum(self.device.values()) if trainer.per_member.gpus else 0

    def on_host(self, trainer: RoleSpec) -> int:
        """Return the bytes in the host memory of the first rank of ``trainer``, which needs the most."""
        return sum(self.host.values()) + self.published + sum(self.device.values()) - self.on_gpu(trainer)


def rank_memory(spec: RunSpec) -> RankMemory | None:
    """Estimate the memory of a rank of the built-in trainer; None if this machine does not have the model.

    The estimate counts tensors. Fragments of the allocator and the GPU's context come on top.
    """
    settings, trainer, shape = spec.trainer, spec.role(role_of(TRAINER)), shape_of(spec.model)
    if not (weights := weight_count(spec.model)):
        return None
    dtype, ranks = DTYPE_BYTES[spec.model.dtype], trainer.ranks
    trained = weights if settings.lora is None else _adapter_weights(spec, settings.lora)
    base = 0 if settings.lora is None else weights * dtype
    casts = ranks > 1 or dtype != _FLOAT32  # by FSDP, which gathers what it casts
    device = {
        "weights": (base + trained * _FLOAT32) // ranks,
        "gradients": trained * _FLOAT32 // ranks,
        "moments": 0 if settings.offload_optimizer else trained * _MOMENTS // ranks,
        "reference": weights * dtype // ranks if settings.kl and settings.lora is None else 0,
    }
    if shape is not None:
        tokens = tokens_of_pass(spec)
        device |= {
            "gathered weights": _gathered_bytes(shape, weights, dtype, settings.lora is None) if casts else 0,
            **pass_bytes(shape, tokens, dtype, settings.activation_checkpointing, settings.lora is None),
        }
    copies = _SNAPSHOT_COPIES * (2 if spec.nodes > 1 else 1) if settings.snapshots else min(settings.uncommitted, 2)
    host = {
        "process": TORCH_BYTES,
        "copies of the state": copies * trained * _STATE // ranks,
        "optimizer": trained * (_STATE + _FLOAT32) // ranks if settings.offload_optimizer else 0,
    }
    return RankMemory(
        {name: nbytes for name, nbytes in device.items() if nbytes},
        {name: nbytes for name, nbytes in host.items() if nbytes},
        _VERSIONS * weights * dtype,
    )


def tokens_of_pass(spec: RunSpec) -> int:
    """Return the largest number of tokens of a rank's forward and backward pass.

    That is a trajectory of the maximum length, or many of them, at most a rank's share of a step. Their prompts are not
    counted if all are in one pass.
    """
    longest = max_length(spec.model.path, spec.model.max_length)
    sampling, limit = spec.sampling, spec.trainer.micro_batch_tokens
    share = -(-sampling.prompts_per_step * sampling.group_size // spec.role(role_of(TRAINER)).ranks)
    return max(longest, share * min(sampling.max_new_tokens, longest) if limit is None else min(limit, share * longest))


def _adapter_weights(spec: RunSpec, lora: LoraSpec) -> int:
    shapes = adapted_shapes(Path(str(spec.model.path)), lora.targets)
    return sum(lora.rank * sum(shape) for shape in shapes.values())


def pass_bytes(shape: Shape, tokens: int, dtype: int, checkpointing: bool, trains_head: bool) -> dict[str, int]:
    """Return the memory of a forward and backward pass besides gradients of weights, by what it holds.

    A layer keeps four matrices of the MLP; queries, keys, values and the output of the attention, which makes no matrix
    of scores; and for each norm the float32 input, the normed input, and the product with the norm's weight. With
    ``checkpointing`` the layers keep their inputs, and the backward pass has all of one layer at a time. It also has
    the gradients of two matrices of an MLP. When it begins, it has a piece of logits instead.
    """
    norm = _FLOAT32 + dtype
    layer = dtype * (4 * shape.intermediate + 2 * (shape.queries + shape.keys)) + 2 * (norm + dtype) * shape.width
    if shape.normed_heads:
        layer += norm * (shape.queries + shape.keys)
    kept = shape.layers * (dtype * shape.width if checkpointing else layer) + (norm + dtype) * shape.width
    in_work = tokens * (2 * dtype * shape.intermediate + (layer if checkpointing else 0))
    logits = _logit_bytes(shape, tokens, dtype, trains_head)
    return {"activations": tokens * kept, **({"logits": logits} if logits > in_work else {"a layer at work": in_work})}


def _logit_bytes(shape: Shape, tokens: int, dtype: int, trains_head: bool) -> int:
    """Return the memory of a piece of logits in the backward pass, and of the gradient of the output head."""
    rows = min(tokens, max(_PIECE_ROWS, _PIECE_LOGITS // shape.vocabulary))
    head = shape.vocabulary * shape.width * (_FLOAT32 + dtype) if trains_head else 0
    return rows * shape.vocabulary * (3 * _FLOAT32 + 2 * dtype) + head


def _gathered_bytes(shape: Shape, weights: int, dtype: int, trains: bool) -> int:
    """Return the memory of the gathered embeddings and layers, and if these are trained of a layer's whole gradient."""
    embeddings = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    layer = max(0, weights - embeddings) // shape.layers
    return dtype * (embeddings + _GATHERED_LAYERS * layer) + ((dtype + _FLOAT32) * layer if trains else 0)


# ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def memory_text(spec: RunSpec) -> str:
    """Return the memory of a rank of the built-in trainer, and the keys that lower it; empty without such a trainer."""
    if not _trains(spec):
        return ""
    if (memory := rank_memory(spec)) is None:
        return "unknown: this machine does not have the model"
    trainer = spec.role(role_of(TRAINER))
    lines, device = [], _parts(memory.device)
    if gpus := trainer.per_member.gpus:
        lines.append(f"GPU of a rank     about {_gib(memory.on_gpu(trainer))}: {device}")
    host = _parts(memory.host | {"published versions (first rank)": memory.published})
    lines.append(f"host of a rank    about {_gib(memory.on_host(trainer))}: {host if gpus else f'{device}, {host}'}")
    if shape_of(spec.model) is None:
        lines.append(
            "not counted       activations and logits: config.json does not name the sizes of its layers as Llama does"
        )
    else:
        lines.append(f"at most           {tokens_of_pass(spec):,} tokens in a pass")
    if savings := _savings(spec, memory):
        lines.append("less with         " + ", or ".join(f"{key} (-{_gib(saved)})" for key, saved in savings))
    return "\n".join(lines)


def memory_doubt(spec: RunSpec) -> list[str]:
    """Return a warning if a rank of the trainer does not fit into its host memory; virtual nodes do not limit it."""
    if not _trains(spec) or traits_of(spec.cluster).roles_run_here or (memory := rank_memory(spec)) is None:
        return []
    trainer = spec.role(role_of(TRAINER))
    if (needed := memory.on_host(trainer)) <= (has := trainer.per_member.mem):
        return []
    keys = [] if trainer.per_member.gpus else [key for key, _ in _savings(spec, memory)]
    less = "".join(f", or write {key}" for key in keys)
    return [f"roles.trainer.mem = {size_text(has)}: a rank needs about {_gib(needed)} of host memory; raise it{less}"]


def _trains(spec: RunSpec) -> bool:
    return any(role.traits.trains and role.built_in for role in spec.roles)


def _savings(spec: RunSpec, memory: RankMemory) -> list[tuple[str, int]]:
    """Return changes of the job that lower the memory of the device, and by how many bytes; the best one first."""
    total = sum(memory.device.values())
    saved = []
    for key, changed in _alternatives(spec):
        less = rank_memory(changed)
        if less is not None and (gain := total - sum(less.device.values())) > _WORTH * total:
            saved.append((key, gain))
    return sorted(saved, key=lambda one: -one[1])


def _alternatives(spec: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield jobs of which each differs by one key from ``spec``, which ``rrl check`` names."""
    settings, trainer = spec.trainer, spec.role(role_of(TRAINER))

    def with_settings(**changes: object) -> RunSpec:
        return msgspec.structs.replace(spec, trainer=msgspec.structs.replace(settings, **changes))

    longest, tokens = max_length(spec.model.path, spec.model.max_length), tokens_of_pass(spec)
    if tokens > longest:
        lower = max(longest, tokens // 2)
        yield f"micro_batch_tokens = {lower}", with_settings(micro_batch_tokens=lower)
    else:
        model = msgspec.structs.replace(spec.model, max_length=longest // 2)
        limited = msgspec.structs.replace(settings, micro_batch_tokens=longest // 2)
        yield f"model.max_length = {longest // 2}", msgspec.structs.replace(spec, model=model, trainer=limited)
    if not settings.activation_checkpointing:
        yield "activation_checkpointing = true", with_settings(activation_checkpointing=True)
    if settings.lora is None and spec.model.path is not None:
        yield "lora = { rank = 32 }", with_settings(lora=LoraSpec(32, 64.0))
    if not settings.offload_optimizer and trainer.per_member.gpus:
        yield "offload_optimizer = true", with_settings(offload_optimizer=True)
    wider = msgspec.structs.replace(trainer, ranks=2 * trainer.ranks)
    yield (
        f"ranks = {wider.ranks}",
        msgspec.structs.replace(spec, roles=tuple(wider if role is trainer else role for role in spec.roles)),
    )


def _parts(nbytes: dict[str, int]) -> str:
    ordered = sorted(nbytes.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in ordered)


def _gib(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**30 * 10) / 10:,.1f} GiB"
