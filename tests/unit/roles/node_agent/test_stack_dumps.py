"""Stack dumps of a step by the agent: real processes, the real py-spy, and substitutes that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rrl.core.launch import LAUNCH_ENV
from rrl.core.processes import STEP_ENV, STEP_MODULE, stat_fields
from rrl.core.types import Incarnation, ReplicaId
from rrl.health.detection.attribution.stack_groups import group, main_thread, parse, summary_lines
from rrl.roles.node_agent import stack_dumps
from rrl.roles.node_agent.stack_dumps import MAX_DUMP_BYTES, MAX_PROCESSES, dump_stacks
from rrl.tests.support.listening_manager import Lab, eventually
from rrl.tests.support.roles.agent_node import node
from rrl.transport.control.sockets import MANAGER_BOUNDS, encode_frame
from rrl.transport.messages import DumpStacks, Stacks

AGENT = Incarnation(ReplicaId("agent/n1"), 1)
SUSPECT = Incarnation(ReplicaId("rollout/1"), 3)
WEDGED = """
import sys, threading
def wedged_here():
    print("here", flush=True)
    threading.Event().wait()
def roll():
    wedged_here()
roll()
"""
READS_AND_WAITS = "import sys; print('here', flush=True); sys.stdin.read()"


@contextmanager
def process(tmp_path: Path, *argv: str, code: str = "", cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process of the step ``rollout``, and yield it once it has printed that it runs."""
    env = {"PATH": os.defpath, LAUNCH_ENV: str(launch_file(tmp_path)), STEP_ENV: "1.1"}
    command = list(argv) or [sys.executable, "-c", code]
    child = subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def launch_file(tmp_path: Path) -> Path:
    return tmp_path / "steps" / "rollout.launch"


def taken(tmp_path: Path, py_spy: str = "") -> Stacks:
    order = DumpStacks(SUSPECT, "rollout", 5)
    return asyncio.run(dump_stacks(str(launch_file(tmp_path)), AGENT, order, py_spy))


def stand_in(tmp_path: Path, script: str) -> str:
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_dump_of_a_hung_process_names_the_blocking_call(tmp_path: Path) -> None:
    with process(tmp_path, code=WEDGED) as child:
        answer = taken(tmp_path)
        assert (answer.incarnation, answer.target, answer.id, answer.error) == (AGENT, SUSPECT, 5, "")
        assert list(answer.dumps) == [child.pid]
        assert child.poll() is None, "the dump has ended the process"
    main = main_thread(answer.dumps[child.pid])
    assert main is not None
    names = [frame.function for frame in main.frames]
    assert names[-3:] == ["wedged_here", "roll", "<module>"]
    assert "wedged_here (<string>:5)" in summary_lines(group({SUSPECT: answer.dumps}))[0]


def test_stopped_process_is_dumped_and_stays_stopped(tmp_path: Path) -> None:
    with process(tmp_path, code=WEDGED) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        answer = taken(tmp_path)
        assert Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "T"
    assert "wedged_here" in answer.dumps[child.pid]


def test_only_commands_of_the_step_are_dumped_without_its_first_process(tmp_path: Path) -> None:
    (tmp_path / STEP_MODULE).write_text("echo here; read forever\n")
    first = (
        "sh",
        "-m",
        STEP_MODULE,
        str(launch_file(tmp_path)),
    )  # the arguments by which the agent recognises a first process
    with (
        process(tmp_path, *first, cwd=tmp_path),
        process(tmp_path, code=WEDGED) as ours,
        process(tmp_path, code=READS_AND_WAITS) as also_ours,
        process(tmp_path / "other", code=WEDGED),
    ):
        assert set(taken(tmp_path).dumps) == {ours.pid, also_ours.pid}


def test_step_without_python_is_reported_by_its_kernel_state(tmp_path: Path) -> None:
    with process(tmp_path, "/bin/sh", "-c", "echo here; read forever") as child:
        while stat_fields(child.pid)[0] != b"S":  # until the process waits for its input
            time.sleep(0.01)
        answer = taken(tmp_path)
    dump = answer.dumps[child.pid]
    assert "no Python stack: the process is not Python" in dump
    assert parse(dump)[0].state == "S"


def test_step_without_processes_is_answered_with_the_reason(tmp_path: Path) -> None:
    assert taken(tmp_path) == Stacks(AGENT, SUSPECT, 5, error="the step has no process left")


def test_py_spy_without_permission_is_explained_and_replaced_by_kernel_state(tmp_path: Path) -> None:
    denied = stand_in(tmp_path, "echo 'Error: Permission Denied: Try running again with sudo' >&2; exit 1")
    with process(tmp_path, code=WEDGED) as child:
        dump = taken(tmp_path, denied).dumps[child.pid]
    assert "py-spy may not read the process (ptrace" in dump
    assert parse(dump)[0].frames[0].function == "kernel"


def test_hung_py_spy_is_killed_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "DUMP_TIMEOUT_S", 0.3)
    hangs = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    with process(tmp_path, code=WEDGED) as child:
        dump = taken(tmp_path, hangs).dumps[child.pid]
    assert "py-spy did not finish within 0.3 s" in dump
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_missing_py_spy_is_reported(tmp_path: Path) -> None:
    with process(tmp_path, code=WEDGED) as child:
        assert "no Python stack: py-spy: " in taken(tmp_path, str(tmp_path / "nowhere")).dumps[child.pid]


def test_huge_dump_is_truncated(tmp_path: Path) -> None:
    huge = stand_in(tmp_path, "echo 'Thread 1 (idle): \"MainThread\"'; exec head -c 5000000 /dev/zero")
    with process(tmp_path, code=WEDGED) as child:
        assert len(taken(tmp_path, huge).dumps[child.pid]) == MAX_DUMP_BYTES


def test_largest_of_many_processes_are_dumped(tmp_path: Path) -> None:
    code = f"grown = bytearray(b'x') * 2**26\n{READS_AND_WAITS}"
    quick = stand_in(tmp_path, "echo Thread 1")
    with ExitStack() as step:
        big = step.enter_context(process(tmp_path, code=code))
        for _ in range(MAX_PROCESSES):
            step.enter_context(process(tmp_path, code=READS_AND_WAITS))
        dumps = taken(tmp_path, quick).dumps
    assert len(dumps) == MAX_PROCESSES
    assert big.pid in dumps


def test_largest_answer_fits_into_one_message_to_the_manager() -> None:
    dumps = dict.fromkeys(range(MAX_PROCESSES), "x" * MAX_DUMP_BYTES)
    assert len(encode_frame(1, None, Stacks(AGENT, SUSPECT, 5, dumps))) < MANAGER_BOUNDS.max_frame_bytes


async def test_agent_dumps_a_step_of_its_node_while_its_heartbeats_continue(at: Lab) -> None:
    async with node(at) as lab_node:
        suspect, command = await lab_node.step(sys.executable, "-c", WEDGED)
        await lab_node.wait_for_steps(suspect)
        await eventually(lambda: "here" in at.log(suspect), "the wedged process")
        await lab_node.manager.send(lab_node.launch.incarnation, DumpStacks(suspect.incarnation, suspect.tag, 9))
        answer = await lab_node.manager.wait_for(Stacks)
        assert (answer.incarnation, answer.target, answer.id) == (lab_node.launch.incarnation, suspect.incarnation, 9)
        assert "wedged_here" in answer.dumps[command.pid]
        await lab_node.wait_for_steps(suspect)
