"""The built-in trainer: GRPO in one process. ``python -m`` runs it.

A step counts when its checkpoint is committed. A trainer that starts anew restores the newest commit, publishes its
weights at once, and is given the batches after it: the same ones, if its predecessor had already asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch

import rrl
from rrl.roles.model import ModelSpec, build_model
from rrl.roles.tasks import load_task
from rrl.roles.tensors import pack
from rrl.roles.tokenizer import EOS, Tokenizer
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Example, Learner, LearnerSettings

_APART = 10_000
"""between the task's seeds of warm start and run: no two runs of a study are so far apart, and datasets' seeds, which
are a multiple of it, stay below the 2**32 that some generators take"""

LOG_EVERY = 10
"""Steps between two lines in the log."""


def main() -> None:
    with rrl.join() as me:
        learner = _learner(me)
        checkpoints = Checkpoints(me.run_dir, me.launch.life.incarnation, me.settings["keep_checkpoints"])
        if me.committed_manifest is None:
            with me.phase("train"):
                learner.warm_start(_examples(me))
        else:
            with me.phase("checkpoint"):
                learner.restore(checkpoints.read(me.committed_manifest))
        checkpoints.remove_garbage()
        with me.phase("publish"):
            me.publish(learner.number, pack(learner.weights()))
        for batch in me.batches(after=learner.number):
            with me.phase("train"):
                metrics = learner.step(batch)
            with me.phase("checkpoint"):
                files = checkpoints.write(me.checkpoint_dir(batch.number), learner.state())
                me.commit(batch.number, files, metrics)
                checkpoints.committed(files)
            with me.phase("publish"):
                me.publish(batch.number, pack(learner.weights()))
            if batch.number % LOG_EVERY == 0:
                told = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
                print(f"step {batch.number}: {told}", flush=True)


def _learner(me: rrl.Worker) -> Learner:
    torch.set_num_threads(me.settings["threads"])
    tokenizer = Tokenizer(me.job["model"]["tokenizer"])
    model = build_model(msgspec.convert(me.job["model"], ModelSpec), tokenizer.size, me.job["run"]["seed"])
    return Learner(
        model,
        msgspec.convert(me.settings, LearnerSettings),
        steps=me.job["run"]["steps"],
        temperature=me.job["sampling"]["temperature"],
    )


def _examples(me: rrl.Worker) -> Iterator[list[Example]]:
    """Batches of prompts with their right answers: other items than any that the policy will be asked."""
    steps, size = me.settings["warm_start_steps"], me.settings["warm_start_batch"]
    if not steps:
        return
    tokenizer = Tokenizer(me.job["model"]["tokenizer"])
    task = load_task(me.job["task"], me.job["run"]["seed"] + _APART, tokenizer)
    for step in range(steps):
        items = range(step * size, (step + 1) * size)
        yield [(tokenizer.encode(task.prompt(i)), (*tokenizer.encode(task.answer(i)), EOS)) for i in items]


if __name__ == "__main__":
    main()
