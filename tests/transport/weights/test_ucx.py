"""How UCX is set up: what docs/sources.md says that it must be told. What it then does is tested over all pipes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading

import pytest

from rrl.transport.weights.ucx import UcxPipe
from rrl.transport.weights.ucx_settings import SETTINGS

SOON = 60.0
OPEN = """
import asyncio, os
from rrl.transport.weights.pipe import open_pipe
from rrl.transport.weights.store import WeightStore
from rrl.transport.weights.ucx_settings import SETTINGS

async def main():
    pipe = open_pipe("ucx", b"s" * 32, trusted_network=True)
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
    """What a process says that opens a pipe."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    child = subprocess.run([sys.executable, "-c", OPEN], env=rest | env, capture_output=True, text=True, timeout=SOON)
    assert child.returncode == 0, child.stderr
    return child.stdout + child.stderr


def test_every_setting_is_one_that_ucx_knows_and_the_environments_own_win() -> None:
    said = opened(UCX_WARN_UNUSED_ENV_VARS="y", UCX_LOG_LEVEL="warn", UCX_TCP_KEEPIDLE="7s", UCX_NOT_A_SETTING="1")
    expected = SETTINGS | {"UCX_WARN_UNUSED_ENV_VARS": "y", "UCX_LOG_LEVEL": "warn", "UCX_TCP_KEEPIDLE": "7s"}
    assert str(expected) in said
    unused = [line for line in said.splitlines() if "unused environment variable" in line]
    assert unused, "it warns of none"
    assert all("UCX_NOT_A_SETTING" in line for line in unused)
    assert not any(name in line for line in unused for name in SETTINGS)


def test_progress_is_made_in_a_thread_that_wakes_asyncio() -> None:
    """Everything else keeps a core busy (measured)."""

    async def test() -> None:
        pipe = UcxPipe(b"s" * 32, "127.0.0.1")
        assert pipe._own is not None
        assert pipe._own.core.enable_python_future
        assert [thread.name for thread in threading.enumerate()].count("UCX notifier") == 1
        await pipe.close()

    asyncio.run(test())
    assert "UCX notifier" not in [thread.name for thread in threading.enumerate()]
