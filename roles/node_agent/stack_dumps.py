"""Dump the Python stacks of a step's processes with py-spy, in the agent of the step's node.

``py-spy dump --nonblocking`` never pauses the target, so a crash of the agent cannot leave it stopped. A hung process
does not change while it is read; a dump of a running process may occasionally fail. Each py-spy has a deadline, because
a read of the memory of a process in uninterruptible sleep may not return. Local variables are not dumped, because they
may contain prompts and secrets. If py-spy fails, the kernel's state of the main thread is reported instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sysconfig
from pathlib import Path

from ...core.command_runner import CommandResult, run_async
from ...core.processes import AGENT_MODULE, STEP_MODULE, Process, command_name, processes, stat_fields
from ...core.types import Incarnation
from ...transport.messages import DumpStacks, Stacks

MAX_PROCESSES = 8
"""Maximum number of processes dumped per step: the largest processes, which are ranks and engine workers."""
MAX_DUMP_BYTES = 64 * 2**10
"""Maximum size of one dump in bytes: about a thousand frames. Eight dumps fit into one message to the manager (1
MiB)."""
PROC_SCAN_TIMEOUT_S = 2.0
"""Timeout (s) of the scan of /proc. A scan takes some ms, but may hang on a process that is stuck in exec or exit."""
DUMP_TIMEOUT_S = 3.0
"""Timeout (s) of one py-spy process. For a role with torch, py-spy takes 5 MiB and, on an idle machine, 0.01 s
(measured)."""
TOTAL_TIMEOUT_S = 4.0
"""Timeout (s) of all dumps of a step. The manager waits a little longer before it ends the step."""
_MAX_CONCURRENT = 2
"""Maximum number of concurrent py-spy processes. The limit exists because other roles on the node need the cores."""
_MAX_REASON_CHARS = 200
"""Maximum number of characters of py-spy's error output that are reported."""
_PYTHON = ("python", "pypy")
"""Prefixes of the names of Python interpreters."""
_STATES = {"R": "running", "S": "sleeping", "D": "disk sleep", "T": "stopped", "t": "traced", "Z": "zombie"}


async def dump_stacks(launch_file: str, agent: Incarnation, request: DumpStacks, py_spy: str = "") -> Stacks:
    """Dump the Python processes of the step of ``launch_file``, or report why there is no dump.

    The call raises nothing and returns within little more than :data:`PROC_SCAN_TIMEOUT_S` + :data:`TOTAL_TIMEOUT_S`.
    """
    py_spy = py_spy or str(Path(sysconfig.get_path("scripts")) / "py-spy")
    try:
        async with asyncio.timeout(PROC_SCAN_TIMEOUT_S):
            targets = await asyncio.to_thread(_largest_processes, launch_file)
    except TimeoutError:
        return Stacks(agent, request.target, request.id, error=f"/proc was not read within {PROC_SCAN_TIMEOUT_S:g} s")
    if not targets:
        return Stacks(agent, request.target, request.id, error="the step has no process left")
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT)
    until = asyncio.get_running_loop().time() + TOTAL_TIMEOUT_S

    async def dump(process: Process) -> str:
        async with semaphore:
            return await _dump_process(process, py_spy, min(DUMP_TIMEOUT_S, until - asyncio.get_running_loop().time()))

    dumps = await asyncio.gather(*map(dump, targets))
    return Stacks(
        agent, request.target, request.id, dict(zip((process.pid for process in targets), dumps, strict=True))
    )


async def _dump_process(process: Process, py_spy: str, within: float) -> str:
    """Return py-spy's dump of a process or, if py-spy fails, the reason and the kernel's state of the process."""
    if not _is_python(process.pid):
        why = "the process is not Python"
    else:
        try:
            result = await _run_py_spy([py_spy, "dump", "--nonblocking", "--pid", str(process.pid)], within)
        except TimeoutError:
            why = f"py-spy did not finish within {max(within, 0.0):.3g} s"
        except OSError as error:
            why = f"py-spy: {error}"
        else:
            if result.code == 0 and "Thread" in result.out:
                return result.out
            why = _failure_reason(result)
    name = command_name(process.pid) or "gone"
    return f"Process {process.pid}: {name}\nno Python stack: {why}\n{_kernel_state(process.pid)}\n"


async def _run_py_spy(argv: list[str], within: float) -> CommandResult:
    """Run py-spy for at most ``within`` seconds. Raises TimeoutError, and OSError if py-spy cannot be started."""
    if within <= 0:
        raise TimeoutError
    env = {"PATH": os.defpath, "RUST_BACKTRACE": "0"}
    return await run_async(argv, within, env=env, max_output_bytes=MAX_DUMP_BYTES)


def _failure_reason(result: CommandResult) -> str:
    if "denied" in result.err.lower() or "not permitted" in result.err.lower():
        return "py-spy may not read the process (ptrace refused: kernel.yama.ptrace_scope, or another user's process)"
    lines = [line.strip() for line in result.err.splitlines() if line.strip() and "backtrace" not in line.lower()]
    return f"py-spy: {' '.join(lines)[:_MAX_REASON_CHARS] or f'exit code {result.code}'}"


# ── selection of processes, and their kernel state ─────────────────────────────────────────────────────────────────
def _largest_processes(launch_file: str) -> list[Process]:
    """Return the step's largest Python processes, or its largest processes if none of them is a Python process.

    The step's first process is never returned.
    """
    steps = os.path.dirname(launch_file)
    of_step = [
        process
        for process in processes(steps)
        if process.launch == launch_file and process.module not in (STEP_MODULE, AGENT_MODULE)
    ]
    python = [process for process in of_step if _is_python(process.pid)]
    largest = sorted(python or of_step, key=lambda process: -_resident(process.pid))[:MAX_PROCESSES]
    return sorted(largest, key=lambda process: (process.started, process.pid))


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:  # the process has ended or belongs to another user; py-spy reports the reason
        return Path(f"/proc/{pid}").exists()
    return name.startswith(_PYTHON) or _embeds_python(pid)


def _embeds_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libpython" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def _resident(pid: int) -> int:
    """Return the number of resident pages of a process; 0 if it has ended."""
    return int((_read(pid, "statm").split() or ["0", "0"])[1])


def _kernel_state(pid: int) -> str:
    """Return the state of the main thread, its system call and its position in the kernel, if they can be read.

    :func:`rrl.health.detection.attribution.stack_groups.parse` parses this text.
    """
    try:
        state = stat_fields(pid)[0].decode()
    except OSError:
        return "the process has ended"
    call = (_read(pid, "syscall").split() or ["unknown"])[0]
    where = _read(pid, "wchan").strip()
    return f"state {state} ({_STATES.get(state, 'other')}), system call {call}; kernel: {where.strip('0') or 'unknown'}"


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""
