"""A run whose ports are all attacked while it trains continues as without an attack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rrl.core.launch import LAUNCH_ENV
from rrl.core.types import ReplicaId, Verdict
from rrl.manager.model import events as ev
from rrl.manager.model.state import Status
from rrl.tests.support.runs import TestRun, check_sound, current_incarnations, light_job, submit_here
from rrl.tests.support.security.assault import assault, targets
from rrl.tests.support.security.attacks import LATER_CONNECTIONS

FRAMES = 1500
FIRST_FRAMES = 300
HALF_OPEN = 200
GROWTH = 0.05
"""Share by which the memory of each process may grow."""


def test_an_attack_on_all_ports_of_a_run_has_no_effect_on_it(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 100_000, spares=0, warm=False))  # the run must outlast the attack
    run.wait_steps(3)
    before = current_incarnations(
        run.wait(lambda s: all(r.status is Status.JOINED for r in s.replicas.values() if r.is_current))
    )
    agents = [target for target in targets(run) if target.name.startswith("agent/")]
    victims = [target for target in targets(run) if target not in agents[1:]]  # they are all alike
    named = {victim.name for victim in victims}
    assert {agents[0].name, "manager", "trajectories/0", "trainer/0", "rollout/0", "rollout/1"} <= named
    assault(run, victims, FIRST_FRAMES, HALF_OPEN)  # fills the memory pools of libraries
    began = run.state().step
    costs, _ = assault(run, victims, FRAMES, HALF_OPEN)
    state = run.wait(lambda s: s.step > began + 2)
    assert current_incarnations(state) == before, "a replica was replaced during the attack"
    for cost in costs:
        assert cost.frames > 0.9 * FRAMES, cost
        assert cost.descriptors_growth <= LATER_CONNECTIONS, cost
        assert cost.memory_growth <= GROWTH, cost
    _second_process(run, ReplicaId("rollout/1"))
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    assert run.state().outcome == "cancelled"
    with run.call("resume", run.run.id, "--steps", str(run.state().step + 3), stdout=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
    run.wait_resumed()
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)
    assert run.summary()["recoveries"] == []
    findings = [each.event.finding for each in run.events() if isinstance(each.event, ev.FindingChanged)]
    assert [finding for finding in findings if finding.verdict is Verdict.FAIL] == []


def _second_process(run: TestRun, replica: ReplicaId) -> None:
    """Launch the replica's step again; check that the second process exits and changes no file of the first one."""
    tag = run.state().replica(replica).step
    assert tag is not None
    file = str(run.run.launch_file(tag))
    argv = [sys.executable, "-P", "-m", "rrl.roles.launcher.step", file]
    second = subprocess.run(argv, env={**os.environ, LAUNCH_ENV: file}, capture_output=True, text=True, timeout=120)
    assert "the other process with the same tag continues" in second.stderr, second.stderr
    assert not run.run.exit_file(tag).exists(), (
        "the second process wrote an exit record, which would count as the exit record of the first process"
    )
