"""Who judges a scenario: rrl's own detectors or a baseline. Both hear the same, and say what they find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rrl.core.types import Finding, Life, NodeName, ProbeResult, ReplicaId
from rrl.health.readers.samples import Reading
from rrl.tests.support.scenarios.rhythms import Loads

Believed = Sequence[tuple[Life, NodeName]]


class Judge(Protocol):
    """``now``: s since the run's beginning, at the manager's receipt. Lives are as the manager names them; an agent's
    is ``agent/<node>``."""

    asks_for_work: bool
    """what it asks for is a bit of work; else only whether the process hears"""

    def launched(self, life: Life, node: NodeName, now: float) -> None: ...
    def hello(self, life: Life, node: NodeName, phase: str, now: float) -> None: ...
    def gpus(self, life: Life, node: NodeName, uuids: list[str]) -> None:
        """Who has said Hello has these GPUs."""

    def beat(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None: ...
    def entered(self, life: Life, phase: str, done: int, waits_for: ReplicaId | None, now: float) -> None: ...
    def goodbye(self, life: Life, now: float) -> None: ...
    def exited(self, life: Life, code: int | None, signal: int | None, why: str, said: str, now: float) -> None: ...
    def gone(self, life: Life, now: float) -> None: ...
    def agent(self, node: NodeName, life: Life, now: float, boot: str = "") -> None: ...
    def alive(self, life: Life, now: float) -> None: ...
    def load(self, life: Life, loads: Loads, has_gpu: bool, told: bool, now: float) -> None:
        """``told``: its node's agent says so, rather than a profiler in the role itself."""

    def reading(self, node: NodeName, reading: Reading, now: float) -> None: ...
    def cluster(self, states: dict[NodeName, tuple[str, str, bool]], asked_at: float, now: float) -> None:
        """One answer of the cluster: node → state, words, and whether what is on it is suspended."""

    def asks_cluster(self, now: float) -> bool:
        """It wants to know at once, rather than at the next poll."""

    def asks(self, now: float) -> list[Life]:
        """Who shall do a bit of work and say so."""

    def answered(self, life: Life, result: ProbeResult, detail: str, now: float) -> None: ...
    def forget(self, life: Life, now: float) -> None:
        """It was fenced."""

    def forget_node(self, node: NodeName, now: float) -> None:
        """It is not used any more."""

    def restarted(self, believed: Believed, now: float) -> None:
        """A new manager, which knows nothing but who is believed to live."""

    def paused(self, now: float) -> None:
        """The manager itself stood still until now."""

    def killed(self, life: Life, node: NodeName, now: float) -> None:
        """Its step was killed by us."""

    def role_died(self, node: NodeName, gpus: list[str], now: float) -> None:
        """A process that had these GPUs (UUIDs) died there, and we did not kill it."""

    def findings(self, now: float) -> list[Finding]: ...
