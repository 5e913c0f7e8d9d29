"""Read one GPU repeatedly: query the values that are due, keep the others, detect a lost GPU, and list its processes.

NVML gives process ids; owner and name come from ``/proc``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..samples import Accelerator, GpuProcess, NvidiaGpu
from . import queries as table
from .names import NO_HANDLE_CODES, SUCCESS, error_text
from .nvlink import read_links
from .session import Query, QueryResults

_INITIAL_NAMESPACE = "pid:[4026531836]"
"""Name of the initial PID namespace (PROC_PID_INIT_INO of linux include/linux/proc_ns.h). In any other namespace NVML's
process ids are not valid."""


class ProcessOwners:
    """Looks up owner and name of processes in ``proc``."""

    def __init__(self, proc: str) -> None:
        self._proc = Path(proc)
        self._same_namespace = _namespace(self._proc) in ("", _INITIAL_NAMESPACE)

    def describe(self, process: Any) -> GpuProcess:
        """Return the process that an entry of nvmlDeviceGetComputeRunningProcesses describes."""
        pid = int(process.pid)
        memory = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
        uid, name = self._look_up(pid) if self._same_namespace else (None, "")
        return GpuProcess(pid, uid, memory, name)

    def _look_up(self, pid: int) -> tuple[int | None, str]:
        """Return (real uid, name) of a process.

        The owner of the process's folder in /proc is not used, because it is root for a process that may not be dumped.
        """
        try:
            text = (self._proc / str(pid) / "status").read_text(errors="replace")
        except OSError:
            return None, ""
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        uid = lines.get("Uid", "").split()
        return int(uid[0]) if uid else None, lines.get("Name", "").strip()


def _namespace(proc: Path) -> str:
    try:
        return os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return ""


_IDENTITY_FIELDS = tuple(field for ask in table.IDENTITY for field in ask.fields)
_READ_FIELDS = tuple(
    field for field in NvidiaGpu.__struct_fields__ if field not in ("index", "lost", "unread", *_IDENTITY_FIELDS)
)
_CONFIRMATION_READS = 3
"""Number of reads that query links and fabric again after a change of their state, because a check needs several
samples for a FAIL."""
_HANDLE_RETRY_READS = 20
"""Number of reads between two attempts to get a handle that the driver refused."""


def read_use(nvml: Any, name: str, index: int, owners: ProcessOwners) -> Accelerator:
    """Return the values of :data:`.queries.USE` and the processes of the GPU ``name``. Raises NVMLError if unknown."""
    lookup = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
    results = QueryResults(nvml, lookup(int(name) if name.isdigit() else name), session_may_end=False)
    results.query((*table.USE, Query(("processes",), _process_queries(owners))))
    return Accelerator(index=index, **{**results.values, "uuid": results.values["uuid"] or ""})


class Device:
    """The GPU that NVML lists at ``index``."""

    def __init__(self, nvml: Any, index: int, owners: ProcessOwners, identity: dict[str, str]) -> None:
        """Create the device without a handle.

        ``identity`` contains the identity fields from an earlier session, which a lost GPU does not report.
        """
        self.handle: Any = None
        self.identity = dict(identity)
        self.lost = ""
        self._nvml = nvml
        self._index = index
        self._refused = ""
        self._confirmations_left = 0
        """Number of further reads that query links and fabric because one of them changed."""
        self._results: QueryResults | None = None
        self._processes = (Query(("processes",), _process_queries(owners)),)

    def open(self) -> None:
        """Get a handle. The driver refuses a handle for a GPU that is lost or not allocated to this job."""
        try:
            self.handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        except self._nvml.NVMLError as error:
            code = int(error.value)
            self._refused = error_text(code, str(error))
            self.lost = self._refused if code in NO_HANDLE_CODES else ""
            return
        self._refused = self.lost = ""
        self._results = QueryResults(self._nvml, self.handle)
        code, uuid = self._results.call(lambda nvml, handle: nvml.nvmlDeviceGetUUID(handle))
        if code == SUCCESS:
            self.identity["uuid"] = uuid

    def read(self, read_number: int, full: bool, session_may_end: bool) -> NvidiaGpu:
        """Read the values that are due and return the GPU.

        Args:
            read_number: Number of this read.
            full: Whether to read all values, due or not.
            session_may_end: Whether an error that ends the session raises
                :class:`~rrl.health.readers.nvml.session.SessionOver`; otherwise it is noted like any other error.
        """
        if self._results is None and (full or read_number % _HANDLE_RETRY_READS == 0):
            self.open()
        if self._results is None:
            return self._unreadable_gpu(self._refused)
        results = self._results
        results.session_may_end = session_may_end
        results.lost_reason = ""
        before = results.values.get("recovery_action", "none")
        self._query_fast(results)
        if not results.lost_reason:
            full = full or results.values["recovery_action"] != before or "name" not in results.values
            self._query_rest(results, read_number + self._index, full)
        self.identity.update({field: results.values[field] for field in _IDENTITY_FIELDS if results.values.get(field)})
        self.lost = results.lost_reason
        return self._unreadable_gpu(results.lost_reason, results) if results.lost_reason else self._gpu_values(results)

    def _query_fast(self, results: QueryResults) -> None:
        results.begin_read()
        results.query_fields(table.FAST_FIELDS)
        if not results.lost_reason:
            results.query(table.FAST)
        results.detect_unresponsive()

    def _query_rest(self, results: QueryResults, read_number: int, full: bool) -> None:
        """Query the values that are due.

        ``read_number`` is the number of the read plus the GPU's index, so that the slow queries of eight GPUs are
        spread over several reads.
        """
        if full or read_number % table.FIXED_EVERY == 0:
            results.query((*table.IDENTITY, *table.FIXED))
        if not results.lost_reason and (full or read_number % table.MEDIUM_EVERY == 0):
            results.query_fields(table.MEDIUM_FIELDS)
            if not results.lost_reason:
                results.query((*table.MEDIUM, *self._processes))
        if not results.lost_reason and (full or self._confirmations_left or read_number % table.SLOW_EVERY == 0):
            self._query_slow(results)

    def _query_slow(self, results: QueryResults) -> None:
        before, known = _connections(results), "nvlinks" in results.values
        results.query_fields(table.SLOW_FIELDS)
        if not results.lost_reason:
            results.query(table.SLOW)
            read_links(results)
        after = _connections(results)
        changed = after != before if known else after[0] in _UNFINISHED
        self._confirmations_left = _CONFIRMATION_READS if changed else max(0, self._confirmations_left - 1)

    def _gpu_values(self, results: QueryResults) -> NvidiaGpu:
        values = {**results.values, **{field: self.identity.get(field, "") for field in _IDENTITY_FIELDS}}
        return NvidiaGpu(index=self._index, unread=dict(results.unread), **values)

    @property
    def uuid(self) -> str:
        """Return the GPU's UUID; empty if unknown."""
        return self.identity.get("uuid", "")

    def _unreadable_gpu(self, reason: str, results: QueryResults | None = None) -> NvidiaGpu:
        """Return the GPU without values of earlier reads.

        Only the recovery action, which names the remedy, may still be readable.
        """
        action = results.values.get("recovery_action") if results and "recovery_action" not in results.unread else None
        unread = {field: reason for field in _READ_FIELDS if field != "recovery_action" or action is None}
        unread |= {field: reason for field in _IDENTITY_FIELDS if field not in self.identity}
        if self.lost and results is not None:
            results.values.clear()
            results.unread.clear()
        return NvidiaGpu(
            index=self._index, lost=self.lost, recovery_action=action, unread=unread, **_known_identity(self.identity)
        )


_UNFINISHED = ("not_started", "in_progress")


def _connections(results: QueryResults) -> tuple[Any, ...]:
    """Return the state of the fabric and of each link."""
    links = results.values.get("nvlinks") or ()
    return (results.values.get("fabric_state"), results.values.get("fabric_status"), *(link.active for link in links))


def _known_identity(identity: dict[str, str]) -> dict[str, Any]:
    return {field: identity.get(field, "") for field in _IDENTITY_FIELDS}


def _process_queries(owners: ProcessOwners) -> tuple[Any, ...]:
    def describe_all(processes: Any) -> tuple[Any, ...]:
        return tuple(sorted((owners.describe(process) for process in processes), key=lambda process: process.pid))

    return (
        lambda nvml, handle: describe_all(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)),
        lambda nvml, handle: describe_all(nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)),
    )
