"""Scenario after scenario, seed after seed, on all cores."""

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
"""plays after which is said how far it is"""
_loaded: dict[str, Scenario] = {}
"""of this worker process"""


class Run(Struct, frozen=True):
    scenario: str
    seed: int
    method: str
    factor: float = 1.0


def play_all(folder: Path, runs: Iterable[Run]) -> dict[Run, Played]:
    """Says on stderr how far it is. Raises whatever a judge raises, and ScenarioError."""
    pending: Sequence[Run] = list(runs)
    done: dict[Run, Played] = {}
    with ProcessPoolExecutor(os.cpu_count(), initializer=_load, initargs=(folder,)) as pool:
        for run, play in zip(pending, pool.map(_play, pending, chunksize=8), strict=True):
            done[run] = play
            if len(done) % _PROGRESS_EVERY_RUNS == 0:
                print(f"{len(done)} of {len(pending)} plays", file=sys.stderr, flush=True)
    return done


def _load(folder: Path) -> None:
    _loaded.update(load_all(folder))


def _play(run: Run) -> Played:
    scenario = _loaded[run.scenario]
    return play(run.scenario, scenario, run.seed, judge_of(run.method, scenario, run.factor))
