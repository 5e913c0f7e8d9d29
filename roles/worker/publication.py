"""Publishes the weight versions of this process: fills the memory of a version, signs its manifest, and offers it.

A version becomes current as a whole: the store of this process gets it once its last tensor is written and its manifest
is signed. If the process ends before that, or on an exception, the previous version stays current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ...core.types import Version
from ...transport.weights.manifest import ManifestBuilder, layout
from .connection import ManagerConnection

TensorDescription = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and size in bytes of a tensor."""
Write = Callable[[memoryview], None]
"""Writes a whole tensor into the memory that it is given."""
_COPY_SLICE_BYTES = 8 * 2**20
"""Bytes copied at a time. A copy holds the GIL and so blocks every other thread, the heartbeats included. Measured for
1 GiB: in slices of this size the copy took 0.36 s, and no thread was blocked for more than 9 ms. Without slices it took
up to 1.4 s, during which all threads were blocked."""


def publish(
    connection: ManagerConnection,
    chunk_bytes: int,
    number: int,
    described: Sequence[TensorDescription],
    writes: Iterable[Write],
) -> None:
    """Serve weights as the version of step ``number``. May be called in any thread, but only in one at a time.

    Args:
        connection: The connection of the worker.
        chunk_bytes: Size of the chunks that receivers request, in bytes.
        number: The training step that produced the weights.
        described: Description of each tensor.
        writes: The functions that write the tensors, in the same order. Each tensor is written before the iterator is
            advanced to the next function.

    Raises:
        ValueError: The number of functions differs from the number of descriptions.
    """
    specs, nbytes = layout(described)
    flat = connection.weights.allocate(nbytes)
    version = Version(number, connection.launch.incarnation.number)
    with ManifestBuilder(version, described, flat, connection.keys.secret, chunk_bytes) as builder:
        for spec, write in zip(specs, writes, strict=True):
            end = spec.offset + spec.nbytes
            write(flat[spec.offset : end])
            builder.mark_filled(end)
        manifest = builder.sign()
    connection.weights.offer(manifest, flat)
    connection.announce_version(version)


def copies(contents: Iterable[memoryview]) -> Iterator[Write]:
    """Yield, for the bytes of each tensor, a function that copies these bytes."""
    for content in contents:
        yield partial(_copy, content.cast("B") if content.format != "B" else content)


def _copy(content: memoryview, into: memoryview) -> None:
    """Copy ``content`` in slices, between which other threads can run."""
    for start in range(0, len(into), _COPY_SLICE_BYTES):
        copied = slice(start, start + _COPY_SLICE_BYTES)
        into[copied] = content[copied]
