"""Find the logs of a run by the names of their files.

``logs/<run>.<role>-<index>.<incarnation>.log`` is the log of that incarnation, rotated to ``.log.1`` and ``.log.2``.
``...step.log``, ``...step.log.0`` and ``...step.log.srun`` contain the output of the launcher of the step.

If an incarnation began as a standby process, a link with the name of the incarnation's log points to the standby
process's log. The whole log counts as the incarnation's log, even lines from before the promotion.

``logs/manager.<epoch>.log`` is the log of a manager. Further output of managers is in submitit's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from ...core.launch import tag_of
from ...core.run_dir import OwnPath, RunDir
from ...core.types import Incarnation, ReplicaId, gang_of, replica_id, role_of
from ...roles.launcher.logs.files import FILES

_LOG_NAME_PATTERN = re.compile(
    r"(?P<role>[a-z_]+)-(?P<index>.+)\.(?P<incarnation>\d+)"
    r"(?:(?P<own>\.log)|\.(?P<launcher>step)\.log(?:\.\d+)?|\.step\.log\.(?P<srun>srun))"
)


class Log(Struct, frozen=True, order=True):
    """The log of an incarnation, a launcher or a manager.

    ``path`` is the file with its newest lines; :func:`rotated_files` returns the paths of files with older lines.
    """

    role: str
    replica: str
    incarnation: int
    label: str
    """Label that is printed before each line."""
    kind: str
    """``role``, ``launcher`` or ``manager``."""
    path: Path
    promoted_from: str = ""
    """The standby process that was promoted to the incarnation, such as ``standby/n1#3``; empty if there was none."""

    @property
    def owner(self) -> str:
        """Return the owner of the log: an incarnation such as ``rollout/0#1``, or ``manager``."""
        return "manager" if self.kind == "manager" else f"{self.replica}#{self.incarnation}"

    def belongs_to(self, selector: str) -> bool:
        """Return whether ``selector`` selects this log.

        A selector is a role, a replica, a gang (for the logs of all its members) or an incarnation. If the incarnation
        was promoted from a standby process, the names of the standby process select the log too.
        """
        standby_names = (
            (role_of(ReplicaId(self.promoted_from)), self.promoted_from.partition("#")[0], self.promoted_from)
            if self.promoted_from
            else ()
        )
        return selector in (self.role, self.replica, self.owner, gang_of(ReplicaId(self.replica)), *standby_names)


def all_logs(run: RunDir) -> list[Log]:
    """Return every log of the run that is not empty, sorted by role, replica and incarnation."""
    promotions = _promotions(run)
    found: dict[Path, Log] = {}
    for path in _entries(run.logs):
        if match := re.fullmatch(r"manager\.(\d+)\.log", path.name):
            found[path] = Log("manager", "manager", int(match[1]), f"manager epoch {match[1]}", "manager", path)
        elif match := _LOG_NAME_PATTERN.fullmatch(re.sub(r"(\.log)\.1$", r"\1", path.name.removeprefix(f"{run.id}."))):
            named = Incarnation(replica_id(match["role"], match["index"]), int(match["incarnation"]))
            incarnation = promotions.get(named, named)
            promoted_from = str(named) if named in promotions else ""
            own = run.log_file(tag_of(run.id, named))
            if path == own and path.is_symlink():
                continue
            role = role_of(incarnation.replica)
            if match["launcher"] or match["srun"]:
                label = f"{incarnation} {match['launcher'] or match['srun']}"
                found[path] = Log(role, incarnation.replica, incarnation.number, label, "launcher", path, promoted_from)
                continue
            found.setdefault(
                own, Log(role, incarnation.replica, incarnation.number, str(incarnation), "role", own, promoted_from)
            )
    for path in _entries(run.submit):
        if path.name.endswith(("_log.out", "_log.err")) or path == run.controller_log:
            kind = "manager (errors)" if path.suffix == ".err" else "manager"
            found[path] = Log("manager", "manager", 0, kind, "manager", path)
    return sorted(found.values())


def _promotions(run: RunDir) -> dict[Incarnation, Incarnation]:
    """Return the incarnation that each standby process was promoted to.

    Only the names and targets of the links to standby processes' logs are read; the links are not followed.
    """
    promotions: dict[Incarnation, Incarnation] = {}
    with suppress(OSError):
        for entry in os.scandir(run.logs):
            with suppress(OSError):
                standby = _incarnation_of_log(run, os.readlink(entry.path)) if entry.is_symlink() else None
                incarnation = _incarnation_of_log(run, entry.name)
                if standby is not None and incarnation is not None:
                    promotions[standby] = incarnation
    return promotions


def _incarnation_of_log(run: RunDir, name: str) -> Incarnation | None:
    """Return the incarnation whose own log has this file name; None if it is another kind of file."""
    match = _LOG_NAME_PATTERN.fullmatch(name.removeprefix(f"{run.id}."))
    if match is None or not match["own"]:
        return None
    return Incarnation(replica_id(match["role"], match["index"]), int(match["incarnation"]))


def rotated_files(path: Path) -> list[Path]:
    """Return the paths that a log's files can have, oldest first; some may not exist."""
    return [*(path.with_name(f"{path.name}.{n}") for n in range(FILES - 1, 0, -1)), path]


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the files of the folder that are not empty; none if the folder does not exist."""
    try:
        for entry in os.scandir(folder):
            try:
                if entry.is_file() and entry.stat().st_size:
                    yield OwnPath(entry.path)
            except OSError:  # rotated away at this moment
                continue
    except OSError:  # no such folder (any more)
        return
