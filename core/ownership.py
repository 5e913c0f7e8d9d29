"""Who else can write a folder. A module planted in the folder of a job would run as the user who submits the job."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0
"""Uid of root, who can read and write everything anyway."""


def user_name(uid: int) -> str:
    """Return the name of a user; the uid if the user has no name on this machine."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def foreign_writers(folder: Path) -> tuple[str, str]:
    """Return who else can add or replace entries of a folder, besides this user and root.

    Its parents count too: who may write a parent can exchange the folder, unless the sticky bit of the parent prevents
    it. A folder that does not exist is judged by its parents.

    Returns:
        (everybody or the other owner of the folder, a group or the other owner of a parent), each with the folder
        concerned, as a sentence; empty if there is nobody.
    """
    me, certain, possible = os.geteuid(), "", ""
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        try:
            about = place.stat()
        except OSError:
            continue
        owned = about.st_uid in (me, ROOT)
        if place != folder and owned and about.st_mode & stat.S_ISVTX:
            continue
        if about.st_mode & stat.S_IWOTH:
            certain = certain or f"every user may write {place}"
        elif not owned and place == folder:
            certain = certain or f"{place} belongs to {user_name(about.st_uid)}"
        elif not owned:
            possible = possible or f"{place} belongs to {user_name(about.st_uid)}"
        elif about.st_mode & stat.S_IWGRP:
            possible = possible or f"the group {_group_name(about.st_gid)} may write {place}"
    return certain, possible


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
