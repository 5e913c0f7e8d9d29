"""Hold back findings that many nodes or replicas have at the same time, because they probably share a cause.

If several nodes have the same finding within two minutes, the likely cause is the fabric, storage or software that they
share. Three other cases also suggest a shared cause:

- All rollouts stall at the same time.
- Workers on many nodes miss heartbeats while their agents do not, for example because of a flood of log lines or a
  delayed manager.
- Several nodes fall silent at the same time, for example because a switch fails over, which takes up to half a minute.

Each of these four cases is recorded as a *shared cause* (:class:`SharedCause`).

A finding that is held back becomes a WARN without a remedy, and one finding about the whole run, ``correlated``, names
the shared cause. A finding with proof is not held back. For example, a GPU that fell off its bus has failed even if
other nodes lost a GPU too (the planner limits how many nodes it excludes). But if most nodes have findings with proof
at the same time, a driver, a wrong rule or another shared cause is more likely, and the findings are held back.

A first finding of fabric or storage is held back briefly before it counts against an occupied node, because other nodes
are sampled at other times. A shared cause remains active for a while, because some nodes report it late. The next
manager restores it (:func:`restore_state`). The module is pure: state and time are arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from ....core.types import Cause, Evidence, Finding, Flag, Incarnation, NodeName, Remedy, Verdict, gang_of, title_of
from ..detectors.liveness import worker_silence
from ..detectors.node_liveness import node_lost

WINDOW_S = 120.0
"""Time (s) within which equal findings on several nodes have one shared cause."""
CORRELATED_SHARE = 0.2
"""Minimum share of the run's nodes (at least two nodes) that must have equal findings for a shared cause to be assumed.
The circuit breaker uses the same share (docs/sources.md)."""
SETTLE_S = 30.0
"""Time (s) for which a first finding about fabric or storage is held back, so that other nodes can report it too. The
time suffices for three samples of the readers of fabric (every 5 s) and host (every 10 s), because a finding may need
three samples."""
MOST_SHARE = 0.5
"""If equal findings occur on more than this share of the run's nodes (on at least two nodes), even findings with proof
are held back."""
SHARED_CAUSE_LIFETIME_S = 600.0
"""Time (s) for which a shared cause remains active. It counts from the last moment at which ``CORRELATED_SHARE`` or
more of the nodes reported findings of this cause."""
STALL_GRACE_S = 120.0
"""Time (s) for which findings about stalled rollouts are held back if all rollouts stall at the same time. After this
time the rollouts are repaired."""
STALL_SPREAD_S = 30.0
"""Maximum time (s) between the first and the last stall of rollouts that count as stalling at the same time."""
SILENCE_GRACE_S = 30.0
"""Time (s) for which findings about workers or nodes that fall silent at the same time are held back (our choice: three
times the silence limit)."""
MIN_SILENT_NODES = 3
"""Minimum number of nodes that must fall silent at the same time to suggest a shared cause. For workers it is also the
minimum number of gangs.

The silence of two nodes may be a coincidence, and the members of one gang may hang together."""
SILENCE_SPREAD_S = 10.0
"""Maximum time (s) between the beginnings of two silences that count as beginning at the same time."""
_SHAREABLE_CAUSES = frozenset({Cause.FABRIC, Cause.STORAGE})
_NODE_CAUSES = frozenset({Cause.GPU, Cause.FABRIC, Cause.STORAGE})
"""Causes that the findings of node agents have."""
_MAX_NODES_NAMED = 4
"""Maximum number of nodes that the evidence names. If there are further nodes, the list ends with "and more"."""
DETECTOR = "correlated"
_DEFAULT_SUSPECT = "a driver or a rule of the site"
_SUSPECTS = {Cause.FABRIC: "the shared fabric (a switch)", Cause.STORAGE: "the shared storage"}
"""Text about the suspected shared cause, by the cause of equal findings."""

SharedCauseKind = tuple[Cause, str, str]
"""What equal findings have in common: the cause, the detector and, for storage, the path."""
_STALL: SharedCauseKind = (Cause.HANG, "", "")
"""Kind of a shared cause: all rollouts stall at the same time."""
_SILENCE: SharedCauseKind = (Cause.PROCESS, worker_silence.__name__, "")
"""Kind of a shared cause: workers on different nodes fall silent at the same time."""
_LOST: SharedCauseKind = (Cause.NODE, node_lost.__name__, "")
"""Kind of a shared cause: several nodes fall silent at the same time."""
_GRACE_S = {_STALL: STALL_GRACE_S, _SILENCE: SILENCE_GRACE_S, _LOST: SILENCE_GRACE_S}
"""Time (s) for which a shared cause of the kind ``_STALL``, ``_SILENCE`` or ``_LOST`` holds findings back. The shared
cause itself is kept until no finding of its kind is left, so that one stall or silence has only one shared cause."""


class SharedCause(Struct, frozen=True):
    """A cause that the equal findings of several nodes or replicas probably share."""

    last_reported_at: float
    """Time (s) at which at least ``CORRELATED_SHARE`` of the nodes last reported findings of this kind."""
    finding: Finding
    """Finding about the whole run; its ``since`` is the time (s) at which the shared cause was recognized."""
    on_most_nodes: bool = False
    """Whether most nodes report findings of this kind, so that even findings with proof are held back."""


class CorrelationState(Struct, frozen=True):
    """State that :func:`correlate` keeps between two calls. Times are the caller's clock (s)."""

    first_reported: dict[str, float] = {}
    """Finding's key → time since which the finding has been reported without a break."""
    recent: dict[SharedCauseKind, dict[NodeName, float]] = {}
    """Kind → node → time when the node last began to report a finding of this kind."""
    shared_causes: dict[SharedCauseKind, SharedCause] = {}
    """Active shared causes."""


class CorrelationContext(Struct, frozen=True):
    """The nodes and workers of the run at the time of a call of :func:`correlate`."""

    node_count: int
    """Number of the run's nodes."""
    occupied: AbstractSet[NodeName] = frozenset()
    """Nodes on which a role runs."""
    rollouts: AbstractSet[Incarnation] = frozenset()
    """Rollouts that have joined."""
    excluded: AbstractSet[NodeName] = frozenset()
    """Excluded nodes; their findings do not count towards a shared cause."""
    silent_workers: Mapping[Incarnation, tuple[NodeName, float]] = {}
    """Node and time (s) of the last message, for each worker that misses heartbeats although its node sends messages
    (``missing_heartbeats``)."""
    silent_nodes: Mapping[NodeName, float] = {}
    """Time of the last message of each node that misses heartbeats (``silent_nodes``)."""


def correlate(
    findings: Sequence[Finding], context: CorrelationContext, state: CorrelationState, now: float
) -> tuple[list[Finding], CorrelationState, float]:
    """Hold back the findings that have a shared cause, and add one finding about the whole run for each shared cause.

    Args:
        findings: All current findings.
        context: Nodes and workers of the run, as of ``now``.
        state: State that the previous call returned.
        now: Caller's clock (s).

    Returns:
        The findings, the updated state, and the time (s) at which the result may change without new findings (inf if
        never).
    """
    suspects = {finding.key: finding for finding in findings if _may_be_shared(finding, context)}
    if not suspects and not state.shared_causes and not state.first_reported:
        return list(findings), state, inf
    first = {key: state.first_reported.get(key, now) for key in suspects}
    recent = _recent(suspects.values(), first, state, now)
    shared_causes = _shared_causes(findings, suspects.values(), recent, context, state, now)
    next_check = min(
        (
            expires_at
            for kind, shared_cause in shared_causes.items()
            if (expires_at := _expires_at(kind, shared_cause)) > now
        ),
        default=inf,
    )
    reported: list[Finding] = []
    for finding in findings:
        shared_cause = shared_causes.get(_kind(finding)) if finding.key in suspects else None
        if (
            shared_cause is not None
            and now < _expires_at(_kind(finding), shared_cause)
            and (shared_cause.on_most_nodes or not finding.proof)
        ):
            why = f"other nodes or replicas have the same finding: see the finding {DETECTOR}"
            reported.append(_hold_back(finding, why, shared_cause.finding.since, shared_cause.on_most_nodes))
        elif (
            finding.key in suspects
            and _awaits_other_nodes(finding, context)
            and now < (until := first[finding.key] + SETTLE_S)
        ):
            reported.append(
                _hold_back(finding, f"waiting {SETTLE_S:g} s for the same finding on other nodes", first[finding.key])
            )
            next_check = min(next_check, until)
        else:
            reported.append(finding)
    reported += [shared_cause.finding for shared_cause in shared_causes.values()]
    return reported, CorrelationState(first, recent, shared_causes), next_check


def restore_state(findings: Iterable[Finding], now: float) -> CorrelationState:
    """Rebuild the state of an earlier manager from the findings that it recorded.

    The findings contain the shared causes and the time at which each failure began. A finding that was held back so
    that other nodes can report it too is held back for the full ``SETTLE_S`` again.
    """
    first, shared_causes = dict[str, float](), dict[SharedCauseKind, SharedCause]()
    for finding in findings:
        if finding.detector == DETECTOR and finding.shared is not None:
            shared_causes[finding.shared] = SharedCause(now, finding, Flag.ON_MOST_NODES in finding.flags)
        elif finding.verdict is Verdict.FAIL and finding.cause in _NODE_CAUSES:
            first[finding.key] = min(now, finding.since)
    return CorrelationState(first, shared_causes=shared_causes)


def _may_be_shared(finding: Finding, context: CorrelationContext) -> bool:
    """Return whether the finding could have a cause that other nodes or replicas share."""
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
    """Return whether the finding is held back for its first ``SETTLE_S``, so that other nodes can report it too.

    This applies to a finding without proof about the fabric or storage of a node where a role runs, because such a
    finding would move the role to another node.
    """
    return (
        not finding.proof
        and finding.cause in _SHAREABLE_CAUSES
        and finding.node in context.occupied
        and context.node_count > 1
    )


def _kind(finding: Finding) -> SharedCauseKind:
    """Return the kind of shared cause that this finding may have."""
    if finding.incarnation is not None:
        return _SILENCE if _is_silent(finding) else _STALL
    if _is_lost(finding):
        return _LOST
    return finding.cause, finding.detector, finding.component if finding.cause is Cause.STORAGE else ""


def _recent(
    suspects: Collection[Finding], first: Mapping[str, float], state: CorrelationState, now: float
) -> dict[SharedCauseKind, dict[NodeName, float]]:
    """Return for each kind of shared cause the nodes with such findings, and when (s) the newest one of a node began.

    A node that no longer has such a finding is included if its finding began within the last ``WINDOW_S``.
    """
    recent: dict[SharedCauseKind, dict[NodeName, float]] = {}
    for kind, nodes in state.recent.items():
        if within_window := {node: at for node, at in nodes.items() if now - at <= WINDOW_S}:
            recent[kind] = within_window
    for finding in suspects:
        if finding.node is not None and not _is_lost(finding):
            nodes = recent.setdefault(_kind(finding), {})
            nodes[finding.node] = max(first[finding.key], nodes.get(finding.node, -inf))
    return recent


def _shared_causes(
    findings: Sequence[Finding],
    suspects: Collection[Finding],
    recent: Mapping[SharedCauseKind, Mapping[NodeName, float]],
    context: CorrelationContext,
    state: CorrelationState,
    now: float,
) -> dict[SharedCauseKind, SharedCause]:
    """Return the active shared causes: new ones, and earlier ones that have not expired."""
    enough, most = max(2, ceil(CORRELATED_SHARE * context.node_count)), max(2, int(MOST_SHARE * context.node_count) + 1)
    shared_causes = {
        kind: shared_cause
        for kind, shared_cause in state.shared_causes.items()
        if now < _expires_at(kind, shared_cause) or kind in _GRACE_S
    }
    unproven: dict[SharedCauseKind, set[NodeName]] = {}
    proved: dict[SharedCauseKind, set[NodeName]] = {}
    for finding in suspects:
        if finding.node is not None and finding.node not in context.excluded:
            (proved if finding.proof else unproven).setdefault(_kind(finding), set()).add(finding.node)
    for kind, nodes in recent.items():
        newest = max(nodes.values())
        near = {str(node) for node, at in nodes.items() if newest - at <= WINDOW_S}
        without_proof, reporting = unproven.get(kind, set()), unproven.get(kind, set()) | proved.get(kind, set())
        shared_cause = shared_causes.get(kind)
        if shared_cause is not None and len(reporting if shared_cause.on_most_nodes else without_proof) >= enough:
            shared_cause = replace(shared_cause, last_reported_at=now)
        fresh = now - newest <= WINDOW_S  # an expired shared cause does not start again without a new report
        if reporting and fresh and len(near) >= most and (shared_cause is None or not shared_cause.on_most_nodes):
            shared_cause = SharedCause(now, _run_wide(kind, near, now, most=True), on_most_nodes=True)
        elif shared_cause is None and without_proof and fresh and len(near) >= enough:
            shared_cause = SharedCause(now, _run_wide(kind, near, now))
        if shared_cause is not None:
            shared_causes[kind] = shared_cause
    stalling = [finding for finding in findings if _is_stall(finding, context)]
    failing = any(_kind(finding) == _STALL for finding in suspects)
    stuck = {finding.incarnation for finding in stalling if finding.incarnation is not None}
    _update_group_cause(shared_causes, _STALL, stuck, failing and _all_rollouts_stall(stalling, context), now)
    silent = [finding for finding in suspects if _kind(finding) == _SILENCE]
    silent_group = _silent_group(silent, context)
    _update_group_cause(shared_causes, _SILENCE, silent_group, _on_several_nodes(silent_group, context), now)
    lost = _lost_group([finding for finding in suspects if _kind(finding) == _LOST], context)
    _update_group_cause(shared_causes, _LOST, lost, len(lost) >= MIN_SILENT_NODES, now)
    return shared_causes


def _update_group_cause(
    shared_causes: dict[SharedCauseKind, SharedCause],
    kind: SharedCauseKind,
    affected: Collection[Incarnation] | Collection[NodeName],
    correlated: bool,
    now: float,
) -> None:
    """Start a shared cause when the workers or nodes ``affected`` are correlated; end it when none is affected."""
    if not affected:
        shared_causes.pop(kind, None)
    elif correlated and kind not in shared_causes:
        shared_causes[kind] = SharedCause(now, _run_wide(kind, {str(name) for name in affected}, now))


def _silent_group(silent: Collection[Finding], context: CorrelationContext) -> set[Incarnation]:
    """Return the workers with a ``worker_silence`` finding, and the workers that fell silent at about the same time."""
    silent_group = {finding.incarnation for finding in silent if finding.incarnation is not None}
    began = [finding.since for finding in silent]
    return silent_group | {
        incarnation
        for incarnation, (_, at) in context.silent_workers.items()
        if any(abs(at - since) <= SILENCE_SPREAD_S for since in began)
    }


def _lost_group(lost: Collection[Finding], context: CorrelationContext) -> set[NodeName]:
    """Return the largest group of nodes that fell silent at about the same time as a node found by ``node_lost``."""
    began = {finding.node: finding.since for finding in lost if finding.node is not None}
    if began:
        began = {**{node: at for node, at in context.silent_nodes.items() if node not in context.excluded}, **began}
    groups = ({node for node, at in began.items() if abs(at - finding.since) <= SILENCE_SPREAD_S} for finding in lost)
    return max(groups, key=len, default=set())


def _on_several_nodes(incarnations: Collection[Incarnation], context: CorrelationContext) -> bool:
    """Return whether the workers span enough nodes and gangs to suggest a shared cause rather than one node or gang."""
    nodes = {
        context.silent_workers[incarnation][0] for incarnation in incarnations if incarnation in context.silent_workers
    }
    return min(len(nodes), len({gang_of(incarnation.replica) for incarnation in incarnations})) >= MIN_SILENT_NODES


def _all_rollouts_stall(stalling: Collection[Finding], context: CorrelationContext) -> bool:
    """Return whether all rollouts, at least three, stalled at about the same time. A suspected stall counts too."""
    since = [finding.since for finding in stalling]
    incarnations = {finding.incarnation for finding in stalling}
    return len(incarnations) >= max(3, len(context.rollouts)) and max(since) - min(since) <= STALL_SPREAD_S


def _expires_at(kind: SharedCauseKind, shared_cause: SharedCause) -> float:
    """Return the time (s) until which the shared cause holds findings back."""
    return (
        shared_cause.finding.since + _GRACE_S[kind]
        if kind in _GRACE_S
        else shared_cause.last_reported_at + SHARED_CAUSE_LIFETIME_S
    )


def _hold_back(finding: Finding, reason: str, since: float, on_most_nodes: bool = False) -> Finding:
    evidence = (*finding.evidence, Evidence("correlation", f"held back: {reason}", since))
    flags = (*finding.flags, Flag.HELD_BACK, *((Flag.ON_MOST_NODES,) if on_most_nodes else ()))
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, evidence=evidence, flags=flags)


def _run_wide(kind: SharedCauseKind, names: AbstractSet[str], now: float, most: bool = False) -> Finding:
    """Return the finding about the whole run: the nodes or replicas ``names`` have a shared cause of ``kind``."""
    cause, detector, component = kind
    if kind == _STALL:
        text = f"all rollouts stall at the same time: {_few(names)}"
        text += "; suspected: storage, fabric or a service that they wait for"
    elif kind == _SILENCE:
        text = f"workers, but not nodes, are silent at the same time: {_few(names)}"
        text += "; suspected: the network or this manager"
    elif kind == _LOST:
        text = f"nodes are silent at the same time: {_few(names)}; suspected: the network between them and this manager"
    else:
        text = f"{title_of(detector)}{f' of {component}' if component else ''}"
        text += f" on {'most' if most else 'many'} nodes at the same time: {_few(names)}"
        text += f"; suspected: {_SUSPECTS.get(cause, _DEFAULT_SUSPECT)}" if most else ""
    component_key = ":".join((cause.value, detector, component)).rstrip(":")
    cause = Cause.SOFTWARE if cause in (Cause.GPU, Cause.HANG, Cause.PROCESS) else cause
    evidence = (Evidence("correlation", text, now),)
    flags = (Flag.ON_MOST_NODES,) if most else ()
    return Finding(
        DETECTOR, Verdict.WARN, cause, Remedy.SUPPORT, now, evidence, component=component_key, flags=flags, shared=kind
    )


def _few(names: AbstractSet[str]) -> str:
    listed = sorted(names)
    return ", ".join((*listed[:_MAX_NODES_NAMED], "and more") if len(listed) > _MAX_NODES_NAMED else listed)
