"""Each record of a history is read as it was written, and all other lines are rejected."""

from __future__ import annotations

import pytest

from rrl.health.history.records import (
    ActionTaken,
    Checkpoint,
    Failed,
    FindingRecord,
    NodeAcquired,
    NodeChecks,
    NodeReleased,
    Record,
    RecordsLost,
    RecoveryDone,
    RunEnded,
    RunStarted,
    clipped,
    encode_line,
    file_name,
    is_attributable,
    is_node,
    parse_file_name,
    read_line,
)
from rrl.tests.support.health.site_history import acted, began, failed, found, held, left, mended, over

EVERY: list[Record] = [
    began(0, "r", "anna"),
    *held(1, "n1"),
    left(2, "n1"),
    Checkpoint(3.0),
    found(4, "n1"),
    acted(5, "n1", "excluded"),
    failed(6, "n1"),
    mended(7, "rollout/0", "n1", 6, 0.5),
    over(8),
    RecordsLost(9.0, 3),
    NodeChecks(10.0, "n1", "root"),
]


def test_sample_records_cover_every_record_kind() -> None:
    kinds = {
        RunStarted,
        NodeChecks,
        NodeAcquired,
        NodeReleased,
        Checkpoint,
        FindingRecord,
        ActionTaken,
        Failed,
        RecoveryDone,
        RunEnded,
        RecordsLost,
    }
    assert {type(one) for one in EVERY} == kinds == set(Record.__args__)


@pytest.mark.parametrize("record", EVERY, ids=lambda one: type(one).__name__)
def test_a_record_is_one_line_and_is_read_as_it_was_written(record: Record) -> None:
    text = encode_line(record)
    assert text.count(b"\n") == 1
    assert read_line(text.strip()) == record


def test_unknown_field_of_a_record_is_ignored() -> None:
    assert read_line(b'{"kind":"node_released","at":2.0,"node":"n1","new":{"a":1}}') == NodeReleased(2.0, "n1")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"kind":"node_released","at":2.0',
        b'{"kind":"prayed","at":1.0}',
        b'{"at":1.0,"node":"n1"}',
        b"[1]",
        b'{"kind":"node_released","at":"now","node":"n1"}',
        b"\xff\xfe",
        b"{" * 5000,
        b'{"kind":"node_released","at":-1.0,"node":"n1"}',
        b'{"kind":"node_released","at":1e300,"node":"n1"}',
        b'{"kind":"node_acquired","at":1.0,"node":"n1","gpus":-8}',
        b'{"kind":"recovery_done","at":1,"replica":"r/0","node":"n1","since":0,"gpu_hours":1e308}',
    ],
)
def test_damaged_record_or_record_of_an_unknown_kind_reads_as_none(text: bytes) -> None:
    assert read_line(text) is None


@pytest.mark.parametrize("name", ["n[1-1000]", "ALL", "all", "n1,n2", "n1 state=idle", "-n1", "n1;reboot", "n" * 300])
def test_record_that_does_not_name_one_node_is_ignored(name: str) -> None:
    assert not is_node(name)
    assert read_line(encode_line(ActionTaken(1.0, name, "drain_requested", "rrl:x"))) is None


@pytest.mark.parametrize("name", ["n1", "gpu-0042.cluster.example", "NODE_7"])
def test_valid_node_name_is_recognised(name: str) -> None:
    assert is_node(name)


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "two\nlines", "bell\a", "\u202eback", "nul\0"])
def test_cursor_control_characters_are_neither_written_nor_read(text: str) -> None:
    forged = encode_line(RunEnded(1.0, "completed", text))
    assert read_line(forged.strip()) is None
    written = encode_line(RunEnded(1.0, "completed", clipped(text)))
    assert read_line(written.strip()) == RunEnded(1.0, "completed", clipped(text))


def test_quotes_and_backslashes_in_a_record_are_read_as_written() -> None:
    record = RunEnded(1.0, "failed", 'C:\\new "quoted" \\x1b is only letters')
    assert read_line(encode_line(record).strip()) == record


def test_a_long_line_of_evidence_is_cut() -> None:
    assert clipped("x" * 1000) == "x" * 299 + "…"


def test_file_name_contains_run_and_epoch() -> None:
    assert parse_file_name(file_name("math-0101-1.2", 7)) == ("math-0101-1.2", 7)
    assert [parse_file_name(name) for name in ("x.jsonl", "x.7.jsonl", ".jsonl", "notes.txt", "a/b.000001.jsonl")] == [
        None
    ] * 5


def test_record_that_names_another_user_or_run_is_not_attributable() -> None:
    record = began(0, "r", "anna")
    assert is_attributable(record, "anna", "r")
    assert not is_attributable(record, "ben", "r")
    assert not is_attributable(record, "anna", "other")
