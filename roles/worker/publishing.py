"""Publishing a weight version: by one rank of the trainer, or in parts by several ranks.

Each rank writes its part into memory of its own and signs a manifest of it. Rank 0 requests the manifests of all other
parts from their ranks, joins them to the manifest of the version, and offers the version. The other ranks request this
manifest from rank 0 and then serve the bytes of their parts. So a rank that dies before its part is complete leaves no
version, and an older incarnation is never asked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from ...core.text import shortened
from ...core.types import Version, member_id, rank_of
from ...transport.weights.manifest import Manifest, ManifestBuilder, TensorSpec, join_parts, layout, placed
from ..checkpoints.stored_tensors import DTYPES
from ..launcher.end_report import Misuse
from .connection import ManagerConnection

TensorDescription = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and size in bytes of a tensor."""
Write = Callable[[memoryview], None]
"""Writes a whole tensor into the memory that it is given."""
_COPY_SLICE_BYTES = 8 * 2**20
"""Bytes copied at a time. A copy holds the GIL and so blocks every other thread, the heartbeats included. Measured for
1 GiB: in slices of this size the copy took 0.36 s, and no thread was blocked for more than 9 ms. Without slices it took
up to 1.4 s, during which all threads were blocked."""


def publish_part(
    connection: ManagerConnection,
    chunk_bytes: int,
    number: int,
    described: Sequence[TensorDescription],
    writes: Iterable[Write],
    part: int = 0,
    of: int = 1,
) -> None:
    """Serve one part of the version of step ``number``; return once the version is complete.

    May be called in any thread, but only in one at a time. The version becomes current as a whole: the store of this
    process gets it once the last tensor of its last part is written and its manifest is signed. If a process of the
    trainer ends before that, or on an exception, the previous version stays current.

    Args:
        connection: The connection of the worker.
        chunk_bytes: Size of the chunks that receivers request, in bytes.
        number: The training step that produced the weights.
        described: Description of each tensor.
        writes: The functions that write the tensors, in the same order. Each tensor is written before the iterator is
            advanced to the next function.
        part: Number of the part.
        of: Number of parts.

    Raises:
        ValueError: The number of functions differs from the number of descriptions.
        Misuse: An argument is malformed, or the part contradicts another part, or the version before.
    """
    for key, value in (("step", number), ("part", part), ("of", of)):
        if type(value) is not int:
            raise Misuse(f"me.publish: {key} = {shortened(value)}, which is not an int")
    if number < 0:
        raise Misuse(f"me.publish: step = {number}: the first version is that of step 0")
    _check_described(number, described)
    version, store = Version(number, connection.launch.incarnation.number), connection.weights
    rank = rank_of(connection.launch.incarnation.replica)
    if not 0 <= part < of:
        raise Misuse(f"step {number}: part = {part} of = {of}: the parts are 0 to of - 1")
    if rank and of == 1:
        raise Misuse(f"step {number}: rank {rank} publishes a whole version; only rank 0 may, or all ranks parts of it")
    if of > 1 and of > connection.world:
        raise Misuse(f"step {number}: of = {of}, but this trainer has {connection.world} ranks")
    specs, nbytes = layout(described)
    flat, before = store.allocate(nbytes), store.current()
    builder = ManifestBuilder(
        version,
        described,
        flat,
        connection.keys.secret,
        chunk_bytes,
        part=part,
        of=of,
        rank=rank,
        before=before.flat if before is not None and connection.deltas.enabled else None,
    )
    with builder:
        for spec, write in zip(specs, writes, strict=True):
            end = spec.offset + spec.nbytes
            write(flat[spec.offset : end])
            builder.mark_filled(end)
        mine = builder.sign()
        changes = builder.changes
    if before is not None and before.manifest.version == version:
        if not _contains(before.manifest, mine):
            raise Misuse(f"step {number}: part {part} was published before with other contents")
        return
    with store.awaiting(version, mine if rank else None):
        manifest = _manifest_of_version(connection, mine)
        if rank == 0 and before is not None:
            _check_same_tensors(before.manifest, manifest)
        store.offer(manifest, flat, part, changes)
    if rank == 0:
        connection.announce_version(version)


def checked_tensors(number: int, tensors: object) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """Return the tensors of ``me.publish`` with their bytes as a flat view. Raises TypeError or Misuse."""
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        raise TypeError("me.publish(step, tensors): pass rrl.pack(state_dict), not the state dict itself")
    checked = []
    for each in tensors:
        match each:
            case [name, dtype, shape, data]:
                checked.append((name, dtype, shape, _flat(f"step {number}: tensor {shortened(name)}", data)))
            case _:
                expected = "(name, dtype, shape, memoryview), as rrl.pack(state_dict) returns"
                raise Misuse(f"step {number}: {shortened(each)} is not a tensor of the form {expected}")
    return checked


def _check_described(number: int, described: Sequence[TensorDescription]) -> None:
    """Raise Misuse if a description is malformed, names a tensor twice, or has a size that the tensor cannot have."""
    names = set[str]()
    for name, dtype, shape, nbytes in described:
        at = f"step {number}: tensor {shortened(name)}"
        if not isinstance(name, str) or name in names:
            raise Misuse(f"{at}: " + ("it is given twice" if name in names else "its name is not a str"))
        names.add(name)
        if not isinstance(dtype, str):
            raise Misuse(f"{at}: its dtype is {shortened(dtype)}, which is not a str such as 'float32'")
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise Misuse(f"{at}: its shape is {shortened(shape)}, which is not a tuple of ints")
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype][1] != nbytes:
            raise Misuse(f"{at}: {nbytes} bytes are not the size of {_shown((dtype, tuple(shape)))}")


def copies(contents: Iterable[memoryview]) -> Iterator[Write]:
    """Yield, for the bytes of each tensor, a function that copies these bytes."""
    for content in contents:
        yield partial(_copy, _flat("a tensor", content))


def _flat(at: str, content: object) -> memoryview:
    """Return a flat view of the bytes of a tensor. Raises Misuse if there is none; ``at`` says where."""
    if not isinstance(content, memoryview) or not content.c_contiguous:
        kind = "a view with gaps" if isinstance(content, memoryview) else f"of type {type(content).__name__}"
        raise Misuse(f"{at}: its bytes are {kind}; they must be a contiguous memoryview, as rrl.pack returns")
    return content.cast("B") if content.nbytes else memoryview(b"")


def _copy(content: memoryview, into: memoryview) -> None:
    """Copy ``content`` in slices, between which other threads can run."""
    if len(content) != len(into):
        raise Misuse(f"a tensor has {len(content)} bytes, but its description {len(into)}")
    for start in range(0, len(into), _COPY_SLICE_BYTES):
        copied = slice(start, start + _COPY_SLICE_BYTES)
        into[copied] = content[copied]


def _manifest_of_version(connection: ManagerConnection, mine: Manifest) -> Manifest:
    """Return the manifest of the version to which the part belongs, once all parts are published."""
    (part,) = mine.parts
    if part.rank == 0:
        if mine.of == 1:
            return mine
        return join_parts(
            connection.await_result(connection.submit(_collect(connection, mine))), connection.keys.secret
        )
    with connection.status.blocked_on_replica(connection.launch.incarnation.gang.replica):
        manifest = connection.await_result(connection.submit(connection.offered_manifest(0, mine.version)))
    if not _contains(manifest, mine):
        raise Misuse(
            f"step {mine.version.step}: rank {part.rank} publishes part {part.number} of {mine.of}, but the version is"
            f" complete with the parts of ranks {', '.join(str(each.rank) for each in manifest.parts)}"
        )
    return manifest


async def _collect(connection: ManagerConnection, mine: Manifest) -> list[Manifest]:
    """Return the manifests of all parts; ``mine`` is the part of rank 0.

    If each rank has to publish a part, this process reports that it waits for the first rank that has not.
    """
    gang, parts = connection.launch.incarnation.gang.replica, [mine]
    asked = {
        asyncio.ensure_future(connection.offered_manifest(rank, mine.version)): member_id(gang, rank)
        for rank in range(1, connection.world)
    }
    try:
        while len(parts) < mine.of:
            awaited = next(iter(asked.values())) if mine.of == connection.world else None
            with connection.status.blocked_on_replica(awaited):
                offered, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for each in offered:
                del asked[each]
                _check_fits(parts, part := each.result())
                parts.append(part)
    finally:
        for each in asked:
            each.cancel()
    return parts


def _check_fits(parts: Sequence[Manifest], new: Manifest) -> None:
    """Raise Misuse if a part contradicts the parts so far, of which the first is that of rank 0."""
    step, (part,), (first, *_) = new.version.step, new.parts, parts
    if new.of != first.of:
        raise Misuse(f"step {step}: of = {first.of} on rank 0, but of = {new.of} on rank {part.rank}")
    for other in parts:
        ranks = f"ranks {other.parts[0].rank} and {part.rank}"
        if other.parts[0].number == part.number:
            raise Misuse(f"step {step}: {ranks} both publish part {part.number} of {new.of}")
        if twice := {spec.name for spec in other.tensors} & {spec.name for spec in new.tensors}:
            raise Misuse(f"step {step}: {ranks} both publish {_named(twice)}; each tensor belongs to one part")


def _check_same_tensors(before: Manifest, manifest: Manifest) -> None:
    """Raise Misuse if a version has other tensors than the version before it, or other dtypes or shapes."""
    old, new = _kinds(before.tensors), _kinds(manifest.tensors)
    now, then = f"step {manifest.version.step}", f"step {before.version.step}"
    if changed := [name for name in new if name in old and new[name] != old[name]]:
        name = changed[0]
        raise Misuse(f"{now}: {name} is {_shown(new[name])}, but {_shown(old[name])} in {then}")
    if missing := old.keys() - new.keys():
        raise Misuse(f"{now}: it lacks {_named(missing)} of {then}; a version has all tensors of the model")
    if added := new.keys() - old.keys():
        raise Misuse(f"{now}: it has {_named(added)}, which {then} lacks; a version has all tensors of the model")


def _contains(whole: Manifest, part: Manifest) -> bool:
    """Return whether the part, with the same contents, belongs to the version."""
    (mine,) = part.parts
    at = next((each for each in whole.parts if (each.number, each.rank) == (mine.number, mine.rank)), None)
    if at is None or part.of != whole.of:
        return False
    tensors, chunks = placed(part, at.offset)
    return set(tensors) <= set(whole.tensors) and set(chunks) <= set(whole.chunks)


def _kinds(tensors: Iterable[TensorSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {spec.name: (spec.dtype, spec.shape) for spec in tensors}


def _shown(kind: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = kind
    return f"{dtype} {list(shape)}"


def _named(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return first + (f" and {len(others)} more tensors" if others else "")
