"""The folder ``samples`` of a run: some trajectories of each committed step, as tokens.

The trajectory store writes it (``roles/trajectories/sample_writer.py``); commands, reports and trackers read it, also
while it is written. A file ``<number>.<stride>`` is a sequence of frames, one for each step, in the order of the
commits. Only the process of the store that created a file appends to it, so only the end of a file can be torn.
``stride`` says how far the file was thinned out: it has only steps that ``stride`` divides.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

_HEADER = struct.Struct("<4sIII")
"""Header of a frame: magic bytes, step, length of the payload, and CRC-32 of the payload."""
_MAGIC = b"rrlS"
_ATTEMPTS = 5
"""Number of attempts to read the folder, in which the store may replace a file at any time."""


class SampleRun(Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of a sample that were all given, or all sampled under one version."""

    length: int
    step: int
    """Training step of the weights that sampled the tokens; -1 for given tokens."""
    incarnation: int
    """Number of the trainer's incarnation that published these weights; 0 for given tokens."""
    trained: bool
    """True if the tokens are trained in this sample."""


class Sample(Struct, frozen=True, array_like=True):
    """One trajectory of a step or, with agents, one path through the turns of an episode."""

    trajectory: int
    group: int
    item: int
    """Index of the prompt in the task."""
    source: str
    """Name of the prompt file; empty if the task has only one source."""
    reward: float
    training: float
    """The reward that the trainer learns from."""
    parts: dict[str, float]
    """The rewards of which ``reward`` is the weighted sum, by name; empty if there is only one."""
    advantage: float | None
    """Advantage over the group, as the built-in trainer computes it; None if the trajectory is left out there, or with
    a trainer of the user's own."""
    truncated: bool
    tokens: bytes
    """All tokens from the beginning of the prompt on, as int32 in the byte order of the store's machine."""
    runs: tuple[SampleRun, ...]
    """The runs of ``tokens``, in order."""
    agent: str = ""
    """The agent whose tokens the sample trains, with its reward, in a group with rewards by name."""


class StepSamples(Struct, frozen=True, array_like=True):
    """Trajectories of a committed step."""

    step: int
    trajectories: int
    """Number of trajectories that the step trained, of which ``samples`` has some or all."""
    samples: tuple[Sample, ...]


class SamplesFile(NamedTuple):
    """A file of the folder."""

    number: int
    stride: int

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return f"{self.number}.{self.stride}"


_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(StepSamples)


def frame(samples: StepSamples) -> bytes:
    """Return the frame of a step."""
    payload = _encode(samples)
    return _HEADER.pack(_MAGIC, samples.step, len(payload), zlib.crc32(payload)) + payload


def files_in(folder: Path) -> list[SamplesFile]:
    """Return the files of the folder in the order of their steps; empty if there is no folder. Raises OSError."""
    try:
        names = [match for name in os.listdir(folder) if (match := re.fullmatch(r"(\d+)\.(\d+)", name, re.ASCII))]
    except FileNotFoundError:
        return []
    return sorted(SamplesFile(int(match[1]), int(match[2])) for match in names)


def read_steps(folder: Path, select: Callable[[list[int]], Iterable[int]]) -> tuple[list[int], list[StepSamples]]:
    """Return the steps of which the folder has samples, and the samples of those that ``select`` returns, in order.

    Samples that cannot be read, because a crash has torn them, are left out. Raises OSError.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            return _read(folder, select)
        except FileNotFoundError:  # the store has replaced one of the files in the meantime
            if not left:
                raise
    raise AssertionError("the last attempt returns or raises")


def _read(folder: Path, select: Callable[[list[int]], Iterable[int]]) -> tuple[list[int], list[StepSamples]]:
    paths = [folder / one.name for one in files_in(folder)]
    places = {step: (path, place) for path in paths for step, place in frames_in(path).items()}
    kept, found = sorted(places), []
    for step in sorted(set(select(kept)) & places.keys()):
        path, (at, size) = places[step]
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(size)
        if zlib.crc32(data[_HEADER.size :]) == _HEADER.unpack_from(data)[3]:
            found.append(_decoder.decode(data[_HEADER.size :]))
    return kept, found


def frames_in(path: Path) -> dict[int, tuple[int, int]]:
    """Return position and size (bytes) of each complete frame of a file by its step, in order. Raises OSError."""
    found: dict[int, tuple[int, int]] = {}
    with path.open("rb") as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at + _HEADER.size <= end:
            magic, step, length, _ = _HEADER.unpack(file.read(_HEADER.size))
            size = _HEADER.size + length
            if magic != _MAGIC or at + size > end:
                break
            found[step] = at, size
            at = file.seek(at + size)
    return found
