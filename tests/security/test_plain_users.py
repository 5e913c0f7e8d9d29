"""Neither of the two users of the security tests may read the files of the other one."""

from __future__ import annotations

import os
from pathlib import Path

from rrl.tests.support.plain_user import PlainUser


def test_attacker_cannot_read_files_of_the_owner(owner: PlainUser, attacker: PlainUser) -> None:
    secret = owner.home / "secret"

    def write() -> None:
        secret.write_text("kept")

    def read() -> None:
        try:
            Path(secret).read_text()
        except PermissionError:
            return
        raise AssertionError(f"{os.getuid()} read {secret}")

    owner.call(write, timeout_s=30)
    assert secret.stat().st_uid == owner.uid != attacker.uid != 0
    attacker.call(read, timeout_s=30)
