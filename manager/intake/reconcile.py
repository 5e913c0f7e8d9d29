"""What one look at the cluster says about open intents and known allocations. Pure.

An intent that was never answered is settled by its tag: listed = done; not listed for a quiet period after it was
intended = certainly not done (a timed-out sbatch can land later, so the period is long; a launch whose srun has ended
cannot, and is not waited for). A squeue can omit a job once, and a site's cache can answer with what was a minute ago:
whatever counts as gone, as never there or as queued again must be so in two looks, and for as long as an answer may be
old.
"""

from __future__ import annotations

import msgspec

from ...core.types import NodeName, Verdict
from ..cluster.base import AllocationSeen, AllocationState, NodeSeen, NodeState, Observed, RejectReason
from ..model.actions import Drain, Launch, Outside, Request, Shrink, Undrain
from ..model.events import AllocationChanged, Done, Event, NodeChanged
from ..model.queries import open_requests
from ..model.state import NEVER_APPEARED, Allocation, State

EAGER = 60.0
"""s after its request that an allocation is looked for more often than at the site's pace"""
LOOKS = 2
"""Consecutive looks that must miss an allocation before it counts as gone."""
END_MOVED = 30.0
"""s by which the end of an allocation must have moved to be worth a record: told in whole seconds, look by look"""


class Misses:
    """Since when, and how often in a row, each known thing was missing. Volatile: a new manager counts anew."""

    def __init__(self) -> None:
        self._missed: dict[str, tuple[int, float]] = {}
        self.away = float("-inf")
        """manager's time (s) of the last look that was not answered"""

    def gone(self, tag: str, listed: bool, now: float = 0.0, after: float = 0.0) -> bool:
        """Missing from this look, from the one before, and for ``after`` s since the first that missed it."""
        if listed:
            self._missed.pop(tag, None)
            return False
        count, since = self._missed.get(tag, (0, now))
        self._missed[tag] = (count + 1, since)
        return count + 1 >= LOOKS and now - since >= after


def settle(state: State, observed: Observed, misses: Misses, now: float, busy: frozenset[str]) -> list[Event]:
    """Events that follow from the look. ``busy``: tags whose command is still running: those settle themselves."""
    events: list[Event] = []
    if observed.steps is None:
        misses.away = now
    if observed.allocations is not None:
        events += _requests(state, observed.allocations, misses, now, busy)
        unsettled = open_requests(state)
        for tag, held in state.allocations.items():
            seen = observed.allocations.get(tag)
            if seen is not None:
                misses.gone(tag, True)
                # salloc that found no free nodes leaves a cancelled job, and sbatch follows it under the same tag
                tried = seen.state is AllocationState.ENDED and unsettled.get(tag) in busy
                seen = _believed(held, seen, observed.nodes, misses, now, state.job.limits.quiet)
                if not tried and _differs(held, seen, now):
                    events.append(AllocationChanged(tag, seen))
            elif tag not in unsettled:
                patience = 0.0 if held.releasing or held.stray else state.job.limits.quiet
                if misses.gone(tag, False, now, patience):
                    events.append(AllocationChanged(tag, None))
        for tag, seen in observed.allocations.items():
            ours = tag.startswith(f"{state.run}.") and tag not in state.allocations
            if ours and seen.state not in (AllocationState.ENDING, AllocationState.ENDED):
                events.append(AllocationChanged(tag, seen))  # a request that was given up has landed after all
    if observed.steps is not None:
        for tag, intent in state.intents.items():
            if not isinstance(intent.action, Launch) or tag in busy:
                continue
            due = now - intent.at > state.job.limits.quiet or tag in observed.launchers_ended
            if misses.gone(tag, tag in observed.steps or not due):
                unheard = intent.at < max(state.managed_since, misses.away)  # who meant to launch it died, or Slurm did
                events.append(Done(tag, False, NEVER_APPEARED, unheard, RejectReason.NEVER_APPEARED))
    events += [Done(tag, True, "seen so") for tag, intent in state.intents.items() if _so(intent.action, observed)]
    for name, seen_node in (observed.nodes or {}).items():
        node = state.nodes.get(name)
        if node is not None and node.seen != seen_node:
            events.append(NodeChanged(name, seen_node))
    return events


def _so(action: Outside, observed: Observed) -> bool:
    """What was to be done with single nodes is: they are asked for until somebody says so, and answers can be lost."""
    if isinstance(action, Shrink):
        held = (observed.allocations or {}).get(action.allocation)
        return held is not None and held.state is AllocationState.RUNNING and not set(action.nodes) & set(held.nodes)
    if not isinstance(action, Drain | Undrain):
        return False
    seen = (observed.nodes or {}).get(action.node)
    if seen is None or seen.state is NodeState.UNKNOWN:
        return False
    ours = seen.state is NodeState.DRAINING and seen.reason == action.reason
    return ours is isinstance(action, Drain)


def _believed(
    held: Allocation, seen: AllocationSeen, nodes: dict[NodeName, NodeSeen] | None, misses: Misses, now: float,
    old: float,
) -> AllocationSeen:  # fmt: skip
    """What is believed of an answer that takes something back: that a running allocation waits again, or has lost a
    node that the cluster does not call down. Both only once they can be no old or incomplete answer."""
    before = held.seen
    if seen.state is AllocationState.ENDING and (held.releasing or held.stray):
        return msgspec.structs.replace(seen, state=AllocationState.ENDED)  # its last word may take minutes
    if before is None or not held.running:
        return seen
    if seen.state is AllocationState.PENDING:
        return seen if misses.gone(f"{held.tag}!queued", False, now, old) else before
    misses.gone(f"{held.tag}!queued", True)
    if seen.state in (AllocationState.ENDING, AllocationState.ENDED):
        return seen
    kept: list[NodeName] = []
    for name in before.nodes:
        there = name in seen.nodes
        gone = misses.gone(f"{held.tag}!{name}", there, now)
        down = (word := (nodes or {}).get(name)) is not None and word.state is NodeState.DOWN
        if there or not (gone or down):
            kept.append(name)
    if len(kept) == len(set(kept).intersection(seen.nodes)):
        return seen
    return msgspec.structs.replace(seen, nodes=(*kept, *(name for name in seen.nodes if name not in before.nodes)))


def _differs(held: Allocation, seen: AllocationSeen, now: float) -> bool:
    """The time that is left counts down by itself: only an end that has moved is news."""
    if held.seen is None or msgspec.structs.replace(seen, left=held.seen.left) != held.seen:
        return True
    if seen.left is None or held.suspended:
        return False
    return held.seen.left is None or abs(now + seen.left - held.ends) > END_MOVED


def _requests(
    state: State, listed: dict[str, AllocationSeen], misses: Misses, now: float, busy: frozenset[str]
) -> list[Event]:
    """Of a heterogeneous job one component that is listed settles them all: Slurm takes it whole or not at all."""
    events: list[Event] = []
    for tag, intent in state.intents.items():
        if not isinstance(intent.action, Request) or tag in busy:
            continue
        components = {one.tag for one in (intent.action.ask, *intent.action.ask.more)}
        if not components.isdisjoint(listed):
            events.append(Done(tag, True, "found by its tag"))
        elif now - intent.at > state.job.limits.quiet and misses.gone(tag, False):
            events.append(Done(tag, False, "never appeared in the queue", True, RejectReason.NEVER_APPEARED))
    return events


def undecided(state: State, observed: Observed) -> bool:
    """A launch whose command has ended is open: one more look decides what became of it."""
    return any(tag in state.intents for tag in observed.launchers_ended)


def hungry(state: State, now: float) -> bool:
    """Something is expected of the cluster: look soon rather than at the next poll. A queue may take days."""
    waiting = any(isinstance(intent.action, Request) for intent in state.intents.values())
    allocations = state.allocations.values()
    return (
        waiting
        or state.verdict is not None
        or any(a.releasing or (_awaited(a) and now - a.at < EAGER) for a in allocations)
        or any((a.taken or a.ending) and now - a.seen_at < EAGER for a in allocations)
        or any(f.detector == "node_lost" and f.verdict is Verdict.WARN for f in state.findings.values())
    )


def _awaited(allocation: Allocation) -> bool:
    return allocation.seen is None or allocation.seen.state is AllocationState.PENDING
