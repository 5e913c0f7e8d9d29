"""The input files of a run: files of prompts, and the files in ``[model] path`` that define the tokens of a text.

Several processes read them, and the run's journal names rows and tokens by their numbers, so they must not change
during a run. The first process that sees a file records its size, modification time and digest in the run directory:
`rrl submit`, or a role if the login node lacks the file. Weights and code are not input files: only the start of a new
run reads the weights, and a run may continue with corrected code. Only if a run trains adapters, each start of its
trainer reads the weights, and checkpoints have their digest (:func:`weights_digest`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ..core.launch import INVALID_CONFIG_CODE, LAUNCH_ENV, InvalidConfig, read_launch
from ..core.run_dir import RunDir, write_atomically
from ..core.run_spec import RunSpec
from ..core.text import on_one_line
from ..core.types import UsageError
from .model_folder import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, weight_files

_MODEL_FILES = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)
_Record = tuple[dict[str, tuple[int, int]], str]
"""Size (bytes) and modification time (ns) of each file by its name, and the digest of all files."""


class InputChanged(UsageError):
    """An input file has changed since the run first read it."""


def check_inputs(run: RunDir, spec: RunSpec) -> None:
    """Compare all input files of a run with their records (:func:`check_input`)."""
    tasks = (spec.task, spec.eval.task if spec.eval is not None else None)
    for path in [source.path for task in tasks if task is not None for source in task.sources]:
        check_input(run, Path(path))
    if spec.model.path is not None:
        check_input(run, Path(spec.model.path))


def check_input(run: RunDir, path: Path) -> None:
    """Compare an input file, or those in a model's folder, with the record; record them if there is none yet.

    Files that this machine lacks are not compared: another node may have them.

    Raises:
        InputChanged: A file has changed.
    """
    with suppress(OSError):  # who reads the file, or writes to the run directory, reports the error
        files = [file for file in (path, *(path / name for name in _MODEL_FILES)) if file.is_file()]
        now, record = _stats(files), run.input_record(str(path))
        if now and not record.exists():
            _write(record, now, _digest(files))
        before, digest = msgspec.json.decode(record.read_bytes(), type=_Record)
        if now and now != before and _digest(files) != digest:
            name = next(name for name in (*now, *before) if now.get(name) != before.get(name))
            sizes = [stats.get(name, (0,))[0] for stats in (before, now)]
            raise InputChanged(
                f"{path if path.is_file() else path / name} has changed since the run first read it ({sizes[0]} bytes"
                f" then, {sizes[1]} other bytes now); restore it before a resume, or start a new run"
            )


def weights_digest(run: RunDir, folder: Path) -> str:
    """Return the digest of a model's files of weights, which are read again only if one of them has changed.

    Raises:
        OSError: A file cannot be read.
        ValueError: The index of the files cannot be read.
    """
    files, record = weight_files(folder), run.input_record(f"{folder}/{WEIGHTS}")
    now = _stats(files)
    with suppress(OSError, msgspec.MsgspecError):
        recorded: _Record = msgspec.json.decode(record.read_bytes(), type=_Record)
        if recorded[0] == now:
            return recorded[1]
    digest = _digest(files)
    with suppress(OSError):  # the next start reads the files again
        _write(record, now, digest)
    return digest


def require_unchanged(path: Path) -> None:
    """End this process with an end report, and thereby its run, if an input file has changed.

    It raises nothing, because callers take an exception for a failure of the user's code. Outside of a run it does
    nothing.
    """
    if (launch_file := os.environ.get(LAUNCH_ENV)) is None:
        return
    launch = read_launch(Path(launch_file))
    run = RunDir(Path(launch.run_dir))
    try:
        check_input(run, path)
    except InputChanged as error:
        report = InvalidConfig(on_one_line(error), input_changed=True)
        with suppress(OSError):
            write_atomically(run.end_report_file(launch.tag), msgspec.json.encode(report))
        sys.stderr.write(f"rrl: {report.message}\n")  # not a log message, as in exit_invalid_config
        sys.stderr.flush()
        os._exit(INVALID_CONFIG_CODE)


def _stats(files: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Return size and modification time of each file by its name."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _write(record: Path, stats: dict[str, tuple[int, int]], digest: str) -> None:
    record.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomically(record, msgspec.json.encode((stats, digest)))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
