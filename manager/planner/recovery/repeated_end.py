"""Recognise that a restart would end in the same way, because the cause is in the role's own code.

Such an end is an exception, or the return of a program that should work until it is stopped.

**Exceptions.** The evidence is that the same exception (type and place) ended ``recovery.first_start`` starts of a
replica, before any replica of the role has completed a unit of work. The last of these starts is on another node, if
possible. Once the role has worked, its code is not wrong in every case, and the repair ladder decides. These exceptions
do not count:

* an injected exception;
* an exception that storage, network, memory or a GPU may have caused (``RaisedException.environmental``);
* an exception on a node that is excluded or has a failure of its own, or whose gang has a member on such a node.

Two kinds of exceptions are judged differently. If the role's code broke a rule of the worker API, or a model with its
newest weights returned values that are not finite (``RaisedException.counts_always``), the starts count even if the
role has worked before. If rrl's code in the role knows that no start can help (``RaisedException.unrepairable``), the
run ends at once: the scorer fails for most groups, or training diverged.

**Returns.** The evidence is that ``recovery.first_start`` incarnations of a replica in a row exited with code 0 by
themselves, each soon after its start (:func:`rrl.manager.model.queries.returned_early`). Their progress does not
matter: a program whose loop ends after three steps makes some progress in each start, but needs a restart each time.
"""

from __future__ import annotations

from ....core.types import GUEST_ROLE, Outcome, RaisedException
from ...model.actions import Finish, Rung, Why, every_lower
from ...model.queries import (
    finding_about,
    gang,
    has_worked,
    is_judged,
    judged_replicas,
    node_finding,
    returned_early,
    starts_ended_by,
)
from ...model.state import Replica, State


def starts_with_same_exception(state: State, failed: Replica) -> int:
    """Return how many consecutive starts ended with the replica's current exception; 0 if the exception does not count.

    In a gang the starts of the whole gang count, since each start is charged to one of its members.
    """
    exception = _exception_of_code(state, failed)
    if exception is None or (has_worked(state, failed.role) and not exception.counts_always):
        return 0
    return 1 + sum(starts_ended_by(exception, member) for member in gang(state, failed.id))


def repeated_exception(state: State, failed: Replica) -> tuple[str, ...]:
    """Return the evidence that another start of the replica would raise the same exception; empty if there is none.

    ``failed`` is the replica that failed now.
    """
    exception, starts = _exception_of_code(state, failed), starts_with_same_exception(state, failed)
    if exception is None or starts < state.job.recovery.first_start:
        return ()
    worked = "each before any work" if exception.counts_always else f"and no replica of {failed.role} has done any work"
    return f"{failed.id}: {exception}", f"this exception ended {starts} starts in a row, {worked}"


def starts_with_clean_exit(state: State, failed: Replica) -> int:
    """Return how many of the newest starts in a row ended because the replica's program returned early.

    In a gang the starts of the whole gang count, since each start is charged to one of its members.
    """
    if not is_judged(state, failed) or failed.fault or not failed.is_current:
        return 0
    if not returned_early(state, failed, finding_about(state, failed.incarnation), state.at):
        return 0
    return 1 + sum(member.clean_exits for member in gang(state, failed.id))


def repeated_clean_exit(state: State, failed: Replica) -> tuple[str, ...]:
    """Return the evidence that the replica's program would return again after a restart; empty if there is none."""
    starts = starts_with_clean_exit(state, failed)
    if starts < state.job.recovery.first_start:
        return ()
    returned = f"{failed.id} exited with code 0 in {starts} starts in a row before the run was complete"
    if failed.role != GUEST_ROLE and state.job.role(failed.role).kind == "command":
        return returned, "its command returned, but a service runs until SIGTERM; without `service`, code 0 means done"
    if failed.phase == "score":
        return returned, "it ended while it scored an answer: the scorer ends its process, for example by os._exit"
    return returned, "its program returned: let it loop until me.stopping is set"


def unrepairable(state: State) -> Finish | None:
    """Return the decision to end a run in which a process reported that every further start would end in this way."""
    for replica in judged_replicas(state):
        exception = _exception_of_code(state, replica)
        if exception is not None and exception.unrepairable is not None:
            evidence = f"{replica.id}: {exception}", exception.unrepairable
            return failed_by_code(state, evidence, "its traceback", "an exception that a start does not repeat")
    return None


def failed_by_code(state: State, evidence: tuple[str, ...], shown: str, needed: str) -> Finish:
    """Return the decision to end a run because the user's code fails.

    ``shown`` is what the log of the failure shows to users, ``needed`` what a restart would have needed.
    """
    evidence = (*evidence, f"rrl logs {state.run} --failed shows {shown}")
    return Finish(Outcome.FAILED, Why(evidence, Rung.GIVE_UP, "everything is released", lower=every_lower(needed)))


def _exception_of_code(state: State, failed: Replica) -> RaisedException | None:
    """Return the exception that ended the replica's current incarnation; None if there is none that counts."""
    finding = finding_about(state, failed.incarnation) if failed.is_current and is_judged(state, failed) else None
    exception = None if finding is None else finding.exception
    if exception is None or (exception.environmental and exception.unrepairable is None) or failed.fault:
        return None
    nodes = [state.nodes.get(member.node) for member in gang(state, failed.id) if member.node is not None]
    sound = all(node is not None and node.excluded is None and node_finding(state, node.name) is None for node in nodes)
    return exception if nodes and sound else None
