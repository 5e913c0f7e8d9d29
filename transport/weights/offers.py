"""Negotiate on an authenticated TCP connection whether the two ends use UCX.

The end that dialled sends an offer. An empty offer means that it has no UCX, and the negotiation ends. Otherwise the
other end replies with its own offer, which is empty if its UCX cannot reach the dialling end. The dialling end then
reports whether its UCX can reach the other end. Without UCX both ends continue over TCP.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from ..streams.connection import Connection, TransportError, receive_bytes

_OFFER = struct.Struct("<QH")
"""Header of an offer: tag, and length in bytes of the address that follows."""
_REACHED, _NOT_REACHED = b"\1", b"\0"


class Offer(Struct, frozen=True):
    """The address of a UCX worker, and the tag of all messages that are sent to it on this connection."""

    tag: int
    address: bytes
    """Address of the worker: 52 bytes over one TCP interface, 188 bytes with shared memory (UCX 1.21), and never more
    than 65,535 bytes."""


TCP_ONLY = Offer(0, b"")
"""The empty offer: continue over TCP."""


async def send_offer(connection: Connection, offer: Offer) -> None:
    """Send an offer. Raises TransportError."""
    await connection.send(_OFFER.pack(offer.tag, len(offer.address)) + offer.address)


async def receive_offer(connection: Connection) -> Offer:
    """Receive an offer. Raises TransportError."""
    tag, length = _OFFER.unpack(await receive_bytes(connection, _OFFER.size))
    return Offer(tag, await receive_bytes(connection, length)) if length else TCP_ONLY


async def send_choice(connection: Connection, reached: bool) -> None:
    """Report whether this end's UCX reaches the other end. Raises TransportError."""
    await connection.send(_REACHED if reached else _NOT_REACHED)


async def receive_choice(connection: Connection) -> bool:
    """Return whether the other end's UCX reaches this end. Raises TransportError."""
    choice = await receive_bytes(connection, 1)
    if choice not in (_REACHED, _NOT_REACHED):
        raise TransportError(f"the peer sent an invalid choice between UCX and TCP: {choice!r}")
    return choice == _REACHED
