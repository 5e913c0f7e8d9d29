"""Write the weights of a checkpoint as the safetensors files of a Hugging Face folder, block by block."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from .stored_tensors import DTYPES, StoredTensor, UnreadableTensors, write_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""Size of a file in bytes above which the next tensor begins another file. It is the default of save_pretrained in
version 4 of transformers; version 5 has 50 GB."""


def write_weights(
    tensors: Mapping[str, StoredTensor], source: Path, folder: Path, dtype: str, max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write tensors into the existing, empty ``folder``; return the files, which are not synced.

    Args:
        tensors: The tensors by name, in the order in which they are distributed to files.
        source: The folder of the checkpoint's files.
        folder: The folder to write into.
        dtype: The dtype of floating-point tensors in the files; other tensors keep their dtype.
        max_file_bytes: Size of a file above which the next tensor begins another file.

    Raises:
        UnreadableTensors: A tensor cannot be read, or cannot be converted to ``dtype``.
        OSError: A file could not be read or written.
    """
    dtypes = {name: dtype if "float" in one.dtype else one.dtype for name, one in tensors.items()}
    files, sizes = [list[str]()], [0]
    for name, one in tensors.items():
        if dtypes[name] != one.dtype and (one.dtype, dtype) != ("float32", "bfloat16"):
            raise UnreadableTensors(f"{name} is stored as {one.dtype}, which rrl cannot convert to {dtype}")
        nbytes = math.prod(one.shape) * DTYPES[dtypes[name]][1]
        if files[-1] and sizes[-1] + nbytes > max_file_bytes:
            files.append([])
            sizes.append(0)
        files[-1].append(name)
        sizes[-1] += nbytes
    count = len(files)
    paths = [
        folder / (SINGLE if count == 1 else f"model-{i:05}-of-{count:05}.safetensors") for i in range(1, count + 1)
    ]
    for path, names in zip(paths, files, strict=True):
        write_file(
            path,
            [(name, dtypes[name], tensors[name].shape, _blocks(tensors[name], source, dtypes[name])) for name in names],
        )
    if count > 1:
        weight_map = {name: path.name for path, names in zip(paths, files, strict=True) for name in names}
        document = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        paths.append(folder / INDEX)
    return paths


def _blocks(tensor: StoredTensor, source: Path, dtype: str) -> Iterator[bytes | memoryview]:
    for block in tensor.blocks(source, 0, tensor.rows):
        yield memoryview(block) if dtype == tensor.dtype else _to_bfloat16(block)


def _to_bfloat16(block: bytearray) -> bytes:
    """Return float32 elements as bfloat16, rounded to the nearest value, ties to even, as torch rounds them.

    A bfloat16 is the upper half of a float32.
    """
    import numpy  # imported here: the import takes 0.1 s, and an export in float32 needs no numpy

    values = numpy.frombuffer(block, dtype="<f4")
    bits = values.view("<u4")
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    rounded = numpy.where(numpy.isnan(values), 0x7FC00000, rounded)  # rounding could turn a NaN into infinity
    return (rounded >> 16).astype("<u2").tobytes()
