"""Open files in the calling user's folder inside a history folder.

Every user may write to the history folder. So another user may have put a link or a folder of any name into it, to make
root write elsewhere. For this reason the calling user's folder is opened without following a link, the owner of the
opened folder is checked, and files are opened relative to it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Modes of folders and files: every user may read them, but only the owner may write."""


def user_name() -> str:
    """Return the name of the user's folder: the user's name, or the uid if the uid has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def create_file(history: Path, name: str) -> int:
    """Create the file ``name`` in the user's folder, and return a descriptor that appends to it.

    Raises OSError if the file exists, or if it cannot be created.
    """
    return _open_file(history, name, os.O_WRONLY | os.O_EXCL)


def open_file(history: Path, name: str) -> int:
    """Open the file ``name`` in the user's folder, or create it; return a descriptor that reads and appends.

    Raises OSError if the file can be neither opened nor created.
    """
    return _open_file(history, name, os.O_RDWR)


def _open_file(history: Path, name: str, flags: int) -> int:
    folder = _open_folder(history / user_name())
    try:
        flags |= os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, FILE_MODE, dir_fd=folder)
    finally:
        os.close(folder)
    with contextlib.suppress(PermissionError):  # an existing file keeps its mode if storage maps users
        os.fchmod(fd, FILE_MODE)
    return fd


def _open_folder(path: Path) -> int:
    """Create the user's folder unless it exists, and return its descriptor.

    The history folder itself is not created, because it may be a mount that is missing at the moment.
    """
    made = False
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=FOLDER_MODE)
        made = True
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            if made:  # the storage gives root's files to another user (NFS: root_squash), so a report would reject them
                path.rmdir()
                raise PermissionError(0, f"{path.parent}: the storage gives the folder of {path.name} to another user")
            raise PermissionError(0, f"{path} belongs to another user")
        if made:
            os.fchmod(fd, FOLDER_MODE)  # whatever the umask
    except BaseException:
        os.close(fd)
        raise
    return fd
