"""The interface of the engines with which a rollout samples, and how ``engine`` in a pool's table names one.

``engine`` is a row of :data:`rrl.config.import_paths.ENGINES`, or ``module:name`` beside job.toml. The name is that of
a class or of a function, and is called with three arguments: the worker ``me``, the model, and the tokenizer.

- A class is an :class:`Engine`. It is called when the process has joined the run, while the first weights are received;
  in a standby process, before its promotion.
- A function is called before the process joins the run. It checks the configuration, and returns a function without
  arguments, which then builds the engine. In a guest the engine is built when the trainer first lends the GPUs; before,
  neither the function nor the import may touch a GPU.

The model is the one that the trainer trains, without memory for its tensors (:func:`..models.policy.materialise`
allocates it), for an engine that computes with it, or that needs names and shapes. It is None if rrl cannot build the
model of ``[model] path``, such as a mixture of experts that a trainer of the user's trains; the engine then loads the
folder as it can. ``me.rollout`` has the settings.
:mod:`.torch_engine` is the shorter example, :mod:`.vllm` another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from torch import Tensor, nn

import rrl

from ...config.import_paths import ENGINE_ARGUMENTS, ENGINES, SLEEPING
from ...core.types import Version
from ..launcher.end_report import exits_on_invalid_config
from ..models.tasks import TaskError, import_row
from ..models.tokenizer import Tokenizer
from ..trajectories.types import Item, Segment

StepOutput = tuple[list[Segment], list[int]]
"""New segments, and the trajectories that these segments complete. The segments of one trajectory are in their
order."""


IN_USE_TEXT = "the engine sleeps for the first time; %.1f GiB of its GPU are in use by all processes"
"""What an engine logs after its first sleep: what the trainer, and what the next wake, must do without."""


class Sampling(Struct, frozen=True):
    """The settings of sampling.

    Recorded log-probabilities belong to the distribution that was sampled from, including the temperature.
    """

    temperature: float = 1.0
    segment_tokens: int = 64
    """Number of new tokens after which a trajectory's segment is returned."""
    greedy: bool = False
    """True to take the most likely token (for evaluation). The recorded log-probabilities are those of the policy in
    both cases."""


def sampling_of(me: rrl.Worker) -> Sampling:
    """Return the settings of sampling of a rollout."""
    return Sampling(me.job.sampling.temperature, me.rollout.segment_tokens)


class Engine(Protocol):
    """A model that extends many trajectories together, step by step; used by one thread.

    :class:`Sampling` is given at construction. If any other method raises an exception, the engine is unusable: the
    process ends, and the next incarnation continues from the segments that were returned. Only a ValueError of
    :meth:`load` leaves the engine usable. :meth:`sleep` and :meth:`wake` are needed only in jobs that lend the
    trainer's GPUs (``[tags] trainer``).
    """

    @property
    def free_slots(self) -> int:
        """Number of further trajectories that the engine would accept now."""

    @property
    def has_work(self) -> bool:
        """True if :meth:`step` has anything to generate or to return."""

    def add(self, items: Sequence[Item]) -> None:
        """Begin to extend these trajectories too, each after its prompt and its segments so far.

        A trajectory is complete with an end-of-sequence token or after ``max_new`` tokens. Each trajectory is reported
        finished exactly once: with its last segment, or without a segment if it could not be extended.
        """

    def step(self) -> StepOutput:
        """Extend each trajectory by a token or a segment, and return the segments that are due; often there are none.

        Each segment has the extras that the job declares (:attr:`..trajectories.types.Segment.extras`).

        Raises:
            RuntimeError: No weights were loaded before.
        """

    def flush(self) -> StepOutput:
        """Return all tokens that were generated and not returned yet, because the process is about to end."""

    def abort(self, trajectories: Iterable[int]) -> None:
        """Stop extending these trajectories, because they are no longer leased to this rollout.

        They are not reported finished. Trajectories that the engine does not have are ignored.
        """

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights by their Hugging Face names.

        Running trajectories continue: their next tokens are sampled with the new version, and the key-value cache of
        their earlier tokens is computed again with the new version. The given tensors are copied: they may be views of
        memory that is freed afterwards.

        Raises:
            ValueError: Names or shapes do not fit the model; nothing is loaded then.
        """

    def probe(self) -> None:
        """Generate one token.

        Raises:
            RuntimeError: The result is invalid, for example not finite.
        """

    def sleep(self) -> None:
        """Stop extending all trajectories, as :meth:`abort` does, and free the memory of weights and cache.

        What was generated is flushed before. Only :meth:`wake` and :meth:`close` may follow.
        """

    def wake(self) -> None:
        """Get the memory of the weights back; their values are lost. :meth:`load` follows, after which all is usable.

        The version that is then loaded may be one that was loaded before. No prefix that was read before the sleep
        may be reused.
        """

    def close(self) -> None:
        """Free the engine's resources. No method may be called afterwards."""


_METHODS = [name for name in vars(Engine) if not name.startswith("_")]


def _missing(engine: Any, methods: Iterable[str]) -> list[str]:
    return [method for method in methods if not hasattr(engine, method)]


def load_engine(me: rrl.Worker, model: nn.Module | None, tokenizer: Tokenizer) -> Callable[[], Engine]:
    """Import the engine that the job names, and return the function that builds it.

    Both end the process with exit code 2 and a message of one line if the engine is not as this module describes.
    """
    name, rows = me.rollout.engine, {key: row.prepare for key, row in ENGINES.items()}
    table = me.job.role(me.launch.role).table
    with exits_on_invalid_config(TaskError):
        named = import_row(name, rows, Path(me.launch.cwd), "engine", table, ENGINE_ARGUMENTS)
    needed = [method for method in _METHODS if me.launch.guest or method not in SLEEPING]
    if me.launch.guest and isinstance(named, type) and (missing := _missing(named, SLEEPING)):
        _refuse(table, f"{name} cannot be a guest of the trainer: it lacks {' and '.join(missing)}")
    build = partial(named, me, model, tokenizer) if isinstance(named, type) else named(me, model, tokenizer)
    if not callable(build):
        right = "return a function that builds the engine, or name a class"
        _refuse(table, f"{name} returned {type(build).__name__}; {right}")

    def build_checked() -> Engine:
        engine: Engine = build()
        if missing := _missing(engine, needed):
            _refuse(table, f"{name} built {type(engine).__name__}, an engine without {', '.join(missing)}")
        return engine

    return build_checked


def _refuse(table: str, problem: str) -> None:
    with exits_on_invalid_config(TaskError):
        raise TaskError("engine", problem, table=table)
