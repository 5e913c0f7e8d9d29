"""The built-in trainer: GRPO in one process, or in ``[roles.trainer] ranks`` processes. Run by ``python -m``.

All work that needs no message of the manager is done before the trainer joins, so that a standby process has already
done it at its promotion. A step is valid when its checkpoint is committed. A restarted trainer continues from the
newest state that can be verified, publishes its weights at once, and requests the batches after this state. A batch
that an earlier incarnation had already requested has the same content again.

A standby process also runs one step of a tiny model, in a process group of its own. The reason is that torch's setup
makes the first step of a process slower: 0.43 s instead of 0.08 s for a tiny model on two CPU ranks. For a large model
no gain was shown (docs/sources.md, torch). A standby of a trainer with GPUs skips this step. Its devices are not known
yet, and torch's first ``backward`` would initialise CUDA even for a CPU model, so that the process could no longer
select devices.
"""

from __future__ import annotations

import gc

gc.disable()  # garbage collections would search a million objects of the imports, none of which can be freed

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rrl

from ...config.input_files import weights_digest
from ...config.model_folder import max_length
from ...core.run_spec import ModelSpec, RunSpec
from ...core.types import NodeName
from ..launcher.end_report import Unrepairable, exits_on_invalid_config
from ..models.policy import build_model, compute_dtype, load_initial, materialise, skeleton
from ..models.tasks import TaskError, load_task
from ..models.tokenizer import Tokenizer, open_tokenizer
from ..snapshots.client import SnapshotClient
from . import restore
from .adapters import Adapters, add_adapters, initialise
from .async_saver import MAX_UNCOMMITTED, AsyncSaver
from .checkpoint import Checkpoints
from .host_buffers import HostBuffers, PinnedMemory, buddy_of
from .learner import Learner
from .lending import Batons, DeviceState, Lender, await_memory
from .loss_function import load_loss
from .packing import Example
from .process_group import Gang, init_process_group, parts, wait_to_be_fenced
from .publisher import Publisher
from .utilization import Utilization

gc.freeze()  # saves a third of the 4.2 s of processor time for imports and exit
gc.enable()

_log = logging.getLogger("rrl.trainer")

_TINY = ModelSpec(
    hidden_size=16, intermediate_size=16, layers=1, heads=1, kv_heads=1, head_dim=16, initializer_range=0.05
)
_VOCABULARY = 16


def warmup() -> None:
    """Run one training step of a tiny model to load torch's code; the random states do not change."""
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


_M_MMAP_THRESHOLD = -3
_GIVEN_BACK_BYTES = 2**20


def give_back_freed_memory() -> None:
    """Let malloc give each freed block of at least 1 MiB back to the kernel.

    glibc raises this limit up to 32 MiB by itself. Then the tensors of a pass stay in its heap and fragment it, so that
    a process with adapters needed twice the memory of its tensors (measured with SmolLM2 on a CPU).
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES)


_SEED_OFFSET = 10_000
"""Difference between the task's seed in the warm start and the seed of the run. It is larger than the differences
between runs of a study, so that no warm start uses the seed of another run. It is small enough that the seeds of
datasets, (task's seed + 1) * size, stay below 2**32, the limit of some generators."""

LOG_EVERY_STEPS = 10
"""Number of steps between two lines in the log."""


def main() -> None:
    """Run the built-in trainer to the end of the run."""
    me = rrl.join()
    torch.set_num_threads(me.job.trainer.threads)
    give_back_freed_memory()
    with exits_on_invalid_config():
        spec = me.job.model
        tokenizer = open_tokenizer(spec)
        lora = me.job.trainer.lora
        empty = skeleton(spec, tokenizer.size, torch.float32 if lora is None else compute_dtype(spec))
        if lora is not None:
            add_adapters(empty, lora)
    with exits_on_invalid_config(TaskError):
        loss = load_loss(me.job.trainer.loss, Path(me.launch.cwd))
    if me.launch.standby and not me.launch.gpus:
        warmup()
    with me, wait_to_be_fenced(me):
        batons = Batons(me) if me.job.guests_on_node else None
        gang = init_process_group(me, compute_dtype(spec), None if batons is None else batons.claim)
        if batons is not None and not gang.all(batons.clean):
            await_memory(gang.device)
        pinning = PinnedMemory() if gang.device.type == "cuda" else None
        client = _snapshots(me, pinning)
        checkpoints = Checkpoints(me.run_dir, gang)
        restore_point = restore.agree_on_restore_point(me, gang, client)
        if gang.rank == 0:
            # converted to text, because a log handler may keep the object and with it the memory of the snapshot
            _log.info("%s continues from %s", me.launch.incarnation, str(restore_point))
        model = _model(spec, empty, tokenizer.size, me.job.seed, restore_point.fresh, gang, lora is not None)
        learner = Learner(
            model,
            me.job.trainer,
            steps=me.job.steps,
            temperature=me.job.sampling.temperature,
            limit=_limit(me.job),
            gang=gang,
            loss=loss,
            adapters=None if lora is None else Adapters(model, lora, _base_digest(me, gang)),
        )
        publisher = Publisher(me, gang, learner, compute_dtype(spec))
        buffers = _buffers(me, gang, client, pinning)
        saver = AsyncSaver(
            me,
            gang,
            learner,
            checkpoints,
            buffers,
            publisher,
            me.job.trainer.uncommitted,
            uncommitted=me.uncommitted if gang.rank == 0 else None,
            is_checkpoint_step=lambda step: me.job.trainer.next_checkpoint_step(step - 1, me.job.steps) == step,
        )
        if restore_point.fresh:
            learner.check_weights()  # before the warm start, whose rate would otherwise be blamed
            with me.phase("train"):
                learner.seed_rng(me.job.seed)
                _warm_start(me, gang, learner, tokenizer)
            if me.job.trainer.kl and lora is None:
                with me.phase("checkpoint"):
                    folder = Path(gang.broadcast_from_rank0(lambda: str(me.checkpoint_dir(0)), str))
                    learner.reference_files = checkpoints.save_reference(folder, learner.model, compute_dtype(spec))
        else:
            with me.phase("checkpoint"):
                restore.load(restore_point, learner, checkpoints, gang)
            restore_point = msgspec.structs.replace(
                restore_point, data=memoryview(b"")
            )  # frees the memory of the snapshot
        if me.job.trainer.kl and learner.reference_files is not None:
            with me.phase("checkpoint"):
                learner.reference = gang.shard(skeleton(spec, tokenizer.size, compute_dtype(spec)), compute_dtype(spec))
                materialise(learner.reference, gang.device)
                checkpoints.read_reference(learner.reference_files, learner.reference.requires_grad_(False))
        lender = None
        if batons is not None:
            lender = Lender(me, gang, batons, DeviceState(learner, gang.device, saver.layout, pinning), saver)
        _train(me, gang, learner, saver, publisher, restore_point, lender)


def _limit(job: RunSpec) -> int:
    """Return the largest number of trained tokens of a sequence; an agent may send any prompt and answers to it."""
    if job.agents is None and job.endpoint is None:
        return job.sampling.max_new_tokens
    return max_length(job.model.path, job.model.max_length)


def _model(
    spec: ModelSpec, empty: nn.Module, vocabulary: int, seed: int, fresh: bool, gang: Gang, has_adapters: bool
) -> nn.Module:
    """Return the model on the gang's devices.

    If ``fresh``, the model has its initial weights: random weights, or those in the folder of ``[model] path``. Each
    member reads only its own part of the weights in a folder. If not ``fresh``, the caller must set what is trained:
    the weights, or the adapters.
    """
    if fresh and spec.path is None:
        return gang.shard(build_model(spec, vocabulary, seed).to(gang.device), compute_dtype(spec))
    model = gang.shard(empty, compute_dtype(spec))
    materialise(model, gang.device)
    if fresh or has_adapters:
        load_initial(model, spec)
    if fresh and has_adapters:
        initialise(model, seed)
    return model


def _base_digest(me: rrl.Worker, gang: Gang) -> str:
    """Return the digest of the weights that adapters change; rank 0 reads them if it is not recorded."""
    with me.phase("checkpoint"):
        folder = Path(str(me.job.model.path))
        return gang.broadcast_from_rank0(lambda: weights_digest(me.run_dir, folder), str)


def _train(
    me: rrl.Worker,
    gang: Gang,
    learner: Learner,
    saver: AsyncSaver,
    publisher: Publisher,
    restore_point: restore.RestorePoint,
    lender: Lender | None,
) -> None:
    """Train from the learner's state to the end of the run."""
    learner.check_weights()
    publisher.publish_live(learner.number)
    if (meta := restore_point.uncommitted) is not None:
        me.uncommitted.restore(one for one in meta.earlier if one.number > restore_point.commit.number)
        for part in parts(me, gang, after=meta.number - 1):  # yields the parts of the snapshot's last step
            if not part.last:
                continue
            if part.digest != meta.digest:
                raise RuntimeError(
                    f"the snapshot of step {meta.number} was trained on another batch than the one that the"
                    " store bound to this step"
                )
            with me.phase("checkpoint"):
                saver.save(meta.digest, meta.metrics)
            break
    utilization = Utilization(learner.model, gang.device, gang.world, compute_dtype(me.job.model))
    for part in parts(me, gang, after=learner.number) if lender is None else lender.parts(after=learner.number):
        begun = time.monotonic()
        with me.phase("train"):
            if part.index == 0:
                learner.open(part.number)
            with exits_on_invalid_config(TaskError):
                learner.add(part)
            lengths = [len(each.prompt) + len(each.tokens) for each in part.trajectories]
            if not part.last:
                utilization.count(lengths, time.monotonic() - begun)
                continue
            try:
                metrics = learner.close()
            except Unrepairable:
                with me.phase("checkpoint"):
                    saver.finish()  # keeps the steps before this one, of which a checkpoint may not be due yet
                raise
        utilization.count(lengths, time.monotonic() - begun)
        metrics |= utilization.take()
        if lender is not None:
            metrics |= lender.metrics()
        with me.phase("checkpoint"):
            saver.save(part.digest, metrics)
        if not metrics["grad_norm"] and gang.rank == 0:
            _log.warning(
                "step %d has no gradient (%d trained tokens), and changes no weight", part.number, metrics["tokens"]
            )
        if part.number % LOG_EVERY_STEPS == 0 and gang.rank == 0:
            text = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            _log.info("step %d: %s", part.number, text)
    with me.phase("checkpoint"):
        saver.finish()
    if lender is not None and learner.number == me.job.steps:
        lender.until_evaluated()


def _snapshots(me: rrl.Worker, pinning: PinnedMemory | None) -> SnapshotClient | None:
    if not me.job.trainer.snapshots:
        return None
    incarnation = me.launch.incarnation
    return SnapshotClient(
        me.run_dir.id, me.node, me.keys, incarnation.gang.replica, me.rank, incarnation.number, pinning
    )


def _buffers(me: rrl.Worker, gang: Gang, client: SnapshotClient | None, pinning: PinnedMemory | None) -> HostBuffers:
    nodes = gang.gather(me.node, NodeName)

    def buddy() -> str | None:
        return buddy_of(me.node, nodes, me.peers.snapshot_servers) if me.peers is not None else None

    def others() -> list[str]:
        snapshot_servers = me.peers.snapshot_servers if me.peers is not None else {}
        return [address for node, address in snapshot_servers.items() if node != me.node and address != buddy()]

    return HostBuffers(client, min(me.job.trainer.uncommitted, MAX_UNCOMMITTED), buddy, others, pinning)


def _warm_start(me: rrl.Worker, gang: Gang, learner: Learner, tokenizer: Tokenizer) -> None:
    """Take the supervised steps of ``warm_start_steps``; status and log show their number and loss."""
    steps = me.job.trainer.warm_start_steps

    def tell(step: int, loss: float) -> None:
        text = f"warm start {step} of {steps}, loss {loss:.2f}"
        me.note(text)
        if gang.rank == 0 and (step % LOG_EVERY_STEPS == 0 or step == steps):
            _log.info("%s", text)

    learner.warm_start(_examples(me, tokenizer), tell)
    me.note("")


def _examples(me: rrl.Worker, tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Yield the batches of the warm start: prompts with their right answers, from items that the run never samples."""
    steps, size = me.job.trainer.warm_start_steps, me.job.trainer.warm_start_batch
    if not steps:
        return
    with exits_on_invalid_config(TaskError):
        task = load_task(me.job.task, me.job.seed + _SEED_OFFSET, tokenizer, Path(me.launch.cwd))
    for step in range(steps):
        texts: list[tuple[str, str]] = []
        for item in range(step * size, (step + 1) * size):
            with suppress(BaseException):  # user code may raise anything: the warm start omits this item
                texts.append((task.prompt(item), task.answer(item)))
        with exits_on_invalid_config(TaskError):  # if it raises for all items, it raises again
            texts = texts or [(task.prompt(item), task.answer(item))]
        with exits_on_invalid_config():  # the vocabulary lacks a character
            examples: list[Example] = [
                (tokenizer.prompt(prompt), (*tokenizer.encode(answer), tokenizer.eos)) for prompt, answer in texts
            ]
        yield examples


if __name__ == "__main__":
    main()
