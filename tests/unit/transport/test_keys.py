from __future__ import annotations

from pathlib import Path

import pytest

from rrl.transport.keys import RunKeys


def test_keys_come_back_from_their_file_which_only_the_owner_can_read(tmp_path: Path) -> None:
    keys = RunKeys.make()
    keys.save(tmp_path / "keys.json")
    assert RunKeys.load(tmp_path / "keys.json") == keys
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    RunKeys.make().save(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(mode)
    with pytest.raises(PermissionError, match="chmod 600"):
        RunKeys.load(tmp_path / "keys.json")


def test_no_secret_is_shown_when_keys_are_printed() -> None:
    keys = RunKeys.make()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert repr(keys.secret) not in repr(keys)


def test_every_run_has_keys_of_its_own() -> None:
    first, second = RunKeys.make(), RunKeys.make()
    assert first.server_secret != second.server_secret
    assert first.client_secret != second.client_secret
    assert first.secret != second.secret
