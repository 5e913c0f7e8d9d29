"""Durable claims of notifications: each is written before its notification is sent, so that none is sent twice.

If a manager dies between claim and sending, its notification is never sent. If two managers claim at the same time,
because one manager was frozen and has been replaced, only one of them creates the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Struct

from ...core.run_dir import sync
from ...core.run_spec import NotificationKind


class Claim(Struct, frozen=True):
    """The claim of a notification, whether the notification was sent or not."""

    kind: NotificationKind
    at: float
    """Manager's time (s)."""
    keys: tuple[str, ...] = ()
    """Occurrences that the notification is about; empty if the writer died while it wrote the claim."""
    text: str = ""


class Claims:
    """The claims of a run in ``folder``, which the first claim creates. Reading and writing raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._claims: dict[NotificationKind, list[Claim]] = {}

    def load(self) -> None:
        """Read all claims, including the claims of other managers."""
        self._claims = {}
        try:
            names = sorted(os.listdir(self._folder), key=lambda name: (len(name), name))
        except FileNotFoundError:
            return
        for name in names:
            for kind in (kind for kind in get_args(NotificationKind) if name.startswith(f"{kind}-")):
                self._claims.setdefault(kind, []).append(_read(self._folder / name, kind))

    def is_claimed(self, kind: NotificationKind, key: str) -> bool:
        """Return whether an occurrence was claimed."""
        return any(key in claim.keys for claim in self._claims.get(kind, ()))

    def newest_at(self, kind: NotificationKind) -> float | None:
        """Return the manager's time (s) of the newest claim of a kind; None if there is no claim."""
        return max((claim.at for claim in self._claims.get(kind, ())), default=None)

    def add(self, kind: NotificationKind, at: float, keys: Sequence[str], text: str) -> bool:
        """Write the next claim of a kind durably; return False if another manager has already written this claim.

        Claims of a kind are numbered, and the file of each number can be created only once.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{kind}-{len(self._claims.get(kind, ())) + 1}.json"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        claim = Claim(kind, at, tuple(keys), text)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(claim))
                file.flush()
                os.fsync(file.fileno())
            sync(self._folder)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()  # nothing was sent, so another claim may be made
            raise
        self._claims.setdefault(kind, []).append(claim)
        return True


def _read(path: Path, kind: NotificationKind) -> Claim:
    """Return a claim. If its writer died during the write, the claim has no keys and the time of its file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Claim)
    except msgspec.MsgspecError:
        return Claim(kind, path.stat().st_mtime)
