"""Weights & Biases as a tracker: one run with a fixed id, whose steps are the training steps of the run.

Online, the server reports at the start which step it has, and the run continues after this step. Offline
(WANDB_MODE=offline) each process writes a folder of its own with one log file. The log files show which steps were
written, and ``wandb sync`` uploads all folders into one run.

wandb's own service process (wandb-core) does the writing and the uploading. Before a run is opened, the service of an
earlier process must have ended: :mod:`rrl.manager.tracking.main` ends it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from ...core.sample_texts import DecodedSample
from ...core.types import Outcome
from ..reporting.step_metrics import StepRow
from .base import PREFIX, SAMPLE_COLUMNS, SAMPLES, TrackedRun, annotation, sample_rows, scalars

LOG_FILES = "wandb/*run-*/run-*.wandb"
"""The log files below the folder of the tracker."""
_BLOCK_BYTES = 32768
_FILE_HEADER = struct.Struct("<4sHB")
_RECORD_HEADER = struct.Struct("<IHB")
_IDENT, _MAGIC = b":W&B", 0xBEE1
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""Types of the pieces of a record: the whole record, or its first, a middle, or its last piece."""


class WandbRun:
    """The run in wandb, opened by ``wandb.init``."""

    def __init__(self, run: TrackedRun) -> None:
        written = newest_step(run.folder)
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(variable, str(run.folder / "cache"))
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
        )
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.id,
            dir=str(run.folder),
            config=run.job,
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )
        if self._run.offline:
            self.newest_step, self.place = written, f"wandb sync --id {run.id} {run.folder}/wandb/offline-run-*"
        else:
            self.newest_step, self.place = self._run.starting_step - 1, self._run.url or ""

    def send(self, row: StepRow, samples: Sequence[DecodedSample]) -> None:
        """Log a step. The step is written at once, so that a killed process leaves no step that is partly logged."""
        values: dict[str, Any] = {**scalars(row), "_timestamp": row.at}
        if samples:
            values[SAMPLES] = wandb.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples))
        if marks := annotation(row):
            values[f"{PREFIX}marks"] = marks
        self._run.log(values, step=row.step, commit=True)

    def flush(self) -> None:
        """Do nothing: wandb's service already has the steps, and a later process reads which of them were written."""

    def finish(self, outcome: Outcome, last: StepRow | None) -> None:
        """Set the outcome, and mark the run as finished or failed."""
        self._run.summary[f"{PREFIX}outcome"] = outcome.value
        if last is not None:
            self._run.summary[f"{PREFIX}end"] = annotation(last)
        self._run.finish(exit_code=0 if outcome is Outcome.COMPLETED else 1)

    def close(self) -> None:
        """Wait until everything is written or uploaded. Has no effect after :meth:`finish`."""
        self._run.finish()


def newest_step(folder: Path) -> int:
    """Return the newest step in the log files of a folder; -1 if there is none."""
    return max((step for path in folder.glob(LOG_FILES) for step, _ in history(path)), default=-1)


def history(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (step, values) of each history record of a log file."""
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield (
                record.history.step.num,
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items},
            )


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the complete records of a log file: LevelDB's log format after a header of seven bytes.

    The bytes after a torn or damaged piece are ignored.
    """
    if len(data) < _FILE_HEADER.size or _FILE_HEADER.unpack_from(data)[:2] != (_IDENT, _MAGIC):
        return
    at, pieces = _FILE_HEADER.size, b""
    while True:
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _RECORD_HEADER.size:  # the rest of a block is too short for a header
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
        if at + _RECORD_HEADER.size > len(data):
            return
        checksum, length, kind = _RECORD_HEADER.unpack_from(data, at)
        at += _RECORD_HEADER.size
        piece = data[at : at + length]
        at += length
        if len(piece) < length or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        pieces = piece if kind in (_FULL, _FIRST) else pieces + piece
        if kind in (_FULL, _LAST):
            yield pieces
