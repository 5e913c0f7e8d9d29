"""Whole runs of examples/agents.toml, in which every kind of process is killed once while the model learns.

The example has small steps, so that it ends soon; here each step has more episodes (:data:`SETTINGS`).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from rrl.benchmarks import _recorded
from rrl.core.types import TRAINER, Outcome, ReplicaId
from rrl.manager.model.state import State, Status
from rrl.manager.storage.lease import holder
from rrl.tests.support.runs import TestRun, check_sound, submit_here
from rrl.tests.support.soak import ManagerRestarter

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 400
SETTINGS = {"prompts_per_step": 16, "group_size": 16, "learning_rate": 0.001}
"""Settings that replace those of the example. They make steps of 256 episodes, because the steps of the example have
too few (96): with them, the agents guessed only 0.57 (seed 0) and 0.45 (seed 1) of the hidden digits after 400
steps."""
MANAGER = "manager"
KILLS = (
    (ReplicaId("rollout/1"), 0.15),
    (ReplicaId("trajectories/0"), 0.3),
    (TRAINER, 0.45),
    (ReplicaId("agents/0"), 0.6),
    (MANAGER, 0.75),
)
"""The replicas that are killed by SIGKILL, and the share of the steps after which each is killed."""
RUN_TIMEOUT_S = 7200.0
"""Deadline (s) of each wait. A run took 45 min on a machine with a load of 30."""
STEP_GRACE_S = 60
"""Seconds between the request to stop a process and SIGKILL. In this time the store writes its audit, which takes 2 s
of processor time after 400 steps."""


class Learned(Struct, frozen=True):
    """The results of a run of the example."""

    seed: int
    steps: int
    found: list[float]
    """For each step, the share of its episodes whose agent guessed the hidden digit."""
    token_drift: int
    """Number of trained tokens that no engine sampled after the same tokens, with the same log-probability and
    version."""
    trained_tokens: int
    run_s: float
    incarnations: dict[str, int]
    """Number of the last incarnation of each replica that was killed; for the manager, its epoch."""
    episodes: dict[str, int]
    """Number of trained and of dropped episodes of the run."""
    load: tuple[float, float]
    """Load of this machine (1 minute) at the start and the end of the run."""

    @property
    def last10(self) -> float:
        """Return the mean share of the episodes whose agent guessed the hidden digit, over the last ten steps."""
        return statistics.mean(self.found[-10:])

    @property
    def first10(self) -> float:
        """Return the mean share of the episodes whose agent guessed the hidden digit, over the first ten steps."""
        return statistics.mean(self.found[:10])


def learn(folder: Path, seed: int, steps: int = STEPS, *, kills: bool = True) -> Learned:
    """Run the example with a seed in ``folder``, and return its results."""
    record = folder / "record"
    record.mkdir(parents=True)
    (folder / "guess_task.py").write_text((EXAMPLES / "guess_task.py").read_text())
    load, started = os.getloadavg()[0], time.monotonic()
    run = submit_here(folder, job(seed, steps, record))
    run.wait(lambda _: True, RUN_TIMEOUT_S)  # the manager has started
    restarter = ManagerRestarter(run)
    try:
        for target, share in KILLS if kills else ():
            kill(run, target, int(share * steps))
        state = run.wait_end(RUN_TIMEOUT_S)
    finally:
        restarter.close()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, steps), f"{state.outcome} at {state.step}: {state.why}"
    run_s = time.monotonic() - started
    run.wait_gone()
    check_sound(run.run)
    return _read(seed, run, record, run_s, load)


def job(seed: int, steps: int, record: Path) -> str:
    """Return the job.toml of the example without its planned fault, and with another seed, number and size of steps."""
    toml = (EXAMPLES / "agents.toml").read_text().partition("[[faults.planned]]")[0]
    lines = toml.splitlines()
    assert "seed = 0" in lines
    lines[lines.index("seed = 0")] = f"seed = {seed}"
    for key, value in {"steps": steps, **SETTINGS}.items():
        (place,) = (place for place, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[place] = f"{key} = {value}"
    for role in ("trainer", "rollout"):
        command = json.dumps([sys.executable, "-m", "rrl.benchmarks._recorded", role, "--record", str(record)])
        lines.insert(lines.index(f"[roles.{role}]") + 1, f"command = {command}")
    lines.insert(lines.index("[limits]") + 1, f'step_grace = "{STEP_GRACE_S}s"')
    return "\n".join(lines) + '\n[recovery]\nbackoff = "0s"\n'


def kill(run: TestRun, target: ReplicaId | str, step: int) -> None:
    """Kill a replica or the manager when this step is committed, and wait until its next incarnation works."""

    def works(state: State) -> bool:
        return state.step >= step and (target == MANAGER or state.replica(ReplicaId(target)).status is Status.JOINED)

    state = run.wait(works, RUN_TIMEOUT_S)
    if target == MANAGER:
        held = holder(run.run)
        assert held is not None, "no manager holds the run"
        os.kill(held.pid, signal.SIGKILL)
        run.wait(lambda state: (now := holder(run.run)) is not None and now.pid != held.pid, RUN_TIMEOUT_S)
        return
    replica = state.replica(ReplicaId(target))
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)
    following = replica.incarnation_number + 1
    run.wait(lambda state: joined(state, ReplicaId(target), following), RUN_TIMEOUT_S)


def joined(state: State, target: ReplicaId, number: int) -> bool:
    """Return whether this incarnation of a replica, or a later incarnation, has joined."""
    replica = state.replica(target)
    return replica.incarnation_number >= number and replica.status is Status.JOINED


def _read(seed: int, run: TestRun, record: Path, run_s: float, load: float) -> Learned:
    state = run.state()
    audit = msgspec.json.decode((run.run.store / "audit.json").read_bytes())
    held = sorted(int(path.name) for path in run.run.epochs.iterdir() if path.name.isdigit())
    incarnations = {
        str(target): state.replica(ReplicaId(target)).incarnation_number for target, _ in KILLS if target != MANAGER
    }
    differing, tokens = _recorded.drift(record)
    return Learned(
        seed,
        state.step,
        _found(record),
        differing,
        tokens,
        round(run_s, 1),
        {**incarnations, MANAGER: held[-1]},
        {"trained": audit["trained"], "dropped": sum(audit["dropped"].values())},
        (round(load, 1), round(os.getloadavg()[0], 1)),
    )


def _found(record: Path) -> list[float]:
    """Return for each step the share of its episodes whose agent guessed the digit: those with a reward above 0."""
    rewards: dict[int, dict[int, float]] = {}
    for sample in _recorded.trained(record):
        rewards.setdefault(sample.step, {})[sample.episode] = sample.reward
    return [round(statistics.mean(reward > 0 for reward in rewards[step].values()), 4) for step in sorted(rewards)]
