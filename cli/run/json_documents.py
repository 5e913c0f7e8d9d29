"""The JSON documents that ``rrl submit``, ``rrl status`` and ``rrl inject`` print with ``--json``."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Struct

from ...api.watching.manager_liveness import Liveness
from ...api.watching.run_state import standing
from ...core.faults import Fault
from ...core.run_dir import RunDir
from ...core.types import Outcome
from ...manager.model.pools import PoolFigures, extras, pool_figures
from ...manager.model.state import State
from ...manager.model.table import as_dict
from ...manager.reporting.summary import RunFigures, run_figures
from ...manager.storage.model_folders import model_folders
from ..views.pace import Pace, pace_of
from ..views.status import known_until


class StartedRun(Struct, frozen=True):
    """The output of ``rrl submit --json``: the run that was started."""

    run: str
    """The run's id."""
    run_dir: str
    """Absolute path of the run directory."""


class UnstartedRun(Struct, frozen=True):
    """A run without a journal: it has not begun yet, or never will."""

    run: str
    outcome: Outcome | None
    """``rejected`` if it will never begin, else None."""
    why: str
    """What the run waits for, or why it will never begin."""


class RequestedFault(Fault, frozen=True, kw_only=True):
    """The output of ``rrl inject --json``: the fault that was requested from the run's manager."""

    run: str = ""


class StatusFigures(RunFigures, frozen=True, kw_only=True):
    """The keys that ``rrl status --json`` adds to the state of the run."""

    standing: str
    """The standing of the run, as in ``rrl list``."""
    note: str
    """What is wrong with the manager or the run directory, and what to do; empty if nothing is wrong."""
    metrics_failure: str
    """Why the manager serves no metrics; empty if it serves them, or if the job requests none."""
    pace: Pace
    rollout_pools: dict[str, PoolFigures]
    """The rollout pools, by name. Rollouts on spares belong to the pool ``rollout``."""
    extras: int
    """Number of rollouts that work on spares."""


def status_document(run: RunDir, state: State, judged: Liveness, metrics_failure: str) -> dict[str, Any]:
    """Return the state of a run, with the figures that are computed from it.

    Args:
        run: The run.
        state: Its state.
        judged: What is known about its manager.
        metrics_failure: Why the manager serves no metrics.
    """
    until = known_until(state, time.time(), (judged.note,))
    figures = StatusFigures(
        rollout_pools={role.name: pool_figures(state, role, until) for role in state.job.kind("rollout")},
        extras=extras(state),
        standing=judged.standing or standing(state),
        note=str(judged),
        metrics_failure=metrics_failure,
        pace=pace_of(state, until, frozen=bool(judged.note)),
        **run_figures(state, model_folders(run, state.step)),
    )
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(state, enc_hook=as_dict))
    shown: dict[str, Any] = msgspec.to_builtins(figures, str_keys=True)
    return decoded | shown
