"""Write the result of ``rrl health check`` into the site's history and into a file of metrics.

Neither of the two writes may change or delay the verdict. If one of them fails, or the storage does not answer, the
command prints a line of text, which a hook can write to the system's log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from ...core.run_dir import HISTORY_ENV
from ...core.types import Finding, NodeName, UsageError, Verdict
from ...health.check_memory import memory_path, read_memory, update_memory
from ...health.checks.xid_events import XidEvent
from ...health.history.check_records import Standing, record_findings

RECORD_TIMEOUT_S = 3.0
"""Seconds that the storage of the history may take. This is much more than the milliseconds of a write over NFS, and
much less than the 60 s that Slurm gives a HealthCheckProgram."""


METRICS_SUFFIX = ".prom"
"""Ending of the names of the files that node_exporter reads."""


class _Recorded(Struct):
    """The reply of the child process that writes into the history."""

    standing: tuple[Standing, ...] = ()
    error: str = ""


def history_folder(given: Path | None) -> Path:
    """Return the folder for ``--record``: ``given``, else ``$RRL_HISTORY``. Raises UsageError if none is named."""
    named = given or (Path(first) if (first := os.environ.get(HISTORY_ENV, "").split(os.pathsep)[0]) else None)
    if named is None:
        raise UsageError(f"--record: name the site's history with --history DIR or {HISTORY_ENV}")
    return named.expanduser()


def metrics_file(path: Path) -> Path:
    """Return the file for ``--prometheus``. Raises UsageError for a name that node_exporter does not read."""
    if path.suffix != METRICS_SUFFIX:
        raise UsageError(f"--prometheus: {path}: node_exporter reads only files that end in {METRICS_SUFFIX}")
    return path


def write_prometheus(
    path: Path,
    node: NodeName,
    verdict: Verdict,
    findings: Sequence[Finding],
    xids: Sequence[XidEvent],
    duration_s: float,
) -> str:
    """Write the metrics of a check; return why they could not be written, or an empty string.

    ``xids`` are the Xids of the last day, ``duration_s`` is the duration of the check.
    """
    from ...health.node_metrics import NodeCheckResult, write_metrics  # prometheus_client takes 0.1 s to import

    drained = read_memory(memory_path(node)).drained
    result = NodeCheckResult(
        node, verdict, findings, xids, time.time(), duration_s, None if drained == "unknown" else drained == "by hook"
    )
    try:
        write_metrics(path, result)
    except OSError as error:
        return f"not written: {path}: {error.strerror or error}"
    return ""


def record(history: Path, node: NodeName, findings: Sequence[Finding]) -> str:
    """Record the findings of a check in the history, within :data:`RECORD_TIMEOUT_S`.

    ``findings`` have times in s since 1970. Returns an empty string if they were recorded, else why not. After a
    failure, the next check records all changes since the last successful record.
    """
    path = memory_path(node)
    recorded = _record_in_child(history, node, findings, read_memory(path).standing)
    if recorded.error:
        return f"not recorded: {recorded.error}"
    try:
        update_memory(path, lambda memory: msgspec.structs.replace(memory, standing=recorded.standing))
    except OSError as error:
        return f"not remembered: {error.strerror or error}"
    return ""


def _record_in_child(
    history: Path, node: NodeName, findings: Sequence[Finding], standing: Sequence[Standing] | None
) -> _Recorded:
    """Write the findings into the history in a child process, and return its reply.

    A process that waits for storage cannot be ended. If this process wrote the findings itself, a hook that runs it
    might therefore have to wait without a limit.
    """
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        _write_and_exit(history, node, findings, standing, write_end)
    os.close(write_end)
    answer = _read_until(read_end, time.monotonic() + RECORD_TIMEOUT_S)
    if answer is None:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
        return _Recorded(error=f"{history}: no answer within {RECORD_TIMEOUT_S:g} s")
    os.waitpid(child, 0)
    try:
        return msgspec.json.decode(answer, type=_Recorded)
    except msgspec.MsgspecError:
        return _Recorded(error=f"{history}: the process that writes there has failed")


def _read_until(fd: int, deadline: float) -> bytes | None:
    """Return all that is written to the pipe; None if it is still open at the ``deadline``."""
    answer = b""
    try:
        while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := os.read(fd, 65536)):
                return answer
            answer += part
        return None
    finally:
        os.close(fd)


def _write_and_exit(
    history: Path, node: NodeName, findings: Sequence[Finding], standing: Sequence[Standing] | None, answer: int
) -> NoReturn:
    try:
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # a shell waits until every process has closed the output of its command
            os.dup2(devnull, fd)
        try:
            done = _Recorded(record_findings(history, node, findings, standing, time.time()))
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else history
            done = _Recorded(error=f"{name}: {error.strerror}" if error.errno else str(error.strerror))
        os.write(answer, msgspec.json.encode(done))
    finally:
        os._exit(0)
