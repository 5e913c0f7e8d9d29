"""Measures whether a run withstands 10,000 malformed frames and 200 half-open connections on every port.

The run is light (real manager, store, agents and weight transport, no models), on this machine's local cluster, and is
repeated with each weight transport. For ucx, which uses TCP here, the job declares its network as trusted. A smaller
attack before the measurement fills the memory pools of the libraries.

Three arms take turns within the same run, in three rounds. In ``alone``, nothing is done to the run. In ``attack``, a
third of the frames is sent to each port. In ``busy``, a busy loop uses the same share of the cores as the attacker did,
and sends nothing. The attacker runs on the run's own machine, where it takes CPU time from the run, as any program
would. So the steps/s of ``attack`` are compared with those of ``busy``: the difference is the work that the attack
causes in the run. ``run_affected`` is true if a part of the run was restarted, reported in a finding, or stopped. It is
also true if the median ratio of these steps/s is below 0.9.

The growth of memory and descriptors of each process is measured over all rounds together. A part without an attack
shows how much the processes grow by themselves. Prints tables, and one JSON object as its last line
(benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs, to_builtins

from rrl.benchmarks._load import cpu_seconds
from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.types import Verdict
from rrl.manager.model import events as ev
from rrl.tests.support.runs import TestRun, current_incarnations, light_job, submit_here
from rrl.tests.support.security.assault import Cost, Storm, Target, assault, targets
from rrl.tests.support.security.attacks import Footprint, ports_of

FRAMES_PER_PORT = 10_000
HALF_OPEN_PER_PORT = 200
WARMUP_FRAMES = 1_000
ROUNDS = 3
WINDOW_S = 10.0
"""Seconds of ``alone`` in each round, and minimum seconds of ``busy``. A light run commits several steps per second."""
MIN_OVER_BUSY = 0.9
"""A run counts as unaffected if its steps/s under attack are at least this share of its steps/s beside a busy loop. On
a shared machine, the steps/s of one arm also differ by a tenth between rounds."""
STEPS = 1_000_000
"""Number of steps of the job, which the run never reaches, because it is cancelled after the attack."""
_BUSY_LOOP = """
import sys, time
share, began = float(sys.argv[1]), time.monotonic()
used = time.process_time()
while True:
    if time.process_time() - used > share * (time.monotonic() - began):
        time.sleep(0.001)
"""
"""A program that uses a given share of one core: it sleeps while it has used more than this share."""


class Round(Struct, frozen=True):
    """The steps/s of one round, by arm, and the cores that the attacker and the busy loop used."""

    alone: float
    attack: float
    busy: float
    attack_cores: float
    busy_cores: float
    attack_s: float
    """Seconds in which frames were sent."""

    @property
    def over_busy(self) -> float:
        return self.attack / self.busy


class Result(Struct, frozen=True):
    """The result with one weight transport."""

    kind: str
    rounds: list[Round]
    costs: list[Cost]
    """Cost of all rounds together, for each process."""
    own_growth: list[float]
    """Growth of each process's memory in a part without an attack, as a share."""
    disturbed: bool
    """Whether a part of the run was restarted, reported in a finding, or stopped."""

    @property
    def affected(self) -> bool:
        return self.disturbed or statistics.median(one.over_busy for one in self.rounds) < MIN_OVER_BUSY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("frames", nargs="?", type=int, default=FRAMES_PER_PORT, help="frames per port (10,000)")
    frames = parser.parse_args().frames
    check_requirements("hostile_ports")
    kinds = ["tcp"] + ["ucx"] * (importlib.util.find_spec("ucxx") is not None)
    results = [_measure(kind, frames) for kind in kinds]
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{frames} frames and {HALF_OPEN_PER_PORT} half-open connections a port"
    )
    print_table(
        ("pipe, process", "ports", "MiB before", "most", "after", "growth", "alone", "fds before", "most", "after"),
        [row for result in results for row in _rows(result)],
    )
    print("\nsteps/s and cores, by round")
    print_table(
        ("pipe, round", "alone", "attack", "busy loop", "attack / busy", "attacker's cores", "busy loop's cores"),
        [row for result in results for row in _round_rows(result)],
    )
    raw = raw_samples("hostile_ports", [to_builtins(result) for result in results])
    costs = [cost for result in results for cost in result.costs]
    print(
        json.dumps(
            {
                "frames": min(cost.frames for cost in costs),
                "half_open": HALF_OPEN_PER_PORT,
                "ports": sum(len(cost.target.ports) for cost in costs),
                "memory_growth_max": round(max(cost.memory_growth for cost in costs), 4),
                "fds_growth_max": max(cost.descriptors_growth for cost in costs),
                "run_affected": any(result.affected for result in results),
                **{
                    f"{result.kind}_{name}": spread(values)
                    for result in results
                    for name, values in _ratios(result).items()
                },
                **provenance(),
                "raw": str(raw),
            }
        )
    )


def _ratios(result: Result) -> dict[str, list[float]]:
    """Return for each round the ratios of steps/s between two arms: attack/busy, attack/alone and busy/alone."""
    return {
        "attack_over_busy": [one.over_busy for one in result.rounds],
        "attack_over_alone": [one.attack / one.alone for one in result.rounds],
        "busy_over_alone": [one.busy / one.alone for one in result.rounds],
    }


def _measure(kind: str, frames: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="rrl-bench-") as folder:
        chosen = f'weights = "{kind}"\ntrusted_network = {str(kind == "ucx").lower()}'
        toml = light_job("local", STEPS, step_seconds=0.1).replace('weights = "tcp"', chosen)
        run = submit_here(Path(folder), toml)
        try:
            before = current_incarnations(run.wait_steps(20))
            victims = targets(run)
            assault(run, victims, WARMUP_FRAMES, HALF_OPEN_PER_PORT)
            first = [Footprint.of(victim.pid) for victim in victims]
            rounds: list[Round] = []
            attacks: list[list[Cost]] = []
            grown: list[float] = []
            for number in range(ROUNDS):
                alone = _steps_per_s(run, WINDOW_S)
                if not number:
                    grown = [
                        Footprint.of(victim.pid).memory / then.memory - 1
                        for victim, then in zip(victims, first, strict=True)
                    ]
                victims = [structs.replace(victim, ports=tuple(ports_of(victim.pid))) for victim in victims]
                costs, storm = assault(run, victims, math.ceil(frames / ROUNDS), HALF_OPEN_PER_PORT, first)
                attacks.append(costs)
                rounds.append(_round(run, alone, storm))
            step = run.state().step
            run.wait(lambda state: state.step >= step + 10)
            suspicions = _suspicions(run)
            disturbed = current_incarnations(run.state()) != before or bool(suspicions)
            for suspicion in suspicions:
                print(f"{kind}: {suspicion}", file=sys.stderr)
        finally:
            with run.call("cancel", run.run.id) as process:
                process.wait()
        run.wait_gone()
    return Result(kind, rounds, _together(victims, attacks), grown, disturbed)


def _round(run: TestRun, alone: float, storm: Storm) -> Round:
    """Measure the steps/s beside a busy loop that uses as many cores as the attacker did, and return the round.

    ``alone`` is the number of steps/s of this round without a load.
    """
    share = storm.cpu_s / storm.seconds
    with _busy_loop(share) as pids:
        began, used = time.monotonic(), cpu_seconds(pids)
        busy = _steps_per_s(run, max(WINDOW_S, storm.seconds))
        cores = (cpu_seconds(pids) - used) / (time.monotonic() - began)
    return Round(alone, storm.steps / storm.seconds, busy, share, cores, storm.seconds)


@contextlib.contextmanager
def _busy_loop(cores: float) -> Iterator[list[int]]:
    """Keep this number of cores busy until the block ends, by one process for each core; yield the pids."""
    count = math.ceil(cores)
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(cores / count)]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _steps_per_s(run: TestRun, seconds: float) -> float:
    step, began = run.state().step, time.monotonic()
    time.sleep(seconds)
    return (run.state().step - step) / (time.monotonic() - began)


def _together(victims: Sequence[Target], attacks: Sequence[Sequence[Cost]]) -> list[Cost]:
    """Return for each process the cost of all attacks together."""
    found = []
    for index, victim in enumerate(victims):
        costs = [costs[index] for costs in attacks]
        worst = Footprint(max(cost.worst.memory for cost in costs), max(cost.worst.descriptors for cost in costs))
        found.append(Cost(victim, costs[0].before, worst, costs[-1].after, sum(cost.frames for cost in costs)))
    return found


def _rows(result: Result) -> Iterator[list[str]]:
    for cost, own_growth in zip(result.costs, result.own_growth, strict=True):
        sizes = [f"{each.memory / 2**20:.1f}" for each in (cost.before, cost.worst, cost.after)]
        counts = [str(each.descriptors) for each in (cost.before, cost.worst, cost.after)]
        yield [
            f"{result.kind}, {cost.target.name}",
            str(len(cost.target.ports)),
            *sizes,
            f"{cost.memory_growth:+.1%}",
            f"{own_growth:+.1%}",
            *counts,
        ]


def _round_rows(result: Result) -> Iterator[list[str]]:
    for number, one in enumerate(result.rounds, 1):
        yield [
            f"{result.kind}, {number}",
            f"{one.alone:.1f}",
            f"{one.attack:.1f}",
            f"{one.busy:.1f}",
            f"{one.over_busy:.2f}",
            f"{one.attack_cores:.2f}",
            f"{one.busy_cores:.2f}",
        ]


def _suspicions(run: TestRun) -> list[str]:
    """Return all findings other than OK about processes and nodes of the run."""
    events = [stamped.event for stamped in run.events()]
    return [
        str(event.finding)
        for event in events
        if isinstance(event, ev.FindingChanged) and event.finding.verdict is not Verdict.OK
    ]


if __name__ == "__main__":
    main()
