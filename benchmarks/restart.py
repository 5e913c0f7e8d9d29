"""Measures the time from a kill of the trainer to the commit of its next optimizer step, with four arms.

The arms take turns, run by run. They have the same machine, cluster and job (the quickstart's real torch roles, with a
trainer of one or more ranks), and kills at equal moments:

- ``warm``: policy "role" with standby processes, as rrl ships.
- ``in_place``: policy "role" without standby processes. Only the trainer starts, as a new process.
- ``job``: policy "job": every role restarts in place from the last checkpoint, as RobustRL configured ByteRobust
  (docs/sources.md).
- ``warm_ready``: ``warm``, but each kill waits until the trainer's nodes have ready standby processes.

This program kills the trainer's rank 0 by SIGKILL; nothing informs the run of the kill. The seed draws the moment of a
kill from the ``KILL_WINDOW_S`` that begin when all roles work and the trainer has committed a step. The kill does not
wait for a ready standby process. A trainer without a ready standby process starts as a new process, and also counts in
``warm``. The main result, ``warm``, was chosen before the first measurement; ``warm_ready`` shows its best
case.

The measured time includes everything from the signal until the commit of the first step that the next incarnation
trains. Its stages are read from the journal: detect (kill → finding), decide (→ fenced), start (→ all ranks have
joined), work (→ first part of a training step is computed), step (→ the step is committed). The launch of the next
standby process is not included. The time before the second restart (``[recovery] backoff``, by default 1 s) is 0 in all
arms. ``steps_lost_max`` is the largest number of lost steps. At the kill, up to ``uncommitted`` steps may have been
trained after the committed step. Of these steps, those after the step from which the trainer continues, according to
its log, count as lost.

All processes share the cores of this machine. In ``job`` the trainer, both rollouts, store and reward start at once on
these cores, while a cluster has a node for each of them. With few cores ``warm_over_job`` is therefore too favourable.
The restart of a whole job is never faster than the start of its trainer alone, so on separate nodes ``warm_over_job``
is at most ``warm_over_in_place``.

Prints a table for each cluster. The last line is one JSON object with all clusters (benchmarks/_provenance.py): seconds
of each arm, and ratios of medians with the range of the ratios of kills at equal moments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from rrl.benchmarks._ettr_faults import Kill
from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._quickstart import quickstart_with
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.launch import tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import STANDBY_ROLE, TRAINER, Incarnation, Verdict, gang_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.manager.model.queries import gang
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import TestRun, all_work, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 3
KILLS_PER_RUN = 2
"""Number of kills in each run: as many as the restarts in place that ``[recovery] per_node`` allows. 3 rounds have 6
kills per arm."""
KILL_WINDOW_S = 30.0
"""Length (s) of the interval from which the moment of a kill is drawn. Real failures are hours apart. A standby process
starts with low priority, and on few busy cores it is often not ready before the kill. So its start has more influence
here than in a real run."""
STEPS = 1_000_000
"""Number of steps of the job, which a run never reaches, because it is cancelled after its kills."""


class Arm(Struct, frozen=True):
    """One way to restart the trainer."""

    policy: str
    warm: bool
    """Whether the trainer has standby processes."""
    waits: bool = False
    """Whether each kill waits until the standby processes are ready."""


ARMS = {
    "warm": Arm("role", warm=True),
    "in_place": Arm("role", warm=False),
    "job": Arm("job", warm=False),
    "warm_ready": Arm("role", warm=True, waits=True),
}
STAGES = ("detect", "decide", "start", "work", "step")
UNCOMMITTED = 1
"""Number of steps without a commit that the trainer may have: the default of ``[roles.trainer] uncommitted``."""
MIN_COMMITS = UNCOMMITTED + 1
"""Number of commits after which a trainer has certainly committed a step that it has trained itself. Before such a
step, it commits restored steps."""
NODES = 6
KILL_TIMEOUT_S = 600.0
"""Maximum time (s) for a kill and the recovery from it."""


Continues = Callable[[RunDir, Incarnation], int]
"""Returns the step from which an incarnation of the trainer continues."""


class Restart(Struct):
    """One kill and the recovery from it; times (s) are by the clock of this machine, which the manager uses too."""

    kill: Kill
    standby_ready: bool
    """Whether each of the trainer's nodes had a ready standby process at the kill."""
    load: float
    """Load of this machine (1 minute) at the kill."""
    detected: float | None = None
    fenced: float | None = None
    joined: float | None = None
    worked: float | None = None
    committed: float | None = None
    incarnation: Incarnation | None = None
    """Incarnation of the trainer that continued."""
    lost_steps: int = 0
    """Upper limit of the number of lost steps: those that were trained before the kill and had to be trained again."""

    def stages(self) -> list[float]:
        times = [self.kill.at, self.detected, self.fenced, self.joined, self.worked, self.committed]
        known = [time for time in times if time is not None]
        assert len(known) == len(times), f"not recovered from: {self}"
        return [after - before for before, after in pairwise(known)]

    def seconds(self) -> float:
        return sum(self.stages())


def restored_step(run: RunDir, incarnation: Incarnation) -> int:
    """Return the step from which an incarnation of the trainer continues, according to its log."""
    log = run.log_file(tag_of(run.id, incarnation)).resolve().read_text()  # a promoted member's is a link
    matches = re.findall(rf"{re.escape(str(incarnation))} continues from the (?:snapshot|commit) of step (\d+)", log)
    assert matches, f"{incarnation} logs no step from which it continues:\n{log[-2000:]}"
    return int(matches[-1])


def follow(
    restart: Restart, events: Sequence[ev.Stamped], run: RunDir, continues: Continues = restored_step
) -> Restart:
    """Add the times of the recovery to ``restart``, from the events of its run; return ``restart``.

    The commit of a step that was restored from a snapshot does not end the recovery, because this step was trained
    before the kill.
    """
    step, restored = 0, 0
    for stamped in events:
        event, at = stamped.event, stamped.at
        match event:
            case ev.StepCommitted(_, number) if restart.joined is None:
                step = max(step, number)
            case ev.StepCommitted(_, number) if restart.worked is not None and number > restored:
                restart.committed = at
                restart.lost_steps = max(0, step + UNCOMMITTED - restored)
                break
            case _ if at >= restart.kill.at:
                _apply(restart, event, at)
                if restart.worked is not None and restart.incarnation is not None and not restored:
                    restored = continues(run, restart.incarnation)
            case _:
                pass
    return restart


def _apply(restart: Restart, event: Any, at: float) -> None:
    match event:
        case ev.FindingChanged(finding) if finding.verdict is Verdict.FAIL and restart.detected is None:
            restart.detected = at
        case ev.Decided(Fence(incarnation)) if gang_of(incarnation.replica) == TRAINER and restart.fenced is None:
            restart.fenced = at
        case ev.Decided() if restart.fenced is None:  # of the whole run
            restart.fenced = at
        case ev.Joined(incarnation) if gang_of(incarnation.replica) == TRAINER and restart.fenced is not None:
            restart.joined, restart.incarnation = at, Incarnation(gang_of(incarnation.replica), incarnation.number)
        case ev.FirstWorkDone(incarnation) if incarnation.replica == TRAINER and restart.joined is not None:
            restart.worked = restart.worked or at
        case _:
            pass


def job(arm: Arm, cluster: str, ranks: int) -> str:
    """Return the quickstart's job with the settings of this arm."""
    changes = (
        ('kind = "local"', f'kind = "{cluster}"'),
        ("steps = 300", f"steps = {STEPS}"),
        ("[roles.trainer]\n", f"[roles.trainer]\nranks = {ranks}\nwarm = {str(arm.warm).lower()}\n"),
    )
    return f'{quickstart_with(changes)}\n[recovery]\npolicy = "{arm.policy}"\nbackoff = "0s"\nfull_restarts = 100\n'


def kill(run: TestRun, arm: Arm, delay_s: float, continues: Continues = restored_step) -> Restart:
    """Kill the trainer ``delay_s`` seconds after all roles work, and wait until it has committed a step again."""
    run.wait(_works, KILL_TIMEOUT_S)
    time.sleep(delay_s)
    before = run.wait(lambda state: _works(state) and (not arm.waits or _standbys_ready(state)), KILL_TIMEOUT_S)
    trainer = before.replica(TRAINER)
    assert trainer.pid is not None
    made = Kill(time.time(), before.step, trainer.incarnation)
    os.kill(trainer.pid, signal.SIGKILL)
    restart = Restart(made, _standbys_ready(before), round(os.getloadavg()[0], 1))
    number = trainer.incarnation_number
    run.wait(
        lambda state: (again := state.replica(TRAINER)).incarnation_number > number and again.commits >= MIN_COMMITS,
        KILL_TIMEOUT_S,
    )
    return follow(restart, run.events(), run.run, continues)


def _works(state: State) -> bool:
    """Return whether all roles work, and the trainer has committed a step in its current incarnation."""
    trainer = state.replica(TRAINER)
    return all_work(state) and trainer.status is Status.JOINED and trainer.commits > 0


def _standbys_ready(state: State) -> bool:
    """Return whether each of the trainer's nodes has enough ready standby processes."""
    ready = [one.node for one in state.replicas.values() if one.role == STANDBY_ROLE and one.phase == "standby"]
    trainer_nodes = [one.node for one in gang(state, TRAINER)]
    return all(ready.count(home) >= trainer_nodes.count(home) for home in trainer_nodes)


@contextmanager
def launcher(cluster: str) -> Iterator[Any]:
    """Provide a function that submits a run, given its name and job.toml."""
    if cluster == "local":
        with temporary_runs_folder() as folder:
            yield lambda name, toml: submit_here(_make_folder(folder / name), toml)
    else:
        with SlurmLab.start(nodes=NODES) as lab:
            yield lambda name, toml: submit_on(lab, name, toml)


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def measure(cluster: str, ranks: int, rounds: int) -> dict[str, list[Restart]]:
    """Return the restarts by arm. In all arms they are ordered by round and kill."""
    results: dict[str, list[Restart]] = {name: [] for name in ARMS}
    with launcher(cluster) as submit:
        for turn in range(rounds):
            for name, arm in ARMS.items():
                run: TestRun = submit(f"{name}-{turn}", job(arm, cluster, ranks))
                for number in range(KILLS_PER_RUN):
                    delay_s = random.Random(f"{turn}:{number}").uniform(0.0, KILL_WINDOW_S)
                    restart = kill(run, arm, delay_s)
                    results[name].append(restart)
                    standby = "ready" if restart.standby_ready else "not ready"
                    print(
                        f"{cluster}: {name}-{turn}: {restart.seconds():.3f} s, standby process {standby}, "
                        f"load {restart.load}",
                        flush=True,
                    )
                assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(KILL_TIMEOUT_S) == 0
                run.wait_gone(KILL_TIMEOUT_S)
    return results


def figures(results: dict[str, list[Restart]]) -> dict[str, Any]:
    """Return the figures of one cluster."""
    seconds = {name: [restart.seconds() for restart in restarts] for name, restarts in results.items()}
    ready = sum(restart.standby_ready for restart in results["warm"])
    return {
        **{f"{name}_s": spread(values) for name, values in seconds.items()},
        "warm_over_job": _ratio(seconds["warm"], seconds["job"]),
        "warm_over_in_place": _ratio(seconds["warm"], seconds["in_place"]),
        "warm_kills_with_ready_standby": f"{ready} of {len(results['warm'])}",
        "steps_lost_max": max(restart.lost_steps for restarts in results.values() for restart in restarts),
    }


def _ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of the medians, and the range of the ratios of kills at equal moments."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    medians = round(statistics.median(values) / statistics.median(others), 3)
    return {"of_medians": medians, "range": [round(min(ratios), 3), round(max(ratios), 3)]}


def print_arms(cluster: str, results: dict[str, list[Restart]]) -> None:
    """Print a row for each arm: medians of the stages and of the whole time, and the range of the whole time."""
    rows = []
    for name, restarts in results.items():
        stages = [statistics.median(values) for values in zip(*(one.stages() for one in restarts), strict=True)]
        whole = [one.seconds() for one in restarts]
        rows.append(
            [
                name,
                str(len(restarts)),
                *(f"{stage:.3f}" for stage in stages),
                f"{statistics.median(whole):.3f}",
                f"{min(whole):.3f} to {max(whole):.3f}",
            ]
        )
    loads = [one.load for restarts in results.values() for one in restarts]
    print(f"{cluster}: {os.cpu_count()} cores, load {min(loads)} to {max(loads)} at the kills; medians, s")
    print_table(["arm", "kills", *STAGES, "total", "range of total"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("local", "slurm"), action="append", help="default: both")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of the trainer")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs per arm, with {KILLS_PER_RUN} kills each")
    options = parser.parse_args()
    clusters = options.cluster or ("local", "slurm")
    check_requirements("restart", without=() if "slurm" in clusters else (Need.SLURM,))
    found: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for cluster in clusters:
        results = measure(cluster, options.ranks, options.rounds)
        print_arms(cluster, results)
        found[cluster] = figures(results)
        samples += [
            {
                "cluster": cluster,
                "arm": name,
                "seconds": round(restart.seconds(), 4),
                "stages": dict(zip(STAGES, (round(stage, 4) for stage in restart.stages()), strict=True)),
                **{
                    key: value
                    for key, value in asdict(restart).items()
                    if key in ("standby_ready", "load", "lost_steps")
                },
            }
            for name, restarts in results.items()
            for restart in restarts
        ]
    raw = raw_samples("restart", samples)
    print(json.dumps({"clusters": found, "ranks": options.ranks, **provenance(), "raw": str(raw)}))


if __name__ == "__main__":
    main()
