from __future__ import annotations

from pathlib import Path

import pytest

from rrl.transport.keys import RunKeys


def test_keys_are_restored_from_a_file_readable_only_by_its_owner(tmp_path: Path) -> None:
    keys = RunKeys.make()
    keys.save(tmp_path / "keys.json")
    assert RunKeys.load(tmp_path / "keys.json") == keys
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_key_file_accessible_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    RunKeys.make().save(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        RunKeys.load(tmp_path / "keys.json")


def test_printed_keys_show_no_secret() -> None:
    keys = RunKeys.make()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


def test_every_run_has_keys_of_its_own() -> None:
    first, second = RunKeys.make(), RunKeys.make()
    assert first.server_secret != second.server_secret
    assert first.client_secret != second.client_secret
    assert first.secret != second.secret
