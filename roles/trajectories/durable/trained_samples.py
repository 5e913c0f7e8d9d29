"""The data that a trainer reads of a group: the samples of its trajectories, their digest and their tokens' ages.

A trajectory of a job without agents is one sample. An episode has a sample for each leaf of the tree of its counted
turns (:attr:`.groups.EpisodeState.counted`). Only a turn that has sampled tokens, is not foreign and was used can be a
leaf. It is a leaf if no other such turn's path begins with its whole path. A sample consists of the path of its leaf. A
sampled token counts in one sample only: the first sample, in the order of the turns, that contains it. Given tokens
never count, and the answers of foreign turns are given tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from ..extras import PackedExtras, cut, join, joined_bytes
from ..types import NOT_SAMPLED, PackedTrajectory, PathDigest
from .groups import Run, TrajectoryState, ancestry, given_length, is_foreign, path_length, prompt_length, reached
from .records import PackedSegment, encode

_TOKEN_BYTES = 8
"""Bytes of a token in a message: its id and its log-probability."""
_RUN_BYTES = 28
"""Upper bound of the bytes of one run of tokens in a message: three integers of up to 9 bytes, and their header."""
_TRAJECTORY_BYTES = 64
"""Upper bound of the bytes of a trajectory in a message besides its tokens and runs: numbers, scores and headers. The
same bound holds for the bytes of a group besides its prompt and trajectories."""


def packed(track: TrajectoryState) -> list[PackedTrajectory]:
    """Return the samples of a scored trajectory as the trainer receives them."""
    assert track.score is not None
    if track.episode is not None:
        return [_packed_sample(track, runs) for runs in track.episode.samples]
    return [
        PackedTrajectory(
            id=track.id,
            group=track.group.created.group,
            tokens=b"".join(segment.tokens for segment in track.segments),
            logprobs=b"".join(segment.logprobs for segment in track.segments),
            runs=tuple(
                (sum(segment.end - segment.offset for segment in segments), *version)
                for version, segments in groupby(track.segments, _version)
            ),
            reward=track.score.reward,
            training=track.score.training,
            prompt_length=prompt_length(track),
            extras=join(_extras(track)),
            truncated=track.truncated,
        )
    ]


def content_digest(place: str, tracks: Iterable[TrajectoryState]) -> str:
    """Return the digest of the text ``place`` and of all values of these trajectories that a step trains on."""
    content_hash = hashlib.sha256(place.encode())
    for track in tracks:
        content: object = (track.id, track.group.created.prompt, track.segments, track.score, track.truncated)
        content_hash.update(encode(content if track.episode is None else packed(track)))
    return content_hash.hexdigest()


def token_ages(number: int, tracks: Iterable[TrajectoryState]) -> dict[int, int]:
    """Return by token age how many trained tokens of these trajectories have this age at step ``number``."""
    counts: Counter[int] = Counter()
    for track in tracks:
        for step, tokens in _trained(track):
            counts[number - 1 - step] += tokens
    return dict(counts)


def trained_tokens(track: TrajectoryState) -> int:
    """Return the number of trained tokens of a trajectory."""
    return sum(tokens for _, tokens in _trained(track))


def truncated_samples(track: TrajectoryState) -> list[bool]:
    """Return for each sample of a complete trajectory whether the limit on its length cut an answer in it."""
    if track.episode is None:
        return [track.truncated]
    return [any(run.truncated for run in runs) for runs in track.episode.samples]


def message_bytes(tracks: Iterable[TrajectoryState], prompt: bytes) -> int:
    """Return an upper bound of the bytes that a complete group with this prompt takes in a batch or part."""
    size = len(prompt) + _TRAJECTORY_BYTES
    for track in tracks:
        if track.episode is None:
            runs = sum(1 for _ in groupby(track.segments, _version))
            size += _TOKEN_BYTES * track.length + _RUN_BYTES * runs + _TRAJECTORY_BYTES + joined_bytes(_extras(track))
        else:
            for sample in track.episode.samples:  # ``masked`` lists some of the runs again
                size += _TOKEN_BYTES * sum(run.length for run in sample) + 2 * _RUN_BYTES * len(sample)
                size += _TRAJECTORY_BYTES + joined_bytes((run.extras, run.length) for run in sample)
    return size


def _extras(track: TrajectoryState) -> list[tuple[PackedExtras, int]]:
    """Return the extras of each segment of a trajectory with the number of its tokens; empty if there are no extras."""
    if not any(segment.extras for segment in track.segments):
        return []
    return [(segment.extras, segment.end - segment.offset) for segment in track.segments]


def _trained(track: TrajectoryState) -> Iterator[tuple[int, int]]:
    """Yield (step of the weights, number of tokens) for each run of consecutive trained tokens."""
    if track.episode is None:
        for segment in track.segments:
            yield segment.step, segment.end - segment.offset
    else:
        for sample in track.episode.samples:
            for run in sample:
                if run.counts:
                    yield run.version[0], run.length


def _packed_sample(track: TrajectoryState, runs: list[Run]) -> PackedTrajectory:
    assert track.score is not None
    first = next(index for index, run in enumerate(runs) if run.counts)
    prompt, rest = runs[:first], runs[first:]
    masked: list[tuple[int, int]] = []
    at = 0
    for run in rest:
        if not run.counts:
            masked.append((at, run.length))
        at += run.length
    extras, before = join((run.extras, run.length) for run in runs), sum(run.length for run in prompt)
    return PackedTrajectory(
        id=track.id,
        group=track.group.created.group,
        tokens=b"".join(run.tokens for run in rest),
        logprobs=b"".join(run.logprobs for run in rest),
        runs=tuple((run.length, *run.version) for run in rest),
        reward=track.score.reward,
        training=track.score.training,
        prompt_length=sum(run.length for run in prompt),
        prompt=b"".join(run.tokens for run in prompt),
        masked=tuple(masked),
        extras=cut(extras, before, before + at),
        truncated=any(run.truncated for run in runs),
    )


def leaves(track: TrajectoryState) -> list[TrajectoryState]:
    """Return the leaves among the counted turns of an episode, in the order of their numbers."""
    episode = track.episode
    assert episode is not None
    counted = [episode.turns[number] for number in sorted(episode.counted)]
    sampled = [turn for turn in counted if turn.length and not is_foreign(turn) and not turn.unused]
    shared = reached(sampled, episode.turns)
    return [turn for turn in sampled if shared.get(turn.id) != path_length(turn)]


def samples(track: TrajectoryState) -> tuple[list[list[Run]], int]:
    """Return the samples of a finished episode, each as its runs of tokens in order, and the drift of tokens.

    The drift is the number of trained tokens in segments for which the trainer reads another path than the engine had.
    """
    assert track.episode is not None
    result: list[list[Run]] = []
    counted: Counter[int] = Counter()
    """Number of sampled tokens of each turn that are already in an earlier sample."""
    differing: dict[tuple[int, int], int] = {}
    """For each segment (turn, end) whose digest was compared, its number of tokens if the digests differ, otherwise
    0."""
    for leaf in leaves(track):
        runs: list[Run] = []
        path = PathDigest()
        for turn, own in ancestry(leaf, track.episode.turns):
            assert turn.turn is not None
            first = len(runs)
            if given := turn.turn.given[: 4 * own]:
                runs.append(_given(given))
            end = max(0, own - given_length(turn.turn))
            if is_foreign(turn):
                runs += [_given(run.tokens) for run in _runs(turn.segments, 0, end, counts=False)]
            else:
                before = counted[turn.id]
                runs += _runs(turn.segments, 0, min(before, end), counts=False)
                runs += _runs(turn.segments, before, end, counts=True)
                counted[turn.id] = max(before, end)
                if turn.truncated and end == turn.length:
                    runs[-1] = replace(runs[-1], truncated=True)
            segments = {segment.end: segment for segment in turn.segments if segment.digest and not is_foreign(turn)}
            at = -min(own, given_length(turn.turn))
            for run in runs[first:]:
                path.add_packed(run.tokens)
                at += run.length
                if (segment := segments.get(at)) is not None:
                    differing[turn.id, at] = 0 if path.value() == segment.digest else at - segment.offset
        result.append(runs)
    return result, sum(differing.values())


def _given(tokens: bytes) -> Run:
    return Run(tokens, bytes(len(tokens)), NOT_SAMPLED, False)


def _runs(segments: Iterable[PackedSegment], start: int, end: int, *, counts: bool) -> Iterator[Run]:
    """Yield the sampled tokens from ``start`` to ``end`` as one run for each segment."""
    for segment in segments:
        first, last = max(start, segment.offset), min(end, segment.end)
        if first < last:
            first, last = first - segment.offset, last - segment.offset
            packed = slice(4 * first, 4 * last)
            extras = cut(segment.extras, first, last)
            yield Run(segment.tokens[packed], segment.logprobs[packed], _version(segment), counts, extras)


def _version(segment: PackedSegment) -> tuple[int, int]:
    return segment.step, segment.incarnation
