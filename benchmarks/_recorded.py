"""Runs the built-in trainer and rollout, and records the tokens that they train and sample (``python -m``).

A job of a benchmark names this program as the ``command`` of its trainer and rollouts. The roles are rrl's own. Each
process also appends lines of JSON to a file in ``--record``: everything that its engine is given and returns, or that
its learner is given. The records are made at these two interfaces, independently of the store between them. So they
show whether each trained token was sampled, and whether it was sampled in the context in which it was trained
(:func:`drift`).
"""

from __future__ import annotations

import argparse
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec
from msgspec import Struct
from torch import Tensor

import rrl
from rrl.core.types import Version
from rrl.roles.models.tokenizer import Tokenizer
from rrl.roles.rollout import main as rollout_program
from rrl.roles.rollout.engine import Engine, StepOutput
from rrl.roles.trainer import main as trainer_program
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.types import Item

_T = TypeVar("_T")


class Given(Struct, frozen=True, tag="given"):
    """A trajectory or turn that an engine received to extend."""

    turn: int
    context: tuple[int, ...]
    """All tokens before the answer."""
    so_far: tuple[int, ...]
    """Tokens of the answer that another incarnation had already sampled."""


class Sampled(Struct, frozen=True, tag="sampled"):
    """Tokens that an engine returned and that it sampled under one version."""

    turn: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version


class Trained(Struct, frozen=True, tag="trained"):
    """A sample that a learner was given."""

    step: int
    part: int
    index: int
    """Index of the sample in its part."""
    group: int
    episode: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    masked: tuple[tuple[int, int], ...]
    reward: float

    @property
    def counts(self) -> list[bool]:
        """Return for each of ``tokens`` whether it is a trained token."""
        result = [True] * len(self.tokens)
        for start, count in self.masked:
            result[start : start + count] = [False] * count
        return result


class _Record:
    """Appends records to a file, with one record on each line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, record: Given | Sampled | Trained) -> None:
        self._file.write(msgspec.json.encode(record).decode() + "\n")

    def flush(self) -> None:
        self._file.flush()


class RecordedEngine:
    """An engine that records the items that it receives and the tokens that it returns."""

    def __init__(self, engine: Engine, record: _Record) -> None:
        self._engine, self._record = engine, record

    @property
    def free_slots(self) -> int:
        """See :class:`Engine`."""
        return self._engine.free_slots

    @property
    def has_work(self) -> bool:
        """See :class:`Engine`."""
        return self._engine.has_work

    def add(self, items: Sequence[Item]) -> None:
        """See :class:`Engine`."""
        for item in items:
            so_far = tuple(token for segment in item.so_far for token in segment.tokens)
            self._record.write(Given(item.trajectory, tuple(item.prompt), so_far))
        self._engine.add(items)

    def step(self) -> StepOutput:
        """See :class:`Engine`."""
        return self._recorded(self._engine.step())

    def flush(self) -> StepOutput:
        """See :class:`Engine`."""
        return self._recorded(self._engine.flush())

    def _recorded(self, output: StepOutput) -> StepOutput:
        segments, finished = output
        for segment in segments:
            self._record.write(Sampled(segment.trajectory, segment.tokens, segment.logprobs, segment.version))
        if segments:
            self._record.flush()  # written before the store gets the tokens, so that a kill loses no record
        return segments, finished

    def abort(self, trajectories: Iterable[int]) -> None:
        """See :class:`Engine`."""
        self._engine.abort(trajectories)

    def load(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See :class:`Engine`."""
        self._engine.load(version, tensors)

    def probe(self) -> None:
        """See :class:`Engine`."""
        self._engine.probe()

    def sleep(self) -> None:
        """See :class:`Engine`."""
        self._engine.sleep()

    def wake(self) -> None:
        """See :class:`Engine`."""
        self._engine.wake()

    def close(self) -> None:
        """See :class:`Engine`."""
        self._engine.close()


class RecordedLearner(Learner):
    """A learner that records each part that it is given."""

    record: _Record

    def add(self, part: Part) -> None:
        """See :class:`Learner`."""
        for index, each in enumerate(part.trajectories):
            self.record.write(
                Trained(
                    part.number,
                    part.index,
                    index,
                    each.group,
                    each.id,
                    each.prompt,
                    each.tokens,
                    each.logprobs,
                    each.versions,
                    each.masked,
                    each.reward,
                )
            )
        self.record.flush()
        super().add(part)


def _recorded_builder(record: _Record) -> Callable[[rrl.Worker], Callable[[], Engine]]:
    """Return a function that builds the rollout's engine with a record; it replaces the rollout's own function."""
    build_role = rollout_program._builder

    def builder(me: rrl.Worker) -> Callable[[], Engine]:
        build = build_role(me)
        return lambda: RecordedEngine(build(), record)

    return builder


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _lines(folder: Path, role: str, kind: type[_T]) -> Iterator[_T]:
    """Yield the records of each process of a role; a killed process may leave half a line."""
    decoder = msgspec.json.Decoder(kind)
    for path in sorted(folder.glob(f"{role}-*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def trained(folder: Path) -> list[Trained]:
    """Return all trained samples in order. A part that was trained again after its process died counts once."""
    samples = {(each.step, each.part, each.index): each for each in _lines(folder, "trainer", Trained)}
    return [samples[place] for place in sorted(samples)]


def _answers(folder: Path) -> Iterator[tuple[tuple[int, ...], list[tuple[int, float, Version | None]]]]:
    """Yield the context and the answer of each turn that an engine was given.

    An answer is a list of (token, log-probability, version).

    Tokens that another incarnation had sampled have version None.
    """
    for path in sorted(folder.glob("rollout-*.jsonl")):
        running: dict[int, tuple[tuple[int, ...], list[tuple[int, float, Version | None]]]] = {}
        decoder = msgspec.json.Decoder(Given | Sampled)
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            match decoder.decode(line):
                case Given(turn, context, so_far):
                    if turn in running:  # the turn was removed from the engine, and added to it again
                        yield running[turn]
                    running[turn] = context, [(token, 0.0, None) for token in so_far]
                case Sampled(turn, tokens, logprobs, version):
                    running[turn][1].extend(
                        (token, logprob, version) for token, logprob in zip(tokens, logprobs, strict=True)
                    )
        yield from running.values()


def drift(folder: Path) -> tuple[int, int]:
    """Compare the trained tokens with the records of the engines.

    Returns:
        Number of trained tokens that no engine sampled after the same tokens, with the same log-probability and
            version; and number of trained tokens.
    """
    known: set[tuple[int, int, float, Version]] = set()
    for context, answer in _answers(folder):
        before = _extended(0, context)
        for token, logprob, version in answer:
            if version is not None:
                known.add((before, token, _float32(logprob), version))
            before = _extended(before, (token,))
    differing = count = 0
    for sample in trained(folder):
        before = _extended(0, sample.prompt)
        values = zip(sample.tokens, sample.logprobs, sample.versions, sample.counts, strict=True)
        for token, logprob, version, counts in values:
            if counts:
                count += 1
                differing += (before, token, _float32(logprob), version) not in known
            before = _extended(before, (token,))
    return differing, count


def answers(folder: Path) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return context and tokens of every answer, as the engine had them when it stopped extending the answer."""
    return {(context, tuple(token for token, _, _ in answer)) for context, answer in _answers(folder)}


def answers_of_several_versions(folder: Path) -> int:
    """Return the number of answers whose tokens an engine sampled under more than one version."""
    return sum(len({version for _, _, version in answer if version is not None}) > 1 for _, answer in _answers(folder))


def text_changes(folder: Path, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the number of answers whose tokens change when they are decoded and encoded again, and of all answers."""
    longest: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for context, answer in _answers(folder):
        tokens = tuple(token for token, _, _ in answer)
        if tokens and tokens[-1] in tokenizer.stop_tokens:
            longest[context, tokens[:-1]] = None
    changed = sum(tokenizer.encode(tokenizer.decode(answer)) != answer for _, answer in longest)
    return changed, len(longest)


def _extended(before: int, tokens: Iterable[int]) -> int:
    """Return a hash (64 bits) of the tokens behind the hash ``before``, followed by ``tokens``."""
    for token in tokens:
        before = hash((before, token))
    return before


def _float32(value: float) -> float:
    return array("f", [value])[0]


def main() -> None:
    """Run the built-in trainer or rollout, and record the tokens that it trains or samples."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("role", choices=("trainer", "rollout"))
    parser.add_argument("--record", type=Path, required=True, help="folder of the records")
    given = parser.parse_args()
    with (given.record / f"{given.role}-{os.getpid()}.jsonl").open("a") as file:
        if given.role == "trainer":
            RecordedLearner.record = _Record(file)
            vars(trainer_program)["Learner"] = RecordedLearner
            trainer_program.main()
        else:
            vars(rollout_program)["_builder"] = _recorded_builder(_Record(file))
            rollout_program.main()


if __name__ == "__main__":
    main()
