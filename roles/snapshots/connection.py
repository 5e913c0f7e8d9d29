"""Connect a trainer rank to snapshot servers: to its own node's agent over a connection that it keeps, to others over
one connection for each request. Names and keys of both endpoints are defined here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from ...core.types import NodeName
from ...transport.keys import RunKeys
from ...transport.streams.connection import Connection, TransportError, authenticate
from ...transport.streams.framing import derive_key, receive_message, send_message
from ...transport.streams.unix import UnixConnection, dial_unix
from ...transport.weights.tcp import dial
from . import messages as msg
from .format import Fenced, SnapshotError

MAX_RUN_NAME_CHARS = 40
"""characters of the run's name in names of sockets and of memory, which are short"""


def socket_name(run: str, node: NodeName, secret: bytes) -> str:
    """The abstract Unix socket for members on ``node``: not to be guessed before it is there, and unlike those of other
    runs and of other virtual nodes on the same machine."""
    return f"rrl/{run[:MAX_RUN_NAME_CHARS]}/{hmac.digest(secret, f'snapshots {node}'.encode(), 'sha256').hex()[:16]}"


def local_key(node: NodeName, secret: bytes) -> bytes:
    return derive_key(secret, f"snapshots on {node}")


def remote_key(secret: bytes) -> bytes:
    return derive_key(secret, "snapshots")


RETRY_DELAY_S = 5.0
"""s after which an agent of this node that hung is asked for memory again: each try may cost a step a second"""
HUNG_RETRY_TIMEOUT_S = 5.0
"""s for which one that hangs is asked again what it keeps: a node on which many processes start is slow (seen: 1.7 s
between two beats of 0.1 s, at 10 busy processes a core), and the answer saves more than that"""
_HUNG_AFTER_S = 0.5
"""s after which one that did not answer has hung; one that is gone is noticed in milliseconds"""
_LOCAL_AGENT = "the agent of this node"
T = TypeVar("T")


class AgentUnresponsive(SnapshotError):
    """No answer came in time; it may come the next time."""


class LocalAgentClient:
    """The agent of this node, or its successor. Any thread may ask; one does at a time."""

    def __init__(self, run: str, node: NodeName, keys: RunKeys) -> None:
        self._name = socket_name(run, node, keys.secret)
        self._key = local_key(node, keys.secret)
        self._connection: UnixConnection | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        self.generation = 0
        """how often an agent was met: another number, another agent perhaps, which knows nothing of us"""

    @property
    def is_connected(self) -> bool:
        """The one that was met last is still there, as far as can be seen without asking."""
        return self._connection is not None and not self._connection.broken

    def call(self, request: msg.Request, *, retry: bool = False) -> tuple[msg.Answer, list[int]]:
        """The answer, and the descriptors that came with it, for the caller to close. ``patient``: see ``PATIENCE``,
        ``RETRY``. Raises SnapshotError, Fenced."""
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
        with self._lock:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None

    async def _call(self, request: msg.Request) -> tuple[msg.Answer, list[int]]:
        if time.monotonic() < self._not_before:
            raise TransportError(f"it did not answer, and is asked again {RETRY_DELAY_S:g} s after that")
        connection = await self._connect()
        try:
            answer = await send_request(connection, request)
            many = len(answer.slots) if isinstance(answer, msg.BuffersGranted) else 0
            return answer, await connection.receive_descriptors(many) if many else []
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
            raise TransportError(f"{error}; in a container, it must share the node's network") from error
        await authenticate(connection, self._key, dialled=True)
        self._connection = connection
        self.generation += 1
        return connection


@contextlib.asynccontextmanager
async def remote_agent(address: str, secret: bytes) -> AsyncIterator[Connection]:
    """A line to another node's agent. Raises PipeError."""
    connection = await dial(address, "tcp")
    try:
        await authenticate(connection, remote_key(secret), dialled=True)
        yield connection
    finally:
        connection.abort()


async def send_request(connection: Connection, request: msg.Request) -> msg.Answer:
    """Raises PipeError, and what :func:`checked` does."""
    await send_message(connection, request)
    return checked(await receive_message(connection, msg.Answer))


def checked(answer: msg.Answer) -> msg.Answer:
    """Raises SnapshotError or Fenced for a refusal."""
    if isinstance(answer, msg.Refused):
        raise Fenced(answer.why) if answer.fenced else SnapshotError(answer.why)
    return answer


def run_blocking(peer: str, coroutine: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own. Raises SnapshotError for whatever keeps the other end from answering, Hung for silence."""
    began = time.monotonic()
    try:
        return asyncio.run(coroutine)
    except (TransportError, OSError) as error:
        kind = AgentUnresponsive if time.monotonic() > began + _HUNG_AFTER_S else SnapshotError
        raise kind(f"{peer}: {error}") from error


def retry_while_hung(attempt: Callable[[], T]) -> T:
    """Again while it hangs, for ``PATIENCE`` s."""
    deadline = time.monotonic() + HUNG_RETRY_TIMEOUT_S
    while True:
        try:
            return attempt()
        except AgentUnresponsive:
            if time.monotonic() > deadline:
                raise
