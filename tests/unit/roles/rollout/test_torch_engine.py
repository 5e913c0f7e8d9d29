from __future__ import annotations

import math

import pytest
import torch

from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.launcher.end_report import Diverged
from rrl.roles.models.policy import build_model
from rrl.roles.models.tokenizer import EOS
from rrl.roles.rollout.engine import Sampling
from rrl.roles.rollout.foreign_sampling import next_token
from rrl.roles.rollout.torch_engine import TorchEngine, seed_of
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.episodes.turn_rules import sampling_problem
from rrl.roles.trajectories.types import Item, PathDigest, Segment
from rrl.roles.trajectories.types import Sampling as Overrides
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch

_FIRST = Version(0, 1)


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    made: list[int] = torch.randint(2, 13, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(made)


def _item(trajectory: int, length: int = 5, so_far: tuple[int, ...] = (), max_new: int = 6) -> Item:
    segments = (Segment(trajectory, 0, so_far, (0.0,) * len(so_far), _FIRST),) if so_far else ()
    return Item(trajectory, trajectory, _prompt(trajectory, length), segments, max_new)


def _endless(sampling: Sampling | None = None, lease: int = 64) -> TorchEngine:
    """Return an engine whose stop token is not in the vocabulary, so that only ``max_new`` ends a trajectory."""
    made = TorchEngine(
        build_model(harness.SMALL, 13, 3), stop_tokens=frozenset({13}), seed=0, sampling=sampling, lease=lease
    )
    made.load(_FIRST, harness.learner().weights().items())
    return made


def _tokens(segments: list[Segment]) -> tuple[int, ...]:
    return tuple(token for each in segments for token in each.tokens)


def test_recorded_logprobs_are_the_trainers_for_prompts_and_prefixes_of_any_length() -> None:
    student = harness.learner()
    items = [_item(n, length=3 + n % 5, so_far=_prompt(n, n % 4), max_new=1 + n % 7) for n in range(40)]
    items += [Item(100 + n, 0, items[0].prompt, (), 6) for n in range(16)]  # a group, whose common prompt is read once
    rolled = harness.roll_out(harness.engine(student, sampling=Sampling(segment_tokens=2)), items)
    trajectories = []
    for item in items:
        fresh = rolled[item.trajectory][len(item.so_far) :]
        prefix = _tokens(list(item.so_far))
        whole = harness.join(Item(item.trajectory, item.group, item.prompt + prefix), fresh)
        assert len(whole.tokens) > 0
        trajectories.append(whole)
    assert harness.step(student, Batch(1, (), "", tuple(trajectories)))["drift"] < 1e-5
    exact = _alone(harness.learner(), [(each.prompt, each.tokens) for each in trajectories])
    for expected, each in zip(exact, trajectories, strict=True):
        assert _difference(expected, each.logprobs).max() < 1e-4


def _alone(student: Learner, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return log-probabilities by one plain forward pass per trajectory, without padding, cache or batch."""
    found = []
    with torch.no_grad():
        for prompt, answer in pairs:
            tokens = torch.tensor([[*prompt, *answer]])
            logits = student.model(input_ids=tokens[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
            found.append(logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0])
    return found


def _difference(these: torch.Tensor, those: tuple[float, ...]) -> torch.Tensor:
    return (these - torch.tensor(those)).abs()


def test_temperature_is_part_of_the_recorded_logprobs() -> None:
    item = _item(0)
    engine = harness.engine(harness.learner(), sampling=Sampling(temperature=0.5))
    (segment,) = harness.roll_out(engine, [item])[0]
    with torch.no_grad():
        logits = harness.learner().model(input_ids=torch.tensor([item.prompt])).logits[0, -1]
    assert segment.logprobs[0] == pytest.approx((logits / 0.5).log_softmax(-1)[segment.tokens[0]].item(), abs=1e-5)


def test_greedy_answer_is_equal_sampled_in_pieces_resumed_or_at_once() -> None:
    engine = _endless(Sampling(greedy=True))
    items = [_item(n, length=3 + n, max_new=9) for n in range(4)]
    at_once = harness.roll_out(engine, items)
    in_pieces = harness.roll_out(_endless(Sampling(greedy=True, segment_tokens=2)), items)
    half = {n: _tokens(segments)[: 2 + n] for n, segments in at_once.items()}
    rest = [_item(n, length=3 + n, so_far=half[n], max_new=9 - len(half[n])) for n in range(4)]
    resumed = harness.roll_out(engine, rest)
    for n in range(4):
        assert len(at_once[n]) == 1
        assert [len(each.tokens) for each in in_pieces[n]] == [2, 2, 2, 2, 1]
        assert _tokens(in_pieces[n]) == _tokens(at_once[n]) == _tokens(resumed[n])


def test_segments_are_consecutive_and_continue_at_the_offset_of_an_earlier_incarnation() -> None:
    item = _item(5, so_far=(3, 4, 5), max_new=5)
    segments = harness.roll_out(_endless(Sampling(segment_tokens=2)), [item])[5]
    assert [each.offset for each in segments] == [0, 3, 5, 7]
    assert all(len(each.tokens) == len(each.logprobs) for each in segments)


def test_nothing_is_sampled_after_the_end_of_sequence() -> None:
    items = [_item(n, max_new=40) for n in range(32)]
    engine = harness.engine(harness.learner(), sampling=Sampling(segment_tokens=7))
    for segments in harness.roll_out(engine, items).values():
        tokens = _tokens(segments)
        assert EOS not in tokens[:-1]
        assert tokens[-1] == EOS or len(tokens) == 40


def test_trajectory_ends_at_its_own_limit() -> None:
    items = [_item(n, max_new=1 + n) for n in range(5)]
    rolled = harness.roll_out(_endless(Sampling(segment_tokens=3)), items)
    assert [len(_tokens(rolled[n])) for n in range(5)] == [1, 2, 3, 4, 5]


def test_model_runs_once_for_each_token_of_the_longest_trajectory() -> None:
    model = build_model(harness.SMALL, 13, 3)
    read: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _, __, given: read.append(given["input_ids"].shape), with_kwargs=True)
    engine = TorchEngine(model, stop_tokens=frozenset({13}), seed=0, sampling=Sampling(segment_tokens=3))
    engine.load(_FIRST, harness.learner().weights().items())
    group = [Item(n, 0, _prompt(0, 5), (), 2 + n % 3) for n in range(16)]
    harness.roll_out(engine, group)
    assert [tuple(each) for each in read] == [(1, 5), (16, 1), (16, 1), (5, 1)]


def test_trajectory_that_is_ended_or_full_is_finished_without_a_segment() -> None:
    ended = _item(1, so_far=(4, EOS), max_new=3)
    full = _item(2, so_far=(4, 5), max_new=0)
    rolled = harness.roll_out(harness.engine(harness.learner()), [ended, _item(3), full])
    assert rolled[1] == list(ended.so_far)
    assert rolled[2] == list(full.so_far)
    assert len(rolled[3]) == 1


def test_free_slots_are_zero_until_the_whole_lease_is_complete() -> None:
    engine = _endless(Sampling(segment_tokens=2), lease=5)
    assert (engine.free_slots, engine.has_work) == (5, False)
    engine.add([_item(0, max_new=1), _item(1, max_new=4)])
    assert (engine.free_slots, engine.has_work) == (0, True)
    assert engine.step()[1] == [0]
    assert (engine.free_slots, engine.has_work) == (0, True)
    assert engine.step()[1] == [1]
    assert (engine.free_slots, engine.has_work) == (5, False)
    assert engine.flush() == ([], [])


def test_trajectory_added_during_generation_gets_the_same_tokens_as_alone() -> None:
    greedy = Sampling(segment_tokens=2, greedy=True)
    early, late = [_item(n, length=3 + n, max_new=6) for n in range(2)], [_item(2, length=9, max_new=6)]
    expected = harness.roll_out(_endless(greedy), [*early, *late])
    engine = _endless(greedy)
    engine.add(early)
    segments, finished = engine.step()
    engine.add(late)
    while engine.has_work:
        grown, complete = engine.step()
        segments, finished = segments + grown, finished + complete
    assert finished == [0, 1, 2]
    for n in range(3):
        assert _tokens([each for each in segments if each.trajectory == n]) == _tokens(expected[n])


def test_each_of_several_stop_tokens_ends_a_trajectory() -> None:
    items = [_item(n, max_new=40) for n in range(16)]
    ends, sampling = frozenset({2, 7}), Sampling(segment_tokens=5)
    engine = TorchEngine(build_model(harness.SMALL, 13, 3), stop_tokens=ends, seed=0, sampling=sampling)
    engine.load(_FIRST, harness.learner().weights().items())
    last = set()
    for segments in harness.roll_out(engine, items).values():
        tokens = _tokens(segments)
        assert not ends & set(tokens[:-1])
        last.add(tokens[-1])
    assert last >= ends


def test_running_trajectories_continue_with_new_weights_and_name_the_version_of_each_segment() -> None:
    engine, other = _endless(Sampling(segment_tokens=2, greedy=True)), harness.learner(seed=9)
    items = [_item(n, length=3 + n, max_new=6) for n in range(3)]
    engine.add(items)
    before, _ = engine.step()
    engine.load(Version(1, 1), other.weights().items())
    after, _ = engine.step()
    assert {each.version for each in before} == {_FIRST}
    assert {each.version for each in after} == {Version(1, 1)}
    for item, early, late in zip(items, before, after, strict=True):
        (expected,) = _alone(other, [(item.prompt + early.tokens, late.tokens)])
        assert _difference(expected, late.logprobs).max() < 1e-4


def test_dropped_trajectory_stops_without_effect_on_the_others() -> None:
    engine = _endless(Sampling(segment_tokens=2, greedy=True))
    items = [_item(n, length=3 + n, max_new=6) for n in range(3)]
    expected = harness.roll_out(engine, items)
    engine.add([*items, _item(3, max_new=0)])
    engine.abort([3])
    first, _ = engine.step()
    engine.abort([1, 77])
    rest = []
    while engine.has_work:
        rest.append(engine.step())
    assert [each.trajectory for each in first] == [0, 1, 2]
    assert [[each.trajectory for each in segments] for segments, _ in rest] == [[0, 2], [0, 2]]
    assert rest[-1][1] == [0, 2]
    assert [each.tokens for each in rest[-1][0]] == [expected[n][-1].tokens for n in (0, 2)]
    # The dropped trajectory may be added again later.
    assert harness.roll_out(engine, items) == expected


def test_incarnations_sample_differently_and_a_seed_is_reproducible() -> None:
    items = [_item(n, max_new=8) for n in range(8)]
    incarnations = [
        Incarnation(ReplicaId("rollout/0"), 1),
        Incarnation(ReplicaId("rollout/0"), 2),
        Incarnation(ReplicaId("rollout/1"), 1),
    ]
    seeds = [seed_of(0, incarnation) for incarnation in incarnations]
    student = harness.learner()
    first, reborn, other, again = (
        harness.roll_out(harness.engine(student, seed=seed), items) for seed in (*seeds, seeds[0])
    )
    assert first == again
    assert first != reborn
    assert first != other
    assert reborn != other


def test_weights_of_another_model_are_refused_and_the_old_ones_stay() -> None:
    engine = _endless(Sampling(greedy=True))
    expected = harness.roll_out(engine, [_item(0)])
    weights = harness.learner(seed=4).weights()
    wrong_shape = weights | {"lm_head.weight": torch.zeros(2, 2)}
    missing = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    for wrong, why in ((wrong_shape, r"lm_head.weight has the shape \(2, 2\)"), (missing, "lm_head.weight")):
        with pytest.raises(ValueError, match=why):
            engine.load(Version(1, 1), wrong.items())
    assert harness.roll_out(engine, [_item(0)]) == expected


def test_loaded_weights_do_not_share_memory_with_their_source() -> None:
    engine = _endless(Sampling(greedy=True))
    weights = {name: tensor.clone() for name, tensor in harness.learner(seed=4).weights().items()}
    engine.load(Version(1, 1), weights.items())
    expected = harness.roll_out(engine, [_item(0)])
    for tensor in weights.values():
        tensor.zero_()
    assert harness.roll_out(engine, [_item(0)]) == expected


def test_nothing_is_sampled_before_weights_are_loaded() -> None:
    engine = TorchEngine(build_model(harness.SMALL, 13, 0), stop_tokens=frozenset({EOS}), seed=0)
    engine.add([_item(0)])
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()


def test_probe_fails_with_weights_that_give_nan_logits() -> None:
    engine = _endless()
    engine.probe()
    weights = harness.learner().weights()
    broken = weights | {"lm_head.weight": torch.full_like(weights["lm_head.weight"], torch.nan)}
    engine.load(Version(1, 1), broken.items())
    with pytest.raises(RuntimeError, match=r"v1\.1 returned NaN or infinite logits"):
        engine.probe()


def test_step_whose_logits_are_not_finite_names_the_weights_and_not_torchs_sampler() -> None:
    """The probe reads token 0 only, which these weights compute well."""
    engine = _endless()
    weights = harness.learner().weights()
    broken = weights["model.embed_tokens.weight"].clone()
    broken[1:] = torch.nan
    engine.load(Version(3, 1), (weights | {"model.embed_tokens.weight": broken}).items())
    engine.probe()
    engine.add([_item(0)])
    with pytest.raises(Diverged, match=r"the model with weights v3\.1 returned NaN or infinite logits"):
        engine.step()


def test_all_tensors_of_the_engine_are_on_the_device_of_the_model() -> None:
    """The test needs no GPU.

    A tensor that is not placed on the model's device is placed on the device ``meta``, which computes nothing.
    """
    items = [_item(n, length=3 + n % 3, so_far=_prompt(n, n % 2), max_new=4 + n) for n in range(6)]
    student, sampling = harness.learner(), Sampling(segment_tokens=2)
    made = harness.engine(student, sampling=sampling)
    model = build_model(harness.SMALL, 13, 3)
    with torch.device("meta"):
        here = TorchEngine(model, stop_tokens=frozenset({EOS}), seed=0, sampling=sampling)
        here.load(Version(0, 1), student.weights().items())
        here.probe()
        segments = harness.roll_out(here, items)
    assert segments == harness.roll_out(made, items)


# ── foreign turns, and what the engine had ───────────────────────────────────────────────────────────────────────────
def test_segments_carry_the_digest_of_all_tokens_that_the_engine_had() -> None:
    items = [_item(1), _item(2, so_far=(3, 4, 5))]
    rolled = harness.roll_out(_endless(Sampling(segment_tokens=4)), items)
    for item in items:
        had = PathDigest()
        had.add(item.prompt)
        for segment in rolled[item.trajectory]:
            had.add(segment.tokens)
            if segment not in item.so_far:
                assert segment.digest == had.value()


def test_foreign_turn_uses_its_own_sampling_beside_turns_of_the_job() -> None:
    """One prompt is sampled three times: as the job requests, and twice with other settings that mean greedy sampling.

    These are temperature 0, and ``top_k = 1`` with a seed.
    """
    prompt = _prompt(0, 5)
    overrides = {1: Overrides(temperature=0.0), 2: Overrides(top_k=1, seed=5)}
    items = [Item(n, 0, prompt, (), 12, overrides.get(n)) for n in range(3)]
    rolled = harness.roll_out(_endless(Sampling(temperature=3.0, segment_tokens=5)), items)
    greedy = harness.roll_out(_endless(Sampling(greedy=True)), [Item(0, 0, prompt, (), 12)])
    assert _tokens(rolled[1]) == _tokens(rolled[2]) == _tokens(greedy[0])
    assert _tokens(rolled[0]) != _tokens(greedy[0])
    assert [logprob for segment in rolled[2] for logprob in segment.logprobs] == [0.0] * 12


def test_seed_gives_the_same_answer_in_any_engine_and_after_it_moved() -> None:
    item = Item(0, 0, _prompt(0, 5), (), 10, Overrides(seed=11))
    engine = _endless(Sampling(segment_tokens=3))
    harness.roll_out(engine, [_item(9)])  # advances the random generator of this engine
    answer = _tokens(harness.roll_out(engine, [item])[0])
    moved = Item(0, 0, item.prompt, (Segment(0, 0, answer[:4], (0.0,) * 4, _FIRST),), 6, Overrides(seed=11))
    assert _tokens(harness.roll_out(_endless(), [moved])[0]) == answer
    other = Item(0, 0, item.prompt, (), 10, Overrides(seed=12))
    assert _tokens(harness.roll_out(_endless(), [other])[0]) != answer


_LOGITS = torch.tensor([4.0, 3.0, 2.0, 1.0, -1.0])


def _shares(how: Overrides, prompt: tuple[int, ...] = (), sampled: tuple[int, ...] = ()) -> dict[int, float]:
    """Return the probability, as the engine reports it, of each token that was sampled in 400 draws."""
    generator = torch.Generator().manual_seed(0)
    found = dict(next_token(_LOGITS, how, 1.0, prompt, sampled, generator) for _ in range(400))
    return {token: math.exp(logprob) for token, logprob in sorted(found.items())}


def _softmax(*logits: float) -> list[float]:
    return torch.tensor(logits).softmax(-1).tolist()


@pytest.mark.parametrize(
    ("how", "tokens", "logits"),
    [
        (Overrides(top_k=2), [0, 1], (4.0, 3.0)),
        (Overrides(top_k=0, top_p=1.0), [0, 1, 2, 3, 4], (4.0, 3.0, 2.0, 1.0, -1.0)),
        (Overrides(top_p=0.6), [0], (4.0,)),
        (Overrides(top_p=0.7), [0, 1], (4.0, 3.0)),
        (Overrides(min_p=0.1), [0, 1, 2], (4.0, 3.0, 2.0)),
        (Overrides(min_p=0.1, top_k=2, top_p=0.5), [0], (4.0,)),
        (Overrides(temperature=0.5, top_k=2), [0, 1], (8.0, 6.0)),
        (Overrides(presence_penalty=1.5, top_k=2), [0, 1], (2.5, 3.0)),
        (Overrides(frequency_penalty=1.0, top_k=2), [1, 2], (3.0, 2.0)),
        (Overrides(repetition_penalty=1.6, top_k=2), [0, 1], (2.5, 3.0)),
    ],
)
def test_tokens_and_probabilities_are_those_of_the_truncated_distribution(
    how: Overrides, tokens: list[int], logits: tuple[float, ...]
) -> None:
    shares = _shares(how, prompt=(0,) if how.repetition_penalty else (), sampled=(0, 0, 0))
    assert list(shares) == tokens
    assert list(shares.values()) == pytest.approx(_softmax(*logits), abs=1e-5)


def test_penalty_on_repetition_counts_the_prompt_and_the_answer() -> None:
    how = Overrides(temperature=0.0, repetition_penalty=100.0)
    token, logprob = next_token(_LOGITS, how, 1.0, (0, 4), (1,), torch.Generator())
    assert token == 2
    assert logprob == pytest.approx(math.log(_softmax(0.04, 0.03, 2.0, 1.0, -100.0)[2]), abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_the_most_extreme_sampling_that_the_store_accepts_gives_a_token(temperature: float, penalty: float) -> None:
    how = Overrides(temperature, top_p=1e-30, repetition_penalty=penalty, presence_penalty=2.0)
    assert sampling_problem(how) is None
    allowed = torch.tensor([True, True, False, False, False])
    token, logprob = next_token(_LOGITS * 1000, how, 1.0, (0, 4), (1,), torch.Generator(), allowed)
    assert token in (0, 1)
    assert math.isfinite(logprob)


@pytest.mark.parametrize("how", [Overrides(temperature=0.0), Overrides(temperature=0.7, seed=3)])
def test_evaluated_answers_change_no_token_of_later_answers(how: Overrides) -> None:
    items = [_item(n, max_new=8) for n in range(4)]
    expected = harness.roll_out(_endless(), items)
    engine = _endless()
    harness.roll_out(engine, [Item(n, 0, _prompt(n, 5), (), 12, how) for n in range(3)])
    assert harness.roll_out(engine, items) == expected


def test_greedy_answers_in_one_batch_are_those_of_a_greedy_engine() -> None:
    items = [Item(n, 0, _prompt(n, 5), (), 10, Overrides(temperature=0.0)) for n in range(3)]
    plain = [Item(n, 0, _prompt(n, 5), (), 10) for n in range(3)]
    assert harness.roll_out(_endless(), items) == harness.roll_out(_endless(Sampling(greedy=True)), plain)


def test_an_engine_samples_the_same_after_it_has_slept() -> None:
    def greedy() -> list[Segment]:
        engine.add([_item(n, so_far=_prompt(n, 3)) for n in range(4)])
        return engine.step()[0]

    engine = _endless(Sampling(greedy=True))
    weights = {name: tensor.clone() for name, tensor in harness.learner().weights().items()}
    before = greedy()
    parameters = list(engine._model.parameters())
    sizes = [parameter.untyped_storage().nbytes() for parameter in parameters]
    for _ in range(20):
        engine.add([_item(7, max_new=40)])
        engine.step()
        engine.sleep()
        assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 0
        assert not engine.has_work
        with pytest.raises(RuntimeError, match="no weights"):
            engine.step()
        engine.wake()
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(float("nan"))  # the memory has been used by others
        engine.load(_FIRST, weights.items())
        assert greedy() == before
    assert [parameter.untyped_storage().nbytes() for parameter in parameters] == sizes
