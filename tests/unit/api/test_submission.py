"""A submission that a signal interrupts leaves nothing, or a run that is named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rrl
from rrl.api.preflight.job_preflight import CheckedJob, checked
from rrl.api.submission import signals_held, start
from rrl.config.job.document import JobDocument
from rrl.config.job.load import job_from
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.run_spec import RunSpec
from rrl.core.types import OperationFailed
from rrl.manager.bootstrap import start as starting
from rrl.tests.support.job_toml import JOB

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def job(tmp_path: Path, runs: Path) -> CheckedJob:
    (tmp_path / "job.toml").write_text(JOB)
    document = JobDocument([tmp_path / "job.toml"])
    return checked(job_from(document), document)


@contextmanager
def ended_by(number: signal.Signals) -> Iterator[None]:
    """Check that the signal ends the command, by raising KeyboardInterrupt instead of killing this process."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(number, before)


def announce(run: RunDir, interrupted: bool) -> None:
    raise AssertionError(f"{run.id} was announced")


def test_failed_start_leaves_no_run_and_names_the_cause(
    job: CheckedJob, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: RunDir, spec: RunSpec) -> str:
        raise OSError("no such partition")

    monkeypatch.setattr(starting, "start_manager", fail)
    with pytest.raises(OperationFailed, match="no such partition"):
        start(job, announce)
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_the_run_is_created_leaves_nothing(
    job: CheckedJob, runs: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def write(*_: object) -> None:
        signal.pthread_kill(threading.get_ident(), number)
        real(*_)  # type: ignore[arg-type]

    real = starting._write_run_dir
    monkeypatch.setattr(starting, "_write_run_dir", write)
    monkeypatch.setattr(starting, "start_manager", lambda *_: pytest.fail("the manager was started"))
    with ended_by(number):
        start(job, announce)
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_the_manager_is_started_waits_until_the_run_is_announced(
    job: CheckedJob, runs: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def start_manager(run: RunDir, spec: RunSpec) -> str:
        signal.pthread_kill(threading.get_ident(), number)
        return ""

    announced: list[tuple[str, bool]] = []
    monkeypatch.setattr(starting, "start_manager", start_manager)
    with ended_by(number):
        start(job, lambda run, interrupted: announced.append((run.id, interrupted)))
    (run,) = runs.iterdir()
    assert announced == [(run.name, True)]


def test_call_from_python_that_is_interrupted_names_the_run(
    job: CheckedJob, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "start_manager", lambda *_: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            rrl.submit(job.document.text())
    finally:
        signal.signal(signal.SIGINT, before)
    (run,) = runs.iterdir()
    assert str(interrupted.value.__context__) == f"{run.name} was started; to end it: rrl cancel {run.name}"


def test_signal_that_nohup_ignores_does_not_interrupt() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_held() as arrived:
            signal.pthread_kill(threading.get_ident(), signal.SIGHUP)
            assert not arrived()
    finally:
        signal.signal(signal.SIGHUP, before)
