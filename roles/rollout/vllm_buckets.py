"""Weights on their way to vLLM's worker processes: a bucket of them lies once in memory, and each worker maps it.

vLLM would send a copy to each of them, through one socket. 256 MiB for 8 readers, measured on two busy cores: 1.5 s by
vLLM's queue, 0.7 s like this, of which 0.1 to 0.4 s are the writing and the rest is the readers' own. It has no name in
any file system: whoever is killed leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rrl.roles.tensors import pack, unpack
from rrl.transport.weights.manifest import TensorSpec, layout

BUCKET = 256 * 2**20
"""bytes of tensors that lie there at once, or one tensor that is larger"""
NAME = "rrl-weights"
"""in /proc/PID/fd, for people"""


def buckets(tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, so many in each as ``nbytes`` allow, and at least one."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def shared(bucket: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
    """Inside, other processes of this user can map the bucket: what :func:`mapped` is to be told. Its memory is given
    back once this is left and nobody has it mapped any more: vLLM holds on to tensors of a layer until it has them
    all, hence a new one for each bucket."""
    packed = pack(dict(bucket))
    specs, nbytes = layout([(name, dtype, shape, content.nbytes) for name, dtype, shape, content in packed])
    fd = os.memfd_create(NAME)
    try:
        os.ftruncate(fd, max(1, nbytes))
        for spec, (*_, content) in zip(specs, packed, strict=True):
            done = 0
            while done < len(content):  # written, not copied into a mapping: no page is zeroed first
                done += os.pwrite(fd, content[done:], spec.offset + done)
        yield {"place": f"/proc/{os.getpid()}/fd/{fd}", "specs": specs}
    finally:
        os.close(fd)


def mapped(place: str, specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """The tensors of a :func:`shared` bucket, as views of it. Raises OSError where it is not there any more."""
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return list(unpack(specs, memoryview(pages)))
