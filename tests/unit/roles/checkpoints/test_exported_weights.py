"""rrl reads torch's files as torch does.

The tensors that rrl writes as safetensors are those that safetensors' own library reads.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rrl.roles.checkpoints import stored_tensors
from rrl.roles.checkpoints.safetensors_files import INDEX, SINGLE, write_weights
from rrl.roles.checkpoints.stored_tensors import METADATA, UnreadableTensors, read_index
from rrl.roles.trainer.shards import Piece, write_metadata, write_shards

pytestmark = pytest.mark.torch


def _saved(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    folder.mkdir()
    write_metadata(folder, write_shards(tensors, folder, 0))
    return tensors


def _written(tmp_path: Path, dtype: str, max_file_bytes: int = 10**9) -> list[Path]:
    target = tmp_path / "written"
    target.mkdir()
    return write_weights(read_index(tmp_path / "saved").values(), tmp_path / "saved", target, dtype, max_file_bytes)


def test_tensors_of_every_shape_and_dtype_are_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tensors, "BLOCK_BYTES", 64)  # so that a tensor has several blocks
    torch.manual_seed(0)
    saved = _saved(
        tmp_path / "saved",
        {
            "rows": torch.randn(7, 9),
            "one": torch.randn(5),
            "none": torch.tensor(3.0),
            "empty": torch.empty(0, 4),
            "half": torch.randn(3, 3, 3).to(torch.bfloat16),
            "ids": torch.arange(6),
            "mask": torch.tensor([True, False]),
        },
    )
    assert {name: (one.dtype, one.shape) for name, one in read_index(tmp_path / "saved").items()} == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in saved.items()
    }
    assert _written(tmp_path, "bfloat16") == [tmp_path / "written" / SINGLE]
    read = load_file(tmp_path / "written" / SINGLE)
    assert read.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(read[name], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor), name


def test_conversion_of_float32_to_bfloat16_equals_that_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (2**16,), dtype=torch.int32)  # any float32: tiny, huge, infinite, NaN
    ties = (torch.arange(-100, 100, dtype=torch.int32) << 16) + 2**15
    values = torch.cat([bits, ties]).view(torch.float32)
    _saved(tmp_path / "saved", {"values": values})
    _written(tmp_path, "bfloat16")
    read, expected = load_file(tmp_path / "written" / SINGLE)["values"], values.to(torch.bfloat16)
    assert torch.equal(read.isnan(), expected.isnan())
    assert torch.equal(torch.where(read.isnan(), 0, read), torch.where(expected.isnan(), 0, expected))
    assert 0 < int(expected.isnan().sum()) < len(values) / 10


def test_weights_are_distributed_to_files_with_an_index(tmp_path: Path) -> None:
    saved = _saved(tmp_path / "saved", {f"w{i}": torch.full((10,), float(i)) for i in range(5)})
    files = _written(tmp_path, "float32", max_file_bytes=80)
    assert [path.name for path in files] == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"].keys() == saved.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "written" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), saved[name])
            assert opened.metadata() == {"format": "pt"}


def test_rows_of_several_members_are_one_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    whole, pieces = torch.randn(5, 3), list[Piece]()
    for rank, rows in enumerate((slice(0, 3), slice(3, 5), slice(5, 5))):
        (own,) = write_shards({"w": whole[rows].clone()}, folder, 0)
        renamed = (folder / own.file).rename(folder / f"__{rank + 1}_0.distcp")
        part = Piece("w", own.dtype, (5, 3), (rows.start, 0), own.sizes, renamed.name, own.at, own.nbytes)
        pieces.append(part)
    write_metadata(folder, reversed(pieces))
    _written(tmp_path, "float32")
    assert torch.equal(load_file(tmp_path / "written" / SINGLE)["w"], whole)


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ((0, 1), (5, 2), "consecutive rows"),
        ((1, 0), (4, 3), "consecutive rows"),
        ((0, 0), (4, 3), "5 rows, of which 4"),
    ],
)
def test_a_tensor_that_is_not_stored_by_rows_is_refused(
    tmp_path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], message: str
) -> None:
    write_metadata(tmp_path, [Piece("w", "float32", (5, 3), offsets, sizes, "__0_0.distcp", 0, 60)])
    with pytest.raises(UnreadableTensors, match=message):
        read_index(tmp_path)


def test_pickled_metadata_cannot_run_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "harm",)  # type: ignore[return-value]

    for content in (pickle.dumps(Harmful()), b"", b"text", pickle.dumps({"state_dict_metadata": 1})):
        (tmp_path / METADATA).write_bytes(content)
        with pytest.raises(UnreadableTensors, match=r"cannot be read as torch's list"):
            read_index(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("how", ["an element differs", "the end is missing"])
def test_a_damaged_shard_is_refused(tmp_path: Path, how: str) -> None:
    _saved(tmp_path / "saved", {"w": torch.randn(500)})
    file = tmp_path / "saved" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF if how == "an element differs" else 0
    file.write_bytes(content if how == "an element differs" else content[:-100])
    with pytest.raises(UnreadableTensors, match="w: cannot be read as a tensor that torch saved"):
        _written(tmp_path, "float32")
