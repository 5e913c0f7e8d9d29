from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rrl.roles.trajectories.durable.groups import (
    TrajectoryState,
    ancestry,
    continued,
    given_length,
    path_length,
    reached,
)
from rrl.roles.trajectories.durable.records import PackedSegment, TurnCreated

TURNS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 12), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=9
)
"""Parent, offset, given and sampled tokens of each turn, and whether the turn is one of those that are looked at."""


@given(TURNS)
def test_turns_that_others_continue_are_found_without_the_path_of_each(
    drawn: list[tuple[int, int, int, int, bool]],
) -> None:
    known: dict[int, TrajectoryState] = {}
    for number, (parent, offset, own, sampled, _) in enumerate(drawn):
        kept = min(offset, path_length(known[parent])) if parent in known else 0
        created = TurnCreated(number, 0, 1, "r", parent if parent in known else None, kept, bytes(4 * own), 9, "h")
        group: Any = None
        segments = [PackedSegment(number, 0, bytes(4 * sampled), b"", 0, 1)]
        known[number] = TrajectoryState(number, group, segments, turn=created)
    turns = [known[number] for number, turn in enumerate(drawn) if turn[-1]]
    paths = [(turn, before, own) for turn in turns for before, own in ancestry(turn, known) if before is not turn]
    expected: dict[int, int] = {}
    for _, before, own in paths:
        assert before.turn is not None
        expected[before.id] = max(expected.get(before.id, 0), before.turn.offset + own)
    found = reached(turns, known)
    offsets = {number: turn.turn.offset for number, turn in known.items() if turn.turn is not None}
    assert {number: shared for number, shared in found.items() if shared > offsets[number]} == expected
    assert continued(turns, known) == {
        before.id for _, before, own in paths if before.turn is not None and own > given_length(before.turn)
    }
