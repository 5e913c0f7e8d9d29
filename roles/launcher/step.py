"""``python -m rrl.roles.launcher.step FILE``: the first process of every step.

It asks the manager whether it is wanted, starts the role's command in a session of its own, keeps its log, and whatever
happens to either of them, nothing of the command outlives it: not by SIGTERM, not by the launcher's death, not by a
kill -9 of this process. It leaves an exit record and tells the manager. Without a manager it goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from signal import SIGKILL, SIGTERM

from ...core.launch import ExitReason, Launch, read_launch
from ...core.log_lines import LOG_LEVEL_ENV, start_logging
from ...core.run_spec import DEFAULT_LOG_LEVEL
from ...core.text import refuse
from .activity import spoken_for
from .environment import on_this_node, raise_limits
from .first_process import FirstProcess
from .gpu_memory import no_room
from .logs.pump import RoleLog
from .process_group import ProcessGroup, command_env, end_descendants, make_way
from .setup_command import SetUp

_log = logging.getLogger("rrl.launcher")

BEFORE_TELLING = 0.5
"""s for killed descendants to end before the exit is told: normally some ms; one that hangs in the kernel must not
delay the repair"""
BEFORE_LEAVING = 10.0
"""s for killed descendants to end before we leave them to the agent"""


def main() -> int:
    if len(sys.argv) != 2:
        refuse("usage: python -m rrl.roles.launcher.step FILE.launch")
    raise_limits()
    launch_file = os.path.abspath(sys.argv[1])
    launch = read_launch(Path(launch_file))
    start_logging(launch.env.get(LOG_LEVEL_ENV, DEFAULT_LOG_LEVEL))
    return asyncio.run(_live(launch, launch_file))


async def _live(launch: Launch, launch_file: str) -> int:
    first = FirstProcess(launch, launch_file)
    async with first.running():
        if not await first.admission():
            await first.finish(None, None, first.reason or ExitReason.STOPPED, first.detail)
            return 0
        held = await no_room(first)
        if first.reason is not None:  # meanwhile
            await first.finish(None, None, first.reason, first.detail)
            return 0
        if held:
            await first.finish(None, None, ExitReason.GPUS_OCCUPIED, held)
            return 127
        try:
            setup, log = _start(first)
        except OSError as error:
            await first.finish(None, None, ExitReason.NOT_STARTED, str(error))
            return 127
        command = setup.group
        async with spoken_for(first, command.pid, setup.begun):
            await _until_ended(first, command)
        command.kill(SIGKILL)  # the rest of its group, before the leader's pid is free for others
        code, number = command.reap()
        left = end_descendants(first.me, BEFORE_TELLING)
        if (trouble := setup.trouble()) and first.reason is None:
            await first.finish(None, None, ExitReason.NOT_STARTED, trouble)
        else:
            said = await asyncio.to_thread(log.last_line) if code else ""
            reason = first.reason or (ExitReason.EXITED if number is None else ExitReason.SIGNALED)
            await first.finish(code, number, reason, first.detail, said)
        if left and (left := end_descendants(first.me, BEFORE_LEAVING)):
            _log.error("processes do not end on SIGKILL: %s", [process.pid for process in left])
        await asyncio.to_thread(log.finish)
    return code if code is not None else 128 + (number or 0)


def _start(first: FirstProcess) -> tuple[SetUp, RoleLog]:
    """The command, and its log. Raises OSError."""
    launch = first.launch
    reader, writer = os.pipe()
    try:
        env = command_env(on_this_node(launch), first.launch_file, first.me)
        setup = SetUp(launch.setup, launch.argv, env, launch.cwd, writer)
        if launch.standby:
            make_way(setup.group.pid)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    log = RoleLog(first.run, first.keys, launch, reader)
    log.start()
    return setup, log


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
