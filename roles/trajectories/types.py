"""Trajectories as values, and the messages between workers and the trajectory store.

The store listens, and every worker connects to it. Workers do not exchange trajectories with each other. Every request
carries the incarnation of its sender, so that the store can refuse requests of fenced incarnations. Every request is
idempotent: a client that receives no answer sends the same request again.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from msgspec import Struct

from ...core.types import Incarnation, Version
from .extras import PackedExtras

A = TypeVar("A", covariant=True)
"""Type of the answer to a request."""
P = ParamSpec("P")
"""Fields of a request besides its sender."""
NOT_SAMPLED = -1, 0
"""Training step and incarnation number that stand for the version of a token that was given, not sampled."""


class PathDigest:
    """Digest of the tokens of a trajectory from its beginning on; tokens are added as they are sampled."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, tokens: Iterable[int]) -> None:
        """Add tokens, each of which fits into an int32."""
        self.add_packed(array("i", tokens))

    def add_packed(self, tokens: bytes | array[int]) -> None:
        """Add tokens that are packed as int32."""
        self._hash.update(tokens)

    def value(self) -> bytes:
        """Return the digest (8 bytes) of all tokens so far."""
        return self._hash.digest()


class Segment(Struct, frozen=True, array_like=True):
    """Tokens of one trajectory, sampled under one weight version, starting ``offset`` tokens after the prompt."""

    trajectory: int
    offset: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each of ``tokens`` under the policy that sampled it, stored as float32."""
    version: Version
    digest: bytes = b""
    """:class:`PathDigest` of all tokens of the trajectory, with its prompt, up to the end of this segment, as the
    engine had them. The store compares it with what the trainer reads. Empty if the engine computes no digest."""
    extras: dict[str, bytes] = {}
    """Bytes for the trainer by the names that ``[sampling.extras]`` declares, which rrl does not read. An extra
    ``per_token`` is in each segment and has the declared number of bytes for each of ``tokens``, in their order. An
    extra ``per_trajectory`` is in at most one segment of a trajectory."""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How to sample one turn, where this differs from the job. Each field has the meaning that it has in vLLM.

    If ``temperature`` is None, the job's temperature applies. Any other field that is None changes nothing.
    """

    temperature: float | None = None
    """With 0, the most likely token is taken."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    constraint: str | None = None
    """Grammar that masks the tokens, in Lark's form as the library llguidance reads it."""


class Item(Struct, frozen=True):
    """A trajectory leased to a rollout: its prompt, and the segments that earlier incarnations appended."""

    trajectory: int
    group: int
    prompt: tuple[int, ...]
    so_far: tuple[Segment, ...] = ()
    max_new: int = 0
    """Number of tokens that may still be appended."""
    sampling: Sampling | None = None
    """How to sample the trajectory; None for the sampling of the job."""


class ToScore(Struct, frozen=True):
    """A complete trajectory leased to a reward replica. ``item`` is the index of its prompt in the task."""

    trajectory: int
    item: int
    tokens: tuple[int, ...]
    evaluation: bool = False
    """True for an answer of an evaluation; ``item`` is then the index in the evaluation's task."""


class Score(Struct, frozen=True, array_like=True):
    """The score of a trajectory: ``reward`` is reported, ``training`` is what the trainer learns from."""

    trajectory: int
    reward: float
    training: float
    parts: dict[str, float] = {}
    """The rewards of which ``reward`` is the weighted sum, by name ([task.rewards]); of an episode with rewards by
    name, these rewards."""
    agents: dict[str, float] = {}
    """What the trainer learns from, by agent, of an episode with rewards by name: ``reward`` and ``training`` are its
    mean. Only the store sets it."""

    @property
    def is_finite(self) -> bool:
        """False if one of the rewards is infinite or not a number."""
        return all(map(math.isfinite, (self.reward, self.training, *self.parts.values())))


class Trajectory(Struct, frozen=True):
    """A complete, scored trajectory as the trainer reads it.

    ``tokens``, ``logprobs`` and ``versions`` have one entry per token. In a job with agents, an object is one sample of
    an episode, and several samples may have the same ``id``, score and tokens.
    """

    id: int
    group: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    reward: float
    training: float
    masked: tuple[tuple[int, int], ...] = ()
    """Runs of ``tokens`` that must not be trained, as (index, count): runs of given tokens, whose version is
    ``Version(*NOT_SAMPLED)``, and runs of sampled tokens that another sample of the episode trains."""
    extras: Mapping[str, bytes] = {}
    """What the rollouts appended as :attr:`Segment.extras`, joined: for each of ``tokens`` its bytes, zeros for given
    tokens; of an extra ``per_trajectory`` in several turns of an episode, the last. Empty in a gang if another member
    trains on the trajectory."""
    truncated: bool = False
    """True if the limit on its length cut the answer or, of an episode, an answer in the sample."""
    agent: str = ""
    """Of a group with rewards by name, the agent whose tokens the sample trains, with its reward: compare only samples
    of the same agent. Empty for any other group."""


class PackedTrajectory(Struct, frozen=True, array_like=True, gc=False):
    """A :class:`Trajectory` in a message: 8 bytes per token. The prompt of its group is in :class:`PackedPart`.

    ``tokens`` is int32 and ``logprobs`` float32, in the byte order of the machine. In a share ``tokens``, ``logprobs``,
    ``prompt`` and ``extras`` are empty if the trajectory is in the share of another rank.
    """

    id: int
    group: int
    tokens: bytes
    logprobs: bytes
    runs: tuple[tuple[int, int, int], ...]
    """Consecutive tokens that were sampled under one version, as (token count, training step, incarnation number)."""
    reward: float
    training: float
    prompt_length: int
    """Number of tokens of the prompt."""
    prompt: bytes = b""
    """The prompt of a sample of an episode, as int32: the tokens before its first trained token. Empty for all other
    trajectories."""
    masked: tuple[tuple[int, int], ...] = ()
    """The same runs of ``tokens`` as in :class:`Trajectory`: those that must not be trained, as (index, count)."""
    extras: PackedExtras = ()
    truncated: bool = False
    agent: str = ""

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return sum(count for count, _, _ in self.runs)


By = Literal["group", "sequence"]
"""What a share of a part has: whole groups, or any sequences."""


class Share(Struct, frozen=True, array_like=True):
    """The share of the rank ``rank`` of ``world`` ranks that divide each part (:func:`.partition.shares_of`)."""

    rank: int
    world: int
    by: By = "group"


class PackedPart(Struct, frozen=True, array_like=True):
    """A :class:`.batches.Part`, or a share of it, in a message.

    ``prompts`` has the prompt of each of ``groups``, as int32. In a share, the prompt is empty if all trajectories of
    the group are in the shares of other ranks.
    """

    number: int
    groups: tuple[int, ...]
    digest: str
    prompts: tuple[bytes, ...]
    trajectories: tuple[PackedTrajectory, ...]
    index: int = 0
    last: bool = True
    stale: int = 0
    max_age: int = 0
    unscored: int = 0


class Prompt(Struct, frozen=True):
    """The prompt that the task made from item ``item``, as tokens."""

    item: int
    tokens: tuple[int, ...]
    source: str = ""
    """Name of the prompt file that the item is from ([[task.files]]); empty if the task has only one source."""


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Leased(Struct, frozen=True, tag=True):
    """Answer to :class:`LeaseWork`."""

    items: tuple[Item, ...]
    outdated: bool = False
    """True if there is work, but the rollout's weights are too old for it: the rollout must wait for newer weights."""


class Scoring(Struct, frozen=True, tag=True):
    """Answer to :class:`LeaseScoring`."""

    items: tuple[ToScore, ...]


class StepMetrics(Struct, frozen=True):
    """Metrics that the trainer reported for one step."""

    step: int
    metrics: dict[str, float]


class Done(Struct, frozen=True, tag=True):
    """Answer to a request that was carried out and is durable."""

    faulty_groups: int = 0
    """For :class:`PostScores`: number of groups that faults of the scorer have dropped, if these are more than half of
    the newest groups; otherwise 0. If it is not 0, the reward role must end."""
    metrics: dict[str, float] = {}
    """Metrics of the step that a :class:`Commit` names: those of the request, and figures of the store."""
    earlier: tuple[StepMetrics, ...] = ()
    """Metrics of the earlier steps that a :class:`Commit` names: those of the request, and figures of the store."""
    leased: tuple[Item, ...] = ()
    """For an :class:`Append` with a request for work: the trajectories that were leased."""


class PartBound(Struct, frozen=True, tag=True):
    """Answer to :class:`GetPart`."""

    part: PackedPart


class NotReady(Struct, frozen=True, tag=True):
    """Answer after which the sender must repeat its request later.

    Example reasons: too few groups are complete, or the manager has not reported the sender to the store yet.
    """


class Denied(Struct, frozen=True, tag=True):
    """Answer that refuses a request as a whole. The same request would be refused again.

    Examples: a fenced incarnation, a batch out of order, a digest that is not the binding's.
    """

    why: str
    fenced: bool = False
    """True if the incarnation is no longer current (fenced) and must exit."""
    lost: tuple[int, ...] = ()
    """Trajectories of an :class:`Append` that are not leased to this incarnation. The request may be repeated without
    them."""
    fenced_attempt: bool = False
    """True if the attempt that the request names is over, because it failed, a later attempt has begun, or the episode
    was finished or dropped. The code that makes the attempt must end."""
    no_answer: bool = False
    """True if an episode cannot be finished, because its agent has no complete answer of the model."""
    wrong_argument: bool = False
    """True if the program that sent the request has passed a wrong argument."""


class CommittedState(Struct, frozen=True, tag=True):
    """Answer to :class:`GetCommitted`. Both fields are None before the first commit."""

    number: int | None
    manifest: dict[str, Any] | None


class StoredMetrics(Struct, frozen=True, tag=True):
    """Answer to :class:`GetMetrics`: consecutive steps in order.

    To read the steps that follow, repeat the request with the last step of this answer.
    """

    commits: tuple[StepMetrics, ...]


class NewestVersion(Struct, frozen=True, tag=True):
    """The newest version that any current process serves, and all processes that serve it."""

    version: Version
    sources: tuple[tuple[tuple[Version, ...], tuple[Incarnation, ...]], ...]
    """The processes that serve it, together with those that serve the same versions, and these versions."""


class Balance(Struct, frozen=True, tag=True):
    """Answer to :class:`AwaitBalance`."""

    short_s: float
    """Time (s) that the trainer would wait in the step; 0 if the step is balanced. inf if it is not known."""
    alone_s: float
    """Time (s) that the rollouts without the guests need for the tokens of a step; inf if there are none, or if their
    pace is not known yet."""


Answer = (
    Leased | Scoring | Done | PartBound | NotReady | Denied | CommittedState | StoredMetrics | NewestVersion | Balance
)


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Request(Struct, Generic[A], frozen=True):
    """A request to the store. ``A`` is the type of its answer; it includes None if the request has a ``wait``.

    A request with a ``wait`` (s) is answered with :class:`NotReady` if it has no result within this time; the client
    returns None then. A request without a ``wait`` is repeated until it is carried out or denied.
    """

    incarnation: Incarnation
    """Sender of the request."""


Kind = Callable[Concatenate[Incarnation, P], Request[A]]
"""A class of requests."""


class LeaseWork(Request[Leased | None], frozen=True, tag=True):
    """Request of a rollout for up to ``at_most`` trajectories.

    Answered with :class:`Leased`, which is empty if there is no work within ``wait`` seconds. ``holding`` lists the
    trajectories that the rollout works on already. Any other trajectory leased to this incarnation is sent again,
    because the answer that contained it was lost. If ``holding`` is None, nothing is sent again. A rollout passes None
    if it leases and ends other work while this request waits, because a list would then be outdated. ``weights`` is the
    training step of the newest weights that the rollout has. The store does not lease a trajectory whose new tokens
    would be too old when they are trained. If ``weights`` is None, no trajectory is withheld.
    """

    at_most: int
    wait: float = 1.0
    holding: tuple[int, ...] | None = ()
    weights: int | None = None


class Append(Request[Done], frozen=True, tag=True):
    """Request of a rollout to append segments, which are durable once it is answered with :class:`Done`.

    A segment that the store already has (same trajectory, offset and content) changes nothing. ``finished`` lists the
    trajectories that are complete with these segments. ``lease`` is a request for work that the store serves directly
    after the append, without a wait, so that both need one round trip and one flush. With ``hands_over`` all leases of
    the rollout end after the append, and its waiting requests for work are answered without work.
    """

    segments: tuple[Segment, ...]
    finished: tuple[int, ...] = ()
    lease: LeaseWork | None = None
    hands_over: bool = False


class LeaseScoring(Request[Scoring | None], frozen=True, tag=True):
    """Request of a reward replica for complete trajectories.

    Answered with :class:`Scoring`. ``holding`` has the same meaning as in :class:`LeaseWork`.
    """

    at_most: int
    wait: float = 1.0
    holding: tuple[int, ...] = ()


class PostScores(Request[Done], frozen=True, tag=True):
    """Scores of a reward replica, which are durable once the replica is answered with :class:`Done`.

    The first score of a trajectory is final. ``failed`` maps each trajectory that cannot be scored to the reason; its
    group is dropped rather than scored zero. ``faulty`` lists the trajectories in ``failed`` for which the scorer's own
    code is at fault: its exception was not caused by a service, by storage or by a lack of memory.
    """

    scores: tuple[Score, ...]
    failed: dict[int, str] = {}
    faulty: tuple[int, ...] = ()


class GetPart(Request[PartBound | None], frozen=True, tag=True):
    """Request of a trainer for part ``index`` of step ``number``, or for its whole batch if ``index`` is None.

    Answered with :class:`PartBound` if it is bound, or enough groups are complete to bind it as the next one; with
    :class:`NotReady` after ``wait`` seconds; or with :class:`Denied`. If the step has some parts already, its whole
    batch begins with their groups. With ``share``, the part has the tokens of this share only, and all other values of
    all trajectories. All ranks of an incarnation must divide the parts in the same way.
    """

    number: int
    index: int | None = None
    wait: float = 5.0
    share: Share | None = None


class TrainedStep(Struct, frozen=True, array_like=True):
    """A step that the trainer has finished: the digest of its batch, and its metrics."""

    number: int
    digest: str
    metrics: dict[str, float]


class Commit(Request[Done], frozen=True, tag=True):
    """Request of a trainer to commit, in one record, a checkpoint and the consumption of all batches up to ``number``.

    Accepted only from the current incarnation, and for a step at most ``[roles.trainer] checkpoint_every`` steps after
    the committed one; may be repeated. ``manifest`` names the checkpoint: its folder relative to the run directory, and
    its files with their digests. ``digest`` is that of the batch of step ``number``. The store keeps ``metrics`` for a
    manager that is not running at the time. ``earlier`` are the steps between the committed step and ``number``.
    """

    number: int
    manifest: dict[str, Any]
    digest: str
    metrics: dict[str, float] = {}
    earlier: tuple[TrainedStep, ...] = ()


class GetCommitted(Request[CommittedState], frozen=True, tag=True):
    """Request of a trainer for the newest commit. Answered with :class:`CommittedState`.

    Afterwards no older incarnation of this trainer can commit.
    """


class AwaitBalance(Request[Balance], frozen=True, tag=True):
    """Request of a trainer that has trained no part of step ``number`` yet, and could lend its GPUs.

    :mod:`.steps.forecast` says when the step is balanced. Answered with :class:`Balance` as soon as the step is
    balanced, at the latest after ``wait`` seconds; or with :class:`Denied`. ``train_s`` is the time (s) that the
    trainer needs for a step, and ``back_s`` the time until it can train after it takes the GPUs back; both are 0 as
    long as they are not known. With a ``wait`` the trainer has lent its GPUs; without, it asks whether it should. The
    step after the last one stands for the wait for the last evaluation.
    """

    number: int
    train_s: float
    back_s: float
    wait: float = 0.0


class GetMetrics(Request[StoredMetrics], frozen=True, tag=True):
    """Request of a trainer for stored metrics of the steps after ``after``. Answered with :class:`StoredMetrics`."""

    after: int


class FollowVersions(Request[NewestVersion | None], frozen=True, tag=True):
    """Report of the weight versions that a trainer or rollout serves, and request for the newest version.

    Answered with :class:`NewestVersion` as soon as the newest version is not ``known``, or the membership changes while
    the sender does not serve that version, and otherwise after ``wait`` seconds, so that the sender learns of new
    sources. If the store knows no version by then, it answers :class:`NotReady`. Only the latest request of an
    incarnation is answered.
    """

    weight_versions: tuple[Version, ...] = ()
    """Complete versions that the sender serves, the newest first."""
    known: Version | None = None
    """Newest version that the sender has learned of from the store."""
    wait: float = 10.0
    """Seconds after which the sender learns which replicas serve the version now. This interval is short compared with
    the 120 s for which a pull looks for a source. If 1,024 rollouts repeat the request at this interval, the store
    spends 9 ms of each second on the requests (90 us per request, measured; an answer has 30 kB)."""


StepRequest = (
    LeaseWork
    | Append
    | LeaseScoring
    | PostScores
    | GetPart
    | AwaitBalance
    | Commit
    | GetCommitted
    | GetMetrics
    | FollowVersions
)
