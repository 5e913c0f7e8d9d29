"""Who is on nodes that the cluster takes back before their time, or has taken: preempted, cancelled, out of walltime.

They leave in order as long as the cluster gives them, and are wanted elsewhere. It is nobody's failure: no budget is
spent, however often it happens.
"""

from __future__ import annotations

from rrl.manager.actions import Decision, Fence, Rung, Why
from rrl.manager.planner.rooms import Rooms
from rrl.manager.state import Replica, State, workers

CANCELLATIONS = 2
"""Once all that a run had may be cancelled by mistake, or for a maintenance; whoever does it again means the run."""


def evict(state: State, rooms: Rooms, now: float) -> list[Decision]:
    """Who is not to be believed any more. ``now``: manager's time (s)."""
    fences: list[Decision] = []
    limits = state.job.limits
    for replica in workers(state):
        if not replica.believed or not (evidence := _evidence(state, replica, now)):
            continue
        rung, expects, within = Rung.REPLACEMENT, "joins again once it has a node", limits.allocation + limits.join
        if rooms.vacant_for(replica):
            rung, expects, within = Rung.SPARE, "joins again on a spare node", limits.join
        fences.append(Fence(replica.life, rung, Why((evidence,), rung, expects, now + within), charged=False))
    return fences


def _evidence(state: State, replica: Replica, now: float) -> str:
    tag = replica.allocation or ""
    held = state.allocations.get(tag)
    if held is None:
        return f"its allocation {tag} was taken back: {state.taken_back[tag]}" if tag in state.taken_back else ""
    if held.ending:
        return f"its allocation {tag} ends: {held.seen.detail if held.seen else ''}"
    if held.running and now >= held.ends and replica.step is None:
        return f"its allocation {tag} has come to the end of its time, and its process was ended"
    if not held.taken:
        return ""
    return f"its allocation {tag} is taken back in {max(0.0, held.ends - now):.0f} s: it is preempted"


def cancelled(state: State) -> str:
    """By which evidence somebody wants the run to end though no command of rrl says so; empty: nobody does."""
    if len(state.emptied) < CANCELLATIONS:
        return ""
    return f"all that it had was cancelled {len(state.emptied)} times within an hour, and not by rrl cancel"
