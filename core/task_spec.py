"""The part of the run spec (:mod:`.run_spec`) that says where prompts and rewards come from, and what is evaluated."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TaskFile(Struct, frozen=True):
    """One of several prompt files (:class:`rrl.config.job.schema.TaskFileTable`)."""

    path: str
    """Absolute path."""
    name: str
    """Source of the prompts, by which rewards are reported."""
    weight: float = 1.0


class RewardTerm(Struct, frozen=True):
    """One of several rewards of an answer (:class:`rrl.config.job.schema.RewardTable`)."""

    function: str
    weight: float = 1.0


class TaskSpec(Struct, frozen=True):
    """The source of prompts and rewards (:class:`rrl.config.job.schema.TaskTable`): a dataset, files or a function."""

    dataset: str | None = None
    args: dict[str, Any] = {}  # read by the dataset or the function only
    function: str | None = None
    file: str | None = None
    """Absolute path of the prompt file; None for another source."""
    files: tuple[TaskFile, ...] = ()
    """Several prompt files; empty for another source."""
    answer_column: str = "answer"
    reward: str | None = None
    rewards: dict[str, RewardTerm] = {}
    prompt: str = "{question}"
    size: int = 200_000
    partial_credit: float = 0.0

    @property
    def sources(self) -> tuple[TaskFile, ...]:
        """Return the prompt files; ``file`` is a single one without a name."""
        return self.files if self.file is None else (TaskFile(self.file, ""),)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Return the columns that a row of a file needs beside the columns of the prompt."""
        named = self.partial_credit or self.answer_column != TaskSpec().answer_column
        scored = self.reward is not None or self.rewards
        return () if scored and not named else (self.answer_column,)


class EvalSpec(Struct, frozen=True):
    """Evaluations during the run (:class:`rrl.config.job.schema.EvalTable`)."""

    every: int
    count: int = 256
    samples: int = 1
    temperature: float = 0.0
    task: TaskSpec | None = None
    """The task that is evaluated; None stands for the dataset of ``[task]``, with items that no step trains on."""

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether the weights of a step are evaluated in a run of ``steps`` steps."""
        return self.newest_due(step, steps) == step

    def newest_due(self, step: int, steps: int) -> int:
        """Return the newest evaluated step up to ``step`` in a run of ``steps`` steps."""
        return step if step == steps else step - step % self.every
