from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from rrl.roles.models.tensors import PackedTensor, pack, unpack
from rrl.transport.weights.manifest import TensorSpec, layout

pytestmark = pytest.mark.torch


def _laid_out(packed: list[PackedTensor]) -> tuple[tuple[TensorSpec, ...], memoryview]:
    """Return the specs and the content of tensors, laid out as for publishing."""
    specs, nbytes = layout([(name, dtype, shape, content.nbytes) for name, dtype, shape, content in packed])
    flat = memoryview(bytearray(nbytes))
    for spec, (_, _, _, content) in zip(specs, packed, strict=True):
        flat[spec.offset : spec.offset + spec.nbytes] = content
    return specs, flat


def _spec(dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> TensorSpec:
    return TensorSpec("t", dtype, shape, offset, nbytes)


def _round_trip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(unpack(*_laid_out(pack(tensors))))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_dtype_is_unpacked_bit_for_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 16), dtype=torch.uint8)
    tensor = raw.view(dtype)
    arrived = _round_trip({"t": tensor})["t"]
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived.view(torch.uint8), raw)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(20.0)[::3],
        torch.arange(3.0).expand(5, 3),
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    ],
)
def test_any_memory_layout_is_unpacked_with_its_values_and_shape(tensor: Tensor) -> None:
    arrived = _round_trip({"t": tensor})["t"]
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_a_contiguous_tensor_is_packed_without_a_copy() -> None:
    weight = torch.ones(3)
    ((_, _, _, content),) = pack({"w": weight})
    weight += 1
    assert bytes(content) == weight.numpy().tobytes()


def test_a_parameter_that_requires_a_gradient_is_packed() -> None:
    assert torch.equal(_round_trip({"w": torch.ones(2, requires_grad=True)})["w"], torch.ones(2))


def test_tied_tensor_is_packed_under_each_of_its_names() -> None:
    shared = torch.randn(4, 2)
    arrived = _round_trip({"embed": shared, "head": shared, "row": shared[1]})
    assert torch.equal(arrived["embed"], shared)
    assert torch.equal(arrived["head"], shared)
    assert torch.equal(arrived["row"], shared[1])
    assert arrived["head"].data_ptr() != arrived["embed"].data_ptr()


def test_mixed_dtypes_are_read_without_a_copy() -> None:
    tensors = {
        "byte": torch.ones(3, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "double": torch.ones(1, dtype=torch.float64),
        "single": torch.ones(5),
    }
    specs, flat = _laid_out(pack(tensors))
    start = torch.frombuffer(flat, dtype=torch.uint8).data_ptr()
    for (_, tensor), spec in zip(unpack(specs, flat), specs, strict=True):
        assert tensor.data_ptr() == start + spec.offset


def test_misaligned_tensor_is_copied() -> None:
    values = torch.tensor([1.5, -2.0])
    flat = bytearray(b"x" + values.numpy().tobytes())
    ((_, tensor),) = unpack([_spec("float32", (2,), 1, 8)], memoryview(flat))
    flat[1:] = bytes(8)
    assert torch.equal(tensor, values)


def test_read_only_memory_is_read_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, tensor),) = unpack([_spec("uint8", (2,), 1, 2)], memoryview(b"abc"))
    assert tensor.tolist() == [98, 99]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (_spec("float99", (1,), 0, 4), "no dtype 'float99'"),
        (_spec("nn", (1,), 0, 4), "no dtype 'nn'"),
        (_spec("float32", (3,), 0, 12), "outside of the buffer of 8 bytes"),
        (_spec("float32", (1,), 5, 4), "outside of the buffer of 8 bytes"),
        (_spec("float32", (1,), -4, 4), "outside of the buffer of 8 bytes"),
        (_spec("float32", (2,), 0, 4), "4 bytes are not the size"),
        (_spec("float32", (-1, -1), 0, 4), "4 bytes are not the size"),
    ],
)
def test_invalid_tensor_description_is_refused(spec: TensorSpec, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(unpack([spec], memoryview(bytes(8))))


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="embedding: only dense"):
        pack({"embedding": torch.eye(2).to_sparse()})
