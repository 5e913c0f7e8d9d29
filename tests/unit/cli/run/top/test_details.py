"""The views of a replica and of a node show what the run's state contains about them."""

from __future__ import annotations

import msgspec

from rrl.cli.run.top.details import by_name, node_rows, node_view, replica_rows, replica_view
from rrl.cli.views.status import failures_now
from rrl.cluster.base import NodeState, NodeStatus
from rrl.core.types import GpuUse, NodeName, ReplicaId
from rrl.manager.model import events as ev
from rrl.tests.support.cli.status_scenes import drained, gang, node_lost
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn
from rrl.tests.support.cli.top import allowing


def replica_text(story: Story, replica: str, width: int = 100) -> str:
    state = story.recorded()
    view = replica_view(state, state.replica(ReplicaId(replica)), story.now, failures_now(state, story.now))
    return drawn(view, width)


def node_text(story: Story, node: str, width: int = 100) -> str:
    state = story.recorded()
    return drawn(node_view(state, state.nodes[NodeName(node)], story.now), width)


def test_replica_shows_how_its_newest_incarnation_has_spent_its_time() -> None:
    story = allowing().clocks("rollout/1", generate=90, wait_weights=10)
    assert "time        generate 90 % · wait_weights 10 % (waits for weights), of 1m40s" in replica_text(
        story, "rollout/1"
    )
    story.clocks("rollout/0", generate=90)
    assert "time        generate 100 %" in replica_text(story, "rollout/0")
    story.loses("rollout/0")
    story.fences("rollout/0").launches("rollout/0")
    assert "generate" not in replica_text(story, "rollout/0"), "the time of the previous incarnation is shown"


def test_replica_shows_what_it_has_received_of_its_newest_weights() -> None:
    story = allowing().pulls("rollout/1", 11, 1000, 1000).pulls("rollout/1", 12, 1004, 2000, fallbacks=1)
    assert "weights     of step 12 · deltas of 0.4 % of the bytes · 1 delta fallback" in replica_text(
        story, "rollout/1"
    )
    assert "deltas" not in replica_text(story, "rollout/0")


def test_replica_shows_the_gpus_of_its_node() -> None:
    story = allowing().record(ev.GpuUseRecorded({NodeName("n4"): GpuUse(4, 0.93, 61 * 2**30, 80 * 2**30)}))
    job = story.job
    roles = tuple(
        msgspec.structs.replace(one, per_member=msgspec.structs.replace(one.per_member, gpus=2)) for one in job.roles
    )
    story.state = msgspec.structs.replace(story.recorded(), job=msgspec.structs.replace(job, roles=roles))
    assert "gpus        2 for this process; all 4 of n4: 93 % busy, 61 of 80 GiB" in replica_text(story, "rollout/1")
    assert "gpus        2 for this process\n" in replica_text(story, "rollout/0"), (
        "other figures are shown although the node has not reported"
    )


def test_rank_of_a_gang_names_the_others() -> None:
    assert "gang        restarts as a whole: trainer/0 on n2, trainer/0.1 on n5" in replica_text(gang(), "trainer/0.1")


def test_dead_replica_shows_the_evidence_and_its_failures() -> None:
    story = allowing().wait(5)
    story.loses("rollout/0", "its step ended by signal 11")
    shown = replica_text(story, "rollout/0")
    assert "● dead   for 0s, about to be replaced" in shown
    assert "FAIL process ended, 0s ago, proved" in shown
    assert "step: its step ended by signal 11 (0s ago)" in shown
    assert "↻ 9s ago  failed on n3: killed by signal 9" in shown


def test_node_that_was_lost_shows_the_evidence() -> None:
    shown = node_text(node_lost(), "n4")
    assert "n4  ● excluded   left 0s ago" in shown
    assert "FAIL node lost" in shown
    assert "manager: agent and all replicas silent for 10 s (0s ago)" in shown


def test_drain_is_shown_while_it_is_requested_and_afterwards() -> None:
    story = Story().works().record(ev.CommandReceived("drain", "ada", "c1", target="n4", reason="new fan"))
    assert "drain       drain requested by ada: new fan, in progress" in node_text(story, "n4")
    assert "because     drain requested by ada: new fan" in node_text(drained(), "n4")


def test_node_shows_what_the_cluster_says_and_what_runs_there() -> None:
    story = Story().works().record(ev.NodeChanged(NodeName("n4"), NodeStatus(NodeState.DRAINING, "MIXED+DRAIN", "fan")))
    shown = node_text(story, "n4")
    assert "n4  ● draining" in shown
    assert "cluster     MIXED+DRAIN fan" in shown
    assert "replicas    rollout/1#1 generate" in shown
    assert "allocation  small-1120-064114.pool (job 77)" in shown


def test_row_of_a_node_shows_its_state_and_replicas() -> None:
    story = node_lost()
    rows = {row.key: [cell.plain for cell in row.cells] for row in node_rows(story.recorded(), story.now)}
    assert rows["n1"][:3] == ["n1", "in use", "trajectories/0, reward/0"]
    assert rows["n4"] == ["n4", "excluded", "–", "–", "node lost: silent"]
    assert rows["n5"][1] == "spare"


def test_names_sort_by_the_numbers_in_them() -> None:
    assert sorted(["rollout/10", "rollout/9", "reward/0"], key=by_name) == ["reward/0", "rollout/9", "rollout/10"]


def test_replica_without_weights_sorts_behind_all_others() -> None:
    story = allowing()
    rows = replica_rows(story.recorded(), story.now, failures_now(story.recorded(), story.now))
    weights = sorted(rows, key=lambda row: row.sort_keys[5])
    assert {row.key for row in weights[-2:]} == {"trajectories/0", "reward/0"}
