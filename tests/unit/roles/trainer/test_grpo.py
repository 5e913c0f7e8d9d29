from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rrl.roles.trainer.losses import group_advantages, grpo_loss

pytestmark = pytest.mark.torch


def _advantages(rewards: list[float], groups: list[int], floor: float = 0.1) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), floor).tolist()


def _loss(
    new: Tensor, old: Tensor, gain: list[float], mask: Tensor | None = None, entropy: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    mask = torch.ones_like(new) if mask is None else mask
    return grpo_loss(new, old, torch.tensor(gain), mask, 0.2, torch.full_like(new, entropy), 0.5)


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
    assert stats == {"drift": 0.0, "clipped": 0.0}


def test_gradient_of_a_token_above_the_clip_range_is_zero() -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss, stats = _loss(new, torch.tensor([[-2.0, -1.0]]), [1.0])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, -0.5]]
    assert stats["clipped"] == 0.5
    assert stats["drift"] == 0.5


def test_gradient_of_a_token_with_negative_advantage_is_not_clipped_from_above() -> None:
    new = torch.tensor([[-1.0]], requires_grad=True)
    loss, _ = _loss(new, torch.tensor([[-2.0]]), [-1.0])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(math.e)


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
    loss, stats = grpo_loss(
        new, new.detach(), torch.tensor([0.0]), mask, 0.2, torch.zeros_like(new), 0.0, reference=reference, kl_coef=0.5
    )
    assert stats["kl"] == pytest.approx((0 + math.e - 1 - 1) / 2)  # pi_ref / pi - log(pi_ref / pi) - 1
    assert loss.item() == pytest.approx(0.5 * stats["kl"])
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert new.grad.tolist() == [pytest.approx([0.0, 0.5 * (1 - math.e) / 2, 0.0])]
    assert "kl" not in _loss(new, new.detach(), [0.0])[1]
