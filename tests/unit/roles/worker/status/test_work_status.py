"""The contents of a process's heartbeats."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rrl.core.types import DataReport, Incarnation, OutsideKind, OutsideWait, ReplicaId
from rrl.roles.worker.status import work_status
from rrl.roles.worker.status.work_status import WorkStatus

STORE = Incarnation(ReplicaId("trajectories/0"), 1)


def test_report_on_data_holds_only_while_the_store_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = WorkStatus("serve"), DataReport(outside=OutsideWait(OutsideKind.AGENT, 3))
    assert status.heartbeat(STORE).data == DataReport()
    status.report_data(report)
    assert status.heartbeat(STORE).data == report
    monkeypatch.setattr(work_status, "REPORT_HOLDS_S", 0.0)
    assert status.heartbeat(STORE).data == DataReport(), (
        "an old report still counts, though a hung loop sends no new one"
    )


def test_the_newest_value_of_each_logged_name_is_reported_once() -> None:
    status = WorkStatus("between")
    status.log({"accuracy": 0.25, "cached": 7})
    status.log({"accuracy": 0.5})
    assert status.take_logged() == {"accuracy": 0.5, "cached": 7.0}
    assert status.take_logged() == {}


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"loss": "low"}, TypeError, "me.log(loss=...): 'low' is not a number"),
        ({"x" * 101: 1.0}, ValueError, "more than 100 characters"),
        ({f"n{number}": 1.0 for number in range(65)}, ValueError, "more than 64 names"),
    ],
)
def test_invalid_logged_values_are_refused_and_none_of_them_is_kept(
    values: dict[str, Any], error: type[Exception], text: str
) -> None:
    status = WorkStatus("between")
    status.log({"accuracy": 0.5})
    with pytest.raises(error, match=re.escape(text)):
        status.log(values)
    assert status.take_logged() == {"accuracy": 0.5}
