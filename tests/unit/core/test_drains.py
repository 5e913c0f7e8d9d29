from __future__ import annotations

import pytest

from rrl.core.drains import DrainOwner, drain_owner


@pytest.mark.parametrize(
    ("reason", "owner"),
    [
        ("rrl:run-1: gpu: Xid 79", DrainOwner.RUN),
        ("rrl:health: mounts: /scratch does not answer", DrainOwner.HOOK),
        ("bad fan", DrainOwner.OTHER),
        ("see rrl:run-1", DrainOwner.OTHER),
        ("", DrainOwner.OTHER),
    ],
)
def test_owner_of_a_drain_is_read_from_its_reason(reason: str, owner: DrainOwner) -> None:
    assert drain_owner(reason) is owner
