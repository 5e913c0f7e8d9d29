"""The requests of trainer, rollouts and reward replica to a store in this process, reduced to a few functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rrl.core.run_spec import ExtraSpec
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.trajectories.batches import Batch, decode
from rrl.roles.trajectories.steps.figures import step_figures
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Done,
    Item,
    Leased,
    PackedPart,
    PartBound,
    Prompt,
    Score,
    Scoring,
    Segment,
    TrainedStep,
)

GROUP = 2
BATCH = 2
MAX_NEW = 4


def incarnation_of(name: str, incarnation: int = 1) -> Incarnation:
    return Incarnation(ReplicaId(name), incarnation)


ROLLOUT, OTHER = incarnation_of("rollout/0"), incarnation_of("rollout/1")
REWARD, TRAINER = incarnation_of("reward/0"), incarnation_of("trainer/0")
ALL = (ROLLOUT, OTHER, REWARD, TRAINER)


def prompt(index: int) -> Prompt:
    return Prompt(item=index * 10, tokens=(2, 3, index % 7))


def open_store(folder: Path, members: Sequence[Incarnation] = ALL, **changed: Any) -> Store:
    settings: dict[str, Any] = {
        "group_size": GROUP,
        "groups_per_batch": BATCH,
        "max_ahead_batches": 1,
        "max_new_tokens": MAX_NEW,
        "next_prompt": prompt,
        **changed,
    }
    store = Store(folder, **settings)
    if members:
        store.update_membership(members)
    return store


def segment(
    trajectory: int, offset: int = 0, tokens: Sequence[int] = (5, 1), step: int = 0, marked: bool = False
) -> Segment:
    """Return a segment; if it is ``marked``, with the extra of a job that declares :data:`MARKS`."""
    extras = {"mark": mark(trajectory, offset, tokens)} if marked else {}
    return Segment(trajectory, offset, tuple(tokens), (-0.5,) * len(tokens), Version(step, 1), b"", extras)


MARKS = {"mark": ExtraSpec(per_token=3)}
"""An extra that tells each token of each trajectory from all others."""


def mark(trajectory: int, offset: int, tokens: Sequence[int]) -> bytes:
    return b"".join(bytes((trajectory % 256, (offset + i) % 256, tokens[i])) for i in range(len(tokens)))


def lease(
    store: Store,
    who: Incarnation = ROLLOUT,
    at_most: int = 1000,
    holding: Sequence[int] | None = (),
    weights: int | None = None,
) -> tuple[Item, ...]:
    answer = store.lease(who, at_most, holding, weights)
    assert isinstance(answer, Leased), answer
    return answer.items


def generate(
    store: Store,
    who: Incarnation = ROLLOUT,
    at_most: int = 1000,
    tokens: Sequence[int] = (5, 1),
    weights: int | None = None,
    marked: bool = False,
) -> list[int]:
    """Lease up to ``at_most`` trajectories, append ``tokens`` to each as far as they fit, and finish them.

    ``weights`` is the step of the version of the weights; None means step 0.
    """
    items = lease(store, who, at_most, (), weights)
    segments = []
    for item in items:
        offset = MAX_NEW - item.max_new
        if item.max_new:
            segments.append(segment(item.trajectory, offset, tokens[: item.max_new], weights or 0, marked))
    done = [item.trajectory for item in items]
    assert store.append(who, segments, done) == Done()
    store.flush()
    return done


def score(store: Store, who: Incarnation = REWARD, at_most: int = 1000, reward: float = 1.0) -> list[int]:
    answer = store.lease_scoring(who, at_most)
    assert isinstance(answer, Scoring), answer
    scores = [Score(item.trajectory, reward, reward / 2) for item in answer.items]
    assert store.post_scores(who, scores) == Done()
    store.flush()
    return [item.trajectory for item in answer.items]


def bind(store: Store, number: int, who: Incarnation = TRAINER) -> Batch:
    answer = store.part(who, number)
    assert isinstance(answer, PartBound), answer
    store.flush()
    return decode(answer.part)


def manifest(number: int) -> dict[str, Any]:
    return {"folder": f"checkpoints/{number}", "files": [{"name": "model", "digest": f"d{number}"}]}


def commit(
    store: Store,
    batch: Batch | PackedPart,
    who: Incarnation = TRAINER,
    metrics: dict[str, float] | None = None,
    earlier: Sequence[Batch | PackedPart] = (),
) -> Done:
    """Commit a step together with ``earlier`` steps, which have no metrics."""
    trained = [TrainedStep(one.number, one.digest, {}) for one in earlier]
    answer = store.commit(who, batch.number, manifest(batch.number), batch.digest, metrics, trained)
    assert isinstance(answer, Done), answer
    store.flush()
    return answer


def figures_of(store: Store, number: int, *, ages_limited: bool = False) -> dict[str, float]:
    """Return the figures that the store adds to the metrics of a bound step."""
    return step_figures(store._state, number, ages_limited=ages_limited, ignores_truncated=False)


def train(
    store: Store,
    number: int,
    who: Incarnation = TRAINER,
    tokens: Sequence[int] = (5, 1),
    at_most: int = 1000,
    weights: int | None = None,
    metrics: dict[str, float] | None = None,
) -> Batch:
    """Generate up to ``at_most`` trajectories, score them, and bind and commit step ``number``."""
    generate(store, at_most=at_most, tokens=tokens, weights=weights)
    score(store)
    batch = bind(store, number, who)
    commit(store, batch, who, metrics)
    return batch
