"""Prompts and answer lengths for benchmarks/dispatch.py: synthetic lengths with a long tail, and recorded prompts.

The recorded prompts are those of 14 tasks of reasoning-gym. The length of an answer to a recorded prompt is a proxy:
the number of tokens of the task's own answer, times a constant, times log-normal noise within a group. The constant
makes the median of these lengths equal to the median of the synthetic lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import reasoning_gym
from msgspec import Struct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LIMIT = 20_000
MEDIAN = 1_500
WITHIN = math.sqrt(0.35)
"""Standard deviation of log length within a group. The total variance is 1, of which the prompts explain 65 %
(TailSieve: 64.8 %)."""
BETWEEN = math.sqrt(0.65)
RECORDED_WITHIN = 0.6
VOCABULARY = 4_096
PER_TASK = 400
TASKS: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 12},
    "number_sorting": {"min_numbers": 3, "max_numbers": 20},
    "spiral_matrix": {"min_n": 2, "max_n": 8},
    "chain_sum": {},
    "word_sorting": {"min_words": 2, "max_words": 15},
    "string_insertion": {"min_string_length": 5, "max_string_length": 40},
    "letter_counting": {},
    "caesar_cipher": {},
    "number_filtering": {"min_numbers": 3, "max_numbers": 20},
    "sentence_reordering": {},
    "base_conversion": {},
    "palindrome_generation": {"min_length": 3, "max_length": 20},
    "prime_factorization": {},
    "count_bits": {},
}


class Prompt(Struct, frozen=True):
    """A prompt, and mean and standard deviation of the logarithm of its answers' lengths."""

    tokens: tuple[int, ...]
    mean: float
    deviation: float

    def answers(self, size: int, rng: random.Random) -> list[int]:
        return [max(8, min(LIMIT, round(rng.lognormvariate(self.mean, self.deviation)))) for _ in range(size)]


def synthetic(count: int, seed: int) -> list[Prompt]:
    """Return prompts from one template, of which one token approximately shows the mean length of the answers.

    This token encodes the mean logarithm of the length plus a random error. The standard deviation of the error is 0.8
    times that of the mean logarithms of all prompts. Two other tokens differ between prompts without any relation to
    the length.
    """
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        mean = rng.gauss(math.log(MEDIAN), BETWEEN)
        shown = round(8 + 4 * (mean + rng.gauss(0.0, 0.8 * BETWEEN) - math.log(MEDIAN)))
        shown = 100 + max(0, min(32, shown))
        names = (rng.randrange(200, 600), rng.randrange(200, 600))
        prompts.append(Prompt((*range(16), names[0], *range(16, 24), names[1], 24, shown), mean, WITHIN))
    return prompts


def recorded(seed: int = 1) -> list[Prompt]:
    """Return prompts of reasoning-gym in random order, tokenised with byte pairs that are trained on them."""
    items: list[dict[str, Any]] = []
    for task, options in TASKS.items():
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=PER_TASK, **options)
        items += [dataset[i] for i in range(PER_TASK)]
    random.Random(seed).shuffle(items)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((text for item in items for text in (item["question"], str(item["answer"]))), trainer)
    lengths = [max(1, len(tokenizer.encode(str(item["answer"])).ids)) for item in items]
    shift = math.log(MEDIAN) - math.log(sorted(lengths)[len(lengths) // 2])
    return [
        Prompt(tuple(tokenizer.encode(item["question"]).ids), math.log(length) + shift, RECORDED_WITHIN)
        for item, length in zip(items, lengths, strict=True)
    ]


def permuted(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Return the prompts with their mean lengths shuffled; a ranker that learns from them expects wrong lengths."""
    means = [prompt.mean for prompt in prompts]
    random.Random(seed).shuffle(means)
    return [Prompt(prompt.tokens, mean, prompt.deviation) for prompt, mean in zip(prompts, means, strict=True)]
