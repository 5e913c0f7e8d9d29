"""The store as its users see it: one method a request, said with the same words until it is answered.

A store that restarts is not noticed here, but for the time that it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...core.types import Incarnation, Version, role_of
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.messages import Peers
from .types import (
    Answer,
    Append,
    Bound,
    Commit,
    CommittedState,
    Denied,
    FollowVersions,
    GetBatch,
    GetCommitted,
    GetMetrics,
    Item,
    Leased,
    LeaseScoring,
    LeaseWork,
    NewestVersion,
    NotReady,
    PackedBatch,
    PostScores,
    Request,
    Score,
    Scoring,
    Segment,
    StepMetrics,
    StoredMetrics,
    ToScore,
)

_RESEND_AFTER_S = 5.0
"""s beyond a request's own wait after which it is said again, and then less and less often: an answer can be lost
without the connection"""
_RETRY_PAUSE_S = 0.1
"""s before a request is said again that the store could not judge yet"""
FOLLOW_WAIT_S = 10.0
"""s after which a rollout asks anew which version is the newest, and so hears which replicas serve it by now: short
against the 120 s for which a pull looks for a source; 1,024 rollouts that ask so often take 3 ms of each second of the
store (30 us a request, measured)"""
_WEIGHTS_POLL_S = 0.01
"""s between two looks whether newer weights are here; nobody is asked for it"""


class Refused(RuntimeError):
    """The store denied a request for good."""


class Fenced(Refused):
    """This life is not believed any more: it must leave."""


def store_address(peers: Peers | None, role: str = "trajectories") -> Address | None:
    """Where the store listens; its incarnation is the epoch, so that an older store is not listened to."""
    for replica, peer in (peers.peers if peers else {}).items():
        if role_of(replica) == role and peer.listen_address:
            return Address(peer.incarnation.number, peer.listen_address)
    return None


class TrajectoryClient:
    """The store, asked as ``life``. Belongs to the asyncio loop in which it is made; :meth:`run` is its task.


    ``weights`` gives the step of the newest weights that are here (None: there are none, or nobody asks for them).
    Every method raises TimeoutError when the store does not answer within ``patience`` s (beyond a ``wait``),
    Fenced when this life must leave, and Refused for any other denial.
    """

    def __init__(
        self, keys: RunKeys, incarnation: Incarnation, find_store: Callable[[], Address | None], *,
        timeout: float = 600.0, weights: Callable[[], int | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._incarnation = incarnation
        self._weights = weights
        self._timeout = timeout
        self._dialer = Dialer(keys, Answer, find_store)

    async def run(self) -> None:
        """Find the store, lose it, find it again; until closed or cancelled."""
        await self._dialer.run()

    def refresh_address(self) -> None:
        """Where the store is may have changed."""
        self._dialer.refresh_address()

    async def close(self) -> None:
        await self._dialer.close()

    async def lease(self, at_most: int, wait: float = 1.0, holding: Sequence[int] = ()) -> tuple[Item, ...]:
        """Up to ``at_most`` trajectories; none when there is no work within ``wait`` s, or none that the weights here
        are new enough for.

        What was leased before is given again, as far as it is not finished and not in ``holding``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            weights, left = self._weights(), max(0.0, until - loop.time())
            answer = await self._ask(LeaseWork(self._incarnation, at_most, left, tuple(holding), weights), left)
            if not isinstance(answer, Leased):
                return ()
            while answer.outdated and self._weights() == weights and loop.time() < until:
                await asyncio.sleep(_WEIGHTS_POLL_S)
            if not answer.outdated or loop.time() >= until:
                return answer.items

    async def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Durable when it returns. Returns the trajectories that are not ours any more: stop working on them."""
        lost: set[int] = set()
        while True:
            remaining = tuple(segment for segment in segments if segment.trajectory not in lost)
            ended = tuple(trajectory for trajectory in finished if trajectory not in lost)
            answer = await self._send_until_decided(Append(self._incarnation, remaining, ended))
            if not isinstance(answer, Denied):
                break
            if not answer.lost:
                self._raise(answer)
            lost.update(answer.lost)
        return tuple(sorted(lost))

    async def lease_scoring(self, at_most: int, wait: float = 1.0, holding: Sequence[int] = ()) -> tuple[ToScore, ...]:
        """Up to ``at_most`` complete trajectories to score; ``holding`` as in :meth:`lease`."""
        answer = await self._ask(LeaseScoring(self._incarnation, at_most, wait, tuple(holding)), wait)
        return answer.items if isinstance(answer, Scoring) else ()

    async def post_scores(self, scores: Sequence[Score], failed: dict[int, str] | None = None) -> None:
        """Durable when it returns. ``failed``: what cannot be scored, and why; its group is dropped."""
        answer = await self._send_until_decided(PostScores(self._incarnation, tuple(scores), failed or {}))
        if isinstance(answer, Denied):
            self._raise(answer)

    async def batch(self, number: int, wait: float = 5.0) -> PackedBatch | None:
        """The batch of step ``number``; None when there is none within ``wait`` s."""
        answer = await self._ask(GetBatch(self._incarnation, number, wait), wait)
        return answer.batch if isinstance(answer, Bound) else None

    async def commit(
        self, number: int, manifest: dict[str, Any], digest: str, metrics: dict[str, float] | None = None
    ) -> None:
        """Step ``number`` counts when it returns."""
        await self._ask(Commit(self._incarnation, number, manifest, digest, metrics or {}), 0.0)

    async def metrics(self, after: int) -> tuple[StepMetrics, ...]:
        """Metrics of committed steps after ``after``, in order; those that follow the last one are asked for anew."""
        answer = await self._ask(GetMetrics(self._incarnation, after), 0.0)
        assert isinstance(answer, StoredMetrics), answer
        return answer.commits

    async def committed(self) -> CommittedState:
        """What counts; from here on no older incarnation of this trainer can change it."""
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
        """Report that ``holds`` is served at ``serves``, and wait until the newest version is another one than
        ``known``, for ``wait`` s at most. Return the newest version, which may be ``known`` with other holders, or
        None where the store knows of no version."""
        answer = await self._ask(FollowVersions(self._incarnation, weight_address, weight_version, known, wait), wait)
        return answer if isinstance(answer, NewestVersion) else None

    async def _ask(self, request: Request, wait: float) -> Answer:
        answer = await self._send(request, wait)
        if isinstance(answer, Denied):
            self._raise(answer)
        return answer

    async def _send_until_decided(self, request: Request) -> Answer:
        """For what must be done: not yet known to the store is not an answer."""
        async with asyncio.timeout(self._timeout):
            while isinstance(answer := await self._send(request, 0.0), NotReady):
                await asyncio.sleep(_RETRY_PAUSE_S)
            return answer

    async def _send(self, request: Request, wait: float) -> Answer:
        """Said again it is the same question: an answer that takes long, as a large batch does, is never too late."""
        answer: Answer = await self._dialer.request(request, wait + self._timeout, wait + _RESEND_AFTER_S)
        return answer

    def _raise(self, denied: Denied) -> NoReturn:
        raise (Fenced if denied.fenced else Refused)(denied.why)
