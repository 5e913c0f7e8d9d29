"""The TCP ports that each UCX worker itself listens at, for as long as it lives.

Nobody has to prove anything there: that is why UCX uses TCP on trusted networks only (docs/sites.md). UCX drops
garbage; a connection that sends nothing keeps a descriptor for good. Such connections are ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rrl.transport.connections import accepted, received, shut

HELLO_BYTES = 42
"""what a peer says first (magic number and connection request, UCX 1.21 over IPv4; measured), within milliseconds"""
SILENT_FOR = 5.0
"""s that a connection may have said less than that"""
SILENT = 64
"""such connections at once, at most; the oldest go first"""
_LOOK = 1.0
"""s between two looks; one costs 10 us for each descriptor of the process"""


async def cut_off_the_silent(ports: Callable[[], frozenset[int]]) -> None:
    """Until cancelled. ``ports``: those at which UCX listens now."""
    seen: dict[tuple[int, int], float] = {}
    while True:
        now = asyncio.get_running_loop().time()
        silent = [each for each in accepted(ports()).items() if _silent(each[0])]
        seen = {each: seen.get(each, now) for each in silent}  # (a descriptor, whose port it is at) → since when
        oldest_first = sorted(seen, key=lambda each: seen[each])
        surplus = max(0, len(seen) - SILENT)
        for number, each in enumerate(oldest_first):
            if number < surplus or now - seen[each] >= SILENT_FOR:
                shut(*each)
        await asyncio.sleep(_LOOK)


def _silent(fd: int) -> bool:
    said = received(fd)
    return said is not None and said < HELLO_BYTES  # of whom nobody can tell: it may be a member, and is left alone
