"""Tests that need a GPU: ``make test-gpu`` runs them. They are imported only if the marker ``gpu`` is selected.

Each test skips with its reason where a part is missing: the driver, torch, torch's CUDA.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rrl.tests.support.gpu.run import REHEARSAL_ENV

if TYPE_CHECKING:
    import torch

START_TIMEOUT_S = 120.0
"""Deadline (s) for a process to import torch and to open the GPU; only a broken machine takes that long."""
RECORDINGS_ENV = "RRL_GPU_RECORDINGS"
"""Environment variable with the folder into which readings and figures of this machine are written."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no test of this folder unless the marker ``gpu`` is selected: torch takes seconds to import."""
    selected = re.search(r"(?<!not )\bgpu\b", str(config.option.markexpr)) is not None
    return True if not selected and collection_path.match("test_*.py") else None


def rehearsal() -> bool:
    return bool(os.environ.get(REHEARSAL_ENV))


@pytest.fixture(scope="session")
def nvml() -> Iterator[Any]:
    """Return nvidia-ml-py with an open session, on a machine with at least one GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML: {error}")
    if not pynvml.nvmlDeviceGetCount():
        pytest.skip("NVML lists no GPU")
    yield pynvml
    pynvml.nvmlShutdown()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the first GPU for torch, or the CPU in a rehearsal."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    import torch

    if rehearsal():
        return torch.device("cpu")
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU it can use")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def processes(device: torch.device) -> Iterator[ForkServerContext]:
    """Import torch once in a fork server; processes that are forked from it open the GPU for themselves."""
    from rrl.tests.support.roles.trainer.stage import nursery

    with nursery() as context:
        yield context


@pytest.fixture(scope="session")
def record() -> Callable[[str, str], None]:
    """Return a function that writes a text into a file of the recordings folder, or prints it without such a folder."""
    folder = os.environ.get(RECORDINGS_ENV)

    def write(name: str, text: str) -> None:
        if not folder:
            print(f"{name}: {text}")
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text)

    return write


StartProcess = Callable[[int, str], tuple[subprocess.Popen[str], list[str]]]


@pytest.fixture
def cuda_process(device: torch.device) -> Iterator[StartProcess]:
    """Return a function that starts ``cuda_process MIB HOW`` and returns (process, words of its first line)."""
    if rehearsal():
        pytest.skip("a rehearsal has no GPU whose memory a process could hold")
    started: list[subprocess.Popen[str]] = []

    def start(mib: int, how: str) -> tuple[subprocess.Popen[str], list[str]]:
        argv = [sys.executable, "-m", "rrl.tests.support.gpu.cuda_process", str(mib), how]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"], "the process ended before it had allocated the memory"
        return process, words

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def driver_env() -> str:
    """Return Python statements that set environment variables of the GPU driver.

    With them a process that the tests' lab starts finds the same driver as this process.
    """
    names = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "RRL_FAKE_NVML", REHEARSAL_ENV)
    given = {name: os.environ[name] for name in names if name in os.environ}
    return f"import json, os; os.environ.update(json.loads({json.dumps(json.dumps(given))}))"
