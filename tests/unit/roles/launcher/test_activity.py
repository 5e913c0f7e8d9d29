"""A command without the worker API is monitored by its activity."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from rrl.core.processes import Process
from rrl.core.run_dir import write_atomically
from rrl.roles.launcher.activity import Usage, has_worked, usage
from rrl.roles.node_agent.load_sampler import StepLoadSampler
from rrl.tests.support.listening_manager import Lab, eventually
from rrl.transport.messages import FirstWorkDone, Heartbeat, Hello, Load

ME = (4242, 77)
HZ = 100


@pytest.mark.parametrize(("ticks", "written", "expected"), [(0, 0, False), (1, 0, False), (3, 0, True), (0, 1, True)])
def test_work_is_cpu_time_above_a_hundredth_of_a_core_or_any_write(ticks: int, written: int, expected: bool) -> None:
    before, now = {ME: Usage(500, 9000)}, {ME: Usage(500 + ticks, 9000 + written)}
    assert has_worked(before, now, 2.0, HZ) is expected


def test_new_process_counts_from_zero_and_an_ended_one_is_dropped() -> None:
    assert has_worked({ME: Usage(900, 0)}, {(1, 1): Usage(50, 0)}, 2.0, HZ)
    assert not has_worked({ME: Usage(900, 0), (1, 1): Usage(50, 0)}, {(1, 1): Usage(50, 0)}, 2.0, HZ)


def test_usage_covers_live_processes_only() -> None:
    (used,) = usage([os.getpid(), 2**22 + 1]).values()
    assert used.ticks > 0
    assert used.written > 0


PTRACE_ATTACH = 16
"""Request number of ptrace(2)."""


@pytest.mark.parametrize("by_tracer", [False, True])
def test_usage_shows_whether_a_process_is_stopped(by_tracer: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not one_usage(process.pid).stopped
            if not by_tracer:
                process.send_signal(signal.SIGSTOP)
            elif ctypes.CDLL(None).ptrace(PTRACE_ATTACH, process.pid, 0, 0):
                pytest.skip("this machine forbids ptrace of a child")
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert one_usage(process.pid).stopped
        finally:
            os.kill(process.pid, signal.SIGKILL)  # process.kill() takes a child that this process traces for ended


def test_load_of_a_step_shows_a_stopped_process() -> None:
    sampler = StepLoadSampler(lambda path: "tag" if path == "launch" else None)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            step = Process(process.pid, 1, 1, 1, launch="launch")
            assert sampler.sample([step], None, 10.0) == ()
            assert sampler.sample([step], None, 12.0) == (Load("tag", 0.0),)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert sampler.sample([step], None, 14.0) == (Load("tag", 0.0, stopped=True),)
        finally:
            process.kill()


def one_usage(pid: int) -> Usage:
    (used,) = usage([pid]).values()
    return used


PROGRAM = "import os, time\nwhile True: time.sleep(0.05); os.path.exists('go') and print('on', flush=True)"
HEARTBEATS_PER_SAMPLE = 5
"""Number of heartbeats within which a sample is taken: heartbeats are 0.1 s apart, and samples 0.4 s."""


async def test_working_command_makes_progress_and_a_waiting_one_does_not(at: Lab) -> None:
    async with at.manager() as manager:
        go = at.run.path / "go"
        go.touch()
        launch = msgspec.structs.replace(
            at.launch(sys.executable, "-c", PROGRAM, env={"RRL_HEARTBEAT_INTERVAL": "0.1"}), watch="activity"
        )
        write_atomically(at.run.launch_file(launch.tag), msgspec.json.encode(launch))
        at.start(launch, patch="from rrl.roles.launcher import activity; activity.SAMPLE_INTERVAL_S = 0.4")

        def heartbeats() -> list[int]:
            return [message.done for message in manager.received if isinstance(message, Heartbeat)]

        hello = await manager.wait_for(Hello)
        assert (hello.incarnation, hello.phase) == (launch.incarnation, "rollout")
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.done >= 2)
        assert any(isinstance(message, FirstWorkDone) for message in manager.received)
        go.unlink()
        await eventually(lambda: len(set(heartbeats()[-3 * HEARTBEATS_PER_SAMPLE :])) == 1, "a standstill")
        (at.run.path / "go").touch()
        still = heartbeats()[-1]
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.done > still)
