"""Provides a run directory with keys, and a manager that only receives messages, for tests of launchers and agents."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rrl.core.launch import LAUNCH_ENV, ExitRecord, Launch, read_exit, tag_of
from rrl.core.log_lines import STAMP_BYTES
from rrl.core.processes import Process, processes, sweep
from rrl.core.run_dir import RunDir, write_atomically
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.transport.control.endpoints import Listener
from rrl.transport.keys import RunKeys
from rrl.transport.messages import AdmissionRequest, Admitted, ToManager

TIMEOUT_S = 120.0
"""Deadline of one wait (s), which only a broken build reaches."""
_T = TypeVar("_T")


async def eventually(condition: Callable[[], _T | None], description: str = "it") -> _T:
    """Wait until ``condition()`` is true and return its value. Fails after ``TIMEOUT_S`` s."""
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while not (result := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"{description} did not come"
        await asyncio.sleep(0.01)
    return result


def wait_until(condition: Callable[[], object], failure_text: str = "it did not come") -> None:
    """Wait as :func:`eventually` does, for tests without an event loop."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, failure_text
        time.sleep(0.01)


class Manager:
    """A manager that admits every step, unless ``refuse`` is set, and stores the messages that it receives."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.refuse = ""
        """Reason with which steps are refused; if empty, steps are admitted."""
        self.received: list[Any] = []
        self.peers: dict[Incarnation, bytes] = {}

    async def serve(self) -> None:
        while True:
            incoming = await self.listener.receive()
            message = incoming.message
            self.received.append(message)
            self.peers[getattr(message, "incarnation", Incarnation(ReplicaId("none/0"), 0))] = incoming.peer
            if isinstance(message, AdmissionRequest):
                answer = Admitted(message.tag, not self.refuse, self.refuse)
                await self.listener.send(incoming.peer, answer, incoming.request_id)

    async def wait_for(self, kind: type[_T], where: Callable[[_T], bool] = lambda message: True) -> _T:
        """Wait for the first message of this kind and return it."""
        return await eventually(
            lambda: next((m for m in self.received if isinstance(m, kind) and where(m)), None), kind.__name__
        )

    async def send(self, incarnation: Incarnation, message: Any) -> None:
        await self.listener.send(self.peers[incarnation], message)


class Lab:
    """One run in ``path``; ``close`` ends all of its processes."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path / "run-1")
        self.run.create()
        self.keys = RunKeys.make()
        self.keys.save(self.run.keys)
        self._started: list[subprocess.Popen[bytes]] = []

    @contextlib.asynccontextmanager
    async def manager(self, epoch: int = 1, refuse: str = "") -> AsyncIterator[Manager]:
        listener = await Listener.open(self.keys, ToManager, epoch=epoch)
        manager = Manager(listener)
        manager.refuse = refuse
        write_atomically(self.run.manager, msgspec.json.encode(listener.address))
        serving = asyncio.create_task(manager.serve())
        try:
            yield manager
        finally:
            serving.cancel()
            await listener.close()

    def launch(
        self,
        *argv: str,
        replica: str = "rollout/0",
        number: int = 1,
        node: str = "local1",
        grace: float = 5.0,
        env: dict[str, str] | None = None,
        virtual_node: bool = True,
    ) -> Launch:
        """Write a launch file."""
        incarnation = Incarnation(ReplicaId(replica), number)
        launch = Launch(
            tag=tag_of(self.run.id, incarnation),
            run_dir=str(self.run.path),
            incarnation=incarnation,
            node=NodeName(node),
            argv=argv,
            env={"PATH": "/usr/bin:/bin"} | (env or {}),
            cwd=str(self.run.path),
            grace=grace,
            virtual_node=virtual_node,
        )
        write_atomically(self.run.launch_file(launch.tag), msgspec.json.encode(launch))
        return launch

    def start(self, launch: Launch, module: str = "launcher.step", patch: str = "") -> subprocess.Popen[bytes]:
        """Start the launcher or another first process; its main function runs after the Python statements ``patch``."""
        file = str(self.run.launch_file(launch.tag))
        argv = [sys.executable, "-P", "-m", f"rrl.roles.{module}", file]
        if patch:
            code = f"import sys; {patch}; from rrl.roles.{module} import main; sys.exit(main())"
            argv = [sys.executable, "-P", "-c", code, file]
        log = self.run.logs / f"{launch.tag}.first.log"
        with log.open("ab") as out:
            env = {"PATH": "/usr/bin:/bin", "HOME": str(self.run.path), LAUNCH_ENV: file, "INHERITED": "1"}
            child = subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True)
        self._started.append(child)
        return child

    async def end_of(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until a process has ended, and return its exit status."""
        return await asyncio.wait_for(asyncio.to_thread(child.wait), TIMEOUT_S)

    def processes(self, launch: Launch | None = None) -> list[Process]:
        """Return the running processes of the run, or of one of its steps."""
        path = str(self.run.launch_file(launch.tag)) if launch else None
        return [process for process in processes(str(self.run.steps)) if path in (None, process.launch)]

    def record(self, launch: Launch) -> ExitRecord | None:
        return read_exit(self.run.exit_file(launch.tag))

    def log(self, launch: Launch) -> str:
        """Return the log of the role, without the times of its lines."""
        path = self.run.log_file(launch.tag)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return "".join(line[STAMP_BYTES + 1 :] for line in lines)

    def close(self) -> None:
        _, left = sweep(self.processes, TIMEOUT_S)
        for child in self._started:
            child.kill()
            child.wait()
        assert not left


@contextlib.contextmanager
def lab(path: Path) -> Iterator[Lab]:
    made = Lab(path)
    try:
        yield made
    finally:
        made.close()
