"""The code that the first processes of all steps have in common: the launchers of roles, and the agents.

The first process requests admission from the manager, follows its stop requests, watches its parent (slurmstepd), and
writes an exit record.
"""

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
from ...core.processes import read_process
from ...core.run_dir import RunDir, write_atomically
from ...core.types import NodeName, RaisedException
from ...transport.control.endpoints import Address, Dialer
from ...transport.keys import RunKeys
from ...transport.messages import AdmissionRequest, Admitted, Fenced, FromManager, Stop
from .process_group import adopt_orphans

_log = logging.getLogger("rrl.launcher")

ADMISSION_TIMEOUT_S = 60.0
"""Seconds to wait for the answer to an AdmissionRequest. If the manager dies during the launch, the answer comes from
its successor, which starts after the lease of the dead manager (10 s) has expired. If no answer comes in time, this
step ends, and the next manager launches the incarnation again under another tag."""
EXIT_REPORT_TIMEOUT_S = 2.0
"""Seconds to wait for a manager that can receive the exit record. This is short, because the exit record on disk
decides."""


class StepSupervisor:
    """The first process of one step, and its communication with the manager.

    ``stop_reason`` is None until there is a reason to exit. The first reason is kept; later stop requests can only make
    ``deadline`` (a time of the loop's clock) earlier. ``wakeup`` is set whenever one of these attributes changes.
    """

    def __init__(self, launch: Launch, launch_file: str) -> None:
        process = read_process(os.getpid())
        assert process is not None  # this process is alive
        self.launch, self.launch_file, self.process = launch, launch_file, process
        self.run = RunDir(Path(launch.run_dir))
        self.node = NodeName(os.environ.get("SLURMD_NODENAME", launch.node))
        self.steps = os.path.dirname(launch_file)
        """Path of the folder of launch files, spelled as in the manager: it is compared as text with the path of the
        launch file in the environment of each process."""
        self.stop_reason: ExitReason | None = None
        self.stop_detail = ""
        """Details of ``stop_reason``, a text for people."""
        self.deadline = float("inf")
        self.wakeup = asyncio.Event()
        self.on_connect: Callable[[], Sequence[Any]] = tuple
        """Function that returns the messages that every new manager receives after the AdmissionRequest."""
        self.on_message: Callable[[Any], None] = lambda message: None
        """Function that handles every message of the manager except Admitted, and except Stop and Fenced of this
        incarnation."""
        self._exit_report: ExitRecord | None = None
        self._admitted = False
        self._is_duplicate = False
        """Whether another process runs under the same tag."""
        self._hello_sent = asyncio.Event()
        try:
            self.keys = RunKeys.load(self.run.keys)
        except OSError as error:
            reason, detail = ExitReason.NOT_STARTED, str(error)
            _write_record(
                launch,
                ExitRecord(launch.tag, launch.incarnation, self.node, None, None, reason, time.time(), detail=detail),
            )
            raise
        self.dialer = Dialer(self.keys, FromManager, self._find_manager, self._hello)

    def request_stop(self, reason: ExitReason, grace: float, detail: str = "") -> None:
        """Request that the step ends within ``grace`` seconds; ``detail`` describes the reason for people."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_detail = reason, detail
        self.deadline = min(self.deadline, asyncio.get_running_loop().time() + grace)
        self.wakeup.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Handle signals, the end of the parent process and messages of the manager inside the block."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop, ExitReason.STOPPED, self.launch.grace)
        if not self.launch.virtual_node:
            self._watch_launcher()
        tasks = [asyncio.create_task(self.dialer.run()), asyncio.create_task(self._receive_loop())]
        for task in tasks:
            task.add_done_callback(log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.dialer.close()

    async def request_admission(self) -> bool:
        """Request admission; return False, and set ``stop_reason``, if the step must not start."""
        pending = asyncio.create_task(self.dialer.request(self._admission_request(), ADMISSION_TIMEOUT_S))
        pending.add_done_callback(lambda task: self.wakeup.set())
        await self.wait_for(pending.done)
        if pending.done():
            try:
                answer = pending.result()
            except TimeoutError:
                self.request_stop(ExitReason.NOT_ADMITTED, 0.0, "no manager answered")
            else:
                self._admitted = True
                self._on_message(answer)
        else:
            pending.cancel()
        return self.stop_reason is None

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true or a stop is requested; both are checked whenever ``wakeup`` is set."""
        while not condition() and self.stop_reason is None:
            self.wakeup.clear()
            await self.wakeup.wait()

    async def finish(
        self,
        code: int | None,
        number: int | None,
        reason: ExitReason,
        detail: str = "",
        last_line: str = "",
        exception: RaisedException | None = None,
    ) -> None:
        """Write the exit record, then send it to the manager if one connects within ``EXIT_REPORT_TIMEOUT_S``.

        Args:
            code: the command's exit code; None if it did not start or a signal ended it.
            number: the signal that ended the command, or None.
            reason: why the step ended.
            detail: details of the reason, a text for people.
            last_line: the last line that the command wrote.
            exception: the exception that ended the command, as the command reported it.
        """
        launch = self.launch
        if self._is_duplicate:
            _log.error(
                "this process exits (%s), and the other process with the same tag continues", exit_text(reason, detail)
            )
            return
        record = ExitRecord(
            launch.tag, launch.incarnation, self.node, code, number, reason, time.time(), last_line, detail, exception
        )
        unwritten = _write_record(launch, record)
        if code and unwritten:  # a full disk also ends programs that do not name it, such as a torch.save
            record = msgspec.structs.replace(record, last_line=f"{last_line} ({unwritten})".lstrip())
        self._exit_report = record
        if self.dialer.connected:
            await self.dialer.send(self._exit_report)
        else:
            self._hello_sent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_REPORT_TIMEOUT_S):
                    await self._hello_sent.wait()

    def _admission_request(self) -> AdmissionRequest:
        return AdmissionRequest(self.launch.incarnation, self.launch.tag, self.node, self.process.pid)

    def _hello(self) -> Sequence[Any]:
        """Return the first messages to a new manager, which decides about the step's admission again."""
        self._hello_sent.set()
        if self._exit_report is not None:
            return [self._exit_report]
        return [self._admission_request(), *self.on_connect()] if self._admitted else []

    def _find_manager(self) -> Address | None:
        return Address.read(self.run.manager)

    async def _receive_loop(self) -> None:
        while True:
            self._on_message(await self.dialer.next_push())

    def _on_message(self, message: Any) -> None:
        match message:
            case Admitted(tag=self.launch.tag):
                if not message.ok:
                    self._is_duplicate = message.duplicate
                    self.request_stop(ExitReason.NOT_ADMITTED, 0.0, message.reason)
            # after a promotion, messages name another incarnation than the launch file, but the same tag
            case Fenced(incarnation=self.launch.incarnation) | Fenced(tag=self.launch.tag):
                self.request_stop(ExitReason.FENCED, 0.0, message.reason)
            case Stop(incarnation=self.launch.incarnation) | Stop(tag=self.launch.tag):
                self.request_stop(ExitReason.STOPPED, message.grace)
            case _:
                self.on_message(message)

    def _watch_launcher(self) -> None:
        """Request a stop when the parent process ends.

        A pidfd shows the end. A parent-death signal could come too early, because it is sent as soon as the parent's
        thread that forked this process ends.
        """
        loop = asyncio.get_running_loop()
        parent = os.getppid()
        if parent == 0:  # the parent is outside of our pid namespace and cannot be watched
            return
        if parent == 1:  # the parent died before this check
            self.request_stop(ExitReason.LAUNCHER_DIED, 0.0)
            return
        try:
            fd = os.pidfd_open(parent)
        except ProcessLookupError:
            self.request_stop(ExitReason.LAUNCHER_DIED, 0.0)
            return

        def died() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self.request_stop(ExitReason.LAUNCHER_DIED, 0.0)

        loop.add_reader(fd, died)
        if os.getppid() != parent:  # the parent died before pidfd_open, which may have opened a reused pid
            self.request_stop(ExitReason.LAUNCHER_DIED, 0.0)


def _write_record(launch: Launch, record: ExitRecord) -> str:
    """Write the exit record; return why it cannot be written, in one line (empty if it is written)."""
    try:
        write_atomically(RunDir(Path(launch.run_dir)).exit_file(launch.tag), msgspec.json.encode(record))
        return ""
    except OSError as error:  # the run directory is full or was removed
        _log.error("cannot write the exit record of step %s: %s; the record is %s", launch.tag, error, record)
        return f"its exit record cannot be written: {error.strerror}"


def log_failure(task: asyncio.Future[Any]) -> None:
    """Log the exception of a background task (a done callback); the step continues."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a background task of this step failed, and the step continues without the task: %r", error)
