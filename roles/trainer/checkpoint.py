"""Checkpoints on shared storage: written by all members, as files of torch.distributed.checkpoint.

A checkpoint becomes valid when the store has committed it. Only the files in the manifest of its commit record are
read. The store deletes checkpoints that are no longer needed (:mod:`rrl.roles.checkpoints.retention`).
:mod:`.async_saver` decides when a checkpoint is written.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ...core.run_dir import RunDir, attempt_of, full_storage_error
from ..checkpoints.folders import DamagedCheckpoint, Digest, StoredFiles, digest_of, make_durable, verified
from ..checkpoints.stored_tensors import METADATA
from ..models.policy import weights
from . import exchange
from .host_buffers import shard_of
from .learner import Learner
from .process_group import Gang
from .shards import Piece, read_shards, write_metadata, write_shards

_log = logging.getLogger("rrl.trainer")

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # a single process saves without a group on purpose
_ABOUT = "about.json"


class _About(Struct, frozen=True):
    """Description of a checkpoint, stored among its files."""

    world: int


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
        gang, paths = self._gang, []
        state = {name: self._as_sharded(tensor, like[name]) for name, tensor in tensors.items()}
        trouble: BaseException | None = None
        try:
            paths.append(_new_file(folder / _rank_file(gang.rank), extra_state))
            if gang.rank == 0:
                paths.append(_new_file(folder / _ABOUT, msgspec.json.encode(_About(gang.world))))
        except OSError as error:
            trouble = error
        try:  # also after an error, because all members must call _save
            paths += self._save(state, folder)
            if trouble is None:
                make_durable(paths)
                return Written({path.name: digest_of(path) for path in paths})
        except (OSError, CheckpointException) as error:
            trouble = trouble or error
        assert trouble is not None
        return not_written(trouble, f"{folder}: ")

    def _save(self, state: dict[str, Tensor], folder: Path) -> list[Path]:
        """Write this member's files and return their paths; all members must call it.

        Raises:
            OSError: This member could not write; raised once all members are done.
            CheckpointException: torch's wrapper of another error.
        """
        rank, pieces = self._gang.rank, list[Piece]()
        failed: OSError | CheckpointException | None = None
        try:
            pieces = write_shards(state, folder, rank)
        except (OSError, CheckpointException) as error:
            failed = full_storage_error(error) or error
        all_pieces = exchange.gather(self._gang.file_group, None if failed else pieces, list[Piece] | None)
        if failed:
            raise failed
        paths = list(folder.glob(f"__{rank}_*.distcp"))
        if rank == 0 and None not in all_pieces:
            paths.append(write_metadata(folder, itertools.chain.from_iterable(filter(None, all_pieces))))
        return paths

    def _load(self, tensors: dict[str, Tensor], folder: Path, damage: str) -> None:
        """Read this member's part of ``tensors``; all members must call this method.

        ``damage`` says what damage this member has found in the files before the call; empty for none.

        Raises:
            DamagedCheckpoint: Raised in all members if one of them has found damage. No tensor has been changed.
            RuntimeError: Raised in all members if one of them could not read.
        """
        gang, failure = self._gang, ""
        if damage := next(filter(None, gang.gather(damage, str)), ""):
            raise DamagedCheckpoint(damage)
        try:
            read_shards(tensors, folder)
        except (OSError, CheckpointException) as error:
            failure = f"rank {gang.rank} could not read {folder}: {_error_text(error)}"
        if failures := list(filter(None, gang.gather(failure, str))):
            raise RuntimeError("; ".join(failures))

    def _as_sharded(self, local: Tensor, like: Tensor) -> Tensor:
        """Return ``local`` as a DTensor of the whole tensor if ``like`` is sharded, else ``local`` itself.

        ``local`` is the host copy of this member's shard of ``like``.
        """
        if not isinstance(like, DTensor):
            return local
        mesh, shape, stride = self._gang.file_mesh, like.shape, like.stride()
        assert mesh is not None
        whole: Tensor = DTensor.from_local(local, mesh, like.placements, run_check=False, shape=shape, stride=stride)
        return whole

    def read(self, manifest: dict[str, Any], learner: Learner) -> None:
        """Load the checkpoint of ``manifest`` into ``learner``; any number of members may have written it.

        Raises:
            DamagedCheckpoint: Raised in all members if the files do not match the manifest. The learner is unchanged.
        """
        gang, damage, about = self._gang, "", _About(0)
        names = sorted(manifest["files"])
        mine = {*names[gang.rank :: gang.world], _ABOUT, METADATA, _rank_file(gang.rank)}
        folder = self._run_dir.path / manifest["folder"]
        try:
            if missing := {_ABOUT, METADATA, _rank_file(0)}.difference(names):
                raise DamagedCheckpoint(
                    f"{manifest['folder']}: the committed checkpoint lacks the file {min(missing)}; it contains {names}"
                )
            verified(self._run_dir.path, manifest, only=mine)
            about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About)
        except (OSError, DamagedCheckpoint) as error:
            damage = str(error)
        self._load(learner.tensors(), folder, damage)
        same = about.world == gang.world
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
        state = {
            name: self._as_sharded(shard_of(tensor).to("cpu", dtype), tensor) for name, tensor in weights(model).items()
        }
        paths = self._save(state, folder)
        make_durable(paths)
        mine = {path.name: digest_of(path) for path in paths}
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
        gang, damage = self._gang, ""
        try:
            names = sorted(files.files)
            mine = {*names[gang.rank :: gang.world], METADATA}
            verified(self._run_dir.path, {"folder": files.folder, "files": files.files}, only=mine)
        except DamagedCheckpoint as error:
            damage = f"the reference model for `kl` is damaged: {error}"
        folder = self._run_dir.path / files.folder
        self._load(weights(model), folder, damage)


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _new_file(path: Path, content: bytes) -> Path:
    with path.open("xb") as file:
        file.write(content)
    return path


def not_written(error: BaseException, where: str = "") -> Written:
    """Return the result of :meth:`Checkpoints.write` for a member that could not write.

    ``where`` is a text that is put before the error's text.
    """
    return Written({}, f"{where}{_error_text(error)}", full_storage_error(error) is not None)


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()
        )
    return str(error)
