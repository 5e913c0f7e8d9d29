"""The log of a step's role: its file and its telling, started together and ended in order."""

from __future__ import annotations

from functools import partial

from rrl.roles.log_pump import LogPump
from rrl.roles.logs import RotatingLog
from rrl.roles.shipping import Shipper
from rrl.spec.launch import Launch
from rrl.spec.rundir import RunDir
from rrl.transport.control import Address
from rrl.transport.keys import RunKeys

LOG_TAIL = 1.0
"""s for the rest of the log to be written: storage may hang"""
LAST_LINE = 1.0
"""s for the pipe of a command that has ended to be emptied: somebody may have inherited it"""
TOLD_WITHIN = 1.0
"""s for the manager to take the end of a log whose file is complete"""
UNSAVED_WITHIN = 5.0
"""s for a manager to be there and take what the file lacks: nobody else has it"""


class RoleLog:
    """What comes out of the pipe ``fd``, until :meth:`finish`."""

    def __init__(self, run: RunDir, keys: RunKeys, launch: Launch, fd: int) -> None:
        self._shipper = Shipper(
            launch.life, keys, partial(Address.read, run.collector), lambda: self._pump.busy, lambda: self._pump.stuck
        )
        file = RotatingLog(run.log_file(launch.tag))
        self._pump = LogPump(fd, file, self._shipper.lines, self._shipper.news)

    def start(self) -> None:
        self._pump.start()
        self._shipper.start()

    def last_line(self) -> str:
        """Of what the command wrote, which has ended (blocking: some s at most)."""
        return self._pump.last_line(LAST_LINE)

    def finish(self) -> None:
        """Write and tell the rest (blocking: some s where storage or the manager are away)."""
        saved = self._pump.finish(LOG_TAIL)
        if not saved:
            self._shipper.finish(True, UNSAVED_WITHIN)
        elif self._shipper.connected:
            self._shipper.finish(False, TOLD_WITHIN)
