"""A process whose memory NIXL can read, and which tests stop and kill.

``python -m rrl.tests.support.weights.slots`` fills one slot with :func:`content`, prints what a reader needs, ``NAME
METADATA_HEX ADDRESS``, and ends when its standard input ends.
"""

from __future__ import annotations

import os
import sys

from rrl.tests.support.weights.source import content
from rrl.transport.weights.nixl_memory import SLOT_BYTES, NixlRuntime

if __name__ == "__main__":
    reads = NixlRuntime("127.0.0.1")
    reads.set_ports_open(True)
    slot = reads.fill(content(SLOT_BYTES))
    print(reads.name.decode(), reads.local_metadata()[1].hex(), slot.address, flush=True)
    sys.stdin.read()
    os._exit(0)
