"""The tests of weights over UCX's TCP transport, in a network namespace of their own.

UCX authenticates nobody on the TCP ports that it opens (docs/security.md). In this namespace nobody else on the machine
reaches these ports: neither another user nor a test that attacks every port that it finds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.support.weights.transports import KINDS, TRANSPORTS_ENV
from rrl.transport.weights.base import installed_package

HERE = Path(__file__).parent
MODULES = (
    "test_ucx.py",
    "test_delta_pull.py",
    "test_parts.py",
    "test_pull.py",
    "test_seam.py",
    "test_swarm.py",
    "test_torture.py",
)
STRANGERS = "../../../security/test_ports.py"
WHOLE = ("test_ucx.py", "test_seam.py", "test_torture.py", "test_ports.py and ucx")
"""Tests that ``make test`` runs over UCX completely, for pytest's option ``-k``."""
REPRESENTATIVE = (
    "pull_transfers_every_byte",
    "a_late_joiner_pulls",
    "source_killed_in_mid_pull",
    "source_of_corrupt_chunks",
    "death_of_a_receiver_during_a_send",
    "not_written_to_after_its_fetch_was_given_up",
    "chunks_pass_down_the_chain",
    "receiver_skips_a_dead_or_hung_neighbour",
    "changed_values_arrive_instead_of_whole_chunks",
    "source_of_wrong_deltas",
)
"""Parts of the names of other tests that ``make test`` runs over UCX: transfers, deaths, late joiners, relays and
deltas."""
NAMESPACE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net")
TIMEOUT_S, TORTURE_TIMEOUT_S = 280.0, 1800.0

pytestmark = pytest.mark.skipif(KINDS == ("ucx",), reason="this process itself runs the tests over UCX")


def passes(*argv: str, timeout_s: float = TIMEOUT_S) -> None:
    """Run pytest with these arguments over ucx, in a new namespace that has only a loopback interface."""
    if installed_package("ucx") is None:
        pytest.skip("ucxx is not installed")
    if shutil.which("ip") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this test needs iproute2, and the right to make a network namespace")
    whole = [sys.executable, "-m", "pytest", "-q", *(str(HERE / arg) if arg.endswith(".py") else arg for arg in argv)]
    child = subprocess.run(
        [*NAMESPACE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *whole],
        env=os.environ | {TRANSPORTS_ENV: "ucx"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=HERE.parents[3],
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]


def test_representative_tests_of_weight_transports_pass_over_ucx() -> None:
    """All these tests run in one process, because each start of pytest takes seconds of CPU time."""
    passes(*MODULES, STRANGERS, "-k", " or ".join((*WHOLE, *REPRESENTATIVE)))


@pytest.mark.long  # make test runs these tests over TCP
def test_all_tests_of_weight_transports_pass_over_ucx() -> None:
    passes(*MODULES)


@pytest.mark.long
@pytest.mark.timeout(TORTURE_TIMEOUT_S + 60)
def test_hundreds_of_faults_over_ucx_leave_correct_versions_and_no_leaks() -> None:
    passes("test_torture.py", "-m", "long", timeout_s=TORTURE_TIMEOUT_S)
