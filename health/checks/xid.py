"""The checks of Xids and SXids: at most one finding per GPU, from all its events within a day.

An Xid is an error code that NVIDIA's driver reports for a GPU; an SXid is an error code for an NVSwitch. The meaning
and the class of each Xid are in ``xids.csv``; this module contains the rules that use them:

- Xid 154 states the action that the driver requires and overrides every other Xid. Xid 45 is never a cause.
- An Xid of class ``app`` gives a warning. The GPU fails only if the Xid recurs on this GPU under different roles, and
  no other GPU has it.
- A rare or unknown code gives a warning; it fails the GPU only if a role on that GPU died at about the same time.
- Shortly before and after rrl kills a step, an Xid counts only if its class is ``node_out`` or ``gpu_reset``. Other
  classes count only if a role on the same GPU died at about the same time without being killed by rrl.
- A reset may have cured an Xid that is older than the first sample. Such an Xid does not count if the driver's recovery
  action is "none" or, with an older driver, if the lasting effect of the Xid is gone.
- An Xid that only the kernel log reports must name a GPU of this node. NVML can contradict an Xid 79 (the GPU answers)
  and an Xid 154 (the driver requires no action). For these two Xids the check waits for the next NVML sample, which
  decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...config.health_rules import Rules
from ...core.types import Cause, Remedy, Verdict
from ..readers.samples import NvidiaGpu, NvmlData
from .base import Check, CheckResult, Problem, Unknown, fail, warn
from .node_state import NodeState
from .xid_events import FATAL_CLASSES, RECOVERY_ACTION_XID, Xid, XidEvent, is_fatal, parse_recovery_action, xid

_MAX_EVIDENCE_LINES = 5
"""Maximum number of evidence lines in one finding."""
_LASTING_FIELDS = {
    48: "ecc_volatile_uncorrected",
    95: "ecc_volatile_uncorrected",
    140: "ecc_volatile_uncorrected",
    64: "remap_failed",
}
"""NVML's field that stays set until the GPU is reset, by Xid code."""
_OFF_THE_BUS = 79
_NVML_CAN_CONTRADICT = (_OFF_THE_BUS, RECOVERY_ACTION_XID)
_NVML_SETTLE_S = 2.0
"""An NVML sample that ends at least this time (s) after an Xid certainly began after the Xid: NVML is sampled once a
second."""
_NVML_WAIT_S = 15.0
"""Seconds for which the check waits for an NVML sample that began after an Xid. A longer time is not needed, because a
sample that takes 10 s counts as hung."""
_DRIVER_DECIDES = (160, 162)
"""Xids for which NVIDIA's catalogue requires no action, while NVSentinel excludes the node or GPU. They do not count if
the driver states that no action is needed."""


class _Gpu:
    """The Xid events of one GPU, oldest first, with the samples and rules that decide which of the events count."""

    def __init__(self, name: str, events: list[XidEvent], state: NodeState, rules: Rules, now: float) -> None:
        self.name, self.state, self.rules, self.now = name, state, rules, now
        self.stated_action = _stated_action(events)
        self.cleared_at = self.stated_action[0] if self.stated_action and self.stated_action[1] is None else None
        """Time (s) of the newest Xid 154 if it states that no action is needed; otherwise None."""
        self.events = [(event, xid(event.code, rules.xid)) for event in events]
        self.gpu: NvidiaGpu | None = next((g for g in _gpus(state) if name in (g.uuid, g.pci)), None)

    def acting_events(self, *kinds: str) -> list[tuple[XidEvent, Xid]]:
        """Return the events whose Xids have one of the classes ``kinds``, except the events that do not count.

        An event does not count if rrl's kill of a step caused it, if it needs no action now (`is_resolved`), or if it
        is doubtful (`doubt_reason`).
        """
        return [
            (e, x)
            for e, x in self.events
            if x.kind in kinds
            and not self._is_our_kill(e, x)
            and not self.is_resolved(e, x)
            and not self.doubt_reason(e)
        ]

    def doubt_reason(self, event: XidEvent) -> str:
        """Return why an event that only the kernel log reports is doubtful and not counted; empty if it counts."""
        if event.sources != {"kernel"}:
            return ""
        if self.gpu is None:
            return "" if event.pci_exists else "the kernel log names a PCI address where no GPU is known"
        if self._nvml_contradicts(event):
            return "only the kernel log reports it, and NVML reports that the GPU works"
        if self._awaits_nvml(event):
            return "only the kernel log reports it, and NVML has not been read since this report"
        return ""

    def _nvml_contradicts(self, event: XidEvent) -> bool:
        """Return whether a later NVML sample disproves the event."""
        newest = self.state.newest.get("nvml")
        read = newest is not None and newest.state == "read" and newest.at >= event.last_reported_at + _NVML_SETTLE_S
        return read and event.code in _NVML_CAN_CONTRADICT and self._looks_healthy(event.code)

    def _awaits_nvml(self, event: XidEvent) -> bool:
        """Return whether the event must wait for the next NVML sample, which decides whether the event counts.

        The event waits, for at most ``_NVML_WAIT_S``, if NVML can contradict its Xid, and if the last sample shows a
        healthy GPU but may be older than the event.
        """
        newest = self.state.newest.get("nvml")
        due = newest is not None and newest.state == "read" and newest.at < event.last_reported_at + _NVML_SETTLE_S
        fresh = self.now < event.last_reported_at + _NVML_WAIT_S
        return due and fresh and event.code in _NVML_CAN_CONTRADICT and self._looks_healthy(event.code)

    def _is_our_kill(self, event: XidEvent, entry: Xid) -> bool:
        """Return whether rrl's kill of a step caused the event."""
        before, after = self.rules.xid.kill_lead, self.rules.xid.kill
        near_our_kill = any(-before <= event.at - kill <= after for kill in self.state.our_kills)
        return near_our_kill and entry.kind not in FATAL_CLASSES and not self.role_died_near(event)

    def is_resolved(self, event: XidEvent, entry: Xid) -> bool:
        """Return whether the driver or NVML shows that the event needs no action now.

        An event of class ``app`` never counts as resolved.
        """
        if entry.kind == "app":
            return False
        may_be = event.before_start or event.code in _DRIVER_DECIDES
        return (self.cleared_at is not None and event.last_reported_at <= self.cleared_at) or (
            may_be and self._looks_healthy(event.code)
        )

    def _looks_healthy(self, code: int) -> bool:
        """Return whether NVML's last sample shows that the effect of this Xid is gone."""
        gpu = self.gpu
        if gpu is None or gpu.lost or gpu.recovery_action is not None:
            return gpu is not None and not gpu.lost and gpu.recovery_action == "none"
        if code == _OFF_THE_BUS:
            return gpu.temperature is not None
        return code in _LASTING_FIELDS and getattr(gpu, _LASTING_FIELDS[code]) in (0, False)

    def role_died_near(self, event: XidEvent) -> bool:
        """Return whether a role on the event's GPU ended by itself within ``rules.xid.died`` s of the event."""
        around = self.rules.xid.died
        return any(abs(event.at - at) <= around and event.gpu in gpus for at, gpus in self.state.role_deaths)


def _check_xids(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report each GPU with Xids according to the first rule that applies, and UNKNOWN if no reader can report Xids."""
    by_gpu: dict[str, list[XidEvent]] = {}
    for event in state.xids.recent(rules.xid.day, now):
        by_gpu.setdefault(event.gpu, []).append(event)
    gpus = [_Gpu(name, events, state, rules, now) for name, events in by_gpu.items()]
    for gpu in gpus:
        problem = next((bad for rule in _RULES if (bad := rule(gpu, gpus)) is not None), None)
        if problem is not None:
            yield problem
    if not _xids_readable(state):
        yield Unknown("Xids cannot be read on this node: " + "; ".join(_unreadable_reasons(state)))


def _xids_readable(state: NodeState) -> bool:
    """Return whether at least one reader could report Xids on this node."""
    data = state.data("nvml")
    return state.data("kernel") is not None or state.data("dcgm") is not None or (data and not data.xid_events)


def _unreadable_reasons(state: NodeState) -> Iterator[str]:
    """Yield for each reader why it does not report Xids."""
    data = state.data("nvml")
    if data:
        yield f"NVML: {data.xid_events}"
    for name in ("kernel", "dcgm"):
        if (newest := state.newest.get(name)) is not None and newest.why:
            yield f"{name}: {newest.why}"


def _gpus(state: NodeState) -> Sequence[NvidiaGpu]:
    """Return the GPUs of the last sample in which NVML answered."""
    data = state.last_data.get("nvml")
    return data.gpus if isinstance(data, NvmlData) else ()


def _stated_action(events: list[XidEvent]) -> tuple[float, Remedy | None] | None:
    """Return (time in s, remedy) of the newest Xid 154 whose text states an action; None if there is no such Xid.

    The remedy is None if the text states that no action is needed.
    """
    for event in reversed(events):
        if event.code == RECOVERY_ACTION_XID and (parsed := parse_recovery_action(event.text))[0]:
            return event.text_at, parsed[1]
    return None


# ── rules, most severe first ──────────────────────────────────────────────────────────────────────────────────────────
def _driver_action(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Fail a GPU for which the driver states a recovery action."""
    if gpu.stated_action is None or (remedy := gpu.stated_action[1]) is None:
        return None
    event, entry = next((e, x) for e, x in reversed(gpu.events) if e.code == RECOVERY_ACTION_XID)
    if gpu.is_resolved(event, entry) or gpu.doubt_reason(event):
        return None
    others = [(e, x) for e, x in gpu.events if x.kind in (*FATAL_CLASSES, "nvlink") and x.code != RECOVERY_ACTION_XID]
    text = f"Xid 154: the driver requires: {remedy.value.replace('_', ' ')}"
    return fail(
        Cause.GPU, remedy, *_evidence(gpu, text, others), component=gpu.name, proof=True, at=gpu.stated_action[0]
    )


def _fatal(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Fail a GPU with an Xid of a fatal class."""
    if not (found := gpu.acting_events(*FATAL_CLASSES)):
        return None
    worst = next(((e, x) for e, x in found if x.kind == "node_out"), found[0])
    often = len(found) >= gpu.rules.xid.support
    remedy = Remedy.SUPPORT if often else worst[1].action
    why = f"at least {gpu.rules.xid.support} fatal Xids within a day" if often else ""
    return fail(Cause.GPU, remedy, *_evidence(gpu, why, found), component=gpu.name, proof=True, at=found[0][0].at)


def _nvlink(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Fail a GPU with a fatal or repeated NVLink error; warn of a single error that is not fatal."""
    if not (found := gpu.acting_events("nvlink")):
        return None
    repeated_code = next((x.code for _, x in found if _occurrences(found, x.code) >= gpu.rules.xid.repeats), None)
    if any(e.fatal for e, _ in found):
        return fail(
            Cause.GPU,
            Remedy.EXCLUDE,
            *_evidence(gpu, "an NVLink error that the driver calls fatal", found),
            component=gpu.name,
            failures_to_raise=1,
            at=found[0][0].at,
        )
    if repeated_code is not None:
        why = f"repeated NVLink errors within a day (Xid {repeated_code})"
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
    """Fail a GPU with a rare Xid if a role on the GPU ended at about the same time, probably because of the Xid."""
    if not (found := [(e, x) for e, x in gpu.acting_events("rest") if gpu.role_died_near(e)]):
        return None
    why = "a role on this GPU died at about the same time"
    return fail(
        Cause.GPU,
        Remedy.EXCLUDE,
        *_evidence(gpu, why, found),
        component=gpu.name,
        failures_to_raise=1,
        at=found[0][0].at,
    )


def _application(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Report a GPU with a repeated Xid of class ``app`` that no other GPU has.

    The finding is a FAIL if the Xid occurred under different roles, else a WARN. An Xid that several GPUs have is the
    application's fault.
    """
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
            why = f"repeated Xid {code} within a day, under different roles, and on no other GPU: suspect the hardware"
            return fail(
                Cause.GPU,
                Remedy.EXCLUDE,
                *_evidence(gpu, why, found),
                component=gpu.name,
                failures_to_raise=1,
                at=times[0].at,
            )
        why = f"repeated Xid {code} within a day, and on no other GPU: suspect the hardware or the program"
        return warn(Cause.GPU, Remedy.NONE, *_evidence(gpu, why, found), component=gpu.name, at=times[0].at)
    return None


def _remaining(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Warn of the Xids to which no earlier rule applies.

    The remedy is SUPPORT for the classes ``service`` and ``rest``. Class ``app`` has no remedy, because the application
    is restarted anyway. Resolved events of a fatal class have no remedy.
    """
    if service := gpu.acting_events("service"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_evidence(gpu, "", service), component=gpu.name, at=service[0][0].at)
    if rare := gpu.acting_events("rest"):
        return warn(Cause.GPU, Remedy.SUPPORT, *_evidence(gpu, "", rare), component=gpu.name, at=rare[0][0].at)
    # an older application error belongs to a program that ran here before this run
    if found := [(e, x) for e, x in gpu.acting_events("app") if not e.before_start]:
        hardware = any(x.fault in ("gpu", "link") for _, x in found)
        cause = Cause.GPU if hardware else Cause.USER
        return warn(cause, Remedy.NONE, *_evidence(gpu, "", found), component=gpu.name, at=found[0][0].at)
    past = [(e, x) for e, x in gpu.events if x.kind in FATAL_CLASSES]
    if past and gpu.cleared_at is None:
        why = "resolved: the driver reports that no action is needed"
        return warn(Cause.GPU, Remedy.NONE, *_evidence(gpu, why, past), component=gpu.name, at=past[0][0].at)
    return None


def _doubtful(gpu: _Gpu, gpus: list[_Gpu]) -> Problem | None:
    """Warn of Xids that would fail the GPU, but that only the kernel log reports and NVML does not confirm."""
    wants_action = gpu.stated_action is not None and gpu.stated_action[1] is not None
    found = [
        (e, x)
        for e, x in gpu.events
        if (x.kind in (*FATAL_CLASSES, "nvlink") or (wants_action and e.code == RECOVERY_ACTION_XID))
        and not gpu.is_resolved(e, x)
        and gpu.doubt_reason(e)
    ]
    if not found:
        return None
    event = found[0][0]
    return warn(
        Cause.GPU, Remedy.NONE, *_evidence(gpu, gpu.doubt_reason(event), found), component=gpu.name, at=event.at
    )


_RULES: tuple[Callable[[_Gpu, list[_Gpu]], Problem | None], ...] = (
    _driver_action,
    _fatal,
    _nvlink,
    _rare,
    _application,
    _doubtful,
    _remaining,
)


def _occurrences(events: list[tuple[XidEvent, Xid]], code: int) -> int:
    """Return how many of the events have this code."""
    return sum(x.code == code for _, x in events)


def _evidence(gpu: _Gpu, reason: str, events: list[tuple[XidEvent, Xid]]) -> list[str]:
    """Return the evidence lines: the reason, then each code once, without counts.

    Counts are left out so that a further event with a repeated code leaves the finding unchanged.
    """
    name = f"GPU {gpu.gpu.index}" if gpu.gpu is not None else f"GPU {gpu.name}" if gpu.name else "a GPU"
    lines = [f"{name}: {reason}"] if reason else []
    for code in dict.fromkeys(x.code for _, x in events):
        entry = next(x for _, x in events if x.code == code)
        lines.append(f"{name}: Xid {code} ({entry.meaning}){', repeatedly' if _occurrences(events, code) > 1 else ''}")
    return lines[:_MAX_EVIDENCE_LINES]


def _check_nvswitch(state: NodeState, rules: Rules, now: float) -> Iterator[CheckResult]:
    """Report the SXids of NVSwitches; the text of an SXid states its severity."""
    for logged in state.log:
        if logged.event.kind != "sxid" or logged.at <= now - rules.xid.day:
            continue
        component, text = logged.event.pci or "nvswitch", f"NVSwitch: {logged.event.text}"
        if is_fatal(logged.event.text) and logged.event.pci_exists:
            yield Problem(
                Verdict.FAIL,
                Cause.GPU,
                Remedy.REBOOT,
                (text,),
                component,
                proof=not logged.before_start,
                failures_to_raise=1,
                at=logged.at,
            )
        else:
            yield warn(Cause.GPU, Remedy.NONE, text, component=component, at=logged.at)


CHECKS = (
    Check(
        "xid",
        ("nvml", "kernel", "dcgm"),
        _check_xids,
        "Xids within a day, from the kernel log, NVML's events and DCGM's counts; health/checks/xids.csv gives"
        " the class of each",
        "class node_out or gpu_reset: FAIL, remedy by code (154 decides); nvlink: WARN, but FAIL if fatal or"
        " repeated; app: WARN, but FAIL if repeated under different roles on only one GPU; rest: WARN, but FAIL if"
        " a role died at about the same time",
        "NVSentinel, DCGM, gcm",
        any_reader=True,
    ),
    Check(
        "nvswitch",
        ("kernel",),
        _check_nvswitch,
        "SXids in the kernel log",
        "fatal: FAIL, reboot; else WARN",
        "NVSentinel",
    ),
)
