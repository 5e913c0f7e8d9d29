"""The hooks of examples/health drain failing nodes of a real Slurm or keep jobs from them.

Hooks remove only their own drains.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.health.checks.evaluate import CHECKS
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm
EXAMPLES = Path(__file__).parents[3] / "examples/health"
CHECK_INTERVAL_S = 3
"""Time between two runs of the HealthCheckProgram (s). With 1 s, slurmctld requests checks faster than a busy node
answers, and the waiting requests keep the nodes busy for a minute after the test."""
TIMEOUT_S = 120.0
"""Time limit for several runs of the HealthCheckProgram on a busy machine (s)."""


class HookedLab:
    """A lab of two nodes with installed hooks, which record their findings.

    Each node has its own rules: a certain folder must exist. Every call of a Slurm command by a hook is counted.
    """

    def __init__(self, lab: SlurmLab) -> None:
        self.lab, self.dir = lab, lab.dir / "health"
        self.dir.mkdir()
        self.history = self.dir / "history"
        self.history.mkdir()
        self._calls = self.dir / "calls"
        self._count_calls()
        for name in ("prolog.sh", "epilog.sh", "healthcheck.sh"):
            self._install(name)
        self.restore()

    def restore(self) -> None:
        """Remove all hooks, drains and records, and make the nodes healthy."""
        self.configure()
        self.forget_checks()
        shutil.rmtree(self.history)
        self.history.mkdir()
        for node in self.lab.nodes:
            self.mount(node).mkdir(exist_ok=True)
            self.rules(node)
            if "drain" in self.lab.states()[node]:
                self.lab.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    def mount(self, node: str) -> Path:
        return self.dir / f"scratch-{node}"

    def rules(self, node: str, text: str = "") -> None:
        """Enable only the checks that the test needs, because other programs use this machine and write to its log."""
        new = self.dir / f"{node}.new"
        new.write_text(f'[expect]\nmounts = ["{self.mount(node)}"]\n{text}\n[checks]\n{_OFF}\n')
        new.rename(self.dir / f"{node}.toml")

    def configure(self, *lines: str) -> None:
        text = self.lab.conf.read_text().partition("# hooks\n")[0]
        self.lab.conf.write_text(text + "# hooks\n" + "".join(f"{line}\n" for line in lines))
        self.lab.slurm("scontrol", "reconfigure")

    def reason(self, node: str) -> str:
        shown = self.lab.slurm("scontrol", "show", "node", node)
        return next((line.strip()[len("Reason=") :] for line in shown.splitlines() if "Reason=" in line), "")

    def check_count(self, node: str) -> int:
        """Return the number of checks of the node so far."""
        log = self.dir / f"{node}.looks"
        return log.read_text().count("\n") if log.exists() else 0

    def wait_for_checks(self, node: str, times: int = 2) -> None:
        """Wait for ``times`` more complete checks of the node."""
        before = self.check_count(node)
        deadline = time.monotonic() + TIMEOUT_S
        while self.check_count(node) <= before + times:
            assert time.monotonic() < deadline, f"no health check on {node}; see {self.lab.dir}/log"
            time.sleep(0.1)

    def wait_for_running_checks(self) -> None:
        """Wait until all checks that run now have ended. Checks overlap if they take longer than their interval."""
        state = str(self.dir / "state")

        def running() -> set[int]:
            processes = self.lab.processes().values()
            return {each.pid for each in processes if each.environ.get("RRL_HEALTH_STATE") == state}

        now = running()
        self.lab.wait_for(lambda: now.isdisjoint(running()), f"checks keep running: {now}")

    def forget_checks(self) -> None:
        """Remove the records of checks on the nodes, as a boot does."""
        shutil.rmtree(self.dir / "state", ignore_errors=True)

    def forget_calls(self) -> None:
        """Forget all calls of Slurm commands by hooks, and reset the statistics of slurmctld."""
        self.lab.slurm("sdiag", "-r")
        self._calls.write_text("")

    def calls(self) -> list[str]:
        """Return the Slurm commands that hooks have called."""
        return self._calls.read_text().splitlines()

    def requests(self) -> dict[str, int]:
        """Return how many requests of commands slurmctld has answered, by kind and without the requests of sdiag."""
        shown = re.findall(r"^\s*(REQUEST_\w+)\s.*count:(\d+)", self.lab.slurm("sdiag"), re.MULTILINE)
        return {kind: int(count) for kind, count in shown if not kind.startswith("REQUEST_STATS")}

    def _count_calls(self) -> None:
        folder = self.dir / "counted"
        folder.mkdir()
        for name in ("scontrol", "sinfo", "squeue", "srun", "sacctmgr"):
            program = shutil.which(name, path=self.lab.environment()["PATH"])
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{self._calls}"\nexec "{program}" "$@"\n')
            (folder / name).chmod(0o755)

    def _install(self, name: str) -> None:
        rrl = self.dir / "rrl"
        rrl.write_text(
            f'#!/bin/sh\n[ "$2" = check ] && echo look >> "{self.dir}/$SLURMD_NODENAME.looks"\n'
            f'export RRL_HEALTH_STATE="{self.dir}/state" PATH="{self.dir}/counted:$PATH"\n'
            f'export RRL_HEALTH_CONFIG="{self.dir}/$SLURMD_NODENAME.toml"\n'
            f'exec "{Path(sys.executable).parent}/rrl" "$@"\n'
        )
        rrl.chmod(0o755)
        text = (EXAMPLES / name).read_text()
        for old, new in (
            ("RRL=/opt/rrl/bin/rrl ", f"export SLURM_CONF={self.lab.conf}\nRRL={rrl} "),
            ("CONFIG=/etc/rrl/health.toml ", "CONFIG=/no/such "),
            ("HISTORY= ", f"HISTORY={self.history} "),
            ("METRICS= ", f"METRICS={self.dir}/$SLURMD_NODENAME.prom "),
        ):
            assert old in text
            text = text.replace(old, new)
        (self.dir / name).write_text(text)
        (self.dir / name).chmod(0o755)


_OFF = "\n".join(
    f'{check} = "off"'
    for check in (
        "kernel_io",
        "kernel_filesystem",
        "kernel_mce",
        "kernel_nic",
        "oom",
        "xid",
        "disk",
        "memory",
        "stuck",
        "zombies",
    )
)


@pytest.fixture(scope="module")
def _hooked_lab(slurm_lab: SlurmLab) -> Iterator[HookedLab]:
    """Yield a separate lab, because the tests change its configuration; skip or fail as ``slurm_lab`` does."""
    with SlurmLab.start(nodes=2) as lab:
        yield HookedLab(lab)


@pytest.fixture
def hooked(_hooked_lab: HookedLab) -> Iterator[HookedLab]:
    yield _hooked_lab
    _hooked_lab.restore()


@pytest.mark.long
def test_health_check_program_drains_failing_nodes_and_undrains_only_its_own(hooked: HookedLab) -> None:
    lab = hooked.lab
    hooked.configure(
        f"HealthCheckProgram={hooked.dir}/healthcheck.sh",
        f"HealthCheckInterval={CHECK_INTERVAL_S}",
        "HealthCheckNodeState=ANY",
    )
    hooked.wait_for_checks("n1")
    assert lab.states() == {"n1": "idle", "n2": "idle"}, "a healthy node was drained"

    hooked.forget_calls()
    hooked.mount("n1").rmdir()
    lab.wait_states({"n1": "drain", "n2": "idle"}, TIMEOUT_S)
    assert hooked.calls(), "no hook of the failing node has called a Slurm command"
    assert hooked.reason("n1").startswith(f"rrl:health: mounts: {hooked.mount('n1')}: No such file or directory")
    hooked.mount("n1").mkdir()
    lab.wait_states({"n1": "idle"}, TIMEOUT_S)

    hooked.rules("n1", 'clock_source = "sundial"\ngpus = 8')  # WARN, UNKNOWN
    hooked.wait_for_checks("n1")
    assert lab.states()["n1"] == "idle"
    (hooked.dir / "n1.toml").write_text("[checks\n")  # a check that fails for lack of valid rules
    hooked.wait_for_checks("n1")
    assert lab.states()["n1"] == "idle"
    hooked.rules("n1")

    lab.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=the fan is loud")
    hooked.mount("n2").rmdir()
    hooked.wait_for_checks("n2")
    assert hooked.reason("n2").startswith("the fan is loud")
    hooked.mount("n2").mkdir()
    hooked.wait_for_checks("n2")
    assert lab.states()["n2"] == "drain"
    assert hooked.reason("n2").startswith("the fan is loud")


@pytest.mark.parametrize("checks", [4, pytest.param(300, marks=pytest.mark.long)])
def test_healthy_nodes_ask_slurmctld_nothing(hooked: HookedLab, checks: int) -> None:
    for node in hooked.lab.nodes:
        off = "\n".join(f'{check.name} = "off"' for check in CHECKS if check.name not in ("mounts", "clock_source"))
        (hooked.dir / f"{node}.toml").write_text(f'[expect]\nmounts = ["{hooked.mount(node)}"]\n[checks]\n{off}\n')
    hooked.configure(
        f"HealthCheckProgram={hooked.dir}/healthcheck.sh",
        f"HealthCheckInterval={CHECK_INTERVAL_S}",
        "HealthCheckNodeState=ANY",
    )
    for node in hooked.lab.nodes:
        # the first check after a boot queries slurmctld whether the hooks have drained the node
        hooked.wait_for_checks(node)
    hooked.wait_for_running_checks()
    hooked.forget_calls()
    before = {node: hooked.check_count(node) for node in hooked.lab.nodes}
    deadline = time.monotonic() + TIMEOUT_S + 10 * checks
    while sum(hooked.check_count(node) - before[node] for node in hooked.lab.nodes) < checks:
        assert time.monotonic() < deadline, f"fewer than {checks} checks; see {hooked.lab.dir}/log"
        time.sleep(0.5)
    assert (hooked.calls(), hooked.requests()) == ([], {})
    assert list(hooked.history.rglob("*")) == [], "a healthy node added to its history"


def test_prolog_relies_on_the_epilog_of_the_job_before_and_the_report_shows_what_it_found(hooked: HookedLab) -> None:
    lab = hooked.lab
    hooked.configure(f"Prolog={hooked.dir}/prolog.sh", f"Epilog={hooked.dir}/epilog.sh", "PrologFlags=Alloc")
    run = ["srun", "-n1", "-w", "n1", "--mem=100M", "true"]
    lab.run_as_user(run)
    lab.wait_states({"n1": "idle"}, TIMEOUT_S)
    hooked.mount("n1").rmdir()
    lab.run_as_user(run)  # the prolog relies on the last full check, which is fresh
    lab.wait_states({"n1": "drain"}, TIMEOUT_S)  # the epilog checks
    reason = f"mounts: {hooked.mount('n1')}: No such file or directory"
    assert hooked.reason("n1").startswith(f"rrl:health: {reason}")

    shown = lab.slurm(
        str(Path(sys.executable).parent / "rrl"),
        "health",
        "report",
        "--format",
        "json",
        "--history",
        str(hooked.history),
    )
    made = json.loads(shown)["report"]
    (node,) = made["nodes"]
    assert (node["node"], node["verdict"], node["detectors"]) == ("n1", "FAIL", ["mounts"])
    assert made["site"]["runs"] == 0
    assert 'rrl_node_check_verdict{node="n1",verdict="FAIL"} 1.0' in (hooked.dir / "n1.prom").read_text()
    hooked.mount("n1").mkdir()


def test_prolog_keeps_jobs_from_a_failing_node_and_from_no_other(hooked: HookedLab) -> None:
    lab = hooked.lab
    hooked.configure(f"Prolog={hooked.dir}/prolog.sh", "PrologFlags=Alloc")
    run = ["srun", "-n1", "-w", "n1", "--mem=100M", "true"]
    for harmless in ("", 'clock_source = "sundial"', "gpus = 8"):
        hooked.rules("n1", harmless)
        lab.run_as_user(run)
    (hooked.dir / "n1.toml").write_text("[checks\n")
    lab.run_as_user(run)
    lab.wait_states({"n1": "idle"}, TIMEOUT_S)
    assert hooked.check_count("n1") >= 4, "the prolog did not run"

    hooked.rules("n1")
    hooked.forget_checks()  # without this, the prolog would rely on the last check
    hooked.mount("n1").rmdir()
    failing = lab.popen_as_user(run)
    try:
        lab.wait_states({"n1": "drain"}, TIMEOUT_S)
        assert lab.states()["n2"] == "idle"
        assert failing.poll() is None or failing.returncode, "the job started on the failing node"
        assert hooked.reason("n1").startswith(f"rrl:health: mounts: {hooked.mount('n1')}: No such file or directory")
        hooked.mount("n2").rmdir()
        lab.run_as_user(["srun", "-n1", "-w", "n2", "--mem=100M", "true"])
        # after its job, n2 becomes idle: n1 is drained, and hooks may drain at most one of two nodes
        lab.wait_states({"n2": "idle"}, TIMEOUT_S)
    finally:
        if ids := [job.split()[0] for job in lab.jobs()]:
            lab.slurm("scancel", *ids)
        failing.wait(timeout=60)
