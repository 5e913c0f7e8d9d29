from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.cli.common.runs import summary_of
from rrl.cli.views.formatting import bar, curve, folded, span, stage
from rrl.cli.views.status import one_line, standing, status_view
from rrl.cli.views.summary import runs_view, summary_view
from rrl.core.types import NodeName, Outcome, Version
from rrl.manager.model.actions import Exclude, Why
from rrl.manager.model.events import (
    CommandReceived,
    Decided,
    FindingChanged,
    Joined,
    NoteChanged,
    StepCommitted,
    VersionAvailable,
)
from rrl.tests.support.cli.story import BEGAN, NODES, REPLICAS, Story, completed, job_view
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored


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


def crowded() -> Story:
    job = job_view()
    roles = tuple(msgspec.structs.replace(r, replicas=40) if r.name == "rollout" else r for r in job.roles)
    story = Story(job=msgspec.structs.replace(job, roles=roles)).works()
    for index in range(2, 40):
        story.launches(f"rollout/{index}", "n3").joins(f"rollout/{index}", "generate")
        story.record(VersionAvailable(story.incarnation(f"rollout/{index}"), Version(12, 1)))
    story.loses("rollout/17")
    return story


def gang() -> Story:
    """Two ranks and their shadows, one more on a rollout's node, one that is not ready yet; a rollout that is kept
    ready; a node that was left."""
    job = job_view()
    ranks = {"trainer": 2, "rollout": 1}
    roles = tuple(msgspec.structs.replace(r, ranks=ranks.get(r.name, 1), warm=r.name in ranks) for r in job.roles)
    story = Story(job=msgspec.structs.replace(job, roles=roles)).works()
    story.launches("trainer/0.1", "n5").joins("trainer/0.1", "train")
    for node in ("n2", "n5", "n3"):
        story.launches(f"standby/{node}", node).joins(f"standby/{node}", "standby")
    story.launches("standby/n4", "n4")
    story.launches("standby/n4:rollout", "n4").joins("standby/n4:rollout", "standby")
    return story.record(Decided(Exclude(NodeName("n1"), Why(("asked by ada",)))))


SCENES: dict[str, Callable[[], Story]] = {
    "pending": lambda: Story().requests_nodes("Priority").wait(3),
    "starting": starting,
    "running": lambda: Story().works().wait(1),
    "lost": just_lost,
    "relaunching": lambda: just_lost().fences("rollout/0").wait(1).launches("rollout/0"),
    "node_lost": node_lost,
    "crowded": crowded,
    "gang": gang,
    "completed": completed,
    "failed": lambda: Story().works().ends(Outcome.FAILED, "5 restarts of rollout/0 within 600 s"),
}


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("scene", SCENES)
def test_the_status_of_a_run_looks_as_kept(scene: str, width: int) -> None:
    story = SCENES[scene]()
    text = drawn(status_view(story.recorded(), story.now + 4, width), width)
    assert max(map(len, text.splitlines())) <= width
    matches_stored(f"status_{scene}_{width}", text)


def test_a_note_about_the_manager_takes_the_place_of_its_line() -> None:
    story = Story().works()
    text = drawn(status_view(story.recorded(), story.now, 100, ["silent for 40 s", "job 7 waits"]), 100)
    assert "manager  silent for 40 s" in text
    assert "         job 7 waits" in text
    assert "epoch" not in text


def test_the_same_state_gives_the_same_picture() -> None:
    story = node_lost()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(story.recorded()), type=type(story.recorded()))
    assert drawn(status_view(state, story.now, 100), 100) == drawn(status_view(story.recorded(), story.now, 100), 100)


def test_what_a_run_says_is_never_taken_for_markup() -> None:
    story = Story().works().ends(Outcome.FAILED, "[red]boom[/red] [/nonsense] :smile:")
    assert "[red]boom[/red] [/nonsense] :smile:" in drawn(status_view(story.recorded(), story.now, 100), 100)


def test_nodes_that_were_kept_beyond_the_runs_end_are_not_forgotten() -> None:
    def picture(keep: bool) -> str:
        story = (
            Story()
            .works()
            .record(CommandReceived("cancel", "ada", "c1", keep_allocations=keep))
            .ends(Outcome.CANCELLED, "asked")
        )
        return drawn(status_view(story.recorded(), story.now, 80), 80)

    assert "kept     job 77, while it lasts (rrl resume uses it, scancel 77 releases it)" in picture(keep=True)
    assert "kept" not in picture(keep=False)


def test_one_line_tells_who_is_not_at_work() -> None:
    story = just_lost().fences("rollout/0")
    assert one_line(story.recorded(), silent=True) == (
        "small-1120-064114: recovering, step 12/40, reward 0.94, rollout/0#1 wanted, its manager does not respond"
    )


def test_the_summary_of_a_run_looks_as_kept(tmp_path: Path) -> None:
    summary = summary_of(completed().written(tmp_path))
    assert summary is not None
    matches_stored("summary", drawn(summary_view(summary | {"run_dir": "/runs/small"}), 100))


def test_a_summary_with_holes_is_shown_with_dashes() -> None:
    summary: dict[str, Any] = {
        "run": "x", "outcome": "failed", "why": "no nodes", "steps": 0, "reward_first10": None, "reward_last10": None,
        "faults": 0, "ettr": None, "run_seconds": None, "run_dir": "/runs/x",
        "recoveries": [{"replica": "rollout/0", "incarnation": 2, "detect_s": None}],
    }  # fmt: skip
    matches_stored("summary_with_holes", drawn(summary_view(summary), 80))
    drawn(summary_view({}), 80)


@pytest.mark.parametrize(("share", "shown"), [(0.5, False), (0.62, True)])
def test_status_warns_where_most_of_what_is_made_is_too_old(share: float, shown: bool) -> None:
    story = Story().works()
    metrics = {"reward": 0.5, "stale_groups": 40.0, "stale_share": share}
    story.record(StepCommitted(story.incarnation("trainer/0"), 30, metrics))
    picture = drawn(status_view(story.recorded(), story.now, 80), 80)
    assert ("stale    62% of all groups are dropped: older than [sampling] staleness" in picture) is shown


def test_status_always_shows_the_age_of_trained_tokens_and_what_the_trainer_waits_for() -> None:
    story = Story().works()
    assert "age p50" not in drawn(status_view(story.recorded(), story.now, 100), 100)
    ages = {"reward": 0.5, "token_age_p50": 1.0, "token_age_max": 3.0, "token_age_run_max": 3.0}
    story.record(StepCommitted(story.incarnation("trainer/0"), 30, ages))
    story.record(
        NoteChanged(
            story.incarnation("trainer/0"), "the trainer waits for group 412: step 96 is the last that may train it"
        )
    )
    picture = drawn(status_view(story.recorded(), story.now, 100), 100)
    assert "tokens   age p50 1, max 3 weight versions" in picture
    assert "note     trainer/0: the trainer waits for group 412: step 96 is the last that may train it" in picture
    assert "token_age" not in picture, "it has a row of its own"


def test_status_says_which_pipe_weights_move_over_and_when_they_cannot() -> None:
    story = Story().works()

    def serves(replica: str, at: str) -> str:
        joined = Joined(story.incarnation(replica), NodeName(NODES[replica]), NODES[replica], 124, weight_address=at)
        return drawn(status_view(story.record(joined).recorded(), story.now, 80), 80)

    assert "weights  over ucx" in serves("trainer/0", "ucx://10.0.0.2:7001")
    assert "over tcp and ucx" in (mixed := serves("rollout/0", "tcp://10.0.0.3:7001"))
    assert "cannot pull" not in mixed
    assert "over nixl, tcp and ucx; pulls between these are impossible" in serves("rollout/1", "nixl://10.0.0.4:7001")


def test_a_summary_tells_what_was_dropped_for_its_age_where_anything_was() -> None:
    reported = drawn(summary_view({"stale_groups": 7, "stale_share": 0.0123}), 100)
    assert "7 groups, 1.2% of those generated, were dropped: older than [sampling] staleness allows" in reported
    assert "stale" not in drawn(summary_view({"stale_groups": 0, "stale_share": 0.0}), 100)


def test_the_list_of_runs_looks_as_kept() -> None:
    blank: dict[str, Any] = {"step": 0, "steps": 40, "reward": None, "recoveries": 0, "started": None, "ended": None}
    rows = [
        blank | {"run": "quick-1120-070000", "standing": "submitted"},
        blank | {"run": "quick-1120-064114", "standing": "running", "step": 12, "reward": 0.5, "started": BEGAN},
        blank | {"run": "small-1119-000000", "standing": "completed", "step": 40, "reward": 0.93, "recoveries": 2,
                 "started": BEGAN - 90000, "ended": BEGAN - 82000},
        blank | {"run": "tools-1119-000000", "standing": "completed", "steps": 0,
                 "started": BEGAN - 90000, "ended": BEGAN - 82000},
    ]  # fmt: skip
    matches_stored("runs", drawn(runs_view(rows, BEGAN + 60), 80))


def test_spans_have_two_units_at_most() -> None:
    assert [span(s) for s in (-1, 0.9, 59, 60, 134, 3600, 11100, 187200)] == [
        "0s", "0s", "59s", "1m00s", "2m14s", "1h00m", "3h05m", "2d04h",
    ]  # fmt: skip
    assert [stage(s) for s in (None, 0.123, 99.9, 150)] == ["–", "0.12s", "99.90s", "2m30s"]


def test_a_curve_has_one_block_a_value_and_the_whole_range() -> None:
    assert curve([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert curve([-5.0, 0.0, 5.0], 10) == "▁▅█"
    assert curve([3.0, 3.0], 10) == "▁▁"
    assert curve([0.1] * 50, 10) == "▁" * 10
    assert curve([], 10) == ""


def test_a_bar_is_full_only_at_the_end() -> None:
    assert [len(bar(done, 40, 24)[0]) for done in (0, 39, 40, 99)] == [0, 23, 24, 24]
    assert len("".join(bar(3, 0, 24))) == 24


def test_node_names_are_folded_or_at_least_listed() -> None:
    assert folded(["n3", "n1", "n2", "gpu7"]) == "gpu7,n[1-3]"
    assert folded(["n1", "odd[name"]) == "n1,odd[name"
    assert folded([]) == ""


def test_a_run_that_works_without_a_lost_node_runs_though_that_node_is_still_lost() -> None:
    story = node_lost()
    assert standing(story.recorded())[0] == "recovering"
    story.wait(0.2).launches("rollout/1", "n2").joins("rollout/1", "generate")
    assert standing(story.recorded()) == ("running", "green")


def test_an_exclusion_that_the_breaker_holds_back_names_node_time_reason_and_finding() -> None:
    story = Story().works().loses_node("n3").wait(100)
    (lost,) = story.recorded().findings.values()
    story.record(Decided(Exclude(NodeName("n4"), Why(("node_lost: silent",)))))
    story.record(FindingChanged(msgspec.structs.replace(lost, node=NodeName("n5"), since=story.now)))
    shown = drawn(status_view(story.recorded(), story.now, 180), 180)
    assert "breaker  n5 stays in use for 8m20s: 2 of 5 nodes excluded within 600 s, and no more may be " in shown
    assert "(node_lost: manager: agent and all replicas silent for 10 s)" in shown
    assert "breaker" not in drawn(status_view(node_lost().recorded(), story.now, 180), 180)
