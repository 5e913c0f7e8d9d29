"""Measures how much later a failure is found if the manager is killed together with what fails.

A run of light roles (no torch) with the default limits fails in three cases, one after the other: its trainer is
stopped by SIGSTOP, all processes of a rollout's step are killed by SIGKILL, and the node of a rollout is lost with all
its processes (on Slurm, with its slurmd). In the arm ``living`` the manager lives. In the arm ``takeover`` it is killed
by SIGKILL at the same moment, and the next manager starts as in production: on Slurm the manager's next job, on the
local cluster ``rrl manage``. The arms take turns, run by run.

The clock ends when the journal has the first FAIL finding about what failed, or the first fence of it. It starts with
the failure or, in the arm ``takeover``, with the first record of the new manager. So the time until the lease of the
dead manager is free (and on Slurm, until its next job starts) is not inside the clock. The figure of a case is the
difference of the medians of its arms. ``extra_detect_s`` is the largest figure of the cases, for each cluster (bars:
2 s on the local cluster, 5 s on Slurm). ``false_blame`` counts FAIL findings about, and charged fences of, anything
that had not failed (bar: 0).

Prints a line for each failure. The last line is one JSON object (benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct, to_builtins

from rrl.benchmarks._provenance import provenance, raw_samples
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.core.launch import LAUNCH_ENV, read_launch
from rrl.core.types import TRAINER, Incarnation, NodeName, Verdict, replica_id
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, RestartAll
from rrl.manager.model.state import Replica, State
from rrl.manager.storage.lease import holder
from rrl.tests.support.runs import TestRun, joined_incarnations, light_job, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm.processes import Process, kill_all, running_processes
from rrl.tests.support.supervisor import temporary_runs_folder

ROUNDS = 3
ARMS = ("living", "takeover")
CASES = ("stopped trainer", "dead rollout", "crashed node")
"""The failures in their order in each run. The node is lost last, because the run has one spare node."""
ROLLOUTS = (replica_id("rollout", 0), replica_id("rollout", 1))
STEPS = 1_000_000
"""Number of steps of the job, which a run never reaches."""
NODES = 7
TIMEOUT_S = 300.0
"""Maximum time (s) from a failure until its replica is replaced."""
SETTLE_S = 5.0
"""Time (s) for which all replicas work before the next failure."""


class Sample(Struct, frozen=True):
    """One failure."""

    cluster: str
    arm: str
    case: str
    round: int
    detect_s: float
    """Time (s) from the failure, or from the first record of the new manager, to the finding or fence."""
    away_s: float
    """Time (s) from the kill of the manager to the first record of the next manager; 0 if the manager lives."""
    found_by: str
    """Detector and first line of evidence of the finding, or evidence of the fence."""
    blamed: tuple[str, ...]
    """What was found to have failed, or was fenced as failed, although it had not failed."""


class Site(Struct, frozen=True):
    """A cluster to which runs are submitted."""

    submit: Callable[[str], TestRun]
    crash: Callable[[TestRun, NodeName], None]
    """Kill all processes of a node."""
    manager_node: Callable[[TestRun], str]
    """Return the node of the manager, which must outlive the loss of a node in the arm ``living``; empty if it has
    none."""
    next_manager: Callable[[TestRun], AbstractContextManager[object]]
    """Start the next manager of a run, unless the cluster does so."""


def job(cluster: str) -> str:
    """Return the job of light roles without its ``[limits]``, so that the default limits apply."""
    return light_job(cluster, STEPS, warm=False, step_seconds=0.1).partition("[limits]")[0]


def measure(site: Site, cluster: str, arm: str, number: int) -> list[Sample]:
    """Run the cases of one round of an arm in one run."""
    run = site.submit(f"{arm}-{number}")
    samples = []
    with ExitStack() as managers:
        for case in CASES:
            joined_incarnations(run)
            time.sleep(SETTLE_S)
            before = joined_incarnations(run)
            state = run.state()
            away = [one for one in map(state.replica, ROLLOUTS) if one.node != site.manager_node(run)]
            victim = state.replica(TRAINER) if case == "stopped trainer" else away[-1]
            failed = {victim.incarnation}
            if case == "crashed node":
                failed |= {incarnation for incarnation, _, node in before.values() if node == victim.node}
            hit = time.time()
            if arm == "takeover":
                managing = holder(run.run)
                assert managing is not None
                os.kill(managing.pid, signal.SIGKILL)
            fail(site, run, case, victim)
            if arm == "takeover":
                managers.enter_context(site.next_manager(run))
            run.wait(partial(_is_replaced, victim), TIMEOUT_S)
            joined_incarnations(run)
            node = victim.node if case == "crashed node" else None
            samples.append(_sample(run.events(), (cluster, arm, case, number), hit, failed, node))
            print(*to_builtins(samples[-1]).values(), sep="  ", flush=True)
        assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(TIMEOUT_S) == 0
    run.wait_end(TIMEOUT_S)
    return samples


def _is_replaced(victim: Replica, state: State) -> bool:
    return state.replica(victim.id).incarnation_number > victim.incarnation_number


def fail(site: Site, run: TestRun, case: str, victim: Replica) -> None:
    """Cause the failure of a case."""
    pid, node, step = victim.pid, victim.node, victim.step
    assert pid is not None
    assert node is not None
    assert step is not None
    if case == "stopped trainer":
        os.kill(pid, signal.SIGSTOP)
    elif case == "dead rollout":
        kill(run, lambda file: file == run.run.launch_file(step))
    else:
        site.crash(run, node)


def kill(run: TestRun, concerned: Callable[[Path], bool]) -> None:
    """Kill all processes of the steps whose launch files are ``concerned``, so that none of them leaves a record."""
    kill_all(
        lambda: {
            pid: one
            for pid, one in running_processes().items()
            if (file := _launch_file(one)).parent == run.run.steps and concerned(file)
        }
    )


def _launch_file(process: Process) -> Path:
    """Return the launch file of the step to which a process belongs; an empty path if it belongs to none."""
    named = process.command.rpartition(" ")[2] if process.comm != "srun" else ""
    return Path(process.environ.get(LAUNCH_ENV) or (named if named.endswith(".launch") else ""))


def _sample(
    events: Sequence[ev.Stamped],
    named: tuple[str, str, str, int],
    hit: float,
    failed: set[Incarnation],
    node: NodeName | None,
) -> Sample:
    """Return the sample of a failure at the time ``hit`` (s) of the incarnations ``failed`` and of a node."""
    began, found, blamed = hit, None, list[str]()
    for stamped in events:
        if stamped.at < hit:
            continue
        match stamped.event:
            case ev.ManagerStarted():
                began = stamped.at
            case ev.FindingChanged(finding) if finding.verdict is Verdict.FAIL:
                text = f"{finding.detector}: {finding.evidence[0].text}"
                if finding.incarnation in failed or (node is not None and finding.node == node):
                    found = found or (stamped.at, text)
                else:
                    blamed.append(f"{finding.incarnation or finding.node}: {text}")
            case ev.Decided(RestartAll() | Fence() as action):
                for fence in action.fences if isinstance(action, RestartAll) else (action,):
                    if fence.incarnation in failed:
                        found = found or (stamped.at, f"fence: {fence.why.evidence[0]}")
                    elif fence.charged:
                        blamed.append(f"fence of {fence.incarnation}: {fence.why.evidence[0]}")
            case _:
                pass
    assert found is not None, f"{named}: not found"
    return Sample(*named, round(found[0] - began, 3), round(began - hit, 3), found[1], tuple(blamed))


# ── clusters ───────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def local() -> Iterator[Site]:
    def submit(name: str) -> TestRun:
        (folder / name).mkdir()
        return submit_here(folder / name, job("local"))

    def crash(run: TestRun, node: NodeName) -> None:
        kill(run, lambda file: read_launch(file).node == node)

    def next_manager(run: TestRun) -> AbstractContextManager[object]:
        return run.call("manage", run.run.id, stdout=subprocess.DEVNULL)

    with temporary_runs_folder() as folder:
        yield Site(submit, crash, lambda _: "", next_manager)


@contextmanager
def slurm() -> Iterator[Site]:
    def submit(name: str) -> TestRun:
        lab.clear()
        return submit_on(lab, name, job("slurm"))

    def manager_node(run: TestRun) -> str:
        return lab.slurm("squeue", "-h", "-t", "RUNNING", "-n", f"{run.run.id}.manager", "-o", "%N").strip()

    with SlurmLab.start(nodes=NODES) as lab:
        yield Site(submit, lambda _, node: lab.crash(node), manager_node, nullcontext)


SITES: Mapping[str, Callable[[], AbstractContextManager[Site]]] = {"local": local, "slurm": slurm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=tuple(SITES), action="append")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    clusters = options.cluster or tuple(SITES)
    check_requirements("takeover", without=() if "slurm" in clusters else (Need.SLURM,))
    samples: list[Sample] = []
    raw = None
    for cluster in clusters:
        with SITES[cluster]() as site:
            for number in range(options.rounds):
                for arm in ARMS:
                    samples += measure(site, cluster, arm, number)
                    raw = raw_samples("takeover", to_builtins(samples), raw)
    print(json.dumps({**headline(samples), **provenance(), "raw": str(raw)}))


def headline(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the largest extra time of the cases, by cluster, and what they are computed from."""
    extra: dict[str, dict[str, float]] = {}
    for cluster, case in dict.fromkeys((one.cluster, one.case) for one in samples):
        living, takeover = (
            median(one.detect_s for one in samples if (one.cluster, one.case, one.arm) == (cluster, case, arm))
            for arm in ARMS
        )
        extra.setdefault(cluster, {})[case] = round(takeover - living, 3)
    return {
        "extra_detect_s": {cluster: max(cases.values()) for cluster, cases in extra.items()},
        "false_blame": sum(len(one.blamed) for one in samples),
        "extra_by_case_s": extra,
    }


if __name__ == "__main__":
    main()
