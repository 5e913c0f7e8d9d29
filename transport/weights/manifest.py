"""A weight version described: which tensors lie where in one flat buffer, cut into chunks, each with its digest.

Tensors are packed back to back (each starts at a multiple of 64 bytes) into one logical buffer; chunks cut that buffer
without regard to tensors. The manifest carries an HMAC with the run's secret, so that a chunk is trusted because of
its digest, whoever it came from.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from rrl.spec.words import Version

CHUNK_BYTES = 8 * 2**20
"""what a dead source costs at most per request in flight; as in the fan-out lab (docs/sources.md, UCX)"""
ALIGN = 64
"""bytes; a cache line, and enough for any dtype and vector load"""
_DIGEST_BYTES = 16


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor: ``nbytes`` bytes from ``offset`` of the flat buffer. ``dtype`` is a name that both ends know."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Chunk(Struct, frozen=True, array_like=True):
    """``nbytes`` bytes from ``offset`` of the flat buffer; ``digest`` is blake2b of 16 bytes."""

    offset: int
    nbytes: int
    digest: bytes


class Manifest(Struct, frozen=True):
    """One version: ``nbytes`` in all. ``mac`` is HMAC-SHA256 over everything else, with the run's secret."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    chunks: tuple[Chunk, ...]
    mac: bytes = b""


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Places for tensors ``(name, dtype, shape, nbytes)``, and the bytes that they take together."""
    specs, end = [], 0
    for name, dtype, shape, nbytes in tensors:
        offset = -(-end // ALIGN) * ALIGN
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        end = offset + nbytes
    return tuple(specs), end


def describe(
    version: Version,
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    flat: memoryview,
    secret: bytes,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """The signed manifest of ``flat``, which holds ``tensors`` as :func:`layout` places them.

    Raises ValueError when the buffer is not of that size.
    """
    specs, nbytes = layout(tensors)
    if flat.nbytes != nbytes:
        raise ValueError(f"{version}: the buffer has {flat.nbytes} bytes, its tensors need {nbytes}")
    chunks = []
    for offset in range(0, nbytes, chunk_bytes):
        part = flat[offset : offset + chunk_bytes]
        chunks.append(Chunk(offset, part.nbytes, digest(part)))
    bare = Manifest(version, specs, nbytes, tuple(chunks))
    return msgspec.structs.replace(bare, mac=_mac(bare, secret))


def digest(data: memoryview) -> bytes:
    """blake2b-16: cryptographic, because a source may lie. 1.5 GB/s on one core (docs/sources.md, UCX), on any CPU;
    SHA-256 made 2.2 there, but only with the CPU's SHA extensions."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes | bytearray, version: Version, secret: bytes) -> Manifest:
    """The manifest of ``version`` as a holder sent it.

    Raises ValueError when it cannot be read, is not signed with the run's secret, is of another version, or its chunks
    and tensors do not fit its buffer.
    """
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a manifest: {error}") from error
    if not hmac.compare_digest(manifest.mac, _mac(manifest, secret)):
        raise ValueError("the manifest is not signed with this run's secret")
    if manifest.version != version:
        raise ValueError(f"asked for {version}, got the manifest of {manifest.version}")
    end = 0
    for chunk in manifest.chunks:
        if chunk.offset != end or chunk.nbytes <= 0:
            raise ValueError(f"{version}: chunks do not lie back to back at {end}")
        end += chunk.nbytes
    if end != manifest.nbytes:
        raise ValueError(f"{version}: chunks end at {end}, the buffer at {manifest.nbytes}")
    if any(spec.offset < 0 or spec.nbytes < 0 or spec.offset + spec.nbytes > end for spec in manifest.tensors):
        raise ValueError(f"{version}: a tensor lies outside the buffer")
    return manifest


def _mac(manifest: Manifest, secret: bytes) -> bytes:
    return hmac.digest(secret, b"rrl-manifest" + encode(msgspec.structs.replace(manifest, mac=b"")), "sha256")
