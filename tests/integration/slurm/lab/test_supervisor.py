"""All processes that a killed test or benchmark has started end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.runs import TIMEOUT_S, processes_of
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab

LAB = """
import time
from rrl.tests.support.slurm.lab import SlurmLab
lab = SlurmLab.start(nodes=2)
lab.run_as_user(["sbatch", "--wrap", "setsid sleep 1010 & sleep 1010", "-N2", "--mem=100M", "-o", "/dev/null"])
lab.wait_states({"n1": "mix", "n2": "mix"})
print(lab.dir, flush=True)
time.sleep(1010)
"""
LOCAL_RUN = """
import sys, time
from pathlib import Path
from rrl.tests.support.runs import light_job, submit_here
run = submit_here(Path(sys.argv[1]), light_job("local", 1_000_000))
run.wait_steps(1)
print(run.run.path, flush=True)
time.sleep(1010)
"""
UNWINDING = """
import tempfile, time
from rrl.tests.support.supervisor import exit_on_sigterm
exit_on_sigterm()
with tempfile.TemporaryDirectory() as folder:
    print(folder, flush=True)
    time.sleep(1010)
"""
LOCAL_BENCHMARK = """
import time
from rrl.tests.support.runs import light_job, submit_here
from rrl.tests.support.supervisor import exit_on_sigterm, temporary_runs_folder
exit_on_sigterm()
with temporary_runs_folder() as folder:
    run = submit_here(folder, light_job("local", 1_000_000))
    run.wait_steps(1)
    print(run.run.path, flush=True)
    time.sleep(1010)
"""
SESSION = """
import time

def test_of_a_long_run(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("session") / "there"
    folder.touch()
    request.addfinalizer(folder.unlink)
    print(folder, flush=True)
    time.sleep(1010)
"""


def _started(code: str, *argv: str | Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a child that runs ``code``; return it and the path that it prints once it is ready."""
    child = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def _ended(child: subprocess.Popen[str], number: signal.Signals) -> int:
    child.send_signal(number)
    child.communicate(timeout=TIMEOUT_S)
    return child.returncode


@pytest.mark.slurm
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_lab_of_a_killed_process_ends_with_its_jobs(slurm_lab: SlurmLab, number: signal.Signals) -> None:
    child, lab = _started(LAB)
    try:
        wait_until(
            lambda: (
                {"slurmctld", "slurmd", "sleep"} <= {process.comm for process in slurm_processes.of_lab(lab).values()}
            )
        )
        _ended(child, number)
        wait_until(lambda: not slurm_processes.of_lab(lab) and not lab.exists())
    finally:  # ends the lab even if the test fails
        child.kill()
        if lab.exists():
            SlurmLab.load(lab).stop()
    assert slurm_processes.of_lab(slurm_lab.dir), "the lab of another process ended too"


def test_local_run_of_a_killed_process_ends(tmp_path: Path) -> None:
    child, path = _started(LOCAL_RUN, tmp_path)
    run = RunDir(path)
    try:
        assert len(dict(processes_of(run))) > 5
        _ended(child, signal.SIGKILL)
        wait_until(lambda: not dict(processes_of(run)))
    finally:
        child.kill()
        while left := dict(processes_of(run)):
            slurm_processes.send(left, signal.SIGKILL)


@pytest.mark.long  # the next test unwinds a benchmark, too
def test_benchmark_that_gets_sigterm_ends_its_local_run_and_removes_its_folder() -> None:
    child, path = _started(LOCAL_BENCHMARK)
    run = RunDir(path)
    try:
        assert len(dict(processes_of(run))) > 5
        assert _ended(child, signal.SIGTERM) == 128 + signal.SIGTERM
        assert not dict(processes_of(run)), "the benchmark exited before its run had ended"
        assert not path.parent.parent.exists()
    finally:
        child.kill()
        while left := dict(processes_of(run)):
            slurm_processes.send(left, signal.SIGKILL)


def test_sigterm_unwinds_a_benchmark() -> None:
    child, folder = _started(UNWINDING)
    assert folder.is_dir()
    assert _ended(child, signal.SIGTERM) == 128 + signal.SIGTERM
    assert not folder.exists()


def test_sigterm_tears_the_fixtures_of_a_pytest_session_down(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from rrl.tests.conftest import pytest_sessionstart as pytest_sessionstart\n")
    (tmp_path / "test_session.py").write_text(SESSION)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert child.stdout is not None
    kept_file = Path(next(line for line in child.stdout if line.startswith("/")).strip())
    assert kept_file.exists()
    assert _ended(child, signal.SIGTERM) == 128 + signal.SIGTERM
    assert not kept_file.exists()
