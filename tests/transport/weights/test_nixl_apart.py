"""Everything that is tested over nixl, in a process of its own: NIXL brings a UCX that must not meet ucxx's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.transport.weights.piping import KINDS, PIPES_ENV
from rrl.transport.weights.pipe import package

HERE = Path(__file__).parent
MODULES = ("test_nixl.py", "test_pipes.py", "test_seam.py", "test_swarm.py", "../../hostile/test_ports.py")
WITHIN = 280.0
"""s"""


@pytest.mark.long
@pytest.mark.skipif("nixl" in KINDS, reason="this is that process")
def test_the_pipes_tests_pass_over_nixl() -> None:
    if package("nixl") is None:
        pytest.skip("NIXL is not installed")
    argv = [sys.executable, "-m", "pytest", "-q", *(str(HERE / name) for name in MODULES)]
    child = subprocess.run(
        argv, env=os.environ | {PIPES_ENV: "nixl"}, capture_output=True, text=True, timeout=WITHIN, cwd=HERE.parents[2]
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
