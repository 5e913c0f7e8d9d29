"""Convert torch tensors to bytes and back, and choose the device of a role. The weight transport knows no torch.

A tensor travels as its elements in row-major order, in this machine's byte order, whatever its dtype: nothing is
converted. A tied tensor travels once, under its first name, as in Hugging Face's files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ...core.launch import Launch
from ...core.text import exit_invalid_config
from ...transport.weights.manifest import TensorSpec

PackedTensor = tuple[str, str, tuple[int, ...], memoryview]
"""Name, dtype (``"float32"``, ``"bfloat16"``, ...), shape, and the bytes (format ``B``)."""


def pack(tensors: Mapping[str, Tensor]) -> list[PackedTensor]:
    """The tensors' bytes: views of them where they are contiguous and on the CPU, else copies. Use them before the
    tensors change. Any layout and device; quantised and sparse tensors are refused with ValueError.
    """
    packed: list[PackedTensor] = []
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            what = f"{tensor.layout}, {tensor.dtype}"
            raise ValueError(f"{name}: only dense, unquantised tensors can be sent, not {what}")
        # As bytes before numpy sees it: numpy has no bfloat16.
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        packed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content))
    return packed


def unpack(specs: Iterable[TensorSpec], flat: memoryview) -> Iterator[tuple[str, Tensor]]:
    """The tensors, as views of ``flat`` where they lie aligned in it, else as copies.

    A view is as good as the memory under it, and must not be written to. Raises ValueError when a dtype is not torch's,
    its size is not that of the shape, or a tensor does not lie within ``flat``.
    """
    flat = flat.cast("B")
    for each in specs:
        dtype = getattr(torch, each.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{each.name}: torch has no dtype {each.dtype!r}")
        yield each.name, _tensor(each, dtype, flat)


def _tensor(spec: TensorSpec, dtype: torch.dtype, flat: memoryview) -> Tensor:
    if min(spec.shape, default=0) < 0 or math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
        raise ValueError(f"{spec.name}: {spec.shape} of {spec.dtype} does not take {spec.nbytes} bytes")
    if not 0 <= spec.offset <= len(flat) - spec.nbytes:
        raise ValueError(f"{spec.name}: {spec.nbytes} bytes from {spec.offset} are not within {len(flat)}")
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    place = flat[spec.offset : spec.offset + spec.nbytes]
    with warnings.catch_warnings():  # torch warns of views of read-only memory, which is what a received version is
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        aligned = torch.frombuffer(place, dtype=torch.uint8).data_ptr() % dtype.itemsize == 0
        return torch.frombuffer(place if aligned else bytearray(place), dtype=dtype).view(spec.shape)


def assigned_device(launch: Launch) -> torch.device:
    """Ends the process where torch finds no GPU though one was asked for: on the CPU it would go on, many times slower,
    and nothing would say so. This wakes the driver up: a process that is kept warm and does not know its GPU yet asks
    when it does."""
    if not launch.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        exit_invalid_config(f"[roles.{launch.role}] gpus = {launch.gpus}, and torch {torch.__version__}, {built}, finds no GPU on"
               f" {launch.node}: install a torch for its driver, or write gpus = 0")  # fmt: skip
    return torch.device("cuda", 0)
