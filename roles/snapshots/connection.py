"""Connections of a trainer member to snapshot servers, and the names and keys of their endpoints.

The member keeps one connection to its own node's agent, and opens one connection per request to any other agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from ...core.types import NodeName
from ...transport.keys import RunKeys
from ...transport.streams.connection import Connection, TransportError, authenticate, deadline
from ...transport.streams.framing import ANSWER_TIMEOUT_S, derive_key, receive_message, send_message
from ...transport.streams.unix import UnixConnection, dial_unix, secret_name
from ...transport.weights.tcp import dial
from . import messages as msg
from .format import Fenced, SnapshotError


def socket_name(run: str, node: NodeName, secret: bytes) -> str:
    """Return the name of the abstract Unix socket for the members on ``node``, which may be a virtual node."""
    return secret_name(run, f"snapshots {node}", secret)


def local_key(node: NodeName, secret: bytes) -> bytes:
    """Return the key that authenticates members on ``node``."""
    return derive_key(secret, f"snapshots on {node}")


def remote_key(secret: bytes) -> bytes:
    """Return the key that authenticates members on other nodes."""
    return derive_key(secret, "snapshots")


RETRY_DELAY_S = 5.0
"""Seconds for which requests for memory are not sent and fail at once, after the agent of this node has not answered a
request. Each request to a hung agent may delay a step by a second."""
HUNG_RETRY_TIMEOUT_S = 5.0
"""Seconds for which requests that read snapshots are repeated while an agent hangs. On a node where many processes
start, an agent is slow: with 10 busy processes per core, heartbeats with an interval of 0.1 s came up to 1.7 s apart
(measured). A restart from a snapshot saves more time than this wait costs."""
_HUNG_AFTER_S = 0.5
"""Seconds without an answer after which an agent counts as hung; an agent that has ended is noticed within
milliseconds."""
_LOCAL_AGENT = "the agent of this node"
T = TypeVar("T")


class AgentUnresponsive(SnapshotError):
    """The agent did not answer in time; a later request may succeed."""


class LocalAgentClient:
    """Connection to this node's agent, or to that agent's successor. Thread-safe: requests are sent one at a time."""

    def __init__(self, run: str, node: NodeName, keys: RunKeys) -> None:
        self._name = socket_name(run, node, keys.secret)
        self._key = local_key(node, keys.secret)
        self._connection: UnixConnection | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        self.generation = 0
        """Number of connections so far. A new connection may be to a new agent, which does not have the old buffers."""

    @property
    def is_connected(self) -> bool:
        """True unless the connection is known to be broken. The property sends nothing."""
        return self._connection is not None and not self._connection.broken

    def call(self, request: msg.Request, *, retry: bool = False) -> tuple[msg.Answer, list[int]]:
        """Send a request; return the answer and its descriptors, which the caller must close.

        If an earlier request failed less than ``RETRY_DELAY_S`` ago because the agent hung, the request fails at once
        and is not sent. With ``retry`` it is sent even then, and repeated for ``HUNG_RETRY_TIMEOUT_S`` while the agent
        hangs.

        Raises:
            SnapshotError: The agent refused the request or did not answer.
            Fenced: A newer incarnation exists.
        """
        with self._lock:
            if retry:
                self._not_before = 0.0
            try:
                return (
                    retry_while_hung(lambda: run_blocking(_LOCAL_AGENT, self._call(request)))
                    if retry
                    else run_blocking(_LOCAL_AGENT, self._call(request))
                )
            except AgentUnresponsive:
                self._not_before = time.monotonic() + RETRY_DELAY_S
                raise

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None

    async def _call(self, request: msg.Request) -> tuple[msg.Answer, list[int]]:
        if time.monotonic() < self._not_before:
            raise TransportError(
                f"not requested, because the last request got no answer less than {RETRY_DELAY_S:g} s ago"
            )
        connection = await self._connect()
        try:
            answer = await send_request(connection, request)
            count = len(answer.slots) if isinstance(answer, msg.BuffersGranted) else 0
            if not count:
                return answer, []
            with deadline(connection, ANSWER_TIMEOUT_S):
                return answer, await connection.receive_descriptors(count)
        except TransportError:
            connection.abort()
            raise

    async def _connect(self) -> UnixConnection:
        if self._connection is not None and not self._connection.broken:
            return self._connection
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        try:
            connection = await dial_unix(self._name)
        except TransportError as error:
            raise TransportError(f"{error}; if the role runs in a container, it must use the node's network") from error
        await authenticate(connection, self._key, dialled=True)
        self._connection = connection
        self.generation += 1
        return connection


@contextlib.asynccontextmanager
async def remote_agent(address: str, secret: bytes) -> AsyncIterator[Connection]:
    """Yield an authenticated connection to another node's agent.

    Raises:
        TransportError: The agent cannot be reached.
    """
    connection = await dial(address, "tcp")
    try:
        await authenticate(connection, remote_key(secret), dialled=True)
        yield connection
    finally:
        connection.abort()


async def send_request(connection: Connection, request: msg.Request) -> msg.Answer:
    """Send a request and return its answer.

    Raises:
        TransportError: The connection is lost.
        SnapshotError: The agent refused the request.
        Fenced: A newer incarnation exists.
    """
    await send_message(connection, request)
    return checked(await receive_message(connection, msg.Answer))


def checked(answer: msg.Answer) -> msg.Answer:
    """Return the answer, or raise the exception for a refusal.

    Raises:
        SnapshotError: The agent refused the request.
        Fenced: A newer incarnation exists.
    """
    if isinstance(answer, msg.Refused):
        raise Fenced(answer.why) if answer.fenced else SnapshotError(answer.why)
    return answer


def run_blocking(peer: str, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop.

    Raises:
        SnapshotError: The connection failed.
        AgentUnresponsive: The connection failed because the agent did not answer in time.
    """
    began = time.monotonic()
    try:
        return asyncio.run(coroutine)
    except (TransportError, OSError) as error:
        kind = AgentUnresponsive if time.monotonic() > began + _HUNG_AFTER_S else SnapshotError
        raise kind(f"{peer}: {error}") from error


def retry_while_hung(attempt: Callable[[], T]) -> T:
    """Repeat ``attempt`` while it raises AgentUnresponsive, for ``HUNG_RETRY_TIMEOUT_S``."""
    give_up_at = time.monotonic() + HUNG_RETRY_TIMEOUT_S
    while True:
        try:
            return attempt()
        except AgentUnresponsive:
            if time.monotonic() > give_up_at:
                raise
