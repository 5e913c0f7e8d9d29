"""Client of the trajectory store: one method per request, each repeated unchanged until it is answered.

A restart of the store is invisible to the caller, except for the time it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from ...core.types import STORE, Incarnation, Version
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.messages import Peers
from .episodes.requests import (
    EndTurn,
    EpisodeItem,
    EpisodeTurns,
    FailAttempt,
    FinishEpisode,
    Follow,
    GetEpisode,
    LeasedEpisodes,
    LeaseEpisodes,
    MarkUnused,
    OpenEpisode,
    OpenTurn,
    PostReward,
    TurnOpened,
    TurnTokens,
)
from .episodes.requests import StoreAnswer as Answer
from .episodes.requests import StoreRequest as Request
from .types import (
    Append,
    Bound,
    Commit,
    CommittedState,
    Denied,
    Done,
    FollowVersions,
    GetBatch,
    GetCommitted,
    GetMetrics,
    GetPart,
    Item,
    Leased,
    LeaseScoring,
    LeaseWork,
    NewestVersion,
    NotReady,
    PackedBatch,
    PackedPart,
    PartBound,
    PostScores,
    Sampling,
    Score,
    Scoring,
    Segment,
    StepMetrics,
    StoredMetrics,
    ToScore,
    TrainedStep,
)

_RESEND_AFTER_S = 5.0
"""Seconds between the end of a request's ``wait`` and its first repetition. Requests are repeated because an answer can
be lost although the connection stays open. Further repetitions follow at growing intervals."""
_RETRY_PAUSE_S = 0.1
"""Seconds before a request that the store answered with NotReady is repeated."""
FOLLOW_WAIT_S = 10.0
"""Seconds after which a rollout repeats its request for the newest version, to learn which replicas serve that version
now. This interval is short compared with the 120 s for which a pull looks for a source. If 1,024 rollouts repeat the
request at this interval, the store spends 3 ms of each second on the requests (30 us per request, measured)."""
_WEIGHTS_POLL_S = 0.01
"""Seconds between two checks, inside this process, whether newer weights have arrived."""


class Refused(RuntimeError):
    """The store denied a request, and will deny it again if it is repeated."""


class Fenced(Refused):
    """This incarnation is no longer current and must exit."""


class FencedAttempt(Refused):
    """The attempt at an episode is over, and the code that makes the attempt must end."""


class NoAnswer(Refused):
    """An episode cannot be finished, because its agent has no complete answer of the model."""


def store_address(peers: Peers | None) -> Address | None:
    """Return the address of the store according to ``peers``, or None if they contain no address of it.

    The epoch of the address is the store's incarnation number, so that answers of an older store are ignored.
    """
    peer = peers.peers.get(STORE) if peers is not None else None
    return Address(peer.incarnation.number, peer.listen_address) if peer is not None and peer.listen_address else None


class Appended(NamedTuple):
    """The result of an append."""

    lost: tuple[int, ...]
    """The trajectories that are no longer leased to this incarnation; it must stop working on them."""
    leased: tuple[Item, ...]
    """The trajectories that were leased with the append. They may include a trajectory in ``lost`` that was leased to
    this incarnation again; its item then has the prefix that the store has."""


class TrajectoryClient:
    """Client of the store for one incarnation.

    It belongs to the asyncio loop in which it is created, and :meth:`run` must run as a task of that loop. Every method
    that sends a request raises TimeoutError if the store does not answer within ``timeout`` seconds (plus the request's
    ``wait``). It raises Fenced if this incarnation must exit, and Refused for any other denial.

    Args:
        keys: Keys of the run.
        incarnation: Sender of the requests.
        find_store: Returns the current address of the store; None while it is unknown.
        timeout: Seconds for which a request is repeated.
        weights: Returns the step of the newest weights that this process has; None if it has no weights or uses none.
    """

    def __init__(
        self,
        keys: RunKeys,
        incarnation: Incarnation,
        find_store: Callable[[], Address | None],
        *,
        timeout: float = 600.0,
        weights: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._incarnation = incarnation
        self._weights = weights
        self._timeout = timeout
        self._requested_back: set[int] = set()
        """Trajectories that another rollout should continue, according to the store. Each is handed over with its next
        segment."""
        self._dialer = Dialer(keys, Answer, find_store)

    async def run(self) -> None:
        """Connect to the store, and reconnect whenever the connection is lost, until closed or cancelled."""
        await self._dialer.run()

    def refresh_address(self) -> None:
        """Look up the store's address again, because it may have changed."""
        self._dialer.refresh_address()

    async def close(self) -> None:
        """Close the connection."""
        await self._dialer.close()

    async def lease(self, at_most: int, wait: float = 1.0, holding: Sequence[int] | None = ()) -> tuple[Item, ...]:
        """Lease up to ``at_most`` unfinished trajectories.

        A trajectory that is leased to this incarnation already but not in ``holding`` is returned again. If ``holding``
        is None, no trajectory is returned again. The result is empty if within ``wait`` seconds there is no work for
        which this process's weights are new enough.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            weights, left = self._weights(), max(0.0, until - loop.time())
            held = None if holding is None else tuple(holding)
            answer = await self._ask(LeaseWork(self._incarnation, at_most, left, held, weights), left)
            if not isinstance(answer, Leased):
                return ()
            while answer.outdated and self._weights() == weights and loop.time() < until:
                await asyncio.sleep(_WEIGHTS_POLL_S)
            if not answer.outdated or loop.time() >= until:
                return answer.items

    async def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Append segments, which are durable on return.

        If the store has decided that another rollout should continue a trajectory, the trajectory is handed over with
        its next segment.

        Returns:
            The trajectories that are no longer leased to this incarnation; the caller must stop working on them.
        """
        return (await self.append_and_lease(segments, finished, 0)).lost

    async def append_and_lease(
        self, segments: Sequence[Segment], finished: Sequence[int], at_most: int, holding: Iterable[int] = ()
    ) -> Appended:
        """Append segments like :meth:`append`, and lease further trajectories in the same round trip.

        Args:
            segments: The new tokens.
            finished: The trajectories that are complete with these segments.
            at_most: Maximum number of trajectories to lease. If 0, none is leased, and ``holding`` is ignored.
            holding: The trajectories that this process works on after the append, as in :meth:`lease`.
        """
        lost: set[int] = set()
        appended = {segment.trajectory for segment in segments}
        self._requested_back.difference_update(finished)
        leaving = self._requested_back & appended
        self._requested_back -= leaving
        while True:
            remaining = tuple(segment for segment in segments if segment.trajectory not in lost)
            ended = tuple(trajectory for trajectory in finished if trajectory not in lost)
            handed_over = tuple(sorted(leaving - lost))
            lease = None
            if at_most:
                held = tuple(sorted(set(holding).difference(lost, leaving)))
                lease = LeaseWork(self._incarnation, at_most, 0.0, held, self._weights())
            answer = await self._send_until_decided(Append(self._incarnation, remaining, ended, handed_over, lease))
            if not isinstance(answer, Denied):
                break
            if not answer.lost:
                self._raise(answer)
            lost.update(answer.lost)
        leased: tuple[Item, ...] = ()
        if isinstance(answer, Done):
            self._requested_back, leased = set(answer.hand_back), answer.leased
        return Appended(tuple(sorted(lost | leaving)), leased)

    async def lease_scoring(self, at_most: int, wait: float = 1.0, holding: Sequence[int] = ()) -> tuple[ToScore, ...]:
        """Lease up to ``at_most`` complete trajectories for scoring; ``holding`` means the same as in :meth:`lease`."""
        answer = await self._ask(LeaseScoring(self._incarnation, at_most, wait, tuple(holding)), wait)
        return answer.items if isinstance(answer, Scoring) else ()

    async def post_scores(
        self, scores: Sequence[Score], failed: dict[int, str] | None = None, faulty: Sequence[int] = ()
    ) -> int:
        """Post scores, which are durable on return.

        Args:
            scores: One score per trajectory.
            failed: Each trajectory that cannot be scored, and the reason; its group is dropped.
            faulty: Trajectories in ``failed`` for which the scorer's own code is at fault.

        Returns:
            The number of groups that faults of the scorer have dropped, if the reward role must end because of these
                faults; otherwise 0.
        """
        request = PostScores(self._incarnation, tuple(scores), failed or {}, tuple(faulty))
        answer = await self._decide(request)
        return answer.faulty_groups if isinstance(answer, Done) else 0

    async def batch(self, number: int, wait: float = 5.0) -> PackedBatch | None:
        """Return the batch of step ``number``, or None if no groups can be bound to it within ``wait`` seconds."""
        answer = await self._ask(GetBatch(self._incarnation, number, wait), wait)
        return answer.batch if isinstance(answer, Bound) else None

    async def part(self, number: int, index: int, wait: float = 5.0) -> PackedPart | None:
        """Return part ``index`` of step ``number``, or None if it cannot be made within ``wait`` seconds."""
        answer = await self._ask(GetPart(self._incarnation, number, index, wait), wait)
        return answer.part if isinstance(answer, PartBound) else None

    async def commit(
        self,
        number: int,
        manifest: dict[str, Any],
        digest: str,
        metrics: dict[str, float] | None = None,
        earlier: Sequence[TrainedStep] = (),
    ) -> tuple[StepMetrics, ...]:
        """Commit step ``number`` and the ``earlier`` steps since the last commit; durable on return.

        ``manifest`` names the files of the checkpoint, and ``digest`` identifies the batch of step ``number``. Returns
        the metrics of these steps in order. The store has added its own figures to them.
        """
        request = Commit(self._incarnation, number, manifest, digest, metrics or {}, tuple(earlier))
        answer = await self._ask(request, 0.0)
        assert isinstance(answer, Done), answer
        return (*answer.earlier, StepMetrics(number, answer.metrics))

    async def metrics(self, after: int) -> tuple[StepMetrics, ...]:
        """Return stored metrics of committed steps after ``after``, in order.

        One answer need not contain all of them. For the steps that follow, pass the last returned step as ``after``.
        """
        answer = await self._ask(GetMetrics(self._incarnation, after), 0.0)
        assert isinstance(answer, StoredMetrics), answer
        return answer.commits

    async def committed(self) -> CommittedState:
        """Return the newest commit. Afterwards no older incarnation of this trainer can commit."""
        answer = await self._ask(GetCommitted(self._incarnation), 0.0)
        assert isinstance(answer, CommittedState), answer
        return answer

    async def follow_versions(
        self,
        weight_address: str | None,
        weight_version: Version | None,
        known: Version | None,
        wait: float = FOLLOW_WAIT_S,
    ) -> NewestVersion | None:
        """Report the version that this process serves, and wait for a version other than ``known``.

        Returns:
            The newest version, or None if the store knows no version. If no other version arrives within ``wait``
                seconds, the returned version is still ``known``, perhaps with other sources.
        """
        answer = await self._ask(FollowVersions(self._incarnation, weight_address, weight_version, known, wait), wait)
        return answer if isinstance(answer, NewestVersion) else None

    # ── episodes ───────────────────────────────────────────────────────────────────────────────────────────────────
    # Every method that names an attempt raises FencedAttempt if that attempt is over.
    async def lease_episodes(
        self, at_most: int, wait: float = 1.0, holding: Sequence[int] = ()
    ) -> tuple[EpisodeItem, ...]:
        """Lease up to ``at_most`` episodes, each for a new attempt; return () if there is none within ``wait`` seconds.

        An episode whose newest attempt this incarnation makes, but which is not in ``holding``, is returned again.
        """
        answer = await self._ask(LeaseEpisodes(self._incarnation, at_most, wait, tuple(holding)), wait)
        return answer.items if isinstance(answer, LeasedEpisodes) else ()

    async def open_turn(
        self,
        episode: int,
        attempt: int,
        request: str,
        parent: int | None,
        offset: int,
        given: Sequence[int],
        max_new: int,
        messages: Sequence[str] = (),
        options: str = "",
        sampling: Sampling | None = None,
    ) -> int:
        """Durably open a turn or take over a recorded turn, and return its number.

        The arguments are the fields of :class:`.episodes.requests.OpenTurn`.
        """
        opened = await self._decide(
            OpenTurn(
                self._incarnation,
                episode,
                attempt,
                request,
                parent,
                offset,
                tuple(given),
                max_new,
                tuple(messages),
                options,
                sampling,
            )
        )
        assert isinstance(opened, TurnOpened), opened
        return opened.turn

    async def end_turn(self, turn: int, length: int) -> None:
        """Durably end the answer of a turn after ``length`` sampled tokens; later tokens are discarded."""
        await self._decide(EndTurn(self._incarnation, turn, length))

    async def mark_unused(self, turn: int, undelivered: bool) -> None:
        """Durably report that the answer of a turn was not used (:class:`.episodes.requests.MarkUnused`)."""
        await self._decide(MarkUnused(self._incarnation, turn, undelivered))

    async def follow(self, turn: int, offset: int, wait: float = 5.0) -> TurnTokens | None:
        """Return the sampled tokens of a turn from ``offset`` on.

        Returns None if within ``wait`` seconds no such token is sampled and the turn does not end.
        """
        answer = await self._ask(Follow(self._incarnation, turn, offset, wait), wait)
        return answer if isinstance(answer, TurnTokens) else None

    async def get_episode(self, episode: int, holding: Sequence[int] = (), call: str = "") -> EpisodeTurns:
        """Return the newest attempt at an episode, its turns and the recorded turns, except turns in ``holding``.

        ``call`` is the digest of the call that is about to be prepared (:class:`.episodes.requests.GetEpisode`).
        """
        turns = await self._decide(GetEpisode(self._incarnation, episode, tuple(holding), call))
        assert isinstance(turns, EpisodeTurns), turns
        return turns

    async def finish_episode(self, episode: int, attempt: int, reward: float | None, later: bool = False) -> None:
        """Durably end an episode with its reward.

        If the reward is None, the reward role scores the last answer. With ``later``, :meth:`post_reward` provides the
        reward instead.
        """
        await self._decide(FinishEpisode(self._incarnation, episode, attempt, reward, later))

    async def post_reward(self, episode: int, attempt: int, reward: float) -> None:
        """Durably post the reward of an episode that was finished with ``later``."""
        await self._decide(PostReward(self._incarnation, episode, attempt, reward))

    async def open_episode(self, request: str, wait: float = 1.0) -> EpisodeItem | None:
        """Lease an episode for an agent outside of the run; None if there is none within ``wait`` seconds.

        The same ``request`` gets the same episode as long as its attempt lasts.
        """
        answer = await self._ask(OpenEpisode(self._incarnation, request, wait), wait)
        return answer.items[0] if isinstance(answer, LeasedEpisodes) and answer.items else None

    async def fail_attempt(self, episode: int, attempt: int, why: str) -> None:
        """Durably report that an attempt failed for a reason that has nothing to do with the model."""
        await self._decide(FailAttempt(self._incarnation, episode, attempt, why))

    async def _decide(self, request: Request) -> Answer:
        """Send a request that must be carried out, and raise an exception if it is denied."""
        answer = await self._send_until_decided(request)
        if isinstance(answer, Denied):
            self._raise(answer)
        return answer

    async def _ask(self, request: Request, wait: float) -> Answer:
        answer = await self._send(request, wait)
        if isinstance(answer, Denied):
            self._raise(answer)
        return answer

    async def _send_until_decided(self, request: Request) -> Answer:
        """Send a request that must be carried out, and repeat it while the answer is NotReady."""
        async with asyncio.timeout(self._timeout):
            while isinstance(answer := await self._send(request, 0.0), NotReady):
                await asyncio.sleep(_RETRY_PAUSE_S)
            return answer

    async def _send(self, request: Request, wait: float) -> Answer:
        """Send a request, and send it again if no answer arrives in time.

        A repeated request has the same id, so even a late answer to the first request, such as a large batch, is
        accepted.
        """
        answer: Answer = await self._dialer.request(request, wait + self._timeout, wait + _RESEND_AFTER_S)
        return answer

    def _raise(self, denied: Denied) -> NoReturn:
        attempts = FencedAttempt if denied.fenced_attempt else NoAnswer if denied.no_answer else Refused
        kind = Fenced if denied.fenced else attempts
        raise kind(denied.why)
