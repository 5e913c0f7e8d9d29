"""The commits that are reported to a manager, and their order, whichever reports the manager has missed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rrl.roles.trajectories.types import StepMetrics
from rrl.roles.worker import commit_reports
from rrl.roles.worker.commit_reports import CommitReports
from rrl.tests.support.manager import virtual


def metrics(step: int) -> dict[str, float]:
    return {"reward": step / 10}


class Trainer:
    """A trainer that commits to a store with the metrics of some steps, and reports to a sequence of managers."""

    def __init__(self) -> None:
        self.sent_reports: list[tuple[int, dict[str, float], int]] = []
        self.checkpoints: dict[int, dict[str, float]] = {}
        self.connected = False
        self.requests = 0
        self.reports = CommitReports(
            lambda *report: self.sent_reports.append(report), lambda: self.connected, self._call_store
        )

    async def _call_store(self, after: int) -> tuple[StepMetrics, ...]:
        self.requests += 1
        await asyncio.sleep(0.01)
        return tuple(StepMetrics(step, found) for step, found in sorted(self.checkpoints.items()) if step > after)[:3]

    def commits(self, *steps: int) -> None:
        for step in steps:
            self.checkpoints[step] = metrics(step)
            self.reports.on_commit([StepMetrics(step, metrics(step))])

    async def connects(self, knows: int | None) -> None:
        self.reports.on_hello()
        self.connected = True
        await asyncio.sleep(0.1)
        if knows is not None:
            self.reports.on_welcome(knows)
        await asyncio.sleep(1.0)

    def commits_together(self, *steps: int) -> None:
        self.checkpoints |= {step: metrics(step) for step in steps}
        self.reports.on_commit([StepMetrics(step, metrics(step)) for step in steps])

    @property
    def steps(self) -> list[int]:
        assert all(found == metrics(step) for step, found, _ in self.sent_reports), self.sent_reports
        return [step for step, *_ in self.sent_reports]


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=virtual.VirtualLoop) as runner:
        yield runner


@pytest.fixture
def trainer(runner: asyncio.Runner) -> Trainer:
    trainer = Trainer()
    runner.get_loop().create_task(trainer.reports.run())  # ended by the runner
    return trainer


async def test_commits_under_one_manager_are_reported_at_once_without_the_store(trainer: Trainer) -> None:
    await trainer.connects(knows=0)
    trainer.commits(1, 2)
    assert trainer.steps == [1, 2]
    assert trainer.requests == 0


async def test_commits_made_without_a_manager_are_reported_to_the_next_one_in_order(trainer: Trainer) -> None:
    await trainer.connects(knows=0)
    trainer.commits(1)
    trainer.connected = False
    trainer.commits(2, 3, 4)
    assert trainer.steps == [1]
    await trainer.connects(knows=1)
    trainer.commits(5)
    assert trainer.steps == [1, 2, 3, 4, 5]


async def test_commits_of_an_earlier_incarnation_are_reported_first_from_the_store(trainer: Trainer) -> None:
    trainer.checkpoints |= {step: metrics(step) for step in range(1, 9)}
    trainer.reports.on_found(8)
    trainer.commits(9)
    await trainer.connects(knows=2)
    assert trainer.steps == [3, 4, 5, 6, 7, 8, 9]


async def test_steps_without_stored_metrics_are_skipped(trainer: Trainer) -> None:
    trainer.checkpoints |= {step: metrics(step) for step in (7, 8)}
    trainer.reports.on_found(8)
    await trainer.connects(knows=2)
    assert trainer.steps == [7, 8]


async def test_newest_step_is_reported_even_without_stored_metrics(trainer: Trainer) -> None:
    trainer.reports.on_found(8)
    await trainer.connects(knows=2)
    assert trainer.sent_reports == [(8, {}, 8)]


async def test_steps_of_one_commit_are_reported_in_order_with_the_step_of_the_commit(trainer: Trainer) -> None:
    await trainer.connects(knows=2)
    trainer.commits_together(3, 4, 5)
    trainer.commits_together(6)
    assert [(step, commit) for step, _, commit in trainer.sent_reports] == [(3, 5), (4, 5), (5, 5), (6, 6)]


async def test_last_commit_is_reported_to_an_ending_manager_without_a_welcome(trainer: Trainer) -> None:
    await trainer.connects(knows=None)
    trainer.commits(5)
    assert trainer.steps == []
    await asyncio.sleep(2 * commit_reports.WELCOME_TIMEOUT_S)
    assert trainer.steps == [5]


async def test_commits_beyond_the_buffer_are_fetched_from_the_store(trainer: Trainer) -> None:
    trainer.commits(*range(1, commit_reports.MAX_BUFFERED_COMMITS + 11))
    await trainer.connects(knows=0)
    await asyncio.sleep(60.0)
    assert trainer.steps == list(range(1, commit_reports.MAX_BUFFERED_COMMITS + 11))
