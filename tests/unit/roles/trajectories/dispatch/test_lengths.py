"""The lengths of future answers, learned from the run's own answers.

A state that is written and read again gives the same estimates.
"""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrl.roles.trajectories.dispatch import lengths as module
from rrl.roles.trajectories.dispatch.lengths import Answer, Lengths, LengthState

LIMIT = 4_000
Fact = tuple[tuple[int, ...], list[Answer]]
FACTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 200_000), min_size=1, max_size=12).map(tuple),
        st.lists(st.builds(Answer, st.integers(0, LIMIT), st.booleans()), max_size=5),
    ),
    max_size=30,
)


def answers(mean: float, rng: random.Random, size: int = 8, limit: int = LIMIT) -> list[Answer]:
    lengths = [max(1, round(rng.lognormvariate(mean, 0.3))) for _ in range(size)]
    return [Answer(min(limit, length), length < limit) for length in lengths]


def taught(groups: int = 200, seed: int = 0) -> Lengths:
    """Return lengths learned from prompts with token 7 (about 1,000 tokens per answer) and with token 8 (about 50)."""
    lengths, rng = Lengths(LIMIT), random.Random(seed)
    for number in range(groups):
        long = rng.random() < 0.5
        lengths.observe((1, 2, 7 if long else 8, 10 + number), answers(math.log(1000 if long else 50), rng))
    return lengths


@settings(max_examples=60, deadline=None)
@given(FACTS, st.integers(0, 30))
@example([((0,), [Answer(1, False)])] * 3, 2)  # gradients that are too small for the squares
def test_fold_continued_from_a_written_state_gives_the_same_bits(facts: list[Fact], cut: int) -> None:
    whole, first = Lengths(LIMIT), Lengths(LIMIT)
    for prompt, those in facts[:cut]:
        whole.observe(prompt, those)
        first.observe(prompt, those)
    written = msgspec.msgpack.encode(first.state())
    second = Lengths(1, msgspec.msgpack.decode(written, type=LengthState))
    for prompt, those in facts[cut:]:
        whole.observe(prompt, those)
        second.observe(prompt, those)
    assert msgspec.msgpack.encode(second.state()) == msgspec.msgpack.encode(whole.state())
    for prompt, _ in facts:
        assert second.expect(prompt) == whole.expect(prompt)


@settings(max_examples=60, deadline=None)
@given(FACTS)
def test_every_estimate_is_finite(facts: list[Fact]) -> None:
    lengths = Lengths(LIMIT)
    for prompt, those in facts:
        lengths.observe(prompt, those)
        estimate = lengths.expect(prompt)
        assert math.isfinite(estimate.mean)
        assert estimate.variance >= 0.0
        assert estimate.within > 0.0


def test_new_prompts_are_ranked_by_their_tokens() -> None:
    lengths = taught()
    long, short = lengths.expect((1, 2, 7, 900)), lengths.expect((1, 2, 8, 900))
    assert lengths.separates
    assert 500 < math.exp(long.mean) < 2000
    assert 25 < math.exp(short.mean) < 100


def test_lengths_independent_of_prompts_do_not_separate() -> None:
    lengths, rng = Lengths(LIMIT), random.Random(3)
    for number in range(300):
        lengths.observe((1, 2, 7 + number % 2, 10 + number), answers(math.log(300) + rng.gauss(0, 1), rng))
    assert not lengths.separates


def test_a_ranker_that_was_right_and_is_wrong_now_stops_separating() -> None:
    lengths, rng = taught(), random.Random(4)
    for number in range(200):
        lengths.observe((1, 2, 7 + number % 2, 10 + number), answers(math.log(300) + rng.gauss(0, 1), rng))
    assert not lengths.separates


def test_lengths_do_not_separate_before_enough_groups() -> None:
    assert not taught(15).separates


def test_earlier_answers_of_a_prompt_correct_the_estimate_from_its_tokens() -> None:
    lengths, rng = taught(), random.Random(5)
    for number in range(60):  # every prompt comes twice; one prompt with token 8 has long answers, unlike the others
        usual = (1, 2, 7 + number % 2, 5000 + number % 30)
        lengths.observe(usual, answers(math.log(50 if number % 2 else 1000), rng))
        if number % 20 == 0:
            lengths.observe((1, 2, 8, 6000), answers(math.log(1000), rng))
    known, new = lengths.expect((1, 2, 8, 6000)), lengths.expect((1, 2, 8, 7000))
    assert abs(known.mean - math.log(1000)) < abs(new.mean - math.log(1000))
    assert known.variance < new.variance


def test_only_the_most_recent_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETAINED_PROMPTS", 3)
    lengths = Lengths(LIMIT)
    for number in (1, 2, 3, 1, 4):
        lengths.observe((number,), [Answer(10, True)])
    assert len(lengths.state().prompts) == 3 * 8
    again = Lengths(LIMIT, lengths.state())
    again.observe((5,), [Answer(10, True)])  # removes prompt 3, because prompt 1 was observed again after it
    kept = [again.state().prompts[i : i + 8] for i in range(0, 24, 8)]
    one = Lengths(LIMIT)
    one.observe((1,), [Answer(10, True)])
    assert one.state().prompts in kept


def test_truncated_answers_count_as_longer_than_the_limit() -> None:
    cut, ended = Lengths(100), Lengths(10_000)
    for number in range(50):
        those = [Answer(100, False)] * 6 + [Answer(60, True)] * 2
        cut.observe((number,), those)
        ended.observe((number,), [Answer(each.tokens, True) for each in those])
    assert cut.typical.mean > ended.typical.mean + 0.1


@pytest.mark.parametrize("ended", [0.0, 0.02])
def test_answers_that_are_nearly_always_cut_do_not_raise_the_estimate_without_end(ended: float) -> None:
    """A long test run found this error.

    At a mean logarithm of 44 the manager could not write its journal, and at 709 exp overflows.
    """
    lengths, rng = Lengths(16), random.Random(1)
    for _ in range(3_000):
        prompt = tuple(rng.randrange(12) for _ in range(6))
        lengths.observe(prompt, [Answer(7, True) if rng.random() < ended else Answer(16, False) for _ in range(4)])
        assert lengths.expect(prompt).mean < math.log(16) + 2.0
        assert lengths.typical.within < 4.0
    for _ in range(400):
        lengths.observe((rng.randrange(12),), [Answer(4, True)] * 4)
    assert abs(lengths.typical.mean - math.log(4)) < 0.5, "the estimate does not follow answers that become shorter"


def test_answer_of_maximum_length_counts_as_cut_even_if_reported_as_ended() -> None:
    first, second = Lengths(100), Lengths(100)
    first.observe((1,), [Answer(100, True), Answer(50, True)])
    second.observe((1,), [Answer(100, False), Answer(50, True)])
    assert first.state() == second.state()
