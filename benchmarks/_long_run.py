"""Writes a run of 10,000 steps and 400 failures as its manager would have left it, for commands that read it all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rrl.core.phases import ClockReading, PhaseTime
from rrl.core.types import Version
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, LowerRungs, Rung, Why
from rrl.manager.storage.journal import SEGMENT_RECORDS, Journal
from rrl.tests.support.cli.story import NODES, Story, job_view

LONG_RUN = "long-1120-064114"
LONG_RUN_STEPS = 10_000
STEP_S = 6.0
STEPS_PER_FAILURE = 25
"""Number of steps from one failure to the next: 150 s, more often than in a real run of this length."""
FAILURES_PER_SPARE = 4
"""Every fourth failure is repaired on another node, as a planner does after several failures on one node."""
TRAINER, ROLLOUTS = "trainer/0", ("rollout/0", "rollout/1")
FAILING = (*ROLLOUTS, TRAINER)
"""The replicas that fail in turn."""
SPARES = ("n1", "n2", "n3", "n4", "n5")
"""The nodes to which repairs move a failed replica, in turn."""
PHASES = ("wait_data", "train", "checkpoint")
METRICS = dict.fromkeys(
    (
        "reward",
        "loss",
        "entropy",
        "kl",
        "clip_share",
        "gradient_norm",
        "learning_rate",
        "tokens",
        "parts",
        "token_age_p50",
        "token_age_max",
        "token_age_run_max",
        "tokens_aged_0",
        "tokens_aged_1",
        "tokens_aged_2",
        "length_bias",
        "recall20",
        "long_groups",
        "longest_expected",
        "stale_groups",
        "stale_share",
        "unscored_groups",
        "unscored_share",
        "drift",
    ),
    0.5,
)
"""Metrics of each step: as many as the built-in trainer and the store commit with a step."""


def write_long_run(root: Path) -> None:
    """Write the journal of a run with two rollouts: eight events for each step and eight for each failure.

    Each failure leads to two decisions: the repair and the start of the next incarnation.
    """
    story = Story(LONG_RUN, job_view(LONG_RUN_STEPS)).works()
    run = story.written(root)
    story.epoch, appended, started = 2, len(story.stamped), dict.fromkeys(FAILING, 0)
    journal = Journal(run, story.epoch)
    for step in range(13, LONG_RUN_STEPS + 1):
        story.wait(STEP_S)
        if step % STEPS_PER_FAILURE == 0:
            number = step // STEPS_PER_FAILURE
            started[replica := FAILING[number % len(FAILING)]] = step - 1
            _fail(story, replica, number)
        story.record(*_events_of(story, step, started))
        for stamped in story.stamped[appended:]:
            journal.append(stamped)
        appended = len(story.stamped)
        if journal.full:
            journal.flush()
            journal.rotate(story.recorded())
    journal.close()
    assert appended > 2 * SEGMENT_RECORDS


def _fail(story: Story, replica: str, number: int) -> None:
    """Record failure ``number`` and its repair, with the reasons that a planner gives."""
    failed = story.incarnation(replica)
    node = str(story.recorded().replica(failed.replica).node or NODES[replica])
    (evidence,) = story.loses(replica).evidence
    why = Why((evidence.text,), Rung.IN_PLACE, f"joins again on {node}", story.now + 120.0)
    if number % FAILURES_PER_SPARE == 0:
        lower = LowerRungs((Rung.IN_PLACE,), f"at most 2 failures on {node} within 1 h")
        why = Why(why.evidence, Rung.SPARE, "joins again on a spare node", why.deadline, (lower,))
        node = SPARES[number % len(SPARES)]
    story.record(ev.Decided(Fence(failed, why.rung or Rung.IN_PLACE, why)))
    why = Why((f"{replica} is wanted and {node} has capacity",), expects=f"{replica}#{failed.number + 1} joins")
    story.launches(replica, node, why).wait(STEP_S / 2)
    story.joins(replica, PHASES[0] if replica == TRAINER else "generate")


def _events_of(story: Story, step: int, started: Mapping[str, int]) -> Iterator[ev.Event]:
    """Yield the events of a step; ``started`` has, by replica, the last step before its current incarnation began."""
    trainer, rollouts = story.incarnation(TRAINER), [story.incarnation(replica) for replica in ROLLOUTS]
    yield from (ev.PhaseEntered(trainer, phase) for phase in PHASES)
    yield ev.StepCommitted(trainer, step, METRICS)
    yield ev.ClocksRecorded(
        tuple(
            (incarnation, _reading(incarnation.number, step - started[incarnation.replica]))
            for incarnation in (trainer, *rollouts)
        )
    )
    version = Version(step, trainer.number)
    yield ev.VersionAvailable(trainer, version)
    yield ev.WeightsRecorded(tuple((rollout, version) for rollout in rollouts))


def _reading(number: int, steps: int) -> ClockReading:
    return ClockReading(number, steps, tuple(PhaseTime(phase, "", int(steps * 2e9)) for phase in PHASES))
