"""The administrator's cache of history folders: an SQLite file of their own, brought up to date by what is new.

Nothing in it is worth keeping: it is made anew where it is damaged, of another version, or cannot be written (then in
memory). Rollback journal, no WAL: a home folder may lie on NFS.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from rrl.health.history import MOST_LINE, Record, Told, believed, line, of_file, read_line

VERSION = 1
"""of the tables"""
MOST_BYTES = 256 * 2**20
"""of one file; what is beyond is not read: a run writes some MiB in months"""
_HEAD = 512
"""bytes at a file's beginning by which it is known again"""
_BUSY = 30.0
"""s that another report is waited for"""
_ALWAYS = ("began", "held", "left", "over", "lost")
"""kinds that say how long nodes were held, however long ago that began"""
_TABLES = """
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, user TEXT, run TEXT, inode INTEGER, head INTEGER,
                    read INTEGER, skipped INTEGER, newest REAL);
CREATE TABLE records (file INTEGER, at REAL, kind TEXT, line BLOB);
CREATE INDEX by_file ON records (file);
CREATE INDEX by_time ON records (at);
"""


class Sources(Struct, frozen=True):
    """What was read, and what was not."""

    files: int
    records: int
    skipped: int
    """lines that are damaged, of an unknown kind, or say something in somebody else's name"""
    refused: tuple[str, ...]
    """files that are not believed or could not be read, and why"""


class HistoryCache:
    """``path`` None: where :func:`cache_path` says."""

    def __init__(self, folders: Sequence[Path], path: Path | None = None) -> None:
        self._folders = [folder.absolute() for folder in folders]
        self._path = path or cache_path(self._folders)
        self._refused: list[str] = []
        self._db = _open(self._path)

    def refresh(self) -> Sources:
        """Read what is new. Raises OSError where a history folder itself cannot be read."""
        try:
            return self._refresh()
        except sqlite3.Error:  # damaged, full, or another report does not come to an end
            return self._anew()

    def told(self, since: float) -> list[Told]:
        """Records of all runs from ``since`` (s since the epoch) on, by run and time; how long nodes were held whenever
        it began."""
        try:
            return list(self._told(since))
        except sqlite3.Error:  # damaged where nobody had looked
            self._anew()
            return list(self._told(since))

    def _told(self, since: float) -> Iterator[Told]:
        marks = ",".join("?" * len(_ALWAYS))
        asked = f"""SELECT user, run, line FROM records JOIN files ON file = files.id
            WHERE at >= ? OR kind IN ({marks}) AND newest >= ? ORDER BY user, run, at, records.rowid"""
        for user, run, text in self._db.execute(asked, (since, *_ALWAYS, since)):
            if (record := read_line(text)) is not None:
                yield Told(user, run, record)

    def close(self) -> None:
        self._db.close()

    def _anew(self) -> Sources:
        """In memory; the next report makes a file of it again."""
        self._db.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._db = _fresh(":memory:")
        return self._refresh()

    def _refresh(self) -> Sources:
        self._refused = []
        with self._db:  # one transaction: of two reports at once, the second finds it done
            self._db.execute("BEGIN IMMEDIATE")
            seen = {str(path) for folder in self._folders for path in self._files(folder)}
            for (path,) in self._db.execute("SELECT path FROM files").fetchall():
                if path not in seen:  # removed, or not believed any more
                    self._forget(path)
            files, skipped = self._db.execute("SELECT count(*), coalesce(sum(skipped), 0) FROM files").fetchone()
            (records,) = self._db.execute("SELECT count(*) FROM records").fetchone()
        return Sources(files, records, skipped, tuple(sorted(self._refused)))

    def _files(self, folder: Path) -> Iterator[Path]:
        """Those that are believed, each read as far as it goes."""
        for user in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if user.name.startswith(".") or not user.name.isprintable() or not user.is_dir(follow_symlinks=False):
                continue
            try:
                names = sorted(os.listdir(user.path))
            except OSError as error:
                self._refused.append(f"{user.path}: {error.strerror}")
                continue
            for name in names:
                if (named := of_file(name)) is None:
                    continue
                path = Path(user.path, name)
                try:
                    self._read(path, user.name, named[0])
                except (OSError, _Refused) as error:
                    self._refused.append(f"{path}: {getattr(error, 'strerror', None) or error}")
                else:
                    yield path

    def _read(self, path: Path, user: str, run: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise _Refused("not a file")
            if user not in _names(about.st_uid):
                raise _Refused(f"it belongs to {_names(about.st_uid)[0]}, not to {user}")
            head = zlib.crc32(file.read(_HEAD).partition(b"\n")[0])
            id, offset, skipped = self._known(path, user, run, about, head)
            file.seek(offset)
            rows, newest = [], 0.0
            for length, text in _lines(file):
                if offset > MOST_BYTES:
                    break
                offset += length
                record = read_line(text)
                if text == b"\n":  # a manager's, after a write that failed
                    continue
                if record is None or not believed(record, user, run):
                    skipped += 1
                else:
                    rows.append((id, record.at, _kind(record), line(record)))
                    newest = max(newest, record.at)
        self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        changed = "UPDATE files SET read = ?, skipped = ?, newest = max(newest, ?) WHERE id = ?"
        self._db.execute(changed, (offset, skipped, newest, id))

    def _known(self, path: Path, user: str, run: str, about: os.stat_result, head: int) -> tuple[int, int, int]:
        """Its id here, how far it was read, and lines skipped. One that shrank or is another file begins anew."""
        asked = "SELECT id, inode, head, read, skipped FROM files WHERE path = ?"
        if held := self._db.execute(asked, (str(path),)).fetchone():
            id, inode, before, read, skipped = held
            if inode == about.st_ino and about.st_size >= read and (before == head or not read):
                self._db.execute("UPDATE files SET head = ? WHERE id = ?", (head, id))
                return id, read, skipped
            self._forget(str(path))
        made = "INSERT INTO files (path, user, run, inode, head, read, skipped, newest) VALUES (?, ?, ?, ?, ?, 0, 0, 0)"
        id = self._db.execute(made, (str(path), user, run, about.st_ino, head)).lastrowid
        assert id is not None
        return id, 0, 0

    def _forget(self, path: str) -> None:
        self._db.execute("DELETE FROM records WHERE file IN (SELECT id FROM files WHERE path = ?)", (path,))
        self._db.execute("DELETE FROM files WHERE path = ?", (path,))


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Length and text of each whole line; the text of one that is too long is empty. One that is torn, or still being
    written, is left for the next time."""
    while text := file.readline(MOST_LINE + 1):
        length = len(text)
        while not text.endswith(b"\n") and len(text) > MOST_LINE:
            rest = file.readline(MOST_LINE + 1)
            length += len(rest)
            text = rest if rest.endswith(b"\n") or len(rest) > MOST_LINE else b""
        if not text.endswith(b"\n"):
            return
        yield length, text if length <= MOST_LINE else b""


class _Refused(Exception):
    """This file is not believed."""


def cache_path(folders: Sequence[Path]) -> Path:
    """``~/.cache/rrl/history-<of these folders>.sqlite``, or below ``$XDG_CACHE_HOME``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    mark = hashlib.sha256("\n".join(sorted(str(folder.absolute()) for folder in folders)).encode()).hexdigest()[:12]
    return Path(root).expanduser() / "rrl" / f"history-{mark}.sqlite"


def _open(path: Path) -> sqlite3.Connection:
    """One that can be read and written; else an empty one, at worst in memory."""
    with contextlib.suppress(OSError, sqlite3.Error):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(sqlite3.Error):
            db = sqlite3.connect(path, timeout=_BUSY, isolation_level=None)
            if db.execute("PRAGMA user_version").fetchone() == (VERSION,):
                db.execute("SELECT count(*) FROM files").fetchone()
                return db
            db.close()
        path.unlink(missing_ok=True)
        return _fresh(str(path))
    return _fresh(":memory:")


def _fresh(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY, isolation_level=None)
    db.executescript(f"PRAGMA journal_mode=DELETE; PRAGMA synchronous=OFF; BEGIN; {_TABLES} COMMIT;")
    db.execute(f"PRAGMA user_version={VERSION}")
    return db


def _names(uid: int) -> tuple[str, ...]:
    """What the folder of a user may be called."""
    try:
        return (pwd.getpwuid(uid).pw_name, str(uid))
    except KeyError:
        return (str(uid),)


def _kind(record: Record) -> str:
    return str(record.__struct_config__.tag)
