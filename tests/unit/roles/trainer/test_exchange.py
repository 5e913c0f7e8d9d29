"""Values that the members of a gang exchange are never unpickled, whatever another process sends."""

from __future__ import annotations

import ast
import itertools
import os
import pickle
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import rrl
from rrl.roles.trainer import exchange
from rrl.roles.trainer.shards import Piece, read_shards, write_metadata, write_shards

pytestmark = pytest.mark.torch
WORLD = 3
_MEETS_BY = timedelta(seconds=120)
_PACKAGE = Path(rrl.__file__).parent


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, processes: ForkServerContext) -> Path:
    """Let three processes of a gloo group exchange values and save a checkpoint, and return the folder of their files.

    An exception in one of the processes is raised here.
    """
    folder = tmp_path_factory.mktemp("exchange")
    start_processes(_member, args=(folder,), nprocs=WORLD, start_method=processes.get_start_method())  # type: ignore[no-untyped-call]
    return folder


def _member(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=_MEETS_BY)
    group = dist.group.WORLD
    assert group is not None
    _exchange(rank, group, folder)
    _save_as_torch_would_and_as_we_do(rank, group, folder)
    dist.barrier()
    dist.destroy_process_group()


class Payload:
    """An object of an attacker, which makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _exchange(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    received = exchange.gather(group, ("x" * rank, {rank: [rank]}), tuple[str, dict[int, list[int]]])
    assert received == [("x" * each, {each: [each]}) for each in range(WORLD)]
    assert exchange.broadcast_from_rank0(group, rank, lambda: f"of {rank}", str) == "of 0"
    assert exchange.broadcast_from_rank0(group, rank, lambda: None, None) is None
    with pytest.raises(RuntimeError, match="sent an unexpected value"):
        exchange.gather(group, rank if rank == 1 else "text", str)
    stranger = pickle.dumps(Payload(f"{folder}/executed-{rank}"))
    _send_raw(group, rank, stranger)


def _send_raw(group: dist.ProcessGroup, rank: int, data: bytes) -> None:
    """Let the last member send bytes that :func:`exchange.gather` would never send. The other members expect a text."""
    real = exchange._encoded
    if rank == WORLD - 1:
        exchange._encoded = lambda value: torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        with pytest.raises(RuntimeError, match="sent an unexpected value"):
            exchange.gather(group, "text", str)
    finally:
        exchange._encoded = real


def test_members_exchange_values_and_refuse_a_pickle(played: Path) -> None:
    assert not list(played.glob("executed-*"))


def test_value_announced_too_large_is_refused_before_allocation() -> None:
    assert exchange._checked(exchange.MAX_VALUE_BYTES) == exchange.MAX_VALUE_BYTES
    for nbytes in (exchange.MAX_VALUE_BYTES + 1, 0, -1):
        with pytest.raises(RuntimeError, match=f"announced a value of {nbytes} bytes"):
            exchange._checked(nbytes)


def _state(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return shards of equal and unequal lengths, some of them empty, with a scalar and a replicated tensor."""
    sharded = {f"rows-{rows}": torch.arange(rows * 4.0).reshape(rows, 4) for rows in (1, 2, 7, 12)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in sharded.items()}
    half = distribute_tensor(torch.arange(9).to(torch.bfloat16), mesh, [Replicate()])
    return {**state, "half": half, "step": torch.tensor(5.0), "columns": torch.ones(2, 3)}


def _save_as_torch_would_and_as_we_do(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    state = _state(init_device_mesh("cpu", (WORLD,)))
    save(dict(state), storage_writer=FileSystemWriter(folder / "torch"), process_group=group)
    dist.barrier()

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("an object was unpickled")

    distributed_c10d._tensor_to_object = refused
    pieces = exchange.gather(group, write_shards(state, folder / "ours", rank), list[Piece])
    assert rank == 0 or all(piece.name not in ("step", "columns") for piece in pieces[rank])
    if rank == 0:
        write_metadata(folder / "ours", itertools.chain.from_iterable(pieces))
    dist.barrier()
    for written in ("torch", "ours"):
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        read_shards(blank, folder / written)
        for name, tensor in state.items():
            assert torch.equal(_local(blank[name]), _local(tensor)), (written, name)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _described(metadata: Metadata) -> dict[str, Any]:
    """Return each tensor's type, shape and non-empty pieces, without the places of the pieces in files."""
    described = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks if chunk.sizes.numel()}
        described[name] = (tensor.properties.dtype, tuple(tensor.size), chunks)
    return described


def test_checkpoint_written_without_pickled_messages_equals_that_of_torch(played: Path) -> None:
    theirs, ours = (FileSystemReader(played / name).read_metadata() for name in ("torch", "ours"))
    assert _described(ours) == _described(theirs)
    assert (ours.planner_data, ours.version) == (theirs.planner_data, theirs.version)
    alone = {"rows-7": torch.zeros(7, 4), "step": torch.tensor(0.0)}
    read_shards(
        alone
        | {
            name: torch.zeros(size, dtype=dtype)
            for name, (dtype, size, _) in _described(ours).items()
            if name not in alone
        },
        played / "ours",
    )
    assert torch.equal(alone["rows-7"], torch.arange(28.0).reshape(7, 4))
    assert alone["step"] == 5.0


@pytest.mark.parametrize(("dtype", "file"), [("load", "__0_0.distcp"), ("float32", "../../keys.json")])
def test_invalid_shard_description_of_another_member_is_refused(tmp_path: Path, dtype: str, file: str) -> None:
    with pytest.raises(RuntimeError, match="another member of the gang reported a shard with an invalid"):
        write_metadata(tmp_path, [Piece("weight", dtype, (2,), (0,), (2,), file, 0, 8)])
    assert list(tmp_path.iterdir()) == []


# ── no unpickling in the package ───────────────────────────────────────────────────────────────────────────────────
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
"""Functions of torch.distributed that unpickle the data that they receive."""
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
EXCHANGES_PLANS = {
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.checkpoint.state_dict_loader",
}
"""Modules whose save and load gather the members' plans by object collectives.

They exchange nothing if ``no_dist`` tells them that there are no other members.
"""


def unpickles(source: str) -> list[str]:
    """Return each place in a module that unpickles data from outside, as ``LINE: call``."""
    found: list[tuple[int, str]] = []
    plans: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if one.name.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in PICKLES:
                found.append((node.lineno, node.module or ""))
            if node.module in EXCHANGES_PLANS:
                plans |= {one.asname or one.name for one in node.names if one.name in ("save", "load", "async_save")}
            found += [(node.lineno, one.name) for one in node.names if one.name in OBJECT_COLLECTIVES]
        elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
            found.append((node.lineno, node.attr))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name == "torch.load" and words.get("weights_only") != "True":
                found.append((node.lineno, "torch.load without weights_only=True"))
            if name in plans and words.get("no_dist") != "True":
                found.append((node.lineno, f"{name} of torch.distributed.checkpoint without no_dist=True"))
    return [f"{line}: {what}" for line, what in sorted(found)]


_RESTRICTED_UNPICKLER = Path("roles/checkpoints/stored_tensors.py")
"""The module that reads torch's list of tensors.

Its unpickler creates no object of a class that a file names, as its own test shows.
"""


@pytest.mark.parametrize(
    "package", ["roles", "transport", "manager", "cluster", "core", "config", "health", "api", "cli", "examples"]
)
def test_no_module_unpickles_data_from_outside(package: str) -> None:
    found = {
        str(path.relative_to(_PACKAGE)): places
        for path in sorted((_PACKAGE / package).rglob("*.py"))
        if path.relative_to(_PACKAGE) != _RESTRICTED_UNPICKLER and (places := unpickles(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as p",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "torch.load(path)",
        "torch.load(p, weights_only=False)",
        "from torch.distributed.checkpoint.state_dict_saver import save\nsave(a, process_group=g)",
        "from torch.distributed.checkpoint.state_dict_loader import load as l\nl(a, no_dist=alone)",
    ],
)
def test_every_form_of_unpickling_is_detected(line: str) -> None:
    assert unpickles(line) != []
