"""What tests of standby processes ask of a run."""

from __future__ import annotations

from rrl.core.phases import STANDBY
from rrl.core.types import STANDBY_ROLE, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Launch
from rrl.manager.model.state import Replica, State, Status
from rrl.tests.support.runs import TestRun, check_sound

TRAINER = ReplicaId("trainer/0")


def standbys(state: State) -> list[Replica]:
    """Return the standby processes that are ready."""
    return [
        one
        for one in state.replicas.values()
        if one.role == STANDBY_ROLE and one.status is Status.JOINED and one.phase == STANDBY
    ]


def adoptions(run: TestRun) -> list[Launch]:
    events = (stamped.event for stamped in run.events())
    actions = (event.action for event in events if isinstance(event, ev.Intended))
    return [action for action in actions if isinstance(action, Launch) and action.standby is not None]


def end_well(run: TestRun) -> None:
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", state.job.steps), state.why
    run.wait_gone()
    check_sound(run.run)
