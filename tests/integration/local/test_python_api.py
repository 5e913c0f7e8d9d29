"""The Python API works on real runs: the example of a sweep in an event loop, and the programs of docs/python.md."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import rrl
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.examples import sweep as example
from rrl.tests.support.light_roles.light_rollout import BEST_RATE_ENV
from rrl.tests.support.runs import check_sound, light_job, write_job
from rrl.tests.support.supervisor import end_runs_with_caller

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
EXPORT = ".export("
"""Programs that contain this text are left out, because the light trainer has no weights to export.
tests/unit/api/test_run.py tests the export of the page.
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job.toml in the current folder."""
    end_runs_with_caller(tmp_path / "runs")
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path, light_job("local", 2, rollouts=1, spares=0, warm=False, one_node=True))


def in_a_cell(code: str, names: dict[str, Any]) -> None:
    """Run code as a notebook does: called by an event loop that is running."""

    async def cell() -> None:
        exec(compile(code, "<cell>", "exec"), names)

    asyncio.run(cell())


@pytest.mark.long  # the programs of the page below also run in an event loop
def test_a_notebook_finds_the_best_of_three_learning_rates(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    best_rate = example.LEARNING_RATES[1]
    job.write_text(job.read_text().replace("[roles.rollout]", f'[roles.rollout]\nenv.{BEST_RATE_ENV} = "{best_rate}"'))
    names: dict[str, Any] = {"sweep": example.sweep}
    in_a_cell("best = sweep('job.toml')", names)
    best: rrl.Run = names["best"]
    out, err = capfd.readouterr()
    lines = out.splitlines()  # only the example prints these lines, because the API prints nothing
    assert ([line.split()[4] for line in lines], err) == (["0.00", "1.00", "0.00"], "")
    assert lines[1].endswith(f"({best.id})")
    runs = [rrl.run(path) for path in job.with_name("runs").iterdir()]
    assert {run.state().outcome for run in runs} == {"completed"}
    for run in runs:
        check_sound(RunDir(run.path))


def test_programs_of_the_python_page_work_unchanged(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for program in programs:
        if EXPORT not in program:
            in_a_cell(program, names)
    run: rrl.Run = names["run"]
    assert names["summary"].steps == run.state().step >= 4
    assert run.state().outcome == "completed"
    assert names["rewards"].items() >= {1: 1.0, 2: 1.0}.items()
    assert "rollout/0#2 is here" in [line.text for line in run.logs("rollout/0#2")], "rollout/0 was not restarted"
    assert 'set["roles.rollout.replica"]: unknown key; did you mean "replicas"?' in capfd.readouterr().out
    check_sound(RunDir(run.path))
