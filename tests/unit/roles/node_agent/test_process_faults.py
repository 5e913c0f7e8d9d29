from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.core.faults import FAULT_TRAITS, Fault, FaultKind
from rrl.core.processes import read_process
from rrl.roles.node_agent import fault_injection
from rrl.roles.node_agent.fault_injection import PERFORMERS, NotPerformed, Target, find_target, is_lasting
from rrl.tests.support.listening_manager import Lab, eventually, lab


def target_of(at: Lab, file: str) -> Target | None:
    try:
        return find_target(file)
    except NotPerformed:
        return None


def test_every_kind_of_fault_has_a_performer() -> None:
    lasting = {FaultKind.SLOW}
    assert PERFORMERS.keys() | lasting == {kind for kind, traits in FAULT_TRAITS.items() if traits.by_signals}
    assert all(is_lasting(Fault("f0", kind, seconds=1.0)) for kind in {*lasting, FaultKind.FREEZE})


async def test_out_of_memory_fails_the_next_allocation_and_keeps_earlier_ones(at: Lab, tmp_path: Path) -> None:
    code = """
import os, sys, time
held = bytearray(2**20)
open(os.path.join(os.path.dirname(sys.argv[1]), "begun"), "w").close()
while not os.path.exists(sys.argv[1]):
    held[0] += 1
    held[0] -= 1
    time.sleep(0.01)
bytearray(2**26)
"""

    async with at.manager():
        go = tmp_path / "go"
        launch = at.launch(sys.executable, "-c", code, str(go))
        step = at.start(launch)
        target = await eventually(lambda: target_of(at, str(at.run.launch_file(launch.tag))))
        # so that the program has no imports left, whose allocations could fail first
        await eventually(go.with_name("begun").exists)
        assert "MiB" in PERFORMERS[FaultKind.OUT_OF_MEMORY](target)
        assert read_process(target.command.pid) is not None
        go.touch()
        assert await at.end_of(step) == 1
        await eventually(lambda: "MemoryError" in at.log(launch))


async def test_target_is_the_process_group_of_the_command_only(at: Lab) -> None:
    async with at.manager():
        launch = at.launch("sh", "-c", "(setsid sleep 1001 &); sleep 1000; true")
        step = at.start(launch)
        file = str(at.run.launch_file(launch.tag))
        target = await eventually(lambda: target_of(at, file))
        assert target.step.pid == step.pid
        assert (target.command.pid, target.command.parent) == (target.command.group, step.pid)
        PERFORMERS[FaultKind.KILL](target)
        assert await at.end_of(step) == 128 + signal.SIGKILL
        with pytest.raises(NotPerformed, match="is not running"):
            find_target(file)
        with pytest.raises(NotPerformed, match="has ended"):
            PERFORMERS[FaultKind.KILL](target)


def test_step_without_a_started_command_is_not_a_target(tmp_path: Path) -> None:
    with lab(tmp_path) as at:
        launch = at.launch("sleep", "1000")
        step, file = at.start(launch), str(at.run.launch_file(launch.tag))  # no manager admits it
        # a step is found by the environment of its process, which a child has only after its exec
        asyncio.run(eventually(lambda: file.encode() in Path(f"/proc/{step.pid}/environ").read_bytes()))
        with pytest.raises(NotPerformed, match="has not started its command"):
            find_target(file)


def fake_slurmstepd(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a process named slurmstepd with one child."""
    code = "open('/proc/self/comm', 'w').write('slurmstepd'); import subprocess as s; s.run(['sleep', '1000'])"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.parametrize("permitted", [True, False])
def test_kill_step_under_slurm_kills_slurmstepd_if_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, permitted: bool
) -> None:
    holder = fake_slurmstepd(tmp_path)
    try:
        child = asyncio.run(eventually(lambda: child_of(holder.pid)))
        step = read_process(child)
        assert step is not None
        if permitted:
            assert "slurmstepd" in PERFORMERS[FaultKind.KILL_STEP](Target(step, step))
            assert holder.wait() == -signal.SIGKILL
        else:
            monkeypatch.setattr(fault_injection, "send_signal", _refused)
            with pytest.raises(NotPerformed, match="belongs to another user"):
                PERFORMERS[FaultKind.KILL_STEP](Target(step, step))
            assert read_process(child) is not None
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()


def _refused(*_: object) -> bool:
    raise PermissionError
