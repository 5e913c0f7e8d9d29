"""The API key of an episode: it names the run, the episode and the attempt, and proves that the run issued it.

An agent gets one key for each attempt, and passes it on to its sub-agents and tools. An endpoint needs no state to
check a key: it recomputes the key's signature with the secret of the run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct

from msgspec import Struct

PREFIX = "rrl-"
"""Beginning of every key, so that a person or a secret scanner recognises it."""
_NUMBERS = struct.Struct(">QI")
"""Format of the numbers in a key: episode and attempt."""
_SIGNATURE_BYTES = 16
"""Number of bytes of the signature. These are 128 bits, which cannot be guessed."""
_PURPOSE = b"rrl: API key of an episode\0"
"""Text that is signed before the content, so that no signature for another purpose is a valid key."""
_MAX_KEY_CHARS = 400
"""Maximum number of characters of a key. No valid key is longer, because names of run directories are shorter than 256
bytes."""


class EpisodeKey(Struct, frozen=True):
    """The content of a key."""

    run: str
    """Name of the run directory."""
    episode: int
    attempt: int
    """Number of the execution of the agent's code, from 1; 0 in the key of the run, which names no episode."""


def encode_key(key: EpisodeKey, secret: bytes) -> str:
    """Return the text of a key.

    Args:
        key: The content of the key.
        secret: The secret of the run (:attr:`rrl.transport.keys.RunKeys.secret`).
    """
    content = _NUMBERS.pack(key.episode, key.attempt) + key.run.encode()
    signed = _signature(content, secret) + content
    return PREFIX + base64.urlsafe_b64encode(signed).decode().rstrip("=")


def run_key(run: str, secret: bytes) -> str:
    """Return the key with which an agent outside of the run opens episodes: it names the run, and no episode of it.

    Args:
        run: Name of the run directory.
        secret: The secret of the run.
    """
    return encode_key(EpisodeKey(run, 0, 0), secret)


def decode_key(sent: str, run: str, secret: bytes) -> EpisodeKey | None:
    """Return the content of a key, or None if this run has not issued it.

    Args:
        sent: The key as an agent sent it.
        run: Name of the run directory.
        secret: The secret of the run.
    """
    if not sent.startswith(PREFIX) or len(sent) > _MAX_KEY_CHARS or not sent.isascii():
        return None
    encoded = sent.removeprefix(PREFIX)
    try:
        signed = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    signature, content = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(content, secret)):
        return None
    key = EpisodeKey(content[_NUMBERS.size :].decode(), *_NUMBERS.unpack_from(content))
    return key if key.run == run else None


def _signature(content: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, _PURPOSE + content, hashlib.sha256)[:_SIGNATURE_BYTES]
