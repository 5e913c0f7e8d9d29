"""User commands that wait in the mailbox of a run: valid ones are read in order, invalid ones are set aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.intake.user_commands import Command, acknowledge, pending_commands


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_commands_are_read_in_order_and_once(run: RunDir) -> None:
    for name in ("2-b", "1-a"):
        (run.mailbox / f"{name}.json").write_text('{"command": "cancel", "by": "me"}')
    first, second = pending_commands(run)
    assert (first, second.id) == (Command("cancel", "me", "1-a"), "2-b")
    acknowledge(run, first)
    assert [command.id for command in pending_commands(run)] == ["2-b"]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"by": "me"}', '{"command": 7}', "\udcff"])
def test_invalid_command_file_is_set_aside_without_delaying_others(
    run: RunDir, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (run.mailbox / "1.json").write_text(text, errors="surrogateescape")
    (run.mailbox / "2.json").write_text('{"command": "cancel"}')
    assert [command.id for command in pending_commands(run)] == ["2"]
    assert "1.json in the mailbox is not a valid command" in caplog.text
    caplog.clear()
    assert [command.id for command in pending_commands(run)] == ["2"]
    assert not caplog.records, "the file was read and reported again"


def test_unfinished_command_file_is_not_read(run: RunDir) -> None:
    (run.mailbox / ".1.json.1234").write_text("{")
    (run.mailbox / ".1.json").write_text("{")
    assert pending_commands(run) == []
