"""Runs tiny models in vLLM engines of this process, and computes log-probabilities of their samples by torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rrl.core.run_spec import ModelSpec
from rrl.core.types import Version
from rrl.roles.models.policy import build_model, skeleton, weights
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.vllm import config as vllm_setup
from rrl.roles.trajectories.types import Item, Segment

torch.set_num_threads(1)  # must precede vLLM, which forbids it later; with two threads a step takes 250 ms
VOCABULARY = 101
EOS = 1
ATOL = 1e-3
"""Largest accepted difference of log-probabilities (nats). In float32 the difference is about 1e-5."""
MEMORY = 512 * 2**20
SPEC = ModelSpec(
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    max_length=256,
    initializer_range=0.2,
)


def tied_folder(folder: Path) -> ModelSpec:
    """Write a Hugging Face folder of a model that has one tensor for input and output embeddings."""
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return ModelSpec(path=str(folder), max_length=256)


def random_weights(spec: ModelSpec, seed: int) -> nn.Module:
    """Return the model with random weights; each seed gives other values in every tensor, including norms."""
    made = build_model(spec, VOCABULARY, seed)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.05)
    return made


def vllm_engine(
    spec: ModelSpec,
    folder: Path,
    sampling: Sampling,
    lease: int = 16,
    stop_token: int = EOS,
    masks: bool = False,
    **given: Any,
) -> Engine:
    """Return an engine as :mod:`rrl.roles.rollout.main` builds it, without weights.

    ``folder`` gets the config.json of a model that rrl builds.
    """
    vllm_setup.set_environment(1)
    model = skeleton(spec, VOCABULARY)
    config = vllm_setup.configure(
        vllm_setup.write_config_folder(model, folder) if spec.path is None else Path(spec.path),
        dtype="float32",
        max_length=spec.max_length,
        seed=3,
        lease=lease,
        memory=MEMORY,
        gpus=0,
        given=given,
        masks=masks,
    )
    from rrl.roles.rollout.vllm.engine import VllmEngine

    return VllmEngine(config, model, stop_tokens=frozenset({stop_token}), sampling=sampling, lease=lease)


def load(engine: Engine, step: int, model: nn.Module) -> None:
    engine.load(Version(step, 1), weights(model).items())


def items(count: int, max_new: int = 40, first: int = 0) -> list[Item]:
    """Return items in groups of four that share a prompt."""
    return [Item(n, n // 4, tuple(range(2 + n // 4, 12 + n // 4)), (), max_new) for n in range(first, first + count)]


class Made:
    """The segments and finished trajectories that an engine returned, in order."""

    def __init__(self) -> None:
        self.segments: dict[int, list[Segment]] = {}
        self.finished: list[int] = []

    def take(self, segments: Iterable[Segment], finished: Iterable[int] = ()) -> None:
        for segment in segments:
            so_far = self.segments.setdefault(segment.trajectory, [])
            assert segment.offset == sum(len(each.tokens) for each in so_far)
            assert len(segment.tokens) == len(segment.logprobs) > 0
            so_far.append(segment)
        self.finished += finished

    def steps(self, engine: Engine, count: int) -> None:
        for _ in range(count):
            assert engine.has_work
            self.take(*engine.step())

    def to_the_end(self, engine: Engine) -> None:
        while engine.has_work:
            self.take(*engine.step())

    def tokens(self, trajectory: int) -> tuple[int, ...]:
        return tuple(token for segment in self.segments[trajectory] for token in segment.tokens)

    def worst(self, given: Sequence[Item], models: dict[int, nn.Module], temperature: float) -> dict[int, float]:
        """Return the largest difference (nats) between recorded log-probabilities and torch's, by version's step."""
        worst: dict[int, float] = {}
        for item in given:
            prefix = [*item.prompt, *(token for segment in item.so_far for token in segment.tokens)]
            for segment in self.segments.get(item.trajectory, ()):
                step = segment.version.step
                found = _logprobs(models[step], prefix, segment.tokens, temperature)
                off = (found - torch.tensor(segment.logprobs)).abs().max().item()
                worst[step] = max(worst.get(step, 0.0), off)
                prefix += segment.tokens
        return worst


@torch.no_grad()
def _logprobs(model: nn.Module, prefix: list[int], tokens: tuple[int, ...], temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prefix, *tokens]]), use_cache=False).logits[0, len(prefix) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
