"""The breaker: strikes out decisions that condemn too much at once, and says so by leaving them undecided.

Many nodes condemned together are a fabric or a software fault, or a blind manager; replacing them all would be worse
than waiting for a person (docs/sources.md, guard rails: at most max(1, 20 %) within ten minutes). And while the cluster
itself has lost much of what the run has, what is found on the rest says little.
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Exclude
from rrl.manager.cluster import NodeState
from rrl.manager.planner.terms import NEVER
from rrl.manager.state import State
from rrl.spec.words import NodeName

OUTAGE = 0.25
"""share of the run's nodes, more than one, that are down: then only what is down is left (docs/sources.md, guard rails:
none while more than 25 % of the cluster is). Slurm tells us of our own nodes only."""


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
    down = _down(state)
    outage = len(down) > max(1, OUTAGE * len(state.nodes))
    for decision in decisions:
        if isinstance(decision, Exclude):
            if outage and decision.node not in down:
                continue  # until the cluster says something else of its nodes, which is an event
            if condemned >= allowed:
                wake = recent[0] if recent else now + recovery.window
                continue
            condemned += 1
        passed.append(decision)
    return passed, wake


def _down(state: State) -> set[NodeName]:
    return {name for name, one in state.nodes.items() if one.seen is not None and one.seen.state is NodeState.DOWN}
