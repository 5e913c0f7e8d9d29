"""Forwards frames between two network devices with a delay, until it is killed (root only).

Usage: ``python -m rrl.tests.support.slurm.delayed_link DEVICE DEVICE MILLISECONDS``. It does what ``tc qdisc ...
netem delay`` does, for kernels without netem.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Constants of packet(7) and linux/if_packet.h. The virtio header preserves unfinished checksums and large segments."""
_FRAME = 128 * 1024


def forward(names: Sequence[str], late: float) -> None:
    """Forward frames in both directions, each after ``late`` s."""
    ends = [_opened(name) for name in names]
    waiting: dict[socket.socket, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    """Frames by the device to which they go, each with the time at which it must be sent."""
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for end in select.select(ends, [], [], timeout)[0]:
            try:
                waiting[other[end]].append((time.monotonic() + late, end.recv(_FRAME)))
            except OSError:  # recv reports this error once when the link goes down
                continue
        for end, queue in waiting.items():
            while queue and queue[0][0] <= time.monotonic():
                frame = queue.popleft()[1]
                try:
                    end.send(frame)
                except OSError:  # the link is down, so the frame is lost, as on a wire
                    continue


def _opened(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    for option in (_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING):
        end.setsockopt(_SOL_PACKET, option, 1)
    end.bind((name, _ETH_P_ALL))
    return end


if __name__ == "__main__":
    first, second, milliseconds = sys.argv[1:]
    os.nice(-5)  # if this process ran late, it would add to the delay
    forward((first, second), float(milliseconds) / 1000)
