from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rrl.core.types import NodeName
from rrl.roles.snapshots.format import SnapshotError
from rrl.roles.trainer.host_buffers import HostBuffers, Layout, PinnedMemory, buddy_of
from rrl.tests.support.listening_manager import wait_until

pytestmark = pytest.mark.torch

A, B, C, D = (NodeName(name) for name in "abcd")
STORES = {node: f"tcp://{node}:1" for node in (A, B, C, D)}


class Client:
    """The interface of a SnapshotClient. ``broken`` is the message of the error that it raises."""

    def __init__(self) -> None:
        self.broken = ""
        self.memory = bytearray(64)
        self.sealed: list[tuple[int, bytes]] = []
        self.copied: list[str] = []
        self.forgotten: list[str] = []
        self.unreachable = ""

    def prepare(self, nbytes: int) -> None:
        self._works()

    def buffer(self, nbytes: int, step: int) -> memoryview:
        self._works()
        return memoryview(self.memory)[:nbytes]

    def seal(self, step: int, meta: bytes) -> Future[None]:
        self.sealed.append((step, meta))
        return Future()

    def wait_until_sealed(self) -> None: ...

    def forget(self, address: str) -> None:
        self.forgotten.append(address)
        if address in self.unreachable:
            raise SnapshotError("nobody is there")

    def copy_to(self, address: str) -> None:
        self._works()
        self.copied.append(address)

    def _works(self) -> None:
        if self.broken:
            raise SnapshotError(self.broken)


def _buffers(client: Client | None, **named: Any) -> HostBuffers:
    return HostBuffers(client, **named)  # type: ignore[arg-type]


def test_ring_member_sends_its_copies_to_the_next_node_that_keeps_snapshots() -> None:
    nodes = [A, A, B, B, C]
    assert [buddy_of(node, nodes, STORES) for node in (A, B, C)] == [STORES[B], STORES[C], STORES[A]]
    assert buddy_of(A, nodes, {A: "x", C: "y"}) == "y"


def test_a_gang_on_one_node_sends_its_copies_to_a_standby_and_never_to_itself() -> None:
    assert buddy_of(A, [A, A], STORES) == STORES[B]
    assert buddy_of(A, [A], {A: "x"}) is None
    assert buddy_of(A, [A], {}) is None


def test_memory_of_the_agent_is_filled_sealed_and_copied_on() -> None:
    client = Client()
    buffers = _buffers(client, buddy=lambda: "tcp://b:1")
    buffers.buffer(8, 1)[:2] = b"ab"
    assert client.memory[:2] == b"ab"
    buffers.seal(1, b"meta")
    assert client.sealed == [(1, b"meta")]
    wait_until(lambda: client.copied == ["tcp://b:1"])


@pytest.mark.parametrize("copies", [True, False])
def test_two_own_snapshots_make_other_agents_drop_earlier_incarnations(copies: bool) -> None:
    client = Client()
    client.unreachable = "tcp://c:1"
    others = ["tcp://c:1", "tcp://d:1"]
    buffers = _buffers(client, buddy=lambda: "tcp://b:1", others=lambda: others)
    for step in range(1, 5):
        client.broken = ""
        buffers.buffer(8, step)
        client.broken = "" if copies else "no copy is taken"
        buffers.seal(step, b"")
        wait_until(lambda: not any(thread.name == "rrl-buddy" for thread in threading.enumerate()))
        assert client.forgotten == ([] if step == 1 else others)


def test_missing_agent_is_logged_once_and_the_step_is_still_copied(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    buffers = _buffers(client)
    client.broken = "nobody is there"
    for step in (1, 2):
        buffers.buffer(8, step)[:1] = b"x"
        buffers.seal(step, b"")
    assert client.sealed == []
    assert caplog.text.count("nobody is there") == 1
    client.broken = ""
    buffers.buffer(8, 3)
    buffers.seal(3, b"")
    assert [step for step, _ in client.sealed] == [3]


def test_own_buffers_alternate_so_that_one_being_written_is_not_reused() -> None:
    buffers = _buffers(None, own=2)
    first, second = buffers.buffer(4, 1), buffers.buffer(4, 2)
    first[:], second[:] = b"1111", b"2222"
    assert bytes(first) == b"1111"
    third = buffers.buffer(4, 3)
    third[:] = b"3333"
    assert bytes(first) == b"3333"


def test_layout_returns_the_stored_tensors_of_any_shape_and_type() -> None:
    tensors = {
        "odd": torch.randn(3, 5),
        "none": torch.empty(0, 7),
        "half": torch.randn(9).to(torch.bfloat16),
        "whole": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(4, 3).t(),
    }
    layout = Layout(tensors)
    buffer = memoryview(bytearray(layout.nbytes))
    layout.fill(buffer, tensors)
    assert all(torch.equal(held, tensors[name]) for name, held in layout.views(buffer).items())
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout.load(buffer.toreadonly(), others)
    assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


def test_storage_of_each_view_covers_only_its_own_tensor() -> None:
    """torch.save would write the whole storage of a view."""
    layout = Layout({"a": torch.ones(1000), "b": torch.ones(10)})
    views = layout.views(memoryview(bytearray(layout.nbytes)))
    assert {name: view.untyped_storage().nbytes() for name, view in views.items()} == {"a": 4000, "b": 40}


# ── page-locked memory, with a fake CUDA runtime (tests/gpu has the real one) ─────────────────────────────────────────
OUT_OF_MEMORY = 2


class FakeRuntime:
    """CUDA's runtime without a GPU, which locks nothing, and refuses what the real one refuses."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.locked, "CUDA answers cudaErrorHostMemoryAlreadyRegistered"
        if not self.refuses:
            self.locked[address] = nbytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    yield made
    assert not made.locked, (
        "memory is still locked after the test; CUDA would treat it as page-locked after it is unmapped"
    )


def test_memory_is_locked_once_until_it_is_unlocked(runtime: FakeRuntime) -> None:
    pinned, memory = PinnedMemory(), memoryview(mmap.mmap(-1, 8192))
    pinned.pin(memory)
    pinned.pin(memory)
    assert list(runtime.locked.values()) == [8192]
    pinned.pin(memory[:4096])  # other memory is mapped at this address
    assert list(runtime.locked.values()) == [4096]
    pinned.unpin(memory)
    pinned.unpin(memory)
    assert runtime.locked == {}


def test_memory_that_cuda_refuses_to_lock_stays_pageable_and_is_logged_once(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = OUT_OF_MEMORY
    pinned, memory = PinnedMemory(), memoryview(mmap.mmap(-1, 4096))
    with caplog.at_level(logging.WARNING, "rrl.trainer"):
        pinned.pin(memory)
        pinned.pin(memory)
    pinned.unpin(memory)
    (record,) = caplog.records
    assert "cudaHostRegister: error 2" in record.getMessage()


def test_own_buffers_are_locked_and_unlocked_before_they_are_replaced(runtime: FakeRuntime) -> None:
    pinned = PinnedMemory()
    buffers = HostBuffers(own=2, pinning=pinned)
    small = [buffers.buffer(4096, step) for step in (1, 2)]
    assert sorted(runtime.locked.values()) == [4096, 4096]
    large = [buffers.buffer(8192, step) for step in (3, 4)]
    assert sorted(runtime.locked.values()) == [8192, 8192]
    assert len(small) == 2, "the test must still use the old buffers"
    for memory in large:
        pinned.unpin(memory)
