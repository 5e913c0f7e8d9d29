"""Computes figures of a run of benchmarks/ettr.py from its journal. Only :func:`outages` also reads the trainer's logs.

The clock of a run starts when its trainer first trains, and stops when its last step is committed. The lost time by
cause and stage is that of ``rrl report`` (rrl.manager.reporting.accounting).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from rrl.benchmarks._ettr_faults import Kill, Target
from rrl.benchmarks.restart import restored_step
from rrl.core.run_dir import RunDir
from rrl.core.types import TRAINER, Incarnation
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting.run_report import account


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
    """Estimate of the strict ETTR from this run alone."""
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
    report = account(events).report()
    return Account(
        report.ettr_estimate,
        {loss.cause: loss.stages for loss in report.lost},
        report.window_s,
        tuple((round(point.at - began, 2), round(point.share, 4)) for point in report.sliding),
        tuple(round(point.value, 4) for point in report.curves.reward),
        tuple((round(point.at - began, 2), round(point.value, 1)) for point in report.curves.tokens_per_second),
    )


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
