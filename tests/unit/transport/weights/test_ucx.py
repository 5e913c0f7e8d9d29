"""The settings of UCX that docs/sources.md requires. The tests over all transports test its transfers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from rrl.tests.support.weights.source import VERSION
from rrl.tests.support.weights.transports import SECRET, complete, holding, served, transport_for, weight_source
from rrl.transport.streams.connection import TransportError
from rrl.transport.tcp_inspection import listening_addresses
from rrl.transport.weights.pull import pull
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.ucx import UcxTransport, _Worker
from rrl.transport.weights.ucx_settings import SETTINGS

SOON = 60.0
OPEN = """
import asyncio, os
from rrl.transport.weights.select import open_transport
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.ucx_settings import SETTINGS

async def main():
    pipe = open_transport("ucx", b"s" * 32, trusted_network=True)
    await pipe.serve(WeightStore(), "127.0.0.1")
    print({name: os.environ[name] for name in SETTINGS})
    await pipe.close()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def ucxx_is_here() -> None:
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")


def opened(**env: str) -> str:
    """Return the output of a process that opens a transport."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    child = subprocess.run([sys.executable, "-c", OPEN], env=rest | env, capture_output=True, text=True, timeout=SOON)
    assert child.returncode == 0, child.stderr
    return child.stdout + child.stderr


def test_every_ucx_setting_is_known_to_ucx_and_the_environment_overrides_it() -> None:
    output = opened(UCX_WARN_UNUSED_ENV_VARS="y", UCX_LOG_LEVEL="warn", UCX_TCP_KEEPIDLE="7s", UCX_NOT_A_SETTING="1")
    expected = SETTINGS | {"UCX_WARN_UNUSED_ENV_VARS": "y", "UCX_LOG_LEVEL": "warn", "UCX_TCP_KEEPIDLE": "7s"}
    assert str(expected) in output
    unused = [line for line in output.splitlines() if "unused environment variable" in line]
    assert unused, "UCX warns of no unused variable"
    assert all("UCX_NOT_A_SETTING" in line for line in unused)
    assert not any(name in line for line in unused for name in SETTINGS)


async def test_progress_is_made_in_a_thread_that_wakes_asyncio() -> None:
    """Every other way to make progress keeps a CPU core busy (measured)."""

    pipe = UcxTransport(b"s" * 32, "127.0.0.1")
    assert pipe._listening_worker is not None
    assert pipe._listening_worker.core.enable_python_future
    assert [thread.name for thread in threading.enumerate()].count("UCX notifier") == 1
    await pipe.close()

    assert "UCX notifier" not in [thread.name for thread in threading.enumerate()]


async def test_version_is_pulled_without_tcp_and_no_ucx_port_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version goes through shared memory, as it goes over RDMA, where TCP is off, too.

    The environment requests TCP, but without effect.
    """
    monkeypatch.setenv("UCX_TLS", "tcp,posix,cma,self")

    before = listening_addresses()
    source, pipe, mine = UcxTransport(SECRET, None), UcxTransport(SECRET, None), WeightStore()
    assert listening_addresses() == before
    at = await source.serve(holding(), "127.0.0.1")
    assert listening_addresses() - before == {("127.0.0.1", int(at.rpartition(":")[2]))}
    await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
    assert complete(mine)
    assert len(pipe._workers) == 2, "the version was not pulled over UCX"
    assert listening_addresses() - before == {("127.0.0.1", int(at.rpartition(":")[2]))}
    await pipe.close()
    await source.close()


async def test_a_trusted_ucx_listens_at_the_trusted_address_only() -> None:
    before = listening_addresses()
    pipe = UcxTransport(SECRET, "127.0.0.1")
    opened = listening_addresses() - before
    assert opened
    assert {address for address, _ in opened} == {"127.0.0.1"}
    assert pipe.ports() == {port for _, port in opened}
    await pipe.close()


@pytest.mark.parametrize(("serving", "asking"), [("ucx", "tcp"), ("tcp", "ucx")])
async def test_nodes_with_and_without_ucx_pull_from_each_other(serving: str, asking: str) -> None:
    mine = WeightStore()
    async with served(serving, holding()) as at, transport_for(asking) as pipe:
        await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
    assert complete(mine)


async def test_peers_that_ucx_cannot_connect_continue_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    mine = WeightStore()
    source, pipe = UcxTransport(SECRET, None), UcxTransport(SECRET, "127.0.0.1")
    try:
        join = _Worker.connect

        def unreachable(self: _Worker, address: bytes) -> Any:
            if self in pipe._workers:
                raise TransportError("ucx: unreachable")
            return join(self, address)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Worker, "connect", unreachable)
            at = await source.serve(holding(), "127.0.0.1")
            await pull(mine, VERSION, lambda: [weight_source(at)], pipe)
        assert complete(mine)
    finally:
        await pipe.close()
        await source.close()

    assert "use TCP: ucx: unreachable" in caplog.text
