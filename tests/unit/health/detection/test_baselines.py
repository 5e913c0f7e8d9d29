"""What one watch has learned, another one may begin with."""

from __future__ import annotations

import pytest

from rrl.core.types import Life, NodeName, ReplicaId
from rrl.health.detection.baselines import Lesson, Took, Usual, noticeable
from rrl.health.detection.watch import Watch

N1 = NodeName("n1")
TRAINER = Life(ReplicaId("trainer/0"), 1)
LESSON = Lesson({"train": Took(8, 60.0, 90.0), "checkpoint": Took(8, 5.0, 8.0)}, tensor_seen=True)


def learned(passes: int = 6, tensor: float | None = 0.5) -> Watch:
    """A trainer that has trained so often, for 60 s each."""
    watch = Watch()
    watch.launched(TRAINER, N1, 0.0)
    watch.joined(TRAINER, N1, "starting", 1.0)
    for index in range(passes):
        watch.entered(TRAINER, "train", index, None, 100.0 * index)
        watch.load(TRAINER, 1.0, 0.9, 100.0 * index + 2.0, tensor)
        watch.entered(TRAINER, "wait_data", index + 1, None, 100.0 * index + 60.0)
    return watch


def inherited(lessons: dict[str, Lesson], passed: tuple[str, ...]) -> Watch:
    """A watch that finds the trainer in a step."""
    watch = Watch()
    watch.remember(lessons)
    watch.launched(TRAINER, N1, 1000.0)
    watch.adopted(TRAINER, passed)
    watch.joined(TRAINER, N1, "train", 1001.0)
    return watch


def test_another_watch_knows_what_was_usual_from_the_first_word_that_it_hears() -> None:
    first = learned()
    watch = inherited(first.lessons(), ("starting", "train"))
    seen = watch.replicas[TRAINER.replica]
    assert (seen.usual, seen.slowest) == (60.0, 60.0)
    assert seen.activity.tensor_seen
    assert watch.lessons() == first.lessons(), "and hands on as much"


def test_nothing_is_learned_of_who_was_not_seen_long_enough() -> None:
    assert learned(passes=2, tensor=None).lessons() == {}


def test_who_went_through_a_phase_under_an_earlier_watch_is_not_in_its_first_pass() -> None:
    assert not inherited({}, ("starting", "train")).replicas[TRAINER.replica].first_pass


def test_who_has_not_left_its_first_step_yet_goes_on_compiling() -> None:
    seen = inherited({"trainer": LESSON}, ("starting", "wait_data")).replicas[TRAINER.replica]
    assert seen.first_pass
    assert not seen.activity.tensor_seen


def test_a_phase_that_progresses_is_no_first_one_only_where_its_count_says_so() -> None:
    rollout = Life(ReplicaId("rollout/0"), 1)
    for done, first in ((0, True), (7, False)):
        watch = Watch()
        watch.launched(rollout, N1, 0.0)
        watch.adopted(rollout, ("generate",))
        watch.joined(rollout, N1, "generate", 1.0)
        watch.heard(rollout, "generate", done, None, 2.0)
        assert watch.replicas[rollout.replica].first_pass is first


def test_what_was_remembered_gives_way_to_what_is_seen_and_its_longest_last() -> None:
    usual = Usual()
    usual.remember("trainer", "train", Took(32, 60.0, 300.0))
    for _ in range(31):
        usual.add("trainer", "train", 20.0)
    assert usual.of("trainer", "train").median == 20.0
    assert usual.of("trainer", "train").longest == 300.0
    usual.add("trainer", "train", 20.0)
    assert usual.of("trainer", "train").longest == 20.0


@pytest.mark.parametrize(
    ("after", "worth"),
    [
        ({}, True),
        ({"trainer": LESSON}, False),
        ({"trainer": LESSON, "reward": Lesson(answers=True)}, True),
        ({"trainer": Lesson(LESSON.phases)}, True),
        ({"trainer": Lesson({"train": Took(8, 60.0, 90.0)}, tensor_seen=True)}, True),
        ({"trainer": Lesson({**LESSON.phases, "train": Took(9, 62.0, 95.0)}, tensor_seen=True)}, False),
        ({"trainer": Lesson({**LESSON.phases, "train": Took(9, 62.0, 190.0)}, tensor_seen=True)}, True),
        ({"trainer": Lesson({**LESSON.phases, "train": Took(16, 60.0, 90.0)}, tensor_seen=True)}, True),
        ({"trainer": Lesson({**LESSON.phases, "checkpoint": Took(8, 5.9, 8.0)}, tensor_seen=True)}, False),
        ({"trainer": Lesson(LESSON.phases, tensor_seen=True, slowest_load=9.0)}, True),
    ],
    ids=[
        "forgotten", "the same", "another role", "no tensor cores", "a phase less", "a little slower", "far longer",
        "twice as many", "less than a second", "loads",
    ],
)  # fmt: skip
def test_a_change_is_worth_a_record_when_a_deadline_moves(after: dict[str, Lesson], worth: bool) -> None:
    assert noticeable({"trainer": LESSON}, after) is worth
