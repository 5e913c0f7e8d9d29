"""The lines of ``rrl status`` about dead replicas and the next steps, with few and with many replicas."""

from __future__ import annotations

import re

import msgspec
import pytest

from rrl.cli.views.status import status_view
from rrl.core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from rrl.health.detection.detectors.registry import NODE_DETECTORS, PROGRESS_DETECTORS
from rrl.manager.model.actions import Fence, Rung, Why
from rrl.manager.model.events import CommandReceived, Decided, FindingChanged
from rrl.tests.support.cli.explained import INSIDE_WORDS
from rrl.tests.support.cli.status_scenes import with_rollouts
from rrl.tests.support.cli.story import BEGAN, Story
from rrl.tests.support.cli.text_snapshots import drawn


@pytest.fixture
def story() -> Story:
    return Story().works()


def row(story: Story, replica: str, after_s: float = 4.0) -> list[str]:
    """Return the words of a replica's row in the status, ``after_s`` seconds after the newest event."""
    shown = drawn(status_view(story.recorded(), story.now + after_s, 120), 120)
    (line,) = [line for line in shown.splitlines() if re.match(rf"{replica} +(#|–)", line)]
    return line.split()


def test_dead_replica_is_dead_since_its_end_and_not_in_its_last_phase(story: Story) -> None:
    story.loses("rollout/0")
    assert row(story, "rollout/0") == ["rollout/0", "#1", "n3", "dead", "4s", "v12", "about", "to", "be", "replaced"]
    assert row(story, "rollout/1")[3:5] == ["generate", "40s"]


@pytest.mark.parametrize(
    ("cause", "word"), [(Cause.HANG, "hung"), (Cause.NODE, "lost"), (Cause.GPU, "failed"), (Cause.PROCESS, "dead")]
)
def test_failed_replica_is_called_by_the_cause(cause: Cause, word: str, story: Story) -> None:
    finding = Finding(
        "x",
        Verdict.FAIL,
        cause,
        Remedy.RESTART,
        story.now - 60,
        (Evidence("m", "why", story.now),),
        incarnation=story.incarnation("rollout/0"),
    )
    story.record(FindingChanged(finding))
    assert row(story, "rollout/0")[3:5] == [word, "1m04s"]
    story.record(FindingChanged(msgspec.structs.replace(finding, verdict=Verdict.WARN)))
    assert row(story, "rollout/0")[3] == "generate"


def test_replica_that_is_restarted_shows_its_whole_downtime(story: Story) -> None:
    story.loses("rollout/0")
    story.fences("rollout/0")
    assert row(story, "rollout/0")[3:] == ["dead", "4s", "v12", "restarts", "on", "n3"]
    story.wait(2).launches("rollout/0")
    assert row(story, "rollout/0")[3:] == ["launching", "4s", "–", "down", "for", "6s"]
    story.wait(3).joins("rollout/0", "loading_weights")
    assert row(story, "rollout/0")[3:5] == ["loading_weights", "4s"]


def test_second_failure_waits_for_its_pause() -> None:
    story = Story().works().recovers("rollout/0")
    story.loses("rollout/0")
    story.fences("rollout/0")
    assert " ".join(row(story, "rollout/0", 0.0)[5:]) in ("v12 restarts in 2s on n3", "v12 restarts in 3s on n3")


def test_retired_replica_shows_that_the_run_continues_and_when_it_is_tried_again(story: Story) -> None:
    story.loses("rollout/0")
    story.record(Decided(Fence(story.incarnation("rollout/0"), Rung.DEGRADED, Why(("it fails",)))))
    window = story.job.recovery.window
    text = " ".join(row(story, "rollout/0", 0.0)[6:])
    assert text == f"the run goes on without it; tried again in {window / 60:.0f}m00s"


def test_replica_that_a_user_restarts_is_stopped_not_dead() -> None:
    story = Story().works().record(CommandReceived("restart", "ada", "c1", target="rollout/0"))
    why = Why(("restart requested by ada",), Rung.IN_PLACE)
    story.record(Decided(Fence(story.incarnation("rollout/0"), Rung.IN_PLACE, why, charged=False)))
    assert row(story, "rollout/0")[3] == "stopped"


def test_replica_on_a_lost_node_is_lost_until_it_moves(story: Story) -> None:
    story.loses_node("n4")
    assert row(story, "rollout/1")[3:5] == ["lost", "4s"]
    assert "● recovering" in drawn(status_view(story.recorded(), story.now, 80), 80)


def test_replica_on_a_failed_node_that_stays_in_use_is_shown_as_such() -> None:
    story = Story().works().loses_node("n3").wait(100)
    (lost,) = story.recorded().findings.values()
    story.record(FindingChanged(msgspec.structs.replace(lost, node=NodeName("n2"), since=story.now)))
    story.record(FindingChanged(msgspec.structs.replace(lost, node=NodeName("n4"), since=story.now)))
    shown = drawn(status_view(story.recorded(), story.now, 120), 120)
    assert ("stays on this node for now" in shown) is ("stays in use" in shown)


def test_view_of_512_lost_rollouts_fits_two_screens() -> None:
    story = with_rollouts(512)
    for index in range(2, 512):
        story.loses(f"rollout/{index}")
    lines = drawn(status_view(story.recorded(), story.now + 4, 100), 100).splitlines()
    assert len(lines) < 60
    assert any("500 more: 498 dead, 2 generate" in line for line in lines)
    assert any("498 more" in line and "rrl status --json" in line for line in lines)


def test_compact_view_lists_only_unusual_replicas(story: Story) -> None:
    story.loses("rollout/0")
    lines = drawn(status_view(story.recorded(), story.now, 80, max_listed=0), 80).splitlines()
    assert [line.split() for line in lines[9:14]] == [
        ["trajectories", "1", "serve"],
        ["reward", "1", "wait_work"],
        ["trainer", "1", "wait_data"],
        ["rollout/0", "#1", "n3", "dead", "0s", "v12", "about", "to", "be", "replaced"],
        ["rollout", "1", "more", "generate"],
    ]


@pytest.mark.parametrize("detector", [one.__name__ for one in (*PROGRESS_DETECTORS, *NODE_DETECTORS)])
def test_no_internal_word_is_shown_for_a_detector(detector: str, story: Story) -> None:
    finding = Finding(
        detector,
        Verdict.WARN,
        Cause.HANG,
        Remedy.NONE,
        BEGAN,
        (Evidence("m", "why", BEGAN),),
        incarnation=story.incarnation("rollout/0"),
    )
    shown = drawn(status_view(story.record(FindingChanged(finding)).recorded(), story.now, 120), 120)
    assert not INSIDE_WORDS.search(shown)
    assert "_" not in shown[shown.index("! WARN") :]


def test_all_failure_reasons_are_shown_in_full(story: Story) -> None:
    for replica in ("rollout/0", "rollout/1", "trainer/0"):
        story.loses(replica, f"exited with code 1: {'words and ' * 20}the end of {replica}")
        story.wait(1).fences(replica, f"exited with code 1: {'words and ' * 20}the end of {replica}")
        story.launches(replica).joins(replica, "generate")
    for replica in ("rollout/0", "rollout/1", "trainer/0"):
        story.loses(replica, f"exited with code 2: {'words and ' * 20}the finish of {replica}")
    shown = " ".join(drawn(status_view(story.recorded(), story.now, 80), 80).split())
    for replica in ("rollout/0", "rollout/1", "trainer/0"):
        assert f"the end of {replica}" in shown
        assert f"the finish of {replica}" in shown
    assert "…" not in shown
