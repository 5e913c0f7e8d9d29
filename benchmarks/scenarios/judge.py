"""The interface of a judge of scenarios: rrl's own detectors or a baseline. All judges receive the same messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rrl.benchmarks.scenarios.rhythms import Loads
from rrl.core.types import DataReport, Finding, Incarnation, NodeName, ProbeResult, ReplicaId
from rrl.health.detection.records import StackSample
from rrl.health.readers.samples import Reading

CurrentIncarnations = Sequence[tuple[Incarnation, NodeName]]


class Judge(Protocol):
    """A judge.

    ``now`` is the manager's clock (s) at receipt, 0 at the beginning of the run. Incarnations have the names that the
    manager gives them; an agent is ``agent/<node>``.
    """

    probes_work: bool
    """Whether the judge's probes request work. Otherwise they only request a sign of life."""

    def launched(
        self, incarnation: Incarnation, node: NodeName, now: float, standby: Incarnation | None = None
    ) -> None:
        """Report a launch, or the promotion of the standby process ``standby`` to the incarnation."""

    def hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None: ...
    def gpus(self, incarnation: Incarnation, node: NodeName, uuids: list[str]) -> None:
        """Report the GPUs of an incarnation that has sent a Hello."""

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data: DataReport, now: float
    ) -> None: ...
    def entered(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, now: float
    ) -> None: ...
    def goodbye(self, incarnation: Incarnation, now: float) -> None: ...
    def exited(
        self, incarnation: Incarnation, code: int | None, signal: int | None, why: str, last_line: str, now: float
    ) -> None: ...
    def gone(self, incarnation: Incarnation, now: float) -> None: ...
    def agent(self, node: NodeName, incarnation: Incarnation, now: float, boot: str = "") -> None: ...
    def alive(self, incarnation: Incarnation, now: float) -> None: ...
    def load(self, incarnation: Incarnation, loads: Loads, has_gpu: bool, from_agent: bool, now: float) -> None:
        """Report a load; ``from_agent`` is False if a profiler in the role measured it, not the node's agent."""

    def reading(self, node: NodeName, reading: Reading, now: float) -> None: ...
    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], polled_at: float, now: float) -> None:
        """Report one poll of the cluster: for each node its state, a text, and whether its processes are suspended."""

    def wants_poll(self, now: float) -> bool:
        """Return whether the judge requests a poll now, before the next regular time."""

    def due_probes(self, now: float) -> list[Incarnation]:
        """Return the incarnations to probe now."""

    def answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None: ...
    def due_stacks(self, now: float) -> list[Incarnation]:
        """Return the gangs whose stacks the judge must compare."""

    def stacks(self, gang: Incarnation, sample: StackSample | None, now: float) -> None:
        """Report the stacks of all members; None if one is unknown."""

    def forget(self, incarnation: Incarnation, now: float) -> None:
        """Report that the incarnation was fenced."""

    def forget_node(self, node: NodeName, now: float) -> None:
        """Report that the node is no longer used."""

    def restarted(self, current: CurrentIncarnations, now: float, clock_ahead: float) -> None:
        """Start again as a new manager, which knows only the current incarnations.

        Its clock is ``clock_ahead`` s ahead of the time since the run's beginning.
        """

    def paused(self, now: float) -> None:
        """Report that the manager itself was stopped until now."""

    def killed(self, incarnation: Incarnation, node: NodeName, now: float) -> None:
        """Report that the manager killed the incarnation's step."""

    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None:
        """Report that a process with these GPUs (UUIDs) ended on a node without being killed by the manager."""

    def findings(self, now: float) -> list[Finding]: ...
