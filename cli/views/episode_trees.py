"""Episodes as values for views and JSON, from the state of the trajectory store. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from ...roles.trajectories.durable.groups import (
    EpisodeState,
    Group,
    TrajectoryState,
    ancestry,
    given_length,
    is_foreign,
    path_length,
)
from ...roles.trajectories.durable.state import State
from ...roles.trajectories.durable.trained_samples import leaves


class TurnNode(Struct, frozen=True):
    """A turn within its episode."""

    number: int
    """Position among the turns of the episode, from 1."""
    id: int
    """Number in the store."""
    parent: int | None
    """``number`` of the turn whose path this turn continues; None if this turn begins a path."""
    offset: int
    """Number of tokens of the parent's path that the turn's own path keeps."""
    parent_length: int
    """Number of tokens of the parent's path. If ``offset`` is less, the turn leaves that path."""
    given: int
    """Number of tokens that the turn was given as context."""
    sampled: int
    finished: bool
    foreign: bool
    """True if the turn was sampled from another policy, or its call is not trained: the turn's answer is context."""
    recorded: bool
    """True if an earlier attempt made the turn, and the newest attempt has not replayed it."""
    versions: tuple[int, ...]
    """Steps of the weights that sampled the turn, in order."""
    trained: int | None
    """Number of sampled tokens that are trained; None while the episode is not finished, and in an evaluation."""
    agent: str
    """Name of the agent: the ``model`` of its call."""


class Episode(Struct, frozen=True):
    """An episode, with the turns of its newest attempt."""

    episode: int
    group: int
    item: int
    split: str
    """``eval`` for an episode of an evaluation, which is never trained, otherwise ``train``."""
    state: str
    """``waiting`` (for an agent), ``at work``, ``unscored`` (finished, and about to be scored), ``awaits reward`` (from
    the agent), ``scored``, or ``trained``."""
    attempt: int
    failures: int
    """Number of attempts that count as failed."""
    holder: str | None
    """Incarnation that makes the newest attempt, or has made it. For an agent outside of the run: the incarnation of
    the endpoint's replica that opened the episode."""
    outside: bool
    """True if an agent outside of the run makes the newest attempt."""
    step: int | None
    """Training step that the episode's group is bound to; None while the group is not bound."""
    reward: float | None
    """With rewards by name, their mean."""
    rewards: dict[str, float]
    """Rewards by the names of agents; empty if all agents have the same reward."""
    branches: int
    """Number of paths that are not the beginning of another path: the samples of a finished episode."""
    given: int
    sampled: int
    trained: int | None
    """Number of trained tokens; None while the episode is not finished, and in an evaluation."""
    versions: tuple[int, ...]
    turns: tuple[TurnNode, ...]


def episodes_of(state: State) -> list[Episode]:
    """Return the episodes that the store's log has, in the order of their numbers.

    Of the open evaluation these are the episodes that an agent has begun. The store deletes them with its end.
    """
    evaluated = (one.episode for one in state.evaluations.answers.values() if one.episode is not None)
    tracks = [
        *(track for _, group in sorted(state.groups.items()) for track in group.trajectories),
        *(track for track in evaluated if track.episode is not None and track.episode.attempt),
    ]
    return [_episode(state, track.group, track, track.episode) for track in tracks if track.episode is not None]


def _episode(state: State, group: Group, track: TrajectoryState, episode: EpisodeState) -> Episode:
    turns = _turns(track, episode)
    return Episode(
        episode=track.id,
        group=group.created.group,
        item=group.created.item,
        split="eval" if group.is_evaluated else "train",
        state=_state_of(state, group, track, episode),
        attempt=episode.attempt,
        failures=episode.failures,
        holder=None if episode.holder is None else str(episode.holder),
        outside=episode.request is not None,
        step=group.bound,
        reward=None if track.score is None else track.score.reward,
        rewards={} if track.score is None else track.score.agents,
        branches=len(_leaves(track, episode)),
        given=sum(turn.given for turn in turns),
        sampled=sum(turn.sampled for turn in turns),
        trained=sum(turn.trained or 0 for turn in turns) if track.finished and not group.is_evaluated else None,
        versions=_versions(episode.turns.values()),
        turns=turns,
    )


def _state_of(state: State, group: Group, track: TrajectoryState, episode: EpisodeState) -> str:
    if track.finished:
        if track.score is None:
            return "awaits reward" if episode.awaits_reward else "unscored"
        return "trained" if group.bound is not None and group.bound <= state.committed else "scored"
    return "at work" if track.is_at_work else "waiting"


def _turns(track: TrajectoryState, episode: EpisodeState) -> tuple[TurnNode, ...]:
    numbers = {id: number for number, id in enumerate(sorted(episode.turns), start=1)}
    trained = _trained(track, episode) if track.finished and not track.group.is_evaluated else None
    return tuple(_turn(episode.turns[id], episode, numbers, trained) for id in numbers)


def _turn(
    turn: TrajectoryState, episode: EpisodeState, numbers: dict[int, int], trained: Counter[int] | None
) -> TurnNode:
    created = turn.turn
    assert created is not None
    parent = None if created.parent is None else episode.turns[created.parent]
    return TurnNode(
        number=numbers[turn.id],
        id=turn.id,
        parent=None if parent is None else numbers[parent.id],
        offset=created.offset,
        parent_length=0 if parent is None else path_length(parent),
        given=given_length(created),
        sampled=turn.length,
        finished=turn.finished,
        foreign=is_foreign(turn),
        recorded=turn.id in episode.recorded,
        versions=_versions([turn]),
        trained=None if trained is None else trained[turn.id],
        agent=created.agent,
    )


def _leaves(track: TrajectoryState, episode: EpisodeState) -> list[TrajectoryState]:
    """Return the leaves of the tree of an episode's turns.

    Until the episode is finished, the tree consists of all turns of its newest attempt.
    """
    if not track.finished:
        episode = msgspec.structs.replace(episode, counted=tuple(turn.id for turn in episode.made))
    return leaves(msgspec.structs.replace(track, episode=episode))


def _trained(track: TrajectoryState, episode: EpisodeState) -> Counter[int]:
    """Return the number of trained tokens of each turn of a finished episode."""
    trained: Counter[int] = Counter()
    for leaf in leaves(track):
        for turn, own in ancestry(leaf, episode.turns):
            assert turn.turn is not None
            if is_foreign(turn) or (episode.agents and turn.turn.agent not in episode.agents):
                continue
            trained[turn.id] = max(trained[turn.id], own - given_length(turn.turn))
    return trained


def _versions(turns: Iterable[TrajectoryState]) -> tuple[int, ...]:
    return tuple(sorted({segment.step for turn in turns for segment in turn.segments}))
