"""A member that publishes a model of about 200 MB, and a rollout that takes it: how much memory each needs for it."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rrl.core.run_spec import ModelSpec
from rrl.core.types import Version
from rrl.roles.models.policy import materialise, skeleton, weights
from rrl.roles.models.tensors import unpack
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trainer import main
from rrl.roles.trainer.process_group import Gang
from rrl.transport.weights.manifest import layout

SPEC = ModelSpec(
    hidden_size=512, intermediate_size=2048, layers=11, heads=8, kv_heads=8, head_dim=64, initializer_range=0.05
)
VOCABULARY = 4096
_MEETS_BY = timedelta(seconds=120)


def play(rank: int, world: int, folder: str, dtype: str) -> None:
    """Writes what it saw to ``rank-N.json``: bytes that its memory grew by at most, over what it was."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_MEETS_BY)
    gang = Gang(rank, world, mesh=init_device_mesh("cpu", (world,)), control_group=dist.new_group(backend="gloo"))
    model = gang.shard(skeleton(SPEC, VOCABULARY))
    materialise(model, gang.device)
    live = weights(model)
    for place, tensor in enumerate(live.values()):
        tensor.fill_(place + 1)
    learner: Any = SimpleNamespace(weights=lambda: live, number=1)
    me = _Me()
    gang.all(True)
    outputs = {"publishing": _growth(lambda: main._publish(me, gang, learner, getattr(torch, dtype)))}  # type: ignore[arg-type]
    if rank == 0:
        outputs |= {"version": len(me.flat), "model": sum(tensor.numel() * 4 for tensor in live.values())}
        taker = skeleton(SPEC, VOCABULARY)
        materialise(taker, gang.device)
        for tensor in weights(taker).values():
            tensor.zero_()
        engine = TorchEngine(taker, stop_tokens=frozenset({1}), seed=0)
        outputs["loading"] = _growth(lambda: engine.load(Version(1, 1), unpack(me.specs, memoryview(me.flat))))
        outputs["right"] = all(
            bool((tensor == place + 1).all()) for place, tensor in enumerate(weights(taker).values())
        )
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(outputs))
    gang.all(True)


class _Me:
    """What a worker does with what is published, but for the network: one flat piece of memory, filled in order."""

    specs: Any
    flat: mmap.mmap

    def publish_each(
        self, number: int, described: Sequence[tuple[str, str, tuple[int, ...], int]], contents: Iterable[memoryview]
    ) -> None:
        self.specs, nbytes = layout(described)
        self.flat = mmap.mmap(-1, nbytes)
        for spec, content in zip(self.specs, contents, strict=True):
            self.flat[spec.offset : spec.offset + spec.nbytes] = content


def _growth(do: Callable[[], None]) -> int:
    """Bytes between what is resident before and the most while it runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
    before = _status("VmRSS")
    do()
    return _status("VmHWM") - before


def _status(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024
