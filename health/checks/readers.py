"""The check of the readers themselves: one that hangs or breaks is a finding of its own.

A hung call is UNKNOWN first: it may be the machine's load, or somebody who holds the driver's lock for a moment. NVML's
condemns the node if it lasts, and an independent witness of the same driver hangs too: DCGM's reader for as long, a
process that stays in state D within the driver, or one of the driver's that the kernel calls hung. Where no other
reader answers either, it is the machine, or the storage that it starts programs from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy
from ..readers.samples import READERS, HostData
from .base import Check, Said, Unknown, fail
from .node_state import Seen

_DRIVER = ("nv", "uvm", "rm_", "os_acquire")
"""beginnings of the kernel functions in which a process hangs that waits for NVIDIA's driver"""


_DRIVERS = ("nvidia", "nv-", "nv_queue")
"""beginnings of the names of processes that do nothing but ask that driver, or are of it. Users name their processes as
they like: root's count"""
_ROOT = 0
_HUNG_TASK = re.compile(r"INFO: task (?P<name>.+):\d+ blocked ")
_ILL = ("hung", "broken")
"""states of a reader that should be able to read"""


def is_missed(reader: str, seen: Seen, rules: Rules) -> bool:
    """It does not read and should: it is expected, something is wrong with it, or GPUs had a driver before."""
    gone = reader == "nvml" and reader in seen.kept
    return seen.newest[reader].state in _ILL or reader in rules.needed or gone


def _look(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    if _lasts("nvml", seen, rules, now):
        others = any(one.state not in _ILL for one in seen.newest.values())
        both = _lasts("dcgm", seen, rules, now) and others
        witness = "DCGM does not answer either" if both else _stuck_in_driver(seen)
        if witness:
            text = f"NVML does not answer, and {witness}"
            yield fail(Cause.GPU, Remedy.REBOOT, text, part="nvml", proof=True, source="nvml")
    for name in READERS:
        newest = seen.newest.get(name)
        if newest is None:
            continue
        if newest.state in _ILL:
            what = "does not answer" if newest.state == "hung" else "fails"
            yield Unknown(f"{name} {what}: {newest.why or newest.state}", decides=True)
        elif newest.state != "read" and is_missed(name, seen, rules):
            what = "expected here" if name in rules.needed else "read before"
            yield Unknown(f"{name}, which is {what}: {newest.why or newest.state}", decides=True)


def _lasts(reader: str, seen: Seen, rules: Rules, now: float) -> bool:
    """By the clock, not by readings: of a process that hangs in the kernel there are two, and no other is started."""
    since = seen.hung_since.get(reader)
    return since is not None and now - since >= rules.readers.stall


def _stuck_in_driver(seen: Seen) -> str:
    data = seen.data("host")
    stuck = data.stuck if isinstance(data, HostData) else ()
    found = (
        one for one in stuck
        if one.where.startswith(_DRIVER) or (one.name.startswith(_DRIVERS) and one.uid == _ROOT)
    )  # fmt: skip
    if one := next(found, None):
        return f"process {one.pid} ({one.name}) is stuck in its driver"
    since = seen.hung_since["nvml"]
    lines = (
        one.event.text for one in seen.log
        if one.event.kind == "hung_task" and one.at >= since and one.event.uid == _ROOT
    )  # fmt: skip
    names = (match["name"] for line in lines if (match := _HUNG_TASK.search(line)))
    name = next((name for name in names if name.startswith(_DRIVERS)), "")
    return f"the kernel calls {name} hung" if name else ""


CHECKS = (
    Check("readers", READERS, _look, "whether the readers of the node answer in time",
          "one does not: UNKNOWN; NVML does not for readers.stall s, nor does DCGM for as long, or a process is stuck"
          " in its driver: FAIL, reboot", "NVSentinel (probe deadline)", any_reader=True),
)  # fmt: skip
