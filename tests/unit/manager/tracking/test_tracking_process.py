"""What a tracker's process sends, without the process: a tracker in memory, which ends its process at any call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.sample_texts import DecodedSample, shortened_lines
from rrl.core.types import Outcome
from rrl.manager.reporting.step_metrics import StepRow
from rrl.manager.tracking import main
from rrl.manager.tracking.base import TrackedRun
from rrl.manager.tracking.main import ONCE, TrackingProcess
from rrl.manager.tracking.tensorboard import _described
from rrl.manager.tracking.tracker_files import read_progress
from rrl.tests.support.cli.story import Story
from rrl.tests.support.trackers.sent_steps import write_samples

STEPS = 12
"""Number of steps of :meth:`Story.works`."""


class Killed(BaseException):
    """The process ends at this point."""


class FakeServer:
    """Keeps the flushed steps of its trackers, and ends the process after each call in turn."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.samples: dict[int, list[str]] = {}
        self.calls_left = 0

    def open(self, _name: str, _run: TrackedRun) -> FakeTracker:
        self.called()
        return FakeTracker(self)

    def called(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Killed


class FakeTracker:
    place = "in memory"

    def __init__(self, server: FakeServer) -> None:
        self._server, self._unflushed = server, list[int]()
        self.newest_step = max(server.steps, default=-1)

    def send(self, row: StepRow, samples: Sequence[DecodedSample]) -> None:
        assert row.step is not None
        self._server.samples[row.step] = [one.answer for one in samples]
        self._unflushed.append(row.step)
        self._server.called()

    def flush(self) -> None:
        self._server.steps += self._unflushed
        self._unflushed = []
        self._server.called()

    def finish(self, _outcome: Outcome, _last: StepRow | None) -> None:
        self._server.called()

    def close(self) -> None:
        self._server.called()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(main, "open_tracker", server.open)
    return server


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = Story().works().clocks("trainer/0", train=30.0).written(tmp_path)
    run.trackers.mkdir()
    run.resolved.write_bytes(msgspec.json.encode({"job": {}}))
    return run


@pytest.mark.parametrize("flushed_rows", [1, 5, 100])
def test_each_step_is_sent_once_although_the_process_ends_at_each_call(
    server: FakeServer, run: RunDir, monkeypatch: pytest.MonkeyPatch, flushed_rows: int
) -> None:
    monkeypatch.setattr(main, "FLUSH_ROWS", flushed_rows)
    ends = 0
    for calls in range(1, 2 * STEPS):
        server.calls_left = calls
        try:
            TrackingProcess(run, "fake", ONCE, threading.Event()).run()
        except Killed:
            ends += 1
    assert ends > 1
    assert server.steps == list(range(1, STEPS + 1))
    assert read_progress(run, "fake").step == STEPS


def test_samples_are_sent_with_every_tenth_step(server: FakeServer, run: RunDir) -> None:
    write_samples(run, range(1, STEPS + 1))
    TrackingProcess(run, "fake", ONCE, threading.Event()).run()
    assert {step: answers for step, answers in server.samples.items() if answers} == {10: ["10"]}


@pytest.mark.parametrize("content", [b"rrlS", b"\0" * 100])
def test_steps_are_sent_without_samples_that_cannot_be_read(server: FakeServer, run: RunDir, content: bytes) -> None:
    write_samples(run, [])
    (run.samples / "1.1").write_bytes(content)
    TrackingProcess(run, "fake", ONCE, threading.Event()).run()
    assert server.steps == list(range(1, STEPS + 1))


def test_steps_are_sent_without_samples_if_the_tokenizer_cannot_be_opened(
    server: FakeServer, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "OPEN_TOKENIZER", "rrl.absent:open")
    write_samples(run, [10])
    TrackingProcess(run, "fake", ONCE, threading.Event()).run()
    assert server.steps == list(range(1, STEPS + 1))
    assert "no samples are sent of step 10: " in capsys.readouterr().err


def test_text_of_the_model_is_code_in_tensorboard() -> None:
    answer = "1\n# title\n<script>alert(1)</script>\x1b[2J"
    text = _described([3, 0, "", 0.5, None, False, 1, "a question", shortened_lines(answer)])
    assert "\n    # title\n    <script>alert(1)</script>" in text
    assert "\x1b" not in text
