"""Measures the time from a kill of a rollout until its replacement generates.

Runs the quickstart's real roles (torch, transformers, reasoning-gym) on this machine's local cluster, and kills
each rollout once by SIGKILL; nothing informs the run of the kills. A kill follows ``KILL_INTERVAL_S`` after all roles
work. The replacement is a new process on the same node. ``benchmarks/restart.py`` has the same for the trainer.

The stages are read from the journal: detect (kill → finding), decide (→ fenced), start (→ joined), weights (→ holds
weights), work (→ first tokens).

Prints all samples and a table. The last line is a JSON object: the median of each stage and of the whole, in s, and the
range of the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from itertools import pairwise

from msgspec import Struct

from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._quickstart import quickstart_with
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.types import ReplicaId, Verdict, replica_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence
from rrl.tests.support.runs import TestRun, all_work, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 3
"""Number of runs, with one kill of each rollout in each run."""
KILL_INTERVAL_S = 30.0
"""Time (s) from the moment at which all roles work, including the previous replacement, to the next kill."""
KILL_TIMEOUT_S = 600.0
READ_INTERVAL_S = 2.0
"""Time (s) between two reads of the whole journal. It is long, so that the reads do not load the machine during a
recovery."""
ROLLOUTS = (replica_id("rollout", 0), replica_id("rollout", 1))
STAGES = ("detect", "decide", "start", "weights", "work", "total")


class Recovery(Struct):
    """One kill, and the times (s) of its stages in the order of :data:`STAGES`."""

    replica: ReplicaId
    stages: list[float]


def job() -> str:
    """Return the quickstart's job without planned faults and with endless steps."""
    toml = quickstart_with([("steps = 300", "steps = 1_000_000")])
    return f'{toml}\n[recovery]\nbackoff = "0s"\n'


def kill(run: TestRun, victim: ReplicaId) -> Recovery:
    """Let the run work for a while, kill the replica, and return the recovery once the replacement has worked."""
    run.wait(lambda state: state.step >= 1 and all_work(state), KILL_TIMEOUT_S)
    time.sleep(KILL_INTERVAL_S)
    before = run.wait(all_work, KILL_TIMEOUT_S).replica(victim)
    assert before.pid is not None
    killed = time.time()
    os.killpg(before.pid, signal.SIGKILL)
    number = before.incarnation_number
    run.wait(lambda s: s.replica(victim).incarnation_number > number and all_work(s), KILL_TIMEOUT_S)
    while (stages := _stages(run, victim, number, killed)) is None:
        assert time.time() < killed + KILL_TIMEOUT_S, f"{victim} does not work again"
        time.sleep(READ_INTERVAL_S)
    return Recovery(victim, stages)


def _stages(run: TestRun, victim: ReplicaId, number: int, killed: float) -> list[float] | None:
    """Return the times (s) of the stages after the kill of an incarnation; None if its recovery is not over."""
    times: dict[str, float] = {}
    for stamped in run.events():
        event, at = stamped.event, stamped.at
        stage = ""
        match event:
            case ev.FindingChanged(finding) if finding.verdict is Verdict.FAIL and finding.incarnation is not None:
                stage = "detect" if finding.incarnation.replica == victim else ""
            case ev.Decided(Fence(incarnation)) if incarnation.replica == victim and incarnation.number == number:
                stage = "decide"
            case ev.Joined(incarnation) if incarnation.replica == victim and incarnation.number > number:
                stage = "start"
            case ev.VersionAvailable(incarnation) if incarnation.replica == victim and incarnation.number > number:
                stage = "weights"
            case ev.FirstWorkDone(incarnation) if incarnation.replica == victim and incarnation.number > number:
                stage = "work"
        if stage and at >= killed:
            times.setdefault(stage, at)
    if any(stage not in times for stage in STAGES[:-1]):
        return None
    marks = [killed, *(times[stage] for stage in STAGES[:-1])]
    return [*(after - earlier for earlier, after in pairwise(marks)), max(marks) - killed]


def measure(rounds: int) -> list[Recovery]:
    """Run ``rounds`` runs, and return their recoveries."""
    recoveries: list[Recovery] = []
    with temporary_runs_folder() as folder:
        for turn in range(rounds):
            place = folder / str(turn)
            place.mkdir()
            run = submit_here(place, job())
            for victim in ROLLOUTS:
                recoveries.append(kill(run, victim))
                print(json.dumps({"round": turn, **_shown(recoveries[-1])}), flush=True)
            assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(KILL_TIMEOUT_S) == 0
    return recoveries


def _shown(recovery: Recovery) -> dict[str, object]:
    stages = {stage: round(time_s, 3) for stage, time_s in zip(STAGES, recovery.stages, strict=True)}
    return {"replica": recovery.replica, **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    check_requirements("rollout_recovery")
    recoveries = measure(options.rounds)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; local cluster, torch engine; medians, s")
    medians = [statistics.median(values) for values in zip(*(one.stages for one in recoveries), strict=True)]
    ends = [one.stages[-1] for one in recoveries]
    print_table(["kills", *STAGES], [[str(len(recoveries)), *(f"{median:.3f}" for median in medians)]])
    result = {f"{stage}_s": round(median, 3) for stage, median in zip(STAGES, medians, strict=True)}
    print(json.dumps({**result, "range_s": [round(min(ends), 3), round(max(ends), 3)], **provenance()}))


if __name__ == "__main__":
    main()
