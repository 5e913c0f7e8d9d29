"""Attacks on UCX's ports by a process without a key.

``python -m rrl.tests.support.security.ucx_attack HOST PORT ...`` prints a JSON object: for each port the ways in which
a UCX process was reached. UCX's interface port accepts a peer that sends the 42 bytes with which UCX begins; puts and
gets over that connection need no key. The attack records these bytes, and UCX's answer to them, from two UCX contexts
in this process. The other way to reach a process is a connection to UCX's listener by host and port.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from typing import Any

from rrl.transport.tcp_inspection import listening_addresses
from rrl.transport.weights.ucx import MIN_HELLO_BYTES

TRY_S = 2.0
"""Timeout (s) of one attempt. UCX answers within 0.2 s on a busy machine."""
MESSAGE = b"x" * 64
HOST = "127.0.0.1"


async def attack(host: str, ports: list[int]) -> dict[int, list[str]]:
    """Return the ways in which a UCX process was reached, by port."""
    from ucxx._lib.libucxx import UCXAddress, UCXEndpoint
    from ucxx._lib_async.application_context import ApplicationContext

    mine = ApplicationContext(progress_mode="thread", enable_python_future=True)
    address = UCXAddress.create_from_worker(mine.worker).tobytes()
    own_port = next(port for _, port in listening_addresses() if port.to_bytes(2, "big") in address)
    with socket.create_server((HOST, 0)) as recorder:
        at = recorder.getsockname()[1]
        forged = address.replace(own_port.to_bytes(2, "big"), at.to_bytes(2, "big"))
        other = ApplicationContext(progress_mode="thread", enable_python_future=True)
        endpoint = UCXEndpoint.create_from_worker_address(other.worker, UCXAddress.create_from_buffer(forged), True)
        hello = await asyncio.to_thread(_recorded, recorder)
    endpoint.close_blocking(period=10**9, max_attempts=1)
    accepted = await asyncio.to_thread(_answer, HOST, own_port, hello)
    assert accepted, "UCX of this process does not answer, so that the attack would show nothing"

    reached: dict[int, list[str]] = {}
    for port in ports:
        reached[port] = []
        if await asyncio.to_thread(_answer, host, port, hello) == accepted:
            reached[port].append("interface port")
    dialled = await asyncio.gather(*(_dialled(UCXEndpoint, other.worker, host, port) for port in ports))
    for port, delivered in zip(ports, dialled, strict=True):
        reached[port] += ["listener"] * delivered
    return reached


def _recorded(recorder: socket.socket) -> bytes:
    recorder.settimeout(TRY_S)
    connected, _ = recorder.accept()
    with connected:
        connected.settimeout(TRY_S)
        return connected.recv(MIN_HELLO_BYTES, socket.MSG_WAITALL)


def _answer(host: str, port: int, hello: bytes) -> bytes:
    """Return the first bytes of the answer; empty if there is no answer."""
    try:
        with socket.create_connection((host, port), TRY_S) as connection:
            connection.settimeout(TRY_S)
            connection.sendall(hello)
            return connection.recv(64)
    except OSError:
        return b""


async def _dialled(endpoints: Any, worker: Any, host: str, port: int) -> bool:
    """Return whether a UCX listener accepts a message."""
    from ucxx._lib.arr import Array
    from ucxx.types import Tag

    try:
        endpoint = endpoints.create(worker, host, port, True)
    except Exception:  # ucxx raises its own exceptions, and RuntimeError
        return False
    try:
        async with asyncio.timeout(TRY_S):
            await endpoint.tag_send(Array(MESSAGE), Tag(1)).wait()
            await endpoint.am_send(Array(MESSAGE)).wait()
        endpoint.raise_on_error()
    except Exception:
        return False
    finally:
        endpoint.close_blocking(period=10**9, max_attempts=1)
    return True


if __name__ == "__main__":
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
    print(json.dumps(asyncio.run(attack(sys.argv[1], [int(port) for port in sys.argv[2:]]))), flush=True)
    os._exit(0)
