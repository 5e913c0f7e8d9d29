"""A run grows its elastic rollout pool by itself and shrinks it on a user's command, also while its manager is dead."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from rrl.api.command_sender import send
from rrl.core.types import ReplicaId
from rrl.manager.intake.user_commands import Command
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Resize
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import TestRun, all_work, cancel, light_job, submit_here

ROLLOUT = ReplicaId("rollout/0")
POOL = """
[rollouts.burst]
replicas = { min = 0, max = 2 }
node_hours = 1
"""


def _at_work(state: State) -> int:
    return sum(replica.role == "burst" and replica.status is Status.JOINED for replica in state.workers)


def _held(state: State) -> int:
    return sum(allocation.request.node_group == "burst" for allocation in state.allocations.values())


def _resizes(run: TestRun) -> list[Resize]:
    decided = (stamped.event.action for stamped in run.events() if isinstance(stamped.event, ev.Decided))
    return [action for action in decided if isinstance(action, Resize)]


def test_elastic_pool_grows_by_itself_and_shrinks_on_a_command_that_the_next_manager_finds(tmp_path: Path) -> None:
    toml = light_job("local", 100_000, rollouts=1, spares=0, warm=False, one_node=True, step_seconds=0.05, extra=POOL)
    run = submit_here(tmp_path, toml.replace("[roles.rollout]\n", "[roles.rollout]\nlease = 8\n"))
    state = run.wait(lambda state: _at_work(state) == 2 and all_work(state))
    others = {r.id: r.incarnation for r in state.workers if r.role != "burst"}
    grown = _resizes(run)
    assert [number for one in grown for number in (len(one.start), len(one.stop))][:2] == [2, 0]
    assert "the trainer waited" in grown[0].why.evidence[0]
    run.wait(lambda state: "burst" in state.idle_times.now.roles and state.idle_times.now.roles["burst"].done > 0)

    manager = json.loads((run.run.epochs / "000001").read_text())["pid"]
    os.kill(manager, signal.SIGKILL)
    send(run.run, Command("resize", "ada", target="burst", replicas=0))
    with run.call("manage", run.run.id):
        state = run.wait(lambda state: _at_work(state) == 0 and _held(state) == 0)
        assert {r.id: r.incarnation for r in state.workers} == others
        assert (state.pools["burst"].held, state.orphan_steps) == (0, {})
        assert 0 < state.pools["burst"].spent_node_s < 3600
        send(run.run, Command("resize", "ada", target="burst", replicas=1))
        state = run.wait(lambda state: _at_work(state) == 1)
        (back,) = (replica for replica in state.workers if replica.role == "burst")
        assert back.incarnation_number == 2
        run.wait_steps(state.step + 2)
        cancel(run)  # every trajectory was trained once at most, and nothing of the run is left
    state = run.state()
    assert {r.id: r.incarnation for r in state.workers if r.role != "burst"} == others
    assert [(len(one.start), len(one.stop)) for one in _resizes(run)][-2:] == [(0, 2), (1, 0)]
