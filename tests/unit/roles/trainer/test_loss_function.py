from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rrl.core.run_spec import TrainerSettings
from rrl.roles.models.policy import build_model
from rrl.roles.models.tasks import TaskError
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.loss_function import Loss, LossSum, LossTokens, load_loss
from rrl.roles.trainer.losses import grpo
from rrl.roles.trajectories.batches import Batch
from rrl.tests.support.roles.trainer import harness

pytestmark = pytest.mark.torch


def _learner(loss: Loss, **changes: float) -> Learner:
    model = build_model(harness.SMALL, 13, 0)
    return Learner(model, harness.settings(**changes), steps=100, temperature=1.0, loss=loss)


def _batch() -> Batch:
    """Return a batch of two groups of four answers, of 1 to 6 tokens."""
    rollout = harness.engine(harness.learner())
    prompts = [(2, 3), (4, 5, 6)]
    return harness.sampled_batch(rollout, prompts, 0, 4, 6, 1, lambda _, tokens: (tokens[0] % 2.0, tokens[0] % 2.0))


def _sum(tokens: LossTokens, divisor: Any = "tokens", **statistics: Any) -> LossSum:
    return LossSum((tokens.logprobs * tokens.mask).sum(), divisor, **statistics)


def test_loss_sees_each_sequence_from_its_start() -> None:
    batch, given = _batch(), list[LossTokens]()

    def loss(tokens: LossTokens, _: TrainerSettings) -> LossSum:
        given.append(tokens)
        return _sum(tokens)

    harness.step(_learner(loss, micro_batch_tokens=16), batch)
    recorded = []
    for tokens in given:
        ends = [*tokens.starts[1:].tolist(), len(tokens.mask)]
        for start, end in zip(tokens.starts.tolist(), ends, strict=True):
            assert len(set(tokens.advantages[start:end].tolist())) == 1
            recorded.append(tuple(tokens.sampler_logprobs[start:end][tokens.mask[start:end]].tolist()))
    assert sorted(recorded) == [pytest.approx(each) for each in sorted(each.logprobs for each in batch.trajectories)]
    assert all(tokens.reference_logprobs is None for tokens in given)


@pytest.mark.parametrize(("divisor", "number"), [("tokens", None), ("sequences", 8), (40, 40), (2.5, 2.5)])
def test_sums_of_a_step_in_parts_are_divided_by_the_divisor_that_the_loss_names(
    divisor: Any, number: float | None
) -> None:
    batch = _batch()
    tokens = sum(len(each.tokens) for each in batch.trajectories)
    total = sum(sum(each.logprobs) for each in batch.trajectories)

    def loss(tokens: LossTokens, _: TrainerSettings) -> LossSum:
        trained = tokens.mask.sum()
        return _sum(tokens, divisor, means={"one": trained}, maxima={"most": trained})

    student = _learner(loss, micro_batch_tokens=16, gradient_clip=1e9)
    metrics = harness.step_in_parts(student, batch, (1, 1))
    assert metrics["loss"] == pytest.approx(total / (number or tokens), rel=1e-4)
    assert metrics["one"] == pytest.approx(1)
    assert 1 <= metrics["most"] < tokens
    gradients = {name: each.grad for name, each in student.model.named_parameters()}
    plain = _learner(lambda tokens, _: _sum(tokens), gradient_clip=1e9)
    harness.step(plain, batch)
    for name, parameter in plain.model.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad * tokens / (number or tokens)
        assert torch.allclose(gradients[name], expected, rtol=1e-3, atol=1e-5), name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda tokens: 0.5, "the loss returned float; return rrl.LossSum(loss, divisor)"),
        (lambda tokens: LossSum(tokens.logprobs, "tokens"), "LossSum.loss is a tensor of shape ["),
        (
            lambda tokens: LossSum(cast(Any, 0.5), "tokens"),
            "LossSum.loss is float; it must be a scalar tensor computed from",
        ),
        (lambda tokens: LossSum(torch.zeros(()), "tokens"), "LossSum.loss is a tensor of shape [] without a gradient"),
        (lambda tokens: _sum(tokens, "batch"), 'LossSum.divisor is \'batch\'; it must be "tokens", "sequences" or a'),
        (lambda tokens: _sum(tokens, 0), "LossSum.divisor is 0; it must be"),
        (lambda tokens: _sum(tokens, means={"reward": tokens.mask.sum()}), 'statistic "reward" is there twice'),
        (lambda tokens: _sum(tokens, maxima={"top": tokens.mask}), 'statistic "top" must be a scalar tensor'),
    ],
)
def test_wrong_result_of_a_loss_is_refused_at_its_first_call(wrong: Callable[[LossTokens], Any], problem: str) -> None:
    with pytest.raises(TaskError) as raised:
        harness.step(_learner(lambda tokens, _: wrong(tokens)), _batch())
    assert str(raised.value).startswith("[roles.trainer] loss: ")
    assert problem in str(raised.value)


def test_divisor_that_changes_within_a_step_is_refused() -> None:
    divisors = iter(("tokens", "sequences"))
    with pytest.raises(TaskError, match="is 'sequences' after 'tokens'; it must be the same in every call"):
        harness.step(_learner(lambda tokens, _: _sum(tokens, next(divisors)), micro_batch_tokens=24), _batch())


def test_loss_is_a_row_or_a_function_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "losses_of_mine.py").write_text("def mine(tokens, settings): ...\ndef other(tokens): ...\n")
    assert load_loss("grpo", tmp_path) is grpo
    assert load_loss("losses_of_mine:mine", tmp_path).__name__ == "mine"
    for name, problem in (
        ("losses_of_mine:mne", 'has no function mne; did you mean "mine"?'),
        ("losses_of_mine:other", '"losses_of_mine:other" cannot be called with tokens, settings: too many positional'),
        ("nowhere:mine", "there is no module nowhere, neither in"),
    ):
        with pytest.raises(TaskError) as raised:
            load_loss(name, tmp_path)
        assert str(raised.value).startswith("[roles.trainer] loss: ")
        assert problem in str(raised.value)
