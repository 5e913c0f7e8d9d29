"""Who else can write a folder. A module planted in the folder of a job would run as the user who submits the job."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = 0
"""Uid of root, who can read and write everything anyway."""


def user_name(uid: int) -> str:
    """Return the name of a user; the uid if the user has no name on this machine."""
    return _name(pwd.getpwuid, uid)


def foreign_writers(path: Path) -> Iterator[tuple[bool, str]]:
    """Yield who, besides this user and root, can change a file or a folder's entries, or exchange the path.

    Whoever may write a parent can exchange the path, unless the sticky bit of the parent prevents this. If the path
    does not exist, only its parents count. If it has links, the parents of both paths count.

    Yields:
        (whether this is wrong in any case, who). A group is normal at sites, and so is another owner of a parent that
        belongs to a group of this user.
    """
    real = Path(os.path.realpath(path))
    for place in filter(Path.exists, dict.fromkeys((real, *real.parents, *path.absolute().parents))):
        about = place.stat()
        owned = about.st_uid in (os.geteuid(), ROOT)
        if place != real and owned and about.st_mode & stat.S_ISVTX:
            continue
        if about.st_mode & stat.S_IWOTH:
            yield True, f"every user may write {place}"
        elif not owned:
            yield place == real or about.st_gid not in os.getgroups(), f"{place} belongs to {user_name(about.st_uid)}"
        elif about.st_mode & stat.S_IWGRP:
            yield False, f"the group {_name(grp.getgrgid, about.st_gid)} may write {place}"


def _name(look_up: Callable[[int], Any], id: int) -> str:
    try:
        return str(look_up(id)[0])
    except KeyError:
        return str(id)
