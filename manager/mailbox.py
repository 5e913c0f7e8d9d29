"""Commands from people: one file each in the run directory's mailbox, which only the run's owner can write.

It works where no port can be reached, and while no manager lives: the next one takes what waits.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.manager.saying import say
from rrl.spec.faults import Fault
from rrl.spec.rundir import RunDir

_LARGEST = 4 * 2**20
"""bytes of a letter that are read; a command has some hundred"""


class Letter(Struct, frozen=True):
    """One command: ``cancel``, ``restart``, ``drain``, ``undrain``, or ``inject`` with its fault. ``id`` is its file's
    name: a command is taken once."""

    command: str
    by: str = ""
    id: str = ""
    fault: Fault | None = None
    target: str = ""
    """``restart``: a replica; ``drain``, ``undrain``: a node"""
    reason: str = ""
    """``drain``: in the person's own words"""
    keep: bool = False
    """``cancel``: leave the allocations"""


def letters(run: RunDir) -> list[Letter]:
    """What waits, in order. What cannot be read is put aside (``.bad``) and told: it must not be read for ever."""
    waiting = []
    owner = run.path.stat().st_uid
    for path in sorted(run.mailbox.glob("[!.]*.json")):
        try:
            letter = msgspec.json.decode(_read(path, owner), type=Letter)
        except (OSError, msgspec.MsgspecError) as error:
            say(f"the mailbox holds no command in {path.name}: {error}")
            path.rename(path.with_suffix(".bad"))
            continue
        waiting.append(msgspec.structs.replace(letter, id=path.stem))
    return waiting


def _read(path: Path, owner: int) -> bytes:
    """Raises PermissionError unless the run's owner wrote it, or root."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        writer = os.fstat(file.fileno())
        if not stat.S_ISREG(writer.st_mode) or writer.st_uid not in (owner, 0):
            raise PermissionError(f"it is of user {writer.st_uid}, and the run of user {owner}")
        return file.read(_LARGEST)


def taken(run: RunDir, letter: Letter) -> None:
    """It is durable in the journal: its file can go."""
    (run.mailbox / f"{letter.id}.json").unlink(missing_ok=True)
