"""The manifest of a weight version: the position of each tensor in one flat buffer, and the digest of each chunk.

Tensors are packed back to back (each starts at a multiple of 64 bytes) into one logical buffer. Chunks divide the
buffer without regard to tensors. The manifest carries an HMAC with the run's secret, so that a chunk from any source
can be verified by its digest.

A version consists of parts, each published by one rank of the trainer; usually there is one. A rank describes its part
in a manifest of its own. The first rank joins the manifests of all parts to the manifest of the version
(:func:`join_parts`), in whose buffer the parts follow each other.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ...core.types import Version
from .delta import changed_words

CHUNK_BYTES = 8 * 2**20
"""Size of a chunk in bytes, as in the fan-out measurements (docs/sources.md, UCX). If a source dies, at most one chunk
per request in flight must be fetched again."""
ALIGN_BYTES = 64
"""Alignment of tensors in bytes: a cache line, and sufficient for any dtype and vector load."""
_DIGEST_BYTES = 16
_SHA_FLAG = re.compile(r"^(flags|Features)\s*:.*\b(sha_ni|sha2)\b", re.MULTILINE)
"""A line of /proc/cpuinfo (x86 or ARM) of a CPU with instructions for SHA-256."""
_MAX_DIGEST_THREADS = 8
"""Maximum number of threads that compute digests. Together they reach 12 GB/s if memory is fast enough. There are no
more threads, because the role needs the other cores of the node."""


HashName = Literal["blake2b", "sha256"]
"""The hash functions of digests, which hashlib has."""


class TensorSpec(Struct, frozen=True, array_like=True):
    """One tensor: ``nbytes`` bytes of the flat buffer, of which the first is at ``offset``.

    ``dtype`` is a name that all peers know.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Chunk(Struct, frozen=True, array_like=True):
    """One chunk: ``nbytes`` bytes of the flat buffer, of which the first is at ``offset``.

    ``digest`` is the digest of these bytes by the hash function of their part; it is 16 bytes long.
    """

    offset: int
    nbytes: int
    digest: bytes


class Part(Struct, frozen=True, array_like=True):
    """One part: ``nbytes`` bytes of the flat buffer, of which the first is at ``offset``.

    ``rank`` is the rank of the trainer that publishes the part, and ``hash`` the function of its digests.
    """

    number: int
    rank: int
    offset: int
    nbytes: int
    hash: HashName


class Manifest(Struct, frozen=True):
    """The description of one version of ``nbytes`` bytes. ``mac`` is HMAC-SHA256 over all other fields."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    chunks: tuple[Chunk, ...]
    parts: tuple[Part, ...]
    """The parts in the order of their numbers: all of the version, or the only one that this manifest describes."""
    of: int
    """Number of parts of the version."""
    mac: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Return whether this is the manifest of a version, not of one of several parts."""
        return len(self.parts) == self.of

    def has_layout_of(self, other: Manifest) -> bool:
        """Return whether both versions have the same tensors and chunks at the same places."""
        places = ([(chunk.offset, chunk.nbytes) for chunk in one.chunks] for one in (self, other))
        return self.tensors == other.tensors and next(places) == next(places)

    def part_at(self, offset: int) -> Part:
        """Return the part that contains the byte at ``offset``, which must be the first byte of a chunk."""
        return self.parts[bisect_right(self.parts, offset, key=lambda part: part.offset) - 1]


def layout(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Place tensors, given as ``(name, dtype, shape, nbytes)``, one after the other at aligned offsets.

    Returns:
        The specs of the tensors, and the size (bytes) of the whole buffer.
    """
    specs, end = [], 0
    for name, dtype, shape, nbytes in tensors:
        offset = _aligned(end)
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        end = offset + nbytes
    return tuple(specs), end


class ManifestBuilder:
    """Builds a manifest while its buffer is still being filled: digests are computed in parallel threads.

    ``flat`` contains ``tensors`` as :func:`layout` places them. The builder is a context manager whose exit ends the
    threads. Digests of 1 GiB take 0.98 s with one thread and 0.53 s with two (measured on two cores).
    """

    def __init__(
        self,
        version: Version,
        tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
        flat: memoryview,
        secret: bytes,
        chunk_bytes: int = CHUNK_BYTES,
        threads: int | None = None,
        *,
        part: int = 0,
        of: int = 1,
        rank: int = 0,
        before: memoryview | None = None,
    ) -> None:
        """Start the threads. The buffer is part ``part`` of ``of`` parts, and ``rank`` publishes it.

        ``before`` contains the same tensors of the version before, of which the threads find the changes.

        Raises ValueError if the buffer does not have the size of the tensors.
        """
        specs, nbytes = layout(tensors)
        if flat.nbytes != nbytes:
            raise ValueError(f"{version}: the buffer has {flat.nbytes} bytes, but its tensors need {nbytes}")
        self._version, self._specs, self._flat, self._secret = version, specs, flat, secret
        self._parts, self._of = (Part(part, rank, 0, nbytes, fastest_hash()),), of
        self._chunks = [(start, flat[start : start + chunk_bytes]) for start in range(0, nbytes, chunk_bytes)]
        self._before = before if before is not None and before.nbytes == nbytes else None
        self._digests: list[Future[bytes]] = []
        self._changes: list[Future[bytes | None]] = []
        self._pool = ThreadPoolExecutor(threads or digest_threads(), thread_name_prefix="rrl-digest")

    def __enter__(self) -> ManifestBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def mark_filled(self, end: int) -> None:
        """Declare that the bytes before ``end`` are final."""
        while len(self._digests) < len(self._chunks):
            start, chunk = self._chunks[len(self._digests)]
            if start + chunk.nbytes > end:
                break
            self._digests.append(self._pool.submit(digest, chunk))
            if self._before is not None:
                self._changes.append(self._pool.submit(changed_words, self._before[start : start + len(chunk)], chunk))

    def sign(self) -> Manifest:
        """Return the signed manifest. The whole buffer must have been marked as filled."""
        self.mark_filled(self._flat.nbytes)
        chunks = [
            Chunk(start, data.nbytes, future.result())
            for (start, data), future in zip(self._chunks, self._digests, strict=True)
        ]
        manifest = Manifest(self._version, self._specs, self._flat.nbytes, tuple(chunks), self._parts, self._of)
        return _signed(manifest, self._secret)

    @property
    def changes(self) -> tuple[bytes | None, ...]:
        """The changes of each chunk since the version before (:func:`.delta.changed_words`); empty without that."""
        return tuple(future.result() for future in self._changes)


def describe(
    version: Version,
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    flat: memoryview,
    secret: bytes,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """Return the signed manifest of ``flat``, which holds ``tensors`` as :func:`layout` places them.

    Raises:
        ValueError: The buffer does not have the size of the tensors.
    """
    with ManifestBuilder(version, tensors, flat, secret, chunk_bytes) as builder:
        return builder.sign()


def placed(part: Manifest, offset: int) -> tuple[tuple[TensorSpec, ...], tuple[Chunk, ...]]:
    """Return the tensors and chunks of a part whose first byte is at ``offset`` of the version."""
    replace = msgspec.structs.replace
    return (
        tuple(replace(spec, offset=offset + spec.offset) for spec in part.tensors),
        tuple(replace(chunk, offset=offset + chunk.offset) for chunk in part.chunks),
    )


def join_parts(parts: Iterable[Manifest], secret: bytes) -> Manifest:
    """Return the signed manifest of a version from the manifests of all its parts, in any order.

    The parts must be of the same version and have different numbers. The gaps between them, which align the tensors,
    belong to no chunk. The manifest of the only part of a version is the manifest of the version.
    """
    tensors, chunks, places, end = list[TensorSpec](), list[Chunk](), list[Part](), 0
    for part in sorted(parts, key=lambda each: each.parts[0].number):
        offset = _aligned(end) if part.nbytes else end
        specs, digests = placed(part, offset)
        tensors += specs
        chunks += digests
        places.append(msgspec.structs.replace(part.parts[0], offset=offset))
        end = offset + part.nbytes
    return _signed(Manifest(part.version, tuple(tensors), end, tuple(chunks), tuple(places), part.of), secret)


def digest_threads() -> int:
    """Return how many threads compute digests; they run in parallel, since hashlib releases the interpreter lock."""
    return min(_MAX_DIGEST_THREADS, len(os.sched_getaffinity(0)))


@cache
def fastest_hash() -> HashName:
    """Return the hash function that is fastest on this CPU: SHA-256 if the CPU has instructions for it."""
    try:
        return "sha256" if _SHA_FLAG.search(Path("/proc/cpuinfo").read_text()) else "blake2b"
    except OSError:
        return "blake2b"


def digest(data: memoryview, name: HashName | None = None) -> bytes:
    """Return the digest of ``data`` as 16 bytes, by the hash function ``name`` or the fastest one.

    The digest is cryptographic, because a source may send forged bytes. blake2b reaches 0.4 to 1.5 GB/s on one core;
    SHA-256 reaches 1.4 to 2.2 GB/s, but only with the CPU's SHA extensions (docs/sources.md, UCX).
    """
    if (name or fastest_hash()) == "sha256":
        return hashlib.sha256(data).digest()[:_DIGEST_BYTES]
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes | bytearray, version: Version, secret: bytes) -> Manifest:
    """Decode and verify the manifest of ``version`` that a source sent.

    Raises:
        ValueError: ``data`` is not a manifest; or the manifest is not signed with the run's secret, belongs to another
            version, or has chunks or tensors that do not fit its buffer.
    """
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a manifest: {error}") from error
    if not hmac.compare_digest(manifest.mac, _mac(manifest, secret)):
        raise ValueError("the manifest is not signed with this run's secret")
    if manifest.version != version:
        raise ValueError(f"requested {version}, received the manifest of {manifest.version}")
    end = 0
    for chunk in manifest.chunks:
        if not 0 <= chunk.offset - end < ALIGN_BYTES or chunk.nbytes <= 0:
            raise ValueError(f"{version}: chunks are not contiguous at byte {end}")
        end = chunk.offset + chunk.nbytes
    if end != manifest.nbytes:
        raise ValueError(f"{version}: the chunks end at byte {end}, but the buffer at byte {manifest.nbytes}")
    if any(spec.offset < 0 or spec.nbytes < 0 or spec.offset + spec.nbytes > end for spec in manifest.tensors):
        raise ValueError(f"{version}: a tensor is outside the buffer")
    if not manifest.parts or any(part.offset < 0 or part.offset + part.nbytes > end for part in manifest.parts):
        raise ValueError(f"{version}: a part is outside the buffer")
    return manifest


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _signed(manifest: Manifest, secret: bytes) -> Manifest:
    return msgspec.structs.replace(manifest, mac=_mac(manifest, secret))


def _mac(manifest: Manifest, secret: bytes) -> bytes:
    return hmac.digest(secret, b"rrl-manifest" + encode(msgspec.structs.replace(manifest, mac=b"")), "sha256")
