"""Many at once: the same finding on several nodes within two minutes is the fabric, the storage or the software that
they share, not each of these nodes; nor is it each rollout's fault that all of them stall at once, nor each worker's
that many on different nodes are not heard any more while their agents are: a flood of lines, a manager that is late;
nor each node's that several fall silent in one moment: a switch that fails over is back within half a minute.

Such findings are held back: they become WARN without a remedy, and one finding of the whole run, ``correlated``, names
what they share. Proof passes: a GPU that fell off its bus is gone, whoever else has lost one (the planner's brake
bounds what is done about many); but not where most nodes say the same at once, which is a driver or a rule that is
wrong, or what they share.

What nodes may share (fabric, storage) waits a moment before it counts against the first node that says so, for the
others look at other times; not where nobody works on that node yet. What was shared is remembered for a while, for
those that find it late, also by the next manager (:func:`remembered`). Pure: memory and clock are handed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from ....core.types import Cause, Evidence, Finding, Flag, Incarnation, NodeName, Remedy, Verdict, gang_of
from ..detectors.liveness import worker_silence
from ..detectors.node_liveness import node_lost

WINDOW_S = 120.0
"""s within which the same on several nodes is one event"""
CORRELATED_SHARE = 0.2
"""of the run's nodes: so many, and two at least (docs/sources.md, guard rails: the breaker's share)"""
SETTLE_S = 30.0
"""s that a first finding of what nodes may share waits for others: readers of fabric (5 s) and host (10 s) say it after
up to three looks in a row"""
MOST_SHARE = 0.5
"""of the run's nodes: if more of them, and two at least, say the same, not even proof passes"""
EVENT_LIFETIME_S = 600.0
"""s after it was last said by enough of them that it still explains who finds the same"""
STALL_GRACE_S = 120.0
"""s for which rollouts that all stall at once are left alone; then somebody must act, whatever the cause"""
STALL_SPREAD_S = 30.0
"""s between the first and the last of them"""
SILENCE_GRACE_S = 30.0
"""s for which workers, or whole nodes, that fall silent at once are left alone (ours: three times the silence that
condemns one)"""
MIN_SILENT_NODES = 3
"""nodes, and of workers gangs, that fall silent at once: of two it may be a coincidence, and one gang may be stuck
together"""
SILENCE_SPREAD_S = 10.0
"""s between the first and the last of them"""
_SHAREABLE_CAUSES = frozenset({Cause.FABRIC, Cause.STORAGE})
_NODE_CAUSES = frozenset({Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""causes of findings that agents make"""
_MAX_NODES_NAMED = 4
"""nodes named in the evidence"""
DETECTOR = "correlated"
_DEFAULT_SUSPECT = "a driver or a site's rule is wrong"
_SUSPECTS = {
    Cause.FABRIC: "the fabric that they share, a switch perhaps, has failed",
    Cause.STORAGE: "the storage that they share has failed",
}
"""what is to blame where most nodes say the same"""

EventKind = tuple[Cause, str, str]
"""cause, detector, and of storage the path: what several can have in common"""
_STALL: EventKind = (Cause.HANG, "", "")
"""what all rollouts do at once"""
_SILENCE: EventKind = (Cause.PROCESS, worker_silence.__name__, "")
"""what workers of different nodes do at once"""
_LOST: EventKind = (Cause.NODE, node_lost.__name__, "")
"""what several nodes do at once"""
_GRACE_S = {_STALL: STALL_GRACE_S, _SILENCE: SILENCE_GRACE_S, _LOST: SILENCE_GRACE_S}
"""s; such events are told until there is nobody of whom they could be, so that each comes but once"""


class CorrelatedEvent(Struct, frozen=True):
    """Something that several have in common."""

    last_reported_at: float
    """when enough of them last said so"""
    finding: Finding
    """of the whole run; since it began"""
    on_most_nodes: bool = False
    """most nodes say so: proof does not pass either"""


class CorrelationState(Struct, frozen=True):
    """What :func:`correlate` knows from before; hand in what it gave back. Times are the caller's clock (s)."""

    first_reported: dict[str, float] = {}
    """by finding's key: since when it is said without a break"""
    recent: dict[EventKind, dict[NodeName, float]] = {}
    """when each node last began to say so"""
    events: dict[EventKind, CorrelatedEvent] = {}


class CorrelationContext(Struct, frozen=True):
    """What the run looks like at this moment."""

    node_count: int
    """that it has"""
    occupied: AbstractSet[NodeName] = frozenset()
    """those on which a role works"""
    rollouts: AbstractSet[Incarnation] = frozenset()
    """that have joined"""
    excluded: AbstractSet[NodeName] = frozenset()
    """nodes that are excluded: what they say of themselves keeps nobody else's finding back"""
    silent_workers: Mapping[Incarnation, tuple[NodeName, float]] = {}
    """workers that are not heard though their nodes are, whether it condemns them yet or not: where, and since when"""
    silent_nodes: Mapping[NodeName, float] = {}
    """nodes that are not heard, likewise: since when"""


def correlate(
    findings: Sequence[Finding], context: CorrelationContext, state: CorrelationState, now: float
) -> tuple[list[Finding], CorrelationState, float]:
    """The findings with what is shared held back, the new memory, and when (s; inf: not by itself) the answer changes
    though nothing new is found."""
    suspects = {finding.key: finding for finding in findings if _may_be_shared(finding, context)}
    if not suspects and not state.events and not state.first_reported:
        return list(findings), state, inf
    first = {key: state.first_reported.get(key, now) for key in suspects}
    recent = _recent(suspects.values(), first, state, now)
    events = _events(findings, suspects.values(), recent, context, state, now)
    next_check = min(
        (expires_at for kind, event in events.items() if (expires_at := _expires_at(kind, event)) > now), default=inf
    )
    reported: list[Finding] = []
    for finding in findings:
        event = events.get(_kind(finding)) if finding.key in suspects else None
        if (
            event is not None
            and now < _expires_at(_kind(finding), event)
            and (event.on_most_nodes or not finding.proof)
        ):
            reported.append(_hold_back(finding, f"others find the same: see {DETECTOR}", event.finding.since))
        elif (
            finding.key in suspects
            and _awaits_other_nodes(finding, context)
            and now < (until := first[finding.key] + SETTLE_S)
        ):
            reported.append(
                _hold_back(finding, f"waits {SETTLE_S:g} s whether other nodes find the same", first[finding.key])
            )
            next_check = min(next_check, until)
        else:
            reported.append(finding)
    reported += [event.finding for event in events.values()]
    return reported, CorrelationState(first, recent, events), next_check


def restore_state(findings: Iterable[Finding], now: float) -> CorrelationState:
    """What an earlier manager knew, from what it told: who was condemned since when, and what was shared. What waited
    for others waits anew."""
    first, events = dict[str, float](), dict[EventKind, CorrelatedEvent]()
    for finding in findings:
        if finding.detector == DETECTOR and finding.shared is not None:
            events[finding.shared] = CorrelatedEvent(now, finding, Flag.ON_MOST_NODES in finding.flags)
        elif finding.verdict is Verdict.FAIL and finding.cause in _NODE_CAUSES:
            first[finding.key] = min(now, finding.since)
    return CorrelationState(first, events=events)


def _may_be_shared(finding: Finding, context: CorrelationContext) -> bool:
    if finding.verdict is not Verdict.FAIL:
        return False
    if finding.incarnation is not None:
        return not finding.proof and (_is_stall(finding, context) or _is_silent(finding))
    if _is_lost(finding):
        return finding.node not in context.excluded
    return finding.node is not None and finding.cause in _NODE_CAUSES


def _is_lost(finding: Finding) -> bool:
    return finding.detector == _LOST[1] and not finding.proof


def _is_stall(finding: Finding, context: CorrelationContext) -> bool:
    return finding.cause is Cause.HANG and finding.incarnation in context.rollouts


def _is_silent(finding: Finding) -> bool:
    return finding.detector == _SILENCE[1]


def _awaits_other_nodes(finding: Finding, context: CorrelationContext) -> bool:
    """It could be shared, nobody else has said so yet, and somebody would be moved for it."""
    return (
        not finding.proof
        and finding.cause in _SHAREABLE_CAUSES
        and finding.node in context.occupied
        and context.node_count > 1
    )


def _kind(finding: Finding) -> EventKind:
    if finding.incarnation is not None:
        return _SILENCE if _is_silent(finding) else _STALL
    if _is_lost(finding):
        return _LOST
    return finding.cause, finding.detector, finding.component if finding.cause is Cause.STORAGE else ""


def _recent(
    suspects: Collection[Finding], first: Mapping[str, float], state: CorrelationState, now: float
) -> dict[EventKind, dict[NodeName, float]]:
    """Which nodes said it of late, also those that do not any more."""
    recent: dict[EventKind, dict[NodeName, float]] = {}
    for kind, nodes in state.recent.items():
        if within_window := {node: at for node, at in nodes.items() if now - at <= WINDOW_S}:
            recent[kind] = within_window
    for finding in suspects:
        if finding.node is not None and not _is_lost(finding):
            nodes = recent.setdefault(_kind(finding), {})
            nodes[finding.node] = max(first[finding.key], nodes.get(finding.node, -inf))
    return recent


def _events(
    findings: Sequence[Finding], suspects: Collection[Finding], recent: Mapping[EventKind, Mapping[NodeName, float]],
    context: CorrelationContext, state: CorrelationState, now: float,
) -> dict[EventKind, CorrelatedEvent]:  # fmt: skip
    """What is shared now, or was within its time."""
    enough, most = max(2, ceil(CORRELATED_SHARE * context.node_count)), max(2, int(MOST_SHARE * context.node_count) + 1)
    events = {kind: event for kind, event in state.events.items() if now < _expires_at(kind, event) or kind in _GRACE_S}
    unproven: dict[EventKind, set[NodeName]] = {}
    proved: dict[EventKind, set[NodeName]] = {}
    for finding in suspects:
        if finding.node is not None and finding.node not in context.excluded:
            (proved if finding.proof else unproven).setdefault(_kind(finding), set()).add(finding.node)
    for kind, nodes in recent.items():
        newest = max(nodes.values())
        near = {str(node) for node, at in nodes.items() if newest - at <= WINDOW_S}
        doubtful, every = unproven.get(kind, set()), unproven.get(kind, set()) | proved.get(kind, set())
        event = events.get(kind)
        if event is not None and len(every if event.on_most_nodes else doubtful) >= enough:
            event = replace(event, last_reported_at=now)
        fresh = now - newest <= WINDOW_S  # one that is over does not begin anew by itself
        if every and fresh and len(near) >= most and (event is None or not event.on_most_nodes):
            event = CorrelatedEvent(now, _run_wide(kind, near, now, most=True), on_most_nodes=True)
        elif event is None and doubtful and fresh and len(near) >= enough:
            event = CorrelatedEvent(now, _run_wide(kind, near, now))
        if event is not None:
            events[kind] = event
    stalling = [finding for finding in findings if _is_stall(finding, context)]
    failing = any(_kind(finding) == _STALL for finding in suspects)
    stuck = {finding.incarnation for finding in stalling if finding.incarnation is not None}
    _update_group_event(events, _STALL, stuck, failing and _all_rollouts_stall(stalling, context), now)
    silent = [finding for finding in suspects if _kind(finding) == _SILENCE]
    silent_group = _silent_group(silent, context)
    _update_group_event(events, _SILENCE, silent_group, _on_several_nodes(silent_group, context), now)
    lost = _lost_group([one for one in suspects if _kind(one) == _LOST], context)
    _update_group_event(events, _LOST, lost, len(lost) >= MIN_SILENT_NODES, now)
    return events


def _update_group_event(
    events: dict[EventKind, CorrelatedEvent],
    kind: EventKind,
    members: Collection[Incarnation] | Collection[NodeName],
    correlated: bool,
    now: float,
) -> None:
    """What workers or nodes do at once begins once it is so, and is over when none of them does it."""
    if not members:
        events.pop(kind, None)
    elif correlated and kind not in events:
        events[kind] = CorrelatedEvent(now, _run_wide(kind, {str(one) for one in members}, now))


def _silent_group(silent: Collection[Finding], context: CorrelationContext) -> set[Incarnation]:
    """Those who are condemned, and who fell silent when one of them did and will be condemned next."""
    silent_group = {finding.incarnation for finding in silent if finding.incarnation is not None}
    began = [finding.since for finding in silent]
    return silent_group | {
        incarnation
        for incarnation, (_, at) in context.silent_workers.items()
        if any(abs(at - one) <= SILENCE_SPREAD_S for one in began)
    }


def _lost_group(lost: Collection[Finding], context: CorrelationContext) -> set[NodeName]:
    """Likewise of nodes; the most that did so in one moment. One that was condemned long before is alone."""
    began = {one.node: one.since for one in lost if one.node is not None}
    began = (
        {**{node: at for node, at in context.silent_nodes.items() if node not in context.excluded}, **began}
        if began
        else {}
    )
    moments = ({node for node, at in began.items() if abs(at - one.since) <= SILENCE_SPREAD_S} for one in lost)
    return max(moments, key=len, default=set())


def _on_several_nodes(incarnations: Collection[Incarnation], context: CorrelationContext) -> bool:
    nodes = {
        context.silent_workers[incarnation][0] for incarnation in incarnations if incarnation in context.silent_workers
    }
    return min(len(nodes), len({gang_of(incarnation.replica) for incarnation in incarnations})) >= MIN_SILENT_NODES


def _all_rollouts_stall(stalling: Collection[Finding], context: CorrelationContext) -> bool:
    """Every rollout, three at least, within a moment, though some are only suspected yet: of two it may be a
    coincidence."""
    since = [finding.since for finding in stalling]
    incarnations = {finding.incarnation for finding in stalling}
    return len(incarnations) >= max(3, len(context.rollouts)) and max(since) - min(since) <= STALL_SPREAD_S


def _expires_at(kind: EventKind, event: CorrelatedEvent) -> float:
    return event.finding.since + _GRACE_S[kind] if kind in _GRACE_S else event.last_reported_at + EVENT_LIFETIME_S


def _hold_back(finding: Finding, reason: str, since: float) -> Finding:
    evidence = (*finding.evidence, Evidence("correlation", f"held back: {reason}", since))
    flags = (*finding.flags, Flag.HELD_BACK)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, evidence=evidence, flags=flags)


def _run_wide(kind: EventKind, names: AbstractSet[str], now: float, most: bool = False) -> Finding:
    """Return the finding about the whole run: ``names`` have ``kind`` in common. ``most``: most nodes do."""
    cause, detector, component = kind
    if kind == _STALL:
        text = f"all rollouts stall at once: {_few(names)}; storage, fabric or what they wait for"
    elif kind == _SILENCE:
        text = f"silent at once, though their nodes are heard: {_few(names)}; the network, or this manager, is late"
    elif kind == _LOST:
        text = f"whole nodes silent at once: {_few(names)}; the network that they share, or its way to this manager"
    else:
        how_many = "on many nodes"
        if most:
            how_many = f"on most nodes, so that {_SUSPECTS.get(cause, _DEFAULT_SUSPECT)} rather than they,"
        text = f"{how_many} at once: {detector}{f' of {component}' if component else ''}: {_few(names)}"
    whose = Cause.SOFTWARE if cause in (Cause.GPU, Cause.HANG, Cause.PROCESS) else cause
    component_key = ":".join((cause.value, detector, component)).rstrip(":")
    return Finding(
        DETECTOR, Verdict.WARN, whose, Remedy.SUPPORT, now, (Evidence("correlation", text, now),), component=component_key,
        flags=(Flag.ON_MOST_NODES,) if most else (), shared=kind,
    )  # fmt: skip


def _few(names: AbstractSet[str]) -> str:
    listed = sorted(names)
    return ", ".join((*listed[:_MAX_NODES_NAMED], "and more") if len(listed) > _MAX_NODES_NAMED else listed)
