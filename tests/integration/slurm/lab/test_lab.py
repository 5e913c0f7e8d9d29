"""A lab is a real cluster whose jobs run without privileges, and it leaves no process or file behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.tests.support.plain_user import others_can_run_us
from rrl.tests.support.slurm import processes as slurm_processes
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm
LAB = (sys.executable, "-m", "rrl.tests.support.slurm.lab")


@pytest.fixture(autouse=True)
def _needs_slurm(slurm_lab: SlurmLab) -> None:
    """Skip or fail each test where Slurm is not installed, as ``slurm_lab`` does.

    The session's lab keeps running beside those that the tests start.
    """


def lab_command(*argv: str | Path) -> str:
    return subprocess.run([*LAB, *map(str, argv)], check=True, capture_output=True, text=True, timeout=60).stdout


def test_stopped_lab_leaves_no_process_and_no_file() -> None:
    lab = SlurmLab.start(nodes=2)
    lab.run_as_user(["sbatch", "--wrap", "setsid sleep 1000 & sleep 1000", "-N2", "--mem=100M", "-o", "/dev/null"])
    sleeping = lab.popen_as_user(["srun", "-n1", "--mem=100M", "sleep", "1000"])
    lab.wait_states({"n1": "mix", "n2": "mix"})
    assert {"munged", "slurmctld", "slurmd", "srun"} <= {p.comm for p in lab.processes().values()}
    lab.stop()
    assert sleeping.wait(timeout=10) == -signal.SIGKILL
    assert lab.processes() == {}
    assert not lab.dir.exists()
    assert str(lab.dir) not in Path("/proc/net/unix").read_text()


def test_lab_with_killed_owner_and_supervisor_is_swept() -> None:
    code = """
import os, signal
from rrl.tests.support import supervisor
from rrl.tests.support.slurm.lab import SlurmLab
print(SlurmLab.start(nodes=1).dir, flush=True)
supervisor._supervisors[os.getpid()].kill()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert slurm_processes.of_lab(left)
    with SlurmLab.start(nodes=1):
        assert not left.exists()
        assert slurm_processes.of_lab(left) == {}


def test_lab_jobs_run_as_a_plain_user_without_the_right_to_drain(slurm_lab: SlurmLab) -> None:
    assert slurm_lab.run_as_user(["srun", "-n1", "--mem=100M", "id", "-un"]).stdout == f"{slurm_lab.user}\n"
    if os.geteuid() != 0:
        return
    if not others_can_run_us():  # root submits jobs if the checkout is in a private folder; the lab has warned of this
        assert slurm_lab.user == "root"
        return
    assert slurm_lab.user != "root"
    with pytest.raises(RuntimeError, match=r"Invalid user id|Access/permission denied"):
        slurm_lab.run_as_user(["scontrol", "update", "nodename=n1", "state=drain", "reason=x"])


def test_step_without_enough_memory_waits_until_it_is_free(slurm_lab: SlurmLab) -> None:
    granted = slurm_lab.run_as_user(["salloc", "--no-shell", "-N1", "-n4", "--mem=1000M"]).stderr
    job = re.findall(r"Granted job allocation (\d+)", granted)[0]
    argv = ["srun", f"--jobid={job}", "--exact", "-n1", "-c1", "--mem=600M"]
    first = slurm_lab.popen_as_user([*argv, "sleep", "1006"])
    try:
        slurm_lab.wait_for(lambda: f"{job}.0" in slurm_lab.slurm("squeue", "-hs", "-o", "%i").split(), "no step 0")
        refused = slurm_lab.run_as_user([*argv, "--immediate=1", "true"], check=False)
        assert refused.returncode != 0, "a step of 600 MiB started although only 400 MiB are free"
        waiting = slurm_lab.popen_as_user([*argv, "true"], stderr=subprocess.DEVNULL)
        slurm_lab.run_as_user(["scancel", f"{job}.0"])
        assert waiting.wait(timeout=60) == 0
    finally:
        slurm_lab.clear()
        first.wait(timeout=20)


def test_lab_command_starts_uses_faults_and_stops_a_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    where = Path(f"/tmp/rrl-cli-{os.getpid()}")
    assert lab_command("start", "--dir", where, "--nodes", "2").startswith("2 nodes idle")
    try:
        assert lab_command("status", "--dir", where) == "n1 idle\nn2 idle\n"
        assert re.match(r"export SLURM_CONF=\S+/slurm.conf\n", lab_command("env", "--dir", where))
        lab_command("crash", "n2", "--dir", where)
        assert slurm_processes.of_node(where, "n2") == {}
        lab_command("up", "n2", "--dir", where)
        assert slurm_processes.of_node(where, "n2")
        assert lab_command("start", "--dir", where, "--nodes", "1").startswith("1 nodes idle")  # ends the old one first
    finally:
        assert lab_command("stop", "--dir", where) == "stopped\n"
    assert slurm_processes.of_lab(where) == {}
    assert not where.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_plain_user_can_start_a_lab(slurm_lab: SlurmLab) -> None:
    def own_lab() -> None:
        with SlurmLab.start(nodes=2, gpus=1) as lab:
            assert lab.user == slurm_lab.user
            out = lab.run_as_user(["srun", "-N2", "-n2", "--mem=100M", "--gres=gpu:1", "id", "-un"]).stdout
            assert out == f"{lab.user}\n" * 2
            lab.crash("n1")
        assert lab.processes() == {}

    slurm_lab.call_as_user(own_lab)
