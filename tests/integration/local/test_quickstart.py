"""The shipped quickstart with its real roles (torch, transformers, reasoning-gym, UCX), a few steps of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import STANDBY_ROLE, ReplicaId, role_of
from rrl.manager.model import events as ev
from rrl.tests.support.runs import QUICKSTART, check_sound, submit_here

VICTIM = ReplicaId("rollout/1")


@pytest.mark.torch
def test_the_quickstart_goes_on_while_its_killed_rollout_comes_back_with_current_weights(tmp_path: Path) -> None:
    toml = QUICKSTART.read_text().replace("steps = 300", "steps = 400").replace('at = "step=60"', 'at = "step=5"')
    toml = toml.replace("[limits]\n", '[limits]\nstep_grace = "30s"\n')  # torch takes its time to leave a busy machine
    assert "[transport]" not in toml
    toml += '\n[transport]\nweights = "ucx"\ntrusted_network = true\n'  # else nothing runs over UCX as a whole run
    run = submit_here(tmp_path, toml)
    run.wait(
        lambda s: s.replica(VICTIM).incarnation_number == 2 and s.replica(VICTIM).weight_version is not None,
        timeout_s=240,
    )
    killed_at = next(s.event.step for s in reversed(run.events()) if isinstance(s.event, ev.StepCommitted))
    run.wait(lambda s: s.step > killed_at, timeout_s=240)
    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    run.wait_gone()
    check_sound(run.run)
    serves = {s.event.weight_address for s in run.events() if isinstance(s.event, ev.Joined) and s.event.weight_address}
    assert all(address.startswith("ucx://") for address in serves), "weights did not move over UCX"
    recovery = next(r for r in run.summary()["recoveries"] if r["replica"] == VICTIM)
    assert recovery["injected"]
    assert recovery["weights_s"] is not None, "it was given work before it held weights"
    ends = [s.event for s in run.events() if isinstance(s.event, ev.StepEnded) and s.event.signal == 9]
    ended = {
        end.reason for end in ends if role_of(end.incarnation.replica) != STANDBY_ROLE
    }  # those that wait get no grace
    assert ended == {ExitReason.SIGNALED}, "a role had to be killed at the end though it was asked to leave"
