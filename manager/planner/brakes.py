"""The breaker: strikes out decisions that condemn too much at once, and says so by leaving them undecided.

Many nodes condemned together are a fabric or a software fault, or a blind manager; replacing them all would be worse
than waiting for a person (peers.md 5d: at most max(1, 20 %) within ten minutes).
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Exclude
from rrl.manager.state import State


def brake(state: State, decisions: list[Decision], now: float) -> list[Decision]:
    """The decisions that may go ahead now."""
    allowed = max(1, int(state.job.recovery.breaker * len(state.nodes)))
    condemned = sum(node.excluded is not None for node in state.nodes.values())
    passed: list[Decision] = []
    for decision in decisions:
        if isinstance(decision, Exclude):
            if condemned >= allowed:
                continue
            condemned += 1
        passed.append(decision)
    return passed
