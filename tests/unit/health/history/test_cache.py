"""The administrator's cache: new records are added, changed files are read again, untrusted records are left out."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path

import pytest

from rrl.health.history.cache import HistoryCache, Sources, cache_path
from rrl.health.history.own_folder import user_name
from rrl.health.history.records import MAX_LINE_BYTES, SCHEMA, Record, encode_line, file_name, file_schema
from rrl.tests.support.health.site_history import BEGAN, HOUR, began, failed, found, held, left, over, write

ME = user_name()
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "history"
    made.mkdir()
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "history.sqlite"


def read(folder: Path, file: Path, since: float = 0.0) -> tuple[list[Record], Sources]:
    cache = HistoryCache([folder], file)
    try:
        sources = cache.refresh()
        return [one.record for one in cache.records(since)], sources
    finally:
        cache.close()


def records() -> list[Record]:
    return [began(0, "r", ME), *held(0, "n1"), found(5, "n1"), failed(6, "n1")]


def test_all_written_records_are_read(folder: Path, file: Path) -> None:
    write(folder, ME, "r", records())
    records_read, sources = read(folder, file)
    assert records_read == records()
    assert (sources.files, sources.records, sources.skipped, sources.refused) == (1, 4, 0, ())


def test_new_records_are_added_and_old_ones_are_not_read_again(folder: Path, file: Path) -> None:
    path = write(folder, ME, "r", records())
    read(folder, file)
    db = sqlite3.connect(file)
    db.execute("UPDATE records SET line = CAST(replace(CAST(line AS TEXT), 'n1', 'n9') AS BLOB)")
    db.commit()
    db.close()  # the cache now differs from the file, which shows whether a record comes from the cache
    with path.open("ab") as more:
        more.write(encode_line(left(9, "n1")))
    records_read, _ = read(folder, file)
    assert [getattr(one, "node", "") for one in records_read] == ["", "n9", "n9", "n9", "n1"]


def test_torn_line_is_read_once_it_is_complete(folder: Path, file: Path) -> None:
    path = write(folder, ME, "r", records())
    whole = encode_line(left(9, "n1"))
    with path.open("ab") as more:
        more.write(whole[:10])
    records_read, sources = read(folder, file)
    assert (len(records_read), sources.skipped) == (4, 0)
    with path.open("ab") as more:
        more.write(whole[10:])
    assert read(folder, file)[0][-1] == left(9, "n1")


@pytest.mark.parametrize("how", ["shrunk", "replaced", "rewritten"])
def test_file_that_shrank_or_was_replaced_is_read_again(folder: Path, file: Path, how: str) -> None:
    path = write(folder, ME, "r", records())
    read(folder, file)
    new = [began(1, "r", ME), *held(1, "n2")]
    if how == "replaced":
        path.rename(path.with_suffix(".old"))  # its inode stays in use
        new += [found(5, f"n{i}") for i in range(9)]
    elif how == "rewritten":
        new += [found(5, f"n{i}") for i in range(9)]
    path.write_bytes(b"".join(map(encode_line, new)))
    assert read(folder, file)[0] == new


def test_removed_file_is_dropped_from_the_cache(folder: Path, file: Path) -> None:
    path = write(folder, ME, "r", records())
    read(folder, file)
    path.unlink()
    assert read(folder, file)[0] == []


def test_damaged_lines_are_skipped_and_counted(folder: Path, file: Path) -> None:
    path = write(folder, ME, "r", records())
    with path.open("ab") as more:
        more.write(
            b'{"kind":"prayed","at":1}\nnot json\n' + b"x" * (3 * MAX_LINE_BYTES) + b"\n" + encode_line(left(9, "n1"))
        )
    records_read, sources = read(folder, file)
    assert records_read == [*records(), left(9, "n1")]
    assert sources.skipped == 3


def test_records_in_the_name_of_another_user_are_skipped(folder: Path, file: Path) -> None:
    write(folder, ME, "r", [began(0, "r", "somebody"), *held(0, "n1")])
    records_read, sources = read(folder, file)
    assert (records_read, sources.skipped) == (held(0, "n1"), 1)


def test_file_in_a_folder_of_another_user_is_refused(folder: Path, file: Path) -> None:
    write(folder, "nosuchuser", "r", records())
    records_read, sources = read(folder, file)
    assert records_read == []
    assert "it belongs to" in sources.refused[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_only_files_that_belong_to_the_user_are_read(folder: Path, file: Path) -> None:
    write(folder, ME, "mine", [began(0, "mine", ME), *records()[1:]])
    forged = write(folder, ME, "forged", records())
    os.chown(forged, NOBODY, -1)
    theirs = write(folder, "nobody", "theirs", [began(0, "theirs", "nobody")])
    os.chown(theirs, NOBODY, -1)
    records_read, sources = read(folder, file)
    assert len(records_read) == 5
    assert [refused.partition(":")[0] for refused in sources.refused] == [str(forged)]


def test_links_pipes_and_other_files_are_not_read(folder: Path, file: Path) -> None:
    elsewhere = write(folder, ME, "r", records()).rename(folder / "elsewhere")
    os.symlink(elsewhere, folder / ME / file_name("r", 1))
    os.mkfifo(folder / ME / file_name("pipe", 1))
    (folder / ME / "notes.txt").write_text("hello")
    os.symlink(folder / ME, folder / "linked")
    records_read, sources = read(folder, file)
    assert (records_read, len(sources.refused)) == ([], 2)


@pytest.mark.parametrize("run", [b"x\xff", b"x\x1b[2J", b"x\n", b"-"])
def test_file_whose_name_no_run_can_have_is_not_read(folder: Path, file: Path, run: bytes) -> None:
    name = run + b".000001.jsonl"
    path = write(folder, ME, "r", records())
    (folder / ME / os.fsdecode(name)).write_bytes(path.read_bytes())
    (folder / os.fsdecode(name)).mkdir()
    _, sources = read(folder, file)
    assert sources.files == 1
    assert all(": it belongs to " in refused for refused in sources.refused)  # no user has the name of this folder


def test_records_of_two_epochs_belong_to_one_run(folder: Path, file: Path) -> None:
    write(folder, ME, "r", records())
    write(folder, ME, "r", [began(HOUR, "r", ME, 2), over(2 * HOUR)], epoch=2)
    cache = HistoryCache([folder], file)
    cache.refresh()
    assert {(one.user, one.run) for one in cache.records(0.0)} == {(ME, "r")}
    cache.close()


def test_old_records_are_left_out_except_those_of_held_nodes(folder: Path, file: Path) -> None:
    write(folder, ME, "r", [*records(), left(9 * HOUR, "n1")])
    write(folder, ME, "old", [began(0, "old", ME), found(5, "n1"), over(6)])
    records_read, _ = read(folder, file, BEGAN + HOUR)
    assert records_read == [began(0, "r", ME), *held(0, "n1"), left(9 * HOUR, "n1")]


@pytest.mark.parametrize("damage", [b"", b"this is no database" * 100, "truncated"])
def test_damaged_cache_is_rebuilt(folder: Path, file: Path, damage: bytes | str) -> None:
    write(folder, ME, "r", [*records(), *(found(i, f"n{i}") for i in range(10, 500))])
    before = read(folder, file)[0]
    file.write_bytes(damage if isinstance(damage, bytes) else file.read_bytes()[: 3 * 4096])
    assert read(folder, file)[0] == before
    assert read(folder, file)[0] == before


def test_reading_works_without_a_cache_that_can_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write(folder, ME, "r", records())
    assert read(folder, tmp_path / "file" / "history.sqlite")[0] == records()


def test_two_concurrent_reports_read_the_same_records(folder: Path, file: Path) -> None:
    write(folder, ME, "r", [*records(), *(found(i, f"n{i}") for i in range(2000))])
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(len(read(folder, file)[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert counts == [2004] * 4


def test_each_set_of_folders_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = cache_path([Path("/a")]), cache_path([Path("/a"), Path("/b")])
    assert one != two
    assert two == cache_path([Path("/b"), Path("/a")])
    assert one.parent == tmp_path / "rrl"


def old_schema_file(folder: Path) -> Path:
    """Write a history file in the old format of schema 1."""
    path = write(folder, ME, "old", [])
    path.write_text(
        f'{{"kind":"began","at":{BEGAN},"run":"old","user":"{ME}","cluster":"c","job":"j","epoch":1,"schema":1}}\n'
        f'{{"kind":"held","at":{BEGAN},"node":"n1","gpus":8}}\n'
    )
    return path


def test_file_of_another_schema_is_rejected_with_one_line(folder: Path, file: Path) -> None:
    old = old_schema_file(folder)
    write(folder, ME, "r", records())
    records_read, sources = read(folder, file)
    assert records_read == records()
    assert sources.refused == (f"{old}: it has history schema 1; this version of rrl reads only schema {SCHEMA}",)
    assert (sources.files, sources.skipped) == (1, 0)


def test_file_whose_schema_changed_drops_its_cached_records(folder: Path, file: Path) -> None:
    path = write(folder, ME, "old", [began(0, "old", ME), *held(0, "n1")])
    assert len(read(folder, file)[0]) == 2
    assert old_schema_file(folder) == path
    assert read(folder, file)[0] == []


@pytest.mark.parametrize("first_line", [b"", b"{", b'{"kind":"run_started"}', b'{"schema":"two"}', b"\xff", b"[1]"])
def test_first_line_without_a_schema_states_none(first_line: bytes) -> None:
    assert file_schema(first_line) is None


def test_run_started_states_the_current_schema() -> None:
    assert file_schema(encode_line(began(0, "r", ME))) == SCHEMA
