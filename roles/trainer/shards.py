"""Files of torch.distributed.checkpoint, written and read by a gang without torch's object collectives.

torch's ``save`` and ``load`` exchange their plans by pickle over gloo (:mod:`.exchange` explains the risk). Here each
member saves and loads as if it were alone. The members report by msgpack which pieces of which tensors they wrote, and
rank 0 writes ``.metadata`` from these reports. The files are the same as torch would have written, and torch's own
tools can read them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ..checkpoints.stored_tensors import METADATA


class Piece(Struct, frozen=True, array_like=True):
    """A part of a tensor, and its position in a file."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    """Offset in bytes from the beginning of the file."""
    nbytes: int


class _OwnWriter(FileSystemWriter):
    """Writes the files of one member with torch's file names, and stores the metadata in ``pieces``."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self._own_rank = rank
        self.pieces: list[Piece] = []

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self._own_rank, use_collectives=False)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        positions = {result.index: result.storage_data for result in results[0]}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            for chunk in tensor.chunks:
                position = positions[MetadataIndex(name, chunk.offsets)]
                self.pieces.append(
                    Piece(
                        name,
                        dtype,
                        tuple(tensor.size),
                        tuple(chunk.offsets),
                        tuple(chunk.sizes),
                        position.relative_path,
                        position.offset,
                        position.length,
                    )
                )


def write_shards(state: Mapping[str, Tensor], folder: Path, rank: int) -> list[Piece]:
    """Write this member's part of ``state`` into ``folder``, and fsync it; return its pieces.

    Rank 0 writes all tensors that are not sharded. Communicates with no other member.

    Raises:
        OSError: A file could not be written.
        CheckpointException: torch's wrapper of an OSError.
    """
    if existing := next(folder.glob(f"__{rank}_*"), None):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(existing))
    writer = _OwnWriter(folder, rank)
    mine = {name: tensor for name, tensor in state.items() if rank == 0 or isinstance(tensor, DTensor)}
    save(mine, storage_writer=writer, no_dist=True)
    return writer.pieces


def write_metadata(folder: Path, pieces: Iterable[Piece]) -> Path:
    """Write the :data:`METADATA` file, which lists the ``pieces`` of all members; return its path.

    Raises:
        OSError: The file could not be written.
        RuntimeError: A piece is invalid (other members' pieces arrive over a network).
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    positions: dict[MetadataIndex, WriteResult] = {}
    for piece in pieces:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        index = MetadataIndex(piece.name, chunk.offsets)
        if index in positions:
            continue  # a tensor with fewer rows than members has several empty shards, all at its end
        positions[index] = WriteResult(index, piece.nbytes, _StorageInfo(piece.file, piece.at, piece.nbytes))
        dtype = getattr(torch, piece.dtype, None)
        if not isinstance(dtype, torch.dtype) or Path(piece.file).name != piece.file:
            raise RuntimeError(f"another member of the gang reported a shard with an invalid dtype or file: {piece}")
        properties = TensorProperties(dtype=dtype)
        whole = TensorStorageMetadata(properties, torch.Size(piece.whole), [])
        tensors.setdefault(piece.name, whole).chunks.append(chunk)
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(True)
    paths = {name: (name,) for name in tensors}  # path of each tensor in the state, which is not nested
    writer.finish(Metadata({**tensors}, planner_data=paths), [list(positions.values())])
    return folder / METADATA


def read_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read this member's part of ``tensors`` from the files in ``folder``, in place.

    Any number of members may have written the files. Communicates with no other member.

    Raises:
        OSError: A file could not be read.
        CheckpointException: torch's wrapper of an OSError.
    """
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
