"""Idle shares and token rates as text."""

from __future__ import annotations

import pytest
from rich.text import Text

from rrl.cli.views.pace import idle_text, packed, token_rate
from rrl.cli.views.status import status_view
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
