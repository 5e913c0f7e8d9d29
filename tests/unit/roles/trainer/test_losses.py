"""The losses against TRL's own code, and what normalisation and masks do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rrl.core.run_spec import TrainerSettings
from rrl.roles.trainer.loss_function import Loss, LossSum, LossTokens, scalars
from rrl.roles.trainer.losses import cispo, group_advantages, grpo, gspo, statistics_of
from rrl.tests.support.roles.trainer import trl_losses

pytestmark = pytest.mark.torch

LIMIT = 10
LOSSES = (grpo, cispo, gspo)


def _tokens(log_ratios: list[list[float]], gains: list[float], mask: list[list[bool]] | None = None) -> LossTokens:
    """Return tokens whose log-probability is -1 and whose importance ratios have these logarithms, without padding."""
    flat = [value for row in log_ratios for value in row]
    logprobs = torch.full((len(flat),), -1.0, requires_grad=True)
    lengths = [len(row) for row in log_ratios]
    return LossTokens(
        logprobs,
        -1.0 - torch.tensor(flat),
        torch.tensor([gain for gain, length in zip(gains, lengths, strict=True) for _ in range(length)]),
        torch.tensor([value for row in mask for value in row]) if mask else torch.ones(len(flat), dtype=torch.bool),
        torch.zeros(len(flat)),
        None,
        torch.tensor([sum(lengths[:place]) for place in range(len(lengths))]),
        LIMIT,
    )


def _settings(**changes: Any) -> TrainerSettings:
    return TrainerSettings(entropy=0.0, **changes)


def _gradient(loss: Loss, tokens: LossTokens, **changes: Any) -> tuple[Tensor, LossSum]:
    result = loss(tokens, _settings(**changes))
    (gradient,) = torch.autograd.grad(result.loss, tokens.logprobs, retain_graph=True)
    return gradient, result


@pytest.mark.parametrize("name", trl_losses.CASES)
def test_value_and_gradient_are_those_of_trl(name: str) -> None:
    loss, gradient = trl_losses.ours(trl_losses.CASES[name])
    of_trl = trl_losses.recorded(name)
    assert loss == pytest.approx(of_trl[0], rel=1e-5, abs=1e-6)  # the terms nearly cancel out
    assert trl_losses.error(gradient, of_trl[1]) < 1e-5


def test_the_compared_answers_have_both_signs_unequal_lengths_and_far_ratios() -> None:
    given = trl_losses.answers()
    ratios = (given.logprobs - given.sampler_logprobs)[given.mask.bool()].exp()
    assert ratios.min() < 0.02
    assert ratios.max() > 50
    assert {bool(gain > 0) for gain in given.advantages} == {True, False}
    assert len(set(given.mask.sum(1).tolist())) > 4


def test_normalisations_weigh_tokens_answers_or_a_constant() -> None:
    tokens = _tokens([[0.0] * 4, [0.0]], [1.0, -1.0])
    for loss in LOSSES:
        weights = {}
        for normalise in ("token", "sequence", "constant"):
            gradient, result = _gradient(loss, tokens, normalise=normalise)
            weights[normalise] = (result.divisor, [round(-value, 6) for value in gradient.tolist()])
        assert weights == {
            "token": ("tokens", [1, 1, 1, 1, -1]),
            "sequence": ("sequences", [0.25, 0.25, 0.25, 0.25, -1]),
            "constant": ("sequences", [0.1, 0.1, 0.1, 0.1, -0.1]),
        }, loss


def test_gspo_gives_all_tokens_of_an_answer_its_geometric_mean_ratio() -> None:
    ratios = [[math.log(8), 0.0, 0.0], [-math.log(4), 0.0]]  # geometric means 2 and 0.5
    gradient, result = _gradient(gspo, _tokens(ratios, [-1.0, 1.0]), gspo_clip=0.6)
    assert gradient.tolist() == pytest.approx([2, 2, 2, -0.5, -0.5])
    clipped, result = _gradient(gspo, _tokens(ratios, [1.0, -1.0]), gspo_clip=0.4)
    assert clipped.tolist() == [0] * 5
    assert scalars(result.means) == {"clipped_low": 2, "clipped_high": 3, "masked": 0}


def test_clipped_low_and_high_count_only_tokens_whose_gradient_clipping_removes() -> None:
    ratios = [[math.log(0.5), math.log(1.5)]]
    for gain, low, high in ((-1.0, 1, 0), (1.0, 0, 1), (0.0, 0, 0)):
        means = scalars(_gradient(grpo, _tokens(ratios, [gain]), clip_high=0.28)[1].means)
        assert (means["clipped_low"], means["clipped_high"]) == (low, high)


def test_clip_high_moves_only_the_upper_bound() -> None:
    ratios = [[math.log(1.25), math.log(1.35), math.log(0.75)]]
    assert _gradient(grpo, _tokens(ratios, [1.0]), clip_high=0.3)[0].tolist() == pytest.approx([-1.25, 0, -0.75])
    assert _gradient(grpo, _tokens(ratios, [-1.0]), clip_high=0.3)[0].tolist() == pytest.approx([1.25, 1.35, 0])


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_have_no_gradient_and_stay_in_the_divisor(loss: Loss) -> None:
    tokens = _tokens([[0.0, 3.0, 0.0, 0.0], [0.0]], [-1.0, 1.0])
    for normalise, weights in (("token", [1, 1]), ("sequence", [0.25, 1]), ("constant", [0.1, 0.1])):
        gradient, result = _gradient(loss, tokens, normalise=normalise, ratio_mask=(0.5, 2.0))
        first, other = weights
        assert gradient.tolist() == pytest.approx([first, 0, first, first, -other])
        assert scalars(result.means)["masked"] == 1


def test_masked_tokens_have_neither_entropy_bonus_nor_divergence() -> None:
    tokens = _tokens([[0.0, 3.0]], [0.0])
    entropy = torch.ones(2, requires_grad=True)
    changed = LossTokens(
        tokens.logprobs,
        tokens.sampler_logprobs,
        tokens.advantages,
        tokens.mask,
        entropy,
        torch.zeros(2),
        tokens.starts,
        LIMIT,
    )
    result = grpo(changed, TrainerSettings(entropy=0.5, kl=0.1, ratio_mask=(0.5, 2.0)))
    of_logprobs, of_entropy = torch.autograd.grad(result.loss, (tokens.logprobs, entropy))
    assert of_entropy.tolist() == [-0.5, 0]
    assert of_logprobs[1] == 0
    assert of_logprobs[0] != 0


def test_a_mask_by_sequence_judges_the_geometric_mean() -> None:
    tokens = _tokens([[3.0, -3.0], [1.0, 1.0]], [-1.0, -1.0])
    gradient, result = _gradient(cispo, tokens, ratio_mask=(0.5, 2.0), ratio_mask_by="sequence")
    assert gradient.tolist() == pytest.approx([5.0, math.exp(-3), 0, 0])
    assert scalars(result.means)["masked"] == 2


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_untrained_tokens_of_any_value_and_answers_without_tokens_change_nothing(loss: Loss, normalise: str) -> None:
    alone = _tokens([[0.3, -0.2]], [1.0])
    mask = [[True, False, True], [False, False]]
    among = _tokens([[0.3, math.inf, -0.2], [math.nan, -math.inf]], [1.0, -1.0], mask)
    changes = {"normalise": normalise, "ratio_mask": (0.1, 10.0), "ratio_mask_by": "sequence"}
    expected = _gradient(loss, alone, **changes)[0].tolist()
    gradient, result = _gradient(loss, among, **changes)
    assert gradient.tolist() == pytest.approx([expected[0], 0, expected[1], 0, 0])
    assert result.loss.item() == pytest.approx(loss(alone, _settings(**changes)).loss.item())


@pytest.mark.parametrize("loss", LOSSES)
def test_one_token_far_off_does_not_dominate_the_gradient(loss: Loss) -> None:
    for nats in (0.1, 0.5, 1, 2, 4, 8):
        gradient, _ = _gradient(loss, _tokens([[*[0.0] * 399, float(nats)], [0.0] * 400], [-1.0, -1.0]))
        assert gradient.abs().max() / gradient.abs().sum() <= 0.05


def test_statistics_of_any_loss_describe_ratio_entropy_and_distance_from_the_sampler() -> None:
    tokens = _tokens([[math.log(2), math.inf, -math.log(2)]], [1.0], [[True, False, True]])
    means, maxima = statistics_of(grpo(tokens, _settings()), tokens)
    found = scalars(means)
    assert found["ratio_mean"] / 2 == pytest.approx(1.25)
    assert found["drift"] / 2 == pytest.approx(math.log(2))
    assert found["sampler_kl"] / 2 == pytest.approx((2 - 1 + 0.5 - 1) / 2)  # r - 1 - log r
    assert found["entropy"] == 0
    assert scalars(maxima) == {"ratio_max": pytest.approx(2)}


def test_a_statistic_of_the_loss_replaces_one_that_every_step_has() -> None:
    tokens = _tokens([[0.0]], [1.0])
    own = LossSum(tokens.logprobs.sum(), "tokens", {"ratio_max": torch.tensor(7.0)}, {"entropy": torch.tensor(5.0)})
    means, maxima = map(scalars, statistics_of(own, tokens))
    assert (means["ratio_max"], maxima) == (7, {"entropy": 5})
    assert "entropy" not in means


def test_advantages_without_the_deviation_are_differences_from_the_mean() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 1, 2])
    assert group_advantages(rewards, groups, 0.1, by_std=False).tolist() == [0.5, -0.5, 0]
