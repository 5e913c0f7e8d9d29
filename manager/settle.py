"""What one look at the cluster says about open intents and known allocations. Pure.

An intent that was never answered is settled by its tag: listed = done; not listed for a quiet period after it was
intended = certainly not done (a timed-out sbatch can land later, so the period is long). Whatever counts as gone or as
never there must be missing from two looks in a row: a squeue can omit a job once.
"""

from __future__ import annotations

from rrl.manager.actions import Launch, Request
from rrl.manager.cluster import AllocationSeen, AllocationState, Observed
from rrl.manager.events import AllocationChanged, Done, Event, NodeChanged
from rrl.manager.state import NEVER_APPEARED, Allocation, State, open_requests

EAGER = 60.0
"""s after its request that an allocation is looked for more often than at the site's pace"""
LOOKS = 2
"""Consecutive looks that must miss an allocation before it counts as gone."""


class Misses:
    """How often in a row each known allocation was missing. Volatile: a new manager counts anew."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}

    def gone(self, tag: str, listed: bool) -> bool:
        self._missed[tag] = 0 if listed else self._missed.get(tag, 0) + 1
        return self._missed[tag] >= LOOKS


def settle(state: State, observed: Observed, misses: Misses, now: float, busy: frozenset[str]) -> list[Event]:
    """Events that follow from the look. ``busy``: tags whose command is still running: those settle themselves."""
    events: list[Event] = []
    if observed.allocations is not None:
        events += _requests(state, observed.allocations, misses, now, busy)
        unsettled = open_requests(state)
        for tag, held in state.allocations.items():
            seen = observed.allocations.get(tag)
            if seen is not None:
                misses.gone(tag, True)
                # salloc that found no free nodes leaves a cancelled job, and sbatch follows it under the same tag
                tried = seen.state is AllocationState.ENDED and unsettled.get(tag) in busy
                if seen != held.seen and not tried:
                    events.append(AllocationChanged(tag, seen))
            elif tag not in unsettled and misses.gone(tag, False):
                events.append(AllocationChanged(tag, None))
        for tag, seen in observed.allocations.items():
            ours = tag.startswith(f"{state.run}.") and tag not in state.allocations
            if ours and seen.state is not AllocationState.ENDED:
                events.append(AllocationChanged(tag, seen))  # a request that was given up has landed after all
    if observed.steps is not None:
        for tag, intent in state.intents.items():
            if not isinstance(intent.action, Launch) or tag in busy:
                continue
            due = now - intent.at > state.job.limits.quiet
            if misses.gone(tag, tag in observed.steps or not due):
                unheard = intent.at < state.managed_since  # who meant to launch it died over it
                events.append(Done(tag, False, NEVER_APPEARED, unheard))
    for name, seen_node in (observed.nodes or {}).items():
        node = state.nodes.get(name)
        if node is not None and node.seen != seen_node:
            events.append(NodeChanged(name, seen_node))
    return events


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
            events.append(Done(tag, False, "never appeared in the queue", unheard=True))
    return events


def hungry(state: State, now: float) -> bool:
    """Something is expected of the cluster: look soon rather than at the next poll. A queue may take days."""
    waiting = any(isinstance(intent.action, Request) for intent in state.intents.values())
    allocations = state.allocations.values()
    return (
        waiting
        or state.verdict is not None
        or any(a.releasing or (_awaited(a) and now - a.at < EAGER) for a in allocations)
    )


def _awaited(allocation: Allocation) -> bool:
    return allocation.seen is None or allocation.seen.state is AllocationState.PENDING
