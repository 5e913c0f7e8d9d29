"""What is found, by detectors here and by agents on their nodes, and what of it becomes an event: each finding once,
and again only when it says something else.

On the way it passes two gates: what the job wants to hear of (``[health]``), and whether many find the same at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import msgspec

from rrl.health.correlation import Here, Memory, correlate, remembered
from rrl.manager import events as ev
from rrl.manager.node_health import Said, heeded, is_about, of_agent, unchanged
from rrl.manager.saying import say
from rrl.manager.state import State, Status, workers
from rrl.spec.words import Finding, Life, NodeName, Verdict
from rrl.transport.messages import AgentHello, Found


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
        """All that the detectors find now, and who else is not heard (:func:`rrl.health.presence.unheard`), nor which
        nodes (:func:`rrl.health.node_loss.absent`). Returns when (s) to tell again though nothing is found anew."""
        self._detected, self._silent, self._absent = findings, silent, absent
        return self.tell()

    def greeted(self, hello: AgentHello, *also: Finding) -> None:
        """An agent joins: what it finds is recorded before anything is placed on its node."""
        strange = [one for one in hello.findings if not is_about(one, hello.life, hello.node)]
        if strange:
            say(f"{hello.life} says what is not its to say, of {strange[0].key}: refused")
        self._said.greeted(hello, also, self._now())
        self.tell()

    def found(self, message: Found) -> None:
        """Of a believed agent, on its own connection."""
        if not is_about(message.finding, message.life, message.node):
            say(f"{message.life} says what is not its to say, of {message.finding.key}: refused")
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
