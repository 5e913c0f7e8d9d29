"""New weights in a running vLLM engine: the weight-transfer backend ``rrl``, fed with what the weight plane received.

vLLM's worker processes load :class:`Extension` (``worker_extension_cls``), and with it this module, which registers the
backend. An update is start, one or more buckets, finish; where any of it fails the model is half new and half old, and
nobody may use it any more: the error ends the process. Seen on vLLM 0.32 (docs/sources.md, vLLM).
"""

from __future__ import annotations

import multiprocessing
import signal
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

from rrl.roles.rollout.vllm_buckets import mapped
from rrl.transport.weights.manifest import TensorSpec

BACKEND = "rrl"


@dataclass
class _Init(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Whole tensors under their Hugging Face names; each rank takes its share of them. They are here, or all that
    ``specs`` describe lie in the file ``place``."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    place: str = ""
    specs: tuple[TensorSpec, ...] = ()


class PlaneEngine(WeightTransferEngine[_Init, Bucket]):  # type: ignore[misc]
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
        more = mapped(update_info.place, update_info.specs) if update_info.place else []
        loaded = self.model.load_weights(iter([*update_info.tensors, *more]))
        self._missing -= self._missing if loaded is None else set(loaded)  # None: a model that does not tell

    def finish_weight_update(self) -> None:
        if self._missing:
            raise RuntimeError(f"vLLM's model got no weights for {sorted(self._missing)[:4]}")
        finalize_layerwise_reload(self.model, self.model_config)
        pack_embeddings_again(self.model)

    def shutdown(self) -> None:
        """There is nothing to hang up."""


def _names(model: nn.Module, all_names: bool) -> set[str]:
    """Of its parameters; a tied one has several."""
    return {name for name, _ in model.named_parameters(remove_duplicate=not all_names)}


def pack_embeddings_again(model: nn.Module) -> None:
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
    WeightTransferEngineFactory.register_engine(BACKEND, PlaneEngine)
