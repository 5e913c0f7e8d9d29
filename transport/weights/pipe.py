"""The seam of the weight plane: what a pipe can do, what a connection under it must do, and the handshake.

``tcp`` and ``ucx`` differ only in their lines (:class:`Line`); what is said on a line is in
:mod:`rrl.transport.weights.calls`, written once.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rrl.spec.words import Version
from rrl.transport.weights.manifest import Manifest
from rrl.transport.weights.store import WeightStore

CONNECT_BY = 1.0
"""s; an attempt against a dead port sometimes hangs until its deadline (docs/sources.md, UCX)"""
HANDSHAKE_BY = 1.0
"""s; measured p99 13.6 ms to connect and 3.3 ms for the rest. A stranger who says nothing is dropped after it"""
_NONCE = 32
_MAC = 32
_DIALLED, _LISTENED = b"rrl-weights-1 dialled", b"rrl-weights-1 listened"

_log = logging.getLogger(__name__)


class PipeError(Exception):
    """The other end cannot be reached, went away, hung, or is not of this run. The line to it has been aborted."""


class NotHeld(PipeError):
    """The other end is well but does not hold this version. The line to it is good."""


class Pipe(Protocol):
    """How weight versions move. All deadlines in seconds from the call; every failure is a PipeError."""

    kind: str
    """``tcp`` or ``ucx``: the scheme of the addresses"""

    async def serve(self, store: WeightStore, host: str) -> str:
        """Serve what ``store`` holds complete; returns the address to be told to others: ``<kind>://host:port``."""

    async def manifest(self, at: str, version: Version, by: float) -> Manifest:
        """The verified manifest of a version. Raises NotHeld, PipeError (also when the manifest is not of this run)."""

    async def fetch(self, at: str, version: Version, span: range, into: memoryview, by: float) -> None:
        """Bytes ``span`` of a version. ``into`` is never written to after this returned or raised.

        ``by`` counts from the moment when this answer is the next one due on its connection. Raises NotHeld, PipeError.
        """

    def hang_up(self, at: str) -> None:
        """Drop the kept connection to an address: its other end lied or is gone."""

    async def close(self) -> None:
        """Stop serving, drop every connection. Repeatable."""


class Line(Protocol):
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
def deadline(line: Line, by: float) -> Generator[None]:
    """Whatever is awaited on ``line`` inside fails after ``by`` s. On any exception the line is aborted before the
    exception leaves: only then may the caller free the buffers (docs/sources.md, UCX)."""
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = True
        line.abort()

    timer = asyncio.get_running_loop().call_later(by, expire)
    try:
        yield
    except BaseException as error:
        line.abort()
        if expired and isinstance(error, PipeError):
            raise PipeError(f"nothing within {by:g} s") from error
        raise
    finally:
        timer.cancel()


async def shake_hands(line: Line, secret: bytes, *, dialled: bool) -> None:
    """Prove to each other that both know ``secret``: nonces both ways, roles in the MAC so that none can be mirrored.

    Raises PipeError (and has aborted the line) when the other end cannot prove it within ``HANDSHAKE_BY``.
    """
    with deadline(line, HANDSHAKE_BY):
        await line.open()
        mine = os.urandom(_NONCE)
        if dialled:
            await line.send(mine)
            answer = await _receive(line, _NONCE + _MAC)
            nonces = mine + answer[:_NONCE]
            if not hmac.compare_digest(answer[_NONCE:], hmac.digest(secret, _LISTENED + nonces, "sha256")):
                raise PipeError("the other end does not know this run's secret")
            await line.send(hmac.digest(secret, _DIALLED + nonces, "sha256"))
        else:
            nonces = await _receive(line, _NONCE) + mine
            await line.send(mine + hmac.digest(secret, _LISTENED + nonces, "sha256"))
            proof = await _receive(line, _MAC)
            if not hmac.compare_digest(proof, hmac.digest(secret, _DIALLED + nonces, "sha256")):
                raise PipeError("the other end does not know this run's secret")


async def _receive(line: Line, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    await line.receive(memoryview(buffer))
    return bytes(buffer)


def split_address(at: str, kind: str) -> tuple[str, int]:
    """``tcp://host:port`` as host and port. Raises PipeError for another kind of pipe or a malformed address."""
    scheme, _, rest = at.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != kind or not host or not port.isdigit():
        raise PipeError(f"{at!r} is not an address of a {kind} pipe")
    return host, int(port)


def choose(kind: str) -> tuple[str, str]:
    """Which pipe ``auto``, ``ucx`` or ``tcp`` means here, and why. Imports nothing heavy."""
    if kind == "tcp":
        return "tcp", "the job asks for tcp"
    if kind == "ucx":
        return "ucx", "the job asks for ucx"
    if kind != "auto":
        raise ValueError(f'pipe {kind!r} is unknown; write "auto", "ucx" or "tcp"')
    if importlib.util.find_spec("ucxx") is None:
        return "tcp", "ucxx is not installed here"
    return "ucx", "ucxx is installed here"


def open_pipe(kind: str, secret: bytes) -> Pipe:
    """The pipe that ``kind`` (``auto``, ``ucx``, ``tcp``) means here; its ``kind`` says which, the log says why.

    Must be called in the loop that will use it. Raises ImportError when ``ucx`` is asked for and cannot be imported.
    """
    from rrl.transport.weights.tcp import TcpPipe
    from rrl.transport.weights.ucx import UcxPipe

    chosen, why = choose(kind)
    if chosen == "ucx":
        try:
            pipe: Pipe = UcxPipe(secret)
        except ImportError as error:
            if kind == "ucx":
                raise
            chosen, why = "tcp", f"ucxx does not load here: {error}"
    if chosen == "tcp":
        pipe = TcpPipe(secret)
    _log.info("weights move over %s: %s", chosen, why)
    return pipe
