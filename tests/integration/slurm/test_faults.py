"""A plain user injects faults on a real Slurm: agents send the signals, and the test cluster injects all others."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest

from rrl.core.types import ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, all_work, check_sound, light_job, submit_on
from rrl.tests.support.slurm.lab import SlurmLab

pytestmark = pytest.mark.long  # rrl.tests.support.slurm.versions -- -m slurm runs these tests on each version

ALLOWED = '[recovery]\nbackoff = "100ms"\n[faults]\nallow = true\n'


def inject(run: TestRun, *words: str) -> str:
    """Inject a fault and return the output, which describes what was done."""
    process = run.call("inject", run.run.id, *words, "--wait", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return str(out)


def test_injected_faults_take_effect_on_slurm_and_the_run_continues(slurm_lab: SlurmLab) -> None:
    run = submit_on(slurm_lab, "faults", light_job("slurm", 100_000, spares=1, extra=ALLOWED))
    run.wait_steps(2)
    assert "SIGSTOP to process group" in inject(run, "freeze", "--target", "reward/0", "--for", "500ms")
    assert "exits with code 3" in inject(run, "exit", "--target", "reward/0", "--amount", "3")
    assert "SIGKILL to" in inject(run, "kill", "--target", "rollout/0")
    run.wait(lambda s: s.replica(ReplicaId("rollout/0")).incarnation_number == 2 and all_work(s))
    assert inject(run, "outage", "--for", "2s")
    node = run.state().replica(ReplicaId("rollout/1")).node
    try:
        assert f"crash {node}" in inject(run, "crash", "--target", "rollout/1")
        state = run.wait(lambda s: s.replica(ReplicaId("rollout/1")).incarnation_number == 2 and all_work(s))
        assert state.replica(ReplicaId("rollout/1")).node != node
        step = state.step
        run.wait(lambda s: s.step > step + 3)
        with run.call("cancel", run.run.id) as process:
            assert process.wait(90) == 0
        run.wait_end()
        run.wait_gone()
    finally:
        slurm_lab.clear()
    check_sound(run.run)
    faults = [s.event for s in run.events() if isinstance(s.event, ev.FaultInjected)]
    assert [fault.kind for fault in faults if fault.ok and not fault.ended] == [
        "freeze",
        "exit",
        "kill",
        "outage",
        "crash",
    ]
    assert sum(fault.ended for fault in faults) == 2
    summary = run.summary()
    injected = Counter(r["replica"] for r in summary["recoveries"] if r["injected"])
    assert injected == {"reward/0": 1, "rollout/0": 1, "rollout/1": 1}, summary["recoveries"]
