"""Trajectories as values, and the conversation of workers with the store.

A star: the store listens, everybody dials it, nobody else speaks of trajectories. Every request carries the life that
asks, so that what a fenced incarnation still sends is refused at the store. Every request is idempotent: a client that
got no answer asks again, with the same words.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ...core.types import Incarnation, Version
from ...transport.messages import WeightSource


class Segment(Struct, frozen=True, array_like=True):
    """Tokens of one trajectory, sampled under one weight version, starting at ``offset`` tokens after the prompt."""

    trajectory: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """of the sampled tokens under the policy that sampled them; same length; kept as float32"""
    version: Version


class Item(Struct, frozen=True):
    """One trajectory leased to a rollout: the prompt, and what earlier (perhaps dead) lives already made of it."""

    trajectory: int
    group: int
    prompt: tuple[int, ...]
    so_far: tuple[Segment, ...] = ()
    max_new: int = 0
    """tokens that it may still grow by"""


class ToScore(Struct, frozen=True):
    """One complete trajectory leased to a reward replica. ``item`` is the task's index of the prompt."""

    trajectory: int
    item: int
    tokens: tuple[int, ...]


class Score(Struct, frozen=True, array_like=True):
    """``reward`` is the task's own score (reported); ``training`` is what the trainer learns from."""

    trajectory: int
    reward: float
    training: float


class Trajectory(Struct, frozen=True):
    """A complete, scored trajectory as the trainer gets it. ``tokens``, ``logprobs``, ``versions`` are parallel."""

    id: int
    group: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    reward: float
    training: float


class Batch(Struct, frozen=True):
    """Complete GRPO groups bound to trainer step ``number`` for ever. ``digest`` names the binding."""

    number: int
    groups: tuple[int, ...]
    digest: str
    trajectories: tuple[Trajectory, ...]
    stale: int = 0
    """groups of the run that had been dropped for the age of their tokens before this batch was chosen"""
    max_age: int = 0
    """age of the oldest token of this and all earlier batches of the run, in weight versions"""


class PackedTrajectory(Struct, frozen=True, array_like=True, gc=False):
    """A :class:`Trajectory` on its way, 8 bytes a token; its prompt is its group's. ``tokens`` as int32, ``logprobs``
    as float32, in this machine's byte order; both empty where another member of a gang has them."""

    id: int
    group: int
    tokens: bytes
    logprobs: bytes
    runs: tuple[tuple[int, int, int], ...]
    """tokens in a row that were sampled under one version: how many, its step, its incarnation"""
    reward: float
    training: float

    @property
    def length(self) -> int:
        return sum(count for count, _, _ in self.runs)


class PackedBatch(Struct, frozen=True, array_like=True):
    """A :class:`Batch` on its way. ``prompts`` are those of ``groups``, as int32."""

    number: int
    groups: tuple[int, ...]
    digest: str
    prompts: tuple[bytes, ...]
    trajectories: tuple[PackedTrajectory, ...]
    stale: int = 0
    max_age: int = 0


class Prompt(Struct, frozen=True):
    """What a task gives the store: the ``item``-th prompt as tokens."""

    item: int
    tokens: tuple[int, ...]


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────
class LeaseWork(Struct, frozen=True, tag=True):
    """A rollout asks for up to ``at_most`` trajectories. Answered ``Leased``; empty after ``wait`` s without work.

    ``holding``: what it works on already. Whatever else is leased to this life is given again: an answer got lost.
    ``weights``: step of the newest weights that it holds; nothing is begun with weights that will be too old when it is
    trained on. None: not told, and nothing is held back."""

    incarnation: Incarnation
    at_most: int
    wait: float = 1.0
    holding: tuple[int, ...] = ()
    weights: int | None = None


class Append(Struct, frozen=True, tag=True):
    """Segments, durable once answered ``Done``; idempotent by (trajectory, offset). ``finished`` are complete now."""

    incarnation: Incarnation
    segments: tuple[Segment, ...]
    finished: tuple[int, ...] = ()


class LeaseScoring(Struct, frozen=True, tag=True):
    """A reward replica asks for complete trajectories. Answered ``Scoring``. ``holding`` as in ``LeaseWork``."""

    incarnation: Incarnation
    at_most: int
    wait: float = 1.0
    holding: tuple[int, ...] = ()


class PostScores(Struct, frozen=True, tag=True):
    """Scores, durable once answered ``Done``; the first score of a trajectory stands.

    ``failed``: trajectories that cannot be scored, and why. Their groups are dropped: nothing is scored zero for it."""

    incarnation: Incarnation
    scores: tuple[Score, ...]
    failed: dict[int, str] = {}


class GetBatch(Struct, frozen=True, tag=True):
    """The trainer asks for the batch of step ``number``: the existing binding unchanged, else a new one once there are
    enough complete groups. Answered ``Bound``, or ``NotYet`` after ``wait`` s, or ``Denied``."""

    incarnation: Incarnation
    number: int
    wait: float = 5.0


class Commit(Struct, frozen=True, tag=True):
    """One record commits the checkpoint and the consumption of batch ``number``. Repeatable.

    Accepted only from the current incarnation and for ``number`` = committed + 1. ``manifest`` names the checkpoint
    (folder relative to the run directory, files with digests). ``metrics`` are for people; the store keeps them for a
    manager that does not live now."""

    incarnation: Incarnation
    number: int
    manifest: dict[str, Any]
    digest: str
    metrics: dict[str, float] = {}


class GetCommitted(Struct, frozen=True, tag=True):
    """What counts? Answered ``CommittedState``."""

    incarnation: Incarnation


class GetMetrics(Struct, frozen=True, tag=True):
    """Metrics of the commits after step ``after``, as far as they are kept. Answered ``KeptMetrics``."""

    incarnation: Incarnation
    after: int


class FollowVersions(Struct, frozen=True, tag=True):
    """A trainer or a rollout reports which weight version it serves, and asks which one is the newest. Answered
    ``NewestVersion`` as soon as that is another one than ``known``, and after ``wait`` s in any case, so that its
    holders are told again; ``NotYet`` after ``wait`` s where no version is known.

    Of one life the latest request counts; an earlier one that still waits is not answered any more."""

    incarnation: Incarnation
    weight_address: str | None = None
    """``<pipe>://host:port`` where ``holds`` can be pulled"""
    weight_version: Version | None = None
    known: Version | None = None
    """the newest version that the asker has heard of from the store"""
    wait: float = 10.0


Request = (
    LeaseWork | Append | LeaseScoring | PostScores | GetBatch | Commit | GetCommitted | GetMetrics | FollowVersions
)


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Leased(Struct, frozen=True, tag=True):
    items: tuple[Item, ...]
    outdated: bool = False
    """nothing may be begun with the asker's weights: newer ones come first"""


class Scoring(Struct, frozen=True, tag=True):
    items: tuple[ToScore, ...]


class Done(Struct, frozen=True, tag=True):
    pass


class Bound(Struct, frozen=True, tag=True):
    batch: PackedBatch


class NotReady(Struct, frozen=True, tag=True):
    """Ask again: not enough complete groups, or nobody has told the store of this life yet."""


class Denied(Struct, frozen=True, tag=True):
    """Refused for good, all of it: an older incarnation, a batch out of order, a digest that is not the binding's."""

    why: str
    fenced: bool = False
    """this life is not believed: it must leave"""
    lost: tuple[int, ...] = ()
    """of an ``Append``: these trajectories are not this life's (any more); the rest may be said again without them"""


class CommittedState(Struct, frozen=True, tag=True):
    """``number`` is None before the first commit."""

    number: int | None
    manifest: dict[str, Any] | None


class StepMetrics(Struct, frozen=True):
    step: int
    metrics: dict[str, float]


class StoredMetrics(Struct, frozen=True, tag=True):
    """In the order of the steps, without gaps; those that follow are asked for with the last one's step."""

    commits: tuple[StepMetrics, ...]


class NewestVersion(Struct, frozen=True, tag=True):
    """The newest version that the current trainer published, and replicas that serve it: all that are known where they
    are few, never none."""

    version: Version
    sources: tuple[WeightSource, ...]


Answer = Leased | Scoring | Done | Bound | NotReady | Denied | CommittedState | StoredMetrics | NewestVersion
