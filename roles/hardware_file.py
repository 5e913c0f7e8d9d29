"""Where an agent keeps for the next one of its node what hardware it has seen there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from rrl.health.hardware_past import HardwarePast
from rrl.spec.rundir import write_atomically

_MOST = 1 << 20
"""bytes; what is longer is none of ours"""


def load_past(path: Path) -> HardwarePast | None:
    """None where there is none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path.stat().st_size <= _MOST:
            return msgspec.json.decode(path.read_bytes(), type=HardwarePast)
    return None


def keep_past(path: Path, past: HardwarePast) -> None:
    """A disk that is full costs a memory, and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, msgspec.json.encode(past))
