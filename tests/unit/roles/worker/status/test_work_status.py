"""What a heartbeat reports of a process."""

from __future__ import annotations

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.worker.status import work_status
from rrl.roles.worker.status.work_status import WorkStatus

STORE = Incarnation(ReplicaId("trajectories/0"), 1)


def test_untaken_data_are_reported_only_while_the_store_confirms_them(monkeypatch: pytest.MonkeyPatch) -> None:
    status = WorkStatus("serve")
    assert not status.heartbeat(STORE).data_untaken
    status.confirm_untaken_data()
    assert status.heartbeat(STORE).data_untaken
    monkeypatch.setattr(work_status, "UNTAKEN_CONFIRMED_WITHIN_S", 0.0)
    assert not status.heartbeat(STORE).data_untaken, "a loop that hangs confirms nothing any more"
