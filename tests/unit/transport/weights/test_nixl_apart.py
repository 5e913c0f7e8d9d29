"""All tests over nixl run in processes of their own.

NIXL brings a UCX library that must not be in one process with ucxx's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.support.weights.transports import KINDS, TRANSPORTS_ENV
from rrl.transport.weights.base import installed_package

HERE = Path(__file__).parent
MODULES = (
    "test_nixl.py",
    "test_delta_pull.py",
    "test_parts.py",
    "test_pull.py",
    "test_seam.py",
    "test_swarm.py",
    "test_torture.py",
    "../../../security/test_ports.py",
)
MAIN = (
    "test_nixl.py",
    "test_delta_pull.py",
    "test_pull.py",
    "-k",
    "connection_abandoned or moment_of_an_abort or reader_killed or "
    "answered_later or deadlines_work or late_joiner or source_of_corrupt_chunks or "
    "changed_values_arrive",
)
"""Arguments that select tests of a few seconds.

In them versions and deltas are read, corrupt chunks are refused, and aborted connections and dead peers leave nothing
behind.
"""
TIMEOUT_S, TORTURE_TIMEOUT_S = 280.0, 1800.0

pytestmark = pytest.mark.skipif("nixl" in KINDS, reason="this process itself runs the tests over nixl")


def passes(*argv: str, timeout_s: float = TIMEOUT_S) -> None:
    if installed_package("nixl") is None:
        pytest.skip("NIXL is not installed")
    whole = [sys.executable, "-m", "pytest", "-q", *(str(HERE / arg) if arg.endswith(".py") else arg for arg in argv)]
    child = subprocess.run(
        whole,
        env=os.environ | {TRANSPORTS_ENV: "nixl"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=HERE.parents[3],
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]


def test_main_pull_tests_pass_over_nixl() -> None:
    passes(*MAIN)


@pytest.mark.long
def test_all_tests_of_weight_transports_pass_over_nixl() -> None:
    passes(*MODULES)


@pytest.mark.long
@pytest.mark.timeout(TORTURE_TIMEOUT_S + 60)
def test_hundreds_of_faults_over_nixl_leave_correct_versions_and_no_leaks() -> None:
    passes("test_torture.py", "-m", "long", timeout_s=TORTURE_TIMEOUT_S)
