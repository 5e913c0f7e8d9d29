"""The learning loop in one process, without manager, store or sockets: sampling, scoring, training.

``lag`` batches wait between sampling and training, as in a run whose rollouts work ahead of the trainer.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rrl.core.run_spec import LoraSpec, ModelSpec, TrainerSettings
from rrl.core.types import Version
from rrl.roles.models.policy import build_model, load_initial, materialise, skeleton
from rrl.roles.models.tokenizer import EOS
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trainer.adapters import Adapters, add_adapters, initialise
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.batches import Batch, Part
from rrl.roles.trajectories.types import Item, Segment, Trajectory

torch.set_num_threads(1)  # the tests share their cores, and a model of this size is not faster on two cores
SMALL = ModelSpec(
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=16,
    max_length=64,
    initializer_range=0.05,
)
Scoring = Callable[[int, tuple[int, ...]], tuple[float, float]]
"""A function of the item's index and the answer's tokens, which returns (reward, training reward)."""


def settings(**changes: Any) -> TrainerSettings:
    """Return the default trainer settings of job.toml with ``changes``."""
    return msgspec.structs.replace(TrainerSettings(), **changes)


def learner(vocabulary: int = 13, seed: int = 0, steps: int = 100, **changes: Any) -> Learner:
    return Learner(build_model(SMALL, vocabulary, seed), settings(**changes), steps=steps, temperature=1.0)


def adapted(path: Path, lora: LoraSpec, seed: int = 0, base: str = "base", **changes: Any) -> Learner:
    """Return a learner that trains new adapters of the model in a folder."""
    spec = ModelSpec(path=str(path))
    model = skeleton(spec, 1)
    add_adapters(model, lora)
    materialise(model, torch.device("cpu"))
    load_initial(model, spec)
    initialise(model, seed)
    made = settings(lora=lora, **changes)
    return Learner(model, made, steps=100, temperature=1.0, adapters=Adapters(model, lora, base))


def saved(student: Learner) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return a copy of the learner's whole state."""
    return {name: tensor.detach().clone() for name, tensor in student.tensors().items()}, student.extra_state()


def restore(student: Learner, state: tuple[dict[str, torch.Tensor], bytes]) -> None:
    with torch.no_grad():
        for name, tensor in student.tensors().items():
            tensor.copy_(state[0][name])
    student.resume(state[1])


def engine(
    weights: Learner, vocabulary: int = 13, seed: int = 0, version: int = 0, sampling: Sampling | None = None
) -> TorchEngine:
    """Return an engine with the learner's current weights, whose model was built with another seed."""
    made = TorchEngine(
        build_model(SMALL, vocabulary, seed + 1000), stop_tokens=frozenset({EOS}), seed=seed, sampling=sampling
    )
    made.load(Version(version, 1), weights.weights().items())
    return made


def roll_out(with_engine: Engine, items: Sequence[Item]) -> dict[int, list[Segment]]:
    """Return all segments by trajectory, those of earlier incarnations first.

    The test fails if the engine does not report each item as finished exactly once.
    """
    segments = {item.trajectory: list(item.so_far) for item in items}
    finished: list[int] = []
    waiting = list(items)
    while waiting or with_engine.has_work:
        taken, waiting = waiting[: with_engine.free_slots], waiting[with_engine.free_slots :]
        with_engine.add(taken)
        grown, complete = with_engine.step()
        for segment in grown:
            segments[segment.trajectory].append(segment)
        finished += complete
    assert sorted(finished) == sorted(segments)
    return segments


def join(item: Item, segments: Sequence[Segment], scores: tuple[float, float] = (0.0, 0.0)) -> Trajectory:
    return Trajectory(
        id=item.trajectory,
        group=item.group,
        prompt=item.prompt,
        tokens=tuple(token for each in segments for token in each.tokens),
        logprobs=tuple(value for each in segments for value in each.logprobs),
        versions=tuple(each.version for each in segments for _ in each.tokens),
        reward=scores[0],
        training=scores[1],
    )


def sampled_batch(
    with_engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    first_item: int,
    group_size: int,
    max_new: int,
    number: int,
    score: Scoring,
) -> Batch:
    """Sample and score one batch of complete groups, one group per prompt."""
    items = [
        Item((first_item + place) * group_size + copy, first_item + place, prompt, max_new=max_new)
        for place, prompt in enumerate(prompts)
        for copy in range(group_size)
    ]
    rolled = roll_out(with_engine, items)
    trajectories = []
    for item in items:
        tokens = tuple(token for each in rolled[item.trajectory] for token in each.tokens)
        trajectories.append(join(item, rolled[item.trajectory], score(item.group, tokens)))
    groups = tuple(range(first_item, first_item + len(prompts)))
    return Batch(number=number, groups=groups, digest=f"binding-{number}", trajectories=tuple(trajectories))


def parts_of(batch: Batch, sizes: Sequence[int]) -> list[Part]:
    """Cut a batch into parts, in the order of its groups; ``sizes`` gives the number of groups of each part."""
    assert sum(sizes) == len(batch.groups)
    groups, made = iter(batch.groups), list[Part]()
    for index, size in enumerate(sizes):
        these = tuple(itertools.islice(groups, size))
        trajectories = tuple(each for each in batch.trajectories if each.group in these)
        last = index == len(sizes) - 1
        made.append(Part(batch.number, these, f"{batch.digest}.{index}", trajectories, index, last))
    return made


def step(student: Learner, batch: Batch) -> dict[str, float]:
    """Train on ``batch`` as a step of a single part, and return its metrics."""
    student.open(batch.number)
    student.add(batch)
    return student.close()


def step_in_parts(student: Learner, batch: Batch, sizes: Sequence[int]) -> dict[str, float]:
    """Train one step in parts with these numbers of groups, and return its metrics."""
    student.open(batch.number)
    for part in parts_of(batch, sizes):
        student.add(part)
    return student.close()


def learn(
    student: Learner,
    rollout: Engine,
    prompt: Callable[[int], tuple[int, ...]],
    score: Scoring,
    *,
    steps: int,
    lag: int,
    prompts: int,
    group_size: int,
    max_new: int,
) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step.

    The batch of step n was sampled with the weights of step n - 1 - ``lag``, or with the weights of step 0 if this
    number is negative.
    """
    waiting: collections.deque[Batch] = collections.deque()
    for number in itertools.count(1):
        rollout.load(Version(student.number, 1), student.weights().items())
        first = (number - 1) * prompts
        these = [prompt(first + place) for place in range(prompts)]
        waiting.append(sampled_batch(rollout, these, first, group_size, max_new, number, score))
        if len(waiting) > lag:
            batch = waiting.popleft()
            yield step(student, batch) | {"reward": statistics.fmean(one.reward for one in batch.trajectories)}
        if student.number == steps:
            return
