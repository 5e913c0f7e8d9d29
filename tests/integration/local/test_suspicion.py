"""A rollout whose engine is wedged while its process beats on: suspected, asked for work, looked into, restarted alone.

The shipped quickstart with its real roles, and the real py-spy.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rrl.core.types import AGENT, STANDBY_ROLE, Cause, Incarnation, ReplicaId, Verdict, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.tests.support.runs import QUICKSTART, check_sound, submit_here

VICTIM = ReplicaId("rollout/1")
WEDGED = Incarnation(VICTIM, 1)
IMPATIENT = 'suspect = "3s"\nprobe = "3s"\nfirst_pass = "20s"\nstep_grace = "30s"\n'


@pytest.mark.torch
def test_a_wedged_engine_is_suspected_probed_looked_into_and_restarted_and_nobody_else_is(tmp_path: Path) -> None:
    toml = QUICKSTART.read_text().replace("steps = 300", "steps = 4000")
    toml = toml.replace('kind = "kill"', 'kind = "engine_dead"').replace('at = "step=60"', 'at = "step=10"')
    run = submit_here(tmp_path, toml.replace("[limits]\n", f"[limits]\n{IMPATIENT}"))
    run.wait(
        lambda state: state.replica(VICTIM).incarnation_number == 2 and state.replica(VICTIM).weight_version,
        timeout_s=240,
    )

    events = run.events()
    findings = [
        (one.seq, one.event.finding) for one in events
        if isinstance(one.event, ev.FindingChanged) and one.event.finding.incarnation == WEDGED
    ]  # fmt: skip
    suspected = min(seq for seq, found in findings if found.verdict is Verdict.WARN and found.cause is Cause.HANG)
    failed, found = next((seq, found) for seq, found in findings if found.verdict is Verdict.FAIL)
    (fenced,) = [
        one.seq for one in events
        if isinstance(one.event, ev.Decided) and isinstance(one.event.action, Fence)
        and one.event.action.incarnation == WEDGED
    ]  # fmt: skip
    taken = [one for one in events if isinstance(one.event, ev.StacksCollected) and one.event.incarnation == WEDGED]
    assert found.detector == "no_answer", "it was not found by its silence to a probe"
    assert suspected < taken[-1].seq < fenced, "its stacks were not taken before it was ended"
    assert suspected < failed < fenced

    stacks = taken[-1].event  # where the machine is slow, a step may have been suspected before
    assert isinstance(stacks, ev.StacksCollected)
    assert "SelfFaults.trigger (main_thread.py:" in stacks.groups[0], "the place where it hangs is not named"
    whole = (run.run.path / stacks.file).read_text()
    assert "/rollout/main.py:" in whole
    assert '"rrl-connection"' in whole, "the thread that sends heartbeats is not in the file"
    assert [line.text for line in found.evidence if line.source == "stacks"] == [
        *stacks.groups, f"whole: {stacks.file}"
    ]  # fmt: skip

    reported = run.call("logs", run.run.id, "--failed", stdout=subprocess.PIPE)
    out, _ = reported.communicate(timeout=60)
    assert stacks.file in out

    for replica in run.state().replicas.values():
        if replica.id != VICTIM and role_of(replica.id) not in (AGENT, STANDBY_ROLE):
            assert replica.incarnation_number == 1, f"{replica.id} was touched too"
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    run.wait_gone()
    check_sound(run.run)
