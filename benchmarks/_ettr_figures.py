"""Computes figures of a run of benchmarks/ettr.py from its journal. Only :func:`outages` also reads the trainer's logs.

For comparison with RobustRL's paper (docs/sources.md) there are also its definition of ETTR, and rrl's ETTR over a
sliding window.

The clock of a run starts when its trainer first trains, and stops when its last step is committed. The lost time by
cause and stage is that of ``rrl report`` (rrl.manager.reporting.accounting).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from rrl.benchmarks._ettr_faults import Kill, Target
from rrl.benchmarks.restart import restored_step
from rrl.core.phases import phase
from rrl.core.run_dir import RunDir
from rrl.core.types import TRAINER, Incarnation, role_of
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting.committed_steps import CommittedSteps
from rrl.manager.reporting.accounting.run_report import Account as RunAccount
from rrl.manager.reporting.accounting.run_report import account

WINDOW_S = 300.0
"""Shortest window (s) of the sliding ETTR: the five minutes of RobustRL's figures (docs/sources.md)."""
MAX_WINDOWS = 240
"""Maximum number of points of the sliding ETTR. A run that is longer than this many windows gets longer windows."""
MIN_WINDOWS = 10
"""Minimum number of points of the sliding ETTR. A run that is shorter than this many windows gets shorter windows."""


class Outage(Struct, frozen=True):
    """One kill of the trainer and the recovery from it."""

    killed: float
    """Time of the kill (s)."""
    seconds: float
    """Seconds from the kill until an incarnation of the trainer trains again."""
    lost_steps: int
    """Upper limit of the number of lost steps: those that were trained before the kill and had to be trained again."""


class Account(Struct, frozen=True):
    """Figures of a run as ``rrl report`` computes them."""

    estimate: float | None = None
    """rrl's ETTR, which estimates the strict ETTR from this run alone."""
    robustrl: float | None = None
    """RobustRL's ETTR; None in samples of earlier versions."""
    lost: dict[str, dict[str, float]] = {}
    """Seconds lost, by cause and stage."""
    window_s: float = 0.0
    sliding: tuple[tuple[float, float], ...] = ()
    """Points of the sliding estimate: (seconds since the first training, estimate over the window that ends at this
    time)."""
    reward: tuple[float, ...] = ()
    """Mean reward of each step, in order."""
    tokens: tuple[tuple[float, float], ...] = ()
    """For each step, in order: (seconds since the first training, trained tokens per second)."""


class Sample(Struct, frozen=True):
    """The measured values of one run."""

    arm: str
    seed: int
    seconds: float
    """Seconds from the first training to the commit of the last step."""
    committed: tuple[float, ...]
    """Seconds from the first training to the commit of each step, in order."""
    outages: tuple[Outage, ...] = ()
    overrun: tuple[float, float] = (0.0, 0.0)
    """For (trainer, rollouts): the time by which work took longer than its pace demands, as a share of the time that
    the pace demands (:func:`overrun`)."""
    load: float = 0.0
    """Load of this machine (1 minute) at the end."""
    faults: tuple[tuple[float, str], ...] = ()
    """For each fault: (seconds since the first training, target)."""
    plan: str = ""
    clean: str = ""
    """A text with all settings on which a run without faults depends (:attr:`Plan.clean`). A run is compared with the
    clean run that has the same text and seed."""
    account: Account = Account()


def commits_of(events: Iterable[ev.Stamped]) -> tuple[float, list[float]]:
    """Return when the trainer first trained, and when each step was committed, in order (s)."""
    began: float | None = None
    commits: dict[int, float] = {}
    for stamped in events:
        match stamped.event:
            case ev.PhaseEntered(incarnation, "train") if incarnation.replica == TRAINER and began is None:
                began = stamped.at
            case ev.StepCommitted(_, step):
                commits.setdefault(step, stamped.at)
            case _:
                pass
    assert began is not None, "the trainer never trained"
    return began, [commits[step] for step in sorted(commits)]


def trained_again(events: Iterable[ev.Stamped], kill: Kill) -> tuple[float, Incarnation] | None:
    """Return when (s) and as which incarnation the trainer first trained after it was killed; None if it never did."""
    assert kill.incarnation is not None
    for stamped in events:
        match stamped.event:
            case ev.PhaseEntered(incarnation, "train") if (
                incarnation.replica == TRAINER and incarnation.number > kill.incarnation.number
            ):
                return stamped.at, incarnation
            case _:
                pass
    return None


def account_of(events: Sequence[ev.Stamped], began: float) -> Account:
    """Return the figures of ``rrl report`` for a run whose trainer first trained at ``began`` (s)."""
    found = account(events)
    report = found.report()
    window_s, sliding = sliding_ettr(found.steps)
    return Account(
        report.ettr,
        round(robustrl_ettr(found), 4),
        {loss.cause: loss.stages for loss in report.lost},
        round(window_s, 2),
        tuple((round(at - began, 2), round(share, 4)) for at, share in sliding),
        tuple(round(point.value, 4) for point in report.curves.reward),
        tuple((round(point.at - began, 2), round(point.value, 1)) for point in report.curves.tokens_per_second),
    )


def robustrl_ettr(run: RunAccount) -> float:
    """Return RobustRL's ETTR from the first commit on: the share of the time in which training went on.

    Time in which all members of the trainer work counts fully. While they do not, time counts by the share of the
    working rollouts in the GPUs of trainer and rollouts (in the nodes in a job without GPUs).
    """
    weights = run.reserved.weights
    members = Counter({role.name: role.replicas * role.ranks for role in run.job.roles if role.name in weights})
    (trainer,) = (role.name for role in run.job.kind("trainer"))
    began, until = run.steps.steps[0].at, run.now
    changes = []
    for lane in run.lanes.lanes.values():
        role = role_of(lane.replica)
        for since, end, activity in zip(lane.starts, [*lane.starts[1:], until], lane.activities, strict=True):
            if role in members and phase(activity.phase).useful and max(since, began) < end:
                changes += [(max(since, began), 1, role), (end, -1, role)]
    effective, before, at_work = 0.0, began, Counter[str]()
    for at, change, role in sorted(changes):
        working = sum(weights[name] * count for name, count in at_work.items() if name != trainer)
        whole = sum(weights[name] * count for name, count in members.items())
        effective += (at - before) * (1.0 if at_work[trainer] == members[trainer] else working / whole)
        at_work[role] += change
        before = at
    return effective / (until - began)


def sliding_ettr(steps: CommittedSteps) -> tuple[float, list[tuple[float, float]]]:
    """Return the length of the window (s), and (end of the window in s, its ETTR) at regular intervals.

    The first window begins with the first ``train``, and the last window ends with the newest commit. The result is
    (0, []) if no step is undisturbed.
    """
    medians = steps.medians
    if medians is None or steps.began is None or steps.wall_s <= 0:
        return 0.0, []
    window_s = min(max(WINDOW_S, steps.wall_s / MAX_WINDOWS), steps.wall_s / MIN_WINDOWS)
    times, totals = [steps.began], [0.0]
    for step in steps.steps:
        useful = step.useful_s(medians)
        since, until = max(step.attempt_since, times[-1]), max(step.attempt_until, times[-1])
        times += [since, until]
        totals += [totals[-1], totals[-1] + useful]

    def total(at: float) -> float:
        index = bisect_right(times, at) - 1
        if index + 1 >= len(times):
            return totals[-1]
        span_s = times[index + 1] - times[index]
        part = (at - times[index]) / span_s if span_s else 0.0
        return totals[index] + part * (totals[index + 1] - totals[index])

    count = min(MAX_WINDOWS, max(MIN_WINDOWS, round(2 * steps.wall_s / window_s)))
    first, last = steps.began + window_s, steps.began + steps.wall_s
    points = (first + (last - first) * index / (count - 1) for index in range(count))
    return window_s, [(at, min(1.0, (total(at) - total(at - window_s)) / window_s)) for at in points]


def lost_by_stage(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean seconds that a fault of these runs lost in each stage."""
    faults = sum(len(sample.faults) for sample in samples)
    lost: dict[str, float] = {}
    for sample in samples:
        for stages in sample.account.lost.values():
            for stage, seconds in stages.items():
                lost[stage] = lost.get(stage, 0.0) + seconds
    return {stage: round(seconds / faults, 3) for stage, seconds in lost.items()} if faults else {}


def outages(run: RunDir, events: Sequence[ev.Stamped], kills: Sequence[Kill], uncommitted: int) -> tuple[Outage, ...]:
    """Return the outage after each fault of the trainer.

    If another kill falls into an outage, both outages end at the same time.
    """
    found = []
    for kill in kills:
        if kill.target not in (Target.TRAINER, Target.HANG):
            continue
        again = trained_again(events, kill)
        assert again is not None, f"the trainer did not train after {kill}"
        lost = max(0, kill.step + uncommitted - restored_step(run, again[1]))
        found.append(Outage(kill.at, round(again[0] - kill.at, 3), lost))
    return tuple(found)


def strict(sample: Sample, samples: Sequence[Sample]) -> float:
    """Return the strict ETTR of a run: the seconds of the clean run with its seed, divided by the run's seconds."""
    clean = next(
        each for each in samples if each.arm == "clean" and (each.clean, each.seed) == (sample.clean, sample.seed)
    )
    return clean.seconds / sample.seconds


def run_of(samples: Sequence[Sample], plan: str, arm: str) -> Sample | None:
    """Return the first run of an arm under a plan; None if it was not run."""
    return next((each for each in samples if (each.plan, each.arm) == (plan, arm)), None)


def time_saved(samples: Sequence[Sample]) -> list[float]:
    """Return 1 - (seconds of the arm ``role``) / (seconds of the arm ``job``) for each seed of one plan."""
    seconds = {(each.arm, each.seed): each.seconds for each in samples}
    return [1 - seconds["role", seed] / seconds["job", seed] for seed in sorted({each.seed for each in samples})]


def outage_median(samples: Sequence[Sample], arm: str) -> float | None:
    """Return the median seconds of the outages of an arm; None if the arm had no outage."""
    found = [outage.seconds for sample in samples if sample.arm == arm for outage in sample.outages]
    return statistics.median(found) if found else None


def share_at(step_s: float, steps_per_fault: float, outage_s: float) -> float:
    """Return the strict ETTR of a run with steps of ``step_s`` whose trainer fails every ``steps_per_fault`` steps.

    A failure costs the outage, and on average the time of half a step, because the step is trained again.
    """
    useful = step_s * steps_per_fault
    return useful / (useful + outage_s + step_s / 2)
