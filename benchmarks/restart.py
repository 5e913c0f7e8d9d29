"""Measures the time from a kill of the trainer to the commit of its next optimizer step, with three ways to restart.

The three arms are interleaved in rounds, with the same machine, cluster and job (the quickstart's real torch roles, a
trainer of one or more ranks). ``rrl inject`` kills the trainer's process group by SIGKILL. ``warm``: policy "role" with
standby processes. ``in_place``: policy "role" without standby processes. ``job``: policy "job", in which every role
restarts in place from the last checkpoint, as RobustRL configured ByteRobust (docs/sources.md). Fenced processes are
killed without grace in all arms.

The stages are read from the journal: detect (kill → finding), decide (→ fenced), start (→ all ranks have joined), load
(→ training), step (→ the next step is committed). ``steps_lost_max`` is the number of steps that were lost: up to K
steps may have been trained beyond the committed step, and those beyond the step from which the trainer continues,
according to its log, count as lost. Prints a table, and one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from rrl.benchmarks._quickstart import quickstart_with
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks.checkpoint import measure as measure_checkpoint
from rrl.core.launch import tag_of
from rrl.core.run_dir import RunDir
from rrl.core.types import STANDBY_ROLE, TRAINER, Incarnation, Verdict, gang_of
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, InjectFault
from rrl.manager.model.queries import gang
from rrl.manager.model.state import State
from rrl.manager.storage.journal import replay
from rrl.tests.support.runs import TestRun, all_work, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 3
KILLS_PER_RUN = 2
"""Number of kills in each run. The arms are interleaved run by run, with 6 kills per arm."""
STEPS_BETWEEN_KILLS = 20
"""Minimum number of steps before a kill."""
STEPS = 1_000_000
"""Number of steps of the job, which a run never reaches, because it is cancelled after its kills."""
ARMS = {
    "warm": ('policy = "role"', "warm = true"),
    "in_place": ('policy = "role"', "warm = false"),
    "job": ('policy = "job"', "warm = false"),
}
STAGES = ("detect", "decide", "start", "load", "step")
UNCOMMITTED = 1
"""K, the default of ``[roles.trainer] uncommitted``."""
NODES = 6
KILL_TIMEOUT_S = 600.0
"""Seconds for a kill and the recovery from it."""


class Restart(Struct):
    """One kill and the recovery from it, with times of the manager's clock (s)."""

    killed: float
    step: int
    """Newest committed step at the kill."""
    detected: float | None = None
    fenced: float | None = None
    joined: float | None = None
    training: float | None = None
    committed: float | None = None
    incarnation: Incarnation | None = None
    """Incarnation of the trainer that continued."""
    lost_steps: int = 0
    """Steps that may have been trained before the kill and were trained again."""

    def stages(self) -> list[float]:
        times = [self.killed, self.detected, self.fenced, self.joined, self.training, self.committed]
        known = [time for time in times if time is not None]
        assert len(known) == len(times), f"not recovered from: {self}"
        return [after - before for before, after in pairwise(known)]


def restarts(run: RunDir) -> list[Restart]:
    """Return the restarts of the trainer in order, as recorded in the journal."""
    result: list[Restart] = []
    current: Restart | None = None
    step = 0
    for stamped in replay(run):
        event, at = stamped.event, stamped.at
        match event:
            case ev.Intended(InjectFault()):
                current = Restart(at, step)
                result.append(current)
            case ev.StepCommitted(_, number):
                step = max(step, number)
                if current is not None and current.training is not None:
                    current.committed = at
                    assert current.incarnation is not None
                    current.lost_steps = max(0, current.step + UNCOMMITTED - restored_step(run, current.incarnation))
                    current = None
            case _ if current is not None:
                _apply(current, event, at)
            case _:
                pass
    return result


def restored_step(run: RunDir, incarnation: Incarnation) -> int:
    """Return the step from which an incarnation of the trainer continues, according to its log."""
    log = run.log_file(tag_of(run.id, incarnation)).read_text()
    matches = re.findall(rf"{re.escape(str(incarnation))} continues from the (?:snapshot|commit) of step (\d+)", log)
    assert matches, f"{incarnation} does not say what it goes on from:\n{log[-2000:]}"
    return int(matches[-1])


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
        case ev.PhaseEntered(incarnation, "train") if incarnation.replica == TRAINER and restart.joined is not None:
            restart.training = restart.training or at
        case _:
            pass


def job(arm: str, cluster: str, ranks: int) -> str:
    """Return the quickstart's job with the settings of this arm."""
    policy, warm = ARMS[arm]
    changes = (
        ('kind = "local"', f'kind = "{cluster}"'),
        ("steps = 300", f"steps = {STEPS}"),
        ("[roles.trainer]\n", f"[roles.trainer]\nranks = {ranks}\n{warm}\n"),
        ("[limits]\n", '[limits]\nheartbeat = "200ms"\n'),
    )
    toml = quickstart_with(changes)
    return f'{toml}\n[recovery]\n{policy}\nbackoff = "0s"\nfull_restarts = 100\n[faults]\nallow = true\n'


def kill(run: TestRun, arm: str) -> None:
    """Wait until all roles work and standby processes are ready, kill the trainer, and wait until it trains again."""
    begun = run.wait(lambda state: state.step >= 1, KILL_TIMEOUT_S).step
    before = run.wait(
        lambda state: state.step >= begun + STEPS_BETWEEN_KILLS and all_work(state) and _standbys_ready(state, arm),
        KILL_TIMEOUT_S,
    )
    injection = run.call("inject", run.run.id, "kill", "--target", TRAINER, "--wait", stdout=subprocess.DEVNULL)
    assert injection.wait(KILL_TIMEOUT_S) == 0
    killed_number = before.replica(TRAINER).incarnation_number
    run.wait(
        lambda state: state.replica(TRAINER).incarnation_number > killed_number and state.replica(TRAINER).commits > 0,
        KILL_TIMEOUT_S,
    )


def _standbys_ready(state: State, arm: str) -> bool:
    """Return whether each of the trainer's nodes has enough ready standby processes, if the arm uses them."""
    ready = [one.node for one in state.replicas.values() if one.role == STANDBY_ROLE and one.phase == "standby"]
    trainer_nodes = [one.node for one in gang(state, TRAINER)]
    return arm != "warm" or all(ready.count(home) >= trainer_nodes.count(home) for home in trainer_nodes)


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
    """Return the restarts by arm."""
    results: dict[str, list[Restart]] = {arm: [] for arm in ARMS}
    with launcher(cluster) as submit:
        for turn in range(rounds):
            for arm in ARMS:
                run: TestRun = submit(f"{arm}-{turn}", job(arm, cluster, ranks))
                for _ in range(KILLS_PER_RUN):
                    kill(run, arm)
                assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(KILL_TIMEOUT_S) == 0
                recovered = [one for one in restarts(run.run) if one.committed is not None]
                assert len(recovered) == KILLS_PER_RUN, (
                    f"{arm}: {len(recovered)} of {KILLS_PER_RUN} kills were recovered from"
                )
                results[arm] += recovered
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", choices=("local", "slurm"), action="append")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    clusters = options.cluster or ("local", "slurm")
    check_requirements("restart", without=() if "slurm" in clusters else (Need.SLURM,))
    last: dict[str, float] = {}
    for cluster in clusters:
        results = measure(cluster, options.ranks, options.rounds)
        medians: dict[str, float] = {}
        rows = []
        for arm, arm_restarts in results.items():
            stages = [statistics.median(values) for values in zip(*(r.stages() for r in arm_restarts), strict=True)]
            medians[arm] = statistics.median(sum(one.stages()) for one in arm_restarts)
            rows.append([arm, str(len(arm_restarts)), *(f"{stage:.3f}" for stage in stages), f"{medians[arm]:.3f}"])
        print(f"{cluster}: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.ranks} ranks; medians, s")
        print_table(["arm", "kills", *STAGES, "total"], rows)
        lost_steps = max(one.lost_steps for arm_restarts in results.values() for one in arm_restarts)
        last = {
            "warm_s": round(medians["warm"], 3),
            "in_place_s": round(medians["in_place"], 3),
            "job_s": round(medians["job"], 3),
            "warm_over_job": round(medians["warm"] / medians["job"], 3),
            "steps_lost_max": lost_steps,
        }
    print(json.dumps(last | measure_checkpoint()))


if __name__ == "__main__":
    main()
