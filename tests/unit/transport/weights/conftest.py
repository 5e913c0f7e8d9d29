"""Fixtures of the tests with real weight transports: each kind of transport, and an event loop for it."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Generator

import pytest

from rrl.tests.support.weights.transports import KINDS, SECRET
from rrl.transport.weights.base import WeightTransport
from rrl.transport.weights.select import open_transport

collect_ignore = [f"test_{kind}.py" for kind in ("nixl", "ucx") if kind not in KINDS]
"""Files of tests that open one kind of transport by its name, for each kind that is not tested."""


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def runner(kind: str) -> Generator[asyncio.Runner]:
    """Return the only event loop of a transport: UCX's runtime belongs to a loop and takes 1 s to stop."""

    async def opened() -> WeightTransport:
        return open_transport(kind, SECRET, trusted_network=True)

    with asyncio.Runner() as runner:
        opener = runner.run(opened())
        yield runner
        runner.run(opener.close())
