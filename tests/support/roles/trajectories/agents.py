"""The requests of agents to a store in this process, reduced to a few functions: lease, open turns, and finish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rrl.core.task_spec import EvalSpec
from rrl.core.types import Incarnation
from rrl.roles.trajectories.durable.records import AnsweredBy
from rrl.roles.trajectories.episodes.requests import (
    EpisodeItem,
    EpisodeTurns,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    LeaseEpisodes,
    OpenTurn,
    TurnOpened,
    TurnTokens,
)
from rrl.roles.trajectories.episodes.rules import EpisodeSettings
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.steps.evaluations import EvaluationSettings
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Denied, Done, Prompt, Sampling
from rrl.tests.support.roles.trajectories.crew import ALL, MAX_NEW, ROLLOUT, incarnation_of, lease, open_store, segment

AGENTS, OTHER_AGENTS = incarnation_of("agents/0"), incarnation_of("agents/1")
CREW = (*ALL, AGENTS, OTHER_AGENTS)


def open_agents_store(folder: Path, members: Sequence[Incarnation] = CREW, **changed: Any) -> Store:
    settings = {"episodes": EpisodeSettings(), "next_prompt": lambda item: Prompt(item * 10, ()), **changed}
    return open_store(folder, members, **settings)


def evaluated(agents: AnsweredBy, samples: int = 2, temperature: float = 0.5, count: int = 3) -> dict[str, Any]:
    """Return the setting of :func:`open_agents_store` for evaluations of every second step of six."""
    spec = EvalSpec(every=2, count=count, samples=samples, temperature=temperature)
    return {"evaluations": EvaluationSettings(spec, 6, 0, count, lambda item: Prompt(item, ()), MAX_NEW, agents)}


def reopened(store: Store, folder: Path, members: Sequence[Incarnation] = CREW, **changed: Any) -> Store:
    """Open the store again twice, so that the second store reads a log that the first one has rewritten."""
    for _ in range(2):
        store.flush()
        store.close()
        store = open_agents_store(folder, members, **changed)
    return store


def episodes(
    store: Store, at_most: int = 1000, who: Incarnation = AGENTS, holding: Sequence[int] = ()
) -> list[EpisodeItem]:
    leased = answer(store, LeaseEpisodes(who, at_most, holding=tuple(holding)))
    assert isinstance(leased, LeasedEpisodes), leased
    return list(leased.items)


def ask(
    store: Store,
    item: EpisodeItem,
    request: str = "1",
    given: Sequence[int] = (2, 3),
    parent: int | None = None,
    offset: int = 0,
    max_new: int = 4,
    who: Incarnation = AGENTS,
    sampling: Sampling | None = None,
) -> int:
    """Open a turn and return its number."""
    prompt = (request, parent, offset, tuple(given), max_new, f"hash {request}")
    opened = answer(store, OpenTurn(who, item.episode, item.attempt, *prompt, sampling=sampling))
    assert isinstance(opened, TurnOpened), opened
    return opened.turn


def sample(store: Store, turn: int, tokens: Sequence[int], step: int = 0, who: Incarnation = ROLLOUT) -> None:
    """Lease all work, and complete a turn with ``tokens`` sampled with the weights of a step."""
    lease(store, who)
    assert store.append(who, [segment(turn, 0, tokens, step)], (turn,)) == Done()


def turn(
    store: Store,
    item: EpisodeItem,
    given: Sequence[int],
    tokens: Sequence[int],
    parent: int | None = None,
    offset: int = 0,
    step: int = 0,
    who: Incarnation = AGENTS,
) -> int:
    """Open and complete a turn, and return its number."""
    number = ask(store, item, f"{given} {parent} {offset}", given, parent, offset, who=who)
    sample(store, number, tokens, step)
    return number


def finish(store: Store, item: EpisodeItem, reward: float | None = 1.0, who: Incarnation = AGENTS) -> None:
    assert answer(store, FinishEpisode(who, item.episode, item.attempt, reward)) == Done()


def fail(store: Store, item: EpisodeItem, why: str = "broken tool", who: Incarnation = AGENTS) -> None:
    assert answer(store, FailAttempt(who, item.episode, item.attempt, why)) == Done()


def follow(store: Store, number: int, offset: int = 0, who: Incarnation = AGENTS) -> TurnTokens:
    tokens = answer(store, Follow(who, number, offset))
    assert isinstance(tokens, TurnTokens), tokens
    return tokens


def turns_of(store: Store, episode: int, who: Incarnation = AGENTS, holding: Sequence[int] = ()) -> EpisodeTurns:
    turns = answer(store, GetEpisode(who, episode, tuple(holding)))
    assert isinstance(turns, EpisodeTurns), turns
    return turns


def is_over(given: object) -> bool:
    """Return whether the store has answered that the attempt is over."""
    return isinstance(given, Denied) and given.fenced_attempt and not given.fenced
