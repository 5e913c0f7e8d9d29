from __future__ import annotations

from pathlib import Path

import pytest

from rrl.cli import app
from rrl.spec.load import load_job

ROOT = Path(__file__).parents[2]
JOBS = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.name != "pyproject.toml")


def test_there_are_examples() -> None:
    assert JOBS


@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_job_is_valid_and_could_be_submitted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_job(path)
    assert app.run(["check", str(path)]) == 0
    assert capsys.readouterr().err == ""
