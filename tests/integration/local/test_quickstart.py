"""The quickstart survives a killed rollout and a stopped engine, with its real roles.

The roles use torch, transformers, reasoning-gym, UCX and py-spy. One rollout is killed. Once it is back, the engine of
the other rollout stops, while the process of that rollout continues to send heartbeats. The tests read the journal and
the files of this one run.
"""

from __future__ import annotations

import subprocess

import pytest

from rrl.core.launch import ExitReason
from rrl.core.types import AGENT, STANDBY_ROLE, Cause, Incarnation, ReplicaId, Verdict, role_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.tests.support.runs import TestRun, check_sound, submit_here
from rrl.tests.support.slow_quickstart import slow_quickstart

KILLED, WEDGED = ReplicaId("rollout/1"), ReplicaId("rollout/0")
WEDGED_INCARNATION = Incarnation(WEDGED, 1)
IMPATIENT = 'suspect = "3s"\nprobe = "3s"\nfirst_pass = "20s"\nstep_grace = "30s"\n'
"""Limits with which a stopped engine is found soon. ``step_grace`` is long, because torch exits slowly on a busy
machine."""
TIMEOUT_S = 240.0

pytestmark = pytest.mark.torch


def _restarted_with_weights(run: TestRun, replica: ReplicaId) -> None:
    run.wait(
        lambda state: (
            state.replica(replica).incarnation_number == 2 and state.replica(replica).weight_version is not None
        ),
        timeout_s=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    """Play the run until both rollouts are back, cancel it, and return it once all its processes have ended."""
    folder = tmp_path_factory.mktemp("quickstart")
    toml = slow_quickstart(folder, prompts=4, step_s=2.0)
    for shipped, tested in (
        ("steps = 300", "steps = 4000"),
        ('at = "step=60"', 'at = "step=3"'),
        ("[limits]\n", f"[limits]\n{IMPATIENT}"),
        ("[[faults.planned]]", "[faults]\nallow = true\n[[faults.planned]]"),
    ):
        assert toml.count(shipped) == 1, shipped
        toml = toml.replace(shipped, tested)
    assert "[transport]" not in toml
    toml += '\n[transport]\nweights = "ucx"\ntrusted_network = true\n'  # no other whole run uses UCX
    run = submit_here(folder, toml)

    _restarted_with_weights(run, KILLED)
    step_of_return = run.state().step
    run.wait(lambda state: state.step > step_of_return, timeout_s=TIMEOUT_S)
    with run.call(
        "inject", run.run.id, "engine_dead", "--target", WEDGED, "--wait", stdout=subprocess.DEVNULL
    ) as fault:
        assert fault.wait(TIMEOUT_S) == 0
    _restarted_with_weights(run, WEDGED)

    with run.call("cancel", run.run.id) as process:
        assert process.wait(60) == 0
    run.wait_gone()
    check_sound(run.run)
    return run


def test_killed_rollout_comes_back_with_current_weights_over_ucx(run: TestRun) -> None:
    serves = {s.event.weight_address for s in run.events() if isinstance(s.event, ev.Joined) and s.event.weight_address}
    assert all(address.startswith("ucx://") for address in serves), "weights did not move over UCX"
    recovery = next(r for r in run.summary()["recoveries"] if r["replica"] == KILLED)
    assert recovery["injected"]
    assert recovery["weights_s"] is not None, "the rollout got work before it had weights"


def test_roles_exit_on_a_stop_request_without_being_killed(run: TestRun) -> None:
    ends = [s.event for s in run.events() if isinstance(s.event, ev.StepEnded) and s.event.signal == 9]
    reasons = {  # a standby process gets no grace, and a rollout with a stopped engine cannot use its grace
        end.reason
        for end in ends
        if role_of(end.incarnation.replica) != STANDBY_ROLE and end.incarnation != WEDGED_INCARNATION
    }
    assert reasons == {ExitReason.SIGNALED}, "a role was killed at the end because it did not exit on request"


def test_hung_engine_is_suspected_probed_dumped_and_restarted(run: TestRun) -> None:
    events = run.events()
    findings = [
        (one.seq, one.event.finding)
        for one in events
        if isinstance(one.event, ev.FindingChanged) and one.event.finding.incarnation == WEDGED_INCARNATION
    ]
    suspected = min(seq for seq, found in findings if found.verdict is Verdict.WARN and found.cause is Cause.HANG)
    failed, found = next((seq, found) for seq, found in findings if found.verdict is Verdict.FAIL)
    (fenced,) = [
        one.seq
        for one in events
        if isinstance(one.event, ev.Decided)
        and isinstance(one.event.action, Fence)
        and one.event.action.incarnation == WEDGED_INCARNATION
    ]
    dumps = [
        one
        for one in events
        if isinstance(one.event, ev.StacksCollected) and one.event.incarnation == WEDGED_INCARNATION
    ]
    assert found.detector == "no_answer", "the stopped engine was not found by an unanswered probe"
    assert suspected < dumps[-1].seq < fenced, "the stacks were not dumped before the incarnation was fenced"
    assert suspected < failed < fenced

    stacks = dumps[-1].event  # the last one: on a slow machine an earlier training step may have been dumped, too
    assert isinstance(stacks, ev.StacksCollected)
    assert "SelfFaults.trigger (main_thread.py:" in stacks.groups[0], "the dump does not show where it hangs"
    dump = (run.run.path / stacks.file).read_text()
    assert "/rollout/main.py:" in dump
    assert '"rrl-connection"' in dump, "the file of stacks lacks the thread that sends heartbeats"
    assert [line.text for line in found.evidence if line.source == "stacks"] == [
        *stacks.groups,
        f"all stacks: {stacks.file}",
    ]

    shown = run.call("logs", str(run.run.path), "--failed", stdout=subprocess.PIPE)
    out, _ = shown.communicate(timeout=60)
    assert stacks.file in out


def test_failures_of_two_rollouts_restart_no_other_replica(run: TestRun) -> None:
    for replica in run.state().replicas.values():
        if role_of(replica.id) not in (AGENT, STANDBY_ROLE):
            expected = 2 if replica.id in (KILLED, WEDGED) else 1
            assert replica.incarnation_number == expected, f"{replica.id} was restarted too"
