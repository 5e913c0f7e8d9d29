"""Read the tensors of a sharded checkpoint block by block, without torch and in little memory.

The files are those of torch.distributed.checkpoint. ``.metadata`` is a pickle that lists where each shard of each
tensor is stored. A shard is stored as torch.save writes it, as a ZIP archive inside of a data file. The archive's
member ``data/0`` has the elements, uncompressed. torch's own reader loads a tensor as a whole, and needs torch, whose
import takes 300 MB of memory. Exports also run where rrl is installed without torch, and in the manager's Slurm job,
which has 1 GB of memory. The unpickling here creates only :class:`_Recorded` objects, so it cannot run code from the
file.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

METADATA = ".metadata"
"""Name of the file that lists the file of each part of each tensor. torch unpickles this file, so its digest is
verified first."""
BLOCK_BYTES = 4 * 2**20
"""Maximum number of bytes of a tensor that are in memory at a time."""


class UnreadableTensors(Exception):
    """This version of rrl cannot read the files as a checkpoint. The exception's text is the reason."""


class Shard(Struct, frozen=True):
    """Some consecutive rows of a tensor, and where they are stored."""

    file: str
    at: int
    """Offset (bytes) of the shard's archive in the file."""
    nbytes: int
    """Size (bytes) of the shard's archive."""
    elements: int


class StoredTensor(Struct, frozen=True):
    """A tensor in the files of a folder."""

    name: str
    dtype: str
    """Name of the dtype as in torch, for example ``bfloat16``."""
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    """The shards that have elements, in the order of their rows."""

    def blocks(self, folder: Path, itemsize: int) -> Iterator[bytes]:
        """Yield blocks of whole elements of ``itemsize`` bytes, in order; each has at most ``BLOCK_BYTES``.

        Raises:
            UnreadableTensors: A shard does not have the elements that ``.metadata`` promises.
            OSError: A file could not be read.
        """
        for shard in self.shards:
            with (folder / shard.file).open("rb") as file:
                yield from _blocks(file, shard, shard.elements * itemsize, f"{folder / shard.file}: {self.name}")


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the checkpoint files of ``folder`` by name.

    Raises:
        UnreadableTensors: torch has not written ``.metadata``, or the shards of a tensor are not its consecutive rows.
        OSError: ``.metadata`` could not be read.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        positions = {(one.fqn, tuple(one.offset)): stored for one, stored in metadata.storage_data.items()}
        return {name: _stored_tensor(name, tensor, positions) for name, tensor in metadata.state_dict_metadata.items()}
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnreadableTensors(f"{path} cannot be read as torch's list of tensors: {error!r}") from None


def _stored_tensor(name: str, tensor: Any, positions: dict[tuple[str, tuple[int, ...]], Any]) -> StoredTensor:
    shape, shards, following = tuple(tensor.size), list[Shard](), 0
    rows = shape[0] if shape else 1
    for chunk in sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets)):
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if not (elements := math.prod(sizes)):
            continue
        if any(offsets[1:]) or sizes[1:] != shape[1:] or (offsets or (0,))[0] != following:
            raise UnreadableTensors(f"{name} is stored in parts that are not consecutive rows, which rrl cannot read")
        following += sizes[0] if sizes else 1
        stored = positions[name, offsets]
        shards.append(Shard(stored.relative_path, stored.offset, stored.length, elements))
    if math.prod(shape) and following != rows:
        raise UnreadableTensors(f"{name} has {rows} rows, of which {following} are stored")
    return StoredTensor(name, tensor.properties.dtype, shape, tuple(shards))


# ── torch's pickle ─────────────────────────────────────────────────────────────────────────────────────────────────
class _Recorded:
    """Replaces an object of any class in torch's pickle. The object's state becomes attributes."""

    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)


class _TensorProperties(_Recorded):
    """The properties of a tensor. Their pickled state is a tuple that begins with the dtype."""

    dtype = ""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


def _size(dimensions: tuple[int, ...] = ()) -> tuple[int, ...]:
    return tuple(dimensions)


_CLASSES = {"TensorProperties": _TensorProperties, "Size": _size}
_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"})


class _Unpickler(pickle.Unpickler):
    """Creates only :class:`_Recorded` objects, numbers, texts and containers."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or of a dtype of torch."""
        if module == "torch" and name in _DTYPES:
            return name
        return _CLASSES.get(name, _Recorded)


# ── the elements of a shard ────────────────────────────────────────────────────────────────────────────────────────
def _blocks(file: BinaryIO, shard: Shard, expected_bytes: int, where: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(_Part(file, shard.at, shard.nbytes)) as archive:
            (member,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
            if member.file_size != expected_bytes:
                raise UnreadableTensors(f"{where}: has {member.file_size} bytes, not {expected_bytes}")
            with archive.open(member) as stored:
                for _ in range(math.ceil(expected_bytes / BLOCK_BYTES)):
                    yield stored.read(BLOCK_BYTES)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UnreadableTensors(f"{where}: cannot be read as a tensor that torch saved: {error}") from None


class _Part(io.RawIOBase):
    """A part of a file that can be read like a whole file."""

    def __init__(self, file: BinaryIO, at: int, nbytes: int) -> None:
        self._file, self._at, self._nbytes, self._position = file, at, nbytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position of the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position in the part."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes from the position on, and return their number; 0 at the end of the part."""
        view = memoryview(buffer)[: max(0, self._nbytes - self._position)]
        self._file.seek(self._at + self._position)
        count: int = self._file.readinto(view) if view else 0  # type: ignore[attr-defined]
        self._position += count
        return count
