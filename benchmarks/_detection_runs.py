"""Plays each scenario with each seed, in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from msgspec import Struct

from rrl.tests.support.scenarios.format import Scenario
from rrl.tests.support.scenarios.load import load_all
from rrl.tests.support.scenarios.methods import judge_of
from rrl.tests.support.scenarios.play import Played, play

_PROGRESS_EVERY_RUNS = 1000
"""Number of plays between two lines about the progress."""
_loaded: dict[str, Scenario] = {}
"""Scenarios of this worker process, by name."""


class Run(Struct, frozen=True):
    scenario: str
    seed: int
    method: str
    factor: float = 1.0


def available_cores() -> int:
    """Return the number of cores that this process may use: fewer than the machine has in a container or a job step."""
    return len(os.sched_getaffinity(0))


def play_all(folder: Path, runs: Iterable[Run], jobs: int) -> dict[Run, Played]:
    """Play the runs in ``jobs`` processes and print the progress to stderr; return the results by run, in order.

    The results do not depend on ``jobs``: each run draws from its own seed. Raises ScenarioError and whatever a judge
    raises.
    """
    pending: Sequence[Run] = list(runs)
    done: dict[Run, Played] = {}
    with ProcessPoolExecutor(jobs, initializer=_load, initargs=(folder,)) as pool:
        for run, play in zip(pending, pool.map(_play, pending), strict=True):
            done[run] = play
            if len(done) % _PROGRESS_EVERY_RUNS == 0:
                print(f"{len(done)} of {len(pending)} plays", file=sys.stderr, flush=True)
    return done


def _load(folder: Path) -> None:
    _loaded.update(load_all(folder))


def _play(run: Run) -> Played:
    scenario = _loaded[run.scenario]
    return play(run.scenario, scenario, run.seed, judge_of(run.method, scenario, run.factor))
