"""The launcher, the first process of a role's step: ``python -m rrl.roles.launcher.step FILE``.

It requests admission from the manager, starts the role's command in a session of its own, and keeps the command's log.
At the end it writes an exit record, and reports the exit to the manager. No process of the command outlives the
launcher, even if the launcher ends because of SIGTERM, SIGKILL or the end of its parent. A command that was admitted
continues without a manager.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from signal import SIGKILL, SIGTERM

from ...core.launch import INVALID_CONFIG_CODE, ExitReason, InvalidConfig, Launch, Raised, read_end_report, read_launch
from ...core.log_lines import LOG_LEVEL_ENV, start_logging
from ...core.run_dir import OwnPath
from ...core.text import exit_invalid_config
from ...core.types import DEFAULT_LOG_LEVEL
from .activity import report_activity
from .environment import node_environment, raise_limits
from .first_process import StepSupervisor
from .gpu_memory import wait_until_free
from .logs.files import RotatingLog
from .logs.pump import LogPump
from .process_group import ProcessGroup, command_env, end_descendants, lower_priority
from .setup_command import SetupCommand

_log = logging.getLogger("rrl.launcher")

KILL_TIMEOUT_BEFORE_REPORT_S = 0.5
"""Timeout (s) for the end of killed descendants before the exit is reported. They usually end within some ms; a process
that hangs in the kernel must not delay the recovery."""
KILL_TIMEOUT_BEFORE_EXIT_S = 10.0
"""Timeout (s) for the end of killed descendants before the launcher exits and leaves them to the agent."""


def main() -> int:
    """Run the step of the launch file in ``sys.argv``; return the exit code of this process."""
    if len(sys.argv) != 2:
        exit_invalid_config("usage: python -m rrl.roles.launcher.step FILE.launch")
    raise_limits()
    launch_file = os.path.abspath(sys.argv[1])
    launch = read_launch(OwnPath(launch_file))
    start_logging(launch.env.get(LOG_LEVEL_ENV, DEFAULT_LOG_LEVEL))
    return asyncio.run(_run(launch, launch_file))


async def _run(launch: Launch, launch_file: str) -> int:
    supervisor = StepSupervisor(launch, launch_file)
    async with supervisor.running():
        if not await supervisor.request_admission():
            await supervisor.finish(None, None, supervisor.stop_reason or ExitReason.STOPPED, supervisor.stop_detail)
            return 0
        occupied = await wait_until_free(supervisor)
        if supervisor.stop_reason is not None:  # a stop was requested during the wait
            await supervisor.finish(None, None, supervisor.stop_reason, supervisor.stop_detail)
            return 0
        if occupied:
            await supervisor.finish(None, None, ExitReason.GPUS_OCCUPIED, occupied)
            return 127
        try:
            setup, log = _start(supervisor)
        except OSError as error:
            await supervisor.finish(None, None, ExitReason.NOT_STARTED, str(error))
            return 127
        command = setup.group
        async with report_activity(supervisor, command.pid, setup.started):
            await _wait_until_ended(supervisor, command)
        command.kill(SIGKILL)  # ends the rest of the group, before reaping frees the leader's pid
        code, number = command.reap()
        left = end_descendants(supervisor.process, KILL_TIMEOUT_BEFORE_REPORT_S)
        if (failure := setup.failure_reason()) and supervisor.stop_reason is None:
            await supervisor.finish(None, None, ExitReason.NOT_STARTED, failure)
        else:
            await _report_end(supervisor, log, code, number)
        if left and (left := end_descendants(supervisor.process, KILL_TIMEOUT_BEFORE_EXIT_S)):
            _log.error(
                "these processes did not end after SIGKILL, and are left to the agent of this node: %s",
                [process.pid for process in left],
            )
        await asyncio.to_thread(log.finish)
    return code if code is not None else 128 + (number or 0)


async def _report_end(supervisor: StepSupervisor, log: LogPump, code: int | None, number: int | None) -> None:
    """Report how the command ended: by exit code ``code`` or signal ``number``, and why according to its end report."""
    file = supervisor.run.end_report_file(supervisor.launch.tag)
    report = await asyncio.to_thread(read_end_report, file) if code else None
    if isinstance(report, InvalidConfig) and code == INVALID_CONFIG_CODE and supervisor.stop_reason is None:
        reason = ExitReason.INPUT_CHANGED if report.input_changed else ExitReason.INVALID_CONFIG
        await supervisor.finish(code, None, reason, report.message)
        return
    exception = report.exception if isinstance(report, Raised) else None
    folder = Path(supervisor.launch.cwd) if exception is None else None  # a reported exception already names its place
    last_line = await asyncio.to_thread(log.last_line, folder) if code else ""
    reason = supervisor.stop_reason or (ExitReason.EXITED if number is None else ExitReason.SIGNALED)
    await supervisor.finish(code, number, reason, supervisor.stop_detail, last_line, exception)


def _start(supervisor: StepSupervisor) -> tuple[SetupCommand, LogPump]:
    """Start the command and its log. Raises OSError."""
    launch = supervisor.launch
    reader, writer = os.pipe()
    try:
        env = command_env(node_environment(launch), supervisor.launch_file, supervisor.process)
        setup = SetupCommand(launch.setup, launch.argv, env, launch.cwd, writer)
        if launch.standby:
            lower_priority(setup.group.pid)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    log = LogPump(reader, RotatingLog(supervisor.run.log_file(launch.tag)))
    log.start()
    return setup, log


async def _wait_until_ended(supervisor: StepSupervisor, command: ProcessGroup) -> None:
    """Wait until the command has ended. After a stop request send SIGTERM, and SIGKILL at the deadline."""
    command.ended.add_done_callback(lambda _: supervisor.wakeup.set())
    await supervisor.wait_for(command.ended.done)
    if not command.ended.done() and supervisor.deadline > asyncio.get_running_loop().time():
        command.kill(SIGTERM)
    while not command.ended.done():
        supervisor.wakeup.clear()
        try:
            async with asyncio.timeout_at(supervisor.deadline):
                await supervisor.wakeup.wait()
        except TimeoutError:
            command.kill(SIGKILL)
            await command.ended


if __name__ == "__main__":
    sys.exit(main())
