"""The manager exports the checkpoints that are due, one at a time. No failure of an export changes the run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, Outcome, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.execute import checkpoint_exports
from rrl.manager.execute.checkpoint_exports import CheckpointExports
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Finish, Why
from rrl.manager.model.state import State
from rrl.manager.storage.model_folders import ModelFolder, model_folders
from rrl.tests.support.cli.story import job_view
from rrl.tests.support.manager import fake_export

TRAINER = Incarnation(ReplicaId("trainer/0"), 1)
TIMEOUT_S = 30.0


class Exporting:
    """Exports of a run in ``path`` by a program that executes the entry of ``script`` for each step."""

    def __init__(self, path: Path, export: Literal["end"] | int | None, **script: str) -> None:
        self.run = RunDir(path / "run")
        self.run.create()
        (self.run.path / "script").write_text(json.dumps({key.removeprefix("step"): do for key, do in script.items()}))
        job = job_view()
        job = msgspec.structs.replace(job, trainer=msgspec.structs.replace(job.trainer, export=export))
        self.state = State("run", job, 1, 0.0)
        self.ended = asyncio.Event()
        context = RunContext(
            self.run, HealthMonitor(), state=lambda: self.state, record=_record, send=_send, now=lambda: 0.0
        )
        self.exports = CheckpointExports(context, self.ended.set)

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.state = msgspec.structs.replace(self.state, step=step)
            self.exports.on_event(ev.StepCommitted(TRAINER, step))

    def finish(self, outcome: Outcome) -> None:
        self.state = msgspec.structs.replace(self.state, finish=Finish(outcome, Why(("it is over",))))

    async def settle(self) -> None:
        """Wait until no export prevents the end of the run."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.exports.is_settled():
                self.ended.clear()
                await self.ended.wait()

    async def begun(self, step: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not (self.run.path / f"begun-{step}").exists():
                await asyncio.sleep(0.02)

    @property
    def made(self) -> list[str]:
        return sorted(path.name for path in self.run.exports.iterdir()) if self.run.exports.exists() else []


def _record(event: ev.Event) -> None:
    raise AssertionError(event)


async def _send(*message: Any) -> None:
    raise AssertionError(message)


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_exports, "PROGRAM", fake_export.__name__)


@pytest.mark.parametrize(
    ("export", "outcome", "made"),
    [
        (None, Outcome.COMPLETED, []),
        ("end", Outcome.COMPLETED, ["step-5"]),
        ("end", Outcome.FAILED, []),
        (2, Outcome.COMPLETED, ["step-2", "step-4", "step-5"]),
        (2, Outcome.FAILED, ["step-2", "step-4"]),
        (5, Outcome.COMPLETED, ["step-5"]),
    ],
)
async def test_due_checkpoints_are_exported(
    tmp_path: Path, export: Literal["end"] | int | None, outcome: Outcome, made: list[str]
) -> None:
    run = Exporting(tmp_path, export)
    for step in range(1, 6):
        run.commit(step)
        await run.settle()
    run.finish(outcome)
    await run.settle()
    assert run.made == made
    assert model_folders(run.run, 5).export_failure == ""


async def test_during_an_export_only_the_newest_step_waits(tmp_path: Path) -> None:
    run = Exporting(tmp_path, 1)
    run.commit(1, 2, 3)
    await run.settle()
    assert run.made == ["step-1", "step-3"]


async def test_export_failure_is_reported_until_an_export_succeeds(tmp_path: Path) -> None:
    run = Exporting(tmp_path, 1, step2="fails")
    run.commit(1)
    await run.settle()
    run.commit(2)
    await run.settle()
    assert run.made == ["step-1"]
    folders = model_folders(run.run, 2)
    assert folders.export == ModelFolder(1, str(run.run.export_of(1)))
    assert folders.export_failure == "step 2: the disk is full 2"
    run.finish(Outcome.COMPLETED)
    await run.settle()
    assert run.made == ["step-1"], "a failed export was repeated"
    run.commit(3)
    await run.settle()
    assert (run.made, model_folders(run.run, 3).export_failure) == (["step-1", "step-3"], "")


async def test_an_export_that_does_not_end_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Exporting(tmp_path, "end", step4="hangs")
    run.commit(4)
    run.finish(Outcome.COMPLETED)
    monkeypatch.setattr(checkpoint_exports, "EXPORT_TIMEOUT_S", 0.5)
    await run.settle()
    assert run.made == []
    assert model_folders(run.run, 4).export_failure.startswith("step 4: the export did not end within")


async def test_existing_export_is_not_repeated(tmp_path: Path) -> None:
    run = Exporting(tmp_path, "end")
    run.run.export_of(4).mkdir(parents=True)
    run.commit(4)
    run.finish(Outcome.COMPLETED)
    await run.settle()
    assert not (run.run.path / "begun-4").exists()


@pytest.mark.parametrize("how", ["the manager leaves", "a user cancels the run"])
async def test_an_export_ends_with_its_manager_and_with_a_cancelled_run(tmp_path: Path, how: str) -> None:
    run = Exporting(tmp_path, 1, step2="hangs")
    run.commit(2, 3)
    await run.begun(2)
    if how == "the manager leaves":
        await run.exports.close()
    else:
        run.state = msgspec.structs.replace(run.state, cancelled_by="anna")
        await run.settle()
    assert (run.run.path / "ended-2").exists(), "the export was killed before it had removed its files"
    assert run.made == []
    assert not (run.run.path / "begun-3").exists()


async def test_export_program_that_cannot_be_started_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    run = Exporting(tmp_path, 1)
    run.commit(1)
    await run.settle()
    assert "step 1: " in model_folders(run.run, 1).export_failure
    assert "No such file" in model_folders(run.run, 1).export_failure
