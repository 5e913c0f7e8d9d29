"""Who judges a scenario: rrl's own detectors or a baseline. Both hear the same, and say what they find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rrl.core.types import Finding, Incarnation, NodeName, ProbeResult, ReplicaId
from rrl.health.readers.samples import Reading
from rrl.tests.support.scenarios.rhythms import Loads

CurrentIncarnations = Sequence[tuple[Incarnation, NodeName]]


class Judge(Protocol):
    """``now``: the manager's clock (s) at receipt, 0 at the run's beginning. Incarnations are as the manager names
    them; an agent's is ``agent/<node>``."""

    probes_work: bool
    """what it asks for is a bit of work; else only whether the process hears"""

    def launched(self, incarnation: Incarnation, node: NodeName, now: float) -> None: ...
    def hello(self, incarnation: Incarnation, node: NodeName, phase: str, now: float) -> None: ...
    def gpus(self, incarnation: Incarnation, node: NodeName, uuids: list[str]) -> None:
        """Who has said Hello has these GPUs."""

    def heartbeat(
        self, incarnation: Incarnation, phase: str, done: int, waits_for: ReplicaId | None, data_untaken: bool,
        now: float,
    ) -> None: ...  # fmt: skip
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
        """``told``: its node's agent says so, rather than a profiler in the role itself."""

    def reading(self, node: NodeName, reading: Reading, now: float) -> None: ...
    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], polled_at: float, now: float) -> None:
        """One answer of the cluster: node → state, words, and whether what is on it is suspended."""

    def wants_poll(self, now: float) -> bool:
        """It wants to know at once, rather than at the next poll."""

    def due_probes(self, now: float) -> list[Incarnation]:
        """Who shall do a bit of work and say so."""

    def answered(self, incarnation: Incarnation, result: ProbeResult, detail: str, now: float) -> None: ...
    def due_stacks(self, now: float) -> list[Incarnation]:
        """Gangs whose stacks it wants to compare."""

    def stacks(self, gang: Incarnation, stack: str | None, now: float) -> None:
        """What the stacks of all members have in common; None: they differ, or one is not known."""

    def forget(self, incarnation: Incarnation, now: float) -> None:
        """It was fenced."""

    def forget_node(self, node: NodeName, now: float) -> None:
        """It is not used any more."""

    def restarted(self, current: CurrentIncarnations, now: float, clock_ahead: float) -> None:
        """Begin as a new manager, which knows only the current incarnations.

        Its clock is ``clock_ahead`` s ahead of the time since the run's beginning.
        """

    def paused(self, now: float) -> None:
        """The manager itself stood still until now."""

    def killed(self, incarnation: Incarnation, node: NodeName, now: float) -> None:
        """Its step was killed by us."""

    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None:
        """A process that had these GPUs (UUIDs) died there, and we did not kill it."""

    def findings(self, now: float) -> list[Finding]: ...
