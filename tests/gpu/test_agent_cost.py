"""The cost of an agent by benchmarks/agent_cost.py, with the driver of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200.0


def test_cost_of_an_agent_with_the_real_driver_is_measured(nvml: Any, record: Callable[[str, str], None]) -> None:
    """The figures are only recorded, without a comparison with the benchmark's limits, as this machine may be busy."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "agent_cost.py"), "--native", "--seconds", "20", "--settle", "10"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    record("agent_cost.txt", done.stdout)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["pss_mib"] > 0
    assert measured["cpu_fraction"] > 0
