"""Reads the lengths of trained answers from the store's log of a run, and repeats the training that the log records.

A store that restarts rewrites its log without the tokens of committed steps, so its files are kept from the start of
the run on (:func:`rrl.tests.support.roles.trainer.replayed.keep_logs`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from msgspec import Struct

from rrl.benchmarks._pace import recorded
from rrl.benchmarks._stream_task import kind_of
from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import ReplicaId
from rrl.roles.models.policy import build_model
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import GroupCreated, Record, SegmentsAppended, decode
from rrl.roles.trajectories.durable.records import Part as StoredPart
from rrl.tests.support.roles.trainer.replayed import in_order, trained_parts


def in_open_step(logs: Path) -> bool:
    """Return whether the trainer works on the second or a later part of a step that still lacks groups."""
    last = None
    for path in in_order(logs):
        for record in _records(path):
            if isinstance(record, StoredPart):
                last = record
    return last is not None and last.index > 0 and last.lacking > 0


def _records(path: Path) -> Iterator[Record]:
    return map(decode, read_frames(path))


class Lengths(Struct, frozen=True):
    """Lengths of answers of a run, in tokens."""

    by_kind: dict[str, float]
    """Mean length of all finished answers, by kind of their prompt."""
    asked: dict[str, int]
    """Number of groups that were requested, by kind of their prompt."""
    trained: float
    """Mean length of the trained answers, without those of the first steps."""

    def bias(self, by_kind: Mapping[str, float]) -> float:
        """Return the mean length of trained answers divided by the mean length of all requested answers.

        ``by_kind``: mean length of the answers to prompts of each kind, from a run in which all answers are finished.
        """
        expected = sum(by_kind[kind] * count for kind, count in self.asked.items()) / sum(self.asked.values())
        return self.trained / expected


def lengths(run: RunDir, first_step: int) -> Lengths:
    """Return the lengths of a run whose store did not restart; trained answers count from step ``first_step`` on."""
    (path,) = run.store.glob("log.*[0-9]")
    groups: dict[int, range] = {}
    kinds: dict[int, str] = {}
    tokens: dict[int, int] = {}
    finished: dict[str, list[int]] = {}
    kind_of_trajectory: dict[int, str] = {}
    trained: list[int] = []
    for record in _records(path):
        match record:
            case GroupCreated(group, first, size, item):
                groups[group], kinds[group] = range(first, first + size), kind_of(item)
                kind_of_trajectory.update(dict.fromkeys(groups[group], kinds[group]))
            case SegmentsAppended(segments=segments, finished=ended):
                tokens.update((segment.trajectory, segment.end) for segment in segments)
                for number in ended:
                    finished.setdefault(kind_of_trajectory[number], []).append(tokens[number])
            case StoredPart(step, groups=bound) if step >= first_step:
                trained += [tokens[number] for group in bound for number in groups[group]]
            case _:
                pass
    by_kind = {kind: statistics.mean(values) for kind, values in finished.items()}
    return Lengths(by_kind, dict(Counter(kinds.values())), statistics.mean(trained))


class Replay(Struct, frozen=True):
    """The comparison of a run whose roles were killed with an uninterrupted repetition of its training."""

    steps: int
    parts: int
    parts_repeated: int
    """Number of parts that a trainer trained again after its previous incarnation had died."""
    incarnations: dict[ReplicaId, int]
    """Number of the last incarnation of each replica that was killed."""
    same_weights: bool
    """True if the repetition has the weights and moments of the run's newest checkpoint, bit for bit."""
    largest_difference: float


def replay(run: RunDir, logs: Path, pace: Path, incarnations: dict[ReplicaId, int]) -> Replay:
    """Repeat the training that the logs record, and compare the result with the newest commit."""
    torch.set_num_threads(1)
    spec = read_run_spec(run.run_spec)
    parts, commit = trained_parts(logs, spec.sampling.max_new_tokens)
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
        commit.number,
        len(parts),
        len(recorded(pace, "trainer")) - len(parts),
        incarnations,
        all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs),
        max(float((one - other).abs().max()) for one, other in pairs),
    )


def _learner(spec: RunSpec) -> Learner:
    model = build_model(spec.model, open_tokenizer(spec.model).size, spec.seed)
    return Learner(model, spec.trainer, steps=spec.steps, temperature=spec.sampling.temperature)
