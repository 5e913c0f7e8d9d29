from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import Tensor

from rrl.core.types import Version
from rrl.roles.launcher.end_report import Unrepairable
from rrl.roles.models.policy import build_model, materialise, skeleton
from rrl.roles.models.tokenizer import EOS
from rrl.roles.trainer.host_buffers import Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.loss_function import Loss
from rrl.roles.trainer.losses import cispo, grpo, gspo
from rrl.roles.trainer.main import warmup
from rrl.roles.trainer.packing import Example
from rrl.roles.trajectories.batches import Batch, Part
from rrl.roles.trajectories.types import Trajectory
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch

LOSSES = (grpo, cispo, gspo)


def _prompt(item: int) -> tuple[int, ...]:
    """Return two digits as tokens, with one or two tokens after them, so that there is always padding."""
    return (2 + item % 5, 2 + item // 5 % 5) + (12,) * (1 + item % 2)


def _first_digit(item: int, tokens: tuple[int, ...]) -> tuple[float, float]:
    """Return the scores of the toy task, which is to repeat the first digit and stop."""
    right = tokens == (_prompt(item)[0], EOS)
    half = tokens[:1] == _prompt(item)[:1]
    return float(right), 1.0 if right else 0.5 * half


def _example(item: int) -> Example:
    return _prompt(item), (_prompt(item)[0], EOS)


def _batch(number: int, student: Learner, version: int = 0) -> Batch:
    rollout = harness.engine(student, seed=number, version=version)
    prompts = [_prompt(number * 4 + place) for place in range(4)]
    return harness.sampled_batch(rollout, prompts, number * 4, 4, 3, number, _first_digit)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(tensor.view(torch.int32), other[name].view(torch.int32)) for name, tensor in one.items()
    )


def test_policy_learns_from_own_samples_that_are_two_versions_old() -> None:
    student = harness.learner(seed=1, steps=60, learning_rate=4e-3, entropy=0.0)
    student.warm_start([[_example(16 * k + n) for n in range(16)] for k in range(10)])
    rollout = harness.engine(student)
    metrics = list(
        harness.learn(student, rollout, _prompt, _first_digit, steps=60, lag=2, prompts=8, group_size=8, max_new=3)
    )
    rewards = [each["reward"] for each in metrics]
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.7
    assert [each["staleness"] for each in metrics[:4]] == [0, 1, 2, 2]
    assert metrics[0]["drift"] < 1e-5  # the first batch is on policy
    assert metrics[10]["drift"] > 1e-3  # later batches are not on policy, which the importance ratio shows


@pytest.mark.parametrize(
    ("loss", "changes"),
    [(grpo, {}), (gspo, {"schedule": "cosine", "warmup": 4, "weight_decay": 0.1, "truncated": "drop"})],
)
def test_a_restored_learner_goes_on_bit_for_bit(loss: Loss, changes: dict[str, Any]) -> None:
    undisturbed = harness.learner(seed=1, **changes)
    undisturbed._loss = loss
    undisturbed.warm_start([[_example(n) for n in range(8)]])
    batches = []
    for number in range(1, 4):
        batches.append(_truncated(_batch(number, undisturbed), 5))
        harness.step(undisturbed, batches[-1])
    saved = harness.saved(undisturbed)
    batches += [_batch(number, undisturbed) for number in (4, 5)]
    expected = [harness.step(undisturbed, batch) for batch in batches[3:]]

    restored = harness.learner(seed=2, **changes)
    restored._loss = loss
    harness.step(restored, batches[0])  # its optimizer now has a history, which the restore must replace
    harness.restore(restored, saved)
    assert restored.number == 3
    assert [harness.step(restored, batch) for batch in batches[3:]] == expected
    assert _same(restored.tensors(), undisturbed.tensors())
    assert restored.extra_state() == undisturbed.extra_state()


def test_every_random_generator_is_restored() -> None:
    student = harness.learner()
    numpy.random.normal()  # numpy computes a second value in advance, which is part of the state
    saved = student.extra_state()

    def draw() -> tuple[float, ...]:
        return (*torch.rand(2).tolist(), random.random(), numpy.random.normal(), numpy.random.random())

    expected = draw()
    after = draw()
    assert after != expected
    student.resume(saved)
    assert draw() == expected
    student.resume(saved, random_states=False)
    assert draw() == after


def test_state_has_the_same_shape_before_and_after_the_first_step() -> None:
    student = harness.learner()
    before = Layout(student.tensors())
    harness.step(student, _batch(1, student))
    after = Layout(student.tensors())
    assert (after.digest, after.nbytes) == (before.digest, before.nbytes)
    assert Layout(harness.learner(vocabulary=14).tensors()).digest != before.digest


def test_model_loaded_without_initialisation_computes_the_same() -> None:
    whole = build_model(harness.SMALL, 13, seed=4)
    empty = skeleton(harness.SMALL, 13)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    materialise(empty, torch.device("cpu"))
    empty.load_state_dict(whole.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(whole(input_ids=tokens).logits, empty(input_ids=tokens).logits)


def test_buffer_that_cannot_be_computed_is_refused() -> None:
    empty = skeleton(harness.SMALL, 13)
    empty.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="table"):
        materialise(empty, torch.device("cpu"))


def test_warmup_changes_neither_random_state_nor_process_groups() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    warmup()
    assert torch.equal(torch.rand(1), expected)
    assert not torch.distributed.is_initialized()


def test_same_seed_builds_the_same_model_and_keeps_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (harness.learner(seed=seed).weights() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert _same(one, same)
    assert not _same(one, other)


def test_a_batch_of_another_step_is_refused() -> None:
    student = harness.learner()
    batch = _batch(1, student)
    harness.step(student, batch)
    with pytest.raises(ValueError, match="cannot open step 1 of the learner: the next step is 2"):
        harness.step(student, batch)


def test_order_and_padding_of_trajectories_do_not_change_the_update() -> None:
    batch = _batch(1, harness.learner())
    turned = msgspec.structs.replace(batch, trajectories=batch.trajectories[::-1])
    one, other = harness.learner(), harness.learner()
    assert harness.step(one, batch) == pytest.approx(harness.step(other, turned), rel=1e-4, abs=1e-6)


def test_metrics_of_a_step_have_its_tokens_and_their_age() -> None:
    student = harness.learner()
    student.number = 6
    old, new = Version(4, 1), Version(6, 2)
    batch = Batch(
        7,
        (0,),
        "",
        (
            Trajectory(0, 0, (2,), (3, 1), (-1.0, -1.0), (old, new), reward=1.0, training=1.5),
            Trajectory(1, 0, (2,), (4, 4), (-1.0, -1.0), (new, new), reward=0.0, training=0.5),
        ),
    )
    metrics = harness.step(student, batch)
    assert metrics["tokens"] == 4
    assert metrics["staleness"] == 0.5
    of_any_loss = {"loss", "tokens", "trained_share", "staleness", "grad_norm", "learning_rate"}
    of_any_loss |= {"entropy", "drift", "ratio_mean", "ratio_max", "sampler_kl"}
    assert metrics.keys() == of_any_loss | {"clipped_low", "clipped_high", "dual_clipped", "masked"}


def test_batch_without_tokens_is_a_step_that_changes_no_weights() -> None:
    student = harness.learner()
    before = {name: tensor.clone() for name, tensor in student.weights().items()}
    empty = tuple(Trajectory(n, 0, (2, 3), (), (), (), reward=0.0, training=float(n)) for n in range(2))
    metrics = harness.step(student, Batch(1, (0,), "", empty))
    assert (metrics["tokens"], metrics["staleness"], metrics["loss"], metrics["drift"]) == (0.0, 0.0, 0.0, 0.0)
    assert student.number == 1
    assert _same(student.weights(), before)


def test_gradient_that_is_not_finite_raises_before_it_changes_the_weights() -> None:
    student = harness.learner()
    batch = _batch(1, student)
    before = {name: tensor.clone() for name, tensor in student.weights().items()}
    spoiled = msgspec.structs.replace(batch.trajectories[0], training=float("nan"))
    observed = "the gradient is not finite in step 1: loss nan, gradient norm nan, learning rate 0.001"
    with pytest.raises(Unrepairable, match=observed):
        harness.step(student, msgspec.structs.replace(batch, trajectories=(spoiled, *batch.trajectories[1:])))
    assert _same(student.weights(), before)
    assert student.number == 0


def test_step_or_warm_start_whose_weights_are_not_finite_raises_and_is_not_complete() -> None:
    observed = r": loss -?[0-9.e-]+, gradient norm [0-9.]+, learning rate 1e\+39"
    student = harness.learner(learning_rate=1e39, warm_start_learning_rate=1e39)
    batch = _batch(1, student)
    with pytest.raises(Unrepairable, match="a weight is not finite after step 1" + observed):
        harness.step(student, batch)
    assert student.number == 0
    with pytest.raises(Unrepairable, match="a weight is not finite after warm start" + observed):
        harness.learner(warm_start_learning_rate=1e39).warm_start([[_example(0)]])


def test_loaded_weights_that_are_not_finite_are_refused() -> None:
    student = harness.learner()
    student.check_weights()
    student.weights()["model.norm.weight"][3] = torch.inf
    with pytest.raises(Unrepairable, match="a weight is not finite after loading"):
        student.check_weights()


def _rates(steps: Sequence[int], **changes: Any) -> list[float]:
    student = harness.learner(steps=10, final_learning_rate=0.25, **changes)
    return [student._share_of_learning_rate(number) for number in steps]


def test_the_learning_rate_falls_linearly_to_its_floor() -> None:
    assert _rates((1, 6, 10)) == [1.0, 0.5, 0.25]
    exactly = [max(0.1, 1 - (number - 1) / 300) for number in range(1, 301)]  # as before there were schedules
    student = harness.learner(steps=300)
    assert [student._share_of_learning_rate(number) for number in range(1, 301)] == exactly


def test_the_learning_rate_follows_its_schedule_after_the_warm_up() -> None:
    assert _rates((1, 6, 10), schedule="constant") == [1, 1, 1]
    cosine = _rates((1, 6, 10), schedule="cosine")
    assert cosine[:2] == pytest.approx([1, 0.625])
    assert 0.25 < cosine[2] < 0.3
    assert _rates((1, 2, 3, 4, 5), schedule="constant", warmup=3) == [0.25, 0.5, 0.75, 1, 1]
    assert _rates((4, 8), warmup=2) == [1 - 1 / 8, 1 - 5 / 8]
    assert _rates((1, 2), warmup=20) == [1 / 21, 2 / 21]  # a run that is shorter than its warm-up


def test_the_optimizer_has_the_given_betas_and_weight_decay() -> None:
    (group,) = harness.learner(betas=(0.8, 0.999), weight_decay=0.1)._optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.999), 0.1)


def _truncated(batch: Batch, *places: int) -> Batch:
    marked = [msgspec.structs.replace(each, truncated=place in places) for place, each in enumerate(batch.trajectories)]
    return msgspec.structs.replace(batch, trajectories=tuple(marked))


def _without(batch: Batch, *places: int) -> Batch:
    left = [each for place, each in enumerate(batch.trajectories) if place not in places]
    return msgspec.structs.replace(batch, trajectories=tuple(left))


def test_truncated_answers_are_trained_masked_or_dropped() -> None:
    """The groups have 4 answers each, of which answer 1 of group 0 is truncated."""
    batch = _batch(1, harness.learner(seed=3))
    first = batch.trajectories[:4]
    scored = [msgspec.structs.replace(each, training=float(place == 1)) for place, each in enumerate(first)]
    batch = msgspec.structs.replace(batch, trajectories=(*scored, *batch.trajectories[4:]))
    cut = _truncated(batch, 1)
    gradients = {each: _gradient_of(harness.learner(truncated=each), cut) for each in ("train", "mask", "drop")}
    whole = _gradient_of(harness.learner(), batch)
    assert _same(gradients["train"], whole)
    assert not _same(gradients["mask"], whole)
    for name, gradient in _gradient_of(harness.learner(), _without(batch, 1)).items():
        assert torch.allclose(gradients["drop"][name], gradient, rtol=1e-5, atol=1e-7)
    # masked, its reward still makes the other answers of its group worse than the mean
    advantages = harness.learner()._advantages(cut.trajectories)
    masked = msgspec.structs.replace(batch.trajectories[1], masked=((0, len(batch.trajectories[1].tokens)),))
    by_hand = msgspec.structs.replace(batch, trajectories=(scored[0], masked, *batch.trajectories[2:]))
    assert advantages[0] < 0
    assert _same(gradients["mask"], _gradient_of(harness.learner(), by_hand))


def test_group_with_fewer_than_two_answers_that_are_not_truncated_has_no_gradient() -> None:
    """An entropy bonus would train the answer that is left, although there is nothing to compare it with."""
    batch = _batch(1, harness.learner(seed=3))
    left = _gradient_of(harness.learner(truncated="drop", entropy=0.5), _truncated(batch, 0, 1, 2))
    expected = _gradient_of(harness.learner(entropy=0.5), _without(batch, 0, 1, 2, 3))
    for name, gradient in expected.items():
        assert torch.allclose(left[name], gradient, rtol=1e-5, atol=1e-7)


def test_metrics_say_which_share_of_the_tokens_was_trained() -> None:
    batch = _batch(1, harness.learner())
    lengths = [len(each.tokens) for each in batch.trajectories]
    for how in ("mask", "drop"):
        metrics = harness.step(harness.learner(truncated=how), _truncated(batch, 0))
        assert metrics["trained_share"] == pytest.approx(1 - lengths[0] / sum(lengths))
        assert metrics["tokens"] == sum(lengths[1:])


@pytest.mark.parametrize("how", ["mask", "drop"])
@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_step_without_trained_tokens_is_complete_and_changes_neither_weights_nor_moments(
    how: str, normalise: str
) -> None:
    student = harness.learner(truncated=how, normalise=normalise, weight_decay=0.5)
    harness.step(student, _batch(1, student))
    before, _ = harness.saved(student)
    batch = _batch(2, student)
    metrics = harness.step_in_parts(student, _truncated(batch, *range(len(batch.trajectories))), (1, 3))
    assert (metrics["tokens"], metrics["trained_share"], metrics["loss"], metrics["grad_norm"]) == (0, 0, 0, 0)
    assert student.number == 2
    assert _same(student.tensors(), before)
    assert harness.step(student, _batch(3, student))["grad_norm"] > 0


def test_step_in_which_all_ratios_are_outside_of_the_mask_changes_nothing() -> None:
    student = harness.learner(ratio_mask=(1e-9, 1e-8), weight_decay=0.5, entropy=0.5)
    before, _ = harness.saved(student)
    metrics = harness.step(student, _batch(1, student))
    assert (metrics["masked"], metrics["grad_norm"]) == (1, 0)
    assert _same(student.tensors(), before)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_parts_and_micro_batches_make_the_step_of_the_whole_with_every_loss(loss: Loss, normalise: str) -> None:
    batch = _batch(1, harness.learner(seed=3))
    whole, parts = (
        harness.learner(normalise=normalise, ratio_mask=(0.5, 3.0), kl=0.0, micro_batch_tokens=size)
        for size in (None, 14)
    )
    whole._loss = parts._loss = loss
    whole._limit = parts._limit = 3
    expected, got = _gradient_of(whole, batch), _gradient_of(parts, batch, (1, 3))
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-5, atol=1e-6), name


def test_warm_start_trains_the_answer_and_not_the_prompt() -> None:
    student = harness.learner(seed=1)
    examples = [_example(n) for n in range(32)]
    first = student.warm_start([examples])
    assert student.warm_start([examples] * 60) < 0.1 < first
    assert student.number == 0
    moments = {name: tensor for name, tensor in student.tensors().items() if name.startswith("exp_avg")}
    assert len(moments) == 2 * len(list(student.model.parameters()))
    assert not any(tensor.any() for tensor in moments.values())


def _gradient_of(student: Learner, batch: Batch, sizes: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Return the gradients that the optimizer of a step gets, before they are clipped.

    ``sizes`` are the numbers of groups in each part. Without it the step has one part.
    """
    observed: dict[str, Tensor] = {}
    clip = torch.nn.utils.clip_grad_norm_

    def look(*words: Any, **named: Any) -> Tensor:
        gradients = {name: each.grad for name, each in student.model.named_parameters()}
        observed.update({name: gradient.clone() for name, gradient in gradients.items() if gradient is not None})
        return clip(*words, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", look)
        harness.step_in_parts(student, batch, sizes or (len(batch.groups),))
    return observed


@pytest.mark.parametrize("size", [1, 20, 1000])
def test_batch_in_micro_batches_has_the_gradient_and_the_metrics_of_the_whole(size: int) -> None:
    """The reference is another model, so that the KL divergence counts, too."""
    whole, parts = (harness.learner(kl=0.1, micro_batch_tokens=each) for each in (None, size))
    for each in (whole, parts):
        each.reference = harness.learner(seed=5).model
    batch = _batch(1, harness.learner(seed=3))
    expected, got = _gradient_of(whole, batch), _gradient_of(parts, batch)
    assert expected.keys() == got.keys() == dict(whole.model.named_parameters()).keys()
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-6, atol=1e-6), name
    batch = _batch(2, harness.learner(seed=3))
    assert harness.step(parts, batch) == pytest.approx(harness.step(whole, batch), rel=1e-4, abs=1e-5)


def test_members_with_fewer_examples_take_part_in_as_many_micro_batches() -> None:
    """With different numbers of micro-batches the members of a gang would wait for each other without end."""
    pairs = [_example(n) for n in range(7)]
    counted = []
    for rank in range(3):
        student = harness.learner(micro_batch_tokens=1)
        student._gang.rank, student._gang.world = rank, 3
        parts = list(student._micro_batches(pairs, [range(len(answer)) for _, answer in pairs]))
        counted.append([int(part.mask.sum()) > 0 for part in parts])
        assert [bool(part.indices) for part in parts] == counted[-1]
    assert counted == [[True, True, True], [True, True, False], [True, True, False]]


def test_warm_start_in_micro_batches_equals_the_whole_one() -> None:
    whole, parts = (harness.learner(micro_batch_tokens=each) for each in (None, 20))
    examples = [[_example(n) for n in range(8)]] * 3
    assert parts.warm_start(examples) == pytest.approx(whole.warm_start(examples), rel=1e-4)


def test_answer_without_tokens_has_no_effect_on_the_loss() -> None:
    made = _batch(1, harness.learner())
    empty = msgspec.structs.replace(made.trajectories[2], tokens=(), logprobs=(), versions=())
    batch = msgspec.structs.replace(made, trajectories=(*made.trajectories[:2], empty, *made.trajectories[3:]))
    whole, parts = harness.learner(kl=0.1), harness.learner(kl=0.1, micro_batch_tokens=1)
    for student in (whole, parts):
        student.reference = build_model(harness.SMALL, 13, seed=7)
    expected, metrics_reported = harness.step(whole, batch), harness.step(parts, batch)
    assert metrics_reported.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics_reported[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_kl_term_keeps_the_policy_near_its_reference() -> None:
    drifted = []
    for kl in (0.0, 3.0):
        student = harness.learner(seed=1, kl=kl, learning_rate=2e-3, entropy=0.0)
        student.reference = harness.learner(seed=1).model.requires_grad_(False)
        batch = _batch(1, student)
        first = harness.step(student, batch)
        assert first.get("kl", 0.0) == pytest.approx(0.0, abs=1e-6)  # the policy still equals the reference
        for number in range(2, 12):
            harness.step(student, msgspec.structs.replace(batch, number=number))
        meter = harness.learner(seed=1, kl=1e-9)
        meter.reference, meter.model = student.reference, student.model
        drifted.append(harness.step(meter, batch)["kl"])
    assert drifted[1] < drifted[0] / 3


def test_kl_term_without_a_reference_model_is_refused_before_the_first_step() -> None:
    student = harness.learner(kl=0.1)
    with pytest.raises(Unrepairable, match="this run was started with kl = 0 and has no reference model"):
        harness.step(student, _batch(1, student))
    assert student.number == 0


# ── steps in parts ─────────────────────────────────────────────────────────────────────────────────────────────────
_GROUPS, _CUT_STEPS = 8, 10


def _batches(seed: int = 0) -> list[Batch]:
    """Return ten batches of eight groups of four answers of 1 to 5 tokens, sampled with the weights of step 0."""
    rollout = harness.engine(harness.learner(seed=seed))
    prompts = [[_prompt(number * _GROUPS + place) for place in range(_GROUPS)] for number in range(_CUT_STEPS + 1)]
    return [
        harness.sampled_batch(rollout, prompts[number], number * _GROUPS, 4, 5, number, _first_digit)
        for number in range(1, _CUT_STEPS + 1)
    ]


def _cuts(number: int, kind: str) -> tuple[int, ...]:
    """Return the sizes of the parts of a step. Random sizes differ from step to step."""
    if kind == "four":
        return (2,) * 4
    if kind == "whole":
        return (_GROUPS,)
    chance, sizes = random.Random(number), list[int]()
    while sum(sizes) < _GROUPS:
        sizes.append(chance.randint(1, _GROUPS - sum(sizes)))
    return tuple(sizes)


def _taught(kind: str, **changes: Any) -> tuple[Learner, list[dict[str, float]]]:
    """Return a learner after ten steps, and the metrics of each step. With ``kl`` the reference is another model."""
    student = harness.learner(**changes)
    if changes.get("kl"):
        student.reference = harness.learner(seed=5).model.requires_grad_(False)
    if kind == "batch":
        return student, [harness.step(student, batch) for batch in _batches()]
    return student, [harness.step_in_parts(student, batch, _cuts(batch.number, kind)) for batch in _batches()]


ROUNDING = 3e-5
"""Largest difference of two float32 weights after ten steps, if their gradients were summed in different orders.

The largest one so far was 1.1e-5. It varies, because torch's threads add in varying order. The ten steps move the
weights by more than 1e-3.
"""


def _distance(one: Learner, other: Learner) -> float:
    others = other.weights()
    return max((tensor - others[name]).abs().max().item() for name, tensor in one.weights().items())


@pytest.mark.parametrize("changes", [{}, {"micro_batch_tokens": 16, "kl": 0.1, "gradient_clip": 0.01}])
def test_batch_in_parts_gives_the_same_weights_and_metrics_as_the_whole_batch(changes: dict[str, Any]) -> None:
    whole, expected = _taught("batch", **changes)
    moved = _distance(whole, harness.learner())
    assert moved > 1e-3, "ten steps have moved no weight by more than 1e-3"
    for kind in ("whole", "four", "random"):
        student, metrics = _taught(kind, **changes)
        assert _distance(student, whole) < ROUNDING, kind
        for got, wanted in zip(metrics, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5), kind
    one, _ = _taught("whole", **changes)
    assert _same(one.tensors(), whole.tensors())


def test_a_batch_in_parts_has_the_gradient_of_its_token_mean() -> None:
    """The expected gradient is that of the whole batch's loss, divided by its answer tokens, in one backward pass."""
    batch, student, reference = _batches()[0], harness.learner(), harness.learner()
    tokens = sum(len(each.tokens) for each in batch.trajectories)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rrl.roles.trainer.learner.LOSS_DIVISOR", float(tokens))
        expected = _gradient_of(reference, batch)
    got = _gradient_of(student, batch, (1, 3, 4))
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-5, atol=1e-6), name


def test_the_same_parts_twice_give_the_same_bits() -> None:
    changes = {"micro_batch_tokens": 16, "kl": 0.1}
    (one, metrics), (other, metrics_again) = _taught("random", **changes), _taught("random", **changes)
    assert _same(one.tensors(), other.tensors())
    assert one.extra_state() == other.extra_state()
    assert metrics == metrics_again


def test_restarted_step_discards_its_parts() -> None:
    batch, interrupted, undisturbed = _batches()[0], harness.learner(), harness.learner()
    interrupted.open(1)
    for part in harness.parts_of(batch, (2, 2, 4))[:2]:
        interrupted.add(part)
    assert harness.step_in_parts(interrupted, batch, (2, 6)) == harness.step_in_parts(undisturbed, batch, (2, 6))
    assert _same(interrupted.tensors(), undisturbed.tensors())


def test_a_restored_learner_has_no_open_step() -> None:
    batch, student = _batches()[0], harness.learner()
    saved = harness.saved(student)
    first, second = harness.parts_of(batch, (2, 6))
    student.open(1)
    student.add(first)
    harness.restore(student, saved)
    with pytest.raises(ValueError, match="cannot add part 1 of step 1 to the learner: expected no part"):
        student.add(second)


def test_parts_out_of_order_are_refused() -> None:
    batch, student = _batches()[0], harness.learner()
    first, second, third = harness.parts_of(batch, (2, 2, 4))
    with pytest.raises(ValueError, match="cannot add part 0 of step 1 to the learner: expected no part"):
        student.add(first)
    with pytest.raises(ValueError, match="no step is open"):
        student.close()
    student.open(1)
    student.add(first)
    for part in (first, third, msgspec.structs.replace(second, number=2)):
        with pytest.raises(ValueError, match="to the learner: expected part 1 of step 1"):
            student.add(part)
    student.add(second)
    student.add(third)
    with pytest.raises(ValueError, match="cannot add part 3 of step 1 to the learner: expected no part"):
        student.add(Part(1, (), "", third.trajectories, 3))
    student.close()
    assert student.number == 1


def test_a_step_without_its_last_part_is_not_closed() -> None:
    batch, student = _batches()[0], harness.learner()
    before = {name: tensor.clone() for name, tensor in student.tensors().items()}
    student.open(1)
    student.add(harness.parts_of(batch, (2, 6))[0])
    with pytest.raises(ValueError, match="the last part of step 1 is missing"):
        student.close()
    assert student.number == 0
    assert _same(student.tensors(), before)


def test_part_whose_answers_have_no_tokens_has_no_effect() -> None:
    batch, student, expected = _batches()[0], harness.learner(), harness.learner()
    first, second = harness.parts_of(batch, (2, 6))
    empty = tuple(msgspec.structs.replace(each, tokens=(), logprobs=(), versions=()) for each in first.trajectories)
    student.open(1)
    student.add(msgspec.structs.replace(first, trajectories=empty))
    student.add(second)
    metrics = student.close()
    expected.open(1)
    expected.add(msgspec.structs.replace(second, index=0))
    assert metrics["tokens"] == expected.close()["tokens"]
    assert _distance(student, expected) < 1e-5


def _episode(*samples: tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]) -> list[Trajectory]:
    """Return the samples (prompt, tokens, masked runs) of episode 0, and one sample of episode 1, all of group 0."""
    version = Version(0, 1)
    made = [
        Trajectory(0, 0, prompt, tokens, (-1.0,) * len(tokens), (version,) * len(tokens), 1.0, 1.0, masked)
        for prompt, tokens, masked in samples
    ]
    return [*made, Trajectory(1, 0, (2, 3), (4, 1), (-2.0, -1.0), (version,) * 2, 0.0, 0.0)]


def _learned(*trajectories: Trajectory) -> tuple[Learner, dict[str, float]]:
    student = harness.learner()
    return student, harness.step(student, Batch(1, (0,), "", trajectories))


def _gradient_distance(one: Learner, other: Learner) -> float:
    """Return the largest difference of the gradients of a first step, relative to the largest gradient of the tensor.

    The function compares Adam's first moments, which after one step are the gradients times a constant. Differences of
    weights would mean little: Adam moves a weight with a tiny gradient as far as any other, in the direction of
    rounding errors.
    """
    others = other.tensors()
    moments = {name: tensor for name, tensor in one.tensors().items() if name.startswith("exp_avg.")}
    assert all(tensor.any() for tensor in moments.values())
    return max(((tensor - others[name]).abs().max() / tensor.abs().max()).item() for name, tensor in moments.items())


def test_masked_tokens_are_context_whatever_is_recorded_for_them() -> None:
    one, metrics = _learned(*_episode(((2,), (3, 5, 6, 1), ((1, 2),))))
    plain = _episode(((2,), (3, 5, 6, 1), ((1, 2),)))
    other = msgspec.structs.replace(
        plain[0],
        logprobs=(-1.0, 0.0, -9.0, -1.0),
        versions=(Version(0, 1), Version(-1, 0), Version(-1, 0), Version(0, 1)),
    )
    second, again = _learned(other, plain[1])
    assert _same(one.weights(), second.weights())
    assert metrics == again
    assert (metrics["tokens"], metrics["staleness"]) == (4.0, 0.0)


def test_masked_tokens_at_the_beginning_act_as_part_of_the_prompt() -> None:
    one, metrics = _learned(*_episode(((2,), (3, 5, 6, 1), ((0, 2),))))
    other, again = _learned(*_episode(((2, 3, 5), (6, 1), ())))
    assert metrics == pytest.approx(again, rel=1e-5)
    assert _gradient_distance(one, other) < 1e-5


def test_masked_tokens_change_the_update() -> None:
    one, _ = _learned(*_episode(((2,), (3, 5, 6, 1), ((1, 2),))))
    other, _ = _learned(*_episode(((2,), (3, 5, 6, 1), ())))
    assert not _same(one.weights(), other.weights())


def test_samples_of_an_episode_share_its_advantage() -> None:
    branches = _episode(((2,), (3, 5), ()), ((2, 3, 5), (6, 1), ()))
    joined = _episode(((2,), (3, 5, 6, 1), ()))
    one, metrics = _learned(*branches)
    other, again = _learned(*joined)
    assert metrics == pytest.approx(again, rel=1e-5)
    assert _gradient_distance(one, other) < 1e-5


def test_rewards_are_compared_with_those_of_the_same_agent_and_count_once_for_each_episode() -> None:
    first, last = _episode(((2,), (3, 5), ()))
    rewards = {(0, "a"): 1.0, (0, "b"): 5.0, (1, "a"): 3.0, (1, "b"): 5.0, (1, "c"): 9.0}
    samples = [
        msgspec.structs.replace(last if episode else first, training=reward, agent=agent)
        for (episode, agent), reward in rewards.items()
        for _ in range(1 + episode)
    ]
    apart = [msgspec.structs.replace(each, id=9, group=7, training=-1.0) for each in samples[:1]]
    student = harness.learner(advantage_std=False)
    assert student._advantages([*samples, *apart]).tolist() == [-1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_optimizer_in_host_memory_gives_the_same_bits() -> None:
    there, here = harness.learner(offload_optimizer=True), harness.learner()
    for student in (there, here):
        student.seed_rng(1)
        student.warm_start([[_example(n) for n in range(8)]])
    for number in (1, 2):
        batch = _batch(number, here)
        assert harness.step(there, batch) == harness.step(here, batch)
    assert _same(there.tensors(), here.tensors())
    assert there.extra_state() == here.extra_state()
    restored = harness.learner(seed=2, offload_optimizer=True)
    harness.restore(restored, harness.saved(here))
    batch = _batch(3, here)
    assert harness.step(restored, batch) == harness.step(here, batch)
    assert _same(restored.tensors(), here.tensors())
