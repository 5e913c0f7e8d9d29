"""A run that another user may have made is not opened: nothing of it is shown, followed, run or waited for."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.api.runs import StateReader, check_manageable, find_run, job_of
from rrl.cli import main
from rrl.core.launch import read_launch
from rrl.core.ownership import foreign_writers
from rrl.core.run_dir import RUNS_ENV, OwnPath, RunDir, Untrusted
from rrl.core.types import OperationFailed, Outcome
from rrl.tests.support.cli.story import Story
from rrl.tests.support.manager.jobs import job
from rrl.tests.support.plain_user import PlainUser
from rrl.transport.keys import RunKeys

TIMEOUT_S = 120.0
OWN, PLANTED = "mine-1", "planted-1"
LOOKING = (
    ["status"],
    ["logs"],
    ["logs", "--failed"],
    ["explain"],
    ["report"],
    ["metrics"],
    ["episodes"],
    ["status", "--json"],
)
CHANGING = (
    ["cancel"],
    ["resume"],
    ["manage"],
    ["rm", "--yes"],
    ["restart", "trainer/0"],
    ["drain", "n1"],
    ["undrain", "n1"],
    ["inject", "kill"],
    ["track", "--to", "tensorboard"],
    ["export", "/nowhere/model"],
    ["endpoint"],
    ["relay"],
)


@pytest.fixture
def shared(owner: PlainUser) -> Iterator[Path]:
    """Return a folder of runs in which every user may create, rename and remove entries, with one run of the owner."""
    folder = Path(tempfile.mkdtemp(prefix="rrl-shared-", dir="/tmp"))
    folder.chmod(0o777)
    owner.call(lambda: _write(folder, OWN), TIMEOUT_S)
    yield folder
    shutil.rmtree(folder)


def _written(folder: Path, name: str) -> RunDir:
    """Write a complete run that was cancelled, as its own user."""
    run = Story(name).works().ends(Outcome.CANCELLED, "cancel by somebody").written(folder)
    RunKeys.make().save(run.keys)
    run.run_spec.write_bytes(msgspec.json.encode(job()))
    run.resolved.write_text('{"source": "/nowhere/job.toml", "job": {}}')
    return run


def _write(folder: Path, name: str) -> None:
    _written(folder, name)


def _opened(run: RunDir) -> RunDir:
    """Let every user read the run."""
    for path in (run.path, *run.path.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return run


def _called(*argv: str) -> tuple[int, str]:
    """Run a command of rrl in this process; return its exit code and its whole output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.run(argv)
    return code, output.getvalue()


def _completed() -> str:
    """Return the words that bash is offered for a run."""
    os.environ.update({main.COMPLETE_ENV: "complete_bash", "COMP_WORDS": "rrl\nstatus\n", "COMP_CWORD": "2"})
    try:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main.run([])
        return output.getvalue()
    finally:
        del os.environ[main.COMPLETE_ENV]


def _refused(argv: list[str], folder: Path, whose: str) -> None:
    command, *others = argv
    code, output = _called(command, str(folder / PLANTED) if command != "rm" else PLANTED, *others)
    assert code in (1, 2), (argv, output)
    assert whose in output, (argv, output)
    assert output.count("\n") == 1, (argv, output)


def test_no_command_opens_a_run_of_another_user(owner: PlainUser, attacker: PlainUser, shared: Path) -> None:
    mark = owner.home / "mark"

    def plant() -> None:
        run = _opened(_written(shared, PLANTED))
        run.job_toml.write_text(f'[run]\nname = "x"\n[env]\nsetup = ["touch {mark}"]\n')
        run.keys.unlink()
        run.keys.symlink_to(shared / OWN / "keys.json")
        run.mailbox.chmod(0o777)

    def victim() -> None:
        for argv in (*LOOKING, *CHANGING):
            _refused(argv, shared, f"{PLANTED} is a run of {attacker.name}")
        assert PLANTED not in _called("list")[1]
        assert PLANTED not in _completed()
        assert OWN in _called("status")[1], "the newest run of another user was taken for the own one"
        assert _called("status", PLANTED[:4])[0] == 2

    attacker.call(plant, TIMEOUT_S)
    owner.call(victim, TIMEOUT_S, **{RUNS_ENV: str(shared)})
    assert not mark.exists()
    assert not list((shared / PLANTED / "mailbox").iterdir())


def _link_to_own(shared: Path) -> None:
    (shared / PLANTED).symlink_to(shared / OWN)


def _fifos(shared: Path) -> None:
    run = _opened(_written(shared, PLANTED))
    for path in [*run.journal.iterdir(), run.run_spec, run.resolved, run.summary]:
        path.unlink()
        os.mkfifo(path, 0o666)


def _journal_that_is_a_link(shared: Path) -> None:
    run = _opened(_written(shared, PLANTED))
    shutil.rmtree(run.journal)
    run.journal.symlink_to(shared / OWN / "journal")


@pytest.mark.parametrize("plant", [_link_to_own, _fifos, _journal_that_is_a_link])
def test_planted_entries_neither_hang_nor_hide_the_own_runs(
    owner: PlainUser, attacker: PlainUser, shared: Path, plant: Callable[[Path], None]
) -> None:
    def victim() -> None:
        code, output = _called("list")
        assert (code, OWN in output, PLANTED in output) == (0, True, False), output
        assert OWN in _called("status")[1]
        assert OWN in _completed()
        for argv in (*LOOKING, *CHANGING):
            _refused(argv, shared, "is a link" if plant is _link_to_own else attacker.name)

    attacker.call(lambda: plant(shared), TIMEOUT_S)
    owner.call(victim, TIMEOUT_S, **{RUNS_ENV: str(shared)})


def test_files_of_a_run_that_was_exchanged_after_its_check_are_not_read(
    owner: PlainUser, attacker: PlainUser, shared: Path
) -> None:
    """Where every user may rename entries, the directory can be another one a moment after it was checked."""

    def exchange() -> None:
        _opened(_written(shared, PLANTED))
        os.rename(shared / OWN, shared / ".away")
        os.rename(shared / PLANTED, shared / OWN)
        (shared / OWN / "keys.json").chmod(0o600)
        (shared / OWN / "steps" / "t.launch").write_text("{}")

    def victim() -> None:
        run = find_run(OWN)
        (owner.home / "checked").touch()
        while not (shared / ".away").exists():
            pass
        with pytest.raises(OperationFailed, match=attacker.name):
            StateReader(run).state()
        with pytest.raises(OperationFailed, match=attacker.name):
            check_manageable(run)
        assert job_of(run) is None
        with pytest.raises(Untrusted, match=attacker.name):
            read_launch(run.launch_file("t"))

    def exchange_when_checked() -> None:
        while not (owner.home / "checked").exists():
            pass
        attacker.call(exchange, TIMEOUT_S)

    thread = threading.Thread(target=exchange_when_checked, daemon=True)
    thread.start()
    owner.call(victim, TIMEOUT_S, **{RUNS_ENV: str(shared)})
    thread.join()


def test_root_looks_at_a_run_of_a_user_but_neither_manages_nor_changes_it(owner: PlainUser, shared: Path) -> None:
    def work() -> None:
        Story(PLANTED).works().written(shared)

    owner.call(work, TIMEOUT_S)
    for argv in (["status"], ["explain"], ["report"]):
        code, output = _called(*argv, str(shared / PLANTED))
        assert code == 0, output
    for argv in CHANGING:
        if argv[0] not in ("rm", "export", "endpoint", "relay", "inject"):
            _refused(argv, shared, f"{PLANTED} is a run of {owner.name}")


def test_only_a_regular_file_of_this_user_or_root_is_opened(owner: PlainUser, attacker: PlainUser) -> None:
    def victim() -> None:
        folder = OwnPath(owner.home / "files")
        folder.mkdir()
        (folder / "own").write_bytes(b"own")
        assert (folder / "own").read_bytes() == b"own"
        (folder / "link").symlink_to("own")
        os.mkfifo(folder / "fifo")
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(folder / "socket"))
        (folder / "folder").mkdir()
        for name in ("link", "fifo", "folder", "/dev/null"):
            with pytest.raises(Untrusted):
                (folder / name).read_bytes()
        with pytest.raises(OSError, match="No such device"):
            (folder / "socket").read_bytes()
        with pytest.raises(FileNotFoundError):
            (folder / "none").read_bytes()
        with pytest.raises(Untrusted, match=attacker.name):
            OwnPath(attacker_file).read_text()

    attacker_file = Path(tempfile.mkdtemp(dir="/tmp")) / "file"
    attacker_file.parent.chmod(0o755)
    attacker_file.touch(0o644)
    os.chown(attacker_file, attacker.uid, -1)
    owner.call(victim, TIMEOUT_S)
    shutil.rmtree(attacker_file.parent)


@pytest.mark.parametrize(
    ("mode", "everybody", "group"),
    [(0o700, False, False), (0o755, False, False), (0o775, False, True), (0o777, True, False), (0o1777, True, False)],
    ids=oct,
)
def test_who_else_may_write_a_folder_is_named(tmp_path: Path, mode: int, everybody: bool, group: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    who = f"every user may write {folder}" if everybody else f"the group {Path(folder).group()} may write {folder}"
    assert list(foreign_writers(folder)) == ([(everybody, who)] if everybody or group else [])
    (folder / "inner").mkdir()
    # with the sticky bit, nobody else can rename or remove the inner folder
    assert list(foreign_writers(folder / "inner")) == list(foreign_writers(folder)) * (mode != 0o1777)
    assert list(foreign_writers(folder / "missing")) == list(foreign_writers(folder)) * (mode != 0o1777)
