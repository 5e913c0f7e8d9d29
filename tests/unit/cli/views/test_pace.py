"""Idle shares and token rates as text."""

from __future__ import annotations

import pytest
from rich.text import Text

from rrl.cli.views.pace import agent_figures, idle_text, length_figures, packed, token_rate
from rrl.cli.views.status import status_view
from rrl.manager.model import events as ev
from rrl.manager.model.figures.stream_figures import EpisodeFigures, StreamFigures, with_episode_counts, with_step
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn, matches_stored


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"rollouts": 0.09}, "trainer 9 % idle (waits for rollouts)"),
        ({"rollouts": 0.07, "commits": 0.021}, "trainer 9 % idle (waits for rollouts 7 %, commits 2 %)"),
        ({"rollouts": 0.07, "commits": 0.004}, "trainer 7 % idle (waits for rollouts)"),
        ({"store": 0.3, "external": 0.1}, "trainer 40 % idle (waits for the store 30 %, external services 10 %)"),
        ({"rollouts": 0.001}, "trainer 0 % idle"),
        ({}, "trainer 0 % idle"),
    ],
)
def test_idle_share_is_shown_with_its_causes(shares: dict[str, float], expected: str) -> None:
    assert idle_text("trainer", shares) == expected


@pytest.mark.parametrize(("per_second", "expected"), [(0.6, "1/s"), (9999, "9999/s"), (12_345, "12.3k/s")])
def test_rate_has_four_digits_at_most(per_second: float, expected: str) -> None:
    assert token_rate(per_second) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (30, [("time", "one · two · three")]),
        (10, [("time", "one · two"), ("", "three")]),
        (2, [("time", "one"), ("", "two"), ("", "three")]),
    ],
)
def test_parts_that_do_not_fit_a_row_begin_another_one(width: int, expected: list[tuple[str, str]]) -> None:
    parts = [Text(word) for word in ("one", "two", "three")]
    assert [(label, text.plain) for label, text in packed("time", parts, width)] == expected
    assert list(packed("time", [], width)) == []


def test_run_without_readings_shows_no_idle_share() -> None:
    story = Story().works()
    assert "idle" not in drawn(status_view(story.recorded(), story.now, 100), 100)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, []),
        ({"length_bias": 0.987, "recall20": 0.4}, ["trained answers 0.99 of the mean"]),
        (
            {"length_bias": 1.0, "recall20": 0.775, "long_groups": 3.0, "longest_expected": 1900.7},
            [
                "trained answers 1.00 of the mean",
                "3 long groups, longest expected 1900 tokens",
                "78 % of the longest fifth foreseen",
            ],
        ),
        ({"long_groups": 1.0, "longest_expected": 12.0}, ["1 long group, longest expected 12 tokens"]),
        ({"longest_expected": 12.0}, ["longest expected 12 tokens"]),
    ],
)
def test_lengths_are_shown_as_far_as_they_are_known(metrics: dict[str, float], expected: list[str]) -> None:
    assert [text.plain for text in length_figures(with_step(StreamFigures(), metrics))] == expected


EPISODES = {
    "episodes_at_work": 118.0,
    "episodes_finished": 1205.0,
    "episodes_replayed": 3.0,
    "turns": 2410.0,
    "branches": 2410.0,
}


@pytest.mark.parametrize(
    ("changes", "ended", "expected"),
    [
        ({}, False, "118 at work, 3 replayed · turns 2,410 · 2 branches each"),
        ({}, True, "1,205 finished, 3 replayed · turns 2,410 · 2 branches each"),
        ({"branches": 1205.0, "episodes_replayed": 0.0}, False, "118 at work · turns 2,410 · 1 branch each"),
        (
            {"episodes_retried": 2.0, "episodes_dropped": 16.0, "branches": 1500.0},
            False,
            "118 at work, 3 replayed, 2 begun again, 16 dropped · turns 2,410 · 1.24 branches each",
        ),
        (
            {"untrained_turns": 4.0, "token_drift": 12.0},
            False,
            "118 at work, 3 replayed · turns 2,410 · 2 branches each · 4 turns not trained"
            " · 12 tokens trained in a wrong context: a bug of rrl",
        ),
    ],
)
def test_agents_have_a_row_of_their_own(changes: dict[str, float], ended: bool, expected: str) -> None:
    figures = with_episode_counts(EpisodeFigures(), EPISODES | changes)
    assert " · ".join(text.plain for text in agent_figures(figures, ended)) == expected


def test_a_run_that_has_finished_no_episode_yet_shows_those_at_work() -> None:
    figures = with_episode_counts(EpisodeFigures(), {"episodes_at_work": 4.0})
    assert [text.plain for text in agent_figures(figures, False)] == ["4 at work", "turns 0"]
    assert agent_figures(EpisodeFigures(), False) == []


def test_status_of_a_run_with_agents_equals_the_snapshot() -> None:
    story = Story().works()
    reported = {"loss": 0.5, "token_drift": 0.0, **EPISODES}
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, reported))
    matches_stored("status_agents_80", drawn(status_view(story.recorded(), story.now, 80), 80))


def test_figures_of_lengths_have_a_row_of_their_own_and_are_not_repeated_among_the_metrics() -> None:
    story = Story().works()
    reported = {"loss": 0.5, "length_bias": 0.5, "tokens_aged_0": 4.0}
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, reported))
    lines = drawn(status_view(story.recorded(), story.now, 100), 100).splitlines()
    assert [line for line in lines if line.startswith("lengths")] == ["lengths     trained answers 0.50 of the mean"]
    (shown,) = [line for line in lines if line.startswith("metrics")]
    assert "loss" in shown
    assert "length_bias" not in shown
    assert "tokens_aged" not in shown
