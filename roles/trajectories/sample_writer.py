"""Keep some trajectories of each committed step as files, for ``rrl samples``, reports and trackers.

The store deletes the tokens of a step soon after its commit. :class:`SampleWriter` writes those of the best, the worst
and some random trajectories into the folder ``samples`` of the run (:mod:`rrl.core.samples_file`), once the commit is
durable. It writes packed tokens: text is decoded by whoever reads it, because the store has one thread. If the store
dies in between, the next one writes the samples of the committed steps whose tokens it still has.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from heapq import nlargest, nsmallest
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean

from ...core.run_spec import RunSpec, TrainerSettings
from ...core.samples_file import Sample, SampleRun, SamplesFile, StepSamples, files_in, frame, frames_in
from .durable.groups import Group, TrajectoryState
from .durable.state import State
from .durable.trained_samples import sample_rewards, truncated_samples
from .steps.figures import compared_rewards, spread
from .types import NOT_SAMPLED

_log = logging.getLogger("rrl.trajectories")

_FILES = 64
"""Number of files of full size that fit into the limit: the smallest amount that is thinned out at a time."""
_REPLACEMENT = "thinned"
"""Name of a file that is being thinned out."""
_TOKEN_BYTES = 4
"""Bytes of a packed token."""
_NEWEST_FILES = 3
"""Number of the newest files in which a new store looks for the samples of the steps whose tokens it has."""


class SampleWriter:
    """Writes the samples of committed steps.

    Args:
        folder: The run's folder of samples.
        job: The run spec.
    """

    def __init__(self, folder: Path, job: RunSpec) -> None:
        self._folder, self._job, self._limit = folder, job, job.samples.limit
        self._waiting: dict[int, list[Group]] = {}
        """Groups of the steps whose samples are to be written once the steps are committed."""
        self._file: SamplesFile | None = None
        """The file that this process appends to; None if the next sample begins a file."""
        self._size = self._total = 0
        """Bytes of this file, and of all files."""
        self._newest = 0
        """Newest step of which there are samples."""
        self._failed = False
        with self._reported():
            kept = files_in(folder)
            self._total = sum((folder / one.name).stat().st_size for one in kept)
            self._newest = max(
                (step for one in kept[-_NEWEST_FILES:] for step in frames_in(folder / one.name)), default=0
            )

    def take(self, state: State, number: int) -> None:
        """Note the groups of the steps up to ``number`` that have no samples yet.

        Call it before the commit of ``number``, which may delete their tokens, and after the store has been opened.
        """
        steps = [step for step in state.steps if self._newest < step <= number and state.is_bound(step)]
        self._waiting |= {step: [state.groups[group] for group in state.groups_of(step)] for step in steps}

    def write(self, committed: int) -> None:
        """Write the samples of the noted steps up to ``committed``, whose commits must be durable.

        A failure is logged once, and costs only the samples: the run goes on without them.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for step in sorted(step for step in waiting if step <= committed):
            with self._reported():
                self._append(frame(step_samples(self._job, step, waiting[step], self._job.samples.per_step)))
            self._newest = step

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, no run ends for its samples
            if not self._failed:
                self._failed, unforeseen = True, not isinstance(error, OSError)
                _log.warning("samples of steps are not kept: %s; the run goes on", error, exc_info=unforeseen)

    def _append(self, data: bytes) -> None:
        if len(data) > self._limit:
            return
        while self._total + len(data) > self._limit and self._thin():
            pass
        if self._file is None or self._size + len(data) > self._limit // _FILES:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._file, self._size = SamplesFile(_newest(self._folder) + 1, 1), 0
        file, self._file = self._file, None
        try:
            _write(self._folder / file.name, data, os.O_APPEND)
        except OSError:
            with contextlib.suppress(OSError):  # if this fails, the next sample begins a file
                os.truncate(self._folder / file.name, self._size)  # nothing may follow a torn frame
                self._file = file
            raise
        self._file = file
        self._size += len(data)
        self._total += len(data)

    def _thin(self) -> bool:
        """Remove every other step from the oldest of the files that were thinned out least.

        Returns False if there are no files. The file of this process is thinned out only if there is no other.
        """
        files = files_in(self._folder)
        if not files:
            return False
        old = min([one for one in files if one != self._file] or files, key=lambda one: (one.stride, one.number))
        self._file = None if old == self._file else self._file
        new, path = SamplesFile(old.number, 2 * old.stride), self._folder / old.name
        data = path.read_bytes()
        kept = [data[at : at + size] for step, (at, size) in frames_in(path).items() if step % new.stride == 0]
        if kept:
            replacement = self._folder / _REPLACEMENT
            _write(replacement, b"".join(kept), os.O_TRUNC)
            os.replace(replacement, self._folder / new.name)
        os.unlink(path)
        self._total -= len(data) - sum(map(len, kept))
        return True


def step_samples(job: RunSpec, step: int, groups: Sequence[Group], count: int | None = None) -> StepSamples:
    """Return samples of a step that is bound to ``groups``: of ``count`` trajectories, or of all if it is None."""
    tracks = [track for group in groups for track in group.trajectories]
    taken = tracks if count is None else _chosen(tracks, count, Random(f"{job.seed}/{step}"))
    settings = job.trainer if all(role.built_in for role in job.kind("trainer")) else None
    return StepSamples(step, len(tracks), tuple(sample for track in taken for sample in _samples_of(track, settings)))


def _chosen(tracks: Sequence[TrajectoryState], count: int, random: Random) -> list[TrajectoryState]:
    """Return the trajectories with the highest and the lowest rewards, a quarter each, and others at random."""
    if len(tracks) <= count:
        return list(tracks)
    start = random.randrange(len(tracks))  # otherwise the first groups would be chosen among equal rewards
    turned = [*tracks[start:], *tracks[:start]]
    best, worst = nlargest(-(-count // 4), turned, _reward), nsmallest((count + 1) // 4, turned, _reward)
    taken = {track.id for track in (*best, *worst)}
    rest = [track.id for track in tracks if track.id not in taken]
    taken.update(random.sample(rest, count - len(taken)))
    return [track for track in tracks if track.id in taken]


def _reward(track: TrajectoryState) -> float:
    assert track.score is not None
    return track.score.reward


def _samples_of(track: TrajectoryState, settings: TrainerSettings | None) -> Iterator[Sample]:
    score, created = track.score, track.group.created
    assert score is not None
    of_samples = zip(_paths(track), truncated_samples(track), sample_rewards(track), strict=True)
    for (tokens, runs), truncated, (agent, training) in of_samples:
        yield Sample(
            track.id,
            created.group,
            created.item,
            created.source,
            score.agents.get(agent, score.reward),
            training,
            score.parts,
            None if settings is None else _advantage(track, agent, settings),
            truncated,
            tokens,
            runs,
            agent,
        )


def _advantage(track: TrajectoryState, agent: str, settings: TrainerSettings) -> float | None:
    """Return the advantage of a trajectory over its group as the built-in trainer computes it; None if left out."""
    rewards = compared_rewards(track.group, ignores_truncated=settings.truncated == "drop").get(agent, {})
    if track.id not in rewards:
        return None
    centred = rewards[track.id] - fmean(rewards.values())
    return centred / (spread(rewards.values()) + settings.advantage_floor) if settings.advantage_std else centred


def _paths(track: TrajectoryState) -> Iterator[tuple[bytes, tuple[SampleRun, ...]]]:
    """Yield the tokens and runs of each sample of a trajectory, from the beginning of the prompt on."""
    if track.episode is None:
        answer = ((segment.tokens, segment.step, segment.incarnation, True) for segment in track.segments)
        paths = [[(track.group.created.prompt, *NOT_SAMPLED, False), *answer]]
    else:
        paths = [[(run.tokens, *run.version, run.counts) for run in runs] for runs in track.episode.samples]
    for path in paths:
        runs = tuple(
            SampleRun(length, *kind)
            for kind, pieces in groupby(path, lambda piece: piece[1:])
            if (length := sum(len(tokens) for tokens, *_ in pieces) // _TOKEN_BYTES)
        )
        yield b"".join(tokens for tokens, *_ in path), runs


def _newest(folder: Path) -> int:
    return max((one.number for one in files_in(folder)), default=0)


def _write(path: Path, data: bytes, flag: int) -> None:
    """Write to a file that only this process writes. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)  # on NFS, readers on other hosts see the data from now on
