"""How two ends agree on UCX over a TCP connection on which both have proved that they know the run's secret.

The end that dialled sends an offer. An offer with an empty address says that it has no UCX, and nothing more is
agreed on. Else the other end answers with an offer of its own, which is empty where its UCX does not reach the first
one. The first end then says whether its UCX reaches the second. Without UCX both go on over TCP.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from .base import Connection, TransportError

_OFFER = struct.Struct("<QH")
"""tag, bytes of the address that follows"""
_REACHED, _NOT_REACHED = b"\1", b"\0"


class Offer(Struct, frozen=True):
    """The address of a UCX worker, and the tag of all messages that are sent to it on this connection."""

    tag: int
    address: bytes
    """52 bytes over one TCP interface, 188 with shared memory (UCX 1.21); at most 65535"""


TCP_ONLY = Offer(0, b"")
"""go on over TCP"""


async def send_offer(connection: Connection, offer: Offer) -> None:
    """Raises PipeError."""
    await connection.send(_OFFER.pack(offer.tag, len(offer.address)) + offer.address)


async def receive_offer(connection: Connection) -> Offer:
    """Raises PipeError."""
    tag, length = _OFFER.unpack(await _receive(connection, _OFFER.size))
    return Offer(tag, await _receive(connection, length)) if length else TCP_ONLY


async def send_choice(connection: Connection, reached: bool) -> None:
    """Raises PipeError."""
    await connection.send(_REACHED if reached else _NOT_REACHED)


async def receive_choice(connection: Connection) -> bool:
    """Whether the other end's UCX reaches this one. Raises PipeError."""
    choice = await _receive(connection, 1)
    if choice not in (_REACHED, _NOT_REACHED):
        raise TransportError(f"a choice that is none: {choice!r}")
    return choice == _REACHED


async def _receive(connection: Connection, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    await connection.receive(memoryview(buffer))
    return bytes(buffer)
