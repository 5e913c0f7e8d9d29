"""Idle shares and token rates as text."""

from __future__ import annotations

import pytest
from rich.text import Text

from rrl.cli.views.pace import idle_text, length_figures, packed, token_rate
from rrl.cli.views.status import status_view
from rrl.manager.model import events as ev
from rrl.manager.model.stream_figures import StreamFigures, with_step
from rrl.tests.support.cli.story import Story
from rrl.tests.support.cli.text_snapshots import drawn


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


def test_figures_of_lengths_have_a_row_of_their_own_and_are_not_repeated_among_the_metrics() -> None:
    story = Story().works()
    reported = {"loss": 0.5, "length_bias": 0.5, "tokens_aged_0": 4.0}
    story.record(ev.StepCommitted(story.incarnation("trainer/0"), 13, reported))
    lines = drawn(status_view(story.recorded(), story.now, 100), 100).splitlines()
    assert [line for line in lines if line.startswith("lengths")] == ["lengths  trained answers 0.50 of the mean"]
    (shown,) = [line for line in lines if line.startswith("metrics")]
    assert "loss" in shown
    assert "length_bias" not in shown
    assert "tokens_aged" not in shown
