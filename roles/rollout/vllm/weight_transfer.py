"""Loads new weights into a running vLLM engine: the weight-transfer backend ``rrl``.

vLLM's worker processes load :class:`Extension` (``worker_extension_cls``) and with it this module, which registers the
backend. An update consists of a start, one or more buckets, and a finish. If any of these fails, the model is half new
and half old and must not be used: the error ends the process. Observed on vLLM 0.32 (docs/sources.md, vLLM).

A bucket of weights exists once, in shared memory, and each worker maps this memory. With vLLM's own queue, each worker
would get a copy through one socket. Measured for 256 MiB and 8 readers on two busy cores: 1.5 s with vLLM's queue, and
0.7 s with shared memory, including 0.1 to 0.4 s for writing. The memory has no name in any file system: a killed
process leaves nothing behind.
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
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ....transport.weights.manifest import TensorSpec, layout
from ...models.tensors import pack, unpack

BUCKET_BYTES = 256 * 2**20
"""Bytes of tensors in one bucket; a larger tensor is a bucket of its own."""
MEMFD_NAME = "rrl-weights"
"""Name of the memory in /proc/PID/fd, for people."""


def buckets(tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors in order into buckets of at most ``nbytes``, with at least one tensor each."""
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
    """Write a bucket to shared memory and yield the arguments of :class:`Bucket` for the processes that map it.

    The memory is freed once the block is left and no process maps it. Each bucket needs new memory, because vLLM
    retains the tensors of a layer until it has received all of them.
    """
    packed = pack(dict(bucket))
    specs, nbytes = layout([(name, dtype, shape, content.nbytes) for name, dtype, shape, content in packed])
    fd = os.memfd_create(MEMFD_NAME)
    try:
        os.ftruncate(fd, max(1, nbytes))
        for spec, (*_, content) in zip(specs, packed, strict=True):
            done = 0
            while done < len(content):  # pwrite instead of a mapping: no page is zeroed first
                done += os.pwrite(fd, content[done:], spec.offset + done)
        yield {"path": f"/proc/{os.getpid()}/fd/{fd}", "specs": specs}
    finally:
        os.close(fd)


def map_bucket(path: str, specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a :func:`shared_bucket` as views of the shared memory.

    Raises:
        OSError: The bucket no longer exists.
    """
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
    """Whole tensors by their Hugging Face names; each rank takes its share of each tensor.

    The tensors are in ``tensors``, or in the file ``path`` as ``specs`` describes.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    path: str = ""
    specs: tuple[TensorSpec, ...] = ()


class RrlWeightTransferEngine(WeightTransferEngine[_Init, Bucket]):  # type: ignore[misc]
    """Receives weights in each of vLLM's workers."""

    init_info_cls, update_info_cls = _Init, Bucket

    def __init__(self, *args: Any, **mapped: Any) -> None:
        super().__init__(*args, **mapped)
        self._missing: set[str] = set()
        if multiprocessing.parent_process() is not None:
            # This is a worker process. SIGTERM requests a stop of the whole process group, but the role first finishes
            # its work and needs its workers for that. Workers end when the role closes the engine, or with the role.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def init_transfer_engine(self, init_info: _Init) -> None:
        """Do nothing: the weights are in the role's own process, without a connection."""

    def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        tied = _names(self.model, True) - _names(self.model, False)  # the next line makes tied names indistinguishable
        initialize_layerwise_reload(self.model)  # discards what vLLM derived from the old weights, such as fp8 scales
        self._missing = _names(self.model, False) - tied

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket, and wait until the device has it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class requires an accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket."""
        mapped = map_bucket(update_info.path, update_info.specs) if update_info.path else []
        loaded = self.model.load_weights(iter([*update_info.tensors, *mapped]))
        self._missing -= self._missing if loaded is None else set(loaded)  # None if the model does not report names

    def finish_weight_update(self) -> None:
        """Complete the update.

        Raises:
            RuntimeError: A tensor of the model was in no bucket.
        """
        if self._missing:
            raise RuntimeError(f"vLLM's model received no weights for the tensors {sorted(self._missing)[:4]}")
        finalize_layerwise_reload(self.model, self.model_config)
        repack_embeddings(self.model)

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


def _names(model: nn.Module, all_names: bool) -> set[str]:
    """Return the names of all parameters; with ``all_names``, also the further names of tied parameters."""
    return {name for name, _ in model.named_parameters(remove_duplicate=not all_names)}


def repack_embeddings(model: nn.Module) -> None:
    """Have vLLM pack its embeddings again.

    On CPU vLLM multiplies by a packed copy of the embeddings. With tied embeddings, a layerwise reload makes this copy
    while the output layer still has the old weights: log-probabilities are then off by about 12, without any error
    (docs/sources.md, vLLM).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


class Extension:
    """An extension of vLLM's worker. The worker imports this module, because vLLM's configuration names this class."""

    def memory_in_use(self) -> int:
        """Return how many bytes of the worker's GPU are in use by all processes."""
        free, total = torch.accelerator.get_memory_info()
        return int(total - free)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, RrlWeightTransferEngine)
