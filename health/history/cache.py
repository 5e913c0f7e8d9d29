"""An administrator's cache of history folders: a private SQLite file that is updated with new records.

The cache is rebuilt if it is damaged or has another version. If its file cannot be written, the cache is in memory. It
uses a rollback journal and no WAL, because a home folder may be on NFS. :mod:`rrl.health.history.user_files` decides
which files are read.
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

from .records import MAX_LINE_BYTES, SCHEMA, Record, SourcedRecord, encode_line, file_schema, is_attributable, read_line
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

VERSION = 4
"""Version of the tables and of the records in them."""
TRUSTED_UIDS = frozenset({0})
"""Uids whose findings need no second witness: only root, because root can drain nodes anyway."""
_HEAD_BYTES = 512
"""Number of bytes at the beginning of a file that identify it."""
_BUSY_TIMEOUT_S = 30.0
"""Seconds to wait for another report that uses the same cache."""
_EXPOSURE_KINDS = ("run_started", "node_checks", "node_acquired", "node_released", "run_ended", "records_lost")
"""Kinds of records that determine for how long nodes were held, and by which run. Old records of these kinds are read
too."""
_TABLES = """
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, user TEXT, uid INTEGER, run TEXT, inode INTEGER,
                    head INTEGER, read INTEGER, kept INTEGER, skipped INTEGER, newest REAL);
CREATE TABLE records (file INTEGER, at REAL, kind TEXT, line BLOB);
CREATE INDEX by_file ON records (file);
CREATE INDEX by_time ON records (at);
"""


class Sources(Struct, frozen=True):
    """Counts of the files and records that were read, and the reasons why other files and records were not read."""

    files: int
    records: int
    skipped: int
    """Number of lines that are damaged, have an unknown kind, or name another user or run."""
    refused: tuple[str, ...]
    """Files that are rejected or could not be read, each with the reason."""
    left_out: tuple[str, ...] = ()
    """One line for each user and reason: how many records of the user are implausible, and why
    (:mod:`rrl.health.history.plausibility`)."""


class HistoryCache:
    """Cache of the records in some history folders.

    ``path`` defaults to :func:`cache_path`.
    """

    def __init__(self, folders: Sequence[Path], path: Path | None = None) -> None:
        self._folders = [folder.absolute() for folder in folders]
        self._path = path or cache_path(self._folders)
        self._db = _open(self._path)

    def refresh(self) -> Sources:
        """Read new records into the cache. Raises OSError if a history folder itself cannot be read."""
        try:
            return self._refresh()
        except sqlite3.Error:  # the cache is damaged, the disk is full, or another report hangs
            return self._rebuild()

    def records(self, since: float) -> list[SourcedRecord]:
        """Return the records of all runs from ``since`` (s since 1970) on, by run and time.

        Older records that determine how long nodes were held are included too, if their file has a record after
        ``since``.
        """
        try:
            return list(self._select_records(since))
        except sqlite3.Error:  # a part that `refresh` did not read is damaged
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
        """Close the database."""
        self._db.close()

    def _rebuild(self) -> Sources:
        """Replace the cache with one in memory; the next report creates a cache file again."""
        self._db.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._db = _create(":memory:")
        return self._refresh()

    def _refresh(self) -> Sources:
        rejections = Rejections()
        with self._db:  # one transaction, so that the second of two concurrent reports finds nothing left to do
            self._db.execute("BEGIN IMMEDIATE")
            read_paths = set(self._read_all(rejections))
            for (path,) in self._db.execute("SELECT path FROM files").fetchall():
                if path not in read_paths:  # the file was removed, or is now rejected
                    self._delete_file(path)
            files, skipped = self._db.execute("SELECT count(*), coalesce(sum(skipped), 0) FROM files").fetchone()
            (records,) = self._db.execute("SELECT count(*) FROM records").fetchone()
        return Sources(files, records, skipped, rejections.lines())

    def _read_all(self, rejections: Rejections) -> Iterator[str]:
        """Read all accepted files within the allowances of their users, and yield their paths."""
        allowances: dict[int, Allowance] = defaultdict(Allowance)
        for folder in (user_folder for root in self._folders for user_folder in user_folders(root, rejections)):
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
            first_line = file.readline(MAX_LINE_BYTES)
            if (schema := file_schema(first_line)) not in (None, SCHEMA):
                raise RejectedFile(f"it has history schema {schema}; this version of rrl reads only schema {SCHEMA}")
            head = zlib.crc32(first_line[:_HEAD_BYTES].removesuffix(b"\n"))
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
                if text == b"\n":  # a manager writes an empty line after a failed write
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
        """Return the file's id, the bytes read, the records stored and the lines skipped so far.

        A file that shrank or was replaced is read again from its beginning.
        """
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
    """Return ``rrl/history-<hash of the folders>.sqlite`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` by default."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    mark = hashlib.sha256("\n".join(sorted(str(folder.absolute()) for folder in folders)).encode()).hexdigest()[:12]
    return Path(root).expanduser() / "rrl" / f"history-{mark}.sqlite"


def _open(path: Path) -> sqlite3.Connection:
    """Open the cache. If that fails, create an empty one, which is in memory if no file can be created."""
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
