"""The lab's fault service lets the plain user inject faults only into its own lab, and lets no other user do so."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.tests.support.slurm import fault_service
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    yield slurm_lab
    slurm_lab.clear()


@pytest.fixture
def socket_path(lab: SlurmLab) -> str:
    """Return the path of the fault service's socket, which is in the user's environment."""
    return lab.user_env()[fault_service.ENV]


def test_user_request_crashes_a_node_that_comes_up_by_itself(lab: SlurmLab, socket_path: str) -> None:
    def crash_node() -> None:
        answer = fault_service.request_fault(os.environ[fault_service.ENV], do="crash", node="n3", seconds=1)
        assert answer == fault_service.Answer(True, "crash n3 for 1 s")

    lab.call_as_user(crash_node)
    deadline = time.monotonic() + 30
    while not slurm_processes.of_node(lab.dir, "n3"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lab.wait_states({"n3": "idle"})


def test_controller_outage_ends_by_itself_and_jobs_keep_running(lab: SlurmLab, socket_path: str) -> None:
    job = lab.run_as_user(["sbatch", "--parsable", "--mem=100M", "-o", "/dev/null", "--wrap", "sleep 1004"]).stdout
    before = lab.controller()
    assert fault_service.request_fault(socket_path, do="outage", seconds=0.2) == fault_service.Answer(
        True, "outage of 0.2 s"
    )
    assert lab.controller() != before
    assert any(line.startswith(f"{job.strip()} ") for line in lab.jobs())


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"do": "crash", "node": "n9"}, "no node n9 in this lab: n1, n2, n3, n4, n5"),
        ({"do": "crash"}, "no node None in this lab"),
        ({"do": "crash", "node": "n1; reboot"}, "no node n1; reboot in this lab"),
        ({"do": "reboot", "node": "n1"}, "Invalid enum value 'reboot'"),
        ({"do": "crash", "node": "n1", "pid": 1}, "unknown field `pid`"),
        ({"do": "crash", "node": "n1", "seconds": -1}, "seconds must be above 0"),
        ({"do": "crash", "node": "n1", "ms": 5}, "a delay needs ms, and no other fault takes it"),
        ({"do": "outage"}, "an outage needs seconds"),
        ({"do": "cut", "node": "n1"}, "the nodes of this lab have no network of their own"),
        ({"do": "delay", "node": "n1", "ms": 5}, "the nodes of this lab have no network of their own"),
        ({"do": "delay", "node": "n1", "ms": 1e9}, "ms must be from 0 to 60000"),
    ],
)
def test_fault_outside_of_the_lab_is_refused(slurm_lab: SlurmLab, request_: dict[str, object], why: str) -> None:
    before = {pid for pid, process in slurm_lab.processes().items() if process.comm in ("slurmd", "slurmctld")}
    answer = fault_service.request_fault(fault_service.socket_of(slurm_lab.dir), **request_)
    assert not answer.ok
    assert why in answer.detail
    assert before <= slurm_lab.processes().keys()


def test_invalid_and_silent_connections_do_not_block_other_requests(slurm_lab: SlurmLab) -> None:
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as noisy:
        silent.connect(str(fault_service.socket_of(slurm_lab.dir)))
        noisy.connect(str(fault_service.socket_of(slurm_lab.dir)))
        noisy.sendall(b"\xff" * 10_000 + b"\n")
        assert b'"ok":false' in noisy.recv(1000)
        assert (
            "no node x"
            in fault_service.request_fault(fault_service.socket_of(slurm_lab.dir), do="crash", node="x").detail
        )


def test_fault_socket_is_open_to_the_labs_user_only(slurm_lab: SlurmLab, socket_path: str) -> None:
    status = Path(socket_path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == pwd.getpwnam(slurm_lab.user).pw_uid
