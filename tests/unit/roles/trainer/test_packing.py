from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
)

from rrl.roles.models.policy import build_model
from rrl.roles.trainer import packing
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.likelihood import likelihood, recompute_blocks
from rrl.roles.trainer.packing import MicroBatch, pack, use_packed_attention
from rrl.roles.trajectories.batches import Batch
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.passes import SIZES, examples_of, gradients

pytestmark = pytest.mark.torch

_CPU = torch.device("cpu")
_LENGTHS = [(3, 1), (2, 2), (1, 9), (4, 6), (5, 5), (2, 30)]
"""Lengths of prompts and answers, ascending together, with neighbours of equal length."""
_NOT_PACKED: dict[str, Any] = {
    "sliding window": MistralConfig(**SIZES, sliding_window=4),
    "sliding window in some layers": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "capped scores": Gemma2Config(**SIZES, sliding_window=64, attn_logit_softcapping=1.0),
    "recurrent layers": Qwen3NextConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
    ),
}


def _batches(lengths: list[tuple[int, int]], vocabulary: int) -> tuple[MicroBatch, list[MicroBatch]]:
    """Return the same sequences as one micro-batch and each alone; all of their answers are trained."""
    examples = examples_of(lengths, vocabulary)
    trained = [range(len(answer)) for _, answer in examples]
    alone = [pack([one], [places], [0], _CPU) for one, places in zip(examples, trained, strict=True)]
    return pack(examples, trained, [*range(len(examples))], _CPU), alone


def _weighted(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    chosen, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    dice = torch.Generator().manual_seed(1)
    return (torch.randn(len(chosen), generator=dice) * chosen + 0.1 * entropy).sum()


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_sequences_have_the_gradients_of_single_ones(kv_heads: int, recompute: bool) -> None:
    model = build_model(msgspec.structs.replace(harness.SMALL, kv_heads=kv_heads, initializer_range=0.3), 61, seed=0)
    if recompute:
        recompute_blocks(model)
    packed, alone = _batches(_LENGTHS, 61)
    expected = gradients(model, _weighted([likelihood(model, one, 0.8) for one in alone]))
    got = gradients(model, _weighted([likelihood(model, packed, 0.8)]))
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert max((got[name] - expected[name]).abs().max() for name in expected) <= 1e-5 * largest


def test_tokens_of_a_sequence_have_no_effect_on_another() -> None:
    model = build_model(msgspec.structs.replace(harness.SMALL, initializer_range=0.3), 61, seed=0)
    packed, _ = _batches(_LENGTHS, 61)
    begin, end = (int(bound) for bound in packed.bounds[2:4])
    changed = packed.tokens.clone()
    changed[begin:end] = (changed[begin:end] + 1) % 61
    outside = (packed.rows < begin) | (packed.rows >= end)
    one, _ = likelihood(model, packed, 1.0)
    other, _ = likelihood(model, msgspec.structs.replace(packed, tokens=changed), 1.0)
    assert torch.equal(one[outside], other[outside])
    assert not torch.isclose(one[~outside], other[~outside]).any()


def test_a_pass_has_no_padding_and_predicts_trained_tokens_only() -> None:
    examples = [((7, 8), (3, 4, 5)), ((9,), (6,)), ((1, 2), ())]
    batch = pack(examples, [[0, 2], [0], []], [4, 2, 9], _CPU)
    assert batch.tokens.tolist() == [7, 8, 3, 4, 9, 1]  # the last token of a sequence predicts nothing
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 0]
    assert (batch.bounds.tolist(), batch.longest) == ([0, 4, 5, 6], 4)
    assert batch.rows.tolist() == [1, 3, 4, 5]
    assert batch.targets[:3].tolist() == [3, 5, 6]
    assert batch.mask.tolist() == [True, True, True, False]
    assert batch.starts.tolist() == [0, 2, 3]
    padding = pack([], [], [], _CPU)
    assert (len(padding.tokens), padding.mask.tolist(), padding.starts.tolist()) == (1, [False], [0])


@pytest.mark.parametrize("kind", _NOT_PACKED)
def test_model_that_needs_another_attention_gets_one_sequence_in_a_pass(kind: str) -> None:
    """Its update is then that of its own attention: that of a learner whose passes have one sequence each."""
    torch.manual_seed(0)
    built: list[PreTrainedModel] = [AutoModelForCausalLM.from_config(_NOT_PACKED[kind]).eval() for _ in range(2)]
    built[1].load_state_dict(built[0].state_dict())
    assert not use_packed_attention(built[0])
    batch = _sampled()
    gradients_of = []
    for model, most in zip(built, (1, 1000), strict=True):
        student = Learner(model, harness.settings(micro_batch_tokens=most), steps=9, temperature=1.0)
        sizes = [
            len(each.bounds) - 1
            for each in student._micro_batches(
                [(each.prompt, each.tokens) for each in batch.trajectories],
                [range(len(each.tokens)) for each in batch.trajectories],
            )
        ]
        assert sizes == [1] * len(batch.trajectories)
        student.open(1)
        student.add(batch)
        gradients_of.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients_of, strict=True))


def _sampled() -> Batch:
    prompts = [(5, 6, 7), (8, 9)]
    return harness.sampled_batch(
        harness.engine(harness.learner()), prompts, 0, 2, 8, 1, lambda group, tokens: (float(len(tokens)), group + 0.5)
    )


def test_attention_refuses_what_it_does_not_compute() -> None:
    """A model that needs more than its config says is an error, never a wrong gradient."""
    model = build_model(harness.SMALL, 13, seed=0)
    assert use_packed_attention(model)
    with pytest.raises(ValueError, match="did not get the bounds"):
        model(input_ids=torch.tensor([[1, 2]]))
    heads = torch.zeros(1, 2, 3, 16)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    for name in ("sliding_window", "softcap", "s_aux"):
        with pytest.raises(ValueError, match=name):
            packing._attend(torch.nn.Identity(), heads, heads, heads, None, cu_seq_lens_q=bounds, **{name: 3})


def test_sequences_of_equal_length_are_neighbours_in_a_pass() -> None:
    """They are computed together, so that a step with many short answers does not take a call for each."""
    student = harness.learner()
    pairs = [((1,) * (2 + n % 3), (2,) * (1 + n % 2)) for n in range(12)]
    (batch,) = student._micro_batches(pairs, [range(len(answer)) for _, answer in pairs])
    lengths = batch.bounds.diff().tolist()
    assert len([*itertools.groupby(lengths)]) == len(set(lengths)) < len(lengths)
    assert sorted(batch.indices) == [*range(12)]
