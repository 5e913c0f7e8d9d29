"""Checkpoints on shared storage: written by all members, as files of torch.distributed.checkpoint, and read only by the
manifest of the commit record.

A checkpoint counts once the store has committed it, not before. What is written here and never committed is garbage,
and so is what lies further back than the last few commits.
"""

from __future__ import annotations

import errno
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

from ...core.run_dir import RunDir
from ..models.policy import weights
from ..worker.checkpoint_files import (
    DamagedCheckpoint,
    Digest,
    StoredFiles,
    digest_of,
    incarnation_of,
    make_durable,
    verified,
)
from . import exchange
from .host_buffers import shard_of
from .learner import Learner
from .process_group import Gang
from .shards import METADATA, Piece, read_shards, write_metadata, write_shards

_log = logging.getLogger("rrl.trainer")

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # who saves alone is told that he is
_ABOUT = "about.json"


class _About(Struct, frozen=True):
    world: int
    before: tuple[str, ...]
    """names of the commits before this one that are kept: whoever restores it must not take them for garbage"""


class Written(Struct, frozen=True):
    """What one member wrote."""

    files: dict[str, Digest]
    trouble: str = ""
    """why it could not; then none of it counts"""
    disk_full: bool = False
    """there was no room: tried again it may work"""


class Checkpoints:
    """``incarnation`` is the trainer's; ``keep`` commits are kept, at least the newest."""

    def __init__(self, run_dir: RunDir, incarnation: int, retained: int, gang: Gang | None = None) -> None:
        self._run_dir = run_dir
        self._incarnation = incarnation
        self._retained = retained
        self._gang = gang or Gang()
        self._committed: tuple[str, ...] = ()
        """names of the folders of the last commits, the newest last"""
        self._reference = ""
        """name of the folder of the reference's weights, if there is one"""

    def write(
        self, folder: Path, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], extra_state: bytes
    ) -> Written:
        """All members together: their ``tensors`` (host copies of their shards of ``like``) and their ``rest``, into
        ``folder``, which is fresh. Durable when it returns. A full disk is told as trouble, not raised; another
        member's death is."""
        gang, made = self._gang, []
        state = {name: self._as_whole(tensor, like[name]) for name, tensor in tensors.items()}
        trouble: BaseException | None = None
        try:
            made.append(_new_file(folder / _rank_file(gang.rank), extra_state))
            if gang.rank == 0:
                about = _About(gang.world, self._committed[-self._retained + 1 :])
                made.append(_new_file(folder / _ABOUT, msgspec.json.encode(about)))
        except OSError as error:
            trouble = error
        try:  # all the same: the others are in it
            made += self._save(state, folder)
            if trouble is None:
                make_durable(made)
                return Written({path.name: digest_of(path) for path in made})
        except (OSError, CheckpointException) as error:
            trouble = trouble or error
        assert trouble is not None
        return not_written(trouble, f"{folder}: ")

    def _save(self, state: dict[str, Tensor], folder: Path) -> list[Path]:
        """All members together; this one's files. Raises OSError or CheckpointException once all have written, or could
        not."""
        rank, pieces = self._gang.rank, list[Piece]()
        failed: OSError | CheckpointException | None = None
        try:
            pieces = write_shards(state, folder, rank)
        except (OSError, CheckpointException) as error:
            failed = error
        everybody = exchange.gather(self._gang.file_group, None if failed else pieces, list[Piece] | None)
        if failed:
            raise failed
        made = list(folder.glob(f"__{rank}_*.distcp"))
        if rank == 0 and None not in everybody:
            made.append(write_metadata(folder, itertools.chain.from_iterable(filter(None, everybody))))
        return made

    def _load(self, tensors: dict[str, Tensor], folder: Path, damage: str) -> None:
        """All members together, unless one of them has found ``damage``: then all raise DamagedCheckpoint. Raises
        RuntimeError in all where one of them could not read."""
        gang, trouble = self._gang, ""
        if damage := next(filter(None, gang.gather(damage, str)), ""):
            raise DamagedCheckpoint(damage)
        try:
            read_shards(tensors, folder)
        except (OSError, CheckpointException) as error:
            trouble = f"rank {gang.rank} could not read {folder}: {_error_text(error)}"
        if troubles := list(filter(None, gang.gather(trouble, str))):
            raise RuntimeError("; ".join(troubles))

    def _as_whole(self, local: Tensor, like: Tensor) -> Tensor:
        """A host copy of a shard as a part of the tensor that it is a shard of."""
        if not isinstance(like, DTensor):
            return local
        mesh, shape, stride = self._gang.file_mesh, like.shape, like.stride()
        assert mesh is not None
        whole: Tensor = DTensor.from_local(local, mesh, like.placements, run_check=False, shape=shape, stride=stride)
        return whole

    def read(self, manifest: dict[str, Any], learner: Learner) -> None:
        """Make ``learner`` what was committed under ``manifest``, by however many members it was written.

        Raises DamagedCheckpoint, in all members, when it is not what is there: nothing is loaded then."""
        gang, damage, about = self._gang, "", _About(0, ())
        names = sorted(manifest["files"])
        mine = {*names[gang.rank :: gang.world], _ABOUT, METADATA, _rank_file(gang.rank)}
        folder = self._run_dir.path / manifest["folder"]
        try:
            if missing := {_ABOUT, METADATA, _rank_file(0)}.difference(names):
                raise DamagedCheckpoint(f"{manifest['folder']}: no {min(missing)} was committed, but {names}")
            verified(self._run_dir.path, manifest, only=mine)
            about = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About)
        except (OSError, DamagedCheckpoint) as error:
            damage = str(error)
        self._load(learner.tensors(), folder, damage)
        same = about.world == gang.world
        learner.resume(
            (folder / _rank_file(gang.rank if same else 0)).read_bytes(), random_states=same or gang.rank == 0
        )
        self._committed = (*about.before, folder.name)

    def save_reference(self, folder: Path, model: nn.Module, dtype: torch.dtype) -> StoredFiles:
        """All members together: write the weights of ``model``, as they are now but in ``dtype``, into ``folder``,
        which is fresh, for every later life. Durable when it returns. Raises OSError."""
        gang = self._gang
        state = {
            name: self._as_whole(shard_of(tensor).to("cpu", dtype), tensor) for name, tensor in weights(model).items()
        }
        made = self._save(state, folder)
        make_durable(made)
        mine = {path.name: digest_of(path) for path in made}
        self._reference = folder.name
        files = {name: digest for each in gang.gather(mine, dict[str, Digest]) for name, digest in each.items()}
        return StoredFiles(folder.relative_to(self._run_dir.path).as_posix(), files)

    def read_reference(self, files: StoredFiles, model: nn.Module) -> None:
        """Into ``model``, by however many members it was written. Raises DamagedCheckpoint, in all members."""
        gang, damage = self._gang, ""
        try:
            names = sorted(files.files)
            mine = {*names[gang.rank :: gang.world], METADATA}
            verified(self._run_dir.path, {"folder": files.folder, "files": files.files}, only=mine)
        except DamagedCheckpoint as error:
            damage = f"the reference of kl: {error}"
        folder = self._run_dir.path / files.folder
        self._load(weights(model), folder, damage)
        self._reference = folder.name

    def set_committed(self, manifest: dict[str, Any]) -> None:
        """This is the newest commit, though the state came from elsewhere: a snapshot helps over a damaged one."""
        folder = self._run_dir.path / manifest["folder"]
        before: tuple[str, ...] = ()
        try:
            verified(self._run_dir.path, manifest, only={_ABOUT})
            before = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About).before
        except (OSError, DamagedCheckpoint) as error:
            _log.warning("cannot read the checkpoint that was committed before the snapshot: %s", error)
        self._committed = (*before, folder.name)

    def on_committed(self, folder: Path) -> None:
        """What :meth:`write` wrote there is committed now: remove what that makes garbage."""
        self._committed = (*self._committed, folder.name)[-self._retained :]
        self.remove_garbage()

    def remove_garbage(self) -> None:
        """Remove every checkpoint of this life and earlier ones that is not among the last commits, nor the reference.

        Call it only with nothing written and not yet committed. Folders of *later* lives are left alone, so that a
        fenced trainer that wakes up late cannot harm its successor.
        """
        retained = (*self._committed, self._reference)
        for folder in self._run_dir.checkpoints.iterdir():
            made_by = incarnation_of(folder.name)
            if made_by is not None and made_by <= self._incarnation and folder.name not in retained:
                shutil.rmtree(folder, ignore_errors=True)  # garbage that resists must not end the training


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _new_file(path: Path, content: bytes) -> Path:
    with path.open("xb") as file:
        file.write(content)
    return path


def not_written(error: BaseException, where: str = "") -> Written:
    return Written({}, f"{where}{_error_text(error)}", _is_full(error))


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(why[0]).__name__}: {why[0]}" for rank, why in error.failures.items())
    return str(error)


def _is_full(error: BaseException) -> bool:
    causes = [why[0] for why in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return all(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in causes)
