"""``rrl logs``: what a run's processes wrote, the ends of their logs or as it comes.

A log is ``logs/<run>.<role>-<index>.<incarnation>.log``, rotated to ``.log.1``; ``...step.log`` is what the launcher of
that step said. The manager's are submitit's. Following goes on over rotations and into new incarnations.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from rrl.cli.asking import BadInput, Failed, Reader, find_run
from rrl.spec.rundir import RunDir
from rrl.spec.words import Life, replica_id

PAUSE = 0.4
"""s between two looks"""
_CHUNK = 64 * 2**10
_COLOURS = (36, 33, 32, 35, 34, 31)


class Log(Struct, frozen=True, order=True):
    """One log file: whose it is, and what its lines are labelled with."""

    role: str
    replica: str
    incarnation: int
    label: str
    path: Path


def logs(name: str, whose: str | None, *, follow: bool, lines: int) -> int:
    run = find_run(name)
    chosen = _chosen(run, whose)
    if not chosen and not follow:
        raise BadInput(_nothing(run, whose))
    if not chosen and whose is not None and not _may_come(run, whose):
        raise BadInput(_nothing(run, whose))
    printer = _Printer(several=follow or len(chosen) > 1)
    tails = {log.path: _Tail(log, printer, lines) for log in chosen}
    if follow:
        try:
            _follow(run, whose, tails, printer)
        except KeyboardInterrupt:
            return 130
    for tail in tails.values():
        tail.close()
    return 0


# ── which files ────────────────────────────────────────────────────────────────────────────────────────────────────
def all_logs(run: RunDir) -> list[Log]:
    """Every log of the run that has something in it, by role, replica and incarnation."""
    found = [log for path in run.logs.glob("*.log") if (log := _read_name(run, path))]
    for path in [*run.submit.glob("*_log.out"), *run.submit.glob("*_log.err"), *run.submit.glob("controller.log")]:
        kind = "manager" if path.suffix == ".log" or path.suffix == ".out" else "manager (errors)"
        found.append(Log("manager", "manager", 0, kind, path))
    return sorted(log for log in found if _size(log.path))


def _read_name(run: RunDir, path: Path) -> Log | None:
    name = path.name.removeprefix(f"{run.id}.").removesuffix(".log")
    if match := re.fullmatch(r"manager\.(\d+)", name):
        return Log("manager", "manager", int(match[1]), f"manager epoch {match[1]}", path)
    match = re.fullmatch(r"([a-z]+)-(.+)\.(\d+)(\.step)?", name)
    if match is None:
        return None
    role, index, incarnation, launcher = match.groups()
    life = Life(replica_id(role, index), int(incarnation))
    return Log(role, life.replica, life.incarnation, f"{life}{' step' if launcher else ''}", path)


def _chosen(run: RunDir, whose: str | None) -> list[Log]:
    return [log for log in all_logs(run) if whose is None or whose in (log.role, log.replica)]


def _may_come(run: RunDir, whose: str) -> bool:
    """The job has this role or replica, and it only has not written anything yet."""
    state = Reader(run).state()
    return state is not None and any(whose in (replica.id, replica.role) for replica in state.replicas.values())


def _nothing(run: RunDir, whose: str | None) -> str:
    there = sorted({log.replica for log in all_logs(run)})
    if not there:
        return f"{run.id} has no logs yet"
    if whose is not None and _may_come(run, whose):
        return f'"{whose}" of {run.id} has written nothing; there are logs of: {", ".join(there)}'
    return f'{run.id} has no logs of "{whose}"; there are: {", ".join(there)}'


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# ── what is in them ────────────────────────────────────────────────────────────────────────────────────────────────
class _Printer:
    """Lines to stdout, labelled where they could come from several files."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, int] = {}

    def print(self, label: str, lines: Iterable[bytes]) -> None:
        prefix = f"{self._paint(label)} | " if self._several else ""
        for line in lines:
            sys.stdout.write(f"{prefix}{line.decode('utf-8', 'replace')}\n")
        sys.stdout.flush()

    def _paint(self, label: str) -> str:
        if not self._coloured:
            return label
        colour = self._colours.setdefault(label, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{label}\x1b[0m"


class _Tail:
    """One log from its last ``lines`` lines on. The file that was opened is read to its end before its successor."""

    def __init__(self, log: Log, printer: _Printer, lines: int) -> None:
        self._log, self._printer = log, printer
        self._rest = b""
        self._file: BinaryIO | None = _opened(log.path)
        if self._file is not None:
            self._printer.print(log.label, self._last(self._file, lines))

    def more(self) -> None:
        """Print what has come since."""
        if self._file is None:
            self._file = _opened(self._log.path)
        if self._file is None:
            return
        rotated = not _same(self._file, self._log.path)
        self._drain(self._file)
        if rotated and (successor := _opened(self._log.path)) is not None:
            self._file.close()
            self._file = successor
            self._drain(successor)

    def close(self) -> None:
        """Print an unfinished last line."""
        if self._rest:
            self._printer.print(self._log.label, [self._rest])
            self._rest = b""
        if self._file is not None:
            self._file.close()

    def _drain(self, file: BinaryIO) -> None:
        while data := file.read(_CHUNK):
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._printer.print(self._log.label, lines)

    def _last(self, file: BinaryIO, count: int) -> list[bytes]:
        """The last ``count`` lines, read from the end; an unfinished one is kept for later."""
        at = file.seek(0, os.SEEK_END)
        data = b""
        while at and data.count(b"\n") <= count:
            step = min(_CHUNK, at)
            at = file.seek(at - step)
            data = file.read(step) + data
        file.seek(0, os.SEEK_END)
        *lines, self._rest = data.split(b"\n")
        return lines[-count:] if count else []


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:  # rotated away at this moment, or not there yet
        return None
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from None


def _same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return True  # no successor yet


def _follow(run: RunDir, whose: str | None, tails: dict[Path, _Tail], printer: _Printer) -> None:
    """Until the run has ended; whatever was written before its last record is printed."""
    reader = Reader(run)
    while True:
        state = reader.state()
        for log in _chosen(run, whose):
            if log.path not in tails:
                tails[log.path] = _Tail(log, printer, sys.maxsize)  # a new life: from its beginning
        for tail in tails.values():
            tail.more()
        if state is not None and state.outcome is not None:
            return
        time.sleep(PAUSE)
