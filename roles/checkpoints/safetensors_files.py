"""Write tensors of a checkpoint as the safetensors files of a Hugging Face folder, block by block.

The safetensors library needs all tensors of a file in memory. This module writes each tensor while it is read, which
the simple format permits. A file has eight bytes with the length of the header, the header (JSON), and the bytes of the
tensors one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from .stored_tensors import StoredTensor, UnreadableTensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""Size of a file in bytes above which the next tensor begins another file. It is the default of save_pretrained in
version 4 of transformers; version 5 has 50 GB."""
_FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_ALIGNMENT_BYTES = 8
"""Alignment of the first tensor in bytes, as in the safetensors library."""


class _Output(Struct, frozen=True):
    """A stored tensor, and the dtype in which it is written."""

    stored: StoredTensor
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored.shape) * _ITEMSIZES[self.dtype]

    def blocks(self, source: Path) -> Iterable[bytes]:
        for block in self.stored.blocks(source, _ITEMSIZES[self.stored.dtype]):
            yield block if self.dtype == self.stored.dtype else _to_bfloat16(block)


def write_weights(
    tensors: Iterable[StoredTensor], source: Path, folder: Path, dtype: str, max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write tensors into the existing, empty ``folder``; return the files, which are not synced.

    Args:
        tensors: The tensors, in the order in which they are distributed to files.
        source: The folder of the checkpoint's files.
        folder: The folder to write into.
        dtype: The dtype of floating-point tensors in the files; other tensors keep their dtype.
        max_file_bytes: Size of a file above which the next tensor begins another file.

    Raises:
        UnreadableTensors: A tensor cannot be read, or cannot be converted to ``dtype``.
        OSError: A file could not be read or written.
    """
    files = _files(_outputs(tensors, dtype), max_file_bytes)
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    written = [_write(folder / name, outputs, source) for name, outputs in zip(names, files, strict=True)]
    if count > 1:
        weight_map = {one.stored.name: name for name, outputs in zip(names, files, strict=True) for one in outputs}
        total = sum(one.nbytes for outputs in files for one in outputs)
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        written.append(folder / INDEX)
    return written


def _outputs(tensors: Iterable[StoredTensor], dtype: str) -> list[_Output]:
    outputs = [_Output(one, dtype if "float" in one.dtype else one.dtype) for one in tensors]
    for one in outputs:
        if one.dtype != one.stored.dtype and (one.stored.dtype, one.dtype) != ("float32", "bfloat16"):
            raise UnreadableTensors(
                f"{one.stored.name} is stored as {one.stored.dtype}, which rrl cannot convert to {one.dtype}"
            )
    return outputs


def _files(outputs: Sequence[_Output], max_file_bytes: int) -> list[list[_Output]]:
    """Return the tensors of each file, ordered from large to small elements, so that all tensors are aligned."""
    files, size = [list[_Output]()], 0
    for one in outputs:
        if files[-1] and size + one.nbytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.nbytes
    return [sorted(file, key=lambda one: -_ITEMSIZES[one.dtype]) for file in files]


def _write(path: Path, outputs: Sequence[_Output], source: Path) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in outputs:
        begin, end = end, end + one.nbytes
        header[one.stored.name] = {
            "dtype": _FORMAT_DTYPES[one.dtype],
            "shape": list(one.stored.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for one in outputs:
            file.writelines(one.blocks(source))
    return path


def _to_bfloat16(block: bytes) -> bytes:
    """Return float32 elements as bfloat16, rounded to the nearest value, ties to even, as torch rounds them.

    A bfloat16 is the upper half of a float32.
    """
    import numpy  # imported here: the import takes 0.1 s, and an export in float32 needs no numpy

    values = numpy.frombuffer(block, dtype="<f4")
    bits = values.view("<u4")
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    rounded = numpy.where(numpy.isnan(values), 0x7FC00000, rounded)  # rounding could turn a NaN into infinity
    return (rounded >> 16).astype("<u2").tobytes()
