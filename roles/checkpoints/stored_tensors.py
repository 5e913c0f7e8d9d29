"""The tensors of a checkpoint as safetensors files with one index, written and read block by block without torch.

Each member of a trainer writes its own rows of each tensor, and the index says which file has which rows. The
safetensors library needs all tensors of a file in memory. Here a tensor is written while it is read, which the simple
format permits: eight bytes with the length of the header, the header (JSON), and the bytes of the tensors one after
another. Exports also run where rrl is installed without torch, and in the manager's Slurm job, with 1 GB of memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

INDEX = "rrl_tensors.json"
"""Name of the index. A checkpoint of the built-in trainer has it, one of a user's own trainer does not."""
TORCH_FILES = frozenset({".metadata", "about.json"})
"""Files of each checkpoint that an older rrl wrote, with torch.distributed.checkpoint."""
OLDER_RRL = "an older rrl wrote it in torch's format; export it with rrl at commit 7bd4b420"
"""What a user can do with such a checkpoint. The commit is one of the last that read it; there was no release yet."""
WEIGHTS_PREFIX = "model."
"""Prefix of the weights among the tensors of a checkpoint; the other tensors are the optimizer's moments."""
BLOCK_BYTES = 4 * 2**20
"""Maximum number of bytes of a tensor that are in memory at a time, unless a single row is larger."""
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Name in safetensors files, and size of an element in bytes, of each dtype of torch."""
_ALIGNMENT_BYTES = 8
"""Alignment of the first tensor in bytes, as in the safetensors library."""


class UnreadableTensors(Exception):
    """This version of rrl cannot read the files as a checkpoint. The exception's text is the reason."""


class Rows(Struct, frozen=True, array_like=True):
    """Consecutive rows of a tensor in one file; ``end`` is the row after the last one."""

    begin: int
    end: int
    file: str
    offset: int
    """Position of the first row in bytes from the beginning of the file."""


class StoredTensor(Struct, frozen=True):
    """A tensor in the files of a folder. A tensor without dimensions is one row."""

    dtype: str
    """Name of the dtype as in torch, for example ``bfloat16``."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: list[Rows]
    """All rows in their order; in the report of one member, only the rows that this member wrote."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.shape[0] if self.shape else 1

    def blocks(self, folder: Path, begin: int, end: int) -> Iterator[bytearray]:
        """Yield the elements of the rows from ``begin`` up to ``end``, in blocks of whole rows.

        Raises:
            UnreadableTensors: A file is too short.
            OSError: A file could not be read.
        """
        row_bytes = math.prod(self.shape[1:]) * DTYPES[self.dtype][1]
        rows_at_once = max(1, BLOCK_BYTES // max(1, row_bytes))
        for part in self.parts:
            first, last = max(begin, part.begin), min(end, part.end)
            if first >= last or not row_bytes:
                continue
            with (folder / part.file).open("rb") as file:
                file.seek(part.offset + (first - part.begin) * row_bytes)
                for row in range(first, last, rows_at_once):
                    block = bytearray((min(row + rows_at_once, last) - row) * row_bytes)
                    if file.readinto(block) < len(block):
                        raise UnreadableTensors(f"{folder / part.file} ends before row {last} of a tensor")
                    yield block


class Index(Struct, frozen=True):
    """The content of the file :data:`INDEX`.

    Raises:
        ValueError: A tensor has an unknown dtype, or its parts are not all of its rows in their order.
    """

    world: int
    """Number of members that have written the checkpoint."""
    tensors: dict[str, StoredTensor]

    def __post_init__(self) -> None:
        for name, one in self.tensors.items():
            if one.dtype not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {one.dtype}")
            following = 0
            for part in one.parts:
                if part.begin != following or part.end < part.begin:
                    raise ValueError(f"the parts of {name} are not its consecutive rows")
                following = part.end
            if following != one.rows:
                raise ValueError(f"{name} has {one.rows} rows, of which {following} are stored")


def write_index(folder: Path, members: Sequence[Mapping[str, StoredTensor]]) -> Path:
    """Write the index of the tensors that the members have written, in the order of their ranks; return its path.

    Raises:
        OSError: The file could not be written.
        ValueError: The reports do not belong together.
    """
    tensors: dict[str, StoredTensor] = {}
    for reported in members:
        for name, one in reported.items():
            tensors.setdefault(name, StoredTensor(one.dtype, one.shape, [])).parts.extend(one.parts)
    content = msgspec.json.encode(Index(len(members), tensors))
    with (folder / INDEX).open("xb") as file:
        file.write(content)
    return folder / INDEX


def read_index(folder: Path, files: Collection[str]) -> Index:
    """Return the index of a checkpoint. ``files`` are the names of the checkpoint's files.

    Raises:
        UnreadableTensors: The index is not valid, or names a file that is not in ``files``.
        OSError: The index could not be read.
    """
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTensors(f"{path}: {error}") from None
    named = {part.file for one in index.tensors.values() for part in one.parts}
    if unknown := min(named.difference(files), default=None):
        raise UnreadableTensors(f"{path} names {unknown}, which was not committed")
    return index


def write_file(
    path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], Iterable[bytes | memoryview]]]
) -> dict[str, int]:
    """Write a new safetensors file, which is not synced; return the position of each tensor in it, in bytes.

    ``tensors`` are the name, dtype (as in torch), shape and elements (in blocks) of each tensor. Raises OSError.
    """
    ordered = sorted(tensors, key=lambda one: -DTYPES[one[1]][1])  # large elements first, so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = dict[str, int](), 0
    for name, dtype, shape, _ in ordered:
        code, itemsize = DTYPES[dtype]
        begins[name], end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begins[name], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    prologue = len(encoded).to_bytes(8, "little") + encoded
    with path.open("xb") as file:
        file.write(prologue)
        for *_, blocks in ordered:
            file.writelines(blocks)
    return {name: len(prologue) + begin for name, begin in begins.items()}
