"""The part ``spares`` of benchmarks/elastic.py: what spares that generate bring, and what they cost in a failure.

Generation is the bottleneck. In one arm the spares generate (``[tags] spare = ["rollout", "train"]``), in the other
they are idle (``["train"]``). In both the trainer may take them, and has a standby process on them. First the run works
without failures. Then the node of the trainer is lost with all its processes, and, when everything works again, that of
a fixed rollout. The two runs of a seed work at the same time; a node is lost in one of them while the other works.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from rrl.benchmarks._elastic_roles import unsaved_tokens
from rrl.benchmarks._elastic_runs import CHUNK, PLACES, ROLLOUTS, TOKEN_S, TOKENS, job, role_command
from rrl.benchmarks._table import print_table
from rrl.core.types import TRAINER, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.state import State, Status
from rrl.tests.support.local_cluster import crash
from rrl.tests.support.runs import TestRun, check_sound, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

SPARES = 2
ARMS = {"generating": '["rollout", "train"]', "idle": '["train"]'}
MEASURED_S = 30.0
TIMEOUT_S = 300.0
VICTIM, STORE = ReplicaId("rollout/1"), ReplicaId("trajectories/0")
MINUTE_S = 60.0


class Sample(Struct):
    """The results of one run."""

    arm: str
    seed: int
    tokens_per_s: float
    """Trained tokens per second without failures."""
    recovery_s: float
    """Time (s) from the loss of the trainer's node to the next commit."""
    lost_tokens: int
    """Tokens that the lost rollout had generated and not appended, at most."""


def measure(seeds: int) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the figures of this part, and its samples."""
    samples: list[Sample] = []
    with temporary_runs_folder() as folder:
        for seed in range(seeds):
            runs = {arm: _submit(arm, seed, folder) for arm in ARMS}
            for arm, run in runs.items():
                run.wait(lambda state, arm=arm: _works(state, arm == "generating"), TIMEOUT_S)  # type: ignore[misc]
            rates = _rates(list(runs.values()))
            for (arm, run), rate in zip(runs.items(), rates, strict=True):
                place = folder / f"{arm}-{seed}"
                samples.append(Sample(arm, seed, rate, _trainer_lost(run, seed), _rollout_lost(run, seed, place)))
            for run in runs.values():
                assert run.call("cancel", run.run.id, stdout=subprocess.DEVNULL).wait(TIMEOUT_S) == 0
                run.wait_gone(60.0)
                check_sound(run.run)
    rows = [
        [one.arm, str(one.seed), f"{one.tokens_per_s:.0f}", f"{one.recovery_s:.2f}", str(one.lost_tokens)]
        for one in samples
    ]
    print_table(("spares", "seed", "tokens/s", "recovery s", "tokens lost"), rows)
    generating, idle = ([one for one in samples if one.arm == arm] for arm in ARMS)
    minute = MINUTE_S / TOKEN_S * PLACES
    return {
        "tokens_ratio": sum(one.tokens_per_s for one in generating) / sum(one.tokens_per_s for one in idle),
        "recovery_over_idle_spare": statistics.mean(one.recovery_s for one in generating)
        / statistics.mean(one.recovery_s for one in idle),
        "tokens_lost_share": statistics.mean(one.lost_tokens for one in generating) / minute,
    }, {"samples": [asdict(one) for one in samples]}


def _submit(arm: str, seed: int, folder: Path) -> TestRun:
    place = folder / f"{arm}-{seed}"
    (place / "pace").mkdir(parents=True)
    rollout = role_command(
        "rollout", places=PLACES, token_s=TOKEN_S, tokens=TOKENS, chunk=CHUNK, record=str(place / "pace")
    )
    toml = job(
        seed,
        steps=1_000_000,
        one_node=False,
        cluster_keys=f"spares = {SPARES}",
        trainer=f"command = {role_command('trainer', step_s=0.2)}",
        rollout=f"lease = {PLACES}\ncommand = {rollout}",
        extra=f'[recovery]\nbackoff = "0s"\n[tags]\nspare = {ARMS[arm]}\n',
    )
    return submit_here(place, toml)


def _works(state: State, generating: bool) -> bool:
    """Return whether all fixed replicas work, and all spares generate if they are to."""
    rollouts = [one for one in state.workers if one.role == "rollout" and one.status is Status.JOINED]
    wanted = ROLLOUTS + (SPARES if generating else 0)
    return state.step >= 5 and len(rollouts) >= wanted and state.replica(TRAINER).status is Status.JOINED


def _rates(runs: list[TestRun]) -> list[float]:
    """Let the runs work for a while; return the trained tokens per second of each."""
    since = time.time()
    time.sleep(MEASURED_S)
    return [_rate(run, since) for run in runs]


def _rate(run: TestRun, since: float) -> float:
    commits = [each for each in run.events() if isinstance(each.event, ev.StepCommitted) and each.at >= since]
    tokens = sum(each.event.metrics["tokens"] for each in commits[1:] if isinstance(each.event, ev.StepCommitted))
    return round(tokens / (commits[-1].at - commits[0].at), 1)


def _trainer_lost(run: TestRun, seed: int) -> float:
    """Take the trainer's node away; return the time (s) until the next commit."""
    time.sleep(random.Random(seed).uniform(5.0, 10.0))  # the standby process of the trainer is ready
    before = run.state()
    node = before.replica(TRAINER).node
    assert node is not None
    assert node != before.replica(STORE).node, "the store is lost with the trainer"
    killed = time.time()
    crash(run.run, node)
    number = before.replica(TRAINER).incarnation_number
    run.wait(
        lambda state: state.replica(TRAINER).incarnation_number > number and state.step > before.step + 1, TIMEOUT_S
    )
    return round(
        next(
            each.at
            for each in run.events()
            if isinstance(each.event, ev.StepCommitted) and each.event.incarnation.number > number
        )
        - killed,
        3,
    )


def _rollout_lost(run: TestRun, seed: int, place: Path) -> int:
    """Take a fixed rollout's node away; return how many tokens are generated again."""
    before = run.wait(lambda state: state.replica(VICTIM).status is Status.JOINED)
    time.sleep(random.Random(-seed).uniform(10.0, 15.0))
    victim = before.replica(VICTIM)
    assert victim.node is not None
    crash(run.run, victim.node)
    lost = unsaved_tokens(place / "pace" / f"{str(victim.incarnation).replace('/', '-')}.json", time.time())
    run.wait(lambda state: state.step > before.step + 10, TIMEOUT_S)
    return lost
