"""The seam of the weight plane: what a pipe can do, what a connection under it must do, and the handshake.

``tcp``, ``ucx`` and ``nixl`` differ only in their lines (:class:`Line`); what is said on a line is in
:mod:`rrl.transport.weights.protocol`, written once.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...core.types import Version
from .manifest import Manifest
from .store import WeightStore

CONNECT_TIMEOUT_S = 1.0
"""s; an attempt against a dead port sometimes hangs until its deadline (docs/sources.md, UCX)"""
HANDSHAKE_TIMEOUT_S = 1.0
"""s; measured p99 13.6 ms to connect and 3.3 ms for the rest. A stranger who says nothing is dropped after it"""
STARVATION_TIMEOUT_S = 3.0
"""s for which a source may say "not yet" and nothing else. Its own source may be silent until the first patience is
over, and the next one too, before it goes on; who stands behind it must not leave it for that"""
TIMER_SLACK_S = 0.05
"""s by which a timer may be late on a busy machine; a role that computes keeps this loop waiting for longer"""
MAX_DEADLINE_EXTENSIONS = 5
"""times that a deadline counts anew because the loop was late: then the machine is too slow for it"""
PACKAGES = {"ucx": ("ucxx",), "nixl": ("nixl_cu12", "nixl_cu13")}
"""kind of pipe → packages, one of which it needs; the extra of the same name brings it. (The package ``nixl`` only
picks one of the two, and brings both.)"""
_NONCE_BYTES = 32
_MAC_BYTES = 32
_DIALLED, _LISTENED = b"rrl-weights-1 dialled", b"rrl-weights-1 listened"

_log = logging.getLogger("rrl.weights")


class TransportError(Exception):
    """The other end cannot be reached, went away, hung, or is not of this run. The line to it has been aborted."""


class VersionUnavailable(TransportError):
    """The other end is well but does not hold this version, nor is it receiving it. The line to it is good."""


class WeightTransport(Protocol):
    """How weight versions move. Every failure is a PipeError.

    A holder that is still receiving what it is asked for says "not yet" every ``protocol.NOT_YET_EVERY`` s until it has
    verified it. ``by`` is how long (s) the other end may be silent: it counts from the moment when this answer is the
    next one due on its connection, and anew from each "not yet". ``starved_by`` is how long it may say nothing else,
    from the first "not yet" of this answer.
    """

    kind: str
    """``tcp``, ``ucx`` or ``nixl``: the scheme of the addresses"""

    async def serve(self, store: WeightStore, host: str) -> str:
        """Serve what ``store`` holds complete, and of what it receives each chunk once it is verified; returns the
        address to be told to others: ``<kind>://host:port``."""

    async def manifest(
        self, address: str, version: Version, timeout: float, starvation_timeout: float = STARVATION_TIMEOUT_S
    ) -> Manifest:
        """The verified manifest of a version. Raises NotHeld, PipeError (also when the manifest is not of this run)."""

    async def fetch(
        self,
        address: str,
        version: Version,
        span: range,
        into: memoryview,
        timeout: float,
        starvation_timeout: float = STARVATION_TIMEOUT_S,
    ) -> None:
        """Bytes ``span`` of a version. ``into`` is never written to after this returned, raised or was cancelled.

        Raises NotHeld, PipeError.
        """

    def disconnect(self, address: str) -> None:
        """Drop the kept connection to an address: its other end lied or is gone."""

    async def close(self) -> None:
        """Stop serving, drop every connection. Repeatable."""


class Connection(Protocol):
    """One connection. A ``receive`` takes exactly the bytes of one ``send``; failures are PipeErrors.

    After :meth:`abort` every pending and later operation fails, and no buffer is touched any more.
    """

    async def open(self) -> None:
        """Whatever must be agreed on before bytes flow; both ends call it first."""

    async def send(self, data: bytes | memoryview) -> None: ...

    async def receive(self, into: memoryview) -> None: ...

    def abort(self) -> None: ...

    @property
    def broken(self) -> bool: ...


@contextmanager
def deadline(connection: Connection, timeout: float) -> Generator[None]:
    """Whatever is awaited on ``line`` inside fails after ``by`` s. On any exception the line is aborted before the
    exception leaves: only then may the caller free the buffers (docs/sources.md, UCX).

    A loop that stood still itself has not looked at what came meanwhile: then the time counts anew, a few times."""
    loop = asyncio.get_running_loop()
    expired = False
    timer: asyncio.TimerHandle

    def expire(due: float, extensions: int) -> None:
        nonlocal expired, timer
        if extensions and loop.time() > due + TIMER_SLACK_S:
            timer = loop.call_later(timeout, expire, loop.time() + timeout, extensions - 1)
            return
        expired = True
        connection.abort()

    timer = loop.call_later(timeout, expire, loop.time() + timeout, MAX_DEADLINE_EXTENSIONS)
    try:
        yield
    except BaseException as error:
        connection.abort()
        if expired and isinstance(error, TransportError):
            raise TransportError(f"nothing within {timeout:.3g} s") from error
        raise
    finally:
        timer.cancel()


async def authenticate(connection: Connection, secret: bytes, *, dialled: bool) -> None:
    """Prove to each other that both know ``secret``: nonces both ways, roles in the MAC so that none can be mirrored.

    Raises PipeError (and has aborted the line) when the other end cannot prove it within ``HANDSHAKE_BY``.
    """
    with deadline(connection, HANDSHAKE_TIMEOUT_S):
        await connection.open()
        own_nonce = os.urandom(_NONCE_BYTES)
        if dialled:
            await connection.send(own_nonce)
            answer = await _receive(connection, _NONCE_BYTES + _MAC_BYTES)
            nonces = own_nonce + answer[:_NONCE_BYTES]
            if not hmac.compare_digest(answer[_NONCE_BYTES:], hmac.digest(secret, _LISTENED + nonces, "sha256")):
                raise TransportError("the other end does not know this run's secret")
            await connection.send(hmac.digest(secret, _DIALLED + nonces, "sha256"))
        else:
            nonces = await _receive(connection, _NONCE_BYTES) + own_nonce
            await connection.send(own_nonce + hmac.digest(secret, _LISTENED + nonces, "sha256"))
            proof = await _receive(connection, _MAC_BYTES)
            if not hmac.compare_digest(proof, hmac.digest(secret, _DIALLED + nonces, "sha256")):
                raise TransportError("the other end does not know this run's secret")


async def _receive(connection: Connection, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    await connection.receive(memoryview(buffer))
    return bytes(buffer)


def parse_address(address: str, kinds: Sequence[str]) -> tuple[str, int]:
    """``tcp://host:port`` as host and port. Raises PipeError for a kind of pipe that is none of these, and for a
    malformed address."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in kinds or not host or not port.isdigit():
        raise TransportError(f"{address!r} is not an address of a {' or '.join(kinds)} pipe")
    return host, int(port)


def installed_package(kind: str) -> str | None:
    """What is installed here of what a pipe needs: its Python package, None where there is none. Imports nothing."""
    return next((name for name in PACKAGES[kind] if importlib.util.find_spec(name) is not None), None)
