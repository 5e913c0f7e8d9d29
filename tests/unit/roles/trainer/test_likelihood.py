from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from rrl.roles.models.policy import build_model, log_probs, weights
from rrl.roles.trainer import likelihood as likelihood_module
from rrl.roles.trainer.likelihood import likelihood, recompute_blocks
from rrl.roles.trainer.packing import pack
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.passes import SIZES, LargestLogits, examples_of, gradients

pytestmark = pytest.mark.torch

_HEADS: dict[str, PretrainedConfig] = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "capped logits": Gemma2Config(**SIZES, final_logit_softcapping=0.5, sliding_window=64),
    "scaled logits": CohereConfig(**SIZES, logit_scale=0.2),
    "divided logits": GraniteConfig(**SIZES, logits_scaling=4.0),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "embedding of another width": OPTConfig(
        vocab_size=61, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    ),
}


def _model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(_HEADS[kind])).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def _loss(chosen: Tensor, entropy: Tensor) -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return (
        torch.randn(len(chosen), generator=dice) * chosen + torch.randn(len(chosen), generator=dice) * entropy
    ).sum()


def _plainly(model: nn.Module, prompt: list[int], answer: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`likelihood` of one sequence, from the logits that the model returns."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer][:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    every = log_probs(logits, temperature)
    return every.gather(1, torch.tensor(answer)[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize("kind", _HEADS)
def test_values_and_gradients_are_those_of_the_models_own_logits(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    monkeypatch.setattr(likelihood_module, "_ROWS_PER_PIECE", rows)
    monkeypatch.setattr(likelihood_module, "_LOGITS_PER_PIECE", 1)
    model = _model(kind)
    ((prompt, answer),) = examples_of([(5, 8)], vocabulary=61)
    plain = _plainly(model, [*prompt], [*answer], 0.7)
    expected = gradients(model, _loss(*plain))
    got = likelihood(model, pack([(prompt, answer)], [range(8)], [0], torch.device("cpu")), 0.7)
    assert torch.allclose(got[0], plain[0], atol=1e-5)
    assert torch.allclose(got[1], plain[1], atol=1e-5)
    for name, gradient in gradients(model, _loss(*got)).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-5), name


def test_no_tensor_has_the_logits_of_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of 40 rows are larger than a piece of 4 rows, except those with the hidden size."""
    monkeypatch.setattr(likelihood_module, "_ROWS_PER_PIECE", 4)
    monkeypatch.setattr(likelihood_module, "_LOGITS_PER_PIECE", 1)
    model = build_model(msgspec.structs.replace(harness.SMALL, layers=1), 4001, seed=0)
    batch = pack(examples_of([(2, 10)] * 4, vocabulary=4001), [range(10)] * 4, [*range(4)], torch.device("cpu"))
    with LargestLogits(4001, harness.SMALL.hidden_size) as largest:
        _loss(*likelihood(model, batch, 1.0)).backward()  # type: ignore[no-untyped-call]
    assert largest.nbytes == 4 * 4001 * 4


def test_gradient_of_the_head_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed in bfloat16, hundreds of small pieces would differ from one piece by more than a rounding."""
    monkeypatch.setattr(likelihood_module, "_LOGITS_PER_PIECE", 1)
    model = build_model(harness.SMALL, 61, seed=0).to(torch.bfloat16)
    batch = pack(examples_of([(2, 30)] * 20, vocabulary=61), [range(30)] * 20, [*range(20)], torch.device("cpu"))
    of_head = []
    for rows in (1, 1000):
        monkeypatch.setattr(likelihood_module, "_ROWS_PER_PIECE", rows)
        of_head.append(gradients(model, likelihood(model, batch, 1.0)[0].sum())["lm_head.weight"].float())
    assert (of_head[0] - of_head[1]).abs().max() <= 2**-7 * of_head[1].abs().max()


def test_model_computes_as_before_after_a_pass() -> None:
    model = build_model(harness.SMALL, 13, seed=0)
    batch = pack([((2, 3), (4,))], [range(1)], [0], torch.device("cpu"))
    with pytest.raises(TypeError):
        likelihood(model, msgspec.structs.replace(batch, rows="no rows"), 1.0)
    assert model.forward.__func__ is type(model).forward  # type: ignore[attr-defined]


# ── activation checkpointing ───────────────────────────────────────────────────────────────────────────────────────
def test_recomputed_layers_give_the_same_bits_under_the_same_names() -> None:
    kept, recomputed = (build_model(harness.SMALL, 13, seed=0) for _ in range(2))
    names = [*weights(kept)]
    recompute_blocks(recomputed)
    batch = pack(examples_of([(2, 3), (4, 6)], vocabulary=13), [range(3), range(6)], [0, 1], torch.device("cpu"))
    expected, got = (gradients(each, _loss(*likelihood(each, batch, 1.0))) for each in (kept, recomputed))
    assert [*weights(recomputed)] == names
    assert got.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in got.items())


def test_random_numbers_of_a_recomputed_layer_are_the_same() -> None:
    model = nn.ModuleList([nn.Dropout(0.5)])
    recompute_blocks(model)
    given = torch.ones(8, requires_grad=True)
    output = model[0](given)
    torch.rand(1)
    output.sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, output.detach())
