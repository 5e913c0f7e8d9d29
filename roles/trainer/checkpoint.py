"""Checkpoints on shared storage: each member writes its rows of the tensors as safetensors files, rank 0 their index.

A checkpoint becomes valid when the store has committed it. Only the files in the manifest of its commit record are
read. The store deletes checkpoints that are no longer needed (:mod:`rrl.roles.checkpoints.retention`).
:mod:`.async_saver` decides when a checkpoint is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.run_dir import RunDir, attempt_of, full_storage_error
from ..checkpoints.folders import DamagedCheckpoint, Digest, StoredFiles, make_durable, share_of, verified
from ..checkpoints.stored_tensors import (
    INDEX,
    OLDER_RRL,
    TORCH_FILES,
    WEIGHTS_PREFIX,
    Index,
    Rows,
    StoredTensor,
    UnreadableTensors,
    read_index,
    write_file,
    write_index,
)
from ..launcher.end_report import Unrepairable
from ..models.policy import weights
from ..models.tensors import first_row, pack
from . import exchange
from .host_buffers import shard_of
from .learner import Learner
from .process_group import Gang


class Written(Struct, frozen=True):
    """The result of writing one member's files of a checkpoint."""

    files: dict[str, Digest]
    trouble: str = ""
    """Error text if the member failed to write, so that its files are invalid; empty on success."""
    disk_full: bool = False
    """True if the disk or quota is full, so that a later attempt may succeed."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        run_dir: The run directory.
        gang: The members of the trainer.
    """

    def __init__(self, run_dir: RunDir, gang: Gang | None = None) -> None:
        self._run_dir = run_dir
        self._gang = gang or Gang()

    def write(
        self, folder: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], extra_state: bytes
    ) -> Written:
        """Write a checkpoint. All members must call this method.

        Each member writes ``tensors`` (host copies of its shards of ``like``) and its ``extra_state`` into the new,
        empty ``folder``. The files are durable on return. A write error, such as a full disk, is not raised: the result
        describes it.

        Raises:
            RuntimeError: Another member is gone.
        """
        try:
            paths = self._save(tensors, like, folder, extra_state)
            return Written(make_durable(folder, [path.name for path in paths]))
        except OSError as error:
            return not_written(error, f"{folder}: ")

    def _save(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], folder: Path, extra_state: bytes | None = None
    ) -> list[Path]:
        """Write this member's files and return their paths; all members must call it.

        Rank 0 writes all tensors that are not sharded.

        Raises:
            OSError: This member could not write; raised once all members are done.
        """
        rank, files = self._gang.rank, dict[Path, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            if rank == 0 or isinstance(like[name], DTensor):
                kind = "weights" if name.startswith(WEIGHTS_PREFIX) else "moments"
                files.setdefault(folder / f"{kind}-{rank}.safetensors", {})[name] = tensor
        paths, written = [*files], dict[str, StoredTensor]()
        failed: OSError | None = None
        try:
            if extra_state is not None:
                paths.append(path := folder / _rank_file(rank))
                with path.open("xb") as file:
                    file.write(extra_state)
            for path, own in files.items():
                written |= _write_rows(path, own, like)
        except OSError as error:
            failed = error
        reports = exchange.gather(self._gang.file_group, None if failed else written, dict[str, StoredTensor] | None)
        if failed:
            raise failed
        if rank == 0 and None not in reports:
            paths.append(write_index(folder, [report for report in reports if report is not None]))
        return paths

    def _load(self, tensors: Mapping[str, Tensor], folder: Path, files: Mapping[str, Digest]) -> Index:
        """Read this member's rows of ``tensors`` from ``files`` in place; return their index. All members must call it.

        Any number of members may have written the files. Each member verifies a part of them.

        Raises:
            DamagedCheckpoint: Raised in all members if the files do not match their digests. No tensor has been
                changed.
            RuntimeError: Raised in all members if one of them could not read.
        """
        gang, damage, failure, index = self._gang, "", "", Index(0, {})
        try:
            mine = share_of(files, (gang.rank, gang.world)) | {INDEX, _rank_file(gang.rank)}
            verified(self._run_dir.path, {"folder": folder, "files": files}, only=mine)
        except DamagedCheckpoint as error:
            damage = str(error)
        if damage := next(filter(None, gang.gather(damage, str)), ""):
            raise DamagedCheckpoint(damage)
        try:
            index = read_tensors(tensors, folder, files)
        except (OSError, UnreadableTensors) as error:
            failure = f"rank {gang.rank} could not read {folder}: {error}"
        if failures := list(filter(None, gang.gather(failure, str))):
            raise RuntimeError("; ".join(failures))
        return index

    def read(self, manifest: dict[str, Any], learner: Learner) -> None:
        """Load the checkpoint of ``manifest`` into ``learner``; any number of members may have written it.

        Raises:
            DamagedCheckpoint: Raised in all members if the files do not match the manifest. The learner is unchanged.
            Unrepairable: An older rrl, or a trainer of the user's own, wrote the checkpoint.
        """
        gang, files, folder = self._gang, manifest["files"], self._run_dir.path / manifest["folder"]
        if INDEX not in files:
            raise Unrepairable(
                f"{manifest['folder']} lacks {INDEX}: the built-in trainer of this rrl did not write it",
                OLDER_RRL if files.keys() >= TORCH_FILES else "resume the run with the trainer that wrote it",
            )
        same = self._load(learner.tensors(), folder, files).world == gang.world
        learner.resume(
            (folder / _rank_file(gang.rank if same else 0)).read_bytes(), random_states=same or gang.rank == 0
        )

    def save_reference(self, folder: Path, model: nn.Module, dtype: torch.dtype) -> StoredFiles:
        """Write the weights of ``model`` in ``dtype`` into the new, empty ``folder``; all members must call it.

        These weights are the reference model of this and every later incarnation. They are durable on return. The
        references of earlier incarnations are deleted, because no restorable state uses them.

        Raises:
            OSError: A file could not be written.
        """
        gang = self._gang
        if gang.rank == 0:
            self._delete_references_before(folder)
        like = {f"{WEIGHTS_PREFIX}{name}": tensor for name, tensor in weights(model).items()}
        # copied also on a CPU: a storage that was given to numpy can no longer be freed (lending.DeviceState.drop)
        shards = {name: shard_of(tensor).to("cpu", dtype, copy=True) for name, tensor in like.items()}
        paths = self._save(shards, like, folder)
        mine = make_durable(folder, [path.name for path in paths])
        files = {name: digest for digests in gang.gather(mine, dict[str, Digest]) for name, digest in digests.items()}
        return StoredFiles(folder.relative_to(self._run_dir.path).as_posix(), files)

    def _delete_references_before(self, folder: Path) -> None:
        own = attempt_of(folder.name)
        for other in self._run_dir.checkpoints.iterdir():
            attempt = attempt_of(other.name)
            if own and attempt and attempt.step == own.step and attempt.incarnation < own.incarnation:
                shutil.rmtree(other, ignore_errors=True)  # a folder that cannot be deleted must not end the training

    def read_reference(self, files: StoredFiles, model: nn.Module) -> None:
        """Load the weights of the reference model into ``model``; any number of members may have written them.

        Raises:
            DamagedCheckpoint: Raised in all members if the files do not match their digests.
        """
        tensors = {f"{WEIGHTS_PREFIX}{name}": tensor for name, tensor in weights(model).items()}
        try:
            self._load(tensors, self._run_dir.path / files.folder, files.files)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"the reference model for `kl` is damaged: {error}") from None


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _write_rows(path: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Write this member's rows ``tensors`` of the whole tensors ``like``; return where they are."""
    packed = pack(tensors)
    offsets = write_file(path, [(name, dtype, shape, (content,)) for name, dtype, shape, content in packed])
    stored = {}
    for name, dtype, shape, _ in packed:
        begin = first_row(like[name])
        rows = Rows(begin, begin + (shape[0] if shape else 1), path.name, offsets[name])
        stored[name] = StoredTensor(dtype, tuple(like[name].shape), [rows])
    return stored


@torch.no_grad()
def read_tensors(tensors: Mapping[str, Tensor], folder: Path, files: Collection[str]) -> Index:
    """Read this member's rows of ``tensors`` from the ``files`` of a checkpoint, in place; return the files' index.

    Raises:
        UnreadableTensors: The files lack a tensor, or have it in another shape.
        OSError: A file could not be read.
    """
    index = read_index(folder, files)
    for name, tensor in tensors.items():
        stored = index.tensors.get(name)
        if stored is None or stored.shape != tuple(tensor.shape):
            found = "no such tensor" if stored is None else f"the shape {stored.shape}"
            raise UnreadableTensors(f"{name} has the shape {tuple(tensor.shape)} in the model; the files have {found}")
        local, begin, done = shard_of(tensor), first_row(tensor), 0
        rows, dtype = local if local.dim() else local.view(1), getattr(torch, stored.dtype)
        for block in stored.blocks(folder, begin, begin + len(rows)):
            values = torch.frombuffer(block, dtype=dtype).view(-1, *rows.shape[1:])
            rows[done : done + len(values)].copy_(values)
            done += len(values)
    return index


def not_written(error: BaseException, where: str = "") -> Written:
    """Return the result of :meth:`Checkpoints.write` for a member that could not write.

    ``where`` is a text that is put before the error's text.
    """
    return Written({}, f"{where}{error}", full_storage_error(error) is not None)
