"""Fixtures that several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rrl.tests.lab.slurm import SlurmLab, missing

LAB_NODES = 5
REQUIRED = "RRL_REQUIRE_SLURM"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where Slurm is required, as in CI, a test that was skipped is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(REQUIRED) and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    """A real Slurm of five nodes of 8 CPUs, 8000 MiB and 2 false GPUs, for the whole session.

    Jobs are submitted as its plain user. A test leaves it idle: ``lab.clear()``. Where Slurm is not installed the test
    is skipped, or fails if RRL_REQUIRE_SLURM is set.
    """
    if absent := missing():
        told = f"not installed: {', '.join(absent)} (python -m rrl.tests.lab.slurm install)"
        if os.environ.get(REQUIRED):
            pytest.fail(told)
        pytest.skip(told)
    with SlurmLab.start(nodes=LAB_NODES, gpus=2) as lab:
        yield lab
