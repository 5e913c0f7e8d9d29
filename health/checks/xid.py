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
from .base import Check, CheckResult, Problem, Unknown, fail, warn
from .node_state import NodeState
from .xid_events import FATAL_CLASSES, RECOVERY_ACTION_XID, Xid, XidEvent, is_fatal, parse_recovery_action, xid

_MAX_EVIDENCE_LINES = 5
"""of evidence"""
_LASTING_FIELDS = {
    48: "ecc_volatile_uncorrected", 95: "ecc_volatile_uncorrected", 140: "ecc_volatile_uncorrected", 64: "remap_failed",
}  # fmt: skip
"""by code, what a GPU tells until it is reset"""
_OFF_THE_BUS = 79
_NVML_CAN_CONTRADICT = (_OFF_THE_BUS, RECOVERY_ACTION_XID)
_NVML_SETTLE_S = 2.0
"""An NVML reading that ends this long after an Xid also began after it: NVML is read once a second."""
_NVML_WAIT_S = 15.0
"""An Xid waits for such a reading for this long: longer than a read may take before it counts as hung (10 s)."""
_DRIVER_DECIDES = (160, 162)
"""NVIDIA's own catalogue asks for nothing, NVSentinel takes the node or the GPU: a driver that says that nothing is
needed decides"""


class _Gpu:
    """What is judged together: the events of one GPU, oldest first, and what else is known of it."""

    def __init__(self, name: str, events: list[XidEvent], state: NodeState, rules: Rules, now: float) -> None:
        self.name, self.state, self.rules, self.now = name, state, rules, now
        self.stated_action = _stated_action(events)
        self.cleared_at = self.stated_action[0] if self.stated_action and self.stated_action[1] is None else None
        """when (s) the driver said that nothing is needed any more"""
        self.events = [(event, xid(event.code, rules.xid)) for event in events]
        self.gpu: Gpu | None = next((g for g in _gpus(state) if name in (g.uuid, g.pci)), None)

    def acting_events(self, *kinds: str) -> list[tuple[XidEvent, Xid]]:
        """Return the events of these classes that may act: not those of our own kill, those that were dealt with, or
        those that are in doubt."""
        return [
            (e, x) for e, x in self.events
            if x.kind in kinds and not self._is_our_kill(e, x) and not self.is_resolved(e, x) and not self.doubt_reason(e)
        ]  # fmt: skip

    def doubt_reason(self, event: XidEvent) -> str:
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
        newest = self.state.newest.get("nvml")
        read = newest is not None and newest.state == "read" and newest.at >= event.last_reported_at + _NVML_SETTLE_S
        return read and event.code in _NVML_CAN_CONTRADICT and self._looks_healthy(event.code)

    def _awaits_nvml(self, event: XidEvent) -> bool:
        """Return whether NVML, which saw nothing wrong before this event, is to be read again before it counts."""
        newest = self.state.newest.get("nvml")
        due = newest is not None and newest.state == "read" and newest.at < event.last_reported_at + _NVML_SETTLE_S
        fresh = self.now < event.last_reported_at + _NVML_WAIT_S
        return due and fresh and event.code in _NVML_CAN_CONTRADICT and self._looks_healthy(event.code)

    def _is_our_kill(self, event: XidEvent, entry: Xid) -> bool:
        before, after = self.rules.xid.kill_lead, self.rules.xid.kill
        near_our_kill = any(-before <= event.at - kill <= after for kill in self.state.our_kills)
        return near_our_kill and entry.kind not in FATAL_CLASSES and not self.role_died_near(event)

    def is_resolved(self, event: XidEvent, entry: Xid) -> bool:
        """The driver has dealt with it. What a program did is nothing that a driver deals with."""
        if entry.kind == "app":
            return False
        may_be = event.before_start or event.code in _DRIVER_DECIDES
        return (self.cleared_at is not None and event.last_reported_at <= self.cleared_at) or (
            may_be and self._looks_healthy(event.code)
        )

    def _looks_healthy(self, code: int) -> bool:
        gpu = self.gpu
        if gpu is None or gpu.lost or gpu.recovery_action is not None:
            return gpu is not None and not gpu.lost and gpu.recovery_action == "none"
        if code == _OFF_THE_BUS:
            return gpu.temperature is not None
        return code in _LASTING_FIELDS and getattr(gpu, _LASTING_FIELDS[code]) in (0, False)

    def role_died_near(self, event: XidEvent) -> bool:
        around = self.rules.xid.died
        return any(abs(event.at - at) <= around and event.gpu in gpus for at, gpus in self.state.role_deaths)


def _check_xids(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    by_gpu: dict[str, list[XidEvent]] = {}
    for event in state.xids.recent(rules.xid.day, now):
        by_gpu.setdefault(event.gpu, []).append(event)
    gpus = [_Gpu(name, events, state, rules, now) for name, events in by_gpu.items()]
    for gpu in gpus:
        problem = next((bad for rule in _RULES if (bad := rule(gpu, gpus)) is not None), None)
        if problem is not None:
            yield problem
    if not _xids_readable(state):
        yield Unknown("Xids are not heard here: " + "; ".join(_unreadable_reasons(state)))


def _xids_readable(state: NodeState) -> bool:
    data = state.data("nvml")
    return state.data("kernel") is not None or state.data("dcgm") is not None or (data and not data.xid_events)


def _unreadable_reasons(state: NodeState) -> Iterator[str]:
    data = state.data("nvml")
    if data:
        yield f"NVML: {data.xid_events}"
    for name in ("kernel", "dcgm"):
        if (newest := state.newest.get(name)) is not None and newest.why:
            yield f"{name}: {newest.why}"


def _gpus(state: NodeState) -> Sequence[Gpu]:
    """As they were when NVML answered last."""
    data = state.last_data.get("nvml")
    return data.gpus if isinstance(data, NvmlData) else ()


def _stated_action(events: list[XidEvent]) -> tuple[float, Remedy | None] | None:
    """What the newest Xid 154 with words says, and when."""
    for event in reversed(events):
        if event.code == RECOVERY_ACTION_XID and (parsed := parse_recovery_action(event.text))[0]:
            return event.text_at, parsed[1]
    return None


# ── rules, the gravest first ─────────────────────────────────────────────────────────────────────────────────────────
def _driver_action(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    if gpu.stated_action is None or (remedy := gpu.stated_action[1]) is None:
        return None
    event, entry = next((e, x) for e, x in reversed(gpu.events) if e.code == RECOVERY_ACTION_XID)
    if gpu.is_resolved(event, entry) or gpu.doubt_reason(event):
        return None
    others = [(e, x) for e, x in gpu.events if x.kind in (*FATAL_CLASSES, "nvlink") and x.code != RECOVERY_ACTION_XID]
    text = f"Xid 154: the driver asks for {remedy.value.replace('_', ' ')}"
    return fail(
        Cause.GPU, remedy, *_evidence(gpu, text, others), component=gpu.name, proof=True, at=gpu.stated_action[0]
    )


def _fatal(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    if not (found := gpu.acting_events(*FATAL_CLASSES)):
        return None
    worst = next(((e, x) for e, x in found if x.kind == "node_out"), found[0])
    often = len(found) >= gpu.rules.xid.support
    remedy = Remedy.SUPPORT if often else worst[1].action
    why = f"at least {gpu.rules.xid.support} fatal Xids within a day" if often else ""
    return fail(Cause.GPU, remedy, *_evidence(gpu, why, found), component=gpu.name, proof=True, at=found[0][0].at)


def _nvlink(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    if not (found := gpu.acting_events("nvlink")):
        return None
    again = next((x.code for _, x in found if _occurrences(found, x.code) >= gpu.rules.xid.repeats), None)
    if any(e.fatal for e, _ in found):
        return fail(Cause.GPU, Remedy.EXCLUDE, *_evidence(gpu, "an NVLink error that the driver calls fatal", found),
                    component=gpu.name, failures_to_raise=1, at=found[0][0].at)  # fmt: skip
    if again is not None:
        why = f"NVLink errors again within a day (Xid {again})"
        return fail(
            Cause.GPU,
            Remedy.SUPPORT,
            *_evidence(gpu, why, found),
            component=gpu.name,
            failures_to_raise=1,
            at=found[0][0].at,
        )
    return warn(Cause.GPU, Remedy.NONE, *_evidence(gpu, "", found), component=gpu.name, at=found[0][0].at)


def _rare(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """A role died around it: then it is taken for the cause."""
    if not (found := [(e, x) for e, x in gpu.acting_events("rest") if gpu.role_died_near(e)]):
        return None
    why = "a role on this GPU died around it"
    return fail(
        Cause.GPU,
        Remedy.EXCLUDE,
        *_evidence(gpu, why, found),
        component=gpu.name,
        failures_to_raise=1,
        at=found[0][0].at,
    )


def _application(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Told with whatever else is only worth a warning. The same on several GPUs is the application's doing."""
    found = gpu.acting_events("app")
    for code in dict.fromkeys(x.code for _, x in found):
        times = [e for e, x in found if x.code == code]
        if len(times) < gpu.rules.xid.repeats:
            continue
        elsewhere = any(
            other is not gpu and any(x.code == code for _, x in other.acting_events("app")) for other in gpus
        )
        if elsewhere:
            continue
        roles = {e.tenant[0] for e in times if e.tenant}
        if len(roles) > 1:
            why = f"Xid {code} again within a day, under different roles, and on no other GPU: suspect the hardware"
            return fail(
                Cause.GPU,
                Remedy.EXCLUDE,
                *_evidence(gpu, why, found),
                component=gpu.name,
                failures_to_raise=1,
                at=times[0].at,
            )
        why = f"Xid {code} again within a day, and on no other GPU: suspect the hardware, or what runs there"
        return warn(Cause.GPU, Remedy.NONE, *_evidence(gpu, why, found), component=gpu.name, at=times[0].at)
    return None


def _remaining(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """One line for what is left: administrators are told, the application restarts by itself."""
    if service := gpu.acting_events("service"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_evidence(gpu, "", service), component=gpu.name, at=service[0][0].at)
    if rare := gpu.acting_events("rest"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_evidence(gpu, "", rare), component=gpu.name, at=rare[0][0].at)
    if found := [
        (e, x) for e, x in gpu.acting_events("app") if not e.before_start
    ]:  # somebody's program crashed here before us
        hardware = any(x.fault in ("gpu", "link") for _, x in found)
        cause = Cause.GPU if hardware else Cause.USER
        return warn(cause, Remedy.NONE, *_evidence(gpu, "", found), component=gpu.name, at=found[0][0].at)
    past = [(e, x) for e, x in gpu.events if x.kind in FATAL_CLASSES]
    if past and gpu.cleared_at is None:
        why = "it is well now, by the driver's word"
        return warn(Cause.GPU, Remedy.NONE, *_evidence(gpu, why, past), component=gpu.name, at=past[0][0].at)
    return None


def _doubtful(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """What would condemn if it were not in doubt."""
    wants_action = gpu.stated_action is not None and gpu.stated_action[1] is not None
    found = [
        (e, x) for e, x in gpu.events
        if (x.kind in (*FATAL_CLASSES, "nvlink") or (wants_action and e.code == RECOVERY_ACTION_XID)) and not gpu.is_resolved(e, x) and gpu.doubt_reason(e)
    ]  # fmt: skip
    if not found:
        return None
    event = found[0][0]
    return warn(
        Cause.GPU, Remedy.NONE, *_evidence(gpu, gpu.doubt_reason(event), found), component=gpu.name, at=event.at
    )


_RULES: tuple[Callable[[_Gpu, list[_Gpu]], Problem | None], ...] = (
    _driver_action, _fatal, _nvlink, _rare, _application, _doubtful, _remaining,
)  # fmt: skip


def _occurrences(events: list[tuple[XidEvent, Xid]], code: int) -> int:
    return sum(x.code == code for _, x in events)


def _evidence(gpu: _Gpu, reason: str, events: list[tuple[XidEvent, Xid]]) -> list[str]:
    """Evidence: why, and each code once; no counts, so that what goes on is the same finding."""
    name = f"GPU {gpu.gpu.index}" if gpu.gpu is not None else f"GPU {gpu.name}" if gpu.name else "a GPU"
    lines = [f"{name}: {reason}"] if reason else []
    for code in dict.fromkeys(x.code for _, x in events):
        entry = next(x for _, x in events if x.code == code)
        lines.append(f"{name}: Xid {code} ({entry.meaning}){', repeatedly' if _occurrences(events, code) > 1 else ''}")
    return lines[:_MAX_EVIDENCE_LINES]


def _check_nvswitch(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """NVSwitch has Xids of its own, with the severity in the text."""
    for logged in state.log:
        if logged.event.kind != "sxid" or logged.at <= now - rules.xid.day:
            continue
        component, text = logged.event.pci or "nvswitch", f"NVSwitch: {logged.event.text}"
        if is_fatal(logged.event.text) and logged.event.pci_exists:
            yield Problem(Verdict.FAIL, Cause.GPU, Remedy.REBOOT, (text,), component, proof=not logged.before_start, failures_to_raise=1,
                      at=logged.at)  # fmt: skip
        else:
            yield warn(Cause.GPU, Remedy.NONE, text, component=component, at=logged.at)


CHECKS = (
    Check("xid", ("nvml", "kernel", "dcgm"), _check_xids, "Xids of a day, by kernel log, NVML's events and DCGM's counts:"
          " what each means is data (health/checks/xids.csv)",
          "by class: node_out, gpu_reset: FAIL, as named (154 is the authority); nvlink: FAIL if fatal or again;"
          " app: WARN, and FAIL under different roles on one GPU alone; rest: WARN, and FAIL where a role died of it",
          "NVSentinel, DCGM, gcm", any_reader=True),
    Check("nvswitch", ("kernel",), _check_nvswitch, "SXids in the kernel log", "fatal: FAIL, reboot; else WARN", "NVSentinel"),
)  # fmt: skip
