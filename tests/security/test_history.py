"""Arbitrary data that a user writes into the shared history accuses no node and delays no report."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.health.history.rates import DAY_S
from rrl.health.history.records import SourcedRecord
from rrl.tests.support.health.site_history import (
    BEGAN,
    HOUR,
    acted,
    began,
    failed,
    found,
    held,
    left,
    mended,
    over,
    sourced,
    write,
)
from rrl.tests.support.plain_user import PlainUser

DEADLINE_S = 300.0
"""Time limit (s) for one report. A report takes some seconds."""
TERABYTE = 2**40
NODES = [f"n{i}" for i in range(1, 9)]


@pytest.fixture
def history() -> Iterator[Path]:
    """Yield a history folder that both users can reach, made by the administrator's steps in docs/health-history.md."""
    folder = Path(tempfile.mkdtemp(prefix="rrl-history-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def report(reader: PlainUser, history: Path) -> tuple[dict[str, Any], str]:
    """Return the parsed output of ``rrl health report`` for the last 28 days, and its stderr."""
    rrl = str(Path(sys.executable).parent / "rrl")
    command = (rrl, "health", "report", "--history", str(history), "--since", "28d", "--format", "json")
    process = reader.popen(*command, XDG_CACHE_HOME=str(reader.home / "cache"))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    return json.loads(out), err


def write_runs(history: Path, folder: str, records: list[SourcedRecord]) -> None:
    """Write the records of each run as a file of the caller in ``history/folder``."""
    for run in dict.fromkeys(one.run for one in records):
        write(history, folder, run, [one.record for one in records if one.run == run])


def honest(user: str) -> list[SourcedRecord]:
    """Return the records of a run that had all nodes for a day and in which one of the run's programs crashed."""
    at = time.time() - BEGAN - 2 * DAY_S
    return sourced(
        user,
        "math-1",
        began(at, "math-1", user),
        held(at, *NODES),
        failed(at + HOUR, "n1"),
        mended(at + HOUR + 60, "rollout/0", "n1", at + HOUR, 0.1),
        over(at + DAY_S),
    )


def invented(user: str) -> list[SourcedRecord]:
    """Return the records of fifteen runs, each on a day of its own, in which all nodes fail with proof."""
    records: list[SourcedRecord] = []
    for day in range(15):
        at, run = time.time() - BEGAN - (day + 1) * DAY_S, f"fake-{day}"
        events: list[Any] = []
        for node in NODES:
            events += [
                *held(at, node),
                found(at + 5, node),
                failed(at + 6, node, f"rollout/{node}#1", cause="gpu"),
                acted(at + 7, node, "excluded"),
                acted(at + 8, node, "asked"),
                left(at + 60, node),
            ]
        records += sourced(user, run, began(at, run, user), events, over(at + 90))
    return records


def assert_no_node_is_accused(document: dict[str, Any], user: str) -> None:
    site, nodes = document["report"]["site"], {one["node"]: one for one in document["report"]["nodes"]}
    assert site["lemons"] == []
    for node in NODES:
        one = nodes[node]
        assert (one["verdict"], one["accused"], one["scontrol"], one["remedy"]) == ("WARN", False, "", "none"), one
        assert one["witnesses"] == [user], one
        assert not one["lemon"]["lemon"], one


@pytest.mark.parametrize("by_number", [False, True])
def test_invented_runs_of_one_user_accuse_no_node(
    owner: PlainUser, attacker: PlainUser, history: Path, by_number: bool
) -> None:
    """Invented runs of one user accuse no node.

    With ``by_number`` the attacker writes half of the records into a folder that is named by the uid, in order to count
    as two users.
    """
    records = invented(attacker.name)

    def attack() -> None:
        write_runs(history, attacker.name, records[::2] if by_number else records)
        if by_number:
            second = [SourcedRecord(one.user, f"{one.run}b", one.record) for one in records[1::2]]
            write_runs(history, str(attacker.uid), second)

    owner.call(lambda: write_runs(history, owner.name, honest(owner.name)), timeout_s=60)
    attacker.call(attack, timeout_s=60)
    document, _ = report(owner, history)
    assert_no_node_is_accused(document, attacker.name)
    assert {owner.name, attacker.name} >= set(document["report"]["nodes"][0]["users"])


def test_files_that_no_run_writes_are_named_with_their_reason_and_not_read(
    owner: PlainUser, attacker: PlainUser, history: Path
) -> None:
    mine = history / attacker.name

    def attack() -> None:
        write_runs(history, attacker.name, sourced(attacker.name, "own", began(0, "own", attacker.name)))
        for name, size in (("huge", 2 * TERABYTE), ("hole", 2**20)):
            with (mine / f"{name}.000001.jsonl").open("wb") as sparse:
                sparse.truncate(size)
        os.mkfifo(mine / "fifo.000001.jsonl")
        os.symlink("/dev/zero", mine / "zero.000001.jsonl")
        os.symlink(history / owner.name / "math-1.000001.jsonl", mine / "link.000001.jsonl")
        (history / "somebody").mkdir()

    owner.call(lambda: write_runs(history, owner.name, honest(owner.name)), timeout_s=60)
    attacker.call(attack, timeout_s=60)
    document, err = report(owner, history)
    sources = document["sources"]
    reasons = {Path(line.partition(": ")[0]).name.partition(".")[0]: line for line in sources["refused"]}
    assert {"fifo", "hole", "huge", "link"} <= set(reasons)
    assert f"{2 * TERABYTE} bytes are more than any run writes" in reasons["huge"]
    assert "sparse" in reasons["hole"]
    assert "not a regular file" in reasons["fifo"]
    assert "not a regular file" in reasons["link"]
    assert sources["files"] == 2
    assert document["report"]["site"]["runs"] == 1  # the owner's run; the attacker's run is too old for the report
    assert len([line for line in err.splitlines() if line.startswith("rrl: not read: ")]) == 1


def test_records_of_the_future_and_impossible_gpu_hours_are_left_out(
    owner: PlainUser, attacker: PlainUser, history: Path
) -> None:
    at = time.time() - BEGAN
    forged = sourced(
        attacker.name,
        "lies",
        began(at - DAY_S, "lies", attacker.name),
        held(at - DAY_S, "n1"),
        found(at + DAY_S, "n1"),
        mended(at, "rollout/0", "n1", at - HOUR, 1e6),
    )
    attacker.call(lambda: write_runs(history, attacker.name, forged), timeout_s=60)
    document, err = report(owner, history)
    assert document["sources"]["left_out"] == [
        f"{attacker.name}: 1 record in the future",
        f"{attacker.name}: 1 record with more GPU-hours than the run's nodes could give",
    ]
    assert document["report"]["site"]["gpu_hours_lost"] == 0.0
    assert err.count("rrl: left out: ") == 1


def test_record_forged_in_the_owners_name_is_rejected(owner: PlainUser, attacker: PlainUser, history: Path) -> None:
    records = invented(owner.name)

    def attack() -> None:
        write_runs(history, attacker.name, records)
        with pytest.raises(PermissionError):
            write_runs(history, owner.name, records)

    owner.call(lambda: write_runs(history, owner.name, honest(owner.name)), timeout_s=60)
    attacker.call(attack, timeout_s=60)
    document, _ = report(owner, history)
    assert document["sources"]["skipped"] == 15  # the attacker's lines, although they name the owner as their user
    assert_no_node_is_accused(document, attacker.name)
