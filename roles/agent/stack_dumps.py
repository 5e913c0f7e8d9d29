"""What the processes of one step are doing: py-spy's dumps of them, taken by the node's agent.

``py-spy dump --nonblocking`` reads another process's memory and never stops it, so that nobody stays stopped whatever
becomes of us; who hangs does not change while it is read, and for who does not a dump now and then fails. It is a
process of its own with a deadline: reading the memory of one in uninterruptible sleep may itself not return. Local
variables are not asked for: they hold prompts and secrets. Where py-spy cannot, the kernel's word on the main thread
(state, where it waits) is told instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sysconfig
from pathlib import Path

from ...core.processes import AGENT_MODULE, STEP_MODULE, Process, processes
from ...core.types import Incarnation
from ...transport.messages import DumpStacks, Stacks

MAX_PROCESSES = 8
"""of a step, the biggest: ranks and engine workers are, pools of small helpers are not"""
MAX_DUMP_BYTES = 64 * 2**10
"""of one dump: a thousand frames; eight of them fit into one message to the manager (1 MiB)"""
PROC_SCAN_TIMEOUT_S = 2.0
"""s for the look at /proc; it takes some ms, but hangs with a process that is born or dies badly"""
DUMP_TIMEOUT_S = 3.0
"""s for one py-spy; of a role with torch it takes 0.01 s on an idle machine, and 5 MiB (measured)"""
TOTAL_TIMEOUT_S = 4.0
"""s for all of them: the manager waits a little longer before it has the step ended"""
_MAX_CONCURRENT = 2
"""py-spies: what hangs leaves its cores idle, its neighbours do not"""
_KILL_TIMEOUT_S = 0.5
"""s for a py-spy to end on SIGKILL; one in uninterruptible sleep is left to the kernel"""
_MAX_REASON_CHARS = 200
"""characters of py-spy's own words"""
_PYTHON = ("python", "pypy")
_STATES = {"R": "running", "S": "sleeping", "D": "disk sleep", "T": "stopped", "t": "traced", "Z": "zombie"}


async def dump_stacks(launch_file: str, agent: Incarnation, request: DumpStacks, py_spy: str = "") -> Stacks:
    """Dumps of the Python processes of the step that ``launch_file`` began, or why there are none. Raises nothing, and
    returns within :data:`LOOKED_FOR` + :data:`ALL` s and a moment."""
    py_spy = py_spy or str(Path(sysconfig.get_path("scripts")) / "py-spy")
    try:
        async with asyncio.timeout(PROC_SCAN_TIMEOUT_S):
            found = await asyncio.to_thread(_largest_processes, launch_file)
    except TimeoutError:
        return Stacks(agent, request.target, request.id, error=f"/proc was not read within {PROC_SCAN_TIMEOUT_S:g} s")
    if not found:
        return Stacks(agent, request.target, request.id, error="no process of it is left")
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT)
    until = asyncio.get_running_loop().time() + TOTAL_TIMEOUT_S

    async def dump(process: Process) -> str:
        async with semaphore:
            return await _dump_process(process, py_spy, min(DUMP_TIMEOUT_S, until - asyncio.get_running_loop().time()))

    dumps = await asyncio.gather(*map(dump, found))
    return Stacks(agent, request.target, request.id, dict(zip((process.pid for process in found), dumps, strict=True)))


async def _dump_process(process: Process, py_spy: str, within: float) -> str:
    """py-spy's dump of it, or the kernel's word and why there is no more."""
    if not _is_python(process.pid):
        why = "it is not Python"
    else:
        code, out, err = await _run_py_spy([py_spy, "dump", "--nonblocking", "--pid", str(process.pid)], within)
        if code == 0 and "Thread" in out:
            return out
        why = _failure_reason(code, err, within)
    return f"Process {process.pid}: {_name(process.pid)}\nno Python stack: {why}\n{_kernel_state(process.pid)}\n"


async def _run_py_spy(argv: list[str], within: float) -> tuple[int | None, str, str]:
    """Exit code (None: it was too late), the first :data:`MOST_BYTES` of what it wrote, and of what it complained."""
    if within <= 0:
        return None, "", ""
    try:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "RUST_BACKTRACE": "0"}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return 127, "", str(error)
    assert child.stdout is not None and child.stderr is not None  # noqa: PT018
    try:
        async with asyncio.timeout(within):
            out, err = await asyncio.gather(
                _read_up_to(child.stdout, MAX_DUMP_BYTES), _read_up_to(child.stderr, MAX_DUMP_BYTES)
            )
            return await child.wait(), out, err
    except TimeoutError:
        return None, "", ""
    finally:
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await child.wait()


async def _read_up_to(stream: asyncio.StreamReader, limit: int) -> str:
    """Its text to the end; what is beyond ``most`` bytes is read and dropped."""
    content = b""
    while data := await stream.read(2**16):
        content += data[: limit - len(content)]
    return content.decode("utf-8", "ignore")  # a cut may go through a character


def _failure_reason(code: int | None, err: str, within: float) -> str:
    if code is None:
        return f"py-spy did not finish within {max(within, 0.0):.3g} s"
    if "denied" in err.lower() or "not permitted" in err.lower():
        return "py-spy may not look into it (ptrace: kernel.yama.ptrace_scope, or another user's process)"
    lines = [line.strip() for line in err.splitlines() if line.strip() and "backtrace" not in line.lower()]
    return f"py-spy: {' '.join(lines)[:_MAX_REASON_CHARS] or f'exit code {code}'}"


# ── which processes, and what the kernel says of them ──────────────────────────────────────────────────────────────
def _largest_processes(launch_file: str) -> list[Process]:
    """The biggest of the step, Python before others; without its first process, which only waits."""
    steps = os.path.dirname(launch_file)
    theirs = [
        process for process in processes(steps)
        if process.launch == launch_file and process.module not in (STEP_MODULE, AGENT_MODULE)
    ]  # fmt: skip
    python = [process for process in theirs if _is_python(process.pid)]
    biggest = sorted(python or theirs, key=lambda process: -_resident(process.pid))[:MAX_PROCESSES]
    return sorted(biggest, key=lambda process: (process.started, process.pid))


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:  # gone, or not ours to look at: py-spy will say it better
        return Path(f"/proc/{pid}").exists()
    return name.startswith(_PYTHON) or _embeds_python(pid)


def _embeds_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libpython" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    return False


def _resident(pid: int) -> int:
    """Pages in memory; 0 when it is gone."""
    return int((_read(pid, "statm").split() or ["0", "0"])[1])


def _name(pid: int) -> str:
    return _read(pid, "comm").strip() or "gone"


def _kernel_state(pid: int) -> str:
    """State of the main thread, the system call that it is in and where in the kernel it waits, as far as that may be
    read; :func:`rrl.health.detection.attribution.stack_groups.parse` reads it."""
    stat = _read(pid, "stat")
    if not stat:
        return "it has ended"
    state = stat[stat.rindex(")") + 2 :][:1]
    call = (_read(pid, "syscall").split() or ["unknown"])[0]
    where = _read(pid, "wchan").strip()
    return f"state {state} ({_STATES.get(state, 'other')}), system call {call}; kernel: {where.strip('0') or 'unknown'}"


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""
