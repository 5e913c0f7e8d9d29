"""A damaged, foreign or unexpected file in a run directory is reported in one clear line, and causes no more damage."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.cli import main
from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import Incarnation, ReplicaId
from rrl.manager.intake.user_commands import pending_commands
from rrl.manager.storage.journal import MAGIC, SCHEMA, Journal, _framed
from rrl.manager.storage.lease import LeaseHolder
from rrl.tests.support.cli.story import Story, completed
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.plain_user import others_can_run_us
from rrl.tests.support.runs import light_job
from rrl.transport.control.endpoints import Address, Dialer, Listener
from rrl.transport.keys import RunKeys
from rrl.transport.messages import FromManager, Goodbye, ToManager

OWNER = pwd.getpwuid(os.geteuid()).pw_name
COMMANDS = ("status", "logs", "cancel", "manage")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUNS_ENV, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def run(root: Path) -> RunDir:
    """Return a complete run directory without a manager, as a submission creates it."""
    made = Story("mine-1").works().written(root)
    RunKeys.make().save(made.keys)
    made.run_spec.write_bytes(msgspec.json.encode(job()))
    made.resolved.write_text(json.dumps({"source": "/nowhere/job.toml", "job": {}}))
    return made


def error_line(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Run a command line that fails, and return its one line of output."""
    assert main.run(arguments) == code
    line = capsys.readouterr().err
    assert line.startswith("rrl: "), line
    assert line.count("\n") == 1, line
    assert "internal error" not in line, line
    return line


def newest(run: RunDir) -> Path:
    return max(run.journal.glob("*.seg"))


# ── the journal ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_torn_record_at_the_end_is_ignored_and_reported(
    run: RunDir, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main.run(["status"]) == 0
    whole = capsys.readouterr()
    assert whole.err == ""
    with newest(run).open("ab") as segment:
        segment.write(_framed(b"x" * 100)[:50])
    assert main.run(["status"]) == 0
    torn = capsys.readouterr()
    assert torn.out == whole.out
    assert torn.err == (
        "rrl: the journal ends in 50 bytes of an unfinished record, which are ignored:"
        " no process has acted on this record\n"
    )
    Journal(run, 9).close()
    assert ": ignored 50 bytes of an unfinished record" in caplog.text, (
        "the next manager did not log the unfinished record"
    )


def test_journal_of_another_run_is_refused(root: Path, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = Story("other-1").works().written(root)
    newest(run).write_bytes(newest(other).read_bytes())
    for command in ("status", "manage", "cancel"):
        assert error_line(capsys, 2, command, "mine-1") == (
            f"rrl: {newest(run)}: this is the journal of other-1, not of mine-1\n"
        )
    assert not list(run.mailbox.iterdir())
    assert len(list(run.journal.iterdir())) == 1, "a manager has begun on the journal of another run"


@pytest.mark.parametrize(
    ("segment", "says"),
    [
        (
            MAGIC + _framed(msgspec.msgpack.encode({"schema": SCHEMA + 1})),
            f"written by a newer rrl (schema {SCHEMA + 1}, this one",
        ),
        (b"#!/bin/sh\n", "not a journal of rrl (it starts with b'#!/bi')"),
    ],
    ids=["newer", "something else"],
)
def test_unreadable_journal_is_refused_and_left_unchanged(
    run: RunDir, capsys: pytest.CaptureFixture[str], segment: bytes, says: str
) -> None:
    path = run.journal / "000007-000001.seg"
    path.write_bytes(segment)
    for command in ("status", "manage", "cancel"):
        assert f"{path}: {says}" in error_line(capsys, 2, command, "mine-1")
    assert path.read_bytes() == segment
    assert not list(run.mailbox.iterdir())


def test_an_empty_journal_is_a_run_that_has_not_begun(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    newest(run).write_bytes(b"")
    assert main.run(["status"]) == 0
    assert "its manager is starting" in capsys.readouterr().out


# ── damaged files of a manager ─────────────────────────────────────────────────────────────────────────────────────
def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("run_spec.json", _cut, "run_spec.json is damaged: Input data was truncated"),
        (
            "run_spec.json",
            Path.unlink,
            "run_spec.json: No such file or directory; without it the run cannot be managed",
        ),
        ("resolved.json", _cut, "resolved.json is damaged: "),
        ("resolved.json", Path.unlink, "resolved.json: No such file or directory"),
        ("keys.json", _cut, "keys.json is damaged: Input data was truncated; no process can join the run"),
        ("keys.json", Path.unlink, "keys.json: No such file or directory"),
        ("keys.json", lambda path: path.chmod(0o640), "keys.json has mode 0640; the run's keys must be 0600: chmod"),
    ],
)
def test_run_with_damaged_or_missing_manager_files_gets_no_manager(
    run: RunDir, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None], says: str
) -> None:
    damage(run.path / name)
    assert f"{run.path}/{says}" in error_line(capsys, 1, "manage", "mine-1")
    assert not list(run.epochs.iterdir()), "a manager has begun on damaged files"
    assert main.run(["status"]) == 0, "rrl status cannot show the run"


def test_second_manager_names_the_place_of_the_first_one_and_leaves_it_alone(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = iter(range(1, 10_000))
    (run.epochs / "000001").write_bytes(msgspec.json.encode(LeaseHolder("node7", 4711, 0)))

    def read(path: Path) -> bytes:
        return (
            msgspec.json.encode(LeaseHolder("node7", 4711, next(counter))) if path.parent == run.epochs else real(path)
        )

    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read)
    assert error_line(capsys, 1, "manage", "mine-1") == "rrl: a manager of mine-1 is running on node7 (pid 4711)\n"
    assert [path.name for path in run.epochs.iterdir()] == ["000001"]


# ── run directories of other users ─────────────────────────────────────────────────────────────────────────────────
NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def open_root() -> Iterator[Path]:
    """Yield a folder of runs that every user of the machine can enter."""
    with tempfile.TemporaryDirectory(prefix="rrl-hostile-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["closed", "open"])
def test_every_command_names_the_owner_of_another_users_run(open_root: Path, mode: int) -> None:
    """Every command on another user's run names the owner of the run.

    If the test runs as root, it runs the commands as ``nobody``. Otherwise it removes the user's rights to the run
    directory.
    """
    run = Story("his-1").works().written(open_root)
    run.path.chmod(mode)
    other = os.geteuid() == 0 and others_can_run_us()
    if not other:
        if os.geteuid() == 0:  # root may enter a folder in spite of mode 0000
            return
        run.path.chmod(0o000 if mode == 0o700 else 0o755)
        run.journal.chmod(0o700 if mode == 0o700 else 0o000)
    try:
        for command in COMMANDS:
            code = f"import sys; from rrl.cli.main import main; sys.argv[1:] = ['{command}', 'his-1']; main()"
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, RUNS_ENV: str(open_root), "HOME": "/"},
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
                user=NOBODY if other else None,
                extra_groups=[] if other else None,
            )
            expected = f"rrl: his-1 is a run of {OWNER}, and only {OWNER} can look at it or change it\n"
            assert done.returncode == 1, done.stderr
            assert done.stderr == expected if other else "is yours, but you may not read" in done.stderr
        assert not other or not list(run.mailbox.iterdir())
    finally:
        run.path.chmod(0o700)
        run.journal.chmod(0o700)


def test_command_written_by_another_user_is_set_aside(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.mailbox / "1.json").write_text('{"command": "cancel"}')
    (run.mailbox / "2.json").symlink_to(run.mailbox / "1.json")
    (run.mailbox / "3.json").write_text('{"command": "cancel", "by": "me"}')
    os.mkfifo(run.mailbox / "4.json")
    if os.geteuid() == 0:
        os.chown(run.mailbox / "1.json", NOBODY, -1)
    else:  # only root can change the owner of a file, so the file is removed; neither case may leave a command
        (run.mailbox / "1.json").unlink()
    assert [command_file.id for command_file in pending_commands(run)] == ["3"]
    reported = caplog.text
    caplog.clear()
    assert os.geteuid() != 0 or "1.json belongs to nobody, and is not read" in reported
    assert [command_file.id for command_file in pending_commands(run)] == ["3"]
    assert not caplog.records, "the file was read and reported again"


# ── a full disk ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_submission_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A submission on a full disk leaves nothing.

    A limit on file sizes replaces the full disk. The submission ends at the first file that exceeds the limit.
    """
    (tmp_path / "job.toml").write_text(light_job("local", 5))
    for source in (Path(__file__).parents[1] / "support" / "light_roles").glob("*_task.py"):
        (tmp_path / source.name).write_text(source.read_text())
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024));"
        f"sys.argv[1:] = ['submit', '{tmp_path}/job.toml']; from rrl.cli.main import main; main()"
    )
    env = {**os.environ, RUNS_ENV: str(tmp_path / "runs"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list((tmp_path / "runs").iterdir())


# ── address of the manager ─────────────────────────────────────────────────────────────────────────────────────────
async def test_worker_sends_nothing_to_a_wrong_address_and_finds_its_manager_later(run: RunDir) -> None:
    """A worker sends nothing to a wrong address, and finds its manager later.

    manager.json first names a port without a listener, then the manager of another run. Then it is torn, and at last it
    is correct.
    """
    keys, incarnation = RunKeys.load(run.keys), Incarnation(ReplicaId("rollout/0"), 1)

    foreign = await Listener.open(RunKeys.make(), ToManager, epoch=1)
    mine = await Listener.open(keys, ToManager, epoch=1)
    dialer = Dialer(keys, FromManager, lambda: Address.read(run.manager), lambda: [Goodbye(incarnation)])
    run.manager.write_text('{"epoch": 1, "endpoint": "tcp://127.0.0.1:1"}')
    dialling = asyncio.create_task(dialer.run())
    await asyncio.sleep(0)
    run.manager.write_bytes(msgspec.json.encode(foreign.address))
    await eventually(lambda: foreign.refused)
    assert not dialer.connected
    run.manager.write_bytes(msgspec.json.encode(mine.address)[:20])
    await eventually(lambda: foreign.refused > 1)
    run.manager.write_bytes(msgspec.json.encode(mine.address))
    assert (await asyncio.wait_for(mine.receive(), TIMEOUT_S)).message == Goodbye(incarnation)
    for each in (dialer, mine, foreign):
        await each.close()
    await dialling


def test_ended_run_is_readable_without_any_file_of_a_manager(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    completed("done-1").written(root)
    assert error_line(capsys, 2, "manage", "done-1") == "rrl: done-1 has ended already: completed\n"
