"""Distinguish faults of the trainer's software, which a restart of the trainer alone cannot cure, from other failures.

The rules come from RobustRL (paper, 5.1): a failure in the first step after a restart, a second failure in the same
step, or a second restart that fails. A failure with another explanation does not count:

* an injected failure: it says nothing about the software, even if two failures are injected in one step;
* a failure on an excluded or lost node: other rungs of the ladder handle it;
* a failure at about the same time as many failures of other roles: the cause is storage, fabric or site. The next
  failure does not count either, since failures of other roles may still follow it;
* a launch that the cluster refused: the software never ran;
* too little memory on GPUs that the trainer shares with guests;
* an exception that ends the trainer again and again before it has done any work (``repeated_end``);
* an exit with code 0 soon after the start: the trainer's program returned, and would return again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....core.types import NodeName, is_trainer
from ...model.queries import finding_about, has_trained, is_crowded, node_finding, reached_step
from ...model.state import FailedIncarnation, Replica, State, Status
from .repeated_end import starts_with_clean_exit, starts_with_same_exception


def suggests_software_fault(state: State, members: Sequence[Replica], failed: Replica, now: float) -> tuple[str, ...]:
    """Return why the whole run, not only the trainer, should restart; empty if nothing suggests a software fault.

    ``members`` are the gang's members by rank; ``failed`` is the member that failed now.
    """
    recovery = state.job.recovery
    if not is_trainer(failed.id) or not recovery.full_restarts:
        return ()
    joined, no_step_yet = failed.status is Status.JOINED, not has_trained(state, members[0])
    reached = reached_step(state)
    finding = finding_about(state, failed.incarnation)
    newest = FailedIncarnation(
        now,
        failed.node or NodeName(""),
        step=reached,
        injected=bool(failed.fault),
        joined=joined,
        crowded=is_crowded(state, failed, finding),
    )
    if finding is None or not _is_unexplained(state, failed, newest):
        return ()
    if starts_with_same_exception(state, failed) > 1 or starts_with_clean_exit(state, failed):
        return ()
    full_restarts = [at for at in state.full_restarts if now < at + recovery.window]
    since = max(full_restarts, default=0.0)
    failures = [
        failure
        for member in members
        for failure in member.recent_failures(recovery.window, now)
        if failure.at > since and failure.step == reached
    ]
    failures.sort(key=lambda failure: failure.at)
    if any(_correlated_failure(state, failed.role, failure.at) for failure in failures[-1:]):
        return ()  # failures of other roles may follow this one, too
    past = [failure for failure in failures if _is_unexplained(state, failed, failure)]
    after = f"step {reached}" if reached else "the start"
    if not joined:
        twice = failed.ever_joined and bool(past) and not past[-1].joined
        return (f"two restarts in a row failed after {after}",) if twice else ()
    if no_step_yet and (reached or full_restarts):  # the run's first incarnation is restarted alone once
        return (f"it failed in its first training step, the step after {after}: earlier starts reached this step",)
    if any(failure.joined for failure in past):
        return (f"second failure in the same training step, the step after {after}",)
    return ()


def _is_unexplained(state: State, member: Replica, failure: FailedIncarnation) -> bool:
    """Return whether nothing else explains the failure: no injection, refusal, guest, failed node or shared cause."""
    node = state.nodes.get(failure.node)
    of_node = node is None or node.excluded is not None or node_finding(state, failure.node) is not None
    explained = failure.injected or failure.refused or failure.crowded
    return not (explained or of_node or _correlated_failure(state, member.role, failure.at))


def _correlated_failure(state: State, role: str, at: float) -> bool:
    """Return whether many members of other roles failed at about the time ``at`` (s), within ``limits.silence``.

    "Many" means at least one, and at least the share ``recovery.breaker`` of these members.
    """
    window = state.job.limits.silence
    others = [other for other in state.workers if other.role != role]
    failing = sum(
        any(abs(failure.at - at) <= window for failure in other.failures)
        or (other.is_current and state.at - at <= window and finding_about(state, other.incarnation) is not None)
        for other in others
    )
    return failing >= max(1, int(state.job.recovery.breaker * len(others)))
