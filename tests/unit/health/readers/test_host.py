"""The reader of a host: mounts that hang, processes that are stuck, and values of /proc and /sys."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.core.processes import descendants
from rrl.health.readers import host, mounts
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.host import HostReader
from rrl.health.readers.mounts import Mounts
from rrl.health.readers.samples import MOUNT_ATTEMPTS
from rrl.tests.support.listening_manager import wait_until

TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.02
_FIGURES = mounts._figures


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = {process.pid for process in descendants(os.getpid())}
    yield
    assert [one for one in descendants(os.getpid()) if one.pid not in before] == []


@contextlib.contextmanager
def mounts_reader(*paths: Path | str, timeout_s: float = TIMEOUT_S) -> Iterator[Mounts]:
    made = Mounts([str(path) for path in paths], timeout_s)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path whose file system does not answer while a file ``dead.away`` exists beside it.

    The process that probes the path is a fork of this one, so that the monkeypatch applies to it.
    """
    path, away = tmp_path / "dead", tmp_path / "dead.away"
    path.mkdir()
    away.touch()

    def figures(of: str) -> mounts._MountAnswer:
        while of == str(path) and away.exists():
            time.sleep(_POLL_INTERVAL_S)
        return _FIGURES(of)

    monkeypatch.setattr(mounts, "_figures", figures)
    return path


# ── mounts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_mount_that_answers_has_its_file_system_and_used_share(tmp_path: Path) -> None:
    with mounts_reader(tmp_path, "/proc") as mounts_:
        here, proc = mounts_.read()
    assert here.answers
    assert here.used is not None
    assert 0 <= here.used <= 1
    assert (proc.answers, proc.filesystem, proc.used) == (True, "proc", None)  # of no size


def test_missing_path_does_not_answer_and_has_a_reason(tmp_path: Path) -> None:
    with mounts_reader(tmp_path / "nowhere") as mounts_:
        (mount,) = mounts_.read()
    assert (mount.answers, mount.why) == (False, "No such file or directory")


def _children() -> set[int]:
    return {process.pid for process in descendants(os.getpid()) if process.parent == os.getpid()}


def test_hung_mount_delays_one_read_only_and_no_other_mount(dead: Path, tmp_path: Path) -> None:
    before = _children()  # earlier tests in this process may have left some children
    with mounts_reader(dead, tmp_path, timeout_s=0.5) as mounts_:
        for _ in range(3):
            gone, there = mounts_.read()
            assert (gone.answers, gone.why) == (False, "did not answer within 0.5 s")
            assert there.answers
        # Further reads start no more processes. The process that probed the other mount may still be ending.
        wait_until(lambda: len(_children() - before) == MOUNT_ATTEMPTS)
        assert (gone.attempts, there.attempts) == (MOUNT_ATTEMPTS, 0)
        assert gone.hung_for >= 0.5


def test_mount_that_answers_only_a_second_process_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = tmp_path / "lost"

    def figures(path: str) -> mounts._MountAnswer:
        with contextlib.suppress(FileExistsError):
            lost.touch(exist_ok=False)
            signal.pause()  # the first request is never answered
        return _FIGURES(path)

    monkeypatch.setattr(mounts, "_figures", figures)
    with mounts_reader(tmp_path, timeout_s=3.0) as mounts_:
        (first,) = mounts_.read()
        assert (first.answers, first.attempts) == (True, 0)
        (second,) = mounts_.read()
        assert second.answers


def test_mount_that_recovers_is_reported_as_answering_again(dead: Path) -> None:
    with mounts_reader(dead, timeout_s=0.3) as mounts_:
        assert not mounts_.read()[0].answers
        (dead.parent / "dead.away").unlink()
        wait_until(lambda: mounts_.read()[0].answers)


def test_process_that_probes_a_hung_mount_ends_with_the_reader(dead: Path) -> None:
    read, write = os.pipe()
    reader = os.fork()
    if reader == 0:  # a reader's process, which is killed while it waits
        os.close(read)
        try:
            Mounts([str(dead)], TIMEOUT_S).read()
        finally:
            os._exit(1)
    os.close(write)
    wait_until(lambda: descendants(reader))
    below = descendants(reader)[0].pid
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    wait_until(lambda: not os.path.exists(f"/proc/{below}"))
    assert os.read(read, 1) == b""  # no process has the other end of the pipe open
    os.close(read)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────
_KERNEL_THREAD = 0x00200040


def plant(proc: Path, pid: int, state: str, name: str = "python", started: int = 100, flags: int = 0x400000) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    rest = " ".join(["0"] * 12)
    (folder / "stat").write_text(f"{pid} ({name}) {state} 1 1 1 0 -1 {flags} {rest} {started} 0 0\n")
    (folder / "wchan").write_text("rpc_wait_bit_killable")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host, "time", made)
    return made


def reader(root: Path) -> HostReader:
    return HostReader(ReaderOptions(mounts=(), proc=str(root / "proc"), sysfs=str(root / "sys")))


def test_stuck_time_of_a_process_grows_from_read_to_read(tmp_path: Path, clock: Clock) -> None:
    plant(tmp_path / "proc", 7, "D", name="a) b")
    plant(tmp_path / "proc", 8, "S")
    reading = reader(tmp_path)
    (stuck,) = reading.read().stuck
    assert (stuck.pid, stuck.name, stuck.seconds, stuck.uid) == (7, "a) b", 0.0, os.getuid())
    assert stuck.kernel_function == "rpc_wait_bit_killable"
    clock.now += 25.0
    assert reading.read().stuck[0].seconds == 25.0


def test_time_of_a_stuck_process_restarts_after_it_has_run(tmp_path: Path, clock: Clock) -> None:
    reading = reader(tmp_path)
    for state in "DSD":
        plant(tmp_path / "proc", 7, state)
        stuck = reading.read().stuck
        clock.now += 25.0
    assert [one.seconds for one in stuck] == [0.0]


def test_time_of_a_stuck_process_restarts_if_its_pid_is_reused(tmp_path: Path, clock: Clock) -> None:
    reading = reader(tmp_path)
    plant(tmp_path / "proc", 7, "D", started=100)
    reading.read()
    clock.now += 25.0
    plant(tmp_path / "proc", 7, "D", started=900)
    assert reading.read().stuck[0].seconds == 0.0


def test_kernel_threads_in_state_d_are_not_reported_as_stuck(tmp_path: Path, clock: Clock) -> None:
    plant(tmp_path / "proc", 9, "D", name="kworker/0:1", flags=_KERNEL_THREAD)
    reading = reader(tmp_path)
    assert reading.read().stuck == ()
    # another process got the pid, which the reader notices after some reads
    plant(tmp_path / "proc", 9, "D", name="python")
    assert [len(reading.read().stuck) for _ in range(40)][-1] == 1


def test_only_old_zombies_are_counted(tmp_path: Path, clock: Clock) -> None:
    plant(tmp_path / "proc", 7, "Z")
    reading = reader(tmp_path)
    assert reading.read().zombies == 0
    clock.now += 301.0
    plant(tmp_path / "proc", 8, "Z")
    assert reading.read().zombies == 1


def test_oldest_of_many_stuck_processes_are_reported(tmp_path: Path, clock: Clock) -> None:
    reading = reader(tmp_path)
    plant(tmp_path / "proc", 999, "D")
    reading.read()
    clock.now += 5.0
    for pid in range(1, 200):
        plant(tmp_path / "proc", pid, "D")
    stuck = reading.read().stuck
    assert len(stuck) == host.MAX_STUCK_PROCESSES
    assert stuck[0].pid == 999


_WAITS_FOR_ITS_CHILD = """
import ctypes, os
calls = ctypes.CDLL(None)
print(os.getpid(), flush=True)
if calls.vfork() == 0:  # the parent sleeps uninterruptibly until its child ends
    calls.sleep(600)
    os._exit(0)
"""


def test_process_that_is_really_stuck_is_reported() -> None:
    argv = [sys.executable, "-c", _WAITS_FOR_ITS_CHILD]
    reading = HostReader(ReaderOptions(mounts=()))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            wait_until(lambda: process.pid in {one.pid for one in reading.read().stuck})
        finally:
            os.killpg(process.pid, signal.SIGKILL)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_host_figures_are_read_in_their_units(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       2048 kB\nMemFree:  1 kB\nMemAvailable:   1024 kB\nHugePages_Total:   0\n",
        "proc/vmstat": "nr_free_pages 1\noom_kill 3\n",
        "proc/loadavg": "1.50 1.00 0.50 1/200 4321\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    data = reader(tmp_path).read()
    assert (data.memory_total, data.memory_available) == (2 << 20, 1 << 20)
    assert (data.oom_kills, data.load, data.governor, data.clock_source) == (3, 1.5, "performance", "tsc")
    assert data.unread == {}


def test_value_that_a_host_lacks_is_unread(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    data = reader(tmp_path).read()
    assert (data.memory_total, data.oom_kills, data.load, data.governor) == (None, None, None, None)
    fields = ("memory_total", "memory_available", "oom_kills", "load", "governor", "clock_source")
    assert data.unread == dict.fromkeys(fields, "not there")


def test_real_host_can_be_read() -> None:
    reading = HostReader(ReaderOptions(mounts=("/",)))
    data = reading.read()
    reading.close()
    assert data.mounts[0].answers
    assert data.memory_total is not None
    assert data.memory_available is not None
    assert 0 < data.memory_available <= data.memory_total
