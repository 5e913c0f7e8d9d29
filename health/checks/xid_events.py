"""Xid events of one node, each counted once, and the catalogue of Xids.

An Xid is an error code that NVIDIA's driver reports for a GPU. Reports come from the kernel log, NVML's events and
DCGM's counts. All reports of one Xid on one GPU within ``rules.xid.burst`` s are one event, whichever source they have.
The kernel log names a GPU by its PCI address. NVML and DCGM name it by its UUID; NVML sometimes omits the name. Reports
about one GPU are joined once its address and its UUID are known.

``xids.csv`` contains for each Xid its meaning, its class, its action (such as a reboot) and the party at fault;
:mod:`rrl.health.checks.xid` derives the verdict from them. Classes: ``node_out``, ``gpu_reset``, ``nvlink``, ``app``,
``ignore``, ``service``, ``rest`` (docs/health.md). The meanings follow NVIDIA's "Analyzing Xid Errors with the Xid
Catalog" and nverror.h. The classes are the union of the tables of NVSentinel, DCGM and gcm (source ``peers``:
docs/sources.md, Xids). A site can change the class of an Xid in its rules ([xid.classes]).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from msgspec import Struct, convert

from ...config.health_rules import XidClass, XidRules
from ...core.types import Remedy

RECOVERY_ACTION_XID = 154
"""Xid with which the driver states the recovery action that a GPU needs."""
FATAL_CLASSES: frozenset[XidClass] = frozenset(("node_out", "gpu_reset"))
"""Classes of Xids that count even shortly before and after rrl kills a step."""

_ACTIONS = {
    "none": None,
    "drain p2p": Remedy.EXCLUDE,
    "drain and reset": Remedy.RESET_GPU,
    "gpu reset": Remedy.RESET_GPU,
    "gpu reset required": Remedy.RESET_GPU,
    "node reboot": Remedy.REBOOT,
    "node reboot required": Remedy.REBOOT,
}
"""Remedies by the phrase in the text of Xid 154."""


class Xid(Struct, frozen=True):
    """Entry of the Xid catalogue."""

    code: int
    meaning: str
    kind: XidClass
    action: Remedy
    """Immediate remedy; for class ``app`` it is a restart of the application."""
    fault: str
    """Party at fault: ``gpu``, ``link``, ``application``, ``driver``, ``service``, ``sympathetic``, ``nobody`` or
    ``unknown``."""
    source: str


@cache
def catalogue() -> dict[int, Xid]:
    """Return the catalogue by code; the file beside this module is read once."""
    with Path(__file__).with_name("xids.csv").open(newline="") as file:
        rows = ({**row, "kind": row["class"]} for row in csv.DictReader(file))
        return {int(row["code"]): convert(row, Xid, strict=False) for row in rows}


def xid(code: int, rules: XidRules) -> Xid:
    """Return the catalogue entry with the class that the site assigns; an unknown number has class ``rest``."""
    known = catalogue().get(code) or Xid(code, "not in the catalogue", "rest", Remedy.NONE, "unknown", "")
    kind = rules.classes.get(str(code), known.kind)
    if kind == known.kind:
        return known
    action = next(entry.action for entry in catalogue().values() if entry.kind == kind)
    return Xid(code, known.meaning, kind, action, known.fault, "site")


def parse_recovery_action(text: str) -> tuple[bool, Remedy | None]:
    """Return (whether the text of an Xid 154 states an action, the remedy for that action).

    The remedy is None if no action is needed. The text is like ``GPU recovery action changed from 0x0 (None) to 0x2
    (Node Reboot Required)``; DCGM and NVML report the Xid without a text.
    """
    phrases = re.findall(r"\(([A-Za-z][A-Za-z0-9 ]*)\)", text.partition("changed")[2])
    action = phrases[-1].strip().lower() if phrases else ""
    return action in _ACTIONS, _ACTIONS.get(action)


_PROCESS_NAME = re.compile(r"\bname=(?:\\x[0-9a-f]{2}|[^\\]){0,15}(?:, |$)")
"""Pattern of the process name in an Xid's text. The user chooses the name: at most 15 bytes, possibly with commas."""


def is_fatal(text: str) -> bool:
    """Return whether the text of an NVLink Xid or an SXid says "fatal", and not "non-fatal".

    The name of the user's process in the text is ignored.
    """
    driver_text = _PROCESS_NAME.sub("", text, count=1).lower().replace("nonfatal", "non-fatal")
    return bool(re.search(r"(?<!non)(?<!non[- ])\bfatal\b", driver_text))


_MAX_EVENTS = 500
"""Maximum number of events that are kept."""
_RETENTION_S = 2 * 86400.0
"""Age up to which events are kept (s)."""


@dataclass(slots=True)
class XidEvent:
    """One Xid on one GPU, from all reports of it within a burst."""

    gpu: str
    """UUID of the GPU, or its PCI address if no UUID is known; empty if no report names the GPU."""
    code: int
    at: float
    """Time of the first report (s)."""
    text: str = ""
    """Text of the newest report with a text."""
    text_at: float = 0.0
    """Time (s) of the report that contained ``text``."""
    last_reported_at: float = 0.0
    """Time (s) of the newest occurrence of the Xid. A repeated report by the same source is a new occurrence; the first
    report by another source is not."""
    fatal: bool = False
    """Whether a report calls the event fatal."""
    before_start: bool = False
    """Whether the event is older than the node's first sample."""
    tenant: tuple[str, str] | None = None
    """Role and incarnation that used the GPU."""
    sources: set[str] = field(default_factory=set)
    """Readers that reported the event."""
    pci_exists: bool | None = None
    """Whether the PCI address in the kernel log belongs to an NVIDIA device of this node; None if the kernel log did
    not report the event, or the node's devices cannot be listed."""


class XidEvents:
    """The Xid events of one node. An event that several sources report is contained once."""

    def __init__(self, burst: float) -> None:
        self._burst = burst
        self._uuids: dict[str, str] = {}
        self.events: list[XidEvent] = []
        """Events, oldest first."""

    def add(self, event: XidEvent) -> None:
        """Add a report: merge it into the event that it belongs to, or add a new event."""
        event.gpu = self.uuid_of(event.gpu)
        event.fatal = event.fatal or is_fatal(event.text)
        event.text_at, event.last_reported_at = event.text_at or event.at, event.last_reported_at or event.at
        for known in reversed(self.events):
            if known.code == event.code and self._same_gpu(known, event) and abs(event.at - known.at) <= self._burst:
                _merge(known, event)
                return
        self.events.append(event)
        self.events.sort(key=lambda known: known.at)
        newest = self.events[-1].at
        self.events = [known for known in self.events[-_MAX_EVENTS:] if known.at > newest - _RETENTION_S]

    def uuid_of(self, gpu: str) -> str:
        """Return the UUID of the GPU with this PCI address; ``gpu`` itself if no UUID is known."""
        return self._uuids.get(gpu, gpu)

    def set_uuids(self, uuids: Mapping[str, str]) -> None:
        """Store NVML's UUIDs by PCI address, and merge events of one GPU that were reported by address and by UUID."""
        if not uuids.items() - self._uuids.items():
            return
        self._uuids.update(uuids)
        events, self.events = self.events, []
        for event in events:
            self.add(event)

    def recent(self, window: float, now: float) -> Iterator[XidEvent]:
        """Yield the events of the last ``window`` s."""
        return (event for event in self.events if event.at > now - window)

    def _same_gpu(self, first: XidEvent, second: XidEvent) -> bool:
        return first.gpu == second.gpu or not first.gpu or not second.gpu


def _merge(known: XidEvent, event: XidEvent) -> None:
    known.gpu = known.gpu or event.gpu
    known.fatal |= event.fatal
    known.before_start &= event.before_start
    if known.sources & event.sources:
        known.last_reported_at = max(known.last_reported_at, event.last_reported_at)
    known.tenant = known.tenant or event.tenant
    known.pci_exists = event.pci_exists if known.pci_exists is None else known.pci_exists or bool(event.pci_exists)
    known.sources |= event.sources
    if event.text and (not known.text or event.text_at >= known.text_at):
        known.text, known.text_at = event.text, event.text_at
