"""The file in which an agent stores the hardware inventory for the next agent of its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.health.checks.node_state import HardwareInventory
from rrl.roles.node_agent.node_monitor import load_inventory, save_inventory

PAST = HardwareInventory("b1", "4711", 8, ("mlx5_2",), ("mlx5_2/1",), {"GPU-1": (0, 1)})


def test_saved_inventory_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "hardware" / "n1.json"
    assert load_inventory(path) is None, "an inventory was loaded although no agent has stored one"
    save_inventory(path, PAST)
    assert load_inventory(path) == PAST
    assert [one.name for one in path.parent.iterdir()] == ["n1.json"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"boot": 7}', b'{"gpus": 8}', b"[]", b"\xff" * 9, b" " * (2 << 20)])
def test_damaged_inventory_file_counts_as_missing(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "n1.json"
    path.write_bytes(damaged)
    assert load_inventory(path) is None
    save_inventory(path, PAST)
    assert load_inventory(path) == PAST


def test_agent_continues_if_the_inventory_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "hardware").write_text("a file")
    save_inventory(tmp_path / "hardware" / "n1.json", PAST)
    assert load_inventory(tmp_path / "hardware" / "n1.json") is None
    assert load_inventory(tmp_path) is None
