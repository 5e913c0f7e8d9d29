"""What a forward and backward pass computes and keeps in memory."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rrl.roles.trainer.packing import Example

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a tiny model, as most configurations of transformers name them."""


def examples_of(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 0) -> list[Example]:
    """Return random prompts and answers of these lengths."""
    dice = random.Random(seed)
    return [
        (
            tuple(dice.randrange(1, vocabulary) for _ in range(prompt)),
            tuple(dice.randrange(1, vocabulary) for _ in range(answer)),
        )
        for prompt, answer in lengths
    ]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss by the name of the parameter."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))


class LargestLogits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes of the largest tensor of logits that any operation returns.

    These are the tensors [..., vocabulary], but not [hidden size, vocabulary]: the weight of the head and its gradient.
    """

    def __init__(self, vocabulary: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary, self._of_head = vocabulary, (hidden_size, vocabulary)
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.shape[-1:] == (self._vocabulary,) and each.shape != self._of_head:
                self.nbytes = max(self.nbytes, each.nbytes)
        return result


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations have returned and that still exist, but not those of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_model = {each.untyped_storage()._cdata for each in model.parameters()}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def nbytes(self) -> int:
        """Return their sum."""
        alive = (nbytes for storage, nbytes in self._storages.values() if not storage.expired())  # type: ignore[no-untyped-call]
        return sum(alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in self._of_model:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return result
