"""The data that a trainer reads of a group: the samples of its trajectories, their digest and their tokens' ages.

A trajectory of a job without agents is one sample. An episode has a sample for each leaf of the tree of its counted
turns (:attr:`.groups.EpisodeState.counted`). Only a turn that has sampled tokens, is not foreign and was used can be a
leaf. It is a leaf if no other such turn's path begins with its whole path. A sample consists of the path of its leaf. A
sampled token counts in one sample only: the first sample, in the order of the turns, that contains it. Given tokens
never count, and the answers of foreign turns are given tokens.

If one episode of a group has rewards by name, a leaf has a sample for each agent with a reward that has counting tokens
in its path. It ends with the last of them, and only this agent's tokens count.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from ...models.rewards import ANY_AGENT, Reward
from ..extras import PackedExtras, cut, join, joined_bytes
from ..types import NOT_SAMPLED, PackedTrajectory, PathDigest, Score
from .groups import (
    EpisodeState,
    Run,
    TrajectoryState,
    ancestry,
    given_length,
    is_foreign,
    path_length,
    prompt_length,
    reached,
)
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
        agents = [agent for agent, _ in sample_rewards(track)]
        return [_packed_sample(track, *each) for each in zip(track.episode.samples, agents, strict=True)]
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


def score_of(track: TrajectoryState, reward: Reward) -> Score:
    """Return the score of a finished episode; with rewards by name, the mean of those that its agents get."""
    if not isinstance(reward, dict):
        return Score(track.id, reward, reward)
    named = ((agent, reward.get(agent, reward.get(ANY_AGENT))) for agent in _agents(track))
    agents = {agent: value for agent, value in named if value is not None}
    mean = sum(value / len(agents) for value in agents.values())  # fmean raises OverflowError for large numbers
    return Score(track.id, mean, mean, {name: agents[name] for name in agents if name in reward}, agents)


def divide_by_agent(track: TrajectoryState) -> None:
    """Divide the samples of a scored episode by agent; without rewards by name, each agent gets the same reward."""
    episode, score = track.episode, track.score
    assert episode is not None
    assert score is not None
    episode.agents = score.agents or dict.fromkeys(_agents(track), score.training)
    episode.samples = [
        _of_agent(runs, agent)
        for runs in episode.samples
        for agent in sorted({run.agent for run in runs if run.counts} & episode.agents.keys())
    ]


def _agents(track: TrajectoryState) -> list[str]:
    """Return the agents of a finished episode for which tokens were sampled that may be trained."""
    assert track.episode is not None
    return sorted({turn.turn.agent for turn in trainable_turns(track.episode) if turn.turn is not None})


def _of_agent(runs: list[Run], agent: str) -> list[Run]:
    last = max(index for index, run in enumerate(runs) if run.counts and run.agent == agent)
    return [run if run.agent == agent else replace(run, counts=False, truncated=False) for run in runs[: last + 1]]


def sample_rewards(track: TrajectoryState) -> list[tuple[str, float]]:
    """Return for each sample of a scored trajectory its agent and what the trainer learns from.

    The agent is empty if the group has no rewards by name.
    """
    assert track.score is not None
    if track.episode is None or not track.episode.agents:
        return [("", track.score.training)] * (1 if track.episode is None else len(track.episode.samples))
    agents = [next(run.agent for run in runs if run.counts) for runs in track.episode.samples]
    return [(agent, track.episode.agents[agent]) for agent in agents]


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
                size += max(len(run.agent.encode()) for run in sample)
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


def _packed_sample(track: TrajectoryState, runs: list[Run], agent: str) -> PackedTrajectory:
    assert track.score is not None
    assert track.episode is not None
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
        reward=track.score.agents.get(agent, track.score.reward),
        training=track.episode.agents.get(agent, track.score.training),
        prompt_length=sum(run.length for run in prompt),
        prompt=b"".join(run.tokens for run in prompt),
        masked=tuple(masked),
        extras=cut(extras, before, before + at),
        truncated=any(run.truncated for run in runs),
        agent=agent,
    )


def trainable_turns(episode: EpisodeState) -> list[TrajectoryState]:
    """Return the counted turns of an episode whose answers may be trained, in the order of their numbers."""
    counted = [episode.turns[number] for number in sorted(episode.counted)]
    return [turn for turn in counted if turn.length and not is_foreign(turn) and not turn.unused]


def leaves(track: TrajectoryState) -> list[TrajectoryState]:
    """Return the leaves among the counted turns of an episode, in the order of their numbers."""
    episode = track.episode
    assert episode is not None
    sampled = trainable_turns(episode)
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
                runs += [_given(run.tokens) for run in _runs(turn, 0, end, counts=False)]
            else:
                before = counted[turn.id]
                runs += _runs(turn, 0, min(before, end), counts=False)
                runs += _runs(turn, before, end, counts=True)
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


def _runs(turn: TrajectoryState, start: int, end: int, *, counts: bool) -> Iterator[Run]:
    """Yield the sampled tokens from ``start`` to ``end`` as one run for each segment."""
    assert turn.turn is not None
    agent = turn.turn.agent
    for segment in turn.segments:
        first, last = max(start, segment.offset), min(end, segment.end)
        if first < last:
            first, last = first - segment.offset, last - segment.offset
            packed = slice(4 * first, 4 * last)
            extras = cut(segment.extras, first, last)
            tokens, logprobs = segment.tokens[packed], segment.logprobs[packed]
            yield Run(tokens, logprobs, _version(segment), counts, extras, agent=agent)


def _version(segment: PackedSegment) -> tuple[int, int]:
    return segment.step, segment.incarnation
