"""What the first process of every step does, be it the launcher of a role or the agent: ask whether it is wanted, obey,
watch its own launcher, and leave an exit record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...core.launch import ExitReason, ExitRecord, Launch, exit_text
from ...core.processes import look
from ...core.run_dir import RunDir, write_atomically
from ...core.types import NodeName
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.messages import Admitted, Down, Fenced, StepExit, Stop, Wanted
from .process_group import adopt_orphans

_log = logging.getLogger("rrl.launcher")

ADMISSION = 60.0
"""s to wait for the answer to Wanted: a manager that dies at the launch is replaced within its lease (10 s) and its own
start; after that the next manager launches anew, under another tag"""
LAST_WORDS = 2.0
"""s for a manager to be there to hear StepExit; the record on disk is the truth"""


class FirstProcess:
    """The first process of one step. ``reason`` is None until there is a reason to leave; the first reason stands, and
    each later one can only shorten the time that is left (``by``, of the loop's clock). ``news`` is set at every
    change."""

    def __init__(self, launch: Launch, launch_file: str) -> None:
        me = look(os.getpid())
        assert me is not None  # we are alive
        self.launch, self.launch_file, self.me = launch, launch_file, me
        self.run = RunDir(Path(launch.run_dir))
        self.node = NodeName(os.environ.get("SLURMD_NODENAME", launch.node))
        self.steps = os.path.dirname(launch_file)
        """the folder of launch files as the manager spells it: marks are compared as text"""
        self.reason: ExitReason | None = None
        self.detail = ""
        """more about ``reason``, for people"""
        self.by = float("inf")
        self.news = asyncio.Event()
        self.greet: Callable[[], Sequence[Any]] = tuple
        """what a (new) manager must know, beyond Wanted"""
        self.hear: Callable[[Any], None] = lambda message: None
        """takes what the manager says beyond Admitted, and beyond Stop and Fenced of this life"""
        self._told: StepExit | None = None
        self._admitted = False
        self._double = False
        """another process lives under our tag"""
        self._greeted = asyncio.Event()
        try:
            self.keys = RunKeys.load(self.run.keys)
        except OSError as error:
            reason, detail = ExitReason.NOT_STARTED, str(error)
            _leave_record(launch, ExitRecord(
                launch.tag, launch.life, self.node, None, None, reason, time.time(), detail=detail
            ))  # fmt: skip
            raise
        self.dialer = Dialer(self.keys, Down, self._find_manager, self._hello)

    def leave(self, reason: ExitReason, grace: float, detail: str = "") -> None:
        """End within ``grace`` s. ``detail`` says more about the reason, for people."""
        if self.reason is None:
            self.reason, self.detail = reason, detail
        self.by = min(self.by, asyncio.get_running_loop().time() + grace)
        self.news.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Signals, launcher and manager are heard inside."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, ExitReason.STOPPED, self.launch.grace)
        if self.launch.dies_with_launcher:
            self._watch_launcher()
        tasks = [asyncio.create_task(self.dialer.run()), asyncio.create_task(self._obey())]
        for task in tasks:
            task.add_done_callback(log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.dialer.close()

    async def admission(self) -> bool:
        """Ask whether we are wanted. False when there is a reason to leave (``reason``)."""
        wanted = asyncio.create_task(self.dialer.ask(self._wanted(), ADMISSION))
        wanted.add_done_callback(lambda task: self.news.set())
        await self.until(wanted.done)
        if wanted.done():
            try:
                answer = wanted.result()
            except TimeoutError:
                self.leave(ExitReason.NOT_ADMITTED, 0.0, "no manager answered")
            else:
                self._admitted = True
                self._take(answer)
        else:
            wanted.cancel()
        return self.reason is None

    async def until(self, over: Callable[[], bool]) -> None:
        """Returns once ``over()`` (look again at every ``news``) or once there is a reason to leave."""
        while not over() and self.reason is None:
            self.news.clear()
            await self.news.wait()

    async def finish(
        self, code: int | None, number: int | None, reason: ExitReason, detail: str = "", said: str = ""
    ) -> None:
        """Write the exit record, then send it to the manager if one connects within ``LAST_WORDS`` s.

        ``number`` is the signal that ended the command, ``said`` its last line."""
        launch = self.launch
        if self._double:
            _log.error("%s; the other process continues", exit_text(reason, detail))
            return
        _leave_record(launch, ExitRecord(
            launch.tag, launch.life, self.node, code, number, reason, time.time(), said, detail
        ))  # fmt: skip
        self._told = StepExit(launch.life, launch.tag, code, number, reason, said, detail)
        if self.dialer.connected:
            await self.dialer.send(self._told)
        else:
            self._greeted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await self._greeted.wait()

    def _wanted(self) -> Wanted:
        return Wanted(self.launch.life, self.launch.tag, self.node, self.me.pid)

    def _hello(self) -> Sequence[Any]:
        """To every manager: the old one's Admitted does not bind the next."""
        self._greeted.set()
        if self._told is not None:
            return [self._told]
        return [self._wanted(), *self.greet()] if self._admitted else []

    def _find_manager(self) -> Address | None:
        return Address.read(self.run.manager)

    async def _obey(self) -> None:
        while True:
            self._take(await self.dialer.pushed())

    def _take(self, message: Any) -> None:
        match message:
            case Admitted(tag=self.launch.tag):
                if not message.ok:
                    self._double = message.another
                    self.leave(ExitReason.NOT_ADMITTED, 0.0, message.why)
            case Fenced(life=self.launch.life) | Fenced(tag=self.launch.tag):  # a shadow's step goes by its tag alone
                self.leave(ExitReason.FENCED, 0.0, message.why)
            case Stop(life=self.launch.life) | Stop(tag=self.launch.tag):
                self.leave(ExitReason.STOPPED, message.grace)
            case _:
                self.hear(message)

    def _watch_launcher(self) -> None:
        """By pidfd: a parent-death signal would follow the thread that forked us, not its process."""
        loop = asyncio.get_running_loop()
        parent = os.getppid()
        if parent == 0:  # outside of our pid namespace: it cannot be watched from here
            return
        if parent == 1:  # it died before we could look
            self.leave(ExitReason.LAUNCHER_DIED, 0.0)
            return
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            self.leave(ExitReason.LAUNCHER_DIED, 0.0)
            return

        def died() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self.leave(ExitReason.LAUNCHER_DIED, 0.0)

        loop.add_reader(fd, died)
        if os.getppid() != parent:  # it died meanwhile, and its pid may be somebody else's
            self.leave(ExitReason.LAUNCHER_DIED, 0.0)


def _leave_record(launch: Launch, record: ExitRecord) -> None:
    try:
        write_atomically(RunDir(Path(launch.run_dir)).exit_file(launch.tag), msgspec.json.encode(record))
    except OSError as error:  # the run directory is full, or gone with the run
        _log.error("cannot write the exit record: %s; %s", error, record)


def log_failure(task: asyncio.Future[Any]) -> None:
    """Log the exception of a background task that ended with one (a done-callback); the role goes on."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a background task failed: %r", error)
