"""The check of the readers themselves: one that hangs or breaks is a finding of its own.

A hung call is UNKNOWN first: it may be the machine's load. NVML's condemns the node once an independent witness of the
same driver hangs too: DCGM's reader, or a process that stays in state D within the driver. Where no other reader
answers either, it is the machine, or the storage that it starts programs from.
"""

from __future__ import annotations

from collections.abc import Iterator

from rrl.health.looks import Check, Said, Unknown, fail
from rrl.health.readings import READERS, HostData
from rrl.health.seen import Seen
from rrl.spec.health_checks import Rules
from rrl.spec.words import Cause, Remedy

_DRIVER = ("nv", "uvm", "rm_", "os_acquire")
"""beginnings of the kernel functions in which a process hangs that waits for NVIDIA's driver"""


_ILL = ("hung", "broken")
"""states of a reader that should be able to read"""


def is_missed(reader: str, seen: Seen, rules: Rules) -> bool:
    """It does not read and should: it is expected, something is wrong with it, or GPUs had a driver before."""
    gone = reader == "nvml" and reader in seen.kept
    return seen.newest[reader].state in _ILL or reader in rules.needed or gone


def _look(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    if seen.hung.get("nvml"):
        others = any(one.state not in _ILL for one in seen.newest.values())
        both = seen.hung.get("dcgm") and others
        witness = "DCGM does not answer either" if both else _stuck_in_driver(seen, rules)
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


def _stuck_in_driver(seen: Seen, rules: Rules) -> str:
    data = seen.data("host")
    if not isinstance(data, HostData) or seen.hung["nvml"] < rules.readers.hung:
        return ""
    stuck = (one for one in data.stuck if one.where.startswith(_DRIVER) or one.name.startswith(("nvidia", "nv-")))
    return next((f"process {one.pid} ({one.name}) is stuck in its driver" for one in stuck), "")


CHECKS = (
    Check("readers", READERS, _look, "whether the readers of the node answer in time",
          "one does not: UNKNOWN; NVML does not, nor does DCGM, or readers.hung times and a process is stuck in its"
          " driver: FAIL, reboot", "NVSentinel (peers.md 5a, probe deadline)", any_reader=True),
)  # fmt: skip
