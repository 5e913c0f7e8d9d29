"""Guests as the manager plans them, with real processes: where they are, what their ends lead to, and when they go."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rrl.core.types import TRAINER, NodeName, ReplicaId, guest_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Action, Fence, Launch, StopStep
from rrl.manager.model.state import State, Status
from rrl.tests.support.lending import LendingRun
from rrl.tests.support.runs import all_work

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)]


def guests(state: State) -> set[NodeName]:
    """Return the nodes whose guests have joined."""
    return {one.node for one in state.guests if one.status is Status.JOINED and one.node is not None}


def nodes_of_trainer(state: State) -> set[NodeName]:
    return {one.node for one in state.workers if one.role == "trainer" and one.is_current and one.node is not None}


def test_guests_are_where_the_trainer_is_and_leave_before_it_moves(tmp_path: Path) -> None:
    with LendingRun(tmp_path, 100_000, spares=1) as run:
        state = run.wait(lambda state: all_work(state) and guests(state) == nodes_of_trainer(state) != set())
        drained = run.member(1).node
        assert drained is not None
        call = run.test.call("drain", run.test.run.id, drained, stdout=subprocess.DEVNULL)
        assert call.wait(120) == 0
        run.wait(
            lambda s: s.replica(TRAINER).incarnation_number == 2 and guests(s) == nodes_of_trainer(s) and all_work(s)
        )
        done = [one.event.action for one in run.test.events() if isinstance(one.event, ev.Intended | ev.Decided)]
        left = next(number for number, one in enumerate(done) if _ends(one, guest_id(drained)))
        moved = next(
            n for n, one in enumerate(done) if isinstance(one, Launch) and str(one.incarnation) == "trainer/0#2"
        )
        assert left < moved
        assert drained not in guests(run.test.state())

        node = sorted(guests(run.test.state()))[0]
        first = run.guest(node)
        run.kill(first)
        run.guest_returns(first)
        run.kill(run.guest(node))
        run.wait(lambda state: state.replica(guest_id(node)).status is Status.RETIRED)
        assert run.trainer_incarnations() == 2
        shown = run.test.call("explain", run.test.run.id, stdout=subprocess.PIPE).communicate(timeout=120)[0]
        assert f"guest/{drained}#1 on {drained}" in shown.replace("\n", " ")
        assert f"go on without guest/{node}#" in shown
        run.cancel()
        assert state.job.guests == 2


def _ends(action: Action, guest: ReplicaId) -> bool:
    return isinstance(action, Fence | StopStep) and action.incarnation.replica == guest
