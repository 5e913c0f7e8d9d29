"""The trainer's memory and speed: packed sequences, the output head in pieces, layers that are computed again.

All on one thread of a CPU, with a small model of random weights. The answers have log-normal lengths (sigma = 1, as in
:mod:`rrl.benchmarks.dispatch`). The unpacked arm is what rrl did before: rectangles of ``_ROWS`` answers in the order
of the batch, each padded to its longest.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rrl.core.run_spec import ModelSpec
from rrl.roles.models.policy import build_model
from rrl.roles.trainer import likelihood as likelihood_module
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.likelihood import likelihood, recompute_blocks
from rrl.roles.trainer.packing import Example, MicroBatch, pack
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.passes import LargestLogits, LiveBytes, examples_of

_SEEDS = 3
_ANSWERS, _ROWS = 64, 8
_PROMPT, _MEDIAN, _LONGEST = 32, 48, 512
"""Tokens of a prompt, of half of the answers at most, and of the longest answer."""
_VOCABULARY = 4096
_SPEC = ModelSpec(
    hidden_size=128,
    intermediate_size=384,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=32,
    max_length=_PROMPT + _LONGEST,
    initializer_range=0.05,
)
_CPU = torch.device("cpu")


def measure(_: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the figures, and the samples of the ratio of step times by seed."""
    torch.set_num_threads(1)
    runs = [_compared(seed) for seed in range(_SEEDS)]
    ratios = [ratio for ratio, _, _ in runs]
    figures = {
        "logits_bytes_over_piece": _logits_over_piece(),
        "saved_bytes_ratio": _saved_ratio(),
        "padded_share": max(share for _, share, _ in runs),
        "packed_over_unpacked": statistics.median(ratios),
        "packed_grad_error": max(error for _, _, error in runs),
    }
    return figures, {"packed_over_unpacked": ratios}


def _logits_over_piece() -> float:
    """Return the bytes of the largest tensor of logits in a pass of 2,560 answer tokens, as a multiple of a piece's."""
    vocabulary = 49_152
    model = build_model(harness.SMALL, vocabulary, seed=0)
    examples = examples_of([(32, 256)] * 10, vocabulary)
    with LargestLogits(vocabulary, harness.SMALL.hidden_size) as largest:
        _loss(*likelihood(model, _whole(examples), 1.0)).backward()  # type: ignore[no-untyped-call]
    return float(largest.nbytes / (likelihood_module._ROWS_PER_PIECE * vocabulary * 4))


def _saved_ratio() -> float:
    """Return the bytes that exist between the passes because the backward pass needs them: recomputed over kept."""
    batch = _whole(examples_of([(_PROMPT, 224)] * 8, _VOCABULARY))
    saved = []
    for recompute in (True, False):
        model = build_model(_SPEC, _VOCABULARY, seed=0)
        if recompute:
            recompute_blocks(model)
        with LiveBytes(model) as live:
            loss = _loss(*likelihood(model, batch, 1.0))
        saved.append(live.nbytes)
        del loss
    return float(saved[0] / saved[1])


def _compared(seed: int) -> tuple[float, float, float]:
    """Return packed over unpacked time of a step, the share of padding, and the error of the packed gradient."""
    dice = random.Random(seed)
    lengths = [min(_LONGEST, max(1, round(_MEDIAN * dice.lognormvariate(0, 1)))) for _ in range(_ANSWERS)]
    examples = examples_of([(_PROMPT, length) for length in lengths], _VOCABULARY, seed)
    total = sum(_PROMPT + length for length in lengths)
    packed, padded, alone = (build_model(_SPEC, _VOCABULARY, seed=seed) for _ in range(3))
    settings = harness.settings(micro_batch_tokens=max(total * _ROWS // _ANSWERS, _PROMPT + _LONGEST))
    student = Learner(packed, settings, steps=1, temperature=1.0)
    batches = [*student._micro_batches(examples, [range(length) for length in lengths])]
    share = 1 - (total - _ANSWERS) / sum(len(batch.tokens) for batch in batches)

    def packed_step() -> None:
        for batch in batches:
            _loss(*likelihood(packed, batch, 1.0)).backward()  # type: ignore[no-untyped-call]

    def padded_step() -> None:
        for start in range(0, _ANSWERS, _ROWS):
            _padded_loss(padded, examples[start : start + _ROWS]).backward()  # type: ignore[no-untyped-call]

    def step_alone() -> None:
        for one in examples:
            _loss(*likelihood(alone, _whole([one]), 1.0)).backward()  # type: ignore[no-untyped-call]

    packed_step()
    step_alone()
    of_packed, of_alone = (
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for model in (packed, alone)
    )
    largest = max(gradient.abs().max().item() for gradient in of_alone.values())
    error = max((of_packed[name] - gradient).abs().max().item() for name, gradient in of_alone.items()) / largest
    padded_step()
    took: dict[Callable[[], None], list[float]] = {packed_step: [], padded_step: []}
    for _ in range(3):
        for step, seconds in took.items():
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(took[packed_step]) / statistics.median(took[padded_step]), share, error


def _whole(examples: list[Example]) -> MicroBatch:
    return pack(examples, [range(len(answer)) for _, answer in examples], [*range(len(examples))], _CPU)


def _loss(chosen: Tensor, entropy: Tensor) -> Tensor:
    return -chosen.sum() - 0.01 * entropy.sum()


def _padded_loss(model: nn.Module, examples: list[Example]) -> Tensor:
    """Return :func:`_loss` of a rectangle that is padded on the right."""
    tokens = pad_sequence([torch.tensor([*prompt, *answer]) for prompt, answer in examples], batch_first=True)
    targets = tokens[:, _PROMPT:]
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]).logits
    mask = torch.arange(targets.shape[1]) < torch.tensor([len(answer) for _, answer in examples])[:, None]
    chosen, entropy = likelihood_module._in_pieces(
        lambda piece: piece, logits.flatten(0, 1), targets.flatten(), 1.0, _VOCABULARY, []
    )
    return _loss(chosen[mask.flatten()], entropy[mask.flatten()])
