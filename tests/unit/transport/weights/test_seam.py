"""Rules of the interface of weight transports that need no network."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from typing import get_args, get_type_hints

import pytest

from rrl.config.job.schema import TransportTable
from rrl.core.run_spec import TransportSpec, WeightsSetting, WeightTransportName
from rrl.core.types import Incarnation, ReplicaId
from rrl.tests.support.weights.source import VERSION, content, described
from rrl.tests.support.weights.transports import KINDS
from rrl.transport.streams.connection import TransportError, deadline
from rrl.transport.weights import pull as swarm
from rrl.transport.weights import select
from rrl.transport.weights.pull import WeightSource, pull
from rrl.transport.weights.select import Capabilities, UntrustedNetwork, open_transport
from rrl.transport.weights.store import WeightStore

SECRET = b"s" * 32


class _HungConnection:
    def __init__(self) -> None:
        self.sent: list[str] = []
        self.pending: asyncio.Future[None] | None = None
        self.broken = False

    async def open(self) -> None: ...

    async def send(self, data: bytes | memoryview) -> None: ...

    async def receive(self, into: memoryview) -> None:
        self.pending = asyncio.get_running_loop().create_future()
        try:
            await self.pending
        finally:
            self.sent.append("buffer free")

    def come(self) -> None:
        if self.pending is not None and not self.pending.done():
            self.pending.set_result(None)

    def abort(self) -> None:
        self.sent.append("aborted")
        if self.pending is not None and not self.pending.done():
            self.pending.set_exception(TransportError("aborted"))


def test_at_a_deadline_the_connection_is_aborted_before_the_buffer_is_released() -> None:
    async def test() -> None:
        line = _HungConnection()
        with pytest.raises(TransportError, match="no reply within"):
            with deadline(line, 0.01):
                await line.receive(memoryview(bytearray(1)))
        assert line.sent[:2] == ["aborted", "buffer free"]

    asyncio.run(test())


def test_time_in_which_the_own_event_loop_stood_still_extends_the_deadline() -> None:
    async def test() -> None:
        line, loop = _HungConnection(), asyncio.get_running_loop()

        def stand_still() -> None:
            time.sleep(0.3)
            loop.call_later(0.01, line.come)

        loop.call_later(0.01, stand_still)
        with deadline(line, 0.1):
            await line.receive(memoryview(bytearray(1)))
        assert line.sent == ["buffer free"]

    asyncio.run(test())


RDMA = Capabilities(frozenset({"ucx", "nixl"}), ("mlx5_0:1",))
NO_RDMA = Capabilities(frozenset({"ucx", "nixl"}), ())


@pytest.mark.parametrize(
    ("kind", "here", "trusted", "expected", "over_tcp"),
    [
        ("auto", NO_RDMA, False, "tcp", False),
        ("auto", NO_RDMA, True, "tcp", False),
        ("auto", RDMA, False, "ucx", False),
        ("auto", RDMA, True, "ucx", False),
        ("auto", Capabilities(frozenset({"nixl"}), ("mlx5_0:1",)), False, "tcp", False),
        ("tcp", RDMA, True, "tcp", False),
        ("ucx", NO_RDMA, True, "ucx", True),
        ("ucx", RDMA, False, "ucx", False),
        ("nixl", RDMA, False, "nixl", False),
        ("nixl", NO_RDMA, True, "nixl", True),
    ],
)
def test_ucx_uses_tcp_only_by_name_and_on_a_trusted_network(
    kind: str, here: Capabilities, trusted: bool, expected: str, over_tcp: bool
) -> None:
    choice = select.select_transport(kind, here, trusted)
    assert (choice.kind, choice.over_tcp) == (expected, over_tcp)


@pytest.mark.parametrize("kind", ["ucx", "nixl"])
def test_ucx_without_rdma_on_an_untrusted_network_is_refused(kind: str) -> None:
    with pytest.raises(UntrustedNetwork, match="trusted_network = true"):
        select.select_transport(kind, NO_RDMA, trusted_network=False)
    with pytest.raises(UntrustedNetwork):
        open_transport(kind, SECRET, capabilities=NO_RDMA)


def test_a_missing_ucxx_fails_only_a_job_that_names_ucx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)

    async def test() -> None:
        with pytest.raises(ImportError, match=r"\.\[ucx\]"):
            open_transport("ucx", SECRET, trusted_network=True)
        pipe = open_transport("auto", SECRET, capabilities=RDMA)
        assert pipe.kind == "tcp"
        await pipe.close()

    asyncio.run(test())
    assert "weight transport: tcp, because UCX over mlx5_0:1 fails" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_transports_closed_during_a_pull_leave_no_thread_and_no_error(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")

    async def test() -> None:
        store, flat = WeightStore(), content(2**20)
        store.offer(described(VERSION, flat, SECRET, 2**16), flat)
        source, pipe = (
            open_transport(kind, SECRET, trusted_network=True),
            open_transport(kind, SECRET, trusted_network=True),
        )
        at = await source.serve(store, "127.0.0.1")
        holder = WeightSource(Incarnation(ReplicaId("trainer/0"), 1), at)
        await pipe.manifest(at, VERSION, 20)
        pulling = asyncio.create_task(pull(WeightStore(), VERSION, lambda: [holder], pipe))
        await asyncio.sleep(0)
        pulling.cancel()
        await asyncio.wait([pulling])
        await source.close()
        await pipe.close()

    asyncio.run(test())
    assert [thread.name for thread in threading.enumerate() if "UCX" in thread.name or "nixl" in thread.name] == []
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("name", get_args(WeightTransportName))
def test_every_transport_that_a_job_may_name_has_a_module_of_that_name(name: str) -> None:
    pytest.importorskip("numpy")  # needed by nixl
    module = importlib.import_module(f"rrl.transport.weights.{name}")
    assert getattr(module, f"{name.title()}Transport").kind == name


def test_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match='"auto", "ucx", "tcp", "nixl"'):
        select.select_transport("pigeon", NO_RDMA, trusted_network=False)


def test_allowed_settings_are_auto_and_the_names_of_all_transports() -> None:
    assert get_args(WeightsSetting) == ("auto", *get_args(WeightTransportName))
    assert get_type_hints(TransportTable)["weights"] == WeightsSetting
    assert get_type_hints(TransportSpec)["weights"] == WeightsSetting


def test_default_timeouts_allow_a_retry_within_a_pull() -> None:
    assert swarm.MAX_CHUNK_TIMEOUT_S * 2 < swarm.PULL_TIMEOUT_S
