"""Measures the gain of streaming, the cost of a limit on tokens' age, and whether deaths change the training.

All runs are whole runs on the local cluster with the built-in roles in torch, at the pace of GPUs that this machine
does not have (benchmarks/_pace.py). The task has answers with long-tailed lengths, and the policy really learns it
(benchmarks/_stream_task.py). All runs start from one model, which is trained first. The arms of a comparison run at the
same time with the same seed, so that both see the same load of this machine. Parts:

- ``on-policy``: with ``staleness = 0``, and training that takes about as long as generation, whole batches
  (``barrier``) are compared with parts (``stream``).
- ``late``: with ``staleness`` 1 and 2, and generation as the bottleneck, ``late = "wait"`` is compared with ``late =
  "drop"``.
- ``restart``: the trainer, a rollout and the store are killed while a run streams. The groups of each part are then
  taken from the store's log and trained again, one part after the other, by a learner that was never interrupted. Its
  weights and moments are compared with the last committed checkpoint, bit by bit.
- ``publishing``: benchmarks/publishing.py, with 100 million parameters.

The time of a step is the time between two commits in the journal. It includes leases, tokens, scores, parts, the
optimizer, the copy for the checkpoint, and the transfer of weights. The first steps are left out (:data:`FIRST_STEP`).
Idle shares are those that ``rrl status`` shows, over the same steps.

These figures and bars were chosen before the first measurement, except ``barrier_over_stream_per_token``, which was
added later:

- ``barrier_over_stream``: mean time of a step with ``barrier`` divided by that with ``stream``, over all seeds (bar: at
  least 1.45).
- ``barrier_over_stream_per_token``: the same ratio of the seconds per trained token. Each arm learns from its own
  samples and lengths change with the policy, so the steps of the two arms have different numbers of tokens.
- ``trainer_idle_*``: idle share of the trainer, as a mean over the seeds (bar for ``stream``: at most 0.25; ``barrier``
  has about 0.45).
- ``steps_to_reward_*``: mean number of steps until the mean reward of five steps reaches 0.8 (bar: the arms differ by
  at most 10 %).
- ``dropped_*``: share of the groups that were dropped for their age. For ``wait`` it is the largest share of all runs
  (bar: 0), for ``drop`` the mean.
- ``length_bias_*``: mean length of trained answers divided by the mean length of all requested answers, as a mean over
  the runs (bar for ``wait``: 0.97 to 1.03). For both arms, the mean length of requested answers is computed from the
  lengths in ``wait``, by kind of prompt, because all answers are finished there.
- ``wait_over_drop``: seconds per trained token with ``wait`` divided by those with ``drop``.
- ``max_age_over_n``: largest ratio of the age of a trained token to the limit (bar: 1).
- ``overrun_*``: time by which roles exceeded their pace, as a share of the time that the pace demands.

Prints tables, and one JSON object with all samples as its last line. The figures of a part that was not run are null.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace

from rrl.benchmarks import publishing
from rrl.benchmarks._pace import Tau, overrun, recorded
from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._stream_replay import Lengths, Replay, in_open_step, lengths, replay
from rrl.benchmarks._stream_task import write_model
from rrl.benchmarks._table import print_table
from rrl.core.types import TRAINER, Outcome, ReplicaId
from rrl.manager.model import events as ev
from rrl.manager.model.figures import idle_times
from rrl.manager.model.state import State, Status
from rrl.tests.support.roles.trainer.replayed import keep_logs
from rrl.tests.support.runs import TestRun, submit_here
from rrl.tests.support.supervisor import temporary_runs_folder

SEEDS = 3
STORE = ReplicaId("trajectories/0")
TAU = Tau(50e-3, 0.1e-3)
"""Seconds per token. They are nearly independent of the number of trajectories, as on a GPU, and several times as long
as a token takes on a busy core (3 to 10 ms)."""
TOKEN_S = 3.3e-3
"""Seconds in which the trainer trains a token in the part ``on-policy``. A step of 32 groups of 4 has 1,200 to 1,800
tokens, so training takes about as long as generation, whose longest answer has 50 to 80 tokens. It is not 2.7 ms,
because a trainer that waits for whole batches was then idle for 0.52 of its time (first runs). The bar for streaming
assumes that such a trainer is idle for about 0.45."""
LATE_TOKEN_S = 2.7e-3
"""Seconds in which the trainer trains a token in the part ``late``, where generation is the bottleneck."""
MAX_NEW_TOKENS = 80
GROUP_SIZE = 4
FIRST_STEP = 4
"""First step that counts. From this step on, rollouts and trainer work at a steady pace."""
RUN_TIMEOUT_S = 1200.0
TARGET_REWARD, REWARD_STEPS = 0.8, 5
ON_POLICY_STEPS, LATE_STEPS, RESTART_STEPS = 22, 30, 18
KILLS = ((TRAINER, 5), (ReplicaId("rollout/1"), 9), (STORE, 13))
"""The replicas that are killed by SIGKILL, and the committed step after which each is killed. The trainer is killed
when it has trained a part of a step and has received the next part."""
PARTS = ("on-policy", "late", "restart", "publishing")
MIN_BARRIER_OVER_STREAM = 1.45
MAX_TRAINER_IDLE_STREAM = 0.25
MAX_STEPS_CHANGE = 0.1
MAX_LENGTH_BIAS = 0.03


class Arm(Struct, frozen=True):
    """One kind of run."""

    name: str
    prompts: int
    staleness: int
    stream: bool
    late: str = "wait"
    steps: int = ON_POLICY_STEPS
    learning_rate: float = 5e-4
    lease: int = 64
    """Number of trajectories that each rollout runs at once."""
    tau: Tau = TAU
    token_s: float = TOKEN_S
    engine: str = "torch"
    first_come: bool = False
    """True if the store leases answers in the order of their prompts, regardless of expected lengths."""
    kills: tuple[tuple[ReplicaId, int], ...] = ()


ON_POLICY = (Arm("barrier", 32, 0, False), Arm("stream", 32, 0, True))
_LATE = Arm("late", 8, 1, True, steps=LATE_STEPS, learning_rate=1e-4, lease=48, token_s=LATE_TOKEN_S)
LATE = tuple(
    tuple(replace(_LATE, name=f"{late} {staleness}", staleness=staleness, late=late) for late in ("wait", "drop"))
    for staleness in (1, 2)
)
RESTART = Arm("restart", 16, 1, True, steps=RESTART_STEPS, token_s=LATE_TOKEN_S, kills=KILLS)


class Sample(Struct):
    """The results of one run."""

    arm: str
    seed: int
    step_s: list[float]
    """Seconds of each step from :data:`FIRST_STEP` on."""
    rewards: list[float]
    idle: dict[str, dict[str, float]]
    """Share of time by role and idle cause."""
    parts: float
    """Mean number of parts of a step."""
    dropped: float
    lengths: Lengths | None
    """Lengths of the run's answers; None for a run whose store restarted."""
    length_bias: float | None
    max_age: int
    ages: dict[int, int]
    tokens: float
    """Mean number of answer tokens of a step."""
    overrun: dict[str, float]
    load: tuple[float, float]
    """Load of this machine (1 minute) at the start and the end of the run."""

    def idle_share(self, role: str) -> float:
        """Return the share of time that a role was idle, for all idle causes together."""
        return round(sum(self.idle[role].values()), 4)

    @property
    def steps_to_reward(self) -> float | None:
        """Interpolated step at which the mean reward of several steps rises to the target; None if it never does."""
        means = [
            statistics.mean(self.rewards[end - REWARD_STEPS : end])
            for end in range(REWARD_STEPS, len(self.rewards) + 1)
        ]
        for place, (before, after) in enumerate(pairwise(means), start=REWARD_STEPS):
            if before < TARGET_REWARD <= after:
                return place + (TARGET_REWARD - before) / (after - before)
        return None


def job(arm: Arm, seed: int, model: Path, record: Path) -> str:
    """Return job.toml of a run."""

    def command(role: str, *options: str) -> str:
        return json.dumps([sys.executable, "-m", "rrl.benchmarks._pace", role, "--record", str(record), *options])

    return f"""
[run]
name = "paced"
steps = {arm.steps}
seed = {seed}
[cluster]
kind = "local"
node = {{ cpus = 2, mem = "3GiB" }}
[task]
function = "rrl.benchmarks._stream_task:make"
[model]
path = "{model}"
[sampling]
prompts_per_step = {arm.prompts}
group_size = {GROUP_SIZE}
max_new_tokens = {MAX_NEW_TOKENS}
ahead = {arm.staleness}
staleness = {arm.staleness}
stream = {json.dumps(arm.stream)}
late = "{arm.late}"
[roles.trainer]
command = {command("trainer", "--token-s", str(arm.token_s))}
warm = false
learning_rate = {arm.learning_rate}
final_learning_rate = 1.0
entropy = 0.0
[roles.rollout]
command = {command("rollout", "--tau", str(arm.tau.first), str(arm.tau.each))}
engine = "{arm.engine}"
mem = "2GiB"
replicas = 2
lease = {arm.lease}
segment_tokens = 4
[roles.trajectories]
{f"command = {command('trajectories')}" if arm.first_come else ""}
[limits]
silence = "30s"
join = "300s"
[recovery]
backoff = "0s"
"""


def run_together(arms: Sequence[Arm], seed: int, model: Path, folder: Path) -> Iterator[tuple[Sample, TestRun]]:
    """Run these arms at the same time, each as its own run; yield their results."""
    load = os.getloadavg()[0]
    runs: list[TestRun] = []
    for arm in arms:
        place = folder / f"{arm.name.replace(' ', '-')}-{seed}"
        for name in ("pace", "logs"):
            (place / name).mkdir(parents=True)
        runs.append(submit_here(place, job(arm, seed, model, place / "pace")))
    until = time.monotonic() + RUN_TIMEOUT_S
    for arm, run in zip(arms, runs, strict=True):
        state = run.wait(partial(_has_ended, run, list(arm.kills)), until - time.monotonic())
        assert state.outcome is Outcome.COMPLETED, f"{run.run.id}: {state.outcome}"
    whole: Lengths | None = None
    for arm, run in zip(arms, runs, strict=True):
        run.wait_gone()
        made = sample(arm, seed, run, (load, os.getloadavg()[0]))
        if arm.late == "wait":
            whole = made.lengths
        elif whole is not None and made.lengths is not None:  # in this arm not all answers are finished
            made.length_bias = round(made.lengths.bias(whole.by_kind), 4)
        yield made, run


def _has_ended(run: TestRun, kills: list[tuple[ReplicaId, int]], state: State) -> bool:
    """Return whether the run has ended. If it continues, keep its logs, and carry out the next kill if it is due."""
    if state.outcome is not None:
        return True
    logs = _place(run) / "logs"
    keep_logs(run.run, logs)
    if kills and state.step >= kills[0][1]:
        target, _ = kills[0]
        replica = state.replica(target)
        works = replica.status is Status.JOINED and (target != TRAINER or in_open_step(logs))
        if works and replica.pid is not None:
            os.kill(replica.pid, signal.SIGKILL)
            kills.pop(0)
    return False


def _place(run: TestRun) -> Path:
    """Return the folder of a run, which contains its job.toml and records."""
    return run.run.path.parent.parent


def sample(arm: Arm, seed: int, run: TestRun, load: tuple[float, float]) -> Sample:
    """Return the results of a finished run."""
    events = run.events()
    commits = {
        each.event.step: (each.at, each.event.metrics) for each in events if isinstance(each.event, ev.StepCommitted)
    }
    at = [commits[step][0] for step in sorted(commits)]
    metrics = [commits[step][1] for step in sorted(commits)]
    audit = msgspec.json.decode((run.run.store / "audit.json").read_bytes())
    trained = sum(len(groups) for step, groups in audit["steps"].items() if int(step) <= audit["committed"])
    stale = audit["stale"] // GROUP_SIZE
    answers = None if arm.kills else lengths(run.run, FIRST_STEP)
    return Sample(
        arm.name,
        seed,
        step_s=[round(after - before, 3) for before, after in pairwise(at[FIRST_STEP - 2 :])],
        rewards=[round(each["reward"], 4) for each in metrics],
        idle=_idle(events, at[FIRST_STEP - 2], at[-1]),
        parts=round(statistics.mean(map(len, audit["parts"].values())), 2) if audit["parts"] else 1.0,
        dropped=round(stale / (stale + trained), 4),
        lengths=answers,
        length_bias=None if answers is None else round(answers.bias(answers.by_kind), 4),
        max_age=audit["max_age"],
        ages={int(age): count for age, count in audit["ages"].items()},
        tokens=round(statistics.mean(each["tokens"] for each in metrics), 1),
        overrun={role: round(overrun(recorded(_place(run) / "pace", role)), 4) for role in ("trainer", "rollout")},
        load=(round(load[0], 1), round(load[1], 1)),
    )


def _idle(events: Sequence[ev.Stamped], since: float, until: float) -> dict[str, dict[str, float]]:
    """Return the idle shares by role and cause between two times (s).

    The shares are computed between the last records of clocks up to ``since`` and up to ``until``. If there is no
    record up to ``since``, the first record is taken.
    """
    times, before = idle_times.IdleTimes(), idle_times.START
    now = before
    for stamped in events:
        if isinstance(stamped.event, ev.ClocksRecorded) and stamped.at <= until:
            times = idle_times.with_readings(times, stamped.at, stamped.event.readings)
            now = times.now
            if stamped.at <= since or before is idle_times.START:
                before = now
    return {
        role: {cause: round(share, 4) for cause, share in idle_times.idle_shares(now, before, role).items()}
        for role in ("trainer", "rollout")
    }


def replay_of(run: TestRun) -> Replay:
    """Replay the training of a run whose roles were killed."""
    state = run.state()
    killed = {target: state.replica(target).incarnation_number for target, _ in KILLS}
    assert min(killed.values()) > 1, f"not every target was killed: {killed}"
    return replay(run.run, _place(run) / "logs", _place(run) / "pace", killed)


def measure(seeds: int, parts: Sequence[str]) -> dict[str, Any]:
    """Run the parts and print their tables; return the content of the last line."""
    samples: list[Sample] = []
    replays: list[Replay] = []
    with temporary_runs_folder() as folder:
        if set(parts) != {"publishing"}:
            write_model(folder / "model")
        comparisons = [*([ON_POLICY] if "on-policy" in parts else []), *(LATE if "late" in parts else [])]
        for seed in range(seeds):
            for arms in comparisons:
                _report(samples, [made for made, _ in run_together(arms, seed, folder / "model", folder)])
            if "restart" in parts:
                ((made, run),) = run_together([RESTART], seed, folder / "model", folder)
                replays.append(replay_of(run))
                _report(samples, [made])
                print(replays[-1], flush=True)
    figures = _figures(samples, replays)
    if "publishing" in parts:
        published = publishing.measure()
        figures |= {key: published[key] for key in ("publish_blocked_share", "weights_lag_steps")}
    return figures | {"samples": samples, "replays": replays}


def _report(samples: list[Sample], new: Sequence[Sample]) -> None:
    samples += new
    print(f"load {new[-1].load[0]:.1f} to {new[-1].load[1]:.1f}")
    heads = (
        "arm",
        "seed",
        "step s",
        "trainer idle",
        "rollouts idle",
        "parts",
        "tokens",
        "dropped",
        "bias",
        "max age",
        "steps to 0.8",
        "overrun trainer",
        "rollout",
    )
    print_table(
        heads,
        [
            [
                each.arm,
                str(each.seed),
                f"{statistics.mean(each.step_s):.2f}",
                f"{each.idle_share('trainer'):.3f}",
                f"{each.idle_share('rollout'):.3f}",
                f"{each.parts:.1f}",
                f"{each.tokens:.0f}",
                f"{each.dropped:.3f}",
                _shown(each.length_bias),
                str(each.max_age),
                _shown(each.steps_to_reward),
                *(f"{each.overrun[role]:.3f}" for role in ("trainer", "rollout")),
            ]
            for each in new
        ],
    )
    sys.stdout.flush()


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _figures(samples: Sequence[Sample], replays: Sequence[Replay]) -> dict[str, Any]:
    """Return the figures that the module's docstring describes; a figure of a part that was not run is None."""
    by_arm: dict[str, list[Sample]] = {}
    for each in samples:
        by_arm.setdefault(each.arm.partition(" ")[0], []).append(each)
    barrier, stream, wait, drop = (by_arm.get(arm, []) for arm in ("barrier", "stream", "wait", "drop"))

    def mean(of: Callable[[Sample], float | None], those: Sequence[Sample]) -> float | None:
        values = [value for each in those if (value := of(each)) is not None]
        return round(statistics.mean(values), 4) if values and len(values) == len(those) else None

    def step_s(those: Sequence[Sample]) -> float:
        return statistics.mean(seconds for each in those for seconds in each.step_s)

    def token_s(those: Sequence[Sample]) -> float:
        return step_s(those) / statistics.mean(each.tokens for each in those)

    limits = {arm.name: arm.staleness for arms in LATE for arm in arms}
    return {
        "barrier_over_stream": round(step_s(barrier) / step_s(stream), 4) if barrier and stream else None,
        "barrier_over_stream_per_token": round(token_s(barrier) / token_s(stream), 4) if barrier and stream else None,
        "trainer_idle_barrier": mean(lambda each: each.idle_share("trainer"), barrier),
        "trainer_idle_stream": mean(lambda each: each.idle_share("trainer"), stream),
        "steps_to_reward_barrier": mean(lambda each: each.steps_to_reward, barrier),
        "steps_to_reward_stream": mean(lambda each: each.steps_to_reward, stream),
        "dropped_wait": max((each.dropped for each in wait), default=None),
        "dropped_drop": mean(lambda each: each.dropped, drop),
        "length_bias_wait": mean(lambda each: each.length_bias, wait),
        "length_bias_drop": mean(lambda each: each.length_bias, drop),
        "wait_over_drop": round(token_s(wait) / token_s(drop), 4) if wait and drop else None,
        "max_age_over_n": max((each.max_age / limits[each.arm] for each in (*wait, *drop)), default=None),
        "max_age_on_policy": max((each.max_age for each in (*barrier, *stream)), default=None),
        "publish_blocked_share": None,
        "weights_lag_steps": None,
        "restart_same_bits": all(each.same_weights for each in replays) if replays else None,
        "overrun_trainer": mean(lambda each: each.overrun["trainer"], samples),
        "overrun_rollout": mean(lambda each: each.overrun["rollout"], samples),
    }


def _print_bars(figures: dict[str, Any]) -> None:
    """Print for each bar whether it is met; bars of parts that were not run are left out."""
    before, after = figures["steps_to_reward_barrier"], figures["steps_to_reward_stream"]
    change = abs(after / before - 1) if before and after else None
    bias = figures["length_bias_wait"]
    for name, value, met in (
        ("barrier_over_stream", figures["barrier_over_stream"], lambda value: value >= MIN_BARRIER_OVER_STREAM),
        ("trainer_idle_stream", figures["trainer_idle_stream"], lambda value: value <= MAX_TRAINER_IDLE_STREAM),
        ("change of the steps to the reward", change, lambda value: value <= MAX_STEPS_CHANGE),
        ("dropped_wait", figures["dropped_wait"], lambda value: value == 0),
        ("length_bias_wait", bias, lambda value: abs(value - 1) <= MAX_LENGTH_BIAS),
        ("max_age_over_n", figures["max_age_over_n"], lambda value: value <= 1),
        ("publish_blocked_share", figures["publish_blocked_share"], lambda v: v <= publishing.MAX_BLOCKED_SHARE),
        ("restart_same_bits", figures["restart_same_bits"], bool),
    ):
        if value is not None:
            print(f"{name} {value:g}: {'met' if met(value) else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    given = parser.parse_args()
    check_requirements("stream")
    torch.set_num_threads(1)
    figures = measure(given.seeds, given.part or PARTS)
    _print_bars(figures)
    print(json.dumps({**msgspec.to_builtins(figures), "seeds": given.seeds, **provenance()}))


if __name__ == "__main__":
    main()
