"""Each node of an isolated lab has a network of its own.

These tests are collected only if network namespaces are possible (as root).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rrl.tests.support.slurm import netns
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.long  # rrl.tests.support.slurm.versions -- -m slurm runs these tests on each version


@pytest.fixture
def lab(isolated_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield isolated_lab
    isolated_lab.clear(timeout_s=90)  # long, because Slurm polls nodes rarely after a network link was down


def answers(lab: SlurmLab, node: str, timeout_s: float = 1.0) -> bool:
    """Return whether the node's slurmd accepts a connection."""
    assert lab.network is not None
    try:
        socket.create_connection((lab.network.address(node), lab.settings.port + 1), timeout_s).close()
    except OSError:
        return False
    return True


def test_delayed_node_answers_late_until_it_is_healed(lab: SlurmLab) -> None:
    def seconds() -> float:
        began = time.monotonic()
        assert answers(lab, "n4", timeout_s=30.0)
        return time.monotonic() - began

    lab.delay("n4", 50)
    try:
        assert seconds() >= 0.1  # at least the delays of a round trip; the machine's load adds to them
        lab.delay("n4", 100)
        assert seconds() >= 0.2
        out = lab.run_as_user(["srun", "-n1", "-w", "n4", "--mem=100M", "head", "-c", "500000", "/dev/zero"]).stdout
        assert len(out) == 500_000, "delayed data is incomplete"
        lab.wait_states({"n4": "idle"})
    finally:
        lab.heal("n4")
    assert lab.network is not None
    assert slurm_processes.delaying(lab.dir, lab.network.link("n4")) == {}
    assert [name for name in netns.left(lab.network) if name.endswith(("dn4", "en4"))] == []


def test_stopped_or_swept_lab_leaves_no_network_devices() -> None:
    with SlurmLab.start(nodes=2, isolated=True) as lab:
        network = lab.network
        lab.delay("n1", 50)
        assert network is not None
        assert len(netns.left(network)) == 7  # bridge, two namespaces, two links, and a pair of devices for the delay
    assert netns.left(network) == []
    code = (
        "import os; from rrl.tests.support.slurm.lab import SlurmLab; lab = SlurmLab.start(nodes=1, isolated=True)\n"
        "print(lab.network.prefix, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    abandoned = netns.Network(done.stdout.strip(), "")
    assert len(netns.left(abandoned)) == 3
    with SlurmLab.start(nodes=1):
        assert netns.left(abandoned) == []
