"""What of a run's events is worth remembering beyond it: events in, records of a history out. Pure."""

from __future__ import annotations

from ...core.types import AGENT, SHADOW, Cause, Finding, NodeName, Verdict, gang_of, role_of
from ...health.history.records import (  # fmt: skip
    MOST_EVIDENCE,
    Acted,
    Began,
    Failed,
    Found,
    Held,
    Left,
    Mended,
    Over,
    Record,
    Said,
    clipped,
)
from ..cluster.base import NodeState
from ..model import events as ev
from ..model.actions import Drain, Exclude, Fence, Readmit, RestartAll, Undrain
from ..model.state import Node, State
from .downtime import Downtime, against, fences, first_trace, gpus_on

REPEAT = 600.0
"""s within which a finding that only says the same again is not written again"""
RAISED = (Verdict.WARN, Verdict.FAIL)


class Chronicle:
    """Of one manager. ``state``: as it found the run; ``user`` and ``cluster``: whose, and where."""

    def __init__(self, run: str, user: str, cluster: str, job: str, epoch: int, at: float, state: State | None) -> None:
        self.first: list[Record] = [Began(at, run, user, cluster, job, epoch)]
        """lines before any event: the file stands for itself"""
        self._downtime = Downtime(state)
        self._told: dict[str, tuple[Verdict, float, int]] = {}
        """by Finding.key: what was written last, when, and how often it was raised"""
        self._tried: dict[str, Drain | Undrain] = {}
        """by tag"""
        if state is not None:
            self.first += [Held(at, node.name, gpus_on(state, node.name)) for node in _held(state).values()]
            self._tried = {tag: one.action for tag, one in state.intents.items()
                           if isinstance(one.action, Drain | Undrain)}  # fmt: skip
            stands = {key: one for key, one in state.findings.items() if one.verdict in RAISED}
            self.first += [_found(state, one, at, 0) for one in stands.values()]
            self._told = {key: (one.verdict, at, 0) for key, one in stands.items()}

    def enter(self, before: State | None, after: State, stamped: ev.Stamped) -> list[Record]:
        """``before`` and ``after``: the states that the event was folded into and made."""
        event, at = stamped.event, stamped.at
        over = self._downtime.enter(before, after, stamped)
        records: list[Record] = [
            Mended(at, down.replica, down.node, down.since, round(down.gpu_seconds(at) / 3600, 6), ok)
            for down, ok in over
        ]
        if before is None:
            return records
        if isinstance(event, ev.FindingChanged):
            records += self._found(before, event.finding, at)
        elif isinstance(event, ev.Decided):
            records += _decided(before, after, event, at)
        elif isinstance(event, ev.AllocationChanged):
            records += _moved(before, after, at)
        elif isinstance(event, ev.Intended) and isinstance(event.action, Drain | Undrain):
            self._tried[event.action.tag] = event.action
        elif isinstance(event, ev.Done) and (tried := self._tried.pop(event.tag, None)) is not None:
            records += _settled(after, tried, event, at)
        elif isinstance(event, ev.RunEnded):
            records.append(Over(at, event.outcome.value, clipped(event.why)))
        return records

    def _found(self, before: State, finding: Finding, at: float) -> list[Record]:
        """One that is raised, that changes, or that is over; not each repetition of it."""
        verdict, then, count = self._told.get(finding.key, (Verdict.OK, 0.0, 0))
        if finding.verdict not in RAISED and (verdict not in RAISED or not _looked_at(before, finding)):
            return []
        if finding.verdict is verdict and at < then + REPEAT:
            return []
        count = (count if verdict in RAISED else 0) + (finding.verdict in RAISED)
        self._told[finding.key] = finding.verdict, at, count
        return [_found(before, finding, at, count)]


def _found(state: State, finding: Finding, at: float, count: int) -> Found:
    life = finding.life
    node = finding.node or (state.replica(life.replica).node if life is not None else None) or ""
    kept = finding.evidence
    if len(kept) > MOST_EVIDENCE:  # the last line may say why a failure is told as less
        kept = (*kept[: MOST_EVIDENCE - 1], kept[-1])
    said = tuple(Said(one.at, clipped(one.source), clipped(one.text)) for one in kept)
    return Found(
        at, node, finding.detector, finding.verdict, finding.cause, finding.remedy, finding.since,
        str(life) if life is not None else "", clipped(finding.part), finding.proof, count, said,
        finding.node is not None and _injected(state, finding.node), finding.flags,
    )  # fmt: skip


def _looked_at(state: State, finding: Finding) -> bool:
    """Somebody of ours can tell that it is over: of a node that was given back, we merely hear no more."""
    return finding.node is None or (finding.node in _held(state) and state.verdict is None)


def _held(state: State) -> dict[NodeName, Node]:
    return {name: node for name, node in state.nodes.items() if node.allocation}


def _moved(before: State, after: State, at: float) -> list[Record]:
    had, has = _held(before), _held(after)
    records: list[Record] = [Held(at, name, gpus_on(after, name)) for name in has if name not in had]
    return records + [Left(at, name) for name in had if name not in has]


def _decided(before: State, after: State, event: ev.Decided, at: float) -> list[Record]:
    action = event.action
    if isinstance(action, Exclude):
        return _excluded(before, action, at)
    if isinstance(action, Readmit):
        return [Acted(at, action.node, "readmitted", evidence=_lines(action.why.evidence))]
    given_up = [fence for fence in fences(event) if role_of(fence.life.replica) not in (AGENT, SHADOW)]
    if before.verdict is not None or not given_up:
        return []
    charged = [fence for fence in given_up if fence.charged]
    took = sorted({gang_of(fence.life.replica) for fence in given_up})
    if isinstance(action, RestartAll):  # all stand still for the one that failed
        return [_failed(before, fence, tuple(took) if fence is charged[0] else (), at) for fence in charged]
    return [_failed(before, fence, (gang_of(fence.life.replica),), at) for fence in charged]


def _failed(state: State, fence: Fence, took: tuple[str, ...], at: float) -> Failed:
    held = state.replica(fence.life.replica)
    finding = next(against(state, fence.life), None)
    return Failed(
        at, held.node or "", str(fence.life), took, finding.cause.value if finding is not None else Cause.PROCESS.value,
        finding.detector if finding is not None else "", finding.remedy.value if finding is not None else "",
        first_trace(state, fence.life, at), finding is not None and finding.proof, bool(held.fault),
        held.node is not None and _lost(state, held.node), fence.rung.value, _lines(fence.why.evidence),
    )  # fmt: skip


def _excluded(before: State, action: Exclude, at: float) -> list[Record]:
    """A node that a person wanted to be left has not failed."""
    cause = action.cause.value if action.cause is not None else ""
    lines = _lines(action.why.evidence)
    acted = Acted(at, action.node, "excluded", cause=cause, by=clipped(action.by), evidence=lines)
    if action.by or before.marks.get(action.node):
        return [acted]
    found = [one for one in before.findings.values() if one.node == action.node and one.verdict is Verdict.FAIL]
    first = found[0] if found else None
    failed = Failed(
        at, action.node, cause=cause or (first.cause.value if first is not None else Cause.NODE.value),
        detector=first.detector if first is not None else "", remedy=first.remedy.value if first is not None else "",
        since=min((one.since for one in found if one.since > 0), default=at), proof=action.proof,
        injected=_injected(before, action.node), lost=_lost(before, action.node), evidence=lines,
    )  # fmt: skip
    return [acted, failed]


def _injected(state: State, node: NodeName) -> bool:
    return any(one.node == node and one.fault for one in state.replicas.values())


def _lost(state: State, name: NodeName) -> bool:
    """The cluster says DOWN, or nothing speaks from there any more."""
    node = state.nodes.get(name)
    down = node is not None and node.seen is not None and node.seen.state is NodeState.DOWN
    silent = any(one.node == name and one.verdict is Verdict.FAIL and one.cause is Cause.NODE
                 for one in state.findings.values())  # fmt: skip
    return down or silent


def _settled(after: State, tried: Drain | Undrain, event: ev.Done, at: float) -> list[Record]:
    if isinstance(tried, Undrain):
        return [Acted(at, tried.node, "undrained", clipped(tried.reason))] if event.ok else []
    node = after.nodes.get(tried.node)
    cause = node.cause.value if node is not None and node.cause is not None else ""
    by = node.asked_by if node is not None else ""
    what = "drained" if event.ok else "asked"
    said = "" if event.ok else clipped(event.detail)
    return [Acted(at, tried.node, what, clipped(tried.reason), cause, clipped(by), said, _lines(tried.why.evidence))]


def _lines(evidence: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(clipped(text) for text in evidence[:MOST_EVIDENCE])
