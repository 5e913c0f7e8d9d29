"""The catalogue of Xids: what each number means, how grave it is, whose fault. Data in ``xids.csv``; how they are
judged lies in :mod:`rrl.health.checks_xid`.

Classes: ``node_out``, ``gpu_reset``, ``nvlink``, ``app``, ``ignore``, ``service``, ``rest`` (docs/health.md). Meanings
are after NVIDIA's "Analyzing Xid Errors with the Xid Catalog" and nverror.h, classes the union of NVSentinel's table,
DCGM's and gcm's (``5b``: docs/sources.md). A site corrects a class in its rules ([xid.classes]).
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

from msgspec import Struct, convert

from rrl.spec.health_checks import XidClass, XidRules
from rrl.spec.words import Remedy

AUTHORITY = 154
"""the driver's own word on what a GPU needs"""
GRAVEST: frozenset[XidClass] = frozenset(("node_out", "gpu_reset"))
"""act also around our own kill of a step"""

_ACTIONS = {
    "none": None,
    "drain p2p": Remedy.EXCLUDE,
    "drain and reset": Remedy.RESET_GPU,
    "gpu reset": Remedy.RESET_GPU,
    "gpu reset required": Remedy.RESET_GPU,
    "node reboot": Remedy.REBOOT,
    "node reboot required": Remedy.REBOOT,
}
"""by the words in the text of Xid 154"""


class Xid(Struct, frozen=True):
    code: int
    meaning: str
    kind: XidClass
    action: Remedy
    """at once; of ``app`` it is the application that restarts"""
    fault: str
    """``gpu``, ``link``, ``application``, ``driver``, ``service``, ``sympathetic``, ``nobody`` or ``unknown``"""
    source: str


@cache
def catalogue() -> dict[int, Xid]:
    """By code. Reads the file beside this module once."""
    with Path(__file__).with_name("xids.csv").open(newline="") as file:
        rows = ({**row, "kind": row["class"]} for row in csv.DictReader(file))
        return {int(row["code"]): convert(row, Xid, strict=False) for row in rows}


def xid(code: int, rules: XidRules) -> Xid:
    """Of the catalogue, with the class that the site gives it; of an unknown number one of class ``rest``."""
    known = catalogue().get(code) or Xid(code, "not in the catalogue", "rest", Remedy.NONE, "unknown", "")
    kind = rules.classes.get(str(code), known.kind)
    if kind == known.kind:
        return known
    action = next(one.action for one in catalogue().values() if one.kind == kind)
    return Xid(code, known.meaning, kind, action, known.fault, "site")


def authority(text: str) -> tuple[bool, Remedy | None]:
    """What the text of Xid 154 says: (it says something, what is needed; None: nothing).

    ``GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)``; DCGM and NVML give no text."""
    told = re.findall(r"\(([A-Za-z][A-Za-z0-9 ]*)\)", text.partition("changed")[2])
    said = told[-1].strip().lower() if told else ""
    return said in _ACTIONS, _ACTIONS.get(said)


_PROCESS_NAME = re.compile(r"\bname=(?:\\x[0-9a-f]{2}|[^\\]){0,15}(?:, |$)")
"""in an Xid's text: the user's choice, at most 15 bytes, which may hold commas"""


def is_fatal(text: str) -> bool:
    """Return whether the text of an NVLink Xid or an SXid says "fatal", and not "non-fatal", outside the name of the
    user's process."""
    driver_text = _PROCESS_NAME.sub("", text, count=1).lower().replace("nonfatal", "non-fatal")
    return bool(re.search(r"(?<!non)(?<!non[- ])\bfatal\b", driver_text))
