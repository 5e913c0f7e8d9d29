from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rrl.tests.support.demo import keep_runs, print_table


def test_run_that_has_ended_is_kept_without_its_sockets(tmp_path: Path) -> None:
    for name in ("ended", "going-on"):
        (tmp_path / "lab" / name / "journal").mkdir(parents=True)
        (tmp_path / "lab" / name / "journal" / "0001").write_text("records")
    (tmp_path / "lab" / "ended" / "summary.json").write_text("{}")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "lab" / "ended" / "socket"))
        (kept,) = keep_runs(tmp_path / "lab", tmp_path / "mine")
    assert kept == tmp_path / "mine" / "ended"
    assert sorted(path.name for path in kept.rglob("*")) == ["0001", "journal", "summary.json"]


def test_steps_are_listed_by_the_names_of_their_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        "squeue --steps",
        [["5.7", "quickstart-1123-035245-e477.rollout-1.2", "0:07", "n4"], ["3.0", "python", "0:11", "n1"]],
    )
    assert capsys.readouterr().out.split() == [
        "$",
        "squeue",
        "--steps",
        "5.7",
        "rollout-1.2",
        "0:07",
        "n4",
        "3.0",
        "python",
        "0:11",
        "n1",
    ]
