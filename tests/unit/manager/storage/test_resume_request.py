"""The resume request: created atomically, claimed once, and installed even if a manager dies in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import Limits
from rrl.core.types import Outcome
from rrl.manager.bootstrap.pool_supervisor import run_ended
from rrl.manager.storage import resume_request
from rrl.manager.storage.journal import Follower
from rrl.manager.storage.resume_request import AlreadyRequested, ResumeRequest
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import RUN, job
from rrl.tests.support.manager.site import Site, prepare
from rrl.transport.keys import RunKeys

FILES = ("job.toml", "resolved.json", "run_spec.json", "passed.json")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    for name in FILES:
        (run.path / name).write_text("old")
    return run


def _request_resume(by: str = "ada") -> ResumeRequest:
    return ResumeRequest(by, f"id-{by}", job(), "/home/job.toml", 7.0)


def _fill(staging: RunDir) -> None:
    for name in FILES:
        (staging.path / name).write_text("new")


def _files(run: RunDir) -> set[str]:
    return {(run.path / name).read_text() for name in FILES}


def test_resume_request_changes_nothing_until_it_is_installed(run: RunDir) -> None:
    resume_request.write_request(run, _request_resume(), _fill)
    assert (resume_request.read_pending(run), _files(run)) == (_request_resume(), {"old"})
    assert (resume_request.claim(run), _files(run)) == (_request_resume(), {"old"})
    resume_request.install(run)
    assert (resume_request.read_pending(run), _files(run)) == (None, {"new"})
    assert resume_request.claim(run) is None
    assert not [path for path in run.path.iterdir() if "resum" in path.name]


def test_resume_request_can_be_withdrawn_until_it_is_claimed(run: RunDir) -> None:
    before = sorted(run.path.iterdir())
    resume_request.write_request(run, _request_resume(), _fill)
    assert resume_request.withdraw(run)
    assert sorted(run.path.iterdir()) == before
    resume_request.write_request(run, _request_resume("bob"), _fill)
    assert resume_request.claim(run) == _request_resume("bob")
    assert not resume_request.withdraw(run)
    with pytest.raises(AlreadyRequested, match="bob has already requested to resume the run"):
        resume_request.write_request(run, _request_resume(), _fill)


def test_failed_resume_request_leaves_nothing(run: RunDir) -> None:
    def full(staging: RunDir) -> None:
        _fill(staging)
        raise OSError(28, "No space left on device")

    before = sorted(run.path.iterdir())
    with pytest.raises(OSError, match="No space"):
        resume_request.write_request(run, _request_resume(), full)
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize("moved", range(len(FILES)))
def test_interrupted_installation_is_completed_by_the_next_manager(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    resume_request.write_request(run, _request_resume(), _fill)
    resume_request.claim(run)
    done: list[Any] = []

    def interrupted(source: Any, target: Any, replace: Any = os.replace) -> None:
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(replace(source, target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resume_request.install(run)
    assert resume_request.claim(run) == _request_resume(), "the next manager cannot claim the request"
    resume_request.install(run)
    assert (_files(run), resume_request.read_pending(run)) == ({"new"}, None)


def test_invalid_resume_request_is_removed_and_the_next_one_counts(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run.resume.mkdir()
    (run.resume / "request.json").write_text('{"by": 7}')
    assert resume_request.read_pending(run) is None
    assert "does not contain a valid resume request" in caplog.text
    resume_request.write_request(run, _request_resume(), _fill)
    assert resume_request.claim(run) == _request_resume()


def test_late_resume_request_is_discarded_by_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path / RUN)
    run.create()
    RunKeys.make().save(run.keys)

    async def run_managers() -> None:
        site = Site(run, job(spares=0, limits=Limits(heartbeat=2.0, silence=8.0, join=40.0, lease=10.0)), 8, -1, -1)
        prepare(site, monkeypatch)
        outcome = await site.manage()
        await site.to_rest()
        resume_request.write_request(run, _request_resume(), lambda _: None)
        assert not run_ended(run), "the run counts as ended, though a resume request is pending"
        assert await site.manage() == outcome
        await site.to_rest()

    virtual.run(run_managers())
    state = Follower(run).state()
    assert state is not None
    assert isinstance(state.outcome, Outcome)
    assert resume_request.read_pending(run) is None
    assert run_ended(run)
    assert "ignored resume request by ada" in caplog.text
