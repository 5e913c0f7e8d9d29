"""A run survives every kind of fault that the local cluster can inject."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rrl.api.watching.manager_liveness import STALE_LEASES
from rrl.core.faults import Fault, FaultKind
from rrl.core.processes import read_process
from rrl.core.run_dir import write_atomically
from rrl.core.types import ReplicaId
from rrl.manager.intake.user_commands import Command
from rrl.manager.model import events as ev
from rrl.manager.model.state import State, Status
from rrl.manager.storage.lease import RENEWALS_PER_TIMEOUT, LeaseHolder, holder
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.mounts import own_mounts
from rrl.tests.support.runs import TIMEOUT_S, TestRun, all_work, check_sound, light_job, submit_here

PLANNED = [
    ("kill", "agent/local2", 1, ""),
    ("kill", "rollout/0", 2, ""),
    ("exit", "reward/0", 3, "amount = 3"),
    ("slow", "rollout/1", 3, 'amount = 0.3\nseconds = "2s"'),
    ("engine_dead", "rollout/2", 4, ""),
    ("exception", "trainer/0", 5, ""),
    ("kill", "trajectories/0", 8, ""),
    ("out_of_memory", "rollout/1", 10, ""),
    # long after the kill of rollout/0, because its next incarnation may be late on a busy machine
    ("freeze", "rollout/0", 16, ""),
    ("crash", "rollout/1", 24, ""),
]
STEPS, STEP_SECONDS = 80, 0.3
"""Number of steps, and seconds of each. They last so long that the dead agent is replaced and the dead engine is found
before the run ends."""
RECOVERED = {"rollout/0": 2, "reward/0": 1, "rollout/2": 1, "trainer/0": 1, "trajectories/0": 1, "rollout/1": 2}
"""Number of recoveries that the planned faults must cause, by replica."""
HANGS_ARE_FOUND = """
[recovery]
backoff = "100ms"
per_node = 5
[phases.generate]
shortest = "6s"
longest = "6s"
"""


AGENT = ReplicaId("agent/local2")


def _faults() -> str:
    tables = [
        f'[[faults.planned]]\nkind = "{kind}"\ntarget = "{target}"\nat = "step={step}"\n{more}\n'
        for kind, target, step, more in PLANNED
    ]
    return "[faults]\nallow = true\n" + "".join(tables)


def _lease(run: TestRun) -> LeaseHolder:
    found = holder(run.run)
    assert found is not None
    return found


def _inject(run: TestRun, *words: str) -> tuple[int, str, str]:
    process = run.call("inject", run.run.id, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _recorded(run: TestRun) -> list[ev.FaultInjected]:
    return [stamped.event for stamped in run.events() if isinstance(stamped.event, ev.FaultInjected)]


def _rejoined(id: ReplicaId, number: int = 2) -> Callable[[State], bool]:
    return lambda state: (state.replica(id).incarnation_number, state.replica(id).status) == (number, Status.JOINED)


def _commands(run: TestRun) -> None:
    """Send a valid request during the run, one that ``rrl inject`` refuses, and one that the manager refuses."""
    code, out, err = _inject(run, "freeze", "--target", "agent/local7", "--for", "300ms", "--wait")
    assert (code, "SIGSTOP to pid" in out) == (0, True), err
    code, _, err = _inject(run, "kill", "--target", "judge/0")
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = _inject(run, "cut", "--target", "local2", "--for", "1s", "--wait")
    assert code == 1
    assert "was not performed: refused: the local cluster cannot inject cut" in err
    stranger = Fault("stranger", FaultKind.KILL, "judge/0")
    write_atomically(run.run.mailbox / "9.json", msgspec.json.encode(Command("inject", "eve", fault=stranger)))
    run.wait(lambda state: "stranger" in state.triggered_faults)


def test_run_survives_every_fault_and_marks_only_these_failures_as_injected(tmp_path: Path) -> None:
    extra = HANGS_ARE_FOUND + _faults()
    toml = light_job("local", STEPS, rollouts=3, spares=2, step_seconds=STEP_SECONDS, extra=extra)
    run = submit_here(tmp_path, toml.replace('quiet = "10s"', 'quiet = "10s"\nfirst_pass = "1s"'))
    run.wait(lambda state: state.replica(ReplicaId("reward/0")).status is Status.JOINED)
    _commands(run)
    run.wait(lambda state: {f"f{i}" for i in range(len(PLANNED))} <= set(state.triggered_faults))
    run.wait(_rejoined(AGENT))
    # waits for these before the manager is killed, because its successor would begin anew to wait for the dead engine,
    # and to hear from the frozen rollout
    run.wait(_rejoined(ReplicaId("rollout/2")))
    run.wait(_rejoined(ReplicaId("rollout/0"), RECOVERED["rollout/0"] + 1))
    manager = json.loads((run.run.epochs / "000001").read_text())["pid"]
    assert _inject(run, "kill", "--target", "manager")[0] == 0
    run.wait(lambda state: read_process(manager) is None)
    with run.call("manage", run.run.id):
        run.wait(lambda state: state.epoch == 2 and (all_work(state) or state.finish is not None))
        state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)

    performed = {reported.fault: reported for reported in _recorded(run) if reported.ok and not reported.ended}
    for index, (kind, target, _, _) in enumerate(PLANNED):
        reported = performed[f"f{index}"]
        assert (reported.kind, reported.target, reported.detail != "") == (kind, target, True)
        hit = str(reported.incarnation) if reported.incarnation is not None else reported.node
        assert hit.startswith("local" if kind == "crash" else f"{target}#")
    over = [reported.detail for reported in _recorded(run) if reported.ended]
    assert over == ["SIGCONT: the target runs again"] * 2  # the freeze for 300 ms, and the fault ``slow``
    refused = [reported.detail for reported in _recorded(run) if not reported.ok]
    assert [detail.partition(":")[0] for detail in refused] == ["refused", "rejected"], refused
    assert 'no role "judge"' in refused[1]
    assert [reported.detail for reported in performed.values() if reported.target == "manager"] == [
        "the manager before epoch 2 was killed"
    ]

    summary = run.summary()
    injected = Counter(r["replica"] for r in summary["recoveries"] if r["injected"])
    assert injected == RECOVERED, summary["recoveries"]
    assert (summary["faults"], summary["epochs"]) == (len(PLANNED) + 2, 2)
    assert summary["unprovoked"] == len(summary["recoveries"]) - injected.total()
    assert "no_progress" in {r["detector"] for r in summary["recoveries"] if r["replica"] == "rollout/2"}


ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from rrl.tests.integration.local import test_faults

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m,mode=700", "none", disk], check=True)
getattr(test_faults, sys.argv[2])(disk)
"""


def survives_a_full_disk(disk: Path) -> None:
    full = '[[faults.planned]]\nkind = "disk_full"\nat = "step=3"\nseconds = "2s"\n'
    run = submit_here(
        disk,
        light_job("local", 20, spares=0, warm=False, one_node=True, extra=f'[recovery]\nbackoff = "100ms"\n{full}'),
    )
    state = run.wait_end()
    assert (state.outcome, state.step, state.epoch) == ("completed", 20, 1), state.why
    run.wait_gone()
    check_sound(run.run)
    assert not run.run.disk_filler.exists()
    assert [(reported.ok, reported.ended) for reported in _recorded(run)] == [(True, False), (True, True)]
    assert run.summary()["unprovoked"] == 0


def is_cancelled_on_a_full_disk(disk: Path) -> None:
    """Cancel a run on a disk that stays full until the run's end, so that only the run's own reserve can free space.

    Until then the manager says what it waits for, for longer than a lease without renewals would be patience.
    """
    run = submit_here(disk, light_job("local", 100_000, spares=0, warm=False, one_node=True))
    run.wait_steps(2)
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    patience = STALE_LEASES * RENEWALS_PER_TIMEOUT
    wait_until(lambda: _lease(run).write_errno == errno.ENOSPC)
    before = _lease(run).counter
    wait_until(lambda: _lease(run).counter > before + patience)
    status = run.call("status", run.run.id, "--json", stdout=subprocess.PIPE)
    shown = json.loads(status.communicate(timeout=TIMEOUT_S)[0])
    assert shown["note"].startswith("the run directory is full: "), shown["note"]
    assert shown["standing"] in ("running", "recovering"), "a manager that waits was taken for none"
    cancel = run.call("cancel", run.run.id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = cancel.communicate(timeout=TIMEOUT_S)
    assert cancel.returncode == 0, output
    assert run.state().outcome == "cancelled"
    assert run.summary()["outcome"] == "cancelled"
    run.wait_gone()
    assert not run.run.space_reserve.exists()


if own_mounts():  # defined only if mounts are possible, because CI takes a skipped test for a failure

    def test_run_is_cancelled_on_a_full_disk(tmp_path: Path) -> None:
        argv = [*own_mounts(), sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), "is_cancelled_on_a_full_disk"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.long  # the disk of the run above is full for longer; tests/unit/manager/execute has the fault
    def test_full_disk_costs_some_incarnations_and_no_manager(tmp_path: Path) -> None:
        argv = [*own_mounts(), sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), "survives_a_full_disk"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
