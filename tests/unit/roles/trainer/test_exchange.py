"""Values that the members of a gang exchange are never unpickled, whatever another process sends."""

from __future__ import annotations

import ast
import os
import pickle
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import rrl
from rrl.core.run_dir import RunDir
from rrl.roles.checkpoints.stored_tensors import INDEX
from rrl.roles.trainer import exchange
from rrl.roles.trainer.checkpoint import Checkpoints, read_tensors
from rrl.roles.trainer.host_buffers import shard_of
from rrl.roles.trainer.process_group import Gang

pytestmark = pytest.mark.torch
WORLD = 3
_MEETS_BY = timedelta(seconds=120)
SAVED = "saved"
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
    _save(rank, group, folder)
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
    """Return shards of equal and unequal lengths, some of them empty, and two tensors that are not sharded."""
    sharded = {f"model.rows-{rows}": torch.arange(rows * 4.0).reshape(rows, 4) for rows in (1, 2, 7, 12)}
    sharded["exp_avg.half"] = torch.arange(9).to(torch.bfloat16)
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in sharded.items()}
    return {**state, "model.step": torch.tensor(5.0), "model.columns": torch.ones(2, 3)}


def _save(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    state = _state(init_device_mesh("cpu", (WORLD,)))

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("an object was unpickled")

    distributed_c10d._tensor_to_object = refused
    (folder / SAVED).mkdir(exist_ok=True)
    gang = Gang(rank, WORLD, control_group=group, file_group=group)
    rows = {name: shard_of(tensor) for name, tensor in state.items()}
    written = Checkpoints(RunDir(folder), gang).write(folder / SAVED, rows, state, b"random states")
    assert not written.trouble
    dist.barrier()
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert read_tensors(blank, folder / SAVED, os.listdir(folder / SAVED)).world == WORLD
    for name, tensor in state.items():
        assert torch.equal(shard_of(blank[name]), shard_of(tensor)), name


def test_checkpoint_of_three_members_is_read_by_each_of_them_and_by_one_alone(played: Path) -> None:
    kinds = (f"{kind}-{rank}.safetensors" for kind in ("weights", "moments") for rank in range(WORLD))
    ranks = (f"rank-{rank}.msgpack" for rank in range(WORLD))
    assert sorted(os.listdir(played / SAVED)) == sorted([*kinds, *ranks, INDEX])
    with safe_open(played / SAVED / "weights-1.safetensors", framework="pt") as of_second:
        assert of_second.keys() == [f"model.rows-{rows}" for rows in (1, 12, 2, 7)]
    alone = {
        "model.rows-7": torch.zeros(7, 4),
        "model.rows-1": torch.zeros(1, 4),
        "exp_avg.half": torch.zeros(9),
        "model.step": torch.tensor(0.0),
        "model.columns": torch.zeros(2, 3),
    }
    read_tensors(alone, played / SAVED, os.listdir(played / SAVED))
    assert torch.equal(alone["model.rows-7"], torch.arange(28.0).reshape(7, 4))
    assert torch.equal(alone["model.rows-1"], torch.arange(4.0).reshape(1, 4))
    assert torch.equal(alone["exp_avg.half"], torch.arange(9.0))
    assert alone["model.step"] == 5.0
    assert torch.equal(alone["model.columns"], torch.ones(2, 3))


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
DISTRIBUTED_CHECKPOINT = "torch.distributed.checkpoint"
"""Package whose files and whose plans, which the members exchange, are pickles."""


def unpickles(source: str) -> list[str]:
    """Return each place in a module that unpickles data from outside, as ``LINE: call``."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if _is_pickling(one.name)]
        elif isinstance(node, ast.ImportFrom):
            if _is_pickling(node.module or ""):
                found.append((node.lineno, node.module or ""))
            found += [(node.lineno, one.name) for one in node.names if one.name in OBJECT_COLLECTIVES]
        elif isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
            found.append((node.lineno, node.attr))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name == "torch.load" and words.get("weights_only") != "True":
                found.append((node.lineno, "torch.load without weights_only=True"))
    return [f"{line}: {what}" for line, what in sorted(found)]


def _is_pickling(module: str) -> bool:
    return module.partition(".")[0] in PICKLES or module.startswith(DISTRIBUTED_CHECKPOINT)


USES_DCP = _PACKAGE / "examples/fsdp/trainer.py"
"""A program as users write it, with checkpoints by DCP. docs/security.md says what others could do to one."""


@pytest.mark.parametrize(
    "package", ["roles", "transport", "manager", "cluster", "core", "config", "health", "api", "cli", "examples"]
)
def test_no_module_unpickles_data_from_outside(package: str) -> None:
    found = {
        str(path.relative_to(_PACKAGE)): places
        for path in sorted((_PACKAGE / package).rglob("*.py"))
        if path != USES_DCP and (places := unpickles(path.read_text()))
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
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "import torch.distributed.checkpoint as dcp",
    ],
)
def test_every_form_of_unpickling_is_detected(line: str) -> None:
    assert unpickles(line) != []
