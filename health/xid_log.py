"""Xids as they were told: by the kernel log, NVML's events and DCGM's counts, each once.

One Xid on one GPU within a burst is one event, whoever tells it and how often. The kernel log names a GPU by its bus,
the others by its UUID, and NVML sometimes not at all: what is told of one GPU comes together once both names are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rrl.health.xids import is_fatal

_MOST = 500
"""events that are remembered"""
_KEPT = 2 * 86400.0
"""s"""


@dataclass(slots=True)
class XidEvent:
    gpu: str
    """its UUID; its bus where no UUID is known; empty: nobody said which"""
    code: int
    at: float
    """s, of the first telling"""
    text: str = ""
    """the newest telling that had words"""
    text_at: float = 0.0
    last: float = 0.0
    """s, of the last telling that was no echo: by somebody who had told of it before"""
    fatal: bool = False
    """one telling said so"""
    past: bool = False
    """from before we looked"""
    who: tuple[str, str] | None = None
    """role and life that had the GPU"""
    sources: set[str] = field(default_factory=set)
    pci_exists: bool | None = None
    """the kernel log's PCI address is of an NVIDIA device of this node; None: no kernel log told of it, or the node's
    devices cannot be listed"""


class XidLog:
    def __init__(self, burst: float) -> None:
        self._burst = burst
        self._uuids: dict[str, str] = {}
        self.events: list[XidEvent] = []
        """oldest first"""

    def add(self, event: XidEvent) -> None:
        event.gpu = self.named(event.gpu)
        event.fatal = event.fatal or is_fatal(event.text)
        event.text_at, event.last = event.text_at or event.at, event.last or event.at
        for known in reversed(self.events):
            if known.code == event.code and self._same_gpu(known, event) and abs(event.at - known.at) <= self._burst:
                _merge(known, event)
                return
        self.events.append(event)
        self.events.sort(key=lambda one: one.at)
        newest = self.events[-1].at
        self.events = [one for one in self.events[-_MOST:] if one.at > newest - _KEPT]

    def named(self, gpu: str) -> str:
        """A GPU's UUID by its bus, where that is known."""
        return self._uuids.get(gpu, gpu)

    def name(self, uuids: Mapping[str, str]) -> None:
        """UUIDs by bus, as NVML says: what was told by bus is told again by UUID."""
        if not uuids.items() - self._uuids.items():
            return
        self._uuids.update(uuids)
        events, self.events = self.events, []
        for event in events:
            self.add(event)

    def within(self, window: float, now: float) -> Iterator[XidEvent]:
        return (event for event in self.events if event.at > now - window)

    def _same_gpu(self, one: XidEvent, other: XidEvent) -> bool:
        return one.gpu == other.gpu or not one.gpu or not other.gpu


def _merge(known: XidEvent, event: XidEvent) -> None:
    known.gpu = known.gpu or event.gpu
    known.fatal |= event.fatal
    known.past &= event.past
    if known.sources & event.sources:
        known.last = max(known.last, event.last)
    known.who = known.who or event.who
    known.pci_exists = event.pci_exists if known.pci_exists is None else known.pci_exists or bool(event.pci_exists)
    known.sources |= event.sources
    if event.text and (not known.text or event.text_at >= known.text_at):
        known.text, known.text_at = event.text, event.text_at
