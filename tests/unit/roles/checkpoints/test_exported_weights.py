"""The tensors that rrl writes as safetensors are those that safetensors' own library and rrl read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rrl.roles.checkpoints import stored_tensors
from rrl.roles.checkpoints.safetensors_files import INDEX, SINGLE, write_weights
from rrl.roles.checkpoints.stored_tensors import (
    Index,
    Rows,
    StoredTensor,
    UnreadableTensors,
    read_index,
    write_file,
    write_index,
)
from rrl.roles.models.tensors import pack

pytestmark = pytest.mark.torch


def _member(path: Path, tensors: dict[str, Tensor], rows: int = 0, begin: int = 0) -> dict[str, StoredTensor]:
    """Write the file of a member: all rows of the tensors, or those from ``begin`` on of tensors with ``rows`` rows."""
    packed = pack(tensors)
    offsets = write_file(path, [(name, dtype, shape, (content,)) for name, dtype, shape, content in packed])
    return {
        name: StoredTensor(
            dtype,
            (rows, *shape[1:]) if rows else shape,
            [Rows(begin, begin + (shape[0] if shape else 1), path.name, offsets[name])],
        )
        for name, dtype, shape, _ in packed
    }


def _saved(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    folder.mkdir()
    write_index(folder, [_member(folder / "weights-0.safetensors", tensors)])
    return tensors


def _index(folder: Path) -> Index:
    return read_index(folder, {path.name for path in folder.iterdir()})


def _written(tmp_path: Path, dtype: str, max_file_bytes: int = 10**9) -> list[Path]:
    source, target = tmp_path / "saved", tmp_path / "written"
    target.mkdir()
    return write_weights(_index(source).tensors, source, target, dtype, max_file_bytes)


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
    assert {name: (one.dtype, one.shape) for name, one in _index(tmp_path / "saved").tensors.items()} == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in saved.items()
    }
    own = load_file(tmp_path / "saved" / "weights-0.safetensors")
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.items())
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
    folder, whole = tmp_path / "saved", torch.randn(5, 3)
    folder.mkdir()
    members = [
        _member(folder / f"weights-{rank}.safetensors", {"w": whole[begin:end].clone()}, 5, begin)
        for rank, (begin, end) in enumerate([(0, 3), (3, 5), (5, 5)])
    ]
    write_index(folder, members)
    assert _index(folder).world == 3
    _written(tmp_path, "float32")
    assert torch.equal(load_file(tmp_path / "written" / SINGLE)["w"], whole)


@pytest.mark.parametrize(
    ("dtype", "rows", "message"),
    [
        ("float32", [(1, 5)], "not its consecutive rows"),
        ("float32", [(0, 3), (2, 5)], "not its consecutive rows"),
        ("float32", [(0, 3), (3, 2), (2, 5)], "not its consecutive rows"),
        ("float32", [(0, 4)], "w has 5 rows, of which 4 are stored"),
        ("load", [(0, 5)], "w has the unknown dtype load"),
    ],
)
def test_reports_that_do_not_make_a_whole_tensor_are_refused_before_a_file_is_written(
    tmp_path: Path, dtype: str, rows: list[tuple[int, int]], message: str
) -> None:
    parts = [Rows(begin, end, "weights-0.safetensors", 0) for begin, end in rows]
    with pytest.raises(ValueError, match=message):
        write_index(tmp_path, [{"w": StoredTensor(dtype, (5, 3), [part])} for part in parts])
    assert list(tmp_path.iterdir()) == []


def test_index_that_is_damaged_or_names_a_file_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_index(tmp_path, [{"w": StoredTensor("float32", (5, 3), [Rows(0, 5, "../keys.json", 0)])}])
    with pytest.raises(UnreadableTensors, match=r"names \.\./keys\.json, which was not committed"):
        _index(tmp_path)
    for content in (b"", b"\xff", b"{}", path.read_bytes().replace(b"[0,5", b"[0,6")):
        path.write_bytes(content)
        with pytest.raises(UnreadableTensors, match=r"rrl_tensors\.json: "):
            _index(tmp_path)


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path / "saved", {"w": torch.randn(500)})
    file = tmp_path / "saved" / "weights-0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UnreadableTensors, match=r"weights-0\.safetensors ends before row 500 of a tensor"):
        _written(tmp_path, "float32")
