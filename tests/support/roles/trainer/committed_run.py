"""A run directory with committed checkpoints of a small model, without any process of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from rrl.config.input_files import weights_digest
from rrl.config.job.resolve import resolve
from rrl.config.job.schema import Job
from rrl.core.run_dir import RunDir, write_atomically
from rrl.roles.checkpoints.folders import describe, fresh_folder
from rrl.roles.models.policy import build_model, trained_parameters, weights
from rrl.roles.models.tokenizer import open_tokenizer
from rrl.roles.trainer.checkpoint import Checkpoints
from rrl.roles.trainer.learner import Learner
from rrl.roles.trajectories.types import Done
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trajectories import crew

BUILT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "tokenizer": {"pieces": "0123456789="}}


class CommittedRun:
    """A run in ``path`` whose steps are committed one by one, as by a trainer of one process.

    Args:
        path: The run directory.
        model: Table ``[model]`` of job.toml.
        keep: Value of ``keep_checkpoints``.
        lora: Table ``[roles.trainer.lora]``.
    """

    def __init__(
        self, path: Path, model: dict[str, Any] | None = None, keep: int = 2, lora: dict[str, Any] | None = None
    ) -> None:
        self.run = RunDir(path)
        self.run.create()
        self.job = resolve(
            Job.model_validate(
                {
                    "run": {"name": "test", "steps": 9},
                    "model": model or BUILT,
                    "task": {"function": "tasks:Task"},
                    "roles": {"trainer": {"keep_checkpoints": keep, "lora": lora}},
                }
            ),
            "python",
        )
        write_atomically(self.run.run_spec, msgspec.json.encode(self.job))
        self._store = crew.open_store(self.run.store, retained_commits=keep)
        self.models: dict[int, nn.Module] = {}
        """The model of each committed step."""
        self.folders: dict[int, Path] = {}

    def commit(self, number: int, *, untrained: bool = False) -> Path:
        """Commit a step with random weights or those of the untrained model; return the checkpoint's folder."""
        spec, lora = self.job.model, self.job.trainer.lora
        if lora is None:
            model = build_model(spec, open_tokenizer(spec).size, seed=number)
            student = Learner(model, harness.settings(), steps=9, temperature=1.0)
        else:
            path = Path(str(spec.path))
            student = harness.adapted(path, lora, base=weights_digest(self.run, path))
            model = student.model
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(number)
            for parameter in () if untrained else trained_parameters(model).values():
                parameter.add_(torch.randn_like(parameter))
        folder = fresh_folder(self.run.checkpoints, number, crew.TRAINER.number)
        tensors = student.tensors()
        written = Checkpoints(self.run).write(folder, tensors, tensors, student.extra_state())
        assert not written.trouble
        self.commit_files(number, [folder / name for name in written.files])
        self.models[number], self.folders[number] = model, folder
        return folder

    def commit_files(self, number: int, files: list[Path]) -> None:
        """Commit a step with these files."""
        crew.generate(self._store)
        crew.score(self._store)
        batch = crew.bind(self._store, number)
        manifest = describe(self.run.path, files)
        assert isinstance(self._store.commit(crew.TRAINER, number, manifest, batch.digest), Done)
        self._store.flush()

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        """Return the weights of a step in the dtype of the model."""
        dtype = getattr(torch, self.job.model.dtype)
        return {name: tensor.detach().to(dtype) for name, tensor in weights(self.models[number]).items()}

    def reopen_store(self) -> None:
        """Close the store and open it again, as a new process does, which rewrites the store's log."""
        self._store.close()
        self._store = crew.open_store(self.run.store, retained_commits=self.job.trainer.keep_checkpoints)
