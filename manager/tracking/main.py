"""Send the steps of one run to one tracker: ``python -m rrl.manager.tracking.main RUN_DIR TRACKER PARENT MODE``.

The process reads the journal from its beginning, sends the steps that the tracker does not have, then follows the
journal. It shares only the run directory with the manager. So a tracker that hangs, refuses data or is unreachable can
delay only this process. If a call takes longer than ``[track] timeout``, this process ends, and its supervisor starts
another one.

PARENT is the pid of the process that started this process. If PARENT ends, this process ends. MODE is ``follow`` (until
SIGTERM), ``end`` (until the run has ended and its end is sent) or ``once`` (until what is in the journal is sent).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ...config.import_paths import OPEN_TOKENIZER, TRACKERS
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.sample_texts import Decode, DecodedSample, decoded
from ...core.samples_file import read_steps
from ...core.text import on_one_line
from ...core.types import Outcome
from ...health.readers.isolation.process import set_parent_death_signal
from ..model import events as ev
from ..reporting.step_metrics import StepRow, StepRows
from ..storage.journal import EventFollower
from .base import TrackedRun, Tracker
from .tracker_files import TRACKER_ENV, Locked, Progress, end_leftovers, locked, mark_of, read_progress, write_progress

POLL_S = 1.0
"""Seconds between two reads of the journal."""
FLUSH_ROWS = 500
"""Number of sent rows of a long backlog after which the tracker is flushed and the progress is recorded."""
HUNG_EXIT, LOCKED_EXIT = 3, 4
"""Exit codes: the first means that a call of the tracker took longer than ``[track] timeout``, the second that another
process tracks this run."""
FOLLOW, UNTIL_END, ONCE = "follow", "end", "once"
HIDDEN = "(hidden)"
"""Text that a tracker gets instead of the value of an environment variable or a line of ``[env] setup``."""
MAX_ERROR_CHARS = 300


def main() -> int:
    """Send rows until the end that MODE defines, and return the exit code."""
    run, name, parent, mode = RunDir(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    set_parent_death_signal(parent, signal.SIGKILL)
    os.environ[TRACKER_ENV] = mark_of(run, name)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        with locked(run, name, wait=mode == FOLLOW):
            end_leftovers(run, name)
            TrackingProcess(run, name, mode, stopping).run()
            return 0
    except Locked:
        return LOCKED_EXIT
    except BaseException as error:  # a tracker's package may even call sys.exit()
        traceback.print_exc()
        reason = on_one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_CHARS]
        with contextlib.suppress(OSError):
            write_progress(run, name, replace(read_progress(run, name), error=reason))
        sys.stderr.flush()
        os._exit(1)  # at a regular exit a tracker's package may wait for a server that does not answer


class TrackingProcess:
    """Follows the journal of one run, and sends its rows to one tracker."""

    def __init__(self, run: RunDir, name: str, mode: str, stopping: threading.Event) -> None:
        self._run, self._name, self._mode, self._stopping = run, name, mode, stopping
        self._follower, self._rows = EventFollower(run), StepRows()
        self._unsent: list[StepRow] = []
        self._project = ""
        self._samples = _Samples(run)
        self._outcome: Outcome | None = None
        self._finished = False
        """True once this process has sent the end of the run."""
        self._tracker: Tracker | None = None
        self._sent = -1
        """Newest step that the tracker has; -1 if it has none."""
        self._job_written_at = 0
        """Modification time (ns) of the job spec with which the tracker was opened."""
        self._job_digest = ""
        self._deadline = Deadline()

    def run(self) -> None:
        """Send rows until the end that the mode defines. Raises whatever the journal or the tracker raises."""
        while True:
            last_pass = self._stopping.is_set() or self._mode == ONCE
            self._read()
            if self._unsent or (self._outcome is not None and not self._finished):
                self._send()
            if last_pass or (self._mode == UNTIL_END and self._finished):
                break
            self._stopping.wait(POLL_S)
        self._deadline.start()  # the deadline also limits what the tracker's package does at the exit
        if self._tracker is not None:
            self._tracker.close()

    def _read(self) -> None:
        """Read the new events of the journal."""
        for stamped in self._follower.events():
            event = stamped.event
            self._unsent += self._rows.apply(stamped)
            if isinstance(event, ev.RunStarted | ev.Resumed):
                self._project = event.job.track.project or event.job.name
                self._deadline.timeout_s = event.job.track.timeout
                self._samples.job = event.job
                self._outcome, self._finished = None, False
            elif isinstance(event, ev.RunEnded):
                self._outcome = event.outcome

    def _send(self) -> None:
        """Send the unsent rows, and the end of the run."""
        tracker = self._opened()
        rows, self._unsent = self._unsent, []
        for number, row in enumerate(rows, 1):
            if row.step is not None and row.step > self._sent:
                with self._deadline:
                    tracker.send(row, self._samples.of(row.step))
                self._sent = row.step
            if number % FLUSH_ROWS == 0 or number == len(rows):
                with self._deadline:
                    tracker.flush()
                self._note(tracker)
        if self._outcome is not None:
            last = rows[-1] if rows and rows[-1].step is None else None
            with self._deadline:
                tracker.finish(self._outcome, last)
                tracker.close()
            self._tracker, self._finished = None, True
            self._note(tracker)

    def _opened(self) -> Tracker:
        """Return the tracker; open it first if it is not open, or if a resume has changed the job spec."""
        written_at = self._run.resolved.stat().st_mtime_ns
        if self._tracker is not None and written_at == self._job_written_at:
            return self._tracker
        job = _without_secrets(msgspec.json.decode(self._run.resolved.read_bytes())["job"])
        digest = hashlib.sha256(msgspec.json.encode(job)).hexdigest()
        folder = self._run.trackers / self._name
        folder.mkdir(mode=0o700, exist_ok=True)
        changed = digest != read_progress(self._run, self._name).job
        with self._deadline:
            if self._tracker is not None:
                self._tracker.close()
            self._tracker = open_tracker(self._name, TrackedRun(self._run.id, self._project, folder, job, changed))
        self._sent, self._job_written_at, self._job_digest = self._tracker.newest_step, written_at, digest
        return self._tracker

    def _note(self, tracker: Tracker) -> None:
        progress = Progress(max(0, self._sent), self._job_digest, tracker.place, self._finished)
        write_progress(self._run, self._name, progress)


class _Samples:
    """Reads and decodes the samples that are sent with some steps. Whatever fails here costs only the samples."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.job: RunSpec | None = None
        self._decode: Decode | None = None

    def of(self, step: int) -> list[DecodedSample]:
        """Return the samples of a step; empty if none are due, or if there are none."""
        if self.job is None or not step or not (every := self.job.track.samples_every) or step % every:
            return []
        try:
            _, found = read_steps(self._run.samples, lambda _: [step])
            if found and self._decode is None:
                module, _, function = OPEN_TOKENIZER.partition(":")
                self._decode = getattr(importlib.import_module(module), function)(self.job.model).describe
            return decoded(found[0], self._decode) if found else []
        except Exception:  # for example, this host lacks the folder of the model
            sys.stderr.write(f"no samples are sent of step {step}: {traceback.format_exc(limit=1)}")
            return []


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open a run in the tracker of this name. Its package is imported only here, because that takes seconds.

    Raises whatever the tracker raises, and ImportError if its package is not installed.
    """
    module, _, attribute = TRACKERS[name].partition(":")
    tracker: Tracker = getattr(importlib.import_module(module), attribute)(run)
    return tracker


class Deadline:
    """A context manager that ends this process if a block takes longer than ``timeout_s`` seconds. It is reusable.

    A thread waits for the deadline, because a call that hangs in a library cannot be interrupted.
    """

    def __init__(self) -> None:
        self.timeout_s = math.inf
        self._ends_at = math.inf
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def start(self) -> None:
        """End this process ``timeout_s`` seconds from now, if it still runs."""
        self._ends_at = time.monotonic() + self.timeout_s

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ends_at = math.inf

    def _watch(self) -> None:
        while time.monotonic() < self._ends_at:
            time.sleep(POLL_S)
        os._exit(HUNG_EXIT)


def _without_secrets(job: Any, path: tuple[str, ...] = ()) -> Any:
    """Return the job spec without the values of environment variables and the setup lines, which may be secrets."""
    if path and path[-1] == "env" and len(path) > 1 and isinstance(job, dict):
        return dict.fromkeys(job, HIDDEN)
    if path == ("env", "setup"):
        return [HIDDEN for _ in job]
    if isinstance(job, dict):
        return {key: _without_secrets(value, (*path, key)) for key, value in job.items()}
    return job


if __name__ == "__main__":
    sys.exit(main())
