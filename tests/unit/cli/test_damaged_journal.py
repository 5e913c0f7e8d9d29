"""Every command reports a journal with changed bytes in one line, and none ends with a traceback."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.cli.run import submit as submit_command
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.manager.storage.journal import MAGIC, JournalError, read_state
from rrl.tests.support.cli.story import Story
from rrl.tests.support.manager.jobs import job
from rrl.transport.keys import RunKeys

FRAME = struct.Struct("<II")
COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("logs", "--failed"),
    ("list",),
    ("resume",),
    ("manage",),
    ("cancel", "--no-wait"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run without a manager, with a recovery in its journal."""
    root = tmp_path / "runs"
    monkeypatch.setenv(RUNS_ENV, str(root))
    monkeypatch.setattr(submit_command, "_manager", lambda run, foreground: None)
    made = Story("mine-1").works().recovers("rollout/0").written(root)
    RunKeys.make().save(made.keys)
    made.run_spec.write_bytes(msgspec.json.encode(job()))
    made.resolved.write_text(json.dumps({"source": "/nowhere/job.toml", "job": {}}))
    return made


def frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each payload of a segment: the head, then the records."""
    at = len(MAGIC)
    while at < len(data):
        length, _ = FRAME.unpack_from(data, at)
        yield at + FRAME.size, length
        at += FRAME.size + length


def framed_again(data: bytearray, at: int, length: int) -> bytes:
    """Return the segment with the checksum of this frame computed again for its changed payload."""
    FRAME.pack_into(data, at - FRAME.size, length, zlib.crc32(data[at : at + length]))
    return bytes(data)


def on_run(command: tuple[str, ...], run: RunDir) -> list[str]:
    name, *options = command
    return [name, *options] if name == "list" else [name, run.id, *options]


def test_a_record_whose_text_is_not_utf8_is_one_line_from_every_command(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = run.journal.glob("*.seg")
    data = bytearray(segment.read_bytes())
    records = list(frames(bytes(data)))[1:]
    at, length = next((at, length) for at, length in records if b"rollout/0" in data[at : at + length])
    data[data.index(b"rollout/0", at)] = 0xFF
    segment.write_bytes(framed_again(data, at, length))
    for command in COMMANDS:
        code = main.run(on_run(command, run))
        out, err = capsys.readouterr()
        if command == ("list",):  # list still shows the other runs
            assert code == 0
            assert "unreadable" in out
            continue
        assert (code, out) == (2, ""), command
        assert err.startswith(f"rrl: {segment}: the record at byte "), command
        assert err.endswith("; restore the file from a backup, or submit the job again\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize("damaged_journals", [140, pytest.param(750, marks=pytest.mark.long)])
def test_a_journal_with_any_damaged_record_is_read_or_refused_in_one_line(
    run: RunDir, capsys: pytest.CaptureFixture[str], damaged_journals: int
) -> None:
    (segment,) = run.journal.glob("*.seg")
    whole, draw = segment.read_bytes(), random.Random(14)
    payloads = list(frames(whole))
    refused = 0
    for case in range(damaged_journals):
        data = bytearray(whole)
        at, length = draw.choice(payloads)
        for _ in range(draw.randint(1, 3)):
            data[at + draw.randrange(length)] = draw.randrange(256)
        segment.write_bytes(framed_again(data, at, length))
        try:
            read_state(run)
        except JournalError:
            damaged = True
        else:
            damaged = False
        command = COMMANDS[case % len(COMMANDS)]
        code = main.run(on_run(command, run))
        _, err = capsys.readouterr()
        assert "internal error" not in err, (case, command, err)
        assert err.count("\n") <= (1 if code else 2), (case, command, err)
        if damaged and command != ("list",):
            assert code == 2, (case, command, err)
            refused += 1
    assert refused > damaged_journals / 4  # otherwise hardly any damage would be in a place that a command reads
