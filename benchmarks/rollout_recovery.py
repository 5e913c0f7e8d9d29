"""Measures the time from a kill of a rollout until its replacement generates, with and without a preloaded process.

Runs the quickstart's real roles (torch, transformers, reasoning-gym) on this machine's local cluster. The two arms are
interleaved run by run. ``preloaded`` is the default: each node of a rollout keeps a process that has imported its
packages (``[roles.rollout] preload``), and the trainer's nodes keep standby processes (``warm``). ``cold`` has neither:
each replacement is a new process. This program kills first each rollout once, then the trainer, by SIGKILL; nothing
informs the run of the kills. A kill follows ``KILL_INTERVAL_S`` after all roles work, whether or not a preloaded
process is ready by then. A rollout without a ready preloaded process starts cold, and counts in its arm as well.

The stages are read from the journal: detect (kill → finding), decide (→ fenced), start (→ joined), weights (→ holds
weights), work (→ first tokens; for the trainer: → first part of a training step). The processor time and the memory of
the preloaded processes at rest are read from /proc before the end of each run.

Prints all samples and a table. The last line is a JSON object: the medians of the arms (``preloaded_s``, ``cold_s``),
their ratio ``preloaded_over_cold`` (bar: at most 0.25), and how many of the ``kills`` in the arm ``preloaded`` a
preloaded process answered (``promoted``). ``trainer_*`` are the same figures of the trainer. ``ready_s`` is the median
time from the launch of a preloaded process until it is ready, at low priority beside the working roles. A preloaded
process at rest uses ``rest_core_share`` (share of a core), ``rest_pss_mb`` (proportional share of memory) and
``rest_private_mb``.
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
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._quickstart import quickstart_with
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.phases import STANDBY
from rrl.core.processes import stat_fields
from rrl.core.types import TRAINER, Incarnation, ReplicaId, Verdict, is_preloaded, replica_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Launch
from rrl.manager.model.state import State, Status
from rrl.tests.support.runs import TestRun, all_work, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 3
"""Number of runs of each arm, with one kill of each rollout and one of the trainer in each run."""
KILL_INTERVAL_S = 30.0
"""Time (s) from the moment at which all roles work, including the previous replacement, to the next kill."""
REST_S = 20.0
"""Time (s) over which the processor time at rest is counted."""
KILL_TIMEOUT_S = 600.0
READ_INTERVAL_S = 2.0
"""Time (s) between two reads of the whole journal. It is long, so that the reads do not load the machine during a
recovery."""
ROLLOUTS = (replica_id("rollout", 0), replica_id("rollout", 1))
ARMS = {
    "preloaded": {"[roles.rollout]\n": "[roles.rollout]\npreload = true\n"},
    "cold": {
        "[roles.rollout]\n": "[roles.rollout]\npreload = false\n",
        "[roles.trainer]\n": "[roles.trainer]\nwarm = false\n",
    },
}
STAGES = ("detect", "decide", "start", "weights", "work", "total")


class Recovery(Struct):
    """One kill, and the times (s) of its stages in the order of :data:`STAGES`."""

    arm: str
    replica: ReplicaId
    promoted: bool
    stages: list[float]


class Rest(Struct):
    """The processor time and memory of one preloaded process while it waits."""

    core_share: float
    pss_mb: float
    private_mb: float


def job(arm: str) -> str:
    """Return the quickstart's job with the settings of this arm, without planned faults and with endless steps."""
    toml = quickstart_with({"steps = 300": "steps = 1_000_000", **ARMS[arm]}.items())
    return f'{toml}\n[recovery]\nbackoff = "0s"\n'


def kill(run: TestRun, arm: str, victim: ReplicaId) -> Recovery:
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
    return Recovery(arm, victim, run.state().replica(victim).promoted_from is not None, stages)


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


def at_rest(run: TestRun) -> list[Rest]:
    """Wait until every rollout has a preloaded process, and measure what each process uses at rest."""

    def waiting(state: State) -> list[int]:
        ready = (r for r in state.replicas.values() if is_preloaded(r.id) and r.status is Status.JOINED)
        return [r.pid for r in ready if r.phase == STANDBY and r.pid is not None]

    pids = waiting(run.wait(lambda state: len(waiting(state)) == len(ROLLOUTS) and all_work(state), KILL_TIMEOUT_S))
    before = [_cpu_s(pid) for pid in pids]
    begun = time.monotonic()
    time.sleep(REST_S)
    seconds = time.monotonic() - begun
    rests = []
    for pid, cpu_s in zip(pids, before, strict=True):
        lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        kib = {fields[0]: int(fields[1]) for fields in lines}
        private = kib["Private_Clean:"] + kib["Private_Dirty:"]
        rests.append(Rest((_cpu_s(pid) - cpu_s) / seconds, kib["Pss:"] * 1024 / 1e6, private * 1024 / 1e6))
    return rests


def ready_times(run: TestRun) -> list[float]:
    """Return the time (s) that each preloaded process of the run took from its launch until it was ready."""
    launched: dict[Incarnation, float] = {}
    times = []
    for stamped in run.events():
        match stamped.event:
            case ev.Intended(Launch(incarnation)) if is_preloaded(incarnation.replica):
                launched[incarnation] = stamped.at
            case ev.Joined(incarnation) if incarnation in launched:
                times.append(stamped.at - launched.pop(incarnation))
    return times


def _cpu_s(pid: int) -> float:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int) -> tuple[list[Recovery], list[Rest], list[float]]:
    """Run all arms, and return three lists for all runs.

    The lists are the recoveries, what each preloaded process used at rest, and the time (s) that each preloaded process
    took until it was ready.
    """
    recoveries: list[Recovery] = []
    rests: list[Rest] = []
    ready: list[float] = []
    with temporary_runs_folder() as folder:
        for turn in range(rounds):
            for arm in ARMS:
                place = folder / f"{arm}-{turn}"
                place.mkdir()
                run = submit_here(place, job(arm))
                for victim in (*ROLLOUTS, TRAINER):
                    recoveries.append(kill(run, arm, victim))
                    print(json.dumps({"round": turn, **_shown(recoveries[-1])}), flush=True)
                if arm == "preloaded":
                    rests += at_rest(run)
                    ready += ready_times(run)
                assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(KILL_TIMEOUT_S) == 0
    return recoveries, rests, ready


def _shown(recovery: Recovery) -> dict[str, object]:
    stages = {stage: round(time_s, 3) for stage, time_s in zip(STAGES, recovery.stages, strict=True)}
    return {"arm": recovery.arm, "replica": recovery.replica, "promoted": recovery.promoted, **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    check_requirements("rollout_recovery")
    recoveries, rests, ready = measure(options.rounds)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; local cluster, torch engine; medians, s")
    rows, totals, result = [], {}, {}
    for prefix, victims in (("", ROLLOUTS), ("trainer_", (TRAINER,))):
        for arm in ARMS:
            chosen = [one for one in recoveries if one.arm == arm and one.replica in victims]
            medians = [statistics.median(values) for values in zip(*(one.stages for one in chosen), strict=True)]
            ends = [one.stages[-1] for one in chosen]
            spread = f"{min(ends):.3f} to {max(ends):.3f}"
            rows.append([victims[0].partition("/")[0], arm, str(len(chosen)), *(f"{m:.3f}" for m in medians), spread])
            totals[arm] = medians[-1]
            result[f"{prefix}{arm}_s"] = round(medians[-1], 3)
        result[f"{prefix}preloaded_over_cold"] = round(totals["preloaded"] / totals["cold"], 3)
        ours = [one for one in recoveries if one.arm == "preloaded" and one.replica in victims]
        result |= {f"{prefix}promoted": sum(one.promoted for one in ours), f"{prefix}kills": len(ours)}
    print_table(["killed", "arm", "kills", *STAGES, "range of total"], rows)
    print(json.dumps({"rest": [asdict(rest) for rest in rests], "ready_s": [round(time_s, 1) for time_s in ready]}))
    result |= {
        "ready_s": round(statistics.median(ready), 1),
        "rest_core_share": round(statistics.median(rest.core_share for rest in rests), 4),
        "rest_pss_mb": round(statistics.median(rest.pss_mb for rest in rests)),
        "rest_private_mb": round(statistics.median(rest.private_mb for rest in rests)),
    }
    print(json.dumps(result | provenance()))


if __name__ == "__main__":
    main()
