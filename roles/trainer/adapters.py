"""LoRA: low-rank adapters that are trained instead of a model's weights, with peft (Hu et al., arXiv:2106.09685).

The adapters are part of the model, beside its frozen weights, which are the *base*. Outside of the trainer there are
only merged weights, ``base + alpha / rank * B @ A``, under the names of the base: rollouts and exports notice nothing.
A checkpoint contains the adapters and their moments, and the digest of the base, which each start reads from the folder
of ``[model] path``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.model_size import targeted, wrong_target
from ...core.run_spec import LoraSpec
from ..checkpoints.adapter_files import A, B
from ..models.policy import trained_parameters
from ..models.tensors import first_row
from .host_buffers import shard_of


def add_adapters(model: nn.Module, lora: LoraSpec) -> None:
    """Put undefined adapters into a model without memory (:func:`..models.policy.skeleton`), and freeze the rest.

    Raises:
        ValueError: A target matches no linear module (the text has the names there are), or peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # of the extra `lora`
    except ImportError as error:
        raise ValueError(f"[roles.trainer.lora]: {error}; pip install '.[lora]' in rrl's clone") from None
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]
    if text := wrong_target(linear, lora.targets):
        raise ValueError(f"[roles.trainer.lora] targets: {text}")
    if not (chosen := targeted(linear, lora.targets)):
        raise ValueError("[roles.trainer.lora]: the model has no linear modules to adapt; remove this table")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    model.eval()  # peft's modules begin in training mode
    for parameter in trained_parameters(model).values():
        parameter.data = parameter.data.float()  # peft gives them the dtype of the base


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Give new adapters their first values, as peft does: the product is 0. They depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained_parameters(model).items():
        whole = torch.zeros(parameter.shape)
        if name.endswith(A):
            nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
        shard = shard_of(parameter)
        shard.copy_(whole[first_row(parameter) : first_row(parameter) + len(shard)])


class Adapters:
    """The adapters of a model, which may be sharded.

    Args:
        model: A model to which :func:`add_adapters` was applied.
        lora: The settings.
        base: Digest of the base's files.
    """

    def __init__(self, model: nn.Module, lora: LoraSpec, base: str) -> None:
        self.base = base
        self._model, self._scale = model, lora.alpha / lora.rank
        self._parameters = trained_parameters(model)

    def off(self) -> AbstractContextManager[None]:
        """Return a context manager in which the model computes as the base does, to the bit."""
        from peft.helpers import rescale_adapter_scale

        return rescale_adapter_scale(self._model, 0.0)

    @torch.no_grad()
    def merged(
        self, name: str, base: Tensor, shards: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Return this member's rows of the merged weight ``name``: ``base`` itself if no adapter changes it.

        The rows of a weight and of its B are sharded alike; A is gathered. All members must call it for each name.

        Args:
            name: Name of the weight.
            base: This member's rows of the base.
            shards: This member's rows of the adapters, by name.
            group: The members, if there are several.
        """
        module, _, kind = name.rpartition(".")
        if kind != "weight" or (a := module + A) not in self._parameters:
            return base
        whole, mine = torch.zeros(self._parameters[a].shape), shards[a]
        begin = first_row(self._parameters[a])
        whole[begin : begin + len(mine)] = mine.cpu()
        if group is not None:
            dist.all_reduce(whole, group=group)  # exact: each row comes from one member
        product = shards[module + B].to(base.device) @ whole.to(base.device)
        return torch.add(base.float(), product, alpha=self._scale)
