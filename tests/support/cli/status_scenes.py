"""Creates runs in each situation that ``rrl status`` shows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rrl.core.launch import ExitReason
from rrl.core.run_spec import TagsSpec
from rrl.core.types import NodeName, Outcome, ReplicaId, Version
from rrl.manager.model.actions import Exclude, Why
from rrl.manager.model.events import ClocksRecorded, Decided, NoteChanged, StepCommitted, StepEnded, VersionAvailable
from rrl.tests.support.cli.story import DEFAULT_RUN, REPLICAS, Story, completed, job_view, pools_view


def starting() -> Story:
    story = Story().requests_nodes().gets_nodes()
    for replica in REPLICAS:
        story.launches(replica)
    return story.wait(2).joins("trajectories/0", "serve")


def just_lost() -> Story:
    story = Story().works()
    story.loses("rollout/0")
    return story


def node_lost() -> Story:
    story = Story().works().recovers("rollout/0").wait(5)
    story.loses_node("n4")
    return story.fences("rollout/1")


def with_rollouts(count: int, run: str = DEFAULT_RUN) -> Story:
    """Return a run at work with ``count`` rollouts, of which all but the first two are on node n3."""
    job = job_view()
    roles = tuple(msgspec.structs.replace(r, replicas=count) if r.name == "rollout" else r for r in job.roles)
    story = Story(run, msgspec.structs.replace(job, roles=roles)).works()
    for index in range(2, count):
        story.launches(f"rollout/{index}", "n3").joins(f"rollout/{index}", "generate")
    return story


def many_rollouts() -> Story:
    """Return a run of 512 rollouts: three are dead, and twenty show a message for users (note)."""
    story = with_rollouts(512)
    for index in (7, 300, 511):
        story.loses(f"rollout/{index}")
    for index in range(20, 40):
        story.record(NoteChanged(story.incarnation(f"rollout/{index}"), "the judge limits the rate"))
    return story


def crowded() -> Story:
    story = with_rollouts(40)
    for index in range(2, 40):
        story.record(VersionAvailable(story.incarnation(f"rollout/{index}"), Version(12, 1)))
    story.loses("rollout/17")
    return story


def gang() -> Story:
    """Return a run that has left a node and has a trainer of two ranks with standby processes.

    One standby process of the trainer is on a rollout's node, and another one is not ready yet. A third standby process
    waits for a rollout.
    """
    job = job_view()
    ranks = {"trainer": 2, "rollout": 1}
    roles = tuple(msgspec.structs.replace(r, ranks=ranks.get(r.name, 1), warm=r.name in ranks) for r in job.roles)
    story = Story(job=msgspec.structs.replace(job, roles=roles)).works()
    story.launches("trainer/0.1", "n5").joins("trainer/0.1", "train")
    for node in ("n2", "n5", "n3"):
        story.launches(f"standby/{node}", node).joins(f"standby/{node}", "standby")
    story.launches("standby/n4", "n4")
    story.launches("standby/n4:rollout", "n4").joins("standby/n4:rollout", "standby")
    return story.record(Decided(Exclude(NodeName("n1"), Why(("drain requested by ada",)))))


def drained() -> Story:
    """Return a run with a rollout that was killed and replaced, and whose node a user then drained."""
    story = Story().works().recovers("rollout/1").wait(60)
    story.drains("rollout/1")
    story.launches("rollout/1", "n5").wait(3).joins("rollout/1", "generate")
    return story


def ending() -> Story:
    """Return a run that ends: all its steps are committed, and one of its processes has ended.

    Before the end, a rollout was killed and replaced.
    """
    story = Story("small-20261120-064114").works().recovers("rollout/0").wait(5)
    story.stops(Outcome.COMPLETED, "step 12 of 12 is committed")
    reward = story.recorded().replica(ReplicaId("reward/0"))
    return story.record(StepEnded(reward.incarnation, f"{story.run}.reward-0.1", 0, None, ExitReason.STOPPED))


def paced() -> Story:
    """Return ten minutes of a run whose trainer waits for rollouts, and after a while also for commits."""
    story = Story().works()
    for minute in range(1, 11):
        readings = [
            story.reading("trainer/0", train=54.6 * minute, wait_data=4.2 * minute, checkpoint__commits=1.2 * minute),
            *(
                story.reading(rollout, done=42_000 * minute, generate=57.6 * minute, wait_weights=2.4 * minute)
                for rollout in ("rollout/0", "rollout/1")
            ),
        ]
        story.wait(60).record(ClocksRecorded(tuple(readings)))
        ages = {"reward": 0.9, "tokens": 72_000.0, "token_age_p50": 1.0, "token_age_max": 3.0}
        story.record(StepCommitted(story.incarnation("trainer/0"), 12 + minute, ages))
    return story


def paced_and_ended() -> Story:
    return paced().ends(Outcome.CANCELLED, "cancelled by ada")


def pools() -> Story:
    """Return a run with a further pool, an elastic pool that does not have all its nodes yet, and extras on a spare."""
    story = Story(job=pools_view()).works().resizes("burst", range(9)).grows("h20", 0, "h1")
    for index in range(7):
        story.grows("burst", index, f"b{index + 1}")
    for index in (7, 8):
        story.requests_for("burst", index)
    story.resizes("rollout", (2, 3))
    for index in (2, 3):
        story.launches(f"rollout/{index}", "n5").joins(f"rollout/{index}", "generate")
    return story.wait(4.4 * 3600)


def lending() -> Story:
    """Return ten minutes of a run whose trainer lends its node to a guest."""
    story = Story(job=msgspec.structs.replace(job_view(), tags=TagsSpec(trainer=("rollout",)))).works()
    story.launches("guest/n2", "n2").joins("guest/n2", "asleep")
    for minute in range(1, 11):
        readings = [
            story.reading("trainer/0", train=37.8 * minute, lend__store=20.4 * minute, wait_data=1.8 * minute),
            story.reading("guest/n2", done=37_742 * minute, asleep=39.6 * minute, generate=20.4 * minute),
            *(story.reading(f"rollout/{n}", done=42_000 * minute, generate=60 * minute) for n in (0, 1)),
        ]
        story.wait(60).record(ClocksRecorded(tuple(readings)))
        metrics = {"reward": 0.9, "tokens": 72_000.0, "lent_s": 6.8, "lend_cost_s": 2.124}
        story.record(StepCommitted(story.incarnation("trainer/0"), 12 + minute, metrics))
    return story.enters("trainer/0", "lend").enters("guest/n2", "generate")


SCENES: dict[str, Callable[[], Story]] = {
    "pending": lambda: Story().requests_nodes("Priority").wait(3),
    "starting": starting,
    "running": lambda: Story().works().wait(1),
    "lost": just_lost,
    "relaunching": lambda: just_lost().fences("rollout/0").wait(1).launches("rollout/0"),
    "node_lost": node_lost,
    "crowded": crowded,
    "512": many_rollouts,
    "gang": gang,
    "drained": drained,
    "ending": ending,
    "pools": pools,
    "lending": lending,
    "paced": paced,
    "paced_and_ended": paced_and_ended,
    "completed": completed,
    "failed": lambda: Story().works().ends(Outcome.FAILED, "5 restarts of rollout/0 within 600 s"),
}
