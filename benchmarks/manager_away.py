"""Measures how well a run learns without its manager: reward at the end and age of the trained tokens.

The quickstart's job (real torch roles, ``[sampling] staleness = 4``) runs in four arms, interleaved seed by seed on the
same machine. Once step 30 is committed, the manager is stopped by SIGSTOP for 60 s in the arm ``stopped``. In
``killed`` the manager is killed and has no successor. In ``cancelled`` the manager is requested to end. On Slurm, its
job and the pending manager's job are cancelled by scancel. On the local cluster, the manager gets SIGTERM, and so does
the next manager, which ``rrl manage`` starts. In ``undisturbed`` the manager is left alone. If no manager is left,
``rrl manage`` ends the run once its last checkpoint exists.

Reward and ages are read from the store's own log, not from the roles' reports to the manager. The reward at the end is
the mean of the task's score over the trajectories of the last 20 steps (5,120 of them). The age of a token of step n is
n - 1 minus the step of the weights that sampled the token. There are two main results, which were chosen before the
first run. ``reward_ratio_min`` is the lowest ratio of a disturbed run's reward at the end to the reward of the
undisturbed run with its seed and cluster (bar: 0.95). ``age_max`` is the age of the oldest trained token of all runs
(bar: 4). Prints a table, and one JSON object with the figures of every run as its last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import mean
from typing import Any

import msgspec
from msgspec import Struct

from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._quickstart import quickstart_with
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.run_dir import RunDir
from rrl.core.types import Outcome
from rrl.manager.storage.lease import holder
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import GroupCreated, Part, ScoresRecorded, SegmentsAppended, decode
from rrl.tests.support.runs import TestRun, submit_here, submit_on
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import temporary_runs_folder

STEPS = 300
AWAY_FROM_STEP = 30
"""Step after which the manager is away. The reward after this step is 0.29 to 0.45 (twelve runs), so most is learned
later, without a manager."""
STOPPED_S = 60.0
LAST_STEPS = 20
"""Number of last steps over which the reward at the end of a run is averaged. The reward of one step has a standard
deviation of 0.005 to 0.022."""
STALENESS = 4
NODES = 5
RUN_TIMEOUT_S = 900.0
"""Maximum time (s) from the submission of a run to its last checkpoint."""
UNDISTURBED = "undisturbed"


class Result(Struct, frozen=True):
    """The result of one run.

    For each step, ``ages`` has the age of the oldest token (training steps), ``rewards`` the mean reward.
    """

    cluster: str
    arm: str
    seed: int
    outcome: str
    steps: int
    seconds: float
    """Seconds from the submission to the last checkpoint."""
    steps_away: int
    """Steps that were trained while no manager was running."""
    reward_end: float
    age_max: int
    dropped: int
    """Trajectories that were dropped because of the age of their tokens."""
    rewards: list[float]
    ages: list[int]


class LaunchSite(Struct, frozen=True):
    """A cluster to which runs are submitted, with its ways to kill and to cancel their managers."""

    submit: Callable[[str, str], TestRun]
    kill: Callable[[TestRun], None]
    cancel: Callable[[TestRun], None]


def job(cluster: str, seed: int) -> str:
    """Return the quickstart's job without its planned fault, for this cluster and seed."""
    changes = (
        ('kind = "local"', f'kind = "{cluster}"'),
        ("steps = 300", f"steps = {STEPS}"),
        ("seed = 0", f"seed = {seed}"),
        ("[sampling]\n", f"[sampling]\nstaleness = {STALENESS}\n"),
    )
    return quickstart_with(changes)


def signal_manager(run: TestRun, number: signal.Signals) -> None:
    """Wait until a manager holds the run's lease, and send a signal to that manager."""
    managing = _wait_for(lambda: holder(run.run), "no manager holds the run")
    os.kill(managing.pid, number)


def disturb(site: LaunchSite, run: TestRun, arm: str) -> None:
    """Disturb the manager as ``arm`` demands. A temporary disturbance is over when this function returns."""
    if arm == "stopped":
        signal_manager(run, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S)
        finally:
            signal_manager(run, signal.SIGCONT)
    elif arm == "killed":
        site.kill(run)
    elif arm == "cancelled":
        site.cancel(run)


def measure(site: LaunchSite, cluster: str, arm: str, seed: int) -> Result:
    begun = time.monotonic()
    run = site.submit(f"{arm}-{seed}", job(cluster, seed))
    run.wait(lambda state: state.step >= AWAY_FROM_STEP, RUN_TIMEOUT_S)
    before = _newest_checkpoint(run)
    disturb(site, run, arm)
    after = _newest_checkpoint(run) if arm in ("stopped", UNDISTURBED) else STEPS
    _wait_for(lambda: _newest_checkpoint(run) >= STEPS, f"{arm}, seed {seed}: step {STEPS} was never trained")
    seconds = time.monotonic() - begun
    if arm in ("killed", "cancelled"):
        with run.call("manage", run.run.id, stdout=subprocess.DEVNULL):
            state = run.wait_end(RUN_TIMEOUT_S)
    else:
        state = run.wait_end(RUN_TIMEOUT_S)
    run.wait_gone(60.0)
    ages, rewards, dropped = trained_tokens(run.run)
    return Result(
        cluster,
        arm,
        seed,
        str(state.outcome),
        state.step,
        round(seconds, 1),
        after - before,
        round(mean(rewards[-LAST_STEPS:]), 4),
        max(ages),
        dropped,
        [round(reward, 4) for reward in rewards],
        ages,
    )


def _newest_checkpoint(run: TestRun) -> int:
    """Return the newest step with a checkpoint. The trainer of this job saves each step."""
    names = (path.name for path in run.run.checkpoints.glob("step-*"))
    return max((int(name.removeprefix("step-").partition(".")[0]) for name in names), default=0)


def _wait_for(read: Callable[[], Any], failure_text: str) -> Any:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not (found := read()):
        assert time.monotonic() < deadline, failure_text
        time.sleep(0.1)
    return found


def trained_tokens(run: RunDir) -> tuple[list[int], list[float], int]:
    """Return the age of the oldest token and the mean reward of each step, and the number of stale trajectories.

    Stale trajectories were dropped because of their age. All values are read from the store's folder. The runs are so
    short that the store's log is not compacted (32 MiB).
    """
    (path,) = (path for path in run.store.glob("log.*") if path.suffix != ".new" and path.stat().st_size)
    oldest: dict[int, int] = {}
    scores: dict[int, float] = {}
    groups: dict[int, range] = {}
    bound: dict[int, tuple[int, ...]] = {}
    for record in map(decode, read_frames(path)):
        match record:
            case GroupCreated(group, first, size):
                groups[group] = range(first, first + size)
            case SegmentsAppended(_, pieces):
                for piece in pieces:
                    oldest[piece.trajectory] = min(piece.step, oldest.get(piece.trajectory, piece.step))
            case ScoresRecorded(some):
                scores |= {score.trajectory: score.reward for score in some}
            case Part(number, groups=chosen):
                bound[number] = (*bound.get(number, ()), *chosen)
            case _:
                pass
    steps = [[each for group in bound[number] for each in groups[group]] for number in range(1, STEPS + 1)]
    ages = [number - 1 - min(oldest[each] for each in step) for number, step in enumerate(steps, 1)]
    audit = msgspec.json.decode((run.store / "audit.json").read_bytes())
    dropped = audit["stale"]
    return ages, [mean(scores[each] for each in step) for step in steps], dropped


# ── where runs are submitted ───────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def local() -> Iterator[LaunchSite]:
    def submit(name: str, toml: str) -> TestRun:
        (folder / name).mkdir()
        return submit_here(folder / name, toml)

    def cancel(run: TestRun) -> None:
        """End the manager, start the next manager with ``rrl manage``, and end the next one as well."""
        signal_manager(run, signal.SIGTERM)
        _wait_for(lambda: holder(run.run) is None, "the first manager does not end")
        with run.call("manage", run.run.id, stdout=subprocess.DEVNULL):
            signal_manager(run, signal.SIGTERM)

    with temporary_runs_folder() as folder:
        yield LaunchSite(submit, lambda run: signal_manager(run, signal.SIGKILL), cancel)


@contextmanager
def slurm() -> Iterator[LaunchSite]:
    with SlurmLab.start(nodes=NODES) as lab:

        def kill(run: TestRun) -> None:
            lab.run_as_user(["scancel", "--state=PENDING", f"--name={run.run.id}.manager"])
            signal_manager(run, signal.SIGKILL)

        def cancel(run: TestRun) -> None:
            lab.run_as_user(["scancel", f"--name={run.run.id}.manager"])

        yield LaunchSite(lambda name, toml: submit_on(lab, name, toml), kill, cancel)


ARMS = (UNDISTURBED, "stopped", "killed", "cancelled")
SITES: Mapping[str, Callable[[], contextlib.AbstractContextManager[LaunchSite]]] = {"local": local, "slurm": slurm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=tuple(SITES), action="append")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    clusters = options.cluster or tuple(SITES)
    check_requirements("manager_away", without=() if "slurm" in clusters else (Need.SLURM,))
    results: list[Result] = []
    for cluster in clusters:
        with SITES[cluster]() as site:
            for seed in range(options.seeds):
                for arm in ARMS:
                    results.append(measure(site, cluster, arm, seed))
                    print_result(results[-1])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {STEPS} steps, staleness {STALENESS}")
    print(json.dumps(headline(results) | {"runs": msgspec.to_builtins(results), **provenance()}))


def print_result(result: Result) -> None:
    """Print the line of a run as soon as the run is over, because all runs together take an hour on two cores."""
    head = ["run", "outcome", "s", "steps away", "reward at the end", "oldest token", "dropped"]
    name = f"{result.cluster} {result.arm} {result.seed}"
    print_table(
        head,
        [
            [
                name,
                result.outcome,
                f"{result.seconds:.0f}",
                str(result.steps_away),
                f"{result.reward_end:.4f}",
                str(result.age_max),
                str(result.dropped),
            ]
        ],
    )
    print(flush=True)


def headline(results: list[Result]) -> dict[str, Any]:
    undisturbed = {(one.cluster, one.seed): one.reward_end for one in results if one.arm == UNDISTURBED}
    disturbed = [one for one in results if one.arm != UNDISTURBED]
    return {
        "reward_ratio_min": round(min(one.reward_end / undisturbed[one.cluster, one.seed] for one in disturbed), 4),
        "age_max": max(one.age_max for one in results),
        "completed": sum(one.outcome == Outcome.COMPLETED for one in results),
        "of": len(results),
    }


if __name__ == "__main__":
    main()
