"""Read one GPU over time: query what is due, keep the rest, report when the GPU is lost, and list its compute
processes.

NVML gives process ids, ``/proc`` the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..samples import Gpu, GpuProcess
from . import queries as table
from .names import NO_HANDLE, SUCCESS, in_words
from .nvlink import read_links
from .session import Answers, Ask

_INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h: in any other, NVML's process ids are not ours"""


class Owners:
    """Looks processes up below ``proc``."""

    def __init__(self, proc: str) -> None:
        self._proc = Path(proc)
        self._ours = _namespace(self._proc) in ("", _INITIAL_NAMESPACE)

    def told(self, process: Any) -> GpuProcess:
        """Of one of nvmlDeviceGetComputeRunningProcesses."""
        pid = int(process.pid)
        memory = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
        uid, name = self._look_up(pid) if self._ours else (None, "")
        return GpuProcess(pid, uid, memory, name)

    def _look_up(self, pid: int) -> tuple[int | None, str]:
        """(real uid, name). The owner of the folder would not do: it is root's for a process that may not be dumped."""
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


_IDENTITY = tuple(field for ask in table.IDENTITY for field in ask.fields)
_READ = tuple(field for field in Gpu.__struct_fields__ if field not in ("index", "lost", "unread", *_IDENTITY))
_CONFIRMED = 3
"""reads that look anew at links and fabric once they changed: a check wants to see several times what condemns"""
_HANDLE_EVERY = 20
"""reads between two attempts to get a handle that the driver refused"""


class Device:
    """The GPU that NVML counts as ``index``."""

    def __init__(self, nvml: Any, index: int, owners: Owners, identity: dict[str, str]) -> None:
        """``identity``: what an earlier session knew of it; a GPU that is lost tells nothing any more."""
        self.handle: Any = None
        self.identity = dict(identity)
        self.lost = ""
        self._nvml = nvml
        self._index = index
        self._refused = ""
        self._confirm = 0
        """reads that still do so"""
        self._answers: Answers | None = None
        self._processes = (Ask(("processes",), _process_ways(owners)),)

    def open(self) -> None:
        """Gets a handle. The driver refuses it for a GPU that is lost, and for one that is not of our allocation."""
        try:
            self.handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        except self._nvml.NVMLError as error:
            code = int(error.value)
            self._refused = in_words(code, str(error))
            self.lost = self._refused if code in NO_HANDLE else ""
            return
        self._refused = self.lost = ""
        self._answers = Answers(self._nvml, self.handle)
        code, uuid = self._answers.call(lambda nvml, handle: nvml.nvmlDeviceGetUUID(handle))
        if code == SUCCESS:
            self.identity["uuid"] = uuid

    def read(self, turn: int, whole: bool, may_end: bool) -> Gpu:
        """``turn``: number of this read. ``whole``: everything, due or not. ``may_end``: an error that the session is
        over is raised as :class:`~rrl.health.readers.nvml.session.SessionOver`, else noted like any other."""
        if self._answers is None and (whole or turn % _HANDLE_EVERY == 0):
            self.open()
        if self._answers is None:
            return self._silent(self._refused)
        answers = self._answers
        answers.may_end = may_end
        answers.gone = ""
        before = answers.values.get("recovery_action", "none")
        self._ask_fast(answers)
        if not answers.gone:
            whole = whole or answers.values["recovery_action"] != before or "name" not in answers.values
            self._ask_rest(answers, turn + self._index, whole)
        self.identity.update({field: answers.values[field] for field in _IDENTITY if answers.values.get(field)})
        self.lost = answers.gone
        return self._silent(answers.gone, answers) if answers.gone else self._told(answers)

    def _ask_fast(self, answers: Answers) -> None:
        answers.begin()
        answers.ask_fields(table.FAST_FIELDS)
        if not answers.gone:
            answers.ask(table.FAST)
        answers.judge_silence()

    def _ask_rest(self, answers: Answers, turn: int, whole: bool) -> None:
        """GPUs take turns (``turn`` has the index in it): no read of eight of them is much longer than another."""
        if whole or turn % table.FIXED_EVERY == 0:
            answers.ask((*table.IDENTITY, *table.FIXED))
        if not answers.gone and (whole or turn % table.MEDIUM_EVERY == 0):
            answers.ask_fields(table.MEDIUM_FIELDS)
            if not answers.gone:
                answers.ask((*table.MEDIUM, *self._processes))
        if not answers.gone and (whole or self._confirm or turn % table.SLOW_EVERY == 0):
            self._ask_slow(answers)

    def _ask_slow(self, answers: Answers) -> None:
        before, known = _connections(answers), "nvlinks" in answers.values
        answers.ask_fields(table.SLOW_FIELDS)
        if not answers.gone:
            answers.ask(table.SLOW)
            read_links(answers)
        after = _connections(answers)
        news = after != before if known else after[0] in _UNFINISHED
        self._confirm = _CONFIRMED if news else max(0, self._confirm - 1)

    def _told(self, answers: Answers) -> Gpu:
        values = {**answers.values, **{field: self.identity.get(field, "") for field in _IDENTITY}}
        return Gpu(index=self._index, unread=dict(answers.unread), **values)

    @property
    def uuid(self) -> str:
        return self.identity.get("uuid", "")

    def _silent(self, why: str, answers: Answers | None = None) -> Gpu:
        """Nothing of before is carried on. The recovery action may still be told, and says what would help."""
        action = answers.values.get("recovery_action") if answers and "recovery_action" not in answers.unread else None
        unread = {field: why for field in _READ if field != "recovery_action" or action is None}
        unread |= {field: why for field in _IDENTITY if field not in self.identity}
        if self.lost and answers is not None:
            answers.values.clear()
            answers.unread.clear()
        return Gpu(index=self._index, lost=self.lost, recovery_action=action, unread=unread, **_known(self.identity))


_UNFINISHED = ("not_started", "in_progress")


def _connections(answers: Answers) -> tuple[Any, ...]:
    """State of the fabric, and of each link."""
    links = answers.values.get("nvlinks") or ()
    return (answers.values.get("fabric_state"), answers.values.get("fabric_status"), *(link.active for link in links))


def _known(identity: dict[str, str]) -> dict[str, Any]:
    return {field: identity.get(field, "") for field in _IDENTITY}


def _process_ways(owners: Owners) -> tuple[Any, ...]:
    def told(found: Any) -> tuple[Any, ...]:
        return tuple(sorted((owners.told(process) for process in found), key=lambda process: process.pid))

    return (
        lambda nvml, handle: told(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)),
        lambda nvml, handle: told(nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)),
    )
