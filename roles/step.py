"""``python -m rrl.roles.step FILE``: the first process of every step.

It asks the manager whether it is wanted, starts the role's command in a session of its own, keeps its log, and whatever
happens to either of them, nothing of the command outlives it: not by SIGTERM, not by the launcher's death, not by a
kill -9 of this process. It leaves an exit record and tells the manager. Without a manager it goes on.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
from pathlib import Path
from signal import SIGKILL, SIGTERM

from rrl.roles.first import FirstProcess
from rrl.roles.logs import RotatingLog, pump
from rrl.roles.processes import ProcessGroup, command_env, end_descendants
from rrl.spec.launch import Launch, read_launch

BEFORE_TELLING = 0.5
"""s for killed descendants to end before the exit is told: normally some ms; one that hangs in the kernel must not
delay the repair"""
BEFORE_LEAVING = 10.0
"""s for killed descendants to end before we leave them to the agent"""
LOG_TAIL = 1.0
"""s for the rest of the log to be written: storage may hang"""
_FROM_LAUNCHER = ("SLURM_JOB_ID", "SLURM_STEP_ID", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""what Slurm gave this step and the manager could not know; what the launch file says wins"""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m rrl.roles.step FILE.launch", file=sys.stderr)
        return 2
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # core dumps of a model fill the home
    launch_file = os.path.abspath(sys.argv[1])
    return asyncio.run(_live(read_launch(Path(launch_file)), launch_file))


async def _live(launch: Launch, launch_file: str) -> int:
    first = FirstProcess(launch, launch_file)
    async with first.running():
        if not await first.admission():
            await first.finish(None, None, first.why or "asked")
            return 0
        try:
            command, log = _start(first)
        except OSError as error:
            await first.finish(None, None, f"not started: {error}")
            return 127
        await _until_ended(first, command)
        command.kill(SIGKILL)  # the rest of its group, before the leader's pid is free for others
        code, number = command.reap()
        left = end_descendants(first.me, BEFORE_TELLING)
        await first.finish(code, number, first.why or ("exited" if number is None else "signalled"))
        if left and (left := end_descendants(first.me, BEFORE_LEAVING)):
            print(f"rrl: do not end on SIGKILL: {[process.pid for process in left]}", file=sys.stderr)
        await asyncio.to_thread(log.join, LOG_TAIL)
    return code if code is not None else 128 + (number or 0)


def _start(first: FirstProcess) -> tuple[ProcessGroup, threading.Thread]:
    """The command, and the thread that writes its log. Raises OSError."""
    launch = first.launch
    given = {name: os.environ[name] for name in _FROM_LAUNCHER if name in os.environ}
    reader, writer = os.pipe()
    try:
        env = command_env(given | launch.env, first.launch_file, first.me)
        command = ProcessGroup.start(launch.argv, env, launch.cwd, writer)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    log = RotatingLog(first.run.log_file(launch.tag))
    thread = threading.Thread(target=pump, args=(reader, log), name="log", daemon=True)
    thread.start()
    return command, thread


async def _until_ended(first: FirstProcess, command: ProcessGroup) -> None:
    """Returns when the command has ended; once there is a reason to leave: SIGTERM, the grace, SIGKILL."""
    command.ended.add_done_callback(lambda _: first.news.set())
    await first.until(command.ended.done)
    if not command.ended.done() and first.by > asyncio.get_running_loop().time():
        command.kill(SIGTERM)
    while not command.ended.done():
        first.news.clear()
        try:
            async with asyncio.timeout_at(first.by):
                await first.news.wait()
        except TimeoutError:
            command.kill(SIGKILL)
            await command.ended


if __name__ == "__main__":
    sys.exit(main())
