"""If the directory of a run is removed while the run works, all its processes end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rrl.tests.support.runs import light_job, submit_here


@pytest.mark.long
def test_run_whose_directory_is_removed_ends_with_all_its_processes(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000))
    run.wait_steps(1)
    while run.run.path.exists():  # a process of the run may write into it at this moment
        shutil.rmtree(run.run.path, ignore_errors=True)
    run.wait_gone(timeout_s=180)
