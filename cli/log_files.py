"""Which logs a run has, told by the names of their files.

``logs/<run>.<role>-<index>.<incarnation>.log`` is what that life wrote, rotated to ``.log.1`` and ``.log.2``;
``...shipped-<epoch>.log`` are lines of it that a manager kept; ``...step.log``, ``...step.log.0`` and ``...srun`` are
what the launcher of its step said. The manager's are submitit's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from rrl.roles.logs import FILES
from rrl.spec.rundir import RunDir
from rrl.spec.words import Life, replica_id

_NAME = re.compile(
    r"(?P<role>[a-z_]+)-(?P<index>.+)\.(?P<incarnation>\d+)"
    r"(?:(?P<own>\.log)|(?P<copy>\.shipped-\d+\.log)|\.(?P<launcher>step)\.log(?:\.\d+)?|\.step\.log\.(?P<srun>srun))"
)


class Log(Struct, frozen=True, order=True):
    """What one life (or its launcher, or a manager) wrote: ``path``, rotated, and the ``copies`` of lines of it."""

    role: str
    replica: str
    incarnation: int
    label: str
    """what its lines are labelled with"""
    kind: str
    """``role``, ``launcher`` or ``manager``"""
    path: Path
    copies: tuple[Path, ...] = ()

    @property
    def life(self) -> str:
        """``rollout/0#1``; of a manager ``manager``."""
        return "manager" if self.kind == "manager" else f"{self.replica}#{self.incarnation}"


def all_logs(run: RunDir) -> list[Log]:
    """Every log of the run that has something in it, by role, replica and incarnation."""
    copies: dict[str, list[Path]] = {}
    found: dict[Path, Log] = {}
    for path in _entries(run.logs):
        if match := re.fullmatch(r"manager\.(\d+)\.log", path.name):
            found[path] = Log("manager", "manager", int(match[1]), f"manager epoch {match[1]}", "manager", path)
        elif match := _NAME.fullmatch(re.sub(r"(\.log)\.1$", r"\1", path.name.removeprefix(f"{run.id}."))):
            life = Life(replica_id(match["role"], match["index"]), int(match["incarnation"]))
            own = run.logs / f"{run.id}.{match['role']}-{match['index']}.{match['incarnation']}.log"
            if match["launcher"] or match["srun"]:
                label = f"{life} {match['launcher'] or match['srun']}"
                found[path] = Log(match["role"], life.replica, life.incarnation, label, "launcher", path)
                continue
            found.setdefault(own, Log(match["role"], life.replica, life.incarnation, str(life), "role", own))
            if match["copy"]:
                copies.setdefault(own.name, []).append(path.with_name(path.name.removesuffix(".1")))
    for path in _entries(run.submit):
        if path.name.endswith(("_log.out", "_log.err")) or path.name == "controller.log":
            kind = "manager (errors)" if path.suffix == ".err" else "manager"
            found[path] = Log("manager", "manager", 0, kind, "manager", path)
    return sorted(
        Log(log.role, log.replica, log.incarnation, log.label, log.kind, log.path,
            tuple(sorted(set(copies.get(log.path.name, ())))))
        for log in found.values()
    )  # fmt: skip


def chain(path: Path) -> list[Path]:
    """The names of a log's files, oldest first; not all need be there."""
    return [*(path.with_name(f"{path.name}.{n}") for n in range(FILES - 1, 0, -1)), path]


def _entries(folder: Path) -> Iterator[Path]:
    """Files that have something in them."""
    try:
        for entry in os.scandir(folder):
            try:
                if entry.is_file() and entry.stat().st_size:
                    yield Path(entry.path)
            except OSError:  # rotated away at this moment
                continue
    except OSError:  # no such folder (any more)
        return
