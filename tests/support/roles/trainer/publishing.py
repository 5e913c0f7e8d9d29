"""Publishing outside of a run: a worker without receivers, and gang members with a model of 200 MB."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import ModelSpec
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.checkpoints.folders import fresh_folder
from rrl.roles.models.policy import build_model, materialise, skeleton, weights
from rrl.roles.models.tensors import unpack
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trainer.async_saver import AsyncSaver
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.host_buffers import HostBuffers, Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trainer.publisher import Publisher
from rrl.roles.trajectories.batches import Batch
from rrl.roles.worker import publishing
from rrl.tests.support.listening_manager import TIMEOUT_S
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.weights.transports import SECRET
from rrl.transport.weights.deltas import Deltas
from rrl.transport.weights.manifest import CHUNK_BYTES
from rrl.transport.weights.store import WeightStore

SPEC = ModelSpec(
    hidden_size=512, intermediate_size=2048, layers=11, heads=8, kv_heads=8, head_dim=64, initializer_range=0.05
)
VOCABULARY = 4096
_MEETS_BY = timedelta(seconds=120)


class PublishingWorker(SimpleNamespace):
    """The part of :class:`rrl.Worker` that a publisher needs, with a real :class:`WeightStore`.

    While ``may_publish`` is not set, the publishing thread hangs after the first tensor of a version; it sets
    ``publishing`` when it reaches this point.
    """

    def __init__(self, staleness: int | None = None, world: int = 1, chunk: int = CHUNK_BYTES) -> None:
        super().__init__(job=SimpleNamespace(sampling=SimpleNamespace(staleness=staleness)), world=world)
        self.stopping = threading.Event()
        self.may_publish, self.publishing = threading.Event(), threading.Event()
        self.may_publish.set()
        self.store = WeightStore()
        self.announced: list[int] = []
        """Steps of the versions that were announced, in order."""
        self.phases: list[str] = []
        """The nested phases of the training thread, of which the last one is the current phase."""
        self._chunk = chunk
        self.launch = SimpleNamespace(incarnation=Incarnation(ReplicaId("trainer/0"), 1))
        self._connection: Any = SimpleNamespace(
            weights=self.store,
            keys=SimpleNamespace(secret=SECRET),
            launch=self.launch,
            deltas=Deltas(),
            announce_version=lambda version: self.announced.append(version.step),
        )

    @contextmanager
    def idle(self, cause: str) -> Iterator[None]:
        """Return a context that ignores the time of the wait."""
        yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield
        self.phases.pop()

    def publish_written(
        self, number: int, described: Sequence[publishing.TensorDescription], writes: Iterator[publishing.Write]
    ) -> None:
        publishing.publish_part(self._connection, self._chunk, number, described, self._once_it_may(writes))

    def _once_it_may(self, writes: Iterator[publishing.Write]) -> Iterator[publishing.Write]:
        for write in writes:
            yield write
            self.publishing.set()
            assert self.may_publish.wait(TIMEOUT_S)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a version that the store still has."""
        stored = self.store.get(Version(number, 1))
        assert stored is not None
        return dict(unpack(stored.manifest.tensors, stored.flat))


class LearningWorker(PublishingWorker):
    """A worker that can also save; it records only the number of each commit."""

    def __init__(self, run_dir: RunDir, world: int) -> None:
        super().__init__(world=world)
        self.run_dir = run_dir
        self.committed: list[int] = []

    def blocked_on(self, replica: ReplicaId) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint_dir(self, number: int) -> Path:
        return fresh_folder(self.run_dir.checkpoints, number, 1)

    def commit(self, number: int, files: object, metrics: dict[str, float], digests: object) -> None:
        assert metrics["publish_blocked_s"] >= 0
        self.committed.append(number)


def gang_of(rank: int, world: int, folder: str) -> Gang:
    """Join the other members in a process group on the CPU, and return the gang."""
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_MEETS_BY)
    control_group, file_group, publish_group = (dist.new_group(backend="gloo") for _ in range(3))
    return Gang(
        rank,
        world,
        mesh=init_device_mesh("cpu", (world,)),
        control_group=control_group,
        file_group=file_group,
        publish_group=publish_group,
    )


def compare(rank: int, world: int, folder: str, dtype: str, batches: Sequence[Batch]) -> None:
    """Train, save and publish; write to ``rank-0.json`` whether each published version is right.

    A right version has exactly the bits of the model's weights after its step, cast to ``dtype``.
    """
    torch.set_num_threads(1)
    gang = gang_of(rank, world, folder)
    sent: torch.dtype = getattr(torch, dtype)
    model = gang.shard(build_model(harness.SMALL, 13, seed=0), sent)
    student = Learner(model, harness.settings(micro_batch_tokens=12), steps=len(batches), temperature=1.0, gang=gang)
    run = RunDir(Path(folder, "run"))
    if rank == 0:
        run.create()
    gang.all(True)
    worker = LearningWorker(run, world)
    me: Any = worker
    publisher = Publisher(me, gang, student, sent)
    saver = AsyncSaver(me, gang, student, Checkpoints(run, gang), HostBuffers(own=1), publisher, 1)
    equal: dict[int, bool] = {}

    def note(number: int) -> None:
        expected = {name: _whole(tensor).to(sent) for name, tensor in student.weights().items()}
        if rank == 0:
            while number not in worker.announced:
                time.sleep(0.01)
            found = worker.tensors(number)
            equal[number] = found.keys() == expected.keys() and all(
                tensor.dtype == sent and torch.equal(tensor, expected[name]) for name, tensor in found.items()
            )

    publisher.publish_live(0)
    note(0)
    for batch in batches:
        harness.step(student, batch)
        saver.save(batch.digest, {})
        note(batch.number)
    saver.finish()
    if rank == 0:
        Path(folder, "rank-0.json").write_text(json.dumps({"equal": equal, "committed": worker.committed}))
    gang.all(True)


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def play(rank: int, world: int, folder: str, dtype: str) -> None:
    """Publish the live weights and then a host copy, and load the host copy into an engine.

    Write to ``rank-N.json`` the largest memory growth (bytes) during each of these operations, and whether all values
    were right.
    """
    torch.set_num_threads(1)
    gang = gang_of(rank, world, folder)
    model = gang.shard(skeleton(SPEC, VOCABULARY))
    materialise(model, gang.device)
    live = weights(model)
    for place, tensor in enumerate(live.values()):
        tensor.fill_(place + 1)
    learner: Any = SimpleNamespace(weights=lambda: live, saved_weights=lambda: live, adapters=None)
    me: Any = PublishingWorker(world=world)
    publisher = Publisher(me, gang, learner, getattr(torch, dtype))
    saved = {f"model.{name}": tensor for name, tensor in live.items()}
    layout = Layout(saved)
    buffer = memoryview(bytearray(layout.nbytes))
    layout.fill(buffer, saved)
    gang.all(True)
    outputs = {"live": _growth(lambda: publisher.publish_live(0))}

    def publish_copy() -> None:
        publisher.reserve(buffer)
        publisher.offer(1, layout.views(buffer), buffer)
        publisher.finish()

    gang.all(True)
    outputs["copy"] = _growth(publish_copy)
    if rank == 0:
        current = me.store.current()
        outputs |= {"version": len(current.flat), "model": sum(tensor.numel() * 4 for tensor in live.values())}
        taker = skeleton(SPEC, VOCABULARY)
        materialise(taker, gang.device)
        for tensor in weights(taker).values():
            tensor.zero_()
        engine = TorchEngine(taker, stop_tokens=frozenset({1}), seed=0)
        outputs["loading"] = _growth(lambda: engine.load(Version(1, 1), unpack(current.manifest.tensors, current.flat)))
        outputs["right"] = current.manifest.version == Version(1, 1) and all(
            bool((tensor == place + 1).all()) for place, tensor in enumerate(weights(taker).values())
        )
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(outputs))
    gang.all(True)


def _growth(do: Callable[[], None]) -> int:
    """Return the largest growth of the resident memory (bytes) while ``do`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    do()
    return _status("VmHWM") - before


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
