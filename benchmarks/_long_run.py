"""Writes a run of 10,000 steps as its manager would have left it, for commands that read a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.manager.model import events as ev
from rrl.manager.model.reducer import fold
from rrl.manager.storage.journal import SEGMENT_RECORDS, Journal
from rrl.tests.support.cli.story import BEGAN, Story, job_view

LONG_RUN = "long-1120-064114"
LONG_RUN_STEPS = 10_000
STEP_S = 6.0
PHASES = ("wait_data", "train", "checkpoint")
METRICS = dict.fromkeys(
    (
        "reward", "loss", "entropy", "kl", "clip_share", "gradient_norm", "learning_rate", "tokens", "parts",
        "token_age_p50", "token_age_max", "token_age_run_max", "tokens_aged_0", "tokens_aged_1", "tokens_aged_2",
        "length_bias", "recall20", "long_groups", "longest_expected", "stale_groups", "stale_share", "unscored_groups",
        "unscored_share", "drift",
    ),
    0.5,
)  # fmt: skip
"""Metrics of each step: as many as the built-in trainer and the store commit with a step."""


def write_long_run(root: Path) -> None:
    """Write the journal of a run with two rollouts: eight events for each step, from all processes of the run."""
    story = Story(LONG_RUN, job_view(LONG_RUN_STEPS)).works()
    run, state = story.written(root), story.recorded()
    journal, seq, at = Journal(run, 2), len(story.stamped), story.at
    for step in range(13, LONG_RUN_STEPS + 1):
        at += STEP_S
        for event in _events_of(step):
            seq += 1
            stamped = ev.Stamped(seq, BEGAN + at, 2, event)
            journal.append(stamped)
            state = fold(state, stamped)
        if journal.full:
            journal.flush()
            journal.rotate(state)
    journal.close()
    assert seq > 2 * SEGMENT_RECORDS


def _events_of(step: int) -> Iterator[ev.Event]:
    trainer, *rollouts = (Incarnation(ReplicaId(id), 1) for id in ("trainer/0", "rollout/0", "rollout/1"))
    spent = tuple(PhaseTime(phase, "", int(step * 2e9)) for phase in PHASES)
    yield from (ev.PhaseEntered(trainer, phase) for phase in PHASES)
    yield ev.StepCommitted(trainer, step, METRICS)
    yield ev.ClocksRecorded(tuple((id, ClockReading(1, step, spent)) for id in (trainer, *rollouts)))
    yield from (ev.VersionAvailable(id, Version(step, 1)) for id in (trainer, *rollouts))
