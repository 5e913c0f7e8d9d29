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
from ...transport.streams.framing import hear, key_for, say
from ...transport.streams.unix import UnixLine, dial_local
from ...transport.weights.base import Line, PipeError, shake_hands
from ...transport.weights.tcp import dial
from . import messages as msg
from .format import Fenced, SnapshotError

RUN_SHOWN = 40
"""characters of the run's name in names of sockets and of memory, which are short"""


def socket_name(run: str, node: NodeName, secret: bytes) -> str:
    """The abstract Unix socket for members on ``node``: not to be guessed before it is there, and unlike those of other
    runs and of other virtual nodes on the same machine."""
    return f"rrl/{run[:RUN_SHOWN]}/{hmac.digest(secret, f'snapshots {node}'.encode(), 'sha256').hex()[:16]}"


def local_key(node: NodeName, secret: bytes) -> bytes:
    return key_for(secret, f"snapshots on {node}")


def remote_key(secret: bytes) -> bytes:
    return key_for(secret, "snapshots")


RETRY = 5.0
"""s after which an agent of this node that hung is asked for memory again: each try may cost a step a second"""
PATIENCE = 5.0
"""s for which one that hangs is asked again what it keeps: a node on which many processes start is slow (seen: 1.7 s
between two beats of 0.1 s, at 10 busy processes a core), and the answer saves more than that"""
_HUNG = 0.5
"""s after which one that did not answer has hung; one that is gone is noticed in milliseconds"""
_HERE = "the agent of this node"
T = TypeVar("T")


class Hung(SnapshotError):
    """No answer came in time; it may come the next time."""


class OwnAgent:
    """The agent of this node, or its successor. Any thread may ask; one does at a time."""

    def __init__(self, run: str, node: NodeName, keys: RunKeys) -> None:
        self._name = socket_name(run, node, keys.secret)
        self._key = local_key(node, keys.secret)
        self._line: UnixLine | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        self.met = 0
        """how often an agent was met: another number, another agent perhaps, which knows nothing of us"""

    @property
    def there(self) -> bool:
        """The one that was met last is still there, as far as can be seen without asking."""
        return self._line is not None and not self._line.broken

    def ask(self, request: msg.Request, *, patient: bool = False) -> tuple[msg.Answer, list[int]]:
        """The answer, and the descriptors that came with it, for the caller to close. ``patient``: see ``PATIENCE``,
        ``RETRY``. Raises SnapshotError, Fenced."""
        with self._lock:
            if patient:
                self._not_before = 0.0
            try:
                return patiently(lambda: run(_HERE, self._ask(request))) if patient else run(_HERE, self._ask(request))
            except Hung:
                self._not_before = time.monotonic() + RETRY
                raise

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.abort()
                self._line = None

    async def _ask(self, request: msg.Request) -> tuple[msg.Answer, list[int]]:
        if time.monotonic() < self._not_before:
            raise PipeError(f"it did not answer, and is asked again {RETRY:g} s after that")
        line = await self._connected()
        try:
            answer = await ask(line, request)
            many = len(answer.slots) if isinstance(answer, msg.Granted) else 0
            return answer, await line.receive_descriptors(many) if many else []
        except PipeError:
            line.abort()
            raise

    async def _connected(self) -> UnixLine:
        if self._line is not None and not self._line.broken:
            return self._line
        if self._line is not None:
            self._line.abort()
            self._line = None
        try:
            line = await dial_local(self._name)
        except PipeError as error:
            raise PipeError(f"{error}; in a container, it must share the node's network") from error
        await shake_hands(line, self._key, dialled=True)
        self._line = line
        self.met += 1
        return line


@contextlib.asynccontextmanager
async def other_agent(address: str, secret: bytes) -> AsyncIterator[Line]:
    """A line to another node's agent. Raises PipeError."""
    line = await dial(address, "tcp")
    try:
        await shake_hands(line, remote_key(secret), dialled=True)
        yield line
    finally:
        line.abort()


async def ask(line: Line, request: msg.Request) -> msg.Answer:
    """Raises PipeError, and what :func:`checked` does."""
    await say(line, request)
    return checked(await hear(line, msg.Answer))


def checked(answer: msg.Answer) -> msg.Answer:
    """Raises SnapshotError or Fenced for a refusal."""
    if isinstance(answer, msg.Refused):
        raise Fenced(answer.why) if answer.fenced else SnapshotError(answer.why)
    return answer


def run(whom: str, what: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own. Raises SnapshotError for whatever keeps the other end from answering, Hung for silence."""
    began = time.monotonic()
    try:
        return asyncio.run(what)
    except (PipeError, OSError) as error:
        kind = Hung if time.monotonic() > began + _HUNG else SnapshotError
        raise kind(f"{whom}: {error}") from error


def patiently(asking: Callable[[], T]) -> T:
    """Again while it hangs, for ``PATIENCE`` s."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return asking()
        except Hung:
            if time.monotonic() > deadline:
                raise
