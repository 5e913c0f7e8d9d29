"""The bookkeeping of page-locked memory, over a stand-in for CUDA's runtime; tests/gpu has the real one."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator

import pytest
import torch

from rrl.roles.trainer.host_buffers import HostBuffers
from rrl.roles.trainer.pinned_memory import PinnedMemory

pytestmark = pytest.mark.torch

OUT_OF_MEMORY = 2


class FakeRuntime:
    """CUDA's runtime without a GPU: it locks nothing, and refuses what the real one refuses."""

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
    assert not made.locked, "memory that stays locked would be taken for page-locked after it is unmapped"


def test_memory_is_locked_once_until_it_is_unlocked(runtime: FakeRuntime) -> None:
    pinned, memory = PinnedMemory(), memoryview(mmap.mmap(-1, 8192))
    pinned.pin(memory)
    pinned.pin(memory)
    assert list(runtime.locked.values()) == [8192]
    pinned.pin(memory[:4096])  # other memory is mapped at the address
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
    assert len(small) == 2, "the old buffers are still in use"
    for memory in large:
        pinned.unpin(memory)
