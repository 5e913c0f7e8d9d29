"""Merge the adapters of a checkpoint into the weights of their base, or write them as peft does, without torch.

A checkpoint of a run with adapters (LoRA) has only these; the base is the folder of ``[model] path``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy
import numpy.typing
from msgspec import Struct

from ...config.model_folder import read_header, weight_files
from ...core.run_spec import LoraSpec
from .stored_tensors import DTYPES, Rows, StoredTensor, UnreadableTensors, write_file

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Names of peft's files."""
RANK0_STATE = "rank-0.msgpack"
"""Name of a checkpoint's file with the extra state of the first member."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's tensors, after the name of the module that it changes."""
_PEFT_PREFIX = "base_model.model."
"""Prefix of all names in peft's files."""

_Matrix = numpy.typing.NDArray[numpy.float32]


class _State(Struct, frozen=True):
    """The part of a learner's extra state that an export reads."""

    base: str = ""


def base_digest(extra_state: bytes) -> str:
    """Return the digest of the base in the extra state of a checkpoint.

    Raises:
        UnreadableTensors: It cannot be read.
    """
    try:
        return msgspec.msgpack.decode(extra_state, type=_State).base
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTensors(f"the state of rank 0: {error}") from None


class _Merged(StoredTensor, frozen=True):
    """A weight of the base as float32, with its adapter if it has one."""

    base: StoredTensor
    product: tuple[_Matrix, _Matrix] | None
    """alpha / rank * B, and A."""

    def blocks(self, folder: Path, begin: int, end: int) -> Iterator[bytearray]:
        row = begin
        for block in self.base.blocks(folder, begin, end):
            values = _as_float32(block, self.base.dtype)
            if self.product is not None:
                rows = values.reshape(-1, self.shape[1])
                scaled, a = self.product
                values = rows + scaled[row : row + len(rows)] @ a
                row += len(rows)
            yield bytearray(values.tobytes())


def merged_weights(
    folder: Path, adapters: Mapping[str, StoredTensor], source: Path, lora: LoraSpec, dtype: str
) -> dict[str, StoredTensor]:
    """Return the weights of the base in ``folder`` by name, merged with ``adapters``.

    Args:
        folder: The base, with the names that its tensors have there.
        adapters: The tensors of the adapters by name.
        source: The folder of the checkpoint's files.
        lora: The settings of the adapters.
        dtype: The dtype in which the weights are to be written.

    Raises:
        UnreadableTensors: The base lacks a weight, or has it in another shape or in an unknown dtype.
        ValueError: A file of the base cannot be read.
        OSError: A file could not be read.
    """
    torch_names = {code: name for name, (code, _) in DTYPES.items()}
    weights = dict[str, StoredTensor]()
    for path in weight_files(folder):
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
        for name, one in read_header(path).items():
            shape = tuple(one["shape"])
            if (stored := torch_names.get(one["dtype"])) is None:
                raise UnreadableTensors(f"{path}: {name} has the dtype {one['dtype']}")
            rows = Rows(0, shape[0] if shape else 1, str(path), begin + one["data_offsets"][0])
            weights[name] = StoredTensor(stored, shape, [rows])
    for name, base in weights.items():
        module = name.removesuffix(".weight")
        product = None
        if (a := adapters.get(module + A)) is not None:
            b = adapters[module + B]
            if base.shape != (b.shape[0], a.shape[1]):
                raise UnreadableTensors(
                    f"{name} has the shape {base.shape} in {folder}, which its adapter does not fit"
                )
            scale = numpy.float32(lora.alpha / lora.rank)
            product = (_matrix(b, source) * scale, _matrix(a, source))
        if product is not None or ("float" in base.dtype and base.dtype != dtype):
            weights[name] = _Merged("float32", base.shape, [], base, product)
    if missing := min({name.removesuffix(A) for name in adapters if name.endswith(A)} - _modules(weights), default=""):
        raise UnreadableTensors(f"{folder} lacks {missing}.weight")
    return weights


def write_adapter(adapters: Mapping[str, StoredTensor], source: Path, folder: Path, lora: LoraSpec, base: str) -> None:
    """Write the files of an adapter, which peft loads, into the existing, empty ``folder``; nothing is synced.

    ``base`` is ``[model] path``. The other arguments and the exceptions are as in :func:`merged_weights`.
    """
    write_file(
        folder / ADAPTER,
        [
            (_PEFT_PREFIX + name, one.dtype, one.shape, map(memoryview, one.blocks(source, 0, one.rows)))
            for name, one in adapters.items()
        ],
    )
    modules = {name.removesuffix(A).rpartition(".")[2] for name in adapters if name.endswith(A)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _modules(weights: Mapping[str, StoredTensor]) -> set[str]:
    return {name.removesuffix(".weight") for name in weights}


def _matrix(tensor: StoredTensor, source: Path) -> _Matrix:
    content = b"".join(tensor.blocks(source, 0, tensor.rows))
    return _as_float32(content, tensor.dtype).reshape(tensor.shape)


def _as_float32(content: bytes | bytearray, dtype: str) -> _Matrix:
    """Return elements of a floating-point dtype; a bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (numpy.frombuffer(content, dtype="<u2").astype("<u4") << 16).view("<f4")
    return numpy.frombuffer(content, dtype=f"<f{DTYPES[dtype][1]}").astype("<f4", copy=False)
