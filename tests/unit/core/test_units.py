from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.units import seconds, size, slurm_mem, slurm_time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 0.5),
        ("90s", 90),
        ("1.5min", 90),
        ("2h", 7200),
        ("1d", 86400),
        (" 5 s ", 5),
        ("30:00", 1800),
        ("1:30:00", 5400),
        ("1-12:00", 129600),
        ("1-12:00:30", 129630),
    ],
)
def test_durations_are_parsed_with_a_unit_or_in_slurms_format(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("16GiB", 2**34), ("1.5MiB", 3 * 2**19), ("1KB", 1000), ("7B", 7)])
def test_sizes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5 weeks", "1e3s", "1:2", "٣s", "9" * 400 + "s"])
def test_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match='write for example "90s"'):
        seconds(text)


@pytest.mark.parametrize("text", ["", "5", "GiB", "5G", "1.5B", "-1GiB", "5 gib", "9" * 400 + "B", "9" * 15 + "TiB"])
def test_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match='write for example "16GiB"'):
        size(text)


@given(st.integers(0, 10**8))
def test_slurm_times_read_back_as_written(whole: int) -> None:
    assert seconds(slurm_time(whole)) == whole


def test_requested_resources_are_rounded_up() -> None:
    assert slurm_time(0.2) == "0-00:00:01"
    assert slurm_mem(2**20 + 1) == "2M"
