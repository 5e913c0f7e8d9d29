"""Inject faults into nodes and Slurm itself, on a test cluster that permits it (tests/support/slurm/fault_service.py).

The test cluster listens on a Unix socket that the environment names, and exchanges one JSON line in each direction. On
any other cluster faults are refused, because the nodes and slurmctld serve other users too.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
from msgspec import Struct

from ...core.faults import Fault, FaultKind
from ..base import Refused, Unanswered

LAB_FAULTS_ENV = "RRL_LAB_FAULTS"
"""Environment variable with the socket path of a test cluster that permits fault injection."""
START_TIMEOUT_S = 30.0
"""Seconds for the test cluster to begin a fault."""
_DONE_BY_LAB = (FaultKind.CRASH, FaultKind.CUT, FaultKind.DELAY, FaultKind.OUTAGE)


class _Answer(Struct):
    ok: bool
    detail: str = ""


async def inject_fault(fault: Fault) -> str:
    """Have the test cluster inject a fault and end it after ``fault.seconds``; return a text that says what was done.

    Raises:
        Refused: this is not a test cluster, or the test cluster cannot be reached or cannot inject this fault.
        Unanswered: the test cluster did not answer in time.
    """
    path = os.environ.get(LAB_FAULTS_ENV)
    if not path or fault.kind not in _DONE_BY_LAB:
        raise Refused(
            f"{fault.kind} can be injected on a test cluster only"
            if not path
            else f"a test cluster cannot inject {fault.kind}, only {', '.join(_DONE_BY_LAB)}"
        )
    request: dict[str, Any] = {"do": fault.kind.value}
    if fault.seconds:
        request["seconds"] = fault.seconds
    if fault.kind is not FaultKind.OUTAGE:
        request["node"] = fault.target
    if fault.kind is FaultKind.DELAY:
        request["ms"] = fault.amount
    # the test cluster answers the request for an outage when the outage is over
    timeout_s = START_TIMEOUT_S + (fault.seconds if fault.kind is FaultKind.OUTAGE else 0)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _send_request(path, msgspec.json.encode(request) + b"\n")
    except TimeoutError:
        raise Unanswered(f"the test cluster did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise Refused(f"the test cluster cannot be reached at {path}: {error.strerror}") from error
    if not answer.ok:
        raise Refused(answer.detail)
    return answer.detail


async def _send_request(path: str, line: bytes) -> _Answer:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(line)
        await writer.drain()
        reply = await reader.readline()
    finally:
        writer.close()
    try:
        return msgspec.json.decode(reply, type=_Answer)
    except msgspec.MsgspecError:
        raise Unanswered(f"the test cluster sent an invalid answer: {reply[:80]!r}") from None
