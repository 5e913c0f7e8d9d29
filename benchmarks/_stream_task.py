"""The task of benchmarks/stream.py: repeat four letters in another order, after any number of "thinking" tokens.

A prompt is a digit and four letters, ``3aekm=``. A right answer is any number of points, and then the letters with the
last two exchanged: ``.....aemk``. The supervised warm start shows answers in which only some of the letters are
exchanged, so that the policy can give both kinds of answers and has to learn which one is rewarded. The number of
points in these answers has a geometric distribution, whose mean depends on the digit (:data:`MEAN_POINTS`). So the
policy itself decides the lengths of sampled answers. They have a long tail, and the prompt explains a part of their
variance, as in reasoning models.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rrl.core.run_spec import ModelSpec, TokenizerSpec, TrainerSettings
from rrl.roles.models.tokenizer import Tokenizer

POINT = "."
MEAN_POINTS = {"1": 1, "2": 2, "3": 3, "4": 4, "5": 6, "6": 10, "7": 18, "8": 32}
"""Mean number of points in the answers of the warm start, by the prompt's digit."""
MAX_POINTS = 80
"""Largest number of points in answers of the warm start."""
ALPHABETS = ("abcd", "efgh", "ijkl", "mnop")
"""Letters at each place of a prompt. Each place has its own letters, so that the warm start is short."""
PIECES = "".join(MEAN_POINTS) + "=" + POINT + "".join(ALPHABETS)
EXCHANGED_SHARE = 0.25
"""Share of right answers in the warm start, and approximately the reward at the first step."""


def kind_of(item: int) -> str:
    """Return the digit of an item. Each block of eight items has all eight digits, in an order of its own."""
    block, place = divmod(item, len(MEAN_POINTS))
    kinds = sorted(MEAN_POINTS)
    random.Random(block).shuffle(kinds)
    return kinds[place]


class ThinkingTask:
    """An unlimited number of items, which depend on ``seed``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def _symbols(self, item: int) -> str:
        rng = random.Random(f"letters {self._seed} {item}")
        return "".join(rng.choice(alphabet) for alphabet in ALPHABETS)

    def _solution(self, item: int) -> str:
        symbols = self._symbols(item)
        return symbols[:2] + symbols[3] + symbols[2]

    def prompt(self, i: int) -> str:
        """Return the prompt of item ``i``."""
        return f"{kind_of(i)}{self._symbols(i)}="

    def answer(self, i: int) -> str:
        """Return the answer to item ``i`` for the warm start. Most of these answers are wrong on purpose."""
        rng, mean = random.Random(f"answer {self._seed} {i}"), MEAN_POINTS[kind_of(i)]
        points = int(math.log(1.0 - rng.random()) / math.log(mean / (mean + 1)))
        symbols = self._solution(i) if rng.random() < EXCHANGED_SHARE else self._symbols(i)
        return POINT * min(points, MAX_POINTS) + symbols

    def score(self, i: int, answer: str) -> tuple[float, float]:
        """Return the reward that is reported, and the reward that is trained on."""
        reward = float(answer.lstrip(POINT) == self._solution(i))
        return reward, reward


def make(seed: int) -> ThinkingTask:
    """Return the task of a run (``[task] function``)."""
    return ThinkingTask(seed)


# ── the model that the runs start from ─────────────────────────────────────────────────────────────────────────────
MODEL = ModelSpec(
    hidden_size=32,
    intermediate_size=64,
    heads=2,
    kv_heads=2,
    max_length=96,
    tokenizer=TokenizerSpec(pieces=tuple(PIECES)),
)
WARM_STEPS = 300
"""Number of supervised steps of the warm start, which takes 25 s of processor time. Afterwards (measured) 95 % of the
model's answers have the right form, their lengths are like those in the examples, and a quarter of them is right."""
WARM_BATCH = 64
WARM_LEARNING_RATE = 4e-3
_SEED_OFFSET = 10_000
"""Offset of the warm start's seed from a run's seed. It is larger than a run's seed, so that the warm start has other
items than the runs."""


def write_model(folder: Path, shape: ModelSpec = MODEL) -> None:
    """Train the model that all runs of a benchmark start from, and write it as a Hugging Face folder."""
    import tokenizers  # imported here, because the roles that import the task do not need it
    from tokenizers import decoders, models, pre_tokenizers

    from rrl.roles.models.policy import build_model
    from rrl.roles.models.tokenizer import VocabularyTokenizer
    from rrl.roles.trainer.learner import Learner

    assert shape.tokenizer is not None
    vocabulary, task = VocabularyTokenizer(shape.tokenizer), ThinkingTask(_SEED_OFFSET)
    model: Any = build_model(shape, vocabulary.size, seed=0)
    settings = TrainerSettings(micro_batch_tokens=256, warm_start_learning_rate=WARM_LEARNING_RATE)
    Learner(model, settings, steps=1, temperature=1.0).warm_start(_examples(task, vocabulary))
    model.config.eos_token_id, model.config.pad_token_id = vocabulary.eos, vocabulary.pad
    model.generation_config.eos_token_id = vocabulary.eos
    model.save_pretrained(folder)
    ids = {"<pad>": vocabulary.pad, "<eos>": vocabulary.eos} | {piece: vocabulary.encode(piece)[0] for piece in PIECES}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def _examples(task: ThinkingTask, vocabulary: Tokenizer) -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Yield the batches of the warm start, each in the order of its lengths, so that there is little padding."""
    for step in range(WARM_STEPS):
        items = range(step * WARM_BATCH, (step + 1) * WARM_BATCH)
        answers = [(task.prompt(item), task.answer(item)) for item in items]
        yield sorted(
            ((vocabulary.prompt(prompt), (*vocabulary.encode(answer), vocabulary.eos)) for prompt, answer in answers),
            key=lambda example: len(example[1]),
        )
