"""A manager whose run directory hangs still answers messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rrl.cluster.base import Cluster
from rrl.core.launch import ExitReason, ExitRecord
from rrl.core.run_dir import RunDir
from rrl.core.types import Version
from rrl.manager.intake import message_handler as hearing_module
from rrl.manager.model import events as ev
from rrl.manager.runtime import Manager
from rrl.manager.storage import lease as lease_module
from rrl.manager.storage.lease import Lease, LeaseLost
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.manager.handling import HELLO, LAUNCHED, N1, R1, STEP, WANTED, Handling
from rrl.tests.support.manager.jobs import RUN, job
from rrl.transport import messages as msg
from rrl.transport.control.endpoints import Incoming

DEADLINE = 60.0
PATIENCE = 3600.0


class Storage:
    """Calls of the file system that hang until ``back`` is set.

    ``hung`` counts the hanging calls.
    """

    def __init__(self) -> None:
        self.back = threading.Event()
        self.hung = 0

    def hangs(self, module: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        really = getattr(module, name)

        def slow(*words: Any) -> Any:
            self.hung += 1
            assert self.back.wait(DEADLINE)
            return really(*words)

        patch.setattr(module, name, slow)


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = Storage()
    yield storage
    storage.back.set()


class FakeListener:
    """A listener without a socket."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Incoming] = asyncio.Queue()
        self.sent: list[Any] = []

    async def receive(self) -> Incoming:
        return await self.arrived.get()

    def deliver(self, message: Any) -> None:
        self.arrived.put_nowait(Incoming(b"peer", 1, message))


def _overdue(lease: Lease) -> None:
    """Set the time of the lease's last check for a successor back, so that the next check is overdue."""
    cast(Any, lease)._checked_at -= PATIENCE


async def _manager(standing: Handling, lease: Lease, listener: FakeListener) -> Any:
    """Return a manager that only receives messages, with the message handler of ``standing``."""

    manager: Any = Manager(standing.run, cast(Cluster, None), job(), "job.toml", "127.0.0.1")
    listener.sent = standing.sent
    manager._lease, manager._listener, manager._message_handler = lease, listener, standing.handler
    return manager


async def test_messages_are_handled_while_the_run_directory_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    standing = Handling(tmp_path, *LAUNCHED)
    monkeypatch.setattr(lease_module, "CHECK_TIMEOUT_S", 0.05)

    lease, line = await Lease.acquire(standing.run, PATIENCE), FakeListener()
    manager = await _manager(standing, lease, line)
    record = ExitRecord(STEP, R1, N1, 3, None, ExitReason.EXITED, 0.0)
    standing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    storage.hangs(hearing_module, "read_exit", monkeypatch)
    storage.hangs(lease_module, "_file", monkeypatch)
    _overdue(lease)
    manager._after_poll()
    hears = asyncio.create_task(manager._receive_loop())
    line.deliver(WANTED)
    line.deliver(HELLO)
    await eventually(lambda: any(isinstance(one, msg.Welcome) for one in line.sent))
    for step in range(50):
        line.deliver(msg.VersionAvailable(R1, Version(step, 1)))
    await eventually(lambda: ev.VersionAvailable(R1, Version(49, 1)) in standing.events)
    manager._after_poll()
    assert storage.hung == 2, "more calls hang than one check for a successor and one for ended steps"
    assert not storage.back.is_set()
    storage.back.set()
    await eventually(lambda: ev.StepEnded(R1, STEP, 3, None, ExitReason.EXITED) in standing.events)
    hears.cancel()
    await asyncio.gather(hears, return_exceptions=True)


async def test_witnessed_end_counts_once_its_exit_record_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    standing = Handling(tmp_path, *LAUNCHED)
    await standing.handle_now(WANTED, b"peer")
    monkeypatch.setattr(hearing_module, "EXIT_RECORD_READ_TIMEOUT_S", 0.05)
    storage.hangs(hearing_module, "read_exit", monkeypatch)

    await standing.handle_now(msg.StepVanished(R1, STEP, N1), b"agent")
    await standing.handle_now(HELLO, b"peer")
    assert any(isinstance(one, msg.Welcome) for one in standing.sent)
    assert not any(isinstance(event, ev.StepEnded) for event in standing.events)
    storage.back.set()
    await eventually(lambda: any(isinstance(event, ev.StepEnded) for event in standing.events))


async def test_successor_found_by_a_delayed_lease_check_stops_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    run = RunDir(tmp_path / RUN)
    run.create()
    monkeypatch.setattr(lease_module, "CHECK_TIMEOUT_S", 0.05)

    lease = await Lease.acquire(run, PATIENCE)
    (run.epochs / "000002").touch()
    await lease.ensure_current()  # no check is due, because the last one was a moment ago
    storage.hangs(lease_module, "_file", monkeypatch)
    _overdue(lease)
    for _ in range(3):
        await lease.ensure_current()
    assert storage.hung == 1
    storage.back.set()
    assert lease._check_task is not None
    await asyncio.wait((lease._check_task,), timeout=DEADLINE)
    with pytest.raises(LeaseLost, match="epoch 2"):
        await lease.ensure_current()


async def test_no_decision_is_made_before_the_first_lease_check_after_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    run = RunDir(tmp_path / RUN)
    run.create()
    monkeypatch.setattr(lease_module, "CHECK_TIMEOUT_S", DEADLINE)

    lease = await Lease.acquire(run, PATIENCE)
    (run.epochs / "000002").touch()
    storage.hangs(lease_module, "_file", monkeypatch)
    _overdue(lease)
    both = [asyncio.create_task(lease.ensure_current()) for _ in range(2)]
    await eventually(lambda: storage.hung)
    assert not any(task.done() for task in both)
    storage.back.set()
    results = await asyncio.gather(*both, return_exceptions=True)
    assert [type(one) for one in results] == [LeaseLost, LeaseLost]
