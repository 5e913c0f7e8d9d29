"""Runs gangs of real trainer processes, kills a member at a given moment, and compares the final states."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from msgspec import Struct
from torch import Tensor

from rrl.config.input_files import weights_digest
from rrl.core.types import Incarnation
from rrl.roles.models.policy import build_model
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.types import CommittedState, StoredMetrics
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.stage import GANG, VOCABULARY, Stage

KILLED = -9


class End(Struct):
    """The last commit of a run: all tensors, the extra state of each member, and the metrics of all steps but times."""

    tensors: dict[str, Tensor]
    rest: list[bytes]
    metrics: list[dict[str, float]] = []

    def __eq__(self, other: object) -> bool:
        """Return whether the two ends are equal bit for bit."""
        return isinstance(other, End) and self.rest == other.rest and self.distance(other) == 0.0

    def distance(self, other: End) -> float:
        assert self.tensors.keys() == other.tensors.keys()
        return max((tensor - other.tensors[name]).abs().max().item() for name, tensor in self.tensors.items())


def end_of(stage: Stage) -> End:
    state = stage.store.committed(Incarnation(GANG, 1000))
    assert isinstance(state, CommittedState)
    assert state.manifest is not None
    assert state.number == stage.steps, stage.logs()
    if (lora := stage.job.trainer.lora) is not None:
        folder = Path(str(stage.job.model.path))
        student = harness.adapted(folder, lora, 99, weights_digest(stage.lab.run, folder))
    else:
        model = build_model(stage.job.model, VOCABULARY, seed=99)
        student = Learner(model, harness.settings(), steps=stage.steps, temperature=1.0)
    Checkpoints(stage.lab.run).read(state.manifest, student)
    folder = stage.lab.run.path / state.manifest["folder"]
    metrics = stage.store.metrics(Incarnation(GANG, 1000), 0)
    assert isinstance(metrics, StoredMetrics)
    learned = [
        {name: value for name, value in step.metrics.items() if not name.endswith("_s")} for step in metrics.commits
    ]
    rest = [(folder / f"rank-{rank}.msgpack").read_bytes() for rank in range(stage.world)]
    return End(student.tensors(), rest, learned)


async def undisturbed(path: Path, processes: ForkServerContext, world: int, steps: int, **trainer: Any) -> End:
    async with Stage(path, processes, world=world, steps=steps, **trainer).open() as stage:
        assert await stage.live() == [0] * world, stage.logs()
        return end_of(stage)


async def dies(stage: Stage, moment: str, step: int, rank: int = 0) -> None:
    codes = await stage.live(moment, step, rank)
    assert codes[rank] == KILLED, (codes, stage.logs())
    assert all(code == FENCED_EXIT for code in codes[:rank] + codes[rank + 1 :]), (codes, stage.logs())


def goes_on_from(stage: Stage) -> str:
    """Return the text in the newest incarnation's log that names the state from which it continued."""
    lines = stage.log(stage.incarnation).splitlines()
    return next(line for line in lines if "continues from" in line).split("from ")[1]
