"""What the store's log of a run says: how long the trained answers were, and what weights result from the training.

A store that restarts rewrites its log without the tokens of committed steps. :func:`keep_logs` therefore keeps each
file of the log from the start, by a hard link, while the run goes on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from msgspec import Struct

from rrl.benchmarks._pace import recorded
from rrl.benchmarks._stream_task import kind_of
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec, read_run_spec
from rrl.roles.models.policy import build_model
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.batches import decode_part
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import (
    Binding,
    GroupCreated,
    Record,
    SegmentsAppended,
    StepCommitted,
    decode,
)
from rrl.roles.trajectories.durable.state import State
from rrl.roles.trajectories.types import Part

_ALL_STEPS = 1_000_000
"""Number of committed steps whose tokens the state of a replay keeps: all of them."""


def keep_logs(run: RunDir, folder: Path) -> None:
    """Keep the files that the log of a run has now, also if the store replaces them later."""
    for path in run.store.glob("log.*[0-9]"):
        kept = folder / path.name
        if not kept.exists() and path.stat().st_size:  # an empty file is a claim, which the log itself replaces
            os.link(path, kept)


def _records(path: Path) -> Iterator[Record]:
    return map(decode, read_frames(path))


def length_bias(run: RunDir, first_step: int) -> float:
    """Return the mean length of the answers trained from a step on, over that of all answers that were asked for.

    The length of an answer is the mean length of all finished answers to prompts of its kind, because answers that were
    dropped are not finished. The store of this run must not have restarted.
    """
    (path,) = run.store.glob("log.*[0-9]")
    kinds: dict[int, str] = {}
    trajectories: dict[int, str] = {}
    tokens: dict[int, int] = {}
    lengths: dict[str, list[int]] = {}
    trained: list[int] = []
    for record in _records(path):
        match record:
            case GroupCreated(group, first, size, item):
                kinds[group] = kind_of(item)
                trajectories.update((number, kinds[group]) for number in range(first, first + size))
            case SegmentsAppended(segments=segments, finished=finished):
                tokens.update((segment.trajectory, segment.end) for segment in segments)
                for number in finished:
                    lengths.setdefault(trajectories[number], []).append(tokens[number])
            case Binding(number, groups) if number >= first_step:
                trained += groups
            case _:
                pass
    mean = {kind: statistics.mean(values) for kind, values in lengths.items()}
    asked = statistics.mean(mean[kind] for kind in kinds.values())
    return statistics.mean(mean[kinds[group]] for group in trained) / asked


class Replay(Struct, frozen=True):
    """The comparison of a run whose roles were killed with the same training without interruption."""

    steps: int
    parts: int
    parts_repeated: int
    """Number of parts that a trainer trained once more, after the death of the one before it."""
    incarnations: dict[str, int]
    """Number of the last incarnation of each replica that was killed."""
    same_weights: bool
    """True if weights and moments are the same, bit for bit."""
    largest_difference: float


def replay(run: RunDir, logs: Path, pace: Path, incarnations: dict[str, int]) -> Replay:
    """Train once more what the logs say was trained, and compare the result with the newest commit."""
    torch.set_num_threads(1)
    spec = read_run_spec(run.run_spec)
    parts, commit = _trained_parts(logs, spec.sampling.max_new_tokens)
    learner, committed = _learner(spec), _learner(spec)
    learner.seed_rng(spec.seed)
    for step in range(1, commit.number + 1):
        learner.open(step)
        for index in range(len([key for key in parts if key[0] == step])):
            learner.add(parts[step, index])
        learner.close()
    Checkpoints(run).read(commit.manifest, committed)
    pairs = [(tensor, committed.tensors()[name]) for name, tensor in learner.tensors().items()]
    return Replay(
        commit.number, len(parts), len(recorded(pace, "trainer")) - len(parts), incarnations,
        all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs),
        max(float((one - other).abs().max()) for one, other in pairs),
    )  # fmt: skip


def _learner(spec: RunSpec) -> Learner:
    model = build_model(spec.model, open_tokenizer(spec.model).size, spec.seed)
    return Learner(model, spec.trainer, steps=spec.steps, temperature=spec.sampling.temperature)


def _trained_parts(logs: Path, max_new_tokens: int) -> tuple[dict[tuple[int, int], Part], StepCommitted]:
    """Return the parts of all steps by step and index, and the newest commit.

    Raises:
        AssertionError: Two files of the log differ in a part.
    """
    parts: dict[tuple[int, int], Part] = {}
    commit: StepCommitted | None = None
    for path in sorted(logs.iterdir(), key=lambda path: int(path.name.partition(".")[2])):
        state = State(_ALL_STEPS, max_new_tokens)
        _apply(state, _records(path))
        for step in state.bindings:
            for index in range(len(state.parts_of(step))):
                part = decode_part(state.part(step, index))
                assert parts.setdefault((step, index), part).digest == part.digest, f"{part.number}.{index} changed"
        if state.commitments:
            commit = state.commitments[max(state.commitments)]
    assert commit is not None
    return {key: part for key, part in parts.items() if key[0] <= commit.number}, commit


def _apply(state: State, records: Iterable[Record]) -> None:
    for record in records:
        state.apply(record)
