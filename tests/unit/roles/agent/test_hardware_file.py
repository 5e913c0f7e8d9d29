"""The file by which one agent tells the next what it has seen on their node."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.health.checks.node_state import HardwarePast
from rrl.roles.agent.node_monitor import keep_past, load_past

PAST = HardwarePast("b1", "4711", 8, ("mlx5_2",), ("mlx5_2/1",), {"GPU-1": (0, 1)})


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "n1.json"
    assert load_past(path) is None, "nobody has been there"
    keep_past(path, PAST)
    assert load_past(path) == PAST
    assert [one.name for one in path.parent.iterdir()] == ["n1.json"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"boot": 7}', b'{"gpus": 8}', b"[]", b"\xff" * 9, b" " * (2 << 20)])
def test_a_damaged_file_is_as_none(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "n1.json"
    path.write_bytes(damaged)
    assert load_past(path) is None
    keep_past(path, PAST)
    assert load_past(path) == PAST


def test_where_nothing_can_be_written_or_read_the_agent_goes_on(tmp_path: Path) -> None:
    (tmp_path / "hardware").write_text("a file")
    keep_past(tmp_path / "hardware" / "n1.json", PAST)
    assert load_past(tmp_path / "hardware" / "n1.json") is None
    assert load_past(tmp_path) is None
