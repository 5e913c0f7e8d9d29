"""Messages of rrl's processes: their form and level, and that rrl leaves a host program's logging alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.config.job.load import load_job
from rrl.config.job.resolve import resolve
from rrl.core.log_lines import LOG_LEVEL_ENV, stamp_of
from rrl.core.types import Resources
from rrl.manager.execute.launch import environment

JOB = """
[run]
name = "small"

[manager]
log_level = "{level}"

[commands.work]
command = ["true"]
"""
MESSAGES = """
import logging
from rrl.core.log_lines import start_logging
{before}
start_logging({arguments})
log = logging.getLogger("rrl.agent")
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)("said at %s", level)
{after}
"""


def logged(arguments: str = "", before: str = "", after: str = "", level: str = "", err: int = subprocess.PIPE) -> str:
    """Run a process that logs at every level, check that it exits with code 0, and return its stderr."""
    env = {name: value for name, value in os.environ.items() if name != LOG_LEVEL_ENV}
    done = subprocess.run(
        [sys.executable, "-c", MESSAGES.format(arguments=arguments, before=before, after=after)],
        env=env | ({LOG_LEVEL_ENV: level} if level else {}),
        stderr=err,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr or ""


def test_a_message_has_time_level_logger_and_text() -> None:
    lines = logged().splitlines()
    assert all(stamp_of(line.encode()) for line in lines)
    assert [line.partition(" ")[2] for line in lines] == [
        "INFO rrl.agent: said at info",
        "WARNING rrl.agent: said at warning",
        "ERROR rrl.agent: said at error",
    ]


def test_message_of_a_role_has_no_time_since_its_launcher_adds_it() -> None:
    assert logged("'error', stamped=False") == "ERROR rrl.agent: said at error\n"


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("error", 1)])
def test_level_of_the_environment_overrides_the_given_one(level: str, count: int) -> None:
    assert len(logged("'warning'", level=level).splitlines()) == count


def test_unknown_level_in_the_environment_is_named_and_the_given_one_is_used() -> None:
    first, *rest = logged("'error'", level="loud", after="log.info('x')").splitlines()
    assert "RRL_LOG_LEVEL=loud is not a log level; use one of debug, info, warning, error" in first
    assert len(rest) == 1


def test_a_program_that_configures_logging_itself_gets_each_message_once() -> None:
    own = "logging.basicConfig(format='mine %(message)s')"
    expected = "mine said at info\nmine said at warning\nmine said at error\n"
    assert logged(before=own) == expected
    later = f"{own}; log.error('later')"
    assert logged("'error'", after=later).endswith("mine later\n")
    assert logged("'error'", after=later).count("later") == 1


def test_message_has_its_control_characters_escaped_and_keeps_its_lines() -> None:
    lines = logged("'error'", after="log.error('a\\x1b[2J\\nb')").splitlines()[1:]
    assert lines[0].endswith(r"ERROR rrl.agent: a\x1b[2J")
    assert lines[1] == "b"


def test_unwritable_log_messages_end_no_process() -> None:
    with Path("/dev/full").open("wb") as full:
        logged(err=full.fileno())
    logged(after="import sys; sys.stderr.close(); log.error('x')")


@pytest.mark.parametrize("verbose", [True, False])
def test_level_is_passed_to_processes_on_nodes(verbose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_LEVEL_ENV, raising=False)
    if verbose:
        monkeypatch.setenv(LOG_LEVEL_ENV, "debug")
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(level="warning"))
    given = environment(resolve(load_job(job), sys.executable), Resources(), str(tmp_path))
    assert given[LOG_LEVEL_ENV] == ("debug" if verbose else "warning")


def test_unknown_level_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(level="loud"))
    assert main.run(["check", str(job)]) == 2
    assert re.search(r"log_level.*debug.*error", capsys.readouterr().err)


def test_verbose_sets_the_level_of_started_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, "")
    assert main.run(["--verbose", "--runs-dir", str(tmp_path), "list"]) == 0
    assert os.environ[LOG_LEVEL_ENV] == "debug"
