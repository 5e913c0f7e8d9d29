"""Which logs a run has, told by the names of their files.

``logs/<run>.<role>-<index>.<incarnation>.log`` is what that life wrote, rotated to ``.log.1`` and ``.log.2``;
``...shipped-<epoch>.log`` are lines of it that a manager kept; ``...step.log``, ``...step.log.0`` and ``...srun`` are
what the launcher of its step said. A life that began as a shadow has a link under its own name to the shadow's log:
all that the step wrote is then that life's, what it wrote while it stood by included. The manager's are submitit's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ...core.launch import tag_of
from ...core.run_dir import RunDir
from ...core.types import Life, ReplicaId, gang_of, replica_id, role_of
from ...roles.launcher.logs.files import FILES

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
    was: str = ""
    """the shadow that it was before, ``shadow/n1#3``"""

    @property
    def life(self) -> str:
        """``rollout/0#1``; of a manager ``manager``."""
        return "manager" if self.kind == "manager" else f"{self.replica}#{self.incarnation}"

    def of(self, whose: str) -> bool:
        """``whose``: a role, a replica (of a gang all members) or a life; also of the shadow that it was."""
        was = (role_of(ReplicaId(self.was)), self.was.partition("#")[0], self.was) if self.was else ()
        return whose in (self.role, self.replica, self.life, gang_of(ReplicaId(self.replica)), *was)


def all_logs(run: RunDir) -> list[Log]:
    """Every log of the run that has something in it, by role, replica and incarnation."""
    adopted = _adopted(run)
    copies: dict[str, list[Path]] = {}
    found: dict[Path, Log] = {}
    for path in _entries(run.logs):
        if match := re.fullmatch(r"manager\.(\d+)\.log", path.name):
            found[path] = Log("manager", "manager", int(match[1]), f"manager epoch {match[1]}", "manager", path)
        elif match := _NAME.fullmatch(re.sub(r"(\.log)\.1$", r"\1", path.name.removeprefix(f"{run.id}."))):
            named = Life(replica_id(match["role"], match["index"]), int(match["incarnation"]))
            life = adopted.get(named, named)
            was = str(named) if named in adopted else ""
            own = run.log_file(tag_of(run.id, named))
            if path == own and path.is_symlink():
                continue
            role = role_of(life.replica)
            if match["launcher"] or match["srun"]:
                label = f"{life} {match['launcher'] or match['srun']}"
                found[path] = Log(role, life.replica, life.incarnation, label, "launcher", path, (), was)
                continue
            found.setdefault(own, Log(role, life.replica, life.incarnation, str(life), "role", own, (), was))
            if match["copy"]:
                copies.setdefault(own.name, []).append(path.with_name(path.name.removesuffix(".1")))
    for path in _entries(run.submit):
        if path.name.endswith(("_log.out", "_log.err")) or path.name == "controller.log":
            kind = "manager (errors)" if path.suffix == ".err" else "manager"
            found[path] = Log("manager", "manager", 0, kind, "manager", path)
    return sorted(
        Log(log.role, log.replica, log.incarnation, log.label, log.kind, log.path,
            tuple(sorted(set(copies.get(log.path.name, ())))), log.was)
        for log in found.values()
    )  # fmt: skip


def _adopted(run: RunDir) -> dict[Life, Life]:
    """What shadows became, told by links. They are not followed, only their names are read."""
    adopted: dict[Life, Life] = {}
    with suppress(OSError):
        for entry in os.scandir(run.logs):
            with suppress(OSError):
                shadow = _life(run, os.readlink(entry.path)) if entry.is_symlink() else None
                life = _life(run, entry.name)
                if shadow is not None and life is not None:
                    adopted[shadow] = life
    return adopted


def _life(run: RunDir, name: str) -> Life | None:
    """Whose own log is called so."""
    match = _NAME.fullmatch(name.removeprefix(f"{run.id}."))
    if match is None or not match["own"]:
        return None
    return Life(replica_id(match["role"], match["index"]), int(match["incarnation"]))


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
