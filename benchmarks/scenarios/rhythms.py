"""Default rhythms of roles: phases with their durations, work, and CPU and GPU load."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from rrl.benchmarks.scenarios.format import RhythmPhase, RoleTable, Scenario
from rrl.benchmarks.scenarios.values import Drawn, fixed
from rrl.core.phases import STANDBY


class Loads(NamedTuple):
    cpu: float
    """CPU cores in use."""
    gpu: float
    """Share of the time in which a kernel runs."""
    tensor: float
    """Share of the time in which tensor cores work."""
    state: str = "R"
    """State of the process in /proc/PID/stat: R (running), S (sleeping), D (waiting for a disk), T (stopped) or t
    (traced)."""

    def with_given(self, cpu: float | None, gpu: float | None, tensor: float | None) -> Loads:
        """Return a copy of these loads in which the given values replace the present ones."""
        return Loads(
            self.cpu if cpu is None else cpu,
            self.gpu if gpu is None else gpu,
            self.tensor if tensor is None else tensor,
            self.state,
        )


IDLE = Loads(0.0, 0.0, 0.0)
WAITING = Loads(0.02, 0.0, 0.0)
COMPILING = Loads(1.0, 0.0, 0.0)
IN_COLLECTIVE = Loads(1.0, 1.0, 0.0)
"""Load of a rank whose kernel spins because it waits for another rank in NCCL."""
_LOADS = {
    "generate": Loads(1.0, 0.9, 0.4),
    "train": Loads(1.2, 0.95, 0.5),
    "checkpoint": Loads(0.8, 0.05, 0.0),
    "publish": Loads(0.8, 0.05, 0.0),
    "loading_weights": Loads(0.5, 0.1, 0.0),
    "score": Loads(1.0, 0.0, 0.0),
    "serve": Loads(0.1, 0.0, 0.0),
    "starting": Loads(1.0, 0.0, 0.0),
}


def loads_of(phase: RhythmPhase, defaults: Loads | None = None) -> Loads:
    """Return the loads of a phase.

    Values that the file does not give are those of ``defaults``, or the usual values of the phase.
    """
    usual = _LOADS.get(phase.phase, WAITING if phase.phase.startswith("wait") else COMPILING)
    defaults = usual if defaults is None else defaults
    given_loads = (phase.cpu, phase.gpu, phase.tensor)
    return defaults.with_given(*given_loads)


def _lognormal(median: float, sigma: float) -> Drawn:
    return Drawn("lognormal", median, sigma)


def _uniform(low: float, high: float) -> Drawn:
    return Drawn("uniform", low, high)


_STARTS = _uniform(15.0, 60.0)
_RHYTHMS: dict[str, tuple[RhythmPhase, ...]] = {
    "trainer": (
        RhythmPhase(phase="wait_data", lasts=_lognormal(20.0, 0.3), waits="rollout", reports_waits_for=True),
        RhythmPhase(phase="train", lasts=_lognormal(60.0, 0.15), first=_uniform(20.0, 60.0)),
        RhythmPhase(phase="checkpoint", lasts=_uniform(3.0, 8.0)),
        RhythmPhase(phase="publish", lasts=_uniform(2.0, 5.0)),
    ),
    "rollout": (
        RhythmPhase(phase="wait_work", lasts=_uniform(0.0, 3.0), waits="trajectories", reports_waits_for=True),
        RhythmPhase(phase="generate", lasts=_lognormal(90.0, 0.3), rate=900.0),
        RhythmPhase(phase="loading_weights", lasts=_uniform(1.0, 4.0)),
    ),
    "reward": (
        RhythmPhase(phase="wait_work", lasts=_lognormal(10.0, 0.5), waits="trajectories", reports_waits_for=True),
        RhythmPhase(phase="score", lasts=_lognormal(6.0, 0.4), rate=5.0),
    ),
    "agents": (
        RhythmPhase(phase="wait_work", lasts=_uniform(0.0, 3.0), waits="trajectories", reports_waits_for=True),
        RhythmPhase(phase="act", lasts=_lognormal(3.0, 0.8), rate=0.5, cpu=0.3),
        RhythmPhase(phase="wait_turn", lasts=_lognormal(25.0, 0.4), waits="rollout"),
        RhythmPhase(phase="act", lasts=_lognormal(3.0, 0.8), rate=0.5, cpu=0.3),
    ),
    "endpoint": (
        RhythmPhase(phase="wait_work", lasts=_lognormal(20.0, 0.5), waits="trajectories", reports_waits_for=True),
        RhythmPhase(phase="wait_turn", lasts=_lognormal(30.0, 0.4), waits="rollout"),
    ),
    "trajectories": (RhythmPhase(phase="serve", lasts=fixed(inf), rate=20.0, waits="rollout"),),
}
_ONCE: dict[str, tuple[RhythmPhase, ...]] = {
    "trainer": (
        RhythmPhase(phase="checkpoint", lasts=_uniform(5.0, 20.0)),
        RhythmPhase(phase="publish", lasts=_uniform(2.0, 5.0)),
    ),
    "rollout": (
        RhythmPhase(phase="wait_weights", lasts=_uniform(1.0, 5.0), waits="trainer"),
        RhythmPhase(phase="loading_weights", lasts=_uniform(2.0, 6.0)),
    ),
}
KNOWN_ROLES = frozenset(_RHYTHMS)
"""Roles that need no rhythm in the file."""
STANDBY_RHYTHM = (RhythmPhase(phase=STANDBY, lasts=fixed(inf), cpu=0.0),)
_OTHER = (RhythmPhase(phase="between", lasts=_uniform(5.0, 20.0)),)
DEFAULT_ROLES = {
    "trajectories": RoleTable(),
    "reward": RoleTable(),
    "trainer": RoleTable(),
    "rollout": RoleTable(replicas=3),
}
PROBED_ROLES = ("rollout", "trajectories", "reward", "agents", "endpoint")
"""Roles that do some work to answer a probe, unless a scenario says otherwise."""
SMALL = ("trajectories", "reward")
"""The default roles that share a node."""


def roles_of(scenario: Scenario) -> dict[str, RoleTable]:
    """Return all roles with rhythms, in the order in which they get nodes."""
    roles = {**DEFAULT_ROLES, **scenario.roles}
    filled = {name: _filled(name, table) for name, table in roles.items()}
    return {name: table for name, table in filled.items() if table.replicas}


def _filled(name: str, table: RoleTable) -> RoleTable:
    gpus = table.gpus if table.gpus is not None else 8 if name in ("trainer", "rollout") else 0
    once = table.once if table.once is not None else _ONCE.get(name, ())
    effective = table if "replicas" in table.model_fields_set else DEFAULT_ROLES.get(name, table)
    update = {
        "replicas": effective.replicas,
        "gpus": gpus,
        "once": once,
        "rhythm": table.rhythm or _RHYTHMS.get(name, _OTHER),
        "starts": table.starts or _STARTS,
    }
    return table.model_copy(update=update)
