"""The first allocation requests of a run in each form (pool, hetjob, replica), and what must be there before a launch.
Pure.

``rrl check`` shows the same requests.
"""

from __future__ import annotations

import msgspec

from ....core.run_spec import JobView, Part
from ....core.types import NodeName, Outcome
from ...cluster.base import Ask
from ...model.actions import Action, Finish, Request, Rung, Why
from ...model.state import Allocation, Refusal, State
from ..deadlines import NEVER
from .nodes import Rooms, unfit_nodes

REFUSALS = 3
"""A request refused so often is not made again within the recovery window."""
SHORTEST = 60.0
"""s that nodes are asked for at least"""


def nothing_held(state: State) -> bool:
    """No nodes, none asked for, and nothing launched yet, or since everything was given back (policy ``requeue``)."""
    held = any(node.allocation for node in state.nodes.values())  # others are remembered as excluded
    used = any(not allocation.stray for allocation in state.allocations.values())
    return not used and not held and not state.launched


def first_request(state: State, now: float) -> list[Action]:
    """Forms ``pool`` and ``hetjob``: one request for everything."""
    parts = state.job.parts
    if end := refused(state, parts[0], now):
        return [end]
    first, *more = (ask_for(state, part, part.nodes, _tag(state, part), now) for part in parts)
    why = Why((f"{state.job.nodes} nodes wanted, none held",), expects="nodes, when the queue comes to it")
    return [Request(msgspec.structs.replace(first, more=tuple(more)), why)]


def gather(state: State, rooms: Rooms, now: float) -> tuple[list[Action], float]:
    """Form ``replica``: a request for each node that is neither here nor on its way, until there are those without
    which the run does not start, or it is too late. And the next wake."""
    if ends := [end for part in state.job.parts if (end := refused(state, part, now))]:
        return [ends[0]], NEVER
    deadline = NEVER if state.asked_since is None else state.asked_since + state.job.start_within
    if now >= deadline:
        return [_too_late(state, rooms)], NEVER
    actions: list[Action] = []
    for part in state.job.parts:
        missing = part.nodes - len(rooms.spots(part.name)) - rooms.coming(part.name)
        why = Why((f"{part.name}: {part.nodes} nodes wanted, {missing} missing",), expects="nodes, in time to start")
        actions += [Request(ask, why) for ask in asks_for(state, part, missing, now)]
    return actions, deadline


def hopeless_start(state: State, allocation: Allocation) -> Finish:
    said = allocation.seen.hopeless if allocation.seen else ""
    why = Why((f"{allocation.tag}: {said}",), Rung.GIVE_UP, "the run ends; correct the job spec and submit again")
    return Finish(Outcome.REJECTED, why)


def refused(state: State, part: Part, now: float) -> Finish | None:
    """What a cluster refuses at once, it refuses again; a request that it never heard is made again, not for ever."""
    refusals = refusals_of(state, part, now)
    told = [refusal for refusal in refusals if not refusal.unheard]
    if not told and len(refusals) < REFUSALS:
        return None
    why = Why(((told or refusals)[-1].detail,), Rung.GIVE_UP, "the run ends; correct the job spec and submit again")
    return Finish(Outcome.REJECTED if told else Outcome.FAILED, why)


def refusals_of(state: State, part: Part, now: float) -> list[Refusal]:
    """Those within the recovery window; the state drops older ones only when a new one comes."""
    window = state.job.recovery.window
    return [refusal for refusal in state.refusals if refusal.part == part.name and now < refusal.at + window]


def asks_for(state: State, part: Part, count: int, now: float) -> list[Ask]:
    """Requests for so many more nodes of a part, each under a new tag."""
    if count <= 0:
        return []
    if not part.separate:
        return [ask_for(state, part, count, _tag(state, part), now)]
    made = state.asked.get(part.name, 0)
    return [ask_for(state, part, 1, f"{state.run}.{part.name}-{made + n}", now) for n in range(count)]


def ask_for(state: State, part: Part, count: int, tag: str, now: float) -> Ask:
    """For the time that is left, or as long as this part's allocations last: a request for more is never backfilled."""
    return Ask(
        tag, count, part.node, max(SHORTEST, min(state.ends - now, part.walltime)), exclude=_excluded(state),
        sbatch=part.sbatch, comment=f"rrl {state.run}", part=part.name,
    )  # fmt: skip


def _tag(state: State, part: Part) -> str:
    """The first may yet land when it has been given up: no other request has its tag. But where a run is resumed from
    within its pool: that is there already, under this tag."""
    first = f"{state.run}.{part.name}"
    begins = nothing_held(state) and not state.refusals and first not in state.allocations
    within = state.job.manager.where == "pool" and begins
    return f"{first}-{state.seq}" if state.asked.get(part.name) and not within else first


def _excluded(state: State) -> tuple[NodeName, ...]:
    """Nodes that this run does not use again, or cannot use."""
    excluded = {name for name, node in state.nodes.items() if node.excluded is not None}
    return tuple(sorted(excluded | unfit_nodes(state).keys()))


def _too_late(state: State, rooms: Rooms) -> Finish:
    evidence = []
    for part in state.job.parts:
        here = len(rooms.spots(part.name))
        if here >= part.needed:
            continue
        told = [f"{a.tag}: {a.seen.detail or a.seen.state}" for a in state.allocations.values()
                if a.pending and a.ask.part == part.name and a.seen is not None]  # fmt: skip
        said = f" ({'; '.join(told)})" if told else ""
        needed = f"{here} of the {part.needed} nodes that the run cannot start without"
        evidence.append(f"{part.name}: {needed}, after {state.job.start_within:g} s{said}")
    return Finish(Outcome.FAILED, Why(tuple(evidence), Rung.GIVE_UP, "everything is given back"))


def first_asks(run: str, job: JobView) -> tuple[Ask, ...]:
    """Form ``pool``: one. ``hetjob``: one, with the other components as its ``more``. ``replica``: one for each node of
    the parts that are separate, and one for the rest."""
    asks: list[Ask] = []
    for part in job.parts:
        names = [f"{part.name}-{index}" for index in range(part.nodes)] if part.separate else [part.name]
        asks += [_ask(run, f"{run}.{name}", part) for name in names]
    if job.form == "hetjob":
        return (msgspec.structs.replace(asks[0], more=tuple(asks[1:])),)
    return tuple(asks)


def _ask(run: str, tag: str, part: Part) -> Ask:
    nodes = 1 if part.separate else part.nodes
    return Ask(tag, nodes, part.node, part.walltime, sbatch=part.sbatch, comment=f"rrl {run}", part=part.name)
