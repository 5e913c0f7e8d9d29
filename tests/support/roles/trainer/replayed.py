"""Trains what a run has trained once more, by a gang that nothing interrupts, and compares the results bit for bit.

The parts of each step are read from the store's log, in their order. The members are processes of this program, each of
which opens a learner as the built-in trainer does; they never lend, restore or wait. A store that restarts rewrites its
log without the tokens of committed steps, so :class:`KeptLogs` keeps each file of the log by a hard link.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rrl.core.launch import read_run_spec
from rrl.core.run_dir import RunDir
from rrl.core.run_spec import RunSpec
from rrl.roles.models.policy import build_model, compute_dtype, load_initial, materialise, skeleton
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trajectories import batches
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.durable.log import read_frames
from rrl.roles.trajectories.durable.records import StepCommitted, decode
from rrl.roles.trajectories.durable.state import State

_ALL_STEPS = 1_000_000
"""Number of committed steps whose tokens the state of a replay keeps; large enough for all of them."""
TIMEOUT_S = 240.0


class KeptLogs:
    """Keeps all files of the log of a run's store in ``folder``, from the start of the run on."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        self._run, self.folder, self._over = run, folder, threading.Event()
        folder.mkdir(exist_ok=True)
        self._thread = threading.Thread(target=self._keep_all, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        keep_logs(self._run, self.folder)

    def _keep_all(self) -> None:
        while not self._over.wait(0.2):
            keep_logs(self._run, self.folder)


def keep_logs(run: RunDir, folder: Path) -> None:
    """Keep the current files of a run's log by hard links, so that they remain when the store replaces them."""
    for path in run.store.glob("log.*[0-9]"):
        kept = folder / path.name
        if not kept.exists() and path.stat().st_size:  # an empty file only claims the name of a log
            os.link(path, kept)


def in_order(logs: Path) -> list[Path]:
    """Return the files of a log, oldest first."""
    return sorted(logs.iterdir(), key=lambda path: int(path.name.partition(".")[2]))


def trained_parts(logs: Path, max_new_tokens: int) -> tuple[dict[tuple[int, int], Part], StepCommitted]:
    """Return the parts of all committed steps, by step and index, and the newest commit.

    Raises:
        AssertionError: Two files of the log contain different records of one part.
    """
    parts: dict[tuple[int, int], Part] = {}
    commit: StepCommitted | None = None
    for path in in_order(logs):
        state = State(_ALL_STEPS, max_new_tokens)
        for record in map(decode, read_frames(path)):
            state.apply(record)
        for step, stored in state.steps.items():
            for index in range(len(stored)):
                part = batches.decode(state.part(step, index))
                assert parts.setdefault((step, index), part).digest == part.digest, f"{part.number}.{index} changed"
        if state.commitments:
            commit = state.commitments[max(state.commitments)]
    assert commit is not None
    return {key: part for key, part in parts.items() if key[0] <= commit.number}, commit


def assert_bit_equal(run: RunDir, logs: Path, ranks: int) -> int:
    """Check that the newest commit has the weights and moments of an undisturbed gang; return its step."""
    spec = read_run_spec(run.run_spec)
    parts, commit = trained_parts(logs, spec.sampling.max_new_tokens)
    assert {step for step, _ in parts} == set(range(1, commit.number + 1)), "the log lacks the parts of a step"
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", __name__, str(run.path), str(logs), folder, str(ranks)]
        members = [subprocess.Popen([*argv, str(rank)]) for rank in range(ranks)]
        assert [member.wait(TIMEOUT_S) for member in members] == [0] * ranks
        replayed = torch.load(Path(folder) / "tensors.pt", weights_only=True)
    committed = Learner(
        build_model(spec.model, open_tokenizer(spec.model).size, spec.seed),
        spec.trainer,
        steps=spec.steps,
        temperature=1.0,
    )
    Checkpoints(run).read(commit.manifest, committed)
    stored = committed.tensors()
    assert stored.keys() == replayed.keys()
    unlike = [name for name, tensor in stored.items() if not torch.equal(_bits(tensor), _bits(replayed[name]))]
    assert not unlike, (
        f"step {commit.number} differs from an undisturbed training in {len(unlike)} tensors: {unlike[:5]}"
    )
    return commit.number


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _train(run: RunDir, logs: Path, folder: Path, ranks: int, rank: int) -> None:
    spec = read_run_spec(run.run_spec)
    torch.set_num_threads(spec.trainer.threads)
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    gang = Gang(rank, ranks, mesh=init_device_mesh("cpu", (ranks,)), control_group=dist.new_group(backend="gloo"))
    learner = _learner(spec, gang)
    parts, commit = trained_parts(logs, spec.sampling.max_new_tokens)
    for step in range(1, commit.number + 1):
        learner.open(step)
        for part in _parts_of(parts, step):
            learner.add(part)
        learner.close()
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in learner.tensors().items()
    }
    if rank == 0:
        torch.save(whole, folder / "tensors.pt")
    dist.barrier()
    dist.destroy_process_group()


def _parts_of(parts: dict[tuple[int, int], Part], step: int) -> Iterator[Part]:
    index = 0
    while (step, index) in parts:
        yield parts[step, index]
        index += 1


def _learner(spec: RunSpec, gang: Gang) -> Learner:
    dtype, size = compute_dtype(spec.model), open_tokenizer(spec.model).size
    if spec.model.path is None:
        model = gang.shard(build_model(spec.model, size, spec.seed), dtype)
    else:
        model = gang.shard(skeleton(spec.model, size), dtype)
        materialise(model, gang.device)
        load_initial(model, spec.model)
    learner = Learner(model, spec.trainer, steps=spec.steps, temperature=spec.sampling.temperature, gang=gang)
    learner.seed_rng(spec.seed)
    return learner


if __name__ == "__main__":
    at, logs, folder = map(Path, sys.argv[1:4])
    _train(RunDir(at), logs, folder, *map(int, sys.argv[4:]))
