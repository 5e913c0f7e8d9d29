"""Client of the trajectory store. Each request is repeated unchanged until it is answered.

A restart of the store is invisible to the caller, except for the time it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from ...core.run_spec import MAX_SEGMENT_EXTRAS
from ...core.types import STORE, Incarnation
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.messages import Peers
from .episodes.requests import StoreAnswer as Answer
from .episodes.requests import StoreRequest
from .types import (
    A,
    Append,
    Commit,
    Denied,
    Done,
    Item,
    Kind,
    LeaseWork,
    NotReady,
    P,
    Segment,
    StepMetrics,
    TrainedStep,
)

_RESEND_AFTER_S = 5.0
"""Seconds between the end of a request's ``wait`` and its first repetition. Requests are repeated because an answer can
be lost although the connection stays open. Further repetitions follow at growing intervals."""
_RETRY_PAUSE_S = 0.1
"""Seconds before a request that the store answered with NotReady is repeated."""
_WEIGHTS_POLL_S = 0.01
"""Seconds between two checks, inside this process, whether newer weights have arrived."""


class Refused(RuntimeError):
    """The store denied a request, and will deny it again if it is repeated."""


class Fenced(Refused):
    """This incarnation is no longer current and must exit."""


class FencedAttempt(Refused):
    """The attempt at an episode is over, and the code that makes the attempt must end."""


class WrongArgument(Refused, ValueError):
    """The program has passed a wrong argument."""


class NoAnswer(Refused):
    """An episode cannot be finished, because its agent has no complete answer of the model."""


def store_address(peers: Peers | None) -> Address | None:
    """Return the address of the store according to ``peers``, or None if they contain no address of it.

    The epoch of the address is the store's incarnation number, so that answers of an older store are ignored.
    """
    peer = peers.peers.get(STORE) if peers is not None else None
    return Address(peer.incarnation.number, peer.listen_address) if peer is not None and peer.listen_address else None


class AskStore(Protocol):
    """Sends a request to the store as :meth:`TrajectoryClient.ask` does, and awaits it in any event loop."""

    async def __call__(self, kind: Kind[P, A], *arguments: P.args, **named: P.kwargs) -> A:
        """Send a request."""
        ...


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

    async def ask(self, kind: Kind[P, A], *arguments: P.args, **named: P.kwargs) -> A:
        """Send a request of a ``kind`` with these fields, and return its answer (:class:`.types.Request`).

        Raises FencedAttempt if the request names an attempt that is over.
        """
        request: Any = kind(self._incarnation, *arguments, **named)
        wait: float | None = getattr(request, "wait", None)
        answer = await (self._send_until_decided(request) if wait is None else self._send(request, wait))
        if isinstance(answer, Denied):
            self._raise(answer)
        result: Any = None if isinstance(answer, NotReady) else answer
        return result  # type: ignore[no-any-return]

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
            answer = await self.ask(LeaseWork, at_most, left, held, weights)
            if answer is None:
                return ()
            while answer.outdated and self._weights() == weights and loop.time() < until:
                await asyncio.sleep(_WEIGHTS_POLL_S)
            if not answer.outdated or loop.time() >= until:
                return answer.items

    async def append(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> tuple[int, ...]:
        """Append segments, which are durable on return.

        Returns:
            The trajectories that are no longer leased to this incarnation; the caller must stop working on them.
        """
        return (await self.append_and_lease(segments, finished, 0)).lost

    async def append_and_lease(
        self,
        segments: Sequence[Segment],
        finished: Sequence[int],
        at_most: int,
        holding: Iterable[int] = (),
        *,
        hands_over: bool = False,
    ) -> Appended:
        """Append segments like :meth:`append`, and lease further trajectories in the same round trip.

        Segments whose extras do not fit into one message are appended in several round trips, in their order.

        Args:
            segments: The new tokens.
            finished: The trajectories that are complete with these segments.
            at_most: Maximum number of trajectories to lease. If 0, none is leased, and ``holding`` is ignored.
            holding: The trajectories that this process works on after the append, as in :meth:`lease`.
            hands_over: Whether all leases of this process end after the append.
        """
        lost: set[int] = set()
        *earlier, segments = _messages(segments)
        for part in earlier:
            appended = await self.append_and_lease([one for one in part if one.trajectory not in lost], (), 0)
            lost.update(appended.lost)
        while True:
            remaining = tuple(segment for segment in segments if segment.trajectory not in lost)
            ended = tuple(trajectory for trajectory in finished if trajectory not in lost)
            lease = None
            if at_most:
                held = tuple(sorted(set(holding) - lost))
                lease = LeaseWork(self._incarnation, at_most, 0.0, held, self._weights())
            answer = await self._send_until_decided(Append(self._incarnation, remaining, ended, lease, hands_over))
            if not isinstance(answer, Denied):
                break
            if not answer.lost:
                self._raise(answer)
            lost.update(answer.lost)
        return Appended(tuple(sorted(lost)), answer.leased if isinstance(answer, Done) else ())

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
        done = await self.ask(Commit, number, manifest, digest, metrics or {}, tuple(earlier))
        return (*done.earlier, StepMetrics(number, done.metrics))

    async def _send_until_decided(self, request: StoreRequest) -> Answer:
        """Send a request that must be carried out, and repeat it while the answer is NotReady."""
        async with asyncio.timeout(self._timeout):
            while isinstance(answer := await self._send(request, 0.0), NotReady):
                await asyncio.sleep(_RETRY_PAUSE_S)
            return answer

    async def _send(self, request: StoreRequest, wait: float) -> Answer:
        """Send a request, and send it again if no answer arrives in time.

        A repeated request has the same id, so even a late answer to the first request, such as a large batch, is
        accepted.
        """
        answer: Answer = await self._dialer.request(request, wait + self._timeout, wait + _RESEND_AFTER_S)
        return answer

    def _raise(self, denied: Denied) -> NoReturn:
        kinds = {
            Fenced: denied.fenced,
            FencedAttempt: denied.fenced_attempt,
            NoAnswer: denied.no_answer,
            WrongArgument: denied.wrong_argument,
        }
        raise next((kind for kind, applies in kinds.items() if applies), Refused)(denied.why)


def _messages(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Divide segments, in their order, so that the extras of each part fit into a message; there is at least a part."""
    parts: list[list[Segment]] = [[]]
    size = 0
    for segment in segments:
        size += sum(map(len, segment.extras.values()))
        if size > MAX_SEGMENT_EXTRAS and parts[-1]:
            parts.append([])
            size = sum(map(len, segment.extras.values()))
        parts[-1].append(segment)
    return parts
