"""Load new weights into a running vLLM engine: the weight-transfer backend ``rrl``.

vLLM's worker processes load :class:`Extension` (``worker_extension_cls``) and with it this module, which registers the
backend. An update is start, one or more buckets, finish; if any of it fails, the model is half new and half old and
must not be used: the error ends the process. Seen on vLLM 0.32 (docs/sources.md, vLLM).

A bucket of weights lies once in shared memory, and each worker maps it; vLLM's own queue would send each worker a copy
through one socket. Measured for 256 MiB and 8 readers on two busy cores: 1.5 s by vLLM's queue, 0.7 s here, of which
0.1 to 0.4 s are the writing. The memory has no name in any file system: a killed process leaves nothing behind.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ....transport.weights.manifest import TensorSpec, layout
from ...models.tensors import pack, unpack

BUCKET_BYTES = 256 * 2**20
"""bytes of tensors that lie there at once, or one tensor that is larger"""
MEMFD_NAME = "rrl-weights"
"""in /proc/PID/fd, for people"""


def buckets(tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, so many in each as ``nbytes`` allow, and at least one."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def shared_bucket(bucket: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
    """Inside, other processes of this user can map the bucket: what :func:`mapped` is to be told. Its memory is given
    back once this is left and nobody has it mapped any more: vLLM holds on to tensors of a layer until it has them
    all, hence a new one for each bucket."""
    packed = pack(dict(bucket))
    specs, nbytes = layout([(name, dtype, shape, content.nbytes) for name, dtype, shape, content in packed])
    fd = os.memfd_create(MEMFD_NAME)
    try:
        os.ftruncate(fd, max(1, nbytes))
        for spec, (*_, content) in zip(specs, packed, strict=True):
            done = 0
            while done < len(content):  # written, not copied into a mapping: no page is zeroed first
                done += os.pwrite(fd, content[done:], spec.offset + done)
        yield {"path": f"/proc/{os.getpid()}/fd/{fd}", "specs": specs}
    finally:
        os.close(fd)


def map_bucket(path: str, specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """The tensors of a :func:`shared` bucket, as views of it. Raises OSError where it is not there any more."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return list(unpack(specs, memoryview(pages)))


BACKEND = "rrl"


@dataclass
class _Init(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whole tensors under their Hugging Face names; each rank takes its share of them. They are here, or all that
    ``specs`` describe lie in the file ``place``."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    path: str = ""
    specs: tuple[TensorSpec, ...] = ()


class RrlWeightTransferEngine(WeightTransferEngine[_Init, Bucket]):  # type: ignore[misc]
    """vLLM's side of the backend, in each of its workers."""

    init_info_cls, update_info_cls = _Init, Bucket

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._missing: set[str] = set()
        if multiprocessing.parent_process() is not None:
            # A worker process. SIGTERM, the wish to stop, goes to the whole process group. The role finishes what is in
            # hand, and needs its workers for that; they end when it closes the engine, or with it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def init_transfer_engine(self, init_info: _Init) -> None:
        """There is nothing to dial: the plane is in the role's own process."""

    def start_weight_update(self) -> None:
        tied = _names(self.model, True) - _names(self.model, False)  # not told from others any more after the next line
        initialize_layerwise_reload(self.model)  # what vLLM made of loaded weights, as the scales of fp8, is gone then
        self._missing = _names(self.model, False) - tied

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base asks for an accelerator, which a CPU is not
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        more = map_bucket(update_info.path, update_info.specs) if update_info.path else []
        loaded = self.model.load_weights(iter([*update_info.tensors, *more]))
        self._missing -= self._missing if loaded is None else set(loaded)  # None: a model that does not tell

    def finish_weight_update(self) -> None:
        if self._missing:
            raise RuntimeError(f"vLLM's model got no weights for {sorted(self._missing)[:4]}")
        finalize_layerwise_reload(self.model, self.model_config)
        repack_embeddings(self.model)

    def shutdown(self) -> None:
        """There is nothing to hang up."""


def _names(model: nn.Module, all_names: bool) -> set[str]:
    """Of its parameters; a tied one has several."""
    return {name for name, _ in model.named_parameters(remove_duplicate=not all_names)}


def repack_embeddings(model: nn.Module) -> None:
    """On CPU vLLM multiplies by a copy of the embeddings that it packs once they are loaded. With tied embeddings a
    layerwise reload packs it while the output layer's weights are still the old ones: log-probabilities are off by
    about 12 then, and nothing says so (docs/sources.md, vLLM)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


class Extension:
    """Nothing is added to vLLM's worker; to name it is to import this module there."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, RrlWeightTransferEngine)
