"""The messages between the agents role and the trajectory store about episodes and their turns.

An *episode* is one trajectory of a group in a job with agents. An *attempt* is one execution of the agent's code for an
episode, numbered from 1. A *turn* is one sampled answer within an attempt. Requests are idempotent, and name the
attempt: once a later attempt has begun, or the episode has ended, requests of the older attempt are answered with
:class:`..types.Denied` whose ``fenced_attempt`` is set.
"""

from __future__ import annotations

from msgspec import Struct

from ....core.types import Version
from ...models.rewards import Reward
from ..types import Answer, Done, Request, Sampling, StepRequest


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────
class EpisodeItem(Struct, frozen=True):
    """An episode that is leased to an agents replica, or to an endpoint for an agent outside of the run.

    ``item`` is the index of its prompt in the task.
    """

    episode: int
    group: int
    item: int
    attempt: int
    evaluation: bool = False
    """True for an episode of an evaluation; ``item`` is then the index in the evaluation's task."""


class LeasedEpisodes(Struct, frozen=True, tag=True):
    """Answer to :class:`LeaseEpisodes` and :class:`OpenEpisode`."""

    items: tuple[EpisodeItem, ...]


class TurnOpened(Struct, frozen=True, tag=True):
    """Answer to :class:`OpenTurn`: the number of the turn."""

    turn: int


class TurnTokens(Struct, frozen=True, tag=True):
    """Answer to :class:`Follow`: sampled tokens, all durable, with one log-probability and version each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    finished: bool
    """True if no token follows the tokens of this answer."""


class Turn(Struct, frozen=True):
    """A turn of an episode; the fields are those of :class:`OpenTurn`."""

    id: int
    parent: int | None
    offset: int
    given: tuple[int, ...]
    sampled: tuple[int, ...]
    finished: bool
    conversation: str
    attempt: int
    """Attempt that opened the turn; a later attempt may have taken the turn over."""
    request: str
    options: str = ""
    sampling: Sampling | None = None
    agent: str = ""


class EpisodeTurns(Struct, frozen=True, tag=True):
    """Answer to :class:`GetEpisode`: number of the newest attempt, and its turns in the order of their numbers.

    ``recorded`` are the turns of earlier attempts whose process died, in the same order. If the newest attempt repeats
    the request of a recorded turn, with equal parent, tokens, options and sampling, it takes this turn over.
    """

    attempt: int
    turns: tuple[Turn, ...]
    recorded: tuple[Turn, ...] = ()
    undelivered: tuple[int, ...] = ()
    """The turns of the request's ``call`` whose answers no agent has got or continued, and no endpoint delivers now."""


EpisodeAnswer = LeasedEpisodes | TurnOpened | TurnTokens | EpisodeTurns
StoreAnswer = Answer | EpisodeAnswer
"""Every answer of the store."""


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────
class LeaseEpisodes(Request[LeasedEpisodes | None], frozen=True, tag=True):
    """Request of an agents replica for up to ``at_most`` episodes, each a new attempt.

    Answered with :class:`LeasedEpisodes`, which is empty if there is none within ``wait`` seconds. ``holding`` lists
    the episodes that the replica works on already. If this incarnation makes the newest attempt at any other episode,
    the answer with that episode was lost, so it is sent again with the same attempt.
    """

    at_most: int
    wait: float = 1.0
    holding: tuple[int, ...] = ()


class OpenTurn(Request[TurnOpened], frozen=True, tag=True):
    """Request to sample an answer. The turn is durable once the request is answered with :class:`TurnOpened`.

    The tokens before the answer are the first ``offset`` tokens of the path of turn ``parent``, and then ``given``.
    Without a parent, ``offset`` is 0. ``request`` identifies the agent's call. If the call is repeated within the
    attempt, the answer names the same turn.
    """

    episode: int
    attempt: int
    request: str
    parent: int | None
    offset: int
    given: tuple[int, ...]
    max_new: int
    """Maximum number of tokens to sample."""
    conversation: str = ""
    """Hash of all messages of the request; empty for a plain prompt. The store only keeps it, for
    :class:`GetEpisode`."""
    options: str = ""
    """What the endpoint needs to show the answer again exactly as the agent saw it (stop texts, tools). The store only
    keeps this text, for :class:`GetEpisode`."""
    sampling: Sampling | None = None
    """The sampling of a *foreign* turn, which is not trained; None for any other turn. The answer of a foreign turn
    counts as given tokens. A turn that is not trained may still be sampled as the job says: ``Sampling()``."""
    agent: str = ""
    """Name of the agent within the episode: the model that its request names."""


class EndTurn(Request[Done], frozen=True, tag=True):
    """Request to end an answer after its first ``length`` sampled tokens, because they contain a stop text.

    Tokens that were sampled later are discarded. The end is durable once the request is answered with
    :class:`..types.Done`. The rollout learns of the end with its next append.
    """

    turn: int
    length: int


class MarkAnswer(Request[Done], frozen=True, tag=True):
    """Report whether an agent has got the whole answer of a turn, or that it has made the same call again.

    Unless another turn continues the answer, it is trained only if it was delivered, and was not asked for again. The
    report is void once the turn is opened again, and if another incarnation has opened an undelivered turn later. It is
    durable once it is answered with :class:`..types.Done`. Without a report, an answer counts as delivered as long as
    the incarnation that has asked for it is current.
    """

    turn: int
    delivered: bool
    """True if the end of the answer was written to the agent's connection."""
    repeated: bool = False
    """True if the agent has then made the same call again."""


class Follow(Request[TurnTokens | None], frozen=True, tag=True):
    """Request for the sampled tokens of a turn from ``offset`` on.

    Answered with :class:`TurnTokens` as soon as one of these tokens is durable or the turn is finished, and otherwise
    with :class:`..types.NotReady` after ``wait`` seconds.
    """

    turn: int
    offset: int
    wait: float = 5.0


class GetEpisode(Request[EpisodeTurns], frozen=True, tag=True):
    """Request for the newest attempt at an episode, the turns of this attempt, and the recorded turns.

    Answered with :class:`EpisodeTurns`.
    """

    episode: int
    holding: tuple[int, ...] = ()
    """Turns that the sender has completely. The answer leaves these turns out; otherwise the answers about a long
    episode would grow with the square of its length."""
    call: str = ""
    """Digest of the call that the sender is about to prepare; empty if it is about to prepare none. If the sender ends
    before the agent waits for tokens again, this call may be the cause."""


class FinishEpisode(Request[Done], frozen=True, tag=True):
    """Request to end an episode with a result; turns that are not complete by then are not sampled any further.

    A turn gets the reward of its agent; the turns of an agent without a reward are not trained. If ``reward`` is None,
    a reward replica scores the last answer. An attempt that ends without any answer counts as
    failed. If an agent outside of the run makes it, the request is denied instead.
    """

    episode: int
    attempt: int
    reward: Reward | None = None
    later: bool = False
    """True if the reward comes with a :class:`PostReward`. If the reward comes too late, the group is dropped."""
    failed: bool = False
    """True for an attempt that has failed and is scored nevertheless; denied if it has no answer."""


class PostReward(Request[Done], frozen=True, tag=True):
    """The reward of an episode that was finished with ``later``. The first reward is final, but may be sent again."""

    episode: int
    attempt: int
    reward: Reward


class OpenEpisode(Request[LeasedEpisodes | None], frozen=True, tag=True):
    """Request for an episode for an agent outside of the run.

    Answered with :class:`LeasedEpisodes` of one episode, or of none if there is none within ``wait`` seconds. The same
    ``request`` gets the same episode until the attempt at this episode is over. The attempt outlives the incarnation
    that sent the request, and fails if it takes longer than the job's timeout.
    """

    request: str
    wait: float = 1.0
    evaluation: bool = False
    """True for an episode of an evaluation; only a job whose agents are all outside of the run has such episodes."""


class FailAttempt(Request[Done], frozen=True, tag=True):
    """Report that an attempt failed, for a reason that has nothing to do with the model.

    The episode is attempted again by any agents replica or, after too many failures, dropped together with its group.
    """

    episode: int
    attempt: int
    why: str


EpisodeRequest = (
    LeaseEpisodes
    | OpenEpisode
    | OpenTurn
    | EndTurn
    | MarkAnswer
    | Follow
    | GetEpisode
    | FinishEpisode
    | PostReward
    | FailAttempt
)
StoreRequest = StepRequest | EpisodeRequest
"""Every request that the store serves."""
