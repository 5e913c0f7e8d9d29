from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rrl.core.run_spec import TrainerSettings
from rrl.roles.trainer.loss_function import LossTokens, scalars
from rrl.roles.trainer.losses import group_advantages, grpo, statistics_of

pytestmark = pytest.mark.torch


def _advantages(rewards: list[float], groups: list[int], floor: float = 0.1) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), floor).tolist()


_SETTINGS = TrainerSettings(clip=0.2, dual_clip=3.0, entropy=0.5, kl=0.5)


def _loss(
    new: Tensor,
    old: Tensor,
    gain: list[float],
    mask: Tensor | None = None,
    entropy: float = 0.0,
    reference: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and the statistics of a step with these answers, one a row."""
    mask = torch.ones_like(new) if mask is None else mask
    rows, width = new.shape
    tokens = LossTokens(
        new.flatten(),
        old.flatten(),
        torch.tensor(gain).repeat_interleave(width),
        mask.flatten().bool(),
        torch.full((rows * width,), entropy),
        None if reference is None else reference.flatten(),
        torch.arange(rows) * width,
        width,
    )
    result, count = grpo(tokens, _SETTINGS), mask.sum().item()
    assert result.divisor == "tokens"
    means, maxima = map(scalars, statistics_of(result, tokens))
    return result.loss / count, {name: value / count for name, value in means.items()} | maxima


def _gradient(new: Tensor, old: Tensor, gain: list[float]) -> Tensor:
    leaf = new.clone().requires_grad_()
    _loss(leaf, old, gain)[0].backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_advantage_depends_on_its_own_group_only() -> None:
    apart = _advantages([1, 0], [7, 7]) + _advantages([5, 9, 1], [3, 3, 3])
    mixed = _advantages([5, 1, 9, 0, 1], [3, 7, 3, 7, 3])
    assert mixed == pytest.approx([apart[2], apart[0], apart[3], apart[1], apart[4]])


def test_advantage_is_the_deviation_from_the_mean_divided_by_spread_plus_floor() -> None:
    deviation = math.sqrt(0.5)
    assert _advantages([1, 0], [0, 0]) == pytest.approx([0.5 / (deviation + 0.1), -0.5 / (deviation + 0.1)])


def test_group_with_equal_rewards_and_group_of_one_have_zero_advantage() -> None:
    assert _advantages([0.5, 0.5, 0.5, 3.0], [1, 1, 1, 2]) == [0, 0, 0, 0]


def test_on_policy_the_gradient_is_the_plain_policy_gradient() -> None:
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, stats = _loss(new, new.detach(), [3.0])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [[-1.5, -1.5]]  # -advantage / tokens
    assert (stats["drift"], stats["ratio_max"], stats["clipped_high"], stats["dual_clipped"]) == (0, 1, 0, 0)


def test_gradient_of_a_token_above_the_clip_range_is_zero() -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, stats = _loss(new, torch.tensor([[-2.0, -1.0]]), [1.0])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, -0.5]]
    assert stats["clipped_high"] == 0.5
    assert stats["drift"] == 0.5


def test_ratio_of_a_token_with_negative_advantage_is_clipped_at_the_dual_clip_only() -> None:
    """At A = -2 and the ratios 0.5, e, 4, 1, the terms are 0.8 A (clipped below), e A, 3 A (dual clip) and A."""
    old = torch.tensor([[-1 - math.log(0.5), -2.0, -1 - math.log(4), -1.0]])
    loss, stats = _loss(torch.full((1, 4), -1.0), old, [-2.0])
    assert loss.item() == pytest.approx(2 * (0.8 + math.e + 3 + 1) / 4)
    assert _gradient(torch.full((1, 4), -1.0), old, [-2.0]).tolist() == [pytest.approx([0, 2 * math.e / 4, 0, 2 / 4])]
    assert (stats["dual_clipped"], stats["clipped_low"]) == (0.25, 0.25)
    assert stats["ratio_max"] == pytest.approx(4)


def test_loss_and_gradient_are_those_of_the_published_dual_clip() -> None:
    """Ye et al., as verl writes it: minimum and maximum of the products with the advantage."""
    dice = torch.Generator().manual_seed(3)
    new, old = (-6 * torch.rand(40, 25, generator=dice) for _ in range(2))
    advantage = torch.randn(40, generator=dice)[:, None]
    leaf = new.clone().requires_grad_()
    ratio = (leaf - old).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    expected = -torch.where(advantage < 0, torch.maximum(clipped, 3 * advantage), clipped).mean()
    expected.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    gains = advantage[:, 0].tolist()
    loss, stats = _loss(new, old, gains)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(_gradient(new, old, gains), leaf.grad, rtol=1e-5, atol=1e-9)
    assert stats["dual_clipped"] == pytest.approx(((ratio > 3) & (advantage < 0)).float().mean().item())


def test_a_token_that_the_sampler_thought_8_nats_less_likely_does_not_outweigh_799_others() -> None:
    """Without the dual clip, the token has e^8 / (e^8 + 799) = 79 % of the gradient."""
    new = torch.full((1, 800), -1.0)
    old = new.clone()
    old[0, 17] = -9.0
    gradient = _gradient(new, old, [-1.0])[0]
    assert gradient[17] == 0
    assert gradient.sum().item() == pytest.approx(799 / 800)
    assert _loss(new, old, [-1.0])[1]["ratio_max"] == pytest.approx(math.exp(8), rel=1e-5)


@pytest.mark.parametrize("gain", [1.0, -1.0])
@pytest.mark.parametrize("old", [-1000.0, -math.inf])
def test_ratio_that_overflows_spoils_neither_the_gradient_nor_the_statistics(old: float, gain: float) -> None:
    new = torch.tensor([[-1.0, -1.0]])
    gradient = _gradient(new, torch.tensor([[old, -1.0]]), [gain])
    assert gradient.tolist() == [[0.0, -gain / 2]]
    assert all(map(math.isfinite, _loss(new, torch.tensor([[old, -1.0]]), [gain])[1].values()))


def test_padding_of_any_value_changes_neither_loss_nor_gradient() -> None:
    new = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    loss, stats = _loss(new, torch.tensor([[-1.1, math.inf]]), [1.0], torch.tensor([[True, False]]), entropy=2.0)
    alone, alone_stats = _loss(torch.tensor([[-1.0]]), torch.tensor([[-1.1]]), [1.0], entropy=2.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(alone.item())
    assert stats == pytest.approx(alone_stats)
    assert new.grad is not None
    assert new.grad[0, 1] == 0.0


def test_loss_weighs_answers_by_their_tokens() -> None:
    zeros = torch.zeros(2, 3)
    loss, _ = _loss(zeros, zeros, [1.0, -1.0], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert loss.item() == pytest.approx(-(3 - 1) / 4)


def test_entropy_lowers_the_loss() -> None:
    zeros = torch.zeros(1, 2)
    assert _loss(zeros, zeros, [0.0], entropy=2.0)[0].item() == pytest.approx(-1.0)


def test_kl_is_the_non_negative_estimate_of_each_token() -> None:
    new = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    reference, mask = torch.tensor([[-1.0, -1.0, math.inf]]), torch.tensor([[True, True, False]])
    loss, stats = _loss(new, new.detach(), [0.0], mask, reference=reference)
    assert stats["kl"] == pytest.approx((0 + math.e - 1 - 1) / 2)  # pi_ref / pi - log(pi_ref / pi) - 1
    assert loss.item() == pytest.approx(0.5 * stats["kl"])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [pytest.approx([0.0, 0.5 * (1 - math.e) / 2, 0.0])]
    assert "kl" not in _loss(new, new.detach(), [0.0])[1]


def test_divergence_that_overflows_does_not_spoil_the_gradient_of_other_tokens() -> None:
    new = torch.tensor([[-1000.0, -2.0]], requires_grad=True)
    loss, _ = _loss(new, new.detach(), [0.0], entropy=1.0, reference=torch.tensor([[-1.0, -1.0]]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [pytest.approx([0.0, 0.5 * (1 - math.e) / 2])]
