"""A run that has ended is resumed from its last committed step under its id, and ``rrl restart`` restarts replicas."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from rrl.core.types import NodeName, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, check_sound, current_incarnations, light_job, submit_here

ROLLOUT = ReplicaId("rollout/1")


def _recorded(run: TestRun, *argv: str) -> tuple[int, str, str]:
    process = run.call(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def test_cancelled_run_leaves_nothing_and_is_resumed_from_its_last_step(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 1000, spares=0, warm=False, one_node=True))
    run.wait_steps(4)
    (run.run.mailbox / "0.json").write_text("no command")  # an invalid command, which must not prevent the cancellation
    assert _recorded(run, "cancel", run.run.id)[0] == 0
    ended = run.wait_end()
    run.wait_gone()
    assert ended.outcome is Outcome.CANCELLED, ended.why
    assert [path.name for path in run.run.mailbox.iterdir()] == ["0.bad"]
    before = {id: one.incarnation_number for id, one in ended.replicas.items()}

    steps = ended.step + 4
    code, out, err = _recorded(run, "resume", run.run.id, "--steps", str(steps))
    assert (code, out) == (0, f"{run.run.id}\n")
    assert err.startswith("watch it with: ")
    assert err.endswith(f"rrl status {run.run.id} --live\n"), "rrl is not named by its path although it is not on PATH"
    run.wait_resumed()
    state = run.wait_end()
    assert (state.outcome, state.step, state.run) == (Outcome.COMPLETED, steps, ended.run), state.why
    assert all(
        state.replica(id).incarnation_number > before[id] for id in before if not id.startswith(("agent", "standby"))
    )
    run.wait_gone()
    check_sound(run.run)
    committed = [stamped.event.step for stamped in run.events() if isinstance(stamped.event, ev.StepCommitted)]
    assert sorted(set(committed)) == list(range(1, steps + 1))
    summary = run.summary()
    assert (summary["outcome"], summary["steps"]) == ("completed", steps)

    code, _, error = _recorded(run, "resume", run.run.id)
    assert (code, error) == (
        2,
        f"rrl: {run.run.id} has committed {steps} steps already; to train more, for example: rrl resume {run.run.id}"
        f" --steps {2 * steps}\n",
    )
    assert _recorded(run, "resume", run.run.id, "--steps", str(steps + 2), "--wait")[0] == 0
    state = run.wait_end()
    assert (state.outcome, state.step, state.job.steps) == (Outcome.COMPLETED, steps + 2, steps + 2)
    run.wait_gone()
    check_sound(run.run)


def test_a_run_that_has_not_ended_is_not_resumed_and_another_job_is_refused(tmp_path: Path) -> None:
    run = submit_here(tmp_path, light_job("local", 1000, warm=False))
    run.wait_steps(1)
    code, _, error = _recorded(run, "resume", run.run.id)
    assert (code, error) == (2, f"rrl: {run.run.id} has not ended; see: rrl status {run.run.id}\n")

    before = current_incarnations(run.state())
    code, out, error = _recorded(run, "restart", run.run.id, "rollout/1")
    assert (code, out) == (0, f"rollout/1#2 works on {before[ROLLOUT][2]}\n"), error
    run.wait_back_alone(before, ROLLOUT)
    state = run.state()
    assert (state.replica(ROLLOUT).failures, state.requested_restarts) == ((), {})
    assert _recorded(run, "restart", run.run.id, "rollout/7")[0] == 2

    left = before[ROLLOUT][2]
    assert left is not None
    code, out, error = _recorded(run, "drain", run.run.id, left)
    assert (code, out) == (0, f"this run no longer uses {left}\n"), error
    step = run.wait(lambda state: state.nodes[NodeName(left)].excluded is not None).step
    # longer than limits.silence: no process on this node sends heartbeats any more
    run.wait(lambda state: state.step >= step + 20)
    against = [one.event.finding for one in run.events() if isinstance(one.event, ev.FindingChanged)]
    assert [finding for finding in against if finding.node == left] == []

    assert _recorded(run, "cancel", run.run.id)[0] == 0
    other = tmp_path / "other.toml"
    other.write_text(light_job("local", 1000, warm=False).replace("0123456789", "01234567"))
    code, _, error = _recorded(run, "resume", run.run.id, "--job", str(other))
    line = other.read_text().splitlines().index("[model]") + 1
    message = f"rrl: {other}:{line}: model: is different in {run.run.id}; to change it start a new run\n"
    assert (code, error) == (2, message)
    assert msgspec.json.decode(run.run.summary.read_bytes())["outcome"] == "cancelled"
    run.wait_gone()
