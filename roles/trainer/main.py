"""The built-in trainer: GRPO in one process, or in as many as ``[roles.trainer] ranks`` says. ``python -m`` runs it.

Whatever needs no word of the manager comes before it joins: a process that is kept warm has done it in advance. A step
counts when its checkpoint is committed. A trainer that starts anew goes on from the newest state that can be verified,
publishes its weights at once, and is given the batches after it: the same ones, if its predecessor had already asked
for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import nn

import rrl
from rrl.roles.model import ModelSpec, build_model, materialise, skeleton
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.tasks import load_task
from rrl.roles.tensors import pack
from rrl.roles.tokenizer import EOS, Tokenizer
from rrl.roles.trainer import restart
from rrl.roles.trainer.buffers import HostBuffers, buddy_of
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.gang import Gang, form, full, waits_to_be_told
from rrl.roles.trainer.learner import Example, Learner, LearnerSettings
from rrl.roles.trainer.practice import practise
from rrl.roles.trainer.saver import MOST_UNCOMMITTED, Saver

_APART = 10_000
"""between the task's seeds of warm start and run: no two runs of a study are so far apart, and datasets' seeds, which
are a multiple of it, stay below the 2**32 that some generators take"""

LOG_EVERY = 10
"""Steps between two lines in the log."""


def main() -> None:
    me = rrl.join()
    torch.set_num_threads(me.settings["threads"])
    tokenizer = Tokenizer(me.job["model"]["tokenizer"])
    spec = msgspec.convert(me.job["model"], ModelSpec)
    empty = skeleton(spec, tokenizer.size)
    if me.launch.standby and not me.launch.gpus:
        practise(spec, tokenizer.size)
    with me, waits_to_be_told(me):
        gang = form(me)
        client = _snapshots(me)
        checkpoints = Checkpoints(me.run_dir, me.launch.life.incarnation, me.settings["keep_checkpoints"], gang)
        found = restart.find(me, gang, client)
        if gang.rank == 0:
            print(f"{me.launch.life} goes on from {found}", flush=True)
        if found.fresh:
            model = gang.shard(build_model(spec, tokenizer.size, me.job["run"]["seed"]).to(gang.device))
        else:
            model = gang.shard(empty)
            materialise(model, gang.device)
        learner = _learner(me, model, gang)
        saver = Saver(me, gang, learner, checkpoints, _buffers(me, gang, client), me.settings["uncommitted"])
        if found.fresh:
            with me.phase("train"):
                learner.begin(me.job["run"]["seed"])
                learner.warm_start(_examples(me, tokenizer))
        else:
            with me.phase("checkpoint"):
                restart.load(found, learner, checkpoints, gang)
            found = msgspec.structs.replace(found, data=memoryview(b""))  # else as much memory as the state, to the end
        _train(me, gang, learner, checkpoints, saver, found)


def _train(
    me: rrl.Worker, gang: Gang, learner: Learner, checkpoints: Checkpoints, saver: Saver, found: restart.Found
) -> None:  # fmt: skip
    """From the learner's state to the end of the run."""
    if gang.rank == 0:
        checkpoints.remove_garbage()
    with me.phase("publish"):
        _publish(me, gang, learner)
    if (note := found.uncommitted) is not None:
        for batch in gang.together(me.batches(after=note.number - 1)):  # the one that it has learnt from
            if batch.digest != note.digest:
                raise RuntimeError(f"the snapshot of step {note.number} learnt from another batch than is bound to it")
            with me.phase("checkpoint"):
                saver.save(note.digest, note.metrics)
            break
    for batch in gang.together(me.batches(after=learner.number)):
        with me.phase("train"):
            metrics = learner.step(batch)
        with me.phase("checkpoint"):
            saver.save(batch.digest, metrics)
        with me.phase("publish"):
            _publish(me, gang, learner)
        if batch.number % LOG_EVERY == 0 and gang.rank == 0:
            told = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            print(f"step {batch.number}: {told}", flush=True)
    with me.phase("checkpoint"):
        saver.finish()


def _learner(me: rrl.Worker, model: nn.Module, gang: Gang) -> Learner:
    return Learner(
        model,
        msgspec.convert(me.settings, LearnerSettings),
        steps=me.job["run"]["steps"],
        temperature=me.job["sampling"]["temperature"],
        gang=gang,
    )


def _snapshots(me: rrl.Worker) -> SnapshotClient | None:
    if not me.settings["snapshots"]:
        return None
    life = me.launch.life
    return SnapshotClient(me.run_dir.id, me.node, me.keys, life.gang.replica, me.rank, life.incarnation)


def _buffers(me: rrl.Worker, gang: Gang, client: SnapshotClient | None) -> HostBuffers:
    nodes = gang.gather(me.node)

    def buddy() -> str | None:
        return buddy_of(me.node, nodes, me.peers.keepers) if me.peers is not None else None

    def others() -> list[str]:
        keepers = me.peers.keepers if me.peers is not None else {}
        return [address for node, address in keepers.items() if node != me.node and address != buddy()]

    return HostBuffers(client, min(me.settings["uncommitted"], MOST_UNCOMMITTED), buddy, others)


def _publish(me: rrl.Worker, gang: Gang, learner: Learner) -> None:
    """The first member serves the whole; of a sharded model it holds a second copy of one tensor at a time."""
    weights = learner.weights()
    if gang.world == 1:
        me.publish(learner.number, pack(weights))
        return
    whole = (packed for name, tensor in weights.items() for packed in pack({name: full(tensor)}))
    if gang.rank > 0:
        for _ in whole:
            pass
        return
    described = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in weights.items()
    ]
    me.publish_each(learner.number, described, (content for *_, content in whole))


def _examples(me: rrl.Worker, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Batches of prompts with their right answers: other items than any that the policy will be asked."""
    steps, size = me.settings["warm_start_steps"], me.settings["warm_start_batch"]
    if not steps:
        return
    task = load_task(me.job["task"], me.job["run"]["seed"] + _APART, tokenizer)
    for step in range(steps):
        items = range(step * size, (step + 1) * size)
        yield [(tokenizer.encode(task.prompt(i)), (*tokenizer.encode(task.answer(i)), EOS)) for i in items]


if __name__ == "__main__":
    main()
