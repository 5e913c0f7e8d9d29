from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import LAUNCH_ENV
from rrl.core.processes import (
    STEP_ENV,
    STEP_MODULE,
    Process,
    kill_and_wait,
    processes,
    read_process,
    send_signal,
    sweep,
    with_marks,
)
from rrl.roles.launcher.process_group import Census, end_descendants, kill_group
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()


def sleeper(started: list[subprocess.Popen[bytes]], *argv: str, **env: str) -> Process:
    child = subprocess.Popen(argv or ("sleep", "1000"), env={"PATH": "/usr/bin:/bin", **env}, start_new_session=True)
    started.append(child)
    # Popen returns while the kernel may still be loading the program, and its arguments are not yet readable
    wait_until(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes() != b"")
    process = read_process(child.pid)
    assert process is not None
    return with_marks(process)


def test_only_processes_of_the_folder_are_found(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    ours = sleeper(started, **{"BEFORE": "1", LAUNCH_ENV: f"{tmp_path}/steps/a.launch", "AFTER": "1"})
    sleeper(started, **{LAUNCH_ENV: f"{tmp_path}/steps-of-another/a.launch"})
    sleeper(started, **{"NOT_" + LAUNCH_ENV: f"{tmp_path}/steps/a.launch"})
    sleeper(started)
    assert processes(f"{tmp_path}/steps") == [ours]
    assert Census(f"{tmp_path}/steps").scan() == [ours]
    assert ours.launch == f"{tmp_path}/steps/a.launch"


def test_first_process_is_recognised_by_its_arguments_but_its_wrapper_is_not(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    file = f"{tmp_path}/steps/a.launch"
    code = "import time; time.sleep(1000)"
    fake = tmp_path / "srun"
    fake.write_text(f"#!{sys.executable}\n{code}\n")
    fake.chmod(0o700)
    (tmp_path / "rrl" / "roles").mkdir(parents=True)
    for name, text in (("__init__", ""), ("roles/__init__", ""), ("roles/step", code)):
        (tmp_path / "rrl" / f"{name}.py").write_text(text)
    first = sleeper(started, sys.executable, "-u", "-m", STEP_MODULE, file, PYTHONPATH=str(tmp_path))
    carrier = sleeper(started, str(fake), "--jobid=1", sys.executable, "-u", "-m", STEP_MODULE, file)
    assert (first.module, first.launch) == (STEP_MODULE, file)
    assert (carrier.module, carrier.launch) == ("", "")


def test_reused_pid_is_not_signalled(started: list[subprocess.Popen[bytes]]) -> None:
    now = sleeper(started)
    before = msgspec.structs.replace(now, started=now.started - 1)
    assert not send_signal(before, signal.SIGKILL)
    kill_and_wait([before], timeout=5.0)
    assert read_process(now.pid) is not None
    assert send_signal(now, signal.SIGKILL)
    started[0].wait()
    assert not send_signal(now, signal.SIGKILL)


def test_sweep_ends_processes_that_fork_during_it(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Each process forks the next one into a new session after 0.1 s.

    There are at most 50 processes, in case the sweep fails.
    """
    chain = "import os, time\nfor _ in range(50):\n  time.sleep(0.1)\n  if os.fork(): os._exit(0)\n  os.setsid()\n"
    first = sleeper(started, sys.executable, "-c", chain, **{LAUNCH_ENV: f"{tmp_path}/a.launch"})
    wait_until(lambda: read_process(first.pid) is None)
    swept, left = sweep(lambda: processes(str(tmp_path)), timeout=20.0)
    assert swept
    assert not left
    assert processes(str(tmp_path)) == []


def test_processes_that_survive_a_sweep_are_reported(started: list[subprocess.Popen[bytes]]) -> None:
    process = sleeper(started)
    found, left = sweep(lambda: [process], timeout=0.2)  # as if SIGKILL had no effect
    assert found == left == [process]


def test_zombie_is_not_alive(started: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = sleeper(started, **{LAUNCH_ENV: f"{tmp_path}/a.launch"})
    kill_and_wait([process], timeout=20.0)
    assert read_process(process.pid) is None
    assert processes(str(tmp_path)) == []


def test_whole_group_is_signalled_and_an_empty_one_is_not_an_error(started: list[subprocess.Popen[bytes]]) -> None:
    leader = sleeper(started, "sh", "-c", "sleep 1000 & echo; wait")
    assert kill_group(leader.group)
    started[0].wait()
    wait_until(lambda: not kill_group(leader.group))


def test_wrapper_that_execs_a_first_process_is_in_the_next_census(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    script = f"read line; {LAUNCH_ENV}={tmp_path}/a.launch exec sleep 1000"
    child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
    started.append(child)
    census = Census(str(tmp_path))
    assert census.scan() == []
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    wait_until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n")
    assert [process.pid for process in census.scan()] == [child.pid]


def test_old_foreign_processes_are_not_read_at_every_census(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rrl.roles.launcher import process_group as module

    read: list[int] = []

    def count(process: Process) -> Process:
        read.append(process.pid)
        return with_marks(process)

    monkeypatch.setattr(module, "with_marks", count)
    monkeypatch.setattr(module, "_YOUNG_PROCESS_S", 0.0)
    census = module.Census(str(tmp_path))
    census.scan()
    first, read[:] = len(read), []
    census.scan()
    assert len(read) < first


def test_old_own_processes_are_not_read_again_and_leave_the_census_when_they_end(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rrl.roles.launcher import process_group as module

    child = subprocess.Popen(["sleep", "1000"], env={LAUNCH_ENV: f"{tmp_path}/a.launch"}, start_new_session=True)
    started.append(child)
    monkeypatch.setattr(module, "_YOUNG_PROCESS_S", 0.0)
    census = module.Census(str(tmp_path))
    wait_until(lambda: [process.pid for process in census.scan()] == [child.pid])
    (before,) = census.scan()
    monkeypatch.setattr(module, "with_marks", None)
    assert census._process(child.pid, before) == before
    child.kill()
    child.wait()
    assert census._process(child.pid, before) is None


def test_process_that_has_left_the_tree_of_its_step_ends_with_the_step_by_its_mark(
    started: list[subprocess.Popen[bytes]],
) -> None:
    step, other = sleeper(started), sleeper(started)
    left = sleeper(started, **{STEP_ENV: step.name})
    assert end_descendants(step, TIMEOUT_S) == []
    assert read_process(left.pid) is None
    assert read_process(other.pid) == msgspec.structs.replace(other, launch="", step="", module="")
