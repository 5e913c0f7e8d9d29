"""Measures what ``rrl report`` costs for a run of 10,000 steps and 64 replicas: seconds, and the size of its page.

The program writes the journal of such a run: a trainer, a store, a reward role and 61 rollouts with eight GPUs each.
Every step has three phases and a commit of the trainer with 24 metrics, and a weight version and a phase of each
rollout. A real run with long steps has about as many records. The clocks of all processes are recorded with every step,
too. A rollout fails in every hundredth step, and the trainer in every five hundredth. ``table_s``, ``page_s`` and
``json_s`` are medians of whole processes (bar: 5 s), ``page_MB`` is the size of the HTML file (bar: 3 MB). The last
line is one JSON object (benchmarks/_provenance.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rrl.benchmarks._long_run import METRICS
from rrl.benchmarks._provenance import last_line
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus
from rrl.core.launch import ExitReason
from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import Cause, Evidence, Finding, Incarnation, NodeName, Outcome, Remedy, ReplicaId, Verdict, Version
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Finish, Launch, Request, Rung, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.storage.journal import Journal
from rrl.tests.support.cli.story import BEGAN, wide
from rrl.tests.support.runs import RRL

RUN = "wide-1120-064114"
STEPS = 10_000
REPLICAS = 64
STEP_S = 42.0
"""Seconds of a step, about as in RobustRL's runs (docs/sources.md)."""
RESTART_S = 173.0
"""Seconds until a failed replica works again. RobustRL's trainer takes this time (docs/sources.md)."""
ROLLOUT_FAILS_EVERY, TRAINER_FAILS_EVERY = 100, 500
ROUNDS = 3
BARS = {"table_s": 5.0, "page_s": 5.0, "json_s": 5.0, "page_MB": 3.0}
_ROLES = {"trajectories": 1, "reward": 1, "trainer": 1, "rollout": REPLICAS - 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="Number of steps of the run.")
    parser.add_argument("--keep", type=Path, help="Folder in which the run and its page are kept.")
    options = parser.parse_args()
    check_requirements("report")
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        records = write_run(root, options.steps)
        samples = measure(root)
    figures = {name: round(statistics.median(values), 3) for name, values in samples.items()}
    rows = [
        (name, f"{figures[name]:.2f}", f"{'under' if figures[name] < bar else 'OVER'} {bar:g}")
        for name, bar in BARS.items()
    ]
    print_table(("figure", "measured", "bar"), rows)
    print(f"{records} records; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(last_line("report", figures, samples))


def measure(root: Path) -> dict[str, list[float]]:
    """Run the commands in turn; return by figure the seconds of each call, and the size of the page (MB)."""
    html = root / "report.html"
    argv = {"table_s": [], "page_s": ["--html", str(html)], "json_s": ["--json"]}
    taken: dict[str, list[float]] = {name: [] for name in argv}
    environment = os.environ | {"RRL_RUNS_DIR": str(root)}
    for _ in range(ROUNDS):
        for name, options in argv.items():
            began = time.perf_counter()
            subprocess.run([RRL, "report", RUN, *options], env=environment, stdout=subprocess.DEVNULL, check=True)
            taken[name].append(time.perf_counter() - began)
    return {**taken, "page_MB": [html.stat().st_size / 1e6]}


def write_run(root: Path, steps: int) -> int:
    """Write the journal of the run, and return the number of its records."""
    run = RunDir(root / RUN)
    run.create()
    journal, state, seq = Journal(run, 1), None, 0
    for at, event in _events(steps):
        seq += 1
        stamped = ev.Stamped(seq, BEGAN + at, 1, event)
        journal.append(stamped)
        if seq < REPLICAS * 5:  # every segment begins with this early state, because only the last segment is read
            state = fold(state, stamped)
        if journal.full:
            assert isinstance(state, State)
            journal.flush()
            journal.rotate(msgspec.structs.replace(state, seq=seq, at=BEGAN + at))
    journal.close()
    return seq


def _job(steps: int) -> RunSpec:
    small = wide()
    roles = tuple(msgspec.structs.replace(role, replicas=_ROLES[role.name]) for role in small.roles)
    return msgspec.structs.replace(small, steps=steps, roles=roles)


def _events(steps: int) -> Iterator[tuple[float, ev.Event]]:
    """Yield the events of the whole run with their times (s since its beginning)."""
    job = _job(steps)
    yield 0.0, ev.RunStarted(RUN, job)
    yield 0.0, ev.ManagerStarted("login1", 4711)
    nodes = tuple(NodeName(f"n{index}") for index in range(1, REPLICAS + 1))
    request = AllocationRequest(f"{RUN}.pool", len(nodes), job.node_groups[0].node, 1e7)
    yield 0.0, ev.Intended(Request(request, Why(())))
    yield 10.0, ev.AllocationChanged(request.tag, AllocationStatus(AllocationState.RUNNING, "77", nodes))
    replicas = [ReplicaId(f"{role}/{index}") for role, count in _ROLES.items() for index in range(count)]
    node_of = dict(zip(replicas, nodes, strict=True))
    for replica in replicas:
        yield from _starts(Incarnation(replica, 1), node_of[replica], 10.0, 60.0, 0)
    for service, phase in zip(replicas[:2], ("serve", "score"), strict=True):
        yield 60.0, ev.PhaseEntered(Incarnation(service, 1), phase)
    current = dict.fromkeys(replicas, 1)
    trainer, rollouts, at = replicas[2], replicas[3:], 70.0
    for step in range(1, steps + 1):
        if step % ROLLOUT_FAILS_EVERY == 0:
            failed = rollouts[step // ROLLOUT_FAILS_EVERY % len(rollouts)]
            yield from _fails(Incarnation(failed, current[failed]), at, node_of[failed])
            current[failed] += 1
            yield from _starts(Incarnation(failed, current[failed]), node_of[failed], at + 2, at + 12, step - 1)
        if step % TRAINER_FAILS_EVERY == 0:
            yield from _fails(Incarnation(trainer, current[trainer]), at + 20, node_of[trainer])
            current[trainer] += 1
            yield from _starts(
                Incarnation(trainer, current[trainer]), node_of[trainer], at + 22, at + RESTART_S, step - 1
            )
            at += RESTART_S
        for phase, offset in (("wait_data", 0.0), ("train", 0.1), ("checkpoint", 0.9)):
            yield at + STEP_S * offset, ev.PhaseEntered(Incarnation(trainer, current[trainer]), phase)
        at += STEP_S
        yield at, ev.StepCommitted(Incarnation(trainer, current[trainer]), step, METRICS | {"tokens": 1e6})
        spent = tuple(PhaseTime(phase, "", int(step * 1e9)) for phase in ("generate", "wait_work", "between"))
        yield (
            at,
            ev.ClocksRecorded(
                tuple((Incarnation(id, number), ClockReading(number, step, spent)) for id, number in current.items())
            ),
        )
        version = Version(step, current[trainer])
        yield at, ev.VersionAvailable(Incarnation(trainer, current[trainer]), version)
        yield at, ev.WeightsRecorded(tuple((Incarnation(rollout, current[rollout]), version) for rollout in rollouts))
        for index, rollout in enumerate(rollouts):
            own = Incarnation(rollout, current[rollout])
            yield at + 0.01 * index, ev.PhaseEntered(own, "generate" if (step + index) % 2 else "wait_work")
    why = Why((f"step {steps} of {steps} is committed",))
    yield at + 1, ev.Decided(Finish(Outcome.COMPLETED, why))
    yield at + 5, ev.RunEnded(Outcome.COMPLETED, why.evidence[0])


def _starts(
    incarnation: Incarnation, node: NodeName, launched_at: float, works_at: float, version: int
) -> Iterator[tuple[float, ev.Event]]:
    step = f"{RUN}.{incarnation.replica.replace('/', '-')}.{incarnation.number}"
    yield launched_at, ev.Intended(Launch(incarnation, step, f"{RUN}.pool", node, Why(())))
    yield works_at - 5, ev.Joined(incarnation, node, node, 1)
    yield works_at - 3, ev.VersionAvailable(incarnation, Version(version, incarnation.number))
    yield works_at, ev.FirstWorkDone(incarnation)


def _fails(incarnation: Incarnation, at: float, node: NodeName) -> Iterator[tuple[float, ev.Event]]:
    evidence = "its step ended by signal 9 (SIGKILL)"
    finding = Finding(
        "exit_record",
        Verdict.FAIL,
        Cause.PROCESS,
        Remedy.RESTART,
        BEGAN + at,
        (Evidence("step", evidence, BEGAN + at),),
        incarnation=incarnation,
        proof=True,
    )
    yield at, ev.StepEnded(incarnation, f"{RUN}.x", None, 9, ExitReason.SIGNALED)
    yield at + 0.2, ev.FindingChanged(finding)
    yield at + 0.3, ev.Decided(Fence(incarnation, Rung.IN_PLACE, Why((evidence,), Rung.IN_PLACE)))


if __name__ == "__main__":
    main()
