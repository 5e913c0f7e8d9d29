"""The built-in trainer: GRPO in one process, or in as many as ``[roles.trainer] ranks`` says. ``python -m`` runs it.

Everything that needs no message of the manager is done before the trainer joins, so that a warm standby has done it in
advance. A step counts when its checkpoint is committed. A restarted trainer continues from the newest state that can be
verified, publishes its weights at once, and gets the batches after it: the same ones, if its predecessor had already
requested them.

A warm standby also runs one step of a tiny model, in a process group of its own: the first step of a process pays for
what torch sets up at first use (0.43 s against 0.08 s afterwards, for a tiny model on two CPU ranks; no gain was shown
for a large one; docs/sources.md, torch). It does not where the trainer has GPUs: torch's first ``backward`` initialises
CUDA, even on a CPU model, and the process could no longer choose its devices, which are not known yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # what the first checkpoint would load
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rrl

from ...core.text import refusing
from ...core.types import NodeName
from ..models.policy import ModelSpec, build_model, load_initial, materialise, model_spec, skeleton
from ..models.tasks import TaskError, load_task
from ..models.tensors import pack
from ..models.tokenizer import Tokenizer, open_tokenizer
from ..snapshots.client import SnapshotClient
from . import restore
from .async_saver import MOST_UNCOMMITTED, Saver
from .checkpoint import Checkpoints
from .host_buffers import HostBuffers, buddy_of
from .learner import Example, Learner, LearnerSettings
from .process_group import Gang, batches, form, full, waits_to_be_told

_log = logging.getLogger("rrl.trainer")

_TINY = ModelSpec(
    hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, initializer_range=0.05
)
_VOCABULARY = 16


def practise() -> None:
    """One step; the process is as before but for what is loaded. Random states too."""
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            model = build_model(_TINY, _VOCABULARY, seed=0)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            tokens = torch.zeros((1, 4), dtype=torch.long)
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            dist.destroy_process_group()


_APART = 10_000
"""between the task's seeds of warm start and run: no two runs of a study are so far apart, and datasets' seeds, which
are a multiple of it, stay below the 2**32 that some generators take"""

LOG_EVERY = 10
"""Steps between two lines in the log."""


def main() -> None:
    me = rrl.join()
    torch.set_num_threads(me.settings["threads"])
    with refusing():
        tokenizer = open_tokenizer(me.job["model"])
        spec = model_spec(me.job["model"])
        empty = skeleton(spec, tokenizer.size)
    if me.launch.standby and not me.launch.gpus:
        practise()
    with me, waits_to_be_told(me):
        gang = form(me, spec.computes_in)
        client = _snapshots(me)
        checkpoints = Checkpoints(me.run_dir, me.launch.life.incarnation, me.settings["keep_checkpoints"], gang)
        found = restore.find(me, gang, client)
        if gang.rank == 0:
            _log.info("%s goes on from %s", me.launch.life, found)
        learner = _learner(me, _model(spec, empty, tokenizer.size, me.job["run"]["seed"], found.fresh, gang), gang)
        saver = Saver(me, gang, learner, checkpoints, _buffers(me, gang, client), me.settings["uncommitted"])
        if found.fresh:
            with me.phase("train"):
                learner.begin(me.job["run"]["seed"])
                learner.warm_start(_examples(me, tokenizer))
            if me.settings["kl"]:
                with me.phase("checkpoint"):
                    folder = Path(gang.from_first(lambda: str(me.checkpoint_dir(0)), str))
                    learner.reference_kept = checkpoints.keep_reference(folder, learner.model, spec.computes_in)
        else:
            with me.phase("checkpoint"):
                restore.load(found, learner, checkpoints, gang)
            found = msgspec.structs.replace(found, data=memoryview(b""))  # else as much memory as the state, to the end
        if me.settings["kl"] and learner.reference_kept is not None:
            with me.phase("checkpoint"):
                learner.reference = gang.shard(skeleton(spec, tokenizer.size, spec.computes_in), spec.computes_in)
                materialise(learner.reference, gang.device)
                checkpoints.read_reference(learner.reference_kept, learner.reference.requires_grad_(False))
        _train(me, gang, learner, checkpoints, saver, spec, found)


def _model(spec: ModelSpec, empty: nn.Module, vocabulary: int, seed: int, fresh: bool, gang: Gang) -> nn.Module:
    """Where the gang wants it. A ``fresh`` one has its initial weights: of a folder's each member reads its part."""
    if fresh and spec.path is None:
        return gang.shard(build_model(spec, vocabulary, seed).to(gang.device), spec.computes_in)
    model = gang.shard(empty, spec.computes_in)
    materialise(model, gang.device)
    if fresh:
        load_initial(model, spec)
    return model


def _train(
    me: rrl.Worker, gang: Gang, learner: Learner, checkpoints: Checkpoints, saver: Saver, spec: ModelSpec,
    found: restore.Found,
) -> None:  # fmt: skip
    """From the learner's state to the end of the run."""
    if gang.rank == 0:
        checkpoints.remove_garbage()
    with me.phase("publish"):
        _publish(me, gang, learner, spec.computes_in)
    if (note := found.uncommitted) is not None:
        for batch in batches(me, gang, after=note.number - 1):  # the one that it has learnt from
            if batch.digest != note.digest:
                raise RuntimeError(f"the snapshot of step {note.number} learnt from another batch than is bound to it")
            with me.phase("checkpoint"):
                saver.save(note.digest, note.metrics)
            break
    for batch in batches(me, gang, after=learner.number):
        with me.phase("train"):
            metrics = learner.step(batch)
        with me.phase("checkpoint"):
            saver.save(batch.digest, metrics)
        with me.phase("publish"):
            _publish(me, gang, learner, spec.computes_in)
        if batch.number % LOG_EVERY == 0 and gang.rank == 0:
            told = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            _log.info("step %d: %s", batch.number, told)
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
    nodes = gang.gather(me.node, NodeName)

    def buddy() -> str | None:
        return buddy_of(me.node, nodes, me.peers.keepers) if me.peers is not None else None

    def others() -> list[str]:
        keepers = me.peers.keepers if me.peers is not None else {}
        return [address for node, address in keepers.items() if node != me.node and address != buddy()]

    return HostBuffers(client, min(me.settings["uncommitted"], MOST_UNCOMMITTED), buddy, others)


def _publish(me: rrl.Worker, gang: Gang, learner: Learner, dtype: torch.dtype) -> None:
    """The first member serves the whole, in what rollouts compute with. Beside the version itself, and the shards, it
    holds one tensor at a time: each is cast where it is, gathered, copied, and let go of."""
    weights = learner.weights()
    if gang.rank > 0:  # it gives its shards, and has no use for the whole: nothing is copied off its device
        for tensor in weights.values():
            full(_cast(tensor, dtype))
        return
    whole = (content for name, tensor in weights.items() for *_, content in pack({name: full(_cast(tensor, dtype))}))
    described = [(name, *_described(tensor, dtype)) for name, tensor in weights.items()]
    me.publish_each(learner.number, described, whole)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers stay what they are."""
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def _described(tensor: Tensor, dtype: torch.dtype) -> tuple[str, tuple[int, ...], int]:
    sent = dtype if tensor.is_floating_point() else tensor.dtype
    return str(sent).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * sent.itemsize


def _examples(me: rrl.Worker, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Yield the batches of the warm start: prompts with their right answers, from items that the run never samples."""
    steps, size = me.settings["warm_start_steps"], me.settings["warm_start_batch"]
    if not steps:
        return
    with refusing(TaskError):
        task = load_task(me.job["task"], me.job["run"]["seed"] + _APART, tokenizer)
    for step in range(steps):
        items = range(step * size, (step + 1) * size)
        yield [(tokenizer.prompt(task.prompt(i)), (*tokenizer.encode(task.answer(i)), tokenizer.eos)) for i in items]


if __name__ == "__main__":
    main()
