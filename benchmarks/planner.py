"""Measures the CPU time of plans and folds of a large run: with nothing to do, and after failures.

Every node has 8 GPUs. A rank of the trainer takes one GPU and has a standby process, as in a job without further
settings; a rollout takes a node. A node more has the store and the reward role. All times are CPU times of this process
(``time.process_time``), so that other processes distort them less. They include the garbage collections in between, and
nothing but :func:`plan` and :func:`fold`: no journal, no observers, no messages.

``plan_…_ms``: one plan while everything works. ``mass_death_…_ms``: a quarter of the nodes falls silent, and the
slowest plan of the turn that follows counts; ``mass_death_…_turn_ms`` is this turn, all its plans and folds. One
``gang_restart_…`` is the restart of a gang after a rank has failed: ``fold_gang_restart_…_ms`` folds what the manager's
turns record (fences, stops and launches of all members), ``fold_gang_ends_…_ms`` the ends of the steps in between, and
``gang_restart_…_plan_ms`` is the slowest plan. Figures are medians. An exponent of growth is the slope of the logarithm
of the time over the logarithm of the size, through three sizes of which each is twice the size before.
``python -m rrl.benchmarks.planner [--rounds N]``. Prints a table, and one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from math import log2
from typing import TypeVar

from msgspec.structs import replace

from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.cluster.base import AllocationState, AllocationStatus, NodeState, NodeStatus
from rrl.core.launch import ExitReason, tag_of
from rrl.core.phases import STANDBY
from rrl.core.run_spec import NodeGroup, RoleSpec, RunSpec, TagsSpec
from rrl.core.types import (
    AGENT,
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    Remedy,
    ReplicaId,
    Resources,
    Verdict,
    member_id,
    replica_id,
    standby_id,
)
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Action, Decision, Launch, Request, StopStep, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import Replica, State, Status
from rrl.manager.planner import plan
from rrl.manager.planner.capacity.allocation_requests import initial_requests

_RUN = "large-1"
_POOL = "large-1.pool"
_GPUS = 8
_NODE = Resources(cpus=64, gpus=_GPUS, mem=2**40)
_BEGAN, _NOW = 1000.0, 5000.0
"""Manager's times (s) at which the run began, and of the first plan that is measured."""
_SIZES = 3
"""Number of sizes from which an exponent of growth is computed."""

_Result = TypeVar("_Result")


class Clocked:
    """A state and the CPU times (ms) of its plans and folds."""

    def __init__(self, state: State) -> None:
        self.state, self.now = state, _NOW
        self.plans: list[float] = []
        self.folds: list[float] = []

    def turn(self) -> list[Action]:
        """Plan and record until no action is due, as :meth:`rrl.manager.runtime.Manager._act` does."""
        taken: list[Action] = []
        while actions := _timed(self.plans, lambda: plan(self.state, self.now)).actions:
            taken += actions
            self.record(
                ev.Decided(action) if isinstance(action, Decision) else ev.Intended(action) for action in actions
            )
        return taken

    def record(self, events: Iterable[ev.Event]) -> None:
        """Fold these events."""
        first = self.state.seq + 1
        stamped = [ev.Stamped(seq, self.now, 1, event) for seq, event in enumerate(events, first)]
        self.state = _timed(self.folds, lambda: _fold_all(self.state, stamped))


def _timed(samples: list[float], work: Callable[[], _Result]) -> _Result:
    began = time.process_time()
    result = work()
    samples.append((time.process_time() - began) * 1000)
    return result


def _fold_all(state: State, events: Iterable[ev.Stamped]) -> State:
    for stamped in events:
        state = fold(state, stamped)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of samples of each figure (5)")
    rounds = parser.parse_args().rounds
    check_requirements("planner")
    samples: dict[str, list[float]] = {}
    for nodes in (512, 1024, 2048):
        idle = working_run(ranks=nodes // 2 * _GPUS, rollouts=nodes // 2)
        name = "plan_16384_gpus_ms" if nodes == 2048 else f"plan_{nodes}_ms"
        samples[name] = [_idle_plan(idle) for _ in range(rounds)]
    for nodes in (1024, 2048, 4096):
        trainer, spares = nodes // 4, nodes // 64
        whole = working_run(trainer * _GPUS, nodes - trainer - spares - 1, spares)
        for _ in range(rounds):
            _note(samples, _mass_death(whole, nodes))
    for ranks in (2048, 4096, 8192):
        whole = working_run(ranks, rollouts=ranks // _GPUS)
        for _ in range(rounds):
            _note(samples, _gang_restart(whole, ranks))
    figures = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    names = list(figures)
    growth = {
        "plan_exponent": _exponent(figures, "plan_512_ms", "plan_16384_gpus_ms"),
        "mass_death_exponent": _exponent(figures, "mass_death_1024_ms", "mass_death_4096_ms"),
        "mass_death_turn_exponent": _exponent(figures, "mass_death_1024_turn_ms", "mass_death_4096_turn_ms"),
        "fold_exponent": _exponent(figures, "fold_gang_restart_2048_ms", "fold_gang_restart_8192_ms"),
    }
    rows = [[name, f"{figures[name]:.1f}", f"{min(samples[name]):.1f} to {max(samples[name]):.1f}"] for name in names]
    print_table(["figure", "CPU ms", "range"], rows)
    print_table(["exponent of growth", ""], [[name, f"{value:.2f}"] for name, value in growth.items()])
    print(last_line("planner", {**figures, **growth}, samples))


def _exponent(figures: dict[str, float], smallest: str, largest: str) -> float:
    """Return the exponent of growth; with equal distances, the slope does not depend on the middle size."""
    return round(log2(figures[largest] / figures[smallest]) / (_SIZES - 1), 2)


def _note(samples: dict[str, list[float]], figures: dict[str, float]) -> None:
    for name, value in figures.items():
        samples.setdefault(name, []).append(value)


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────
def _idle_plan(state: State) -> float:
    clocked = Clocked(state)
    assert not clocked.turn(), "a run in which everything works needs no action"
    return clocked.plans[0]


def _mass_death(state: State, nodes: int) -> dict[str, float]:
    clocked = Clocked(state)
    names = list(state.nodes)
    clocked.record(ev.FindingChanged(_lost(name)) for name in names[::4])
    clocked.folds.clear()
    clocked.turn()
    turn = sum(clocked.plans) + sum(clocked.folds)
    return {f"mass_death_{nodes}_ms": max(clocked.plans), f"mass_death_{nodes}_turn_ms": turn}


def _gang_restart(state: State, ranks: int) -> dict[str, float]:
    clocked = Clocked(state)
    clocked.record([ev.FindingChanged(_ended(Incarnation(member_id(ReplicaId("trainer/0"), ranks // 2), 1)))])
    clocked.folds.clear()
    stops = [action for action in clocked.turn() if isinstance(action, StopStep)]
    recorded = sum(clocked.folds)
    assert len(stops) == ranks
    clocked.now += 1.0
    clocked.folds.clear()
    clocked.record(ev.StepEnded(stop.incarnation, stop.step, None, 9, ExitReason.STOPPED) for stop in stops)
    ends = sum(clocked.folds)
    clocked.folds.clear()
    launches = [action for action in clocked.turn() if isinstance(action, Launch) and action.standby is not None]
    assert len(launches) == ranks
    return {
        f"fold_gang_restart_{ranks}_ms": recorded + sum(clocked.folds),
        f"fold_gang_ends_{ranks}_ms": ends,
        f"gang_restart_{ranks}_plan_ms": max(clocked.plans),
    }


def _lost(node: NodeName) -> Finding:
    evidence = (Evidence("agent", "no message for 10 s", _NOW),)
    return Finding("node_lost", Verdict.FAIL, Cause.NODE, Remedy.EXCLUDE, _NOW, evidence, node=node)


def _ended(incarnation: Incarnation) -> Finding:
    evidence = (Evidence("exit record", "exit code 1", _NOW),)
    cause, remedy = Cause.PROCESS, Remedy.RESTART
    return Finding("exit_record", Verdict.FAIL, cause, remedy, _NOW, evidence, incarnation=incarnation, proof=True)


# ── a run in which everything works ──────────────────────────────────────────────────────────────────────────────────
def working_run(ranks: int, rollouts: int, spares: int = 0) -> State:
    """Return the state of a run that has committed a step, and whose replicas and standby processes have all joined."""
    trainer_nodes = ranks // _GPUS
    names = tuple(NodeName(f"n{number}") for number in range(trainer_nodes + rollouts + 1 + spares))
    job = _job(ranks, rollouts, len(names), spares)
    of_trainer, of_rollouts, shared = names[:trainer_nodes], names[trainer_nodes:], names[trainer_nodes + rollouts]
    nodes = {
        **{ReplicaId("trajectories/0"): shared, ReplicaId("reward/0"): shared},
        **{member_id(ReplicaId("trainer/0"), rank): of_trainer[rank // _GPUS] for rank in range(ranks)},
        **{replica_id("rollout", index): of_rollouts[index] for index in range(rollouts)},
        **{replica_id(AGENT, name): name for name in names},
        **{standby_id(name, slot): name for name in of_trainer for slot in range(_GPUS)},
    }
    request = Request(initial_requests(_RUN, job)[0], Why(("no nodes",)))
    granted = AllocationStatus(AllocationState.RUNNING, "7", names)
    up = NodeStatus(NodeState.UP, "MIXED")
    events: tuple[ev.Event, ...] = (
        ev.Intended(request),
        ev.IntentSettled(_POOL, True),
        ev.AllocationChanged(_POOL, granted),
    )
    state = _fold_all(_first_state(job), (ev.Stamped(seq, _BEGAN, 1, event) for seq, event in enumerate(events, 2)))
    return replace(
        state,
        launched=True,
        step=1,
        replicas={id: _joined(id, node) for id, node in nodes.items()},
        nodes={name: replace(node, status=up, probe_error="") for name, node in state.nodes.items()},
    )


def _first_state(job: RunSpec) -> State:
    return fold(None, ev.Stamped(1, _BEGAN, 1, ev.RunStarted(_RUN, job)))


def _joined(id: ReplicaId, node: NodeName) -> Replica:
    incarnation = Incarnation(id, 1)
    phase = {"trainer": "train", "rollout": "generate", "standby": STANDBY}.get(incarnation.replica.partition("/")[0])
    return Replica(
        id,
        Status.JOINED,
        1,
        since=_BEGAN,
        node=node,
        allocation=_POOL,
        step=tag_of(_RUN, incarnation),
        phase=phase or "serve",
        listen_address=f"tcp://{node}:4000",
        commits=1,
        ever_joined=True,
        ever_worked=True,
    )


def _job(ranks: int, rollouts: int, nodes: int, spares: int) -> RunSpec:
    each, gpu, whole = Resources(cpus=4), Resources(cpus=4, gpus=1), Resources(cpus=32, gpus=_GPUS)
    trainer = RoleSpec("trainer", "trainer", 1, 1, gpu, True, ("run",), ranks=ranks, per_node=_GPUS, warm=True)
    roles = (
        RoleSpec("trajectories", "trajectories", 1, 1, each, False, ("run",)),
        RoleSpec("reward", "reward", 1, 1, each, False, ("run",)),
        trainer,
        RoleSpec("rollout", "rollout", rollouts, 1, whole, True, ("run",)),
    )
    pool = NodeGroup("pool", tuple(role.name for role in roles), nodes, _NODE, min_nodes=nodes)
    tags = TagsSpec(("rollout", "train"), ())
    return RunSpec("large", 9, "slurm", roles, (pool,), spares=spares, tags=tags)


if __name__ == "__main__":
    main()
