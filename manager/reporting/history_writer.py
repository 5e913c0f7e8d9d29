"""Write a run's records to the site's health history, in a separate thread.

If the storage is full, hung or missing, records are lost and the run continues. The first loss is logged, and the
number of lost records is written to the file as soon as possible.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from pathlib import Path

from ...core.run_spec import RunSpec
from ...health.history.own_folder import create_file, user_name
from ...health.history.records import (
    MAX_FILE_BYTES,
    MAX_FILE_RECORDS,
    Checkpoint,
    Record,
    RecordsLost,
    encode_line,
    file_name,
)
from ..model import events as ev
from ..model.state import State
from .failure_records import Changes
from .failure_timeline import FailureTimeline
from .history_events import HistoryEvents

_log = logging.getLogger("rrl.manager")

MAX_QUEUED_RECORDS = 4096
"""Maximum number of records that wait for storage: about 400 bytes each, below 2 MiB in all."""
CHECKPOINT_INTERVAL_S = 1800.0
"""Seconds without a record after which a Checkpoint record is written: the run still holds its nodes."""
CLOSE_TIMEOUT_S = 3.0
"""Seconds that the manager waits at its end for the newest records to be written."""
_HUNG = "the storage does not respond"
_write = os.write


class HistoryWriter:
    """Writes the history of one manager. If ``folder`` is the empty string, nothing is written.

    The writer must be created before the manager's first record, with the ``state`` read from the journal (None for a
    new run) and the ``timeline`` of failures that continues from this state.
    """

    def __init__(
        self,
        folder: str,
        run: str,
        epoch: int,
        spec: RunSpec,
        at: float,
        state: State | None,
        timeline: FailureTimeline,
    ) -> None:
        self.lost = 0
        """Number of records that could not be written."""
        self._loss_logged = False
        self._counting = threading.Lock()
        self._queue: queue.Queue[Record | None] = queue.Queue(MAX_QUEUED_RECORDS)
        self._thread: threading.Thread | None = None
        if not folder:
            return
        user = user_name()
        cluster = os.environ.get("SLURM_CLUSTER_NAME") or spec.cluster
        self._history_events = HistoryEvents(run, user, cluster, spec.name, epoch, at, state, timeline)
        self._path = Path(folder) / user / file_name(run, epoch)
        for record in self._history_events.initial_records:
            self._enqueue(record)
        # A daemon thread: if storage hangs, it must not keep the manager's process from exiting.
        self._thread = threading.Thread(target=self._write_loop, name="history", daemon=True)
        self._thread.start()

    def on_event(self, before: State | None, after: State, stamped: ev.Stamped, changes: Changes) -> None:
        """Queue the records of an event that changed the state from ``before`` to ``after``.

        ``changes`` is what the event changed in the timeline of failures. Never blocks, never raises.
        """
        if self._thread is None:
            return
        for record in self._history_events.apply(before, after, stamped, changes):
            self._enqueue(record)

    def close(self) -> None:
        """Wait for the remaining records to be written, for a limited time (blocking)."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                self._count_lost(self._queue.qsize(), _HUNG)

    def _enqueue(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._count_lost(1, _HUNG)

    def _count_lost(self, lines: int, why: str) -> None:
        with self._counting:
            self.lost += lines
            first, self._loss_logged = not self._loss_logged, True
        if first:
            _log.warning("health history: records are lost, the run continues without them: %s: %s", self._path, why)

    # ── in the thread ──────────────────────────────────────────────────────────────────────────────────────────────
    def _write_loop(self) -> None:
        file, noted = _File(self._path), 0
        while True:
            batch, last = self._next_batch()
            if self.lost > noted:
                batch.append(RecordsLost(time.time(), self.lost - noted))
            before = self.lost
            if batch:
                try:
                    file.write(batch)
                    noted = before
                except OSError as error:
                    self._count_lost(
                        sum(not isinstance(record, RecordsLost) for record in batch), error.strerror or str(error)
                    )
            if last:
                file.close()
                return

    def _next_batch(self) -> tuple[list[Record], bool]:
        """Wait for records; return (records, whether they are the last).

        If no record arrives for CHECKPOINT_INTERVAL_S seconds, the only record is a Checkpoint.
        """
        try:
            records = [self._queue.get(timeout=CHECKPOINT_INTERVAL_S)]
        except queue.Empty:
            return [Checkpoint(time.time())], False
        with contextlib.suppress(queue.Empty):
            while records[-1] is not None:
                records.append(self._queue.get_nowait())
        return [record for record in records if record is not None], records[-1] is None


class _File:
    """A history file, created by its first write with O_EXCL, so that it has one writer."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._records, self._bytes, self._torn = path, -1, 0, 0, False

    def write(self, records: list[Record]) -> None:
        """Append the records. Raise OSError if they cannot be written, or the file would exceed its maximum size."""
        if self._fd < 0:
            self._fd = create_file(self._path.parent.parent, self._path.name)
        data = (b"\n" if self._torn else b"") + b"".join(map(encode_line, records))
        if self._records + len(records) > MAX_FILE_RECORDS or self._bytes + len(data) > MAX_FILE_BYTES:
            size = f"{self._records} records and {self._bytes} bytes"
            raise OSError(0, f"the file already has {size}, and a report reads no more")
        self._torn = True  # it stays True if a write fails before all data is written
        while data:
            written = _write(self._fd, data)
            self._bytes += written
            data = data[written:]
        self._torn = False
        self._records += len(records)

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
