"""What the agents find on their nodes, as this manager believes it: only from the believed agent, only about its own
node, in the manager's time; and what the job wants to hear of at all (``[health]``)."""

from __future__ import annotations

from math import isfinite

from msgspec.structs import replace

from rrl.health.progress import NODE_DETECTORS
from rrl.spec.jobview import HealthView
from rrl.spec.words import (
    AGENT,
    WORST_FIRST,
    Cause,
    Evidence,
    Finding,
    Flag,
    Life,
    NodeName,
    Remedy,
    Verdict,
    replica_id,
)
from rrl.transport.messages import AgentHello, Found

OWN = frozenset(detector.__name__ for detector in NODE_DETECTORS)
"""detectors by which the manager itself judges nodes; what else is found on one is its agent's word"""
GONE = frozenset({"exit_record", "step_gone", "node_down"})
"""detectors whose proof is that a process or a node is no more: no setting brings that back"""
NOT_THE_NODE = frozenset({Cause.USER, Cause.SOFTWARE, Cause.PROCESS, Cause.HANG})
"""causes of what is found on a node that is no fault of it: told, and no more"""
MOST = 256
"""findings of one node that are kept: 16 GPUs, and more checks than there are"""
_LINES, _LINE = 8, 1000
"""lines of evidence of one finding, and characters of one: what agents write has five, and some 200"""


def heeded(finding: Finding, view: HealthView) -> Finding | None:
    """The finding as the job wants it: None where its check is off, WARN for FAIL where it is only observed, or where
    the node is not to blame."""
    if finding.proof and finding.detector in GONE:
        return finding
    if finding.node is not None and finding.verdict is Verdict.FAIL and finding.cause in NOT_THE_NODE:
        finding = replace(finding, verdict=Verdict.WARN, proof=False)
    mode = view.checks.get(finding.detector, "act")
    if mode == "off":
        return None
    if finding.verdict is not Verdict.FAIL or (mode == "act" and not view.observe_only):
        return finding
    why = f"observe only: nothing is done ({'observe_only' if view.observe_only else 'checks'} in [health])"
    evidence = (*finding.evidence, Evidence("job", why, finding.since))
    flags = (*finding.flags, Flag.OBSERVED)
    return replace(finding, verdict=Verdict.WARN, remedy=Remedy.NONE, proof=False, evidence=evidence, flags=flags)


def of_agent(finding: Finding) -> bool:
    """An agent found it on its node."""
    return finding.node is not None and finding.detector not in OWN


class Said:
    """What each agent says of its node, by finding's key; times are the manager's (s)."""

    def __init__(self) -> None:
        self._by: dict[NodeName, dict[str, Finding]] = {}
        self.changes = 0
        """times that somebody said something"""

    @property
    def nodes(self) -> set[NodeName]:
        return set(self._by)

    def all(self) -> list[Finding]:
        return [finding for said in self._by.values() for finding in said.values()]

    def kept(self, finding: Finding) -> None:
        """An earlier manager heard it: it stands until the agent says what it finds now."""
        if finding.node is not None:
            self.changes += 1
            self._by.setdefault(finding.node, {})[finding.key] = finding

    def greeted(self, hello: AgentHello, also: tuple[Finding, ...], now: float) -> None:
        """All that its agent finds just now, but for what it cannot read any more: that takes back nothing. ``also``:
        what the manager makes of the rest of its words."""
        self.changes += 1
        node = hello.node
        told = [one for one in hello.findings if one.verdict is not Verdict.OK and is_about(one, hello.life, node)]
        before = self._by.pop(node, {})
        after = {one.key: unchanged(before.get(one.key), one)
                 for one in (*(rebased(one, hello.now, now) for one in told), *also)}  # fmt: skip
        unread = [one for one in after.values() if one.verdict is Verdict.UNKNOWN]
        keys, whole = {one.key for one in unread}, {one.detector for one in unread if not one.part}
        for key, one in before.items():
            if one.verdict is not Verdict.UNKNOWN and (key in keys or (one.detector in whole and key not in after)):
                after[key] = one
        kept = sorted(after.values(), key=_grave, reverse=True)[:MOST]
        if kept:
            self._by[node] = {one.key: one for one in kept}

    def found(self, message: Found, now: float) -> None:
        """One of them changed. That something cannot be read any more (UNKNOWN) takes back nothing that was read."""
        self.changes += 1
        finding = rebased(message.finding, message.now, now)
        said = self._by.setdefault(message.node, {})
        before = said.get(finding.key)
        if finding.verdict is Verdict.OK:
            said.pop(finding.key, None)
        elif before is not None and finding.verdict is Verdict.UNKNOWN and before.verdict is not Verdict.UNKNOWN:
            return
        elif before is not None or len(said) < MOST:
            said[finding.key] = unchanged(before, finding)
        elif _grave(least := min(said.values(), key=_grave)) < _grave(finding):
            del said[least.key]
            said[finding.key] = finding

    def forget(self, node: NodeName) -> None:
        """It was given back, or begins anew."""
        self.changes += 1
        self._by.pop(node, None)


def is_about(finding: Finding, agent: Life, node: NodeName) -> bool:
    """The agent speaks of its own node, and of nothing that is the manager's to judge."""
    return is_agent_of(agent, node) and finding.node == node and finding.life is None and of_agent(finding)


def is_agent_of(life: Life, node: NodeName) -> bool:
    return life.replica == replica_id(AGENT, node)


def rebased(finding: Finding, sent: float, now: float) -> Finding:
    """With its times in the manager's clock: ``sent`` is the node's clock as the message left, ``now`` the receipt."""

    def here(at: float) -> float:
        return now - max(0.0, sent - at) if isfinite(at) and isfinite(sent) else now

    evidence = tuple(replace(one, at=here(one.at), text=one.text[:_LINE]) for one in finding.evidence[:_LINES])
    return replace(finding, since=here(finding.since), evidence=evidence)


def unchanged(before: Finding | None, after: Finding) -> Finding:
    """The one before where the other says nothing else: its times differ only by the way that the message took."""
    return before if before is not None and _timeless(before) == _timeless(after) else after


def _grave(finding: Finding) -> int:
    return -WORST_FIRST.index(finding.verdict)


def _timeless(finding: Finding) -> Finding:
    return replace(finding, since=0.0, evidence=tuple(replace(one, at=0.0) for one in finding.evidence))
