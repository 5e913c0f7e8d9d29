"""A weight version described: which tensors lie where in one flat buffer, cut into chunks, each with its digest.

Tensors are packed back to back (each starts at a multiple of 64 bytes) into one logical buffer; chunks cut that buffer
without regard to tensors. The manifest carries an HMAC with the run's secret, so that a chunk is trusted because of
its digest, whoever it came from.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from msgspec import Struct

from ...core.types import Version

CHUNK_BYTES = 8 * 2**20
"""what a dead source costs at most per request in flight; as in the fan-out lab (docs/sources.md, UCX)"""
ALIGN_BYTES = 64
"""bytes; a cache line, and enough for any dtype and vector load"""
_DIGEST_BYTES = 16
_MAX_DIGEST_THREADS = 8
"""12 GB/s, were memory fast enough; the others of a node's cores are the role's"""


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
    """Place tensors, given as ``(name, dtype, shape, nbytes)``, one behind the other at aligned offsets. Return their
    specs and the size (bytes) of the whole buffer."""
    specs, end = [], 0
    for name, dtype, shape, nbytes in tensors:
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        end = offset + nbytes
    return tuple(specs), end


class ManifestBuilder:
    """A manifest in the making: digests are computed in threads, side by side, while the buffer is still being filled.
    1 GiB, measured on two cores: 0.98 s in one thread, 0.53 s in two. (Who receives verifies in threads, too, while the
    next chunks come: 1 GiB over tcp takes 0.23 s of CPU in the loop, and 1.0 s in those threads, however many.)

    ``flat`` holds ``tensors`` as :func:`layout` places them. Used as a context manager, which ends the threads."""

    def __init__(
        self,
        version: Version,
        tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
        flat: memoryview,
        secret: bytes,
        chunk_bytes: int = CHUNK_BYTES,
        threads: int | None = None,
    ) -> None:
        """Raises ValueError when the buffer is not of the tensors' size."""
        specs, nbytes = layout(tensors)
        if flat.nbytes != nbytes:
            raise ValueError(f"{version}: the buffer has {flat.nbytes} bytes, its tensors need {nbytes}")
        self._version, self._specs, self._flat, self._secret = version, specs, flat, secret
        self._chunks = [(start, flat[start : start + chunk_bytes]) for start in range(0, nbytes, chunk_bytes)]
        self._digests: list[Future[bytes]] = []
        self._pool = ThreadPoolExecutor(threads or digest_threads(), thread_name_prefix="rrl-digest")

    def __enter__(self) -> ManifestBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def mark_filled(self, end: int) -> None:
        """What lies before ``end`` does not change any more."""
        while len(self._digests) < len(self._chunks):
            start, chunk = self._chunks[len(self._digests)]
            if start + chunk.nbytes > end:
                break
            self._digests.append(self._pool.submit(digest, chunk))

    def sign(self) -> Manifest:
        """The signed manifest: all of the buffer is filled."""
        self.mark_filled(self._flat.nbytes)
        chunks = [
            Chunk(start, part.nbytes, made.result())
            for (start, part), made in zip(self._chunks, self._digests, strict=True)
        ]
        bare = Manifest(self._version, self._specs, self._flat.nbytes, tuple(chunks))
        return msgspec.structs.replace(bare, mac=_mac(bare, self._secret))


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
    with ManifestBuilder(version, tensors, flat, secret, chunk_bytes) as describing:
        return describing.sign()


def digest_threads() -> int:
    """How many digests are computed at a time: hashlib lets other threads run meanwhile."""
    return min(_MAX_DIGEST_THREADS, len(os.sched_getaffinity(0)))


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
