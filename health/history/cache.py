"""The administrator's cache of history folders: an SQLite file of their own, brought up to date by what is new.

Nothing in it is worth keeping: it is made anew where it is damaged, of another version, or cannot be written (then in
memory). Rollback journal, no WAL: a home folder may lie on NFS. Which files are read:
:mod:`rrl.health.history.user_files`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from .records import Record, SourcedRecord, encode_line, is_attributable, read_line
from .user_files import (
    MAX_USER_RECORDS,
    Allowance,
    RejectedFile,
    Rejections,
    UserFolder,
    newest_files,
    open_checked,
    user_folders,
    whole_lines,
)

VERSION = 2
"""of the tables"""
TRUSTED_UIDS = frozenset({0})
"""whose own findings need no second witness: root drains nodes anyhow"""
_HEAD_BYTES = 512
"""bytes at a file's beginning by which it is known again"""
_BUSY_TIMEOUT_S = 30.0
"""s that another report is waited for"""
_EXPOSURE_KINDS = ("run_started", "node_acquired", "node_released", "run_ended", "records_lost")
"""kinds that say how long nodes were held, however long ago that began"""
_TABLES = """
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, user TEXT, uid INTEGER, run TEXT, inode INTEGER,
                    head INTEGER, read INTEGER, kept INTEGER, skipped INTEGER, newest REAL);
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
    left_out: tuple[str, ...] = ()
    """whose records cannot be true, how many, and why (:mod:`rrl.health.history.plausibility`)"""


class HistoryCache:
    """``path`` None: where :func:`cache_path` says."""

    def __init__(self, folders: Sequence[Path], path: Path | None = None) -> None:
        self._folders = [folder.absolute() for folder in folders]
        self._path = path or cache_path(self._folders)
        self._db = _open(self._path)

    def refresh(self) -> Sources:
        """Read what is new. Raises OSError where a history folder itself cannot be read."""
        try:
            return self._refresh()
        except sqlite3.Error:  # damaged, full, or another report does not come to an end
            return self._rebuild()

    def records(self, since: float) -> list[SourcedRecord]:
        """Records of all runs from ``since`` (s since the epoch) on, by run and time; how long nodes were held whenever
        it began."""
        try:
            return list(self._select_records(since))
        except sqlite3.Error:  # damaged where nobody had looked
            self._rebuild()
            return list(self._select_records(since))

    def _select_records(self, since: float) -> Iterator[SourcedRecord]:
        marks = ",".join("?" * len(_EXPOSURE_KINDS))
        query = f"""SELECT user, uid, run, line FROM records JOIN files ON file = files.id
            WHERE at >= ? OR kind IN ({marks}) AND newest >= ? ORDER BY user, run, at, records.rowid"""
        for user, uid, run, text in self._db.execute(query, (since, *_EXPOSURE_KINDS, since)):
            if (record := read_line(text)) is not None:
                yield SourcedRecord(user, run, record, uid in TRUSTED_UIDS)

    def close(self) -> None:
        self._db.close()

    def _rebuild(self) -> Sources:
        """In memory; the next report makes a file of it again."""
        self._db.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._db = _create(":memory:")
        return self._refresh()

    def _refresh(self) -> Sources:
        rejections = Rejections()
        with self._db:  # one transaction: of two reports at once, the second finds it done
            self._db.execute("BEGIN IMMEDIATE")
            read_paths = set(self._read_all(rejections))
            for (path,) in self._db.execute("SELECT path FROM files").fetchall():
                if path not in read_paths:  # removed, or not believed any more
                    self._delete_file(path)
            files, skipped = self._db.execute("SELECT count(*), coalesce(sum(skipped), 0) FROM files").fetchone()
            (records,) = self._db.execute("SELECT count(*) FROM records").fetchone()
        return Sources(files, records, skipped, rejections.lines())

    def _read_all(self, rejections: Rejections) -> Iterator[str]:
        """Paths of the files that are believed, each read as far as it goes and as its user's allowance reaches."""
        allowances: dict[int, Allowance] = defaultdict(Allowance)
        for folder in (one for root in self._folders for one in user_folders(root, rejections)):
            try:
                for path, run in newest_files(folder, rejections):
                    try:
                        self._read(path, folder, run, allowances[folder.uid])
                        yield str(path)
                    except (OSError, RejectedFile) as error:
                        rejections.add(folder.user, path, getattr(error, "strerror", None) or str(error))
            except OSError as error:
                rejections.add(folder.user, folder.path, error.strerror or str(error))
            if allowances[folder.uid].records <= 0:
                rejections.add(folder.user, folder.path, f"only {MAX_USER_RECORDS} records of a user are kept")

    def _read(self, path: Path, folder: UserFolder, run: str, allowance: Allowance) -> None:
        file, about = open_checked(path, folder, allowance)
        with file:
            head = zlib.crc32(file.read(_HEAD_BYTES).partition(b"\n")[0])
            id, offset, record_count, skipped = self._known_file(path, folder, run, about, head)
            allowance.records -= record_count
            file.seek(offset)
            rows: list[tuple[int, float, str, bytes]] = []
            newest = 0.0
            for length, text in whole_lines(file):
                if len(rows) >= allowance.records:
                    break
                offset += length
                record = read_line(text)
                if text == b"\n":  # a manager's, after a write that failed
                    continue
                if record is None or not is_attributable(record, folder.user, run):
                    skipped += 1
                else:
                    rows.append((id, record.at, _kind(record), encode_line(record)))
                    newest = max(newest, record.at)
        allowance.records -= len(rows)
        self._db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        changed = "UPDATE files SET read = ?, kept = ?, skipped = ?, newest = max(newest, ?) WHERE id = ?"
        self._db.execute(changed, (offset, record_count + len(rows), skipped, newest, id))

    def _known_file(
        self, path: Path, folder: UserFolder, run: str, about: os.stat_result, head: int
    ) -> tuple[int, int, int, int]:
        """Its id here, how many bytes of it were read, records kept and lines skipped. A file that shrank or is another
        one begins anew."""
        query = "SELECT id, uid, inode, head, read, kept, skipped FROM files WHERE path = ?"
        if row := self._db.execute(query, (str(path),)).fetchone():
            id, uid, inode, before, read, record_count, skipped = row
            same = uid == folder.uid and inode == about.st_ino and (before == head or not read)
            if same and about.st_size >= read:
                self._db.execute("UPDATE files SET head = ? WHERE id = ?", (head, id))
                return id, read, record_count, skipped
            self._delete_file(str(path))
        made = "INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0)"
        values = (str(path), folder.user, folder.uid, run, about.st_ino, head)
        id = self._db.execute(made, values).lastrowid
        assert id is not None
        return id, 0, 0, 0

    def _delete_file(self, path: str) -> None:
        self._db.execute("DELETE FROM records WHERE file IN (SELECT id FROM files WHERE path = ?)", (path,))
        self._db.execute("DELETE FROM files WHERE path = ?", (path,))


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
            db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            if db.execute("PRAGMA user_version").fetchone() == (VERSION,):
                db.execute("SELECT count(*) FROM files").fetchone()
                return db
            db.close()
        path.unlink(missing_ok=True)
        return _create(str(path))
    return _create(":memory:")


def _create(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    db.executescript(f"PRAGMA journal_mode=DELETE; PRAGMA synchronous=OFF; BEGIN; {_TABLES} COMMIT;")
    db.execute(f"PRAGMA user_version={VERSION}")
    return db


def _kind(record: Record) -> str:
    return str(record.__struct_config__.tag)
