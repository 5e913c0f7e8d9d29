"""Where an agent is found by those who have snapshots to keep or to fetch, and what opens its two doors."""

from __future__ import annotations

import hmac

from rrl.spec.words import NodeName
from rrl.transport.blobs import key_for

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
