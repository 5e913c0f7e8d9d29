"""The appends of a rollout are checked in its own process, against its leases."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rrl.core.run_spec import ExtraSpec
from rrl.core.types import Version
from rrl.roles.launcher.end_report import Misuse
from rrl.roles.trajectories.types import Item, Score, Segment
from rrl.roles.worker.work_items import LeasedTrajectories, _check_scores

V0 = Version(0, 0)


def segment(trajectory: int, offset: int, *tokens: int) -> Segment:
    return Segment(trajectory, offset, tokens, (-0.5,) * len(tokens), V0)


@pytest.fixture
def leased() -> LeasedTrajectories:
    """Return leases of trajectory 4, which is new, and 7, which has two tokens. Each may have up to five tokens."""
    leased = LeasedTrajectories({})
    leased.add([Item(4, 1, (9,), (), 5), Item(7, 2, (9,), (segment(7, 0, 3, 4),), 3)])
    return leased


def test_trajectory_that_two_answers_lease_is_new_once(leased: LeasedTrajectories) -> None:
    again, new = Item(4, 1, (9,), (), 5), Item(5, 1, (9,), (), 5)
    leased.appended([segment(4, 0, 2)], [], [])
    assert leased.add_new([again, new]) == (new,)
    leased.check([segment(4, 1, 3), segment(5, 0, 3)], [4, 5])


def test_segments_that_continue_their_trajectories_are_accepted(leased: LeasedTrajectories) -> None:
    segments = [segment(4, 0, 2), segment(7, 2, 5), segment(4, 1, 3, 1)]
    leased.check(segments, [4])
    leased.appended(segments, [4], [])
    leased.check([segment(7, 3, 6, 1)], [7])
    assert leased.ids == [7]


@pytest.mark.parametrize(
    ("wrong", "finished", "message"),
    [
        (
            segment(4, 1, 2),
            [],
            "segment of trajectory 4 (group 1): its offset is 1, expected 0, the number of tokens"
            " that the trajectory has: those of item.so_far, and those appended since",
        ),
        (
            segment(7, 0, 3),
            [],
            "segment of trajectory 7 (group 2): its offset is 0, expected 2, the number of tokens"
            " that the trajectory has: those of item.so_far, and those appended since",
        ),
        (
            segment(7, 2, 2, 2, 2, 2),
            [],
            "segment of trajectory 7 (group 2): it has 4 tokens, but only 3 may still be"
            " appended (item.max_new less the tokens appended since the lease)",
        ),
        (segment(4, 0), [], "segment of trajectory 4 (group 1): it has no tokens"),
        (replace(segment(4, 0, 2), offset=0.0), [], "segment of trajectory 4: its offset is 0.0, which is not an int"),
        (
            segment(1, 0, 2),
            [],
            "a segment: 1 is not the id of a trajectory that was leased to this process"
            " (item.trajectory); the leased trajectories are 4, 7",
        ),
        (
            Segment(4, 0, (2, 3), (-0.5,), V0),
            [],
            "segment of trajectory 4: the number of tokens is 2, but the number"
            " of log-probabilities is 1; they must be equal",
        ),
        (Segment(4, 0, (2,), (float("nan"),), V0), [], "segment of trajectory 4: a log-probability is not finite"),
        (segment(4, 0, 2**31), [], "segment of trajectory 4: "),
        (Segment(4, 0, (2.5,), (-0.5,), V0), [], "segment of trajectory 4: "),  # type: ignore[arg-type]
        (segment(4, 0, 2), [2], "finished: 2 is not the id of a trajectory that was leased to this process"),
        (segment(4, 0, 2), ["4"], "finished: '4' is not the id of a trajectory"),
        (segment(7, 2, 2), [4], "finished: trajectory 4 (group 1) has no tokens; append one"),
    ],
)
def test_mistake_in_an_append_is_one_line_that_names_the_trajectory(
    leased: LeasedTrajectories, wrong: Segment, finished: list[int], message: str
) -> None:
    with pytest.raises(Misuse) as refused:
        leased.check([wrong], finished)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    leased.check([segment(4, 0, 2), segment(7, 2, 3)], [4])  # the refused append has changed nothing


def test_wrong_extras_of_a_segment_are_refused_where_they_are_appended() -> None:
    leased = LeasedTrajectories({"experts": ExtraSpec(per_token=2), "image": ExtraSpec(per_trajectory=8)})
    experts = {"experts": b"1234"}
    begun = replace(segment(7, 0, 3, 4), extras={**experts, "image": b"first"})
    leased.add([Item(4, 1, (9,), (), 5), Item(7, 2, (9,), (begun,), 3)])
    for wrong, message in (
        (segment(4, 0, 2), "segment of trajectory 4: extra 'experts' is missing; 1 tokens take 2 bytes, 2 each"),
        (
            replace(segment(4, 0, 2), extras={"expert": b"12"}),
            "segment of trajectory 4: extra 'expert' is not declared",
        ),
        (
            replace(segment(7, 2, 5, 6), extras={**experts, "image": b"other"}),
            "segment of trajectory 7 (group 2): extra 'image' is in an earlier segment; a trajectory has it once",
        ),
    ):
        with pytest.raises(Misuse) as refused:
            leased.check([wrong], [])
        assert str(refused.value).startswith(message)
    first = replace(segment(4, 0, 2, 3), extras={**experts, "image": b"one"})
    second = replace(segment(4, 2, 2, 3), extras={**experts, "image": b"two"})
    with pytest.raises(Misuse, match="extra 'image' is in an earlier segment"):
        leased.check([first, second], [])
    leased.appended([first], [], [])
    with pytest.raises(Misuse, match="extra 'image' is in an earlier segment"):
        leased.check([second], [])
    leased.check([first, replace(second, extras=experts)], [])


def test_second_segment_of_one_append_continues_the_first(leased: LeasedTrajectories) -> None:
    with pytest.raises(Misuse, match="its offset is 3, expected 1"):
        leased.check([segment(4, 0, 2), segment(4, 3, 2)], [])


def test_trajectory_that_was_complete_before_is_refused(leased: LeasedTrajectories) -> None:
    leased.appended([segment(4, 0, 2, 1)], [4], [])
    with pytest.raises(Misuse, match="finished: trajectory 4 is complete already: an earlier append"):
        leased.check([segment(7, 2, 3)], [4])
    with pytest.raises(Misuse, match="a segment: trajectory 4 is complete already"):
        leased.check([segment(4, 2, 3)], [])


def test_trajectory_with_all_its_tokens_may_be_listed_as_complete_later(leased: LeasedTrajectories) -> None:
    leased.appended([segment(7, 2, 3, 3, 3)], [], [])
    assert leased.ids == [4]
    leased.check([], [7])


def test_tokens_for_a_lost_trajectory_are_left_to_the_store_to_refuse(leased: LeasedTrajectories) -> None:
    leased.appended([segment(4, 0, 2), segment(7, 2, 3)], [4], [4, 7])
    leased.check([segment(4, 1, 2), segment(7, 0, 1)], [7])
    # the trajectory was leased to this process once more
    leased.add([Item(7, 2, (9,), (segment(7, 0, 3, 4), segment(7, 2, 8)), 2)])
    with pytest.raises(Misuse, match="its offset is 2, expected 3"):
        leased.check([segment(7, 2, 5)], [])


def test_segment_that_was_appended_before_may_be_repeated(leased: LeasedTrajectories) -> None:
    leased.appended([segment(4, 0, 2, 3)], [], [])
    leased.check([segment(4, 0, 2, 3), segment(4, 2, 5)], [])
    leased.appended([segment(4, 0, 2, 3), segment(4, 2, 5)], [], [])
    leased.check([segment(4, 3, 1)], [4])
    with pytest.raises(Misuse, match="its offset is 0, expected 3"):
        leased.check([segment(4, 0, 7, 7)], [])


def test_only_the_newest_ended_trajectories_are_remembered(
    leased: LeasedTrajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.roles.worker.work_items._MAX_ENDED", 1)
    leased.appended([], [], [4, 7])
    leased.check([segment(7, 0, 1)], [])
    with pytest.raises(Misuse, match=r"4 is not the id .*; no trajectory is leased$"):
        leased.check([segment(4, 0, 1)], [])


@pytest.mark.parametrize("wrong", [(4, "1", 1.0), (4, 1.0, None), ("4", 1.0, 1.0), (4.0, 1.0, 1.0)])
def test_score_that_the_store_would_drop_is_refused(wrong: Any) -> None:
    _check_scores([Score(4, 1, 0.5)])
    with pytest.raises(
        Misuse, match=r"a score is Score\(trajectory=.*; expected rrl\.Score\(trajectory, reward, training\)"
    ):
        _check_scores([Score(4, 1.0, 1.0), Score(*wrong)])
