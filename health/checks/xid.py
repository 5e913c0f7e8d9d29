"""The check of Xids: one finding a GPU, from all that was told of it within a day. What each code means is data
(``xids.csv``); what follows from it is here.

- 154 states what the driver wants, and is believed before any other. 45 is never a cause.
- What is the application's doing never condemns a node alone; twice on one GPU, and on no other, the GPU is suspected,
  and it is out once different roles met it there.
- Rare and unknown numbers are told once; they condemn only if a role on that GPU died around them.
- Around our own kill of a step, only ``node_out`` and ``gpu_reset`` act; but that a role died there unasked is no kill.
- What was told before we looked, a reset may have cured since: the driver's word counts (recovery action "none"), and
  where it is too old to say so, that what the Xid leaves behind is gone.
- An Xid that only the kernel log tells of must be of a GPU that is here. Where NVML can contradict it (79: the GPU
  answers; 154: the driver asks for nothing), NVML is awaited and believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy, Verdict
from ..readers.samples import Gpu, NvmlData
from .base import Bad, Check, Said, Unknown, fail, warn
from .node_state import Seen
from .xid_events import AUTHORITY, GRAVEST, Xid, XidEvent, authority, is_fatal, xid

_LINES = 5
"""of evidence"""
_LEAVES = {
    48: "ecc_volatile_uncorrected", 95: "ecc_volatile_uncorrected", 140: "ecc_volatile_uncorrected", 64: "remap_failed",
}  # fmt: skip
"""by code, what a GPU tells until it is reset"""
_OFF_THE_BUS = 79
_NVML_CAN_CONTRADICT = (_OFF_THE_BUS, AUTHORITY)
_NVML_SETTLES_S = 2.0
"""An NVML reading that ends this long after an Xid also began after it: NVML is read once a second."""
_NVML_AWAITED_S = 15.0
"""An Xid waits for such a reading for this long: longer than a read may take before it counts as hung (10 s)."""
_IF_THE_DRIVER_SAYS_SO = (160, 162)
"""NVIDIA's own catalogue asks for nothing, NVSentinel takes the node or the GPU: a driver that says that nothing is
needed decides"""


class _Gpu:
    """What is judged together: the events of one GPU, oldest first, and what else is known of it."""

    def __init__(self, name: str, events: list[XidEvent], seen: Seen, rules: Rules, now: float) -> None:
        self.name, self.seen, self.rules, self.now = name, seen, rules, now
        self.stated = _stated(events)
        self.cleared = self.stated[0] if self.stated and self.stated[1] is None else None
        """when (s) the driver said that nothing is needed any more"""
        self.events = [(event, xid(event.code, rules.xid)) for event in events]
        self.gpu: Gpu | None = next((g for g in _gpus(seen) if name in (g.uuid, g.pci)), None)

    def of(self, *kinds: str) -> list[tuple[XidEvent, Xid]]:
        """Return the events of these classes that may act: not those of our own kill, those that were dealt with, or
        those that are in doubt."""
        return [
            (e, x) for e, x in self.events
            if x.kind in kinds and not self._ours(e, x) and not self.over(e, x) and not self.doubt(e)
        ]  # fmt: skip

    def doubt(self, event: XidEvent) -> str:
        """Return why this event, of which only the kernel log tells, does not count (yet); empty: it counts."""
        if event.sources != {"kernel"}:
            return ""
        if self.gpu is None:
            return "" if event.pci_exists else "the kernel log names a PCI address where no GPU is known"
        if self._nvml_contradicts(event):
            return "only the kernel log says so, and NVML says that the GPU works"
        if self._awaits_nvml(event):
            return "only the kernel log says so, and NVML was not read since"
        return ""

    def _nvml_contradicts(self, event: XidEvent) -> bool:
        """Return whether NVML was read after this event, and what it says disproves it."""
        newest = self.seen.newest.get("nvml")
        read = newest is not None and newest.state == "read" and newest.at >= event.last + _NVML_SETTLES_S
        return read and event.code in _NVML_CAN_CONTRADICT and self._well(event.code)

    def _awaits_nvml(self, event: XidEvent) -> bool:
        """Return whether NVML, which saw nothing wrong before this event, is to be read again before it counts."""
        newest = self.seen.newest.get("nvml")
        due = newest is not None and newest.state == "read" and newest.at < event.last + _NVML_SETTLES_S
        fresh = self.now < event.last + _NVML_AWAITED_S
        return due and fresh and event.code in _NVML_CAN_CONTRADICT and self._well(event.code)

    def _ours(self, event: XidEvent, what: Xid) -> bool:
        before, after = self.rules.xid.kill_lead, self.rules.xid.kill
        ours = any(-before <= event.at - kill <= after for kill in self.seen.kills)
        return ours and what.kind not in GRAVEST and not self.died(event)

    def over(self, event: XidEvent, what: Xid) -> bool:
        """The driver has dealt with it. What a program did is nothing that a driver deals with."""
        if what.kind == "app":
            return False
        may_be = event.past or event.code in _IF_THE_DRIVER_SAYS_SO
        return (self.cleared is not None and event.last <= self.cleared) or (may_be and self._well(event.code))

    def _well(self, code: int) -> bool:
        gpu = self.gpu
        if gpu is None or gpu.lost or gpu.recovery_action is not None:
            return gpu is not None and not gpu.lost and gpu.recovery_action == "none"
        if code == _OFF_THE_BUS:
            return gpu.temperature is not None
        return code in _LEAVES and getattr(gpu, _LEAVES[code]) in (0, False)

    def died(self, event: XidEvent) -> bool:
        around = self.rules.xid.died
        return any(abs(event.at - at) <= around and event.gpu in gpus for at, gpus in self.seen.deaths)


def _look(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    by_gpu: dict[str, list[XidEvent]] = {}
    for event in seen.xids.within(rules.xid.day, now):
        by_gpu.setdefault(event.gpu, []).append(event)
    gpus = [_Gpu(name, events, seen, rules, now) for name, events in by_gpu.items()]
    for gpu in gpus:
        said = next((bad for rule in _RULES if (bad := rule(gpu, gpus)) is not None), None)
        if said is not None:
            yield said
    if not _heard(seen):
        yield Unknown("Xids are not heard here: " + "; ".join(_deaf(seen)))


def _heard(seen: Seen) -> bool:
    data = seen.data("nvml")
    return seen.data("kernel") is not None or seen.data("dcgm") is not None or (data and not data.xid_events)


def _deaf(seen: Seen) -> Iterator[str]:
    data = seen.data("nvml")
    if data:
        yield f"NVML: {data.xid_events}"
    for name in ("kernel", "dcgm"):
        if (newest := seen.newest.get(name)) is not None and newest.why:
            yield f"{name}: {newest.why}"


def _gpus(seen: Seen) -> Sequence[Gpu]:
    """As they were when NVML answered last."""
    data = seen.kept.get("nvml")
    return data.gpus if isinstance(data, NvmlData) else ()


def _stated(events: list[XidEvent]) -> tuple[float, Remedy | None] | None:
    """What the newest Xid 154 with words says, and when."""
    for event in reversed(events):
        if event.code == AUTHORITY and (told := authority(event.text))[0]:
            return event.text_at, told[1]
    return None


# ── rules, the gravest first ─────────────────────────────────────────────────────────────────────────────────────────
def _authority(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    if gpu.stated is None or (remedy := gpu.stated[1]) is None:
        return None
    event, what = next((e, x) for e, x in reversed(gpu.events) if e.code == AUTHORITY)
    if gpu.over(event, what) or gpu.doubt(event):
        return None
    others = [(e, x) for e, x in gpu.events if x.kind in (*GRAVEST, "nvlink") and x.code != AUTHORITY]
    said = f"Xid 154: the driver asks for {remedy.value.replace('_', ' ')}"
    return fail(Cause.GPU, remedy, *_on(gpu, said, others), part=gpu.name, proof=True, at=gpu.stated[0])


def _gravest(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    if not (found := gpu.of(*GRAVEST)):
        return None
    worst = next(((e, x) for e, x in found if x.kind == "node_out"), found[0])
    often = len(found) >= gpu.rules.xid.support
    remedy = Remedy.SUPPORT if often else worst[1].action
    why = f"at least {gpu.rules.xid.support} fatal Xids within a day" if often else ""
    return fail(Cause.GPU, remedy, *_on(gpu, why, found), part=gpu.name, proof=True, at=found[0][0].at)


def _nvlink(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    if not (found := gpu.of("nvlink")):
        return None
    again = next((x.code for _, x in found if _times(found, x.code) >= gpu.rules.xid.repeats), None)
    if any(e.fatal for e, _ in found):
        return fail(Cause.GPU, Remedy.EXCLUDE, *_on(gpu, "an NVLink error that the driver calls fatal", found),
                    part=gpu.name, needs=1, at=found[0][0].at)  # fmt: skip
    if again is not None:
        why = f"NVLink errors again within a day (Xid {again})"
        return fail(Cause.GPU, Remedy.SUPPORT, *_on(gpu, why, found), part=gpu.name, needs=1, at=found[0][0].at)
    return warn(Cause.GPU, Remedy.NONE, *_on(gpu, "", found), part=gpu.name, at=found[0][0].at)


def _rare(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    """A role died around it: then it is taken for the cause."""
    if not (found := [(e, x) for e, x in gpu.of("rest") if gpu.died(e)]):
        return None
    why = "a role on this GPU died around it"
    return fail(Cause.GPU, Remedy.EXCLUDE, *_on(gpu, why, found), part=gpu.name, needs=1, at=found[0][0].at)


def _application(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    """Told with whatever else is only worth a warning. The same on several GPUs is the application's doing."""
    found = gpu.of("app")
    for code in dict.fromkeys(x.code for _, x in found):
        times = [e for e, x in found if x.code == code]
        if len(times) < gpu.rules.xid.repeats:
            continue
        elsewhere = any(other is not gpu and any(x.code == code for _, x in other.of("app")) for other in gpus)
        if elsewhere:
            continue
        roles = {e.who[0] for e in times if e.who}
        if len(roles) > 1:
            why = f"Xid {code} again within a day, under different roles, and on no other GPU: suspect the hardware"
            return fail(Cause.GPU, Remedy.EXCLUDE, *_on(gpu, why, found), part=gpu.name, needs=1, at=times[0].at)
        why = f"Xid {code} again within a day, and on no other GPU: suspect the hardware, or what runs there"
        return warn(Cause.GPU, Remedy.NONE, *_on(gpu, why, found), part=gpu.name, at=times[0].at)
    return None


def _rest(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    """One line for what is left: administrators are told, the application restarts by itself."""
    if service := gpu.of("service"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_on(gpu, "", service), part=gpu.name, at=service[0][0].at)
    if rare := gpu.of("rest"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_on(gpu, "", rare), part=gpu.name, at=rare[0][0].at)
    if found := [(e, x) for e, x in gpu.of("app") if not e.past]:  # somebody's program crashed here before us
        hardware = any(x.fault in ("gpu", "link") for _, x in found)
        cause = Cause.GPU if hardware else Cause.USER
        return warn(cause, Remedy.NONE, *_on(gpu, "", found), part=gpu.name, at=found[0][0].at)
    past = [(e, x) for e, x in gpu.events if x.kind in GRAVEST]
    if past and gpu.cleared is None:
        why = "it is well now, by the driver's word"
        return warn(Cause.GPU, Remedy.NONE, *_on(gpu, why, past), part=gpu.name, at=past[0][0].at)
    return None


def _doubtful(gpu: _Gpu, gpus: list[_Gpu]) -> Bad | None:
    """What would condemn if it were not in doubt."""
    asks = gpu.stated is not None and gpu.stated[1] is not None
    found = [
        (e, x) for e, x in gpu.events
        if (x.kind in (*GRAVEST, "nvlink") or (asks and e.code == AUTHORITY)) and not gpu.over(e, x) and gpu.doubt(e)
    ]  # fmt: skip
    if not found:
        return None
    event = found[0][0]
    return warn(Cause.GPU, Remedy.NONE, *_on(gpu, gpu.doubt(event), found), part=gpu.name, at=event.at)


_RULES: tuple[Callable[[_Gpu, list[_Gpu]], Bad | None], ...] = (
    _authority, _gravest, _nvlink, _rare, _application, _doubtful, _rest,
)  # fmt: skip


def _times(found: list[tuple[XidEvent, Xid]], code: int) -> int:
    return sum(x.code == code for _, x in found)


def _on(gpu: _Gpu, why: str, found: list[tuple[XidEvent, Xid]]) -> list[str]:
    """Evidence: why, and each code once; no counts, so that what goes on is the same finding."""
    name = f"GPU {gpu.gpu.index}" if gpu.gpu is not None else f"GPU {gpu.name}" if gpu.name else "a GPU"
    lines = [f"{name}: {why}"] if why else []
    for code in dict.fromkeys(x.code for _, x in found):
        what = next(x for _, x in found if x.code == code)
        lines.append(f"{name}: Xid {code} ({what.meaning}){', repeatedly' if _times(found, code) > 1 else ''}")
    return lines[:_LINES]


def _switch(seen: Seen, rules: Rules, now: float) -> Iterator[Said]:
    """NVSwitch has Xids of its own, with the severity in the text."""
    for logged in seen.log:
        if logged.event.kind != "sxid" or logged.at <= now - rules.xid.day:
            continue
        part, text = logged.event.pci or "nvswitch", f"NVSwitch: {logged.event.text}"
        if is_fatal(logged.event.text) and logged.event.pci_exists:
            yield Bad(Verdict.FAIL, Cause.GPU, Remedy.REBOOT, (text,), part, proof=not logged.past, needs=1,
                      at=logged.at)  # fmt: skip
        else:
            yield warn(Cause.GPU, Remedy.NONE, text, part=part, at=logged.at)


CHECKS = (
    Check("xid", ("nvml", "kernel", "dcgm"), _look, "Xids of a day, by kernel log, NVML's events and DCGM's counts:"
          " what each means is data (health/checks/xids.csv)",
          "by class: node_out, gpu_reset: FAIL, as named (154 is the authority); nvlink: FAIL if fatal or again;"
          " app: WARN, and FAIL under different roles on one GPU alone; rest: WARN, and FAIL where a role died of it",
          "NVSentinel, DCGM, gcm", any_reader=True),
    Check("nvswitch", ("kernel",), _switch, "SXids in the kernel log", "fatal: FAIL, reboot; else WARN", "NVSentinel"),
)  # fmt: skip
