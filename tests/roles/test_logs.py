from __future__ import annotations

from pathlib import Path

from rrl.roles.logs import RotatingLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_full_file_is_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, file_bytes=10, files=3)
    for n in range(5):
        log.write(b"line %d..\n" % n)
    log.close()
    assert path.read_bytes() == b"line 4..\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"line 3..\n"
    assert (tmp_path / "a.log.2").read_bytes() == b"line 2..\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"one\n", b"two\n"):
        log = RotatingLog(path, file_bytes=100)
        log.write(text)
        log.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_what_exceeds_the_rate_is_dropped_by_lines_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    log = RotatingLog(tmp_path / "a.log", rate=10, burst=10, clock=clock)
    log.write(b"first\nsecond\nthi")
    log.write(b"rd\nfourth\n")
    assert log.dropped == len(b"second\nthird\nfourth\n")
    clock.now = 1.0
    log.write(b"fifth\n")
    log.close()
    assert (tmp_path / "a.log").read_text().splitlines() == [
        "first", "[rrl: 20 bytes of this log were dropped here]", "fifth",
    ]  # fmt: skip


def test_a_flood_that_nothing_follows_is_still_counted(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "a.log", rate=0, burst=4)
    log.write(b"x" * 1000)
    log.close()
    assert (tmp_path / "a.log").read_text() == "[rrl: 1000 bytes of this log were dropped here]\n"


def test_a_log_that_cannot_be_written_costs_its_lines_only(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    log = RotatingLog(folder / "a.log")
    log.write(b"lost\n")
    folder.mkdir()
    log.write(b"kept\n")
    log.close()
    assert (folder / "a.log").read_text() == "[rrl: 5 bytes of this log were dropped here]\nkept\n"
