"""Commands from people: one file each in the run directory's mailbox, which only the run's owner can write.

It works where no port can be reached, and while no manager lives: the next one takes what waits.
"""

from __future__ import annotations

import sys

import msgspec
from msgspec import Struct

from rrl.spec.rundir import RunDir


class Letter(Struct, frozen=True):
    """One command. ``id`` is its file's name: a command is taken once."""

    command: str
    by: str = ""
    id: str = ""


def letters(run: RunDir) -> list[Letter]:
    """What waits, in order. What cannot be read is put aside (``.bad``) and told: it must not be read for ever."""
    waiting = []
    for path in sorted(run.mailbox.glob("[!.]*.json")):
        try:
            letter = msgspec.json.decode(path.read_bytes(), type=Letter)
        except (OSError, msgspec.MsgspecError) as error:
            print(f"rrl: the mailbox holds no command in {path.name}: {error}", file=sys.stderr, flush=True)
            path.rename(path.with_suffix(".bad"))
            continue
        waiting.append(msgspec.structs.replace(letter, id=path.stem))
    return waiting


def taken(run: RunDir, letter: Letter) -> None:
    """It is durable in the journal: its file can go."""
    (run.mailbox / f"{letter.id}.json").unlink(missing_ok=True)
