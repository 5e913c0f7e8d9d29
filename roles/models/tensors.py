"""Convert torch tensors to bytes and back, and choose the device of a role. The weight transport does not use torch.

A tensor is sent as its elements in row-major order, in the machine's byte order, in its own dtype. A tied tensor is
sent once, under its first name, as in Hugging Face's files.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ...core.launch import Launch
from ...core.text import exit_invalid_config
from ...transport.weights.manifest import TensorSpec

PackedTensor = tuple[str, str, tuple[int, ...], memoryview]
"""Name, dtype (``"float32"``, ``"bfloat16"``, ...), shape, and bytes (format ``B``) of a tensor."""


def pack(tensors: Mapping[str, Tensor]) -> list[PackedTensor]:
    """Return the bytes of dense tensors with any strides and on any device.

    The bytes are a view if the tensor is contiguous and on the CPU, else a copy. Use the bytes before the tensors
    change.

    Raises:
        ValueError: A tensor is quantised or sparse.
    """
    packed: list[PackedTensor] = []
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = f"{tensor.layout}, {tensor.dtype}"
            raise ValueError(f"{name}: only dense, unquantised tensors can be sent, not {kind}")
        # Viewed as bytes first, because numpy has no bfloat16.
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        packed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content))
    return packed


def unpack(specs: Iterable[TensorSpec], flat: memoryview) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors: views of ``flat`` if aligned, else copies.

    A view is valid only while its memory exists, and must not be written to.

    Raises:
        ValueError: A dtype is not one of torch's, a shape does not fit its size, or a tensor is outside of ``flat``.
    """
    flat = flat.cast("B")
    for spec in specs:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{spec.name}: torch has no dtype {spec.dtype!r}")
        yield spec.name, _tensor(spec, dtype, flat)


def _tensor(spec: TensorSpec, dtype: torch.dtype, flat: memoryview) -> Tensor:
    if min(spec.shape, default=0) < 0 or math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
        raise ValueError(
            f"{spec.name}: {spec.nbytes} bytes are not the size of a tensor of {spec.dtype} with the shape {spec.shape}"
        )
    if not 0 <= spec.offset <= len(flat) - spec.nbytes:
        raise ValueError(
            f"{spec.name}: {spec.nbytes} bytes at offset {spec.offset} are outside of the buffer of {len(flat)} bytes"
        )
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    content_view = flat[spec.offset : spec.offset + spec.nbytes]
    with warnings.catch_warnings():  # torch warns about views of read-only memory, such as a received version
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        aligned = torch.frombuffer(content_view, dtype=torch.uint8).data_ptr() % dtype.itemsize == 0
        return torch.frombuffer(content_view if aligned else bytearray(content_view), dtype=dtype).view(spec.shape)


def first_row(tensor: Tensor) -> int:
    """Return the row of the whole tensor at which this process's shard begins; 0 if the tensor is not sharded.

    The shards are consecutive rows, as FSDP makes them.
    """
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def assigned_device(launch: Launch) -> torch.device:
    """Return the device that the role computes on.

    Ends the process if a GPU was assigned to it but torch finds none, because the role would be many times slower on
    the CPU. This end is not reported to the manager as an invalid configuration, because another node may have a
    working GPU. The function initialises CUDA, so a standby process must not call it before the process knows its GPU.
    """
    if not launch.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        exit_invalid_config(
            f"{launch.role} has gpus = {launch.gpus}, but torch {torch.__version__}, {built}, finds no GPU on"
            f" {launch.node}: install a torch for its driver, or set gpus = 0"
        )
    return torch.device("cuda", 0)
