"""Turn findings of the manager's detectors and of the node agents into events: when one appears, changes or clears.

A report of an agent is accepted only from the node's current agent and only about its own node; its times are converted
to the manager's clock. ``[health]`` of the job decides which findings count, and correlation holds back those that many
nodes or replicas show at once. The baselines that a new manager inherits from the journal are written here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import msgspec
from msgspec.structs import replace

from ...core.run_spec import HealthView
from ...core.types import (
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
from ...health.detection.attribution.correlation import Here, Memory, correlate, remembered
from ...health.detection.baselines import Lesson, noticeable
from ...health.detection.detectors.registry import NODE_DETECTORS
from ...health.detection.watch import Watch
from ...transport.messages import AgentHello, Found
from ..model import events as ev
from ..model.events import Learned
from ..model.queries import workers
from ..model.state import State, Status

_log = logging.getLogger("rrl.manager")

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
        """Store one finding that an agent reports as changed.

        An UNKNOWN replaces no earlier verdict: a value that can no longer be read does not disprove what was read."""
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


class Findings:
    """Of one manager. ``state`` gives the newest state, ``record`` takes events, ``now`` is the manager's clock."""

    def __init__(
        self, state: Callable[[], State], record: Callable[[ev.Event], None], now: Callable[[], float]
    ) -> None:
        self._state, self._record, self._now = state, record, now
        self._detected: Sequence[Finding] = ()
        self._silent: Mapping[Life, tuple[NodeName, float]] = {}
        self._absent: Mapping[NodeName, float] = {}
        self._said = Said()
        self._memory = Memory()
        self._told: dict[str, Finding] = {}
        """as the journal has it, by key"""
        self._basis: object = None
        """what was last looked at, where nothing but that could change the answer"""

    @property
    def nodes(self) -> set[NodeName]:
        """Of which their agents have something to say."""
        return self._said.nodes

    def adopt(self) -> None:
        """Of what an earlier manager recorded, what is not found again is cleared: at once what its own detectors
        found without proof, with an agent's next Hello what that one found. What many had in common they still have."""
        recorded = self._state().findings
        for key, finding in recorded.items():
            if of_agent(finding):
                self._said.kept(finding)
            if of_agent(finding) or not finding.proof:  # what was proved stays
                self._told[key] = finding
        self._memory = remembered(recorded.values(), self._now())

    def detected(
        self, findings: Sequence[Finding], silent: Mapping[Life, tuple[NodeName, float]],
        absent: Mapping[NodeName, float] = {},
    ) -> float:  # fmt: skip
        """All that the detectors find now, and who else is not heard
        (:func:`rrl.health.detection.detectors.liveness.unheard`), nor which nodes
        (:func:`rrl.health.detection.detectors.node_liveness.absent`). Returns when (s) to tell again though nothing is
        found anew."""
        self._detected, self._silent, self._absent = findings, silent, absent
        return self.tell()

    def greeted(self, hello: AgentHello, *also: Finding) -> None:
        """An agent joins: what it finds is recorded before anything is placed on its node."""
        strange = [one for one in hello.findings if not is_about(one, hello.life, hello.node)]
        if strange:
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node", strange[0].key, hello.life
            )
        self._said.greeted(hello, also, self._now())
        self.tell()

    def found(self, message: Found) -> None:
        """Handle a finding reported by the current agent of a node; ignore one that is about another node."""
        if not is_about(message.finding, message.life, message.node):
            _log.warning(
                "ignored finding %s from %s: an agent may only report its own node", message.finding.key, message.life
            )
            return
        self._said.found(message, self._now())
        self.tell()

    def forget(self, node: NodeName) -> None:
        """What was found on it counts no more: it has left, or is given another chance."""
        self._said.forget(node)

    def tell(self) -> float:
        """Record what changed; what is no longer found is OK again."""
        view = self._state().job.health
        basis = (self._detected, self._said.changes, view)
        if basis == self._basis:  # a thousand nodes may have something to say, and this is asked at every turn
            return inf
        every = [one for finding in (*self._detected, *self._said.all()) if (one := heeded(finding, view)) is not None]
        found, self._memory, again = correlate(every, self._here(), self._memory, self._now())
        told = self._told
        self._told = current = {one.key: unchanged(told.get(one.key), one) if of_agent(one) else one for one in found}
        for key, finding in current.items():
            if told.get(key) != finding:
                self._record(ev.FindingChanged(finding))
        for key, finding in told.items():
            if key not in current and (key in self._state().findings or finding.verdict is Verdict.UNKNOWN):
                cleared = msgspec.structs.replace(finding, verdict=Verdict.OK, evidence=())
                self._record(ev.FindingChanged(cleared))
        self._basis = None if self._memory.events or self._memory.first else basis
        return again

    def _here(self) -> Here:
        state = self._state()
        if not self._detected and not self._said.nodes and not self._memory.events:
            return Here(0)
        held = sum(bool(node.allocation) for node in state.nodes.values())
        working = [one for one in workers(state) if one.believed]
        kinds = {role.name for role in state.job.kind("rollout")}
        rollouts = {one.life for one in working if one.role in kinds and one.status is Status.JOINED}
        left = {name for name, node in state.nodes.items() if node.excluded is not None}
        occupied = {one.node for one in working if one.node is not None}
        return Here(held, occupied, rollouts, left, self._silent, self._absent)


PAUSE = 60.0
"""s between two looks whether there is something to keep: so much at most is learned anew"""


def inherit(watch: Watch, state: State, now: float) -> None:
    """Everything believed is believed to live, with full grace from now. What each has been through is no silence."""
    watch.heed(state.job.limits)
    watch.remember(state.lessons)
    for replica in state.replicas.values():
        if replica.believed and replica.node is not None:
            told = replica.shadow if replica.status is Status.LAUNCHING else None
            watch.launched(replica.life, replica.node, now, told, state.job.recovery.adopt)
            watch.adopted(replica.life, replica.passed)


class Lessons:
    """Of one manager; ``kept`` is what the journal has."""

    def __init__(self, watch: Watch, kept: Mapping[str, Lesson], record: Callable[[Learned], None]) -> None:
        self._watch, self._kept, self._record = watch, kept, record
        self._due = -inf

    def consider(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + PAUSE
        lessons = self._watch.lessons()
        if noticeable(self._kept, lessons):
            self._kept = lessons
            self._record(Learned(lessons))
