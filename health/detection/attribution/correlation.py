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

from ....core.types import Cause, Evidence, Finding, Flag, Life, NodeName, Remedy, Verdict, gang_of
from ..detectors.liveness import worker_silence
from ..detectors.node_liveness import node_lost

WINDOW = 120.0
"""s within which the same on several nodes is one event"""
SHARE = 0.2
"""of the run's nodes: so many, and two at least (docs/sources.md, guard rails: the breaker's share)"""
SETTLE = 30.0
"""s that a first finding of what nodes may share waits for others: readers of fabric (5 s) and host (10 s) say it after
up to three looks in a row"""
MOST = 0.5
"""of the run's nodes: if more of them, and two at least, say the same, not even proof passes"""
LASTS = 600.0
"""s after it was last said by enough of them that it still explains who finds the same"""
HUNG_TOGETHER = 120.0
"""s for which rollouts that all stall at once are left alone; then somebody must act, whatever the cause"""
TOGETHER = 30.0
"""s between the first and the last of them"""
SILENT_TOGETHER = 30.0
"""s for which workers, or whole nodes, that fall silent at once are left alone (ours: three times the silence that
condemns one)"""
SILENT = 3
"""nodes, and of workers gangs, that fall silent at once: of two it may be a coincidence, and one gang may be stuck
together"""
AT_ONCE = 10.0
"""s between the first and the last of them"""
_SHARED = frozenset({Cause.FABRIC, Cause.STORAGE})
_OF_NODES = frozenset({Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""causes of findings that agents make"""
_NAMED = 4
"""nodes named in the evidence"""
DETECTOR = "correlated"
_RULE = "a driver or a site's rule is wrong"
_WRONG = {
    Cause.FABRIC: "the fabric that they share, a switch perhaps, has failed",
    Cause.STORAGE: "the storage that they share has failed",
}
"""what is to blame where most nodes say the same"""

Kind = tuple[Cause, str, str]
"""cause, detector, and of storage the path: what several can have in common"""
_STALL: Kind = (Cause.HANG, "", "")
"""what all rollouts do at once"""
_SILENCE: Kind = (Cause.PROCESS, worker_silence.__name__, "")
"""what workers of different nodes do at once"""
_LOST: Kind = (Cause.NODE, node_lost.__name__, "")
"""what several nodes do at once"""
_LEFT_ALONE = {_STALL: HUNG_TOGETHER, _SILENCE: SILENT_TOGETHER, _LOST: SILENT_TOGETHER}
"""s; such events are told until there is nobody of whom they could be, so that each comes but once"""


class Event(Struct, frozen=True):
    """Something that several have in common."""

    last: float
    """when enough of them last said so"""
    told: Finding
    """of the whole run; since it began"""
    most: bool = False
    """most nodes say so: proof does not pass either"""


class Memory(Struct, frozen=True):
    """What :func:`correlate` knows from before; hand in what it gave back. Times are the caller's clock (s)."""

    first: dict[str, float] = {}
    """by finding's key: since when it is said without a break"""
    recent: dict[Kind, dict[NodeName, float]] = {}
    """when each node last began to say so"""
    events: dict[Kind, Event] = {}


class Here(Struct, frozen=True):
    """What the run looks like at this moment."""

    nodes: int
    """that it has"""
    occupied: AbstractSet[NodeName] = frozenset()
    """those on which a role works"""
    rollouts: AbstractSet[Life] = frozenset()
    """that have joined"""
    left: AbstractSet[NodeName] = frozenset()
    """nodes that are excluded: what they say of themselves keeps nobody else's finding back"""
    silent: Mapping[Life, tuple[NodeName, float]] = {}
    """workers that are not heard though their nodes are, whether it condemns them yet or not: where, and since when"""
    absent: Mapping[NodeName, float] = {}
    """nodes that are not heard, likewise: since when"""


def correlate(
    findings: Sequence[Finding], here: Here, memory: Memory, now: float
) -> tuple[list[Finding], Memory, float]:
    """The findings with what is shared held back, the new memory, and when (s; inf: not by itself) the answer changes
    though nothing new is found."""
    suspects = {finding.key: finding for finding in findings if _may_be_shared(finding, here)}
    if not suspects and not memory.events and not memory.first:
        return list(findings), memory, inf
    first = {key: memory.first.get(key, now) for key in suspects}
    recent = _recent(suspects.values(), first, memory, now)
    events = _events(findings, suspects.values(), recent, here, memory, now)
    again = min((over for kind, event in events.items() if (over := _over(kind, event)) > now), default=inf)
    told: list[Finding] = []
    for finding in findings:
        event = events.get(_kind(finding)) if finding.key in suspects else None
        if event is not None and now < _over(_kind(finding), event) and (event.most or not finding.proof):
            told.append(_held(finding, f"others find the same: see {DETECTOR}", event.told.since))
        elif finding.key in suspects and _settles(finding, here) and now < (until := first[finding.key] + SETTLE):
            told.append(_held(finding, f"waits {SETTLE:g} s whether other nodes find the same", first[finding.key]))
            again = min(again, until)
        else:
            told.append(finding)
    told += [event.told for event in events.values()]
    return told, Memory(first, recent, events), again


def remembered(findings: Iterable[Finding], now: float) -> Memory:
    """What an earlier manager knew, from what it told: who was condemned since when, and what was shared. What waited
    for others waits anew."""
    first, events = dict[str, float](), dict[Kind, Event]()
    for finding in findings:
        if finding.detector == DETECTOR and finding.shared is not None:
            events[finding.shared] = Event(now, finding, Flag.ON_MOST_NODES in finding.flags)
        elif finding.verdict is Verdict.FAIL and finding.cause in _OF_NODES:
            first[finding.key] = min(now, finding.since)
    return Memory(first, events=events)


def _may_be_shared(finding: Finding, here: Here) -> bool:
    if finding.verdict is not Verdict.FAIL:
        return False
    if finding.life is not None:
        return not finding.proof and (_stalls(finding, here) or _is_silent(finding))
    if _is_lost(finding):
        return finding.node not in here.left
    return finding.node is not None and finding.cause in _OF_NODES


def _is_lost(finding: Finding) -> bool:
    return finding.detector == _LOST[1] and not finding.proof


def _stalls(finding: Finding, here: Here) -> bool:
    return finding.cause is Cause.HANG and finding.life in here.rollouts


def _is_silent(finding: Finding) -> bool:
    return finding.detector == _SILENCE[1]


def _settles(finding: Finding, here: Here) -> bool:
    """It could be shared, nobody else has said so yet, and somebody would be moved for it."""
    return not finding.proof and finding.cause in _SHARED and finding.node in here.occupied and here.nodes > 1


def _kind(finding: Finding) -> Kind:
    if finding.life is not None:
        return _SILENCE if _is_silent(finding) else _STALL
    if _is_lost(finding):
        return _LOST
    return finding.cause, finding.detector, finding.part if finding.cause is Cause.STORAGE else ""


def _recent(
    suspects: Collection[Finding], first: Mapping[str, float], memory: Memory, now: float
) -> dict[Kind, dict[NodeName, float]]:
    """Which nodes said it of late, also those that do not any more."""
    recent: dict[Kind, dict[NodeName, float]] = {}
    for kind, nodes in memory.recent.items():
        if kept := {node: at for node, at in nodes.items() if now - at <= WINDOW}:
            recent[kind] = kept
    for finding in suspects:
        if finding.node is not None and not _is_lost(finding):
            nodes = recent.setdefault(_kind(finding), {})
            nodes[finding.node] = max(first[finding.key], nodes.get(finding.node, -inf))
    return recent


def _events(
    findings: Sequence[Finding], suspects: Collection[Finding], recent: Mapping[Kind, Mapping[NodeName, float]],
    here: Here, memory: Memory, now: float,
) -> dict[Kind, Event]:  # fmt: skip
    """What is shared now, or was within its time."""
    enough, most = max(2, ceil(SHARE * here.nodes)), max(2, int(MOST * here.nodes) + 1)
    events = {kind: event for kind, event in memory.events.items() if now < _over(kind, event) or kind in _LEFT_ALONE}
    said: dict[Kind, set[NodeName]] = {}
    proved: dict[Kind, set[NodeName]] = {}
    for finding in suspects:
        if finding.node is not None and finding.node not in here.left:
            (proved if finding.proof else said).setdefault(_kind(finding), set()).add(finding.node)
    for kind, nodes in recent.items():
        newest = max(nodes.values())
        near = {str(node) for node, at in nodes.items() if newest - at <= WINDOW}
        doubtful, every = said.get(kind, set()), said.get(kind, set()) | proved.get(kind, set())
        event = events.get(kind)
        if event is not None and len(every if event.most else doubtful) >= enough:
            event = replace(event, last=now)
        fresh = now - newest <= WINDOW  # one that is over does not begin anew by itself
        if every and fresh and len(near) >= most and (event is None or not event.most):
            event = Event(now, _run_wide(kind, near, now, most=True), most=True)
        elif event is None and doubtful and fresh and len(near) >= enough:
            event = Event(now, _run_wide(kind, near, now))
        if event is not None:
            events[kind] = event
    stalling = [finding for finding in findings if _stalls(finding, here)]
    condemned = any(_kind(finding) == _STALL for finding in suspects)
    stuck = {finding.life for finding in stalling if finding.life is not None}
    _together(events, _STALL, stuck, condemned and _all(stalling, here), now)
    silent = [finding for finding in suspects if _kind(finding) == _SILENCE]
    mute = _fell_silent_with(silent, here)
    _together(events, _SILENCE, mute, _far_apart(mute, here), now)
    lost = _lost_with([one for one in suspects if _kind(one) == _LOST], here)
    _together(events, _LOST, lost, len(lost) >= SILENT, now)
    return events


def _together(
    events: dict[Kind, Event], kind: Kind, who: Collection[Life] | Collection[NodeName], are: bool, now: float
) -> None:
    """What workers or nodes do at once begins once it is so, and is over when none of them does it."""
    if not who:
        events.pop(kind, None)
    elif are and kind not in events:
        events[kind] = Event(now, _run_wide(kind, {str(one) for one in who}, now))


def _fell_silent_with(silent: Collection[Finding], here: Here) -> set[Life]:
    """Those who are condemned, and who fell silent when one of them did and will be condemned next."""
    mute = {finding.life for finding in silent if finding.life is not None}
    began = [finding.since for finding in silent]
    return mute | {life for life, (_, at) in here.silent.items() if any(abs(at - one) <= AT_ONCE for one in began)}


def _lost_with(lost: Collection[Finding], here: Here) -> set[NodeName]:
    """Likewise of nodes; the most that did so in one moment. One that was condemned long before is alone."""
    began = {one.node: one.since for one in lost if one.node is not None}
    began = {**{node: at for node, at in here.absent.items() if node not in here.left}, **began} if began else {}
    moments = ({node for node, at in began.items() if abs(at - one.since) <= AT_ONCE} for one in lost)
    return max(moments, key=len, default=set())


def _far_apart(mute: Collection[Life], here: Here) -> bool:
    homes = {here.silent[life][0] for life in mute if life in here.silent}
    return min(len(homes), len({gang_of(life.replica) for life in mute})) >= SILENT


def _all(stalling: Collection[Finding], here: Here) -> bool:
    """Every rollout, three at least, within a moment, though some are only suspected yet: of two it may be a
    coincidence."""
    since = [finding.since for finding in stalling]
    lives = {finding.life for finding in stalling}
    return len(lives) >= max(3, len(here.rollouts)) and max(since) - min(since) <= TOGETHER


def _over(kind: Kind, event: Event) -> float:
    return event.told.since + _LEFT_ALONE[kind] if kind in _LEFT_ALONE else event.last + LASTS


def _held(finding: Finding, why: str, since: float) -> Finding:
    evidence = (*finding.evidence, Evidence("correlation", f"held back: {why}", since))
    flags = (*finding.flags, Flag.HELD_BACK)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, evidence=evidence, flags=flags)


def _run_wide(kind: Kind, names: AbstractSet[str], now: float, most: bool = False) -> Finding:
    """Return the finding about the whole run: ``names`` have ``kind`` in common. ``most``: most nodes do."""
    cause, detector, part = kind
    if kind == _STALL:
        text = f"all rollouts stall at once: {_few(names)}; storage, fabric or what they wait for"
    elif kind == _SILENCE:
        text = f"silent at once, though their nodes are heard: {_few(names)}; the network, or this manager, is late"
    elif kind == _LOST:
        text = f"whole nodes silent at once: {_few(names)}; the network that they share, or its way to this manager"
    else:
        how_many = "on many nodes"
        if most:
            how_many = f"on most nodes, so that {_WRONG.get(cause, _RULE)} rather than they,"
        text = f"{how_many} at once: {detector}{f' of {part}' if part else ''}: {_few(names)}"
    whose = Cause.SOFTWARE if cause in (Cause.GPU, Cause.HANG, Cause.PROCESS) else cause
    what = ":".join((cause.value, detector, part)).rstrip(":")
    return Finding(
        DETECTOR, Verdict.WARN, whose, Remedy.SUPPORT, now, (Evidence("correlation", text, now),), part=what,
        flags=(Flag.ON_MOST_NODES,) if most else (), shared=kind,
    )  # fmt: skip


def _few(names: AbstractSet[str]) -> str:
    listed = sorted(names)
    return ", ".join((*listed[:_NAMED], "and more") if len(listed) > _NAMED else listed)
