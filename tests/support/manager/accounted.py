"""Builds small runs for tests of the accounting, with steps of 3 s and failures whose stages take known times."""

from __future__ import annotations

from rrl.core.launch import ExitReason
from rrl.core.types import Cause, Evidence, Finding, Remedy, ReplicaId, Verdict, Version
from rrl.manager.model import events as ev
from rrl.manager.reporting.accounting.run_report import Account, account
from rrl.tests.support.cli.story import DEFAULT_RUN, REPLICAS, Story

STEP_S = 3.0
STAGES = {"detect": 0.4, "decide": 0.1, "queue": 2.0, "start": 4.0, "load": 1.0, "reconnect": 0.5}
"""Seconds of each stage of a failure."""
OUTAGE_S = sum(STAGES.values())


def begun(run: str = DEFAULT_RUN) -> Story:
    """Return a run whose trainer has just begun its first step."""
    story = Story(run).requests_nodes().gets_nodes().wait(2)
    for replica in REPLICAS:
        story.launches(replica)
    story.wait(5).joins("trajectories/0", "serve").joins("reward/0", "score").joins("trainer/0", "wait_data")
    for rollout in ("rollout/0", "rollout/1"):
        story.joins(rollout, "generate").record(ev.VersionAvailable(story.incarnation(rollout), Version(0, 1)))
        story.record(ev.FirstWorkDone(story.incarnation(rollout)))
    return story.wait(1).enters("trainer/0", "train")


def trained(story: Story, first: int, last: int) -> Story:
    """Add the steps from ``first`` to ``last``."""
    for step in range(first, last + 1):
        story.commits(step)
    return story


def failed(story: Story, replica: str) -> Story:
    """Add a failure of a replica and its recovery, during which no step is trained."""
    incarnation, since = story.incarnation(replica), story.now
    finding = Finding(
        "exit_record",
        Verdict.FAIL,
        Cause.PROCESS,
        Remedy.RESTART,
        since,
        (Evidence("step", "killed by signal 9", since),),
        incarnation=incarnation,
        proof=True,
    )
    step = story.recorded().replica(ReplicaId(replica)).step or ""
    story.record(ev.StepEnded(incarnation, step, None, 9, ExitReason.SIGNALED))
    story.wait(STAGES["detect"]).record(ev.FindingChanged(finding)).wait(STAGES["decide"]).fences(replica)
    story.wait(STAGES["queue"]).launches(replica).wait(STAGES["start"]).joins(replica, "starting")
    story.wait(STAGES["load"]).record(ev.VersionAvailable(story.incarnation(replica), Version(0, 1)))
    story.wait(STAGES["reconnect"])
    if replica == "trainer/0":
        return story.enters(replica, "train")
    return story.enters(replica, "generate").record(ev.FirstWorkDone(story.incarnation(replica)))


def accounted(story: Story) -> Account:
    """Return the account of the run."""
    return account(story.stamped)
