"""Plays each scenario with each seed, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from msgspec import Struct

from rrl.benchmarks.scenarios.format import Scenario
from rrl.benchmarks.scenarios.load import load_all
from rrl.benchmarks.scenarios.methods import judge_of
from rrl.benchmarks.scenarios.play import Played, play
from rrl.health.readers.isolation.process import set_parent_death_signal

_PROGRESS_EVERY_RUNS = 1000
"""Number of plays between two lines about the progress."""
_SIGINT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code that a shell reports for a process that ended by Ctrl-C."""
_loaded: dict[str, Scenario] = {}
"""Scenarios of this worker process, by name."""


class Run(Struct, frozen=True):
    scenario: str
    seed: int
    method: str
    factor: float = 1.0


def available_cores() -> int:
    """Return the number of cores that this process may use. A container or job step may have fewer than the machine."""
    return len(os.sched_getaffinity(0))


def play_all(folder: Path, runs: Iterable[Run], jobs: int) -> dict[Run, Played]:
    """Play the runs in ``jobs`` processes and print the progress to stderr; return the results by run, in order.

    The results do not depend on ``jobs``: each run draws from its own seed. SIGTERM (``exit_on_sigterm``) and Ctrl-C
    end the processes at once. After such an interruption SystemExit is raised. ScenarioError and the exceptions of a
    judge (rrl's detectors or another method) are passed on.
    """
    pending: Sequence[Run] = list(runs)
    done: dict[Run, Played] = {}
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(jobs, initializer=_start_worker, initargs=(folder, os.getpid())) as pool:
        try:
            # Not `map`: it would cancel the futures of a pool whose workers end, and the pool fails on cancelled
            # futures.
            for run, future in zip(pending, _submit(pool, pending), strict=True):
                done[run] = future.result()
                if len(done) % _PROGRESS_EVERY_RUNS == 0:
                    print(f"{len(done)} of {len(pending)} plays", file=sys.stderr, flush=True)
        except BaseException as error:
            for worker in set(multiprocessing.active_children()).difference(others):
                worker.kill()
            if not isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            print(f"stopped after {len(done)} of {len(pending)} plays", file=sys.stderr)
            raise SystemExit(getattr(error, "code", _SIGINT_EXIT_CODE)) from None
    return done


def _submit(pool: ProcessPoolExecutor, runs: Iterable[Run]) -> list[Future[Played]]:
    """Submit the runs, which starts the workers. The workers inherit the blocked signals, so they end only by SIGKILL.

    If the signals were not blocked, Ctrl-C or a SIGTERM to the process group would make each worker print a traceback.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return [pool.submit(_play, run) for run in runs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _start_worker(folder: Path, parent: int) -> None:
    set_parent_death_signal(parent, signal.SIGKILL)
    _loaded.update(load_all(folder))


def _play(run: Run) -> Played:
    scenario = _loaded[run.scenario]
    return play(run.scenario, scenario, run.seed, judge_of(run.method, scenario, run.factor))
