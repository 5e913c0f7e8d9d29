"""The breaker: strikes out decisions that condemn too much at once, and says so by leaving them undecided.

Many nodes condemned together are a fabric or a software fault, or a blind manager; replacing them all would be worse
than waiting for a person (docs/sources.md, guard rails: at most max(1, 20 %) within ten minutes).
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Exclude
from rrl.manager.planner.terms import NEVER
from rrl.manager.state import State


def brake(state: State, decisions: list[Decision], now: float) -> tuple[list[Decision], float]:
    """The decisions that may go ahead now, and when (s, manager's time) one that may not is to be looked at again."""
    recovery = state.job.recovery
    allowed = max(1, int(recovery.breaker * len(state.nodes)))
    found = (node for node in state.nodes.values() if node.excluded is not None and not node.asked_by)
    ends = sorted(node.excluded_at + recovery.window for node in found)
    recent = [end for end in ends if end > now]
    condemned = len(recent)
    passed: list[Decision] = []
    wake = NEVER
    for decision in decisions:
        if isinstance(decision, Exclude):
            if condemned >= allowed:
                wake = recent[0] if recent else now + recovery.window
                continue
            condemned += 1
        passed.append(decision)
    return passed, wake
