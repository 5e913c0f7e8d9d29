"""Rules of the seam that need no network."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rrl.transport.weights import pipe as pipes
from rrl.transport.weights import swarm
from rrl.transport.weights.pipe import PipeError, deadline, open_pipe

SECRET = b"s" * 32


class _HungLine:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.pending: asyncio.Future[None] | None = None
        self.broken = False

    async def send(self, data: bytes | memoryview) -> None: ...

    async def receive(self, into: memoryview) -> None:
        self.pending = asyncio.get_running_loop().create_future()
        try:
            await self.pending
        finally:
            self.told.append("buffer free")

    def abort(self) -> None:
        self.told.append("aborted")
        if self.pending is not None and not self.pending.done():
            self.pending.set_exception(PipeError("aborted"))


def test_at_a_deadline_the_abort_comes_before_the_buffer_is_free() -> None:
    async def test() -> None:
        line = _HungLine()
        with pytest.raises(PipeError, match="nothing within"):
            with deadline(line, 0.01):
                await line.receive(memoryview(bytearray(1)))
        assert line.told[:2] == ["aborted", "buffer free"]

    asyncio.run(test())


def test_ucx_is_missed_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)

    async def test() -> None:
        with pytest.raises(ImportError, match=r"rrl-slurm\[ucx\]"):
            open_pipe("ucx", SECRET)
        assert pipes.choose("auto") == ("tcp", "ucxx is not installed here")
        pipe = open_pipe("auto", SECRET)
        assert pipe.kind == "tcp"
        await pipe.close()

    asyncio.run(test())


def test_an_unknown_pipe_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match='"auto", "ucx" or "tcp"'):
        pipes.choose("pigeon")


def test_defaults_leave_room_for_a_retry_within_a_pull() -> None:
    assert swarm.CHUNK_BY * 2 < swarm.PULL_BY
