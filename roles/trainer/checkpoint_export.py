"""Export a committed checkpoint as a Hugging Face folder: a function, and a program that the manager starts.

An export only reads the run, and needs no GPU, no torch and no manager. The run may be at work. Two things may happen
during an export:

- The trajectory store deletes the checkpoint, because newer ones are committed. So the export first creates hard links
  to the files in a folder of its own (:func:`_pinned`). A deletion by the store then leaves these links intact.
- The export is killed. So the folder is built under a hidden name beside its final name, synced, and then renamed.

``python -P -m rrl.roles.trainer.checkpoint_export RUN_DIR STEP FOLDER`` is the child process with which the manager
exports. It has the lowest priority, and ends when its stdin is closed, so that it does not outlive the manager.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import msgspec
from msgspec import Struct

from ...config.input_files import InputChanged, check_input, weights_digest
from ...config.model_folder import CONFIG, WEIGHTS, read_header, read_json, weight_files
from ...config.model_folder import INDEX as WEIGHT_INDEX
from ...core.launch import read_run_spec
from ...core.run_dir import RunDir, sync
from ...core.run_spec import RunSpec
from ...core.types import OperationFailed, UsageError
from ..checkpoints.adapter_files import RANK0_STATE, base_digest, merged_weights, write_adapter
from ..checkpoints.folders import DamagedCheckpoint, place_files, verified
from ..checkpoints.safetensors_files import write_weights
from ..checkpoints.stored_tensors import (
    DTYPES,
    INDEX,
    OLDER_RRL,
    TORCH_FILES,
    WEIGHTS_PREFIX,
    UnreadableTensors,
    read_index,
)
from ..models.hf_folder import add_missing_files, write_model_files
from ..trajectories.durable.log import LogDamaged, read_commits
from ..trajectories.durable.records import LogFormatError, StepCommitted

NOTE = "rrl_export.json"
"""Name of the file that says from which run, step and files the folder was made."""
OPEN_ATTEMPTS = 5
"""Number of attempts to open a checkpoint before a missing file counts as an error. The store may be deleting the
checkpoint; so each attempt opens the requested checkpoint, or the one that is the newest at the time of the attempt."""
OPEN_RETRY_S = 1.0
"""Seconds between two attempts to open a checkpoint."""
NICENESS = 19
"""Niceness of the manager's export: the lowest priority, so that it slows down no other process."""
END_RETRY_S = 0.1
"""Seconds between two SIGTERMs to the main thread. They are repeated until the process ends."""
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.md", "LICENSE*", "NOTICE*")
"""Patterns of the files of a model besides its weights. Optimizer and random states (*.pt, *.bin) are others."""
_MANAGER = "manager"
"""Suffix of the names of the hidden folders of the manager's exports. A run has at most one of these exports at a
time."""


class ExportRefused(UsageError):
    """The request is not valid; the text says why and what would be right."""


class ExportFailed(OperationFailed):
    """The files of the checkpoint cannot be exported; the text says why."""


class _FileMissing(Exception):
    """A file of the checkpoint is missing, because it is being deleted or is damaged; the text names it."""


class Exported(Struct, frozen=True):
    """A finished export."""

    run: str
    step: int
    folder: str
    """Absolute path of the folder."""
    dtype: str
    """The dtype of the weights; several are separated by commas."""
    nbytes: int
    """Size of the files in the folder, in bytes."""


def export_checkpoint(
    run: RunDir, step: int | None, folder: Path, owner: str = "", *, adapter: bool = False
) -> Exported:
    """Write the checkpoint of a committed step into ``folder``, which appears complete or not at all.

    Args:
        run: The run, which may be at work.
        step: The step; None for the newest one.
        folder: A new or empty folder. Its parents are created.
        owner: Suffix of the names of the hidden folders. By default it names this process, so that several processes
            can export at the same time.
        adapter: Whether to write only the adapter, as peft does, instead of the merged model.

    Raises:
        ExportRefused: The step is not committed, or its checkpoint is not kept; or ``folder`` is not empty; or the run
            trains no adapter.
        ExportFailed: The files differ from those that were committed, or cannot be read.
        OSError: A file could not be read or written. Nothing of the export is left.
    """
    folder, owner = folder.absolute(), owner or f"{socket.gethostname()}.{os.getpid()}"
    if folder.is_dir() and any(folder.iterdir()):
        raise ExportRefused(f"{folder} is not empty; name a new folder")
    if folder.exists() and not folder.is_dir():
        raise ExportRefused(f"{folder} is a file; name a new folder")
    try:
        spec = read_run_spec(run.run_spec)
    except (OSError, msgspec.MsgspecError) as error:
        raise ExportFailed(f"{run.run_spec} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if adapter and spec.trainer.lora is None:
        raise ExportRefused(f"{run.id} trains no adapter ([roles.trainer.lora]), but all weights; omit --adapter")
    for attempt in range(OPEN_ATTEMPTS):
        try:
            return _export(run, spec, _commit(run, step), folder, owner, adapter)
        except _FileMissing as error:
            if attempt == OPEN_ATTEMPTS - 1:
                raise ExportFailed(f"{error}, which was committed") from None
            time.sleep(OPEN_RETRY_S)
    raise AssertionError


def _commit(run: RunDir, step: int | None) -> StepCommitted:
    """Return the commit of ``step``; if ``step`` is None, return the newest commit whose checkpoint exists."""
    try:
        commits = read_commits(run.store)
    except (LogDamaged, LogFormatError) as error:
        raise ExportFailed(str(error)) from None
    kept = [number for number, one in sorted(commits.items()) if (run.path / one.manifest["folder"]).is_dir()]
    if not kept:
        raise ExportRefused(f"{run.id} has no committed checkpoint yet; see: rrl status {run.id}")
    if step is not None and step not in kept:
        known = f"checkpoints exist for {'step' if len(kept) == 1 else 'steps'} {', '.join(map(str, kept))}"
        state = "is not committed" if step > max(commits) else "has no checkpoint (never written, or deleted)"
        raise ExportRefused(f"step {step} of {run.id} {state}; {known}")
    return commits[kept[-1] if step is None else step]


def _export(run: RunDir, spec: RunSpec, commit: StepCommitted, folder: Path, owner: str, adapter: bool) -> Exported:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent, f".{folder.name}.", owner)
    partial = folder.with_name(f".{folder.name}.{owner}")
    try:
        partial.mkdir(mode=0o755)
        with _pinned(run, commit.manifest, owner) as pinned:
            dtype = _write(run, spec, commit, pinned, partial, adapter)
        nbytes = _sync(partial)
        os.rename(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Exported(run.id, commit.number, str(folder), dtype, nbytes)


def _write(
    run: RunDir, spec: RunSpec, commit: StepCommitted, manifest: dict[str, Any], folder: Path, adapter: bool
) -> str:
    """Write the model of a checkpoint into the existing, empty ``folder``; return the dtype of its weights."""
    source, committed, files = run.path / manifest["folder"], run.path / commit.manifest["folder"], manifest["files"]
    if files.keys() >= TORCH_FILES:
        raise ExportRefused(f"step {commit.number} of {run.id} cannot be exported: {OLDER_RRL}")
    try:
        below = "" if INDEX in files else _find_hf_folder(files)
    except ValueError as error:
        raise ExportRefused(
            f"step {commit.number} of {run.id} cannot be exported: a trainer of your own wrote its checkpoint, and"
            f" {error}; the files are in {committed}"
        ) from None
    try:
        if spec.model.path is not None:
            check_input(run, Path(spec.model.path))
        if below:
            dtype = _copy_model(run, manifest, below, folder)
            add_missing_files(spec.model, folder)
        else:
            verified(run.path, manifest)
            weights = {
                name.removeprefix(WEIGHTS_PREFIX): one
                for name, one in read_index(source, files).tensors.items()
                if name.startswith(WEIGHTS_PREFIX)
            }
            dtype, lora = "float32" if adapter else spec.model.dtype, spec.trainer.lora
            if lora is not None and adapter:
                write_adapter(weights, source, folder, lora, str(_unchanged_base(run, spec, source)))
            else:
                if lora is not None:
                    weights = merged_weights(_unchanged_base(run, spec, source), weights, source, lora, dtype)
                write_weights(weights, source, folder, dtype)
                write_model_files(spec.model, folder)
        note = {
            "run": run.id,
            "step": commit.number,
            "trainer": str(commit.incarnation),
            "batch": commit.digest,
            "checkpoint": commit.manifest,
        }
        (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    except (DamagedCheckpoint, InputChanged, UnreadableTensors, ValueError) as error:
        reason = str(error).replace(str(source), str(committed))  # the links are temporary: show the real folder
        raise ExportFailed(f"step {commit.number} of {run.id} cannot be exported: {reason}") from None
    return dtype


def _unchanged_base(run: RunDir, spec: RunSpec, source: Path) -> Path:
    """Return the folder of the weights that the adapters in ``source`` change. Raises ValueError if it has changed."""
    folder = Path(str(spec.model.path))
    if weights_digest(run, folder) != base_digest((source / RANK0_STATE).read_bytes()):
        raise ValueError(
            f"[model] path: the files of weights in {folder} have changed since the run began, and the adapters fit"
            " only the old ones; put the old files back"
        )
    return folder


# ── checkpoints of a trainer of the user's own ──────────────────────────────────────────────────────────────────────
def _copy_model(run: RunDir, manifest: dict[str, Any], below: str, folder: Path) -> str:
    """Copy the Hugging Face folder ``below`` the folder of a checkpoint; return the dtype of its weights."""
    source = run.path / manifest["folder"] / below
    names = {PurePath(name).name: name for name in manifest["files"] if str(PurePath(name).parent) == below}
    copied = _model_files(source, names)
    verified(run.path, manifest, {names[name] for name in copied})
    dtype = _check_weights(source)
    place_files(source, copied, folder, shutil.copyfile)
    return dtype


def _find_hf_folder(names: Collection[str]) -> str:
    """Return the path of the Hugging Face folder among a checkpoint's files; "." for the checkpoint's own folder.

    Raises:
        ValueError: There is none, or several below the checkpoint's folder. The text says what is missing.
    """
    paths = [PurePath(name) for name in names]
    configs = {str(path.parent) for path in paths if path.name == CONFIG}
    weights = {str(path.parent) for path in paths if path.match(WEIGHTS)}
    found = sorted(configs & weights)
    if "." in found or len(found) == 1:
        return "." if "." in found else found[0]
    if found:
        raise ValueError(f"it has several folders with {CONFIG} and {WEIGHTS}: {', '.join(found)}; commit only one")
    lacking = [pattern for pattern, folders in ((CONFIG, configs), (WEIGHTS, weights)) if not folders]
    missing = " and ".join(lacking) or f"a folder with both {CONFIG} and {WEIGHTS}"
    raise ValueError(f"it lacks {missing}, which save_pretrained of transformers writes")


def _model_files(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the files in a Hugging Face folder that belong to the model, config.json among them.

    Args:
        folder: The Hugging Face folder.
        names: The committed files of the folder itself, without those of its subfolders.

    Raises:
        ValueError: The index cannot be read, or names a file that was not committed.
    """
    weights = {path.relative_to(folder).as_posix() for path in weight_files(folder)}
    if missing := min(weights.difference(names), default=None):
        raise ValueError(f"{folder / WEIGHT_INDEX} names {missing}, which was not committed")
    return [name for name in names if name in weights or any(PurePath(name).match(one) for one in _BESIDE_WEIGHTS)]


def _check_weights(folder: Path) -> str:
    """Compare the safetensors files of a Hugging Face folder with their headers and their index.

    Returns the dtypes of the tensors as torch names them, separated by commas.

    Raises:
        ValueError: A file is damaged, or lacks a tensor of the index; or config.json cannot be read.
    """
    read_json(folder / CONFIG)
    headers = {path.name: read_header(path) for path in weight_files(folder)}
    if isinstance(index := read_json(folder / WEIGHT_INDEX).get("weight_map"), dict):
        for name, file in index.items():
            if name not in headers[str(file)]:
                raise ValueError(f"{folder / str(file)} lacks the tensor {name}, which {WEIGHT_INDEX} names")
    torch_names = {code: dtype for dtype, (code, _) in DTYPES.items()}
    codes = set[str]()
    for file, header in headers.items():
        for name, tensor in header.items():
            if not isinstance(code := tensor.get("dtype"), str):
                raise ValueError(f"{folder / file} is not a safetensors file: its header has no dtype of {name}")
            codes.add(torch_names.get(code, code))
    return ", ".join(sorted(codes))


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def _pinned(run: RunDir, manifest: dict[str, Any], owner: str) -> Iterator[dict[str, Any]]:
    """Make a folder of hard links to the checkpoint's files, and yield a manifest that names this folder.

    The store never deletes these links. If the file system has no hard links, or the run directory is not writable,
    ``manifest`` itself is yielded, which names the checkpoint's own folder.

    Raises:
        _FileMissing: A file was missing before it could be linked.
    """
    source, links = run.path / manifest["folder"], run.path / f".export.{owner}"
    _remove_leftovers(run.path, ".export.", owner)
    try:
        try:
            links.mkdir(mode=0o700)
            place_files(source, manifest["files"], links, os.link)
        except FileNotFoundError as error:
            raise _FileMissing(f"{source}: lacks {Path(str(error.filename)).relative_to(source)}") from None
        except OSError:
            shutil.rmtree(links, ignore_errors=True)
            yield manifest
        else:
            yield manifest | {"folder": links.name}
    finally:
        shutil.rmtree(links, ignore_errors=True)


def _remove_leftovers(parent: Path, prefix: str, owner: str) -> None:
    """Remove the hidden folders that killed exports have left in ``parent``.

    Their names begin with ``prefix``. A folder was left by a killed export if its name ends with this ``owner``, or
    with the pid of a process of this machine that has ended.
    """
    of_this_host = f"{prefix}{socket.gethostname()}."
    for name in os.listdir(parent):
        pid = name.removeprefix(of_this_host) if name.startswith(of_this_host) else ""
        if name == f"{prefix}{owner}" or (pid.isdecimal() and not Path("/proc", pid).exists()):
            shutil.rmtree(parent / name, ignore_errors=True)


def _sync(folder: Path) -> int:
    """Fsync a folder and its files; return the total size of the files in bytes. Raises OSError."""
    paths = list(folder.iterdir())
    for path in (*paths, folder):
        sync(path)
    return sum(path.stat().st_size for path in paths)


# ── the manager's child process ────────────────────────────────────────────────────────────────────────────────────
def main(arguments: Sequence[str]) -> int:
    """Export as the arguments say; return the exit code. A failure is one line on stderr."""
    run, step, folder = RunDir(Path(arguments[0])), int(arguments[1]), Path(arguments[2])
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, _on_sigterm)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        if folder.parent.is_dir():
            for leftover in folder.parent.glob(f".*.{_MANAGER}"):  # left by a killed export of another step
                shutil.rmtree(leftover, ignore_errors=True)
        export_checkpoint(run, step, folder, _MANAGER)
    except (ExportRefused, ExportFailed, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _end_with_stdin() -> None:
    """End this process when its stdin is closed."""
    while os.read(0, 1024):
        pass
    while True:  # repeated: a signal does not interrupt a system call that begins just after it
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(END_RETRY_S)


def _on_sigterm(*_: object) -> None:
    """Raise SystemExit in the main thread, so that it removes its hidden folders."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
