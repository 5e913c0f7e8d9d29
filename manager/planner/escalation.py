"""When restarting the trainer alone does not help any more: it is its software, or the state that it goes on from.

RobustRL's rules (facts of its paper, 5.1): a failure in the first step after a restart, a second failure in the same
step, a second restart that fails. Here they are asked of failures that nothing else explains. Not evidence against the
software are:

* a failure that was injected: a drill shows how the trainer is brought back, and two of them in one step say nothing
  about that step;
* one of a node: excluded, condemned or gone, it explains whatever failed on it, and is dealt with by other rungs;
* one in company: many members of other roles failed within the time in which silence is noticed, so that it is the
  storage, the fabric or the site; nor the next one, whose company may yet have to show;
* a launch that the cluster refused: the software never had its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrl.manager.state import Replica, Start, State, Status, finding_about, node_finding, workers
from rrl.spec.words import NodeName


def against_software(state: State, members: Sequence[Replica], failed: Replica, now: float) -> tuple[str, ...]:
    """Why the whole run is to restart rather than its trainer; empty: nothing speaks for it. ``members``: of the gang,
    its first one first; ``failed``: the one whose failure is looked at."""
    recovery = state.job.recovery
    if failed.role not in {role.name for role in state.job.kind("trainer")} or not recovery.whole:
        return ()
    joined, began = failed.status is Status.JOINED, members[0].commits == 0
    newest = Start(now, failed.node or NodeName(""), step=state.step, injected=bool(failed.fault), joined=joined)
    if finding_about(state, failed.life) is None or not _counts(state, failed, newest):
        return ()
    wholes = [at for at in state.wholes if now < at + recovery.window]
    since = max(wholes, default=0.0)
    every = [start for one in members for start in one.recent(recovery.window, now)
             if start.at > since and start.step == state.step]  # fmt: skip
    every.sort(key=lambda start: start.at)
    if any(_in_company(state, failed.role, start.at) for start in every[-1:]):
        return ()  # that the others fail again may yet have to show
    past = [start for start in every if _counts(state, failed, start)]
    after = f"step {state.step}" if state.step else "the start"
    if not joined:
        twice = failed.ever_joined and bool(past) and not past[-1].joined
        return (f"two restarts after {after} have failed, one after the other",) if twice else ()
    if began and (state.step or wholes):  # else it is the first life of all: that has a second try
        return (f"its first step failed, the one after {after}: an earlier life has worked up to there",)
    if any(start.joined for start in past):
        return (f"a second failure in the same step, the one after {after}",)
    return ()


def _counts(state: State, member: Replica, start: Start) -> bool:
    node = state.nodes.get(start.node)
    of_node = node is None or node.excluded is not None or node_finding(state, start.node) is not None
    return not (start.injected or start.refused or of_node or _in_company(state, member.role, start.at))


def _in_company(state: State, role: str, at: float) -> bool:
    """Others failed about then: at least max(1, the breaker's share) of the members of other roles."""
    near = state.job.limits.silence
    others = [one for one in workers(state) if one.role != role]
    failing = sum(
        any(abs(start.at - at) <= near for start in one.failures)
        or (one.believed and state.at - at <= near and finding_about(state, one.life) is not None)
        for one in others
    )
    return failing >= max(1, int(state.job.recovery.breaker * len(others)))
