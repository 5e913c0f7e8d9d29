"""``make test-gpu`` on a machine without a GPU, and the interpreter with which it runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.support.gpu import run
from rrl.tests.support.nvml.driver import FakeDriver

PROGRAM = Path(run.__file__)


def program(environ: dict[str, str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    without = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", run.REHEARSAL_ENV)}
    argv = [sys.executable, str(PROGRAM)]
    return subprocess.run(argv, env={**without, **environ}, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize(
    ("loaded", "why"),
    [(False, "the NVIDIA driver does not start (NVML code 9)"), (True, "the NVIDIA driver lists no GPU")],
    ids=["no driver", "no GPU"],
)
def test_without_a_gpu_the_target_succeeds_with_one_line(tmp_path: Path, loaded: bool, why: str) -> None:
    driver = FakeDriver(tmp_path).gpus(0)
    if not loaded:
        driver.state.unlink()
    done = program(driver.env())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"make test-gpu: nothing is tested: {why}\n"


def test_every_gpu_test_is_collected_and_none_without_the_marker() -> None:
    folder = Path(__file__).parents[2] / "gpu"
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(folder)]
    plain = subprocess.run(collect, capture_output=True, text=True, timeout=120)
    assert "no tests collected" in plain.stdout
    done = subprocess.run([*collect, "-m", "gpu"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert {line.partition("::")[0].rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line} == {
        path.name for path in folder.glob("test_*.py")
    }


@pytest.mark.long
@pytest.mark.timeout(600)
def test_gpu_tests_pass_in_a_rehearsal_on_the_cpu_and_the_fake_driver(tmp_path: Path) -> None:
    """Without a GPU, this test can only show that the tests run, not what a GPU does."""
    driver = FakeDriver(tmp_path).gpus(2)
    done = program({**driver.env(), run.REHEARSAL_ENV: "1"}, timeout_s=600)
    assert done.returncode == 0, done.stdout
    reasons = {line.rpartition(": ")[2] for line in done.stdout.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {
        "a rehearsal has no GPU memory",
        "a rehearsal has no GPU whose memory a process could hold",
        "in a rehearsal torch has no GPU",
    }


def test_missing_requirement_without_wheels_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(run, "requirements", lambda: (["nosuchpackage nosuchpackage>=1"], []))
    with pytest.raises(SystemExit, match=r"lacks nosuchpackage>=1; give WHEELS=folder, made by make wheelhouse"):
        run.prepared(sys.executable, tmp_path / "wheels")
