"""What somebody without a key can try with UCX at a port: ``python -m rrl.tests.security.ucx_attack HOST PORT ...``.

Prints one JSON object: for each port, what was answered. Two ways in are tried. UCX's interface port takes a connection
from whoever has the address of its worker, which is our own address with another port in it; over it, puts and gets go
without any key. UCX's listener takes a connection by host and port.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

TRY_S = 2.0
"""for one attempt; a UCX that is there has answered within 0.2 s on a busy machine"""
MESSAGE = b"x" * 64
"""sent with the connection: small enough to go in one piece, so that it completes once the connection is accepted"""


async def _delivered(endpoint: Any) -> bool:
    """Whether a message, and then everything before it, is accepted by a UCX at the other end."""
    from ucxx._lib.arr import Array
    from ucxx.types import Tag

    try:
        async with asyncio.timeout(TRY_S):
            await endpoint.tag_send(Array(MESSAGE), Tag(1)).wait()
            await endpoint.am_send(Array(MESSAGE)).wait()
            await asyncio.sleep(TRY_S / 2)  # a refusal may come after what was sent
        endpoint.raise_on_error()
    except Exception:
        return False
    finally:
        endpoint.close_blocking(period=10**9, max_attempts=1)
    return True


async def attack(host: str, ports: list[int]) -> dict[int, list[str]]:
    """The ways by which a UCX was reached at each port."""
    from ucxx._lib.libucxx import UCXAddress, UCXEndpoint
    from ucxx._lib_async.application_context import ApplicationContext

    own = ApplicationContext(progress_mode="thread", enable_python_future=True)
    address = UCXAddress.create_from_worker(own.worker).tobytes()
    mine = next(port for port in _listening_ports() if port.to_bytes(2, "big") in address).to_bytes(2, "big")
    assert address.count(mine) == 1

    def interface(port: int) -> Any:
        forged = UCXAddress.create_from_buffer(address.replace(mine, port.to_bytes(2, "big")))
        return UCXEndpoint.create_from_worker_address(other.worker, forged, False)

    other = ApplicationContext(progress_mode="thread", enable_python_future=True)
    ways: dict[str, Callable[[int], Any]] = {
        "interface port": interface,
        "listener": lambda port: UCXEndpoint.create(other.worker, host, port, True),
    }
    reached: dict[int, list[str]] = {port: [] for port in ports}
    for name, connect in ways.items():
        answers = await asyncio.gather(*(_tried(connect, port) for port in ports))
        for port, answered in zip(ports, answers, strict=True):
            reached[port] += [name] * answered
    return reached


async def _tried(connect: Callable[[int], Any], port: int) -> bool:
    try:
        endpoint = connect(port)
    except Exception:
        return False
    return await _delivered(endpoint)


def _listening_ports() -> list[int]:
    from rrl.transport.connections import listening

    return [port for _, port in listening()]


if __name__ == "__main__":
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
    print(json.dumps(asyncio.run(attack(sys.argv[1], [int(port) for port in sys.argv[2:]]))), flush=True)
    os._exit(0)
