"""Runs programs and functions as an unprivileged user, if root runs the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

PLAIN_USER = "rrl-lab"
_TEMPORARY_PREFIX = "rrl-t"
_TERMINATE_TIMEOUT_S = 10.0
"""Seconds for a temporary user's processes to end after SIGKILL."""


class PlainUser(Struct, frozen=True):
    """An unprivileged user, created for the tests of one pytest worker and removed after them."""

    name: str
    uid: int
    home: Path
    """Home folder of the user, mode 0700."""

    def environment(self, **more: str) -> dict[str, str]:
        """Return a login environment that has this process's ``PATH`` and none of its other variables."""
        account = {"HOME": str(self.home), "USER": self.name, "LC_ALL": "C.UTF-8"}
        return {"PATH": os.environ["PATH"]} | account | cache_folders(self.home) | more

    def call(self, function: Callable[[], None], timeout_s: float, **more: str) -> None:
        """Run ``function`` as this user in a forked child, for at most ``timeout_s`` s.

        Raises AssertionError if it fails.
        """
        call_as(self.name, function, self.environment(**more), self.home, timeout_s)

    def popen(self, *argv: str, **more: str) -> subprocess.Popen[str]:
        """Start a command as this user in a session of its own; input, output and errors are pipes."""
        pipe = subprocess.PIPE
        return popen_as(self.name, argv, self.environment(**more), self.home, pipe, pipe, pipe)

    def kill_all(self) -> None:
        """Kill every process of this user and wait until all have ended.

        Raises AssertionError with the processes that remain.
        """
        deadline = time.monotonic() + _TERMINATE_TIMEOUT_S
        while left := _processes_of(self.uid):
            assert time.monotonic() < deadline, f"processes of {self.name} are left: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def temporary_user(purpose: str) -> Iterator[PlainUser]:
    """Create a system user with its own home; after the block, kill the user's processes, and remove user and home.

    The name contains the pid of the creator, so that pytest workers do not share users. Users of creators that have
    ended are removed first. Raises PermissionError if users cannot be created: this needs root, and a checkout that
    other users can run.
    """
    if os.geteuid() != 0 or not others_can_run_us():
        raise PermissionError("needs root, and a checkout that other users can run, to make plain users for tests")
    _remove_abandoned_users()
    name = f"{_TEMPORARY_PREFIX}{os.getpid()}-{purpose}"
    home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))
    command = ["useradd", "--system", "--user-group", "--home-dir", str(home), "--no-create-home", "--shell", "/bin/sh"]
    try:
        subprocess.run([*command, name], check=True, capture_output=True, text=True)
        account = pwd.getpwnam(name)
        home.chmod(0o700)
        os.chown(home, account.pw_uid, account.pw_gid)
        user = PlainUser(name, account.pw_uid, home)
        try:
            yield user
        finally:
            user.kill_all()
            subprocess.run(["userdel", name], check=True, capture_output=True, text=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _remove_abandoned_users() -> None:
    """Remove the temporary users whose creator has ended, with their processes and homes."""
    for account in pwd.getpwall():
        maker, _, purpose = account.pw_name.removeprefix(_TEMPORARY_PREFIX).partition("-")
        if not account.pw_name.startswith(_TEMPORARY_PREFIX) or not purpose or not maker.isdigit():
            continue
        if not Path(f"/proc/{maker}").exists():
            PlainUser(account.pw_name, account.pw_uid, Path(account.pw_dir)).kill_all()
            subprocess.run(["userdel", account.pw_name], capture_output=True)
            shutil.rmtree(account.pw_dir, ignore_errors=True)


def _processes_of(uid: int) -> list[int]:
    """Return the pids of a user's processes, without zombies."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if int(lines["Uid"].split()[0]) == uid and lines["State"].split()[0] not in "ZX":
                found.append(int(status.parent.name))
    return found


def cache_folders(home: Path) -> dict[str, str]:
    """Return environment variables that make torch and matplotlib store their files in ``home``, not in /tmp."""
    cache = home / ".cache"
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"), "MPLCONFIGDIR": str(cache / "matplotlib")}


def plain_user() -> str:
    """Return the name of the user as which tests run instead of root.

    This is a system user, or ``nobody`` if no user can be created. Without root, it is the present user.
    """
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    if not others_can_run_us():
        reported = f"{Path(__file__).parents[2]} cannot be entered by other users: root submits, not a plain user"
        warnings.warn(reported, stacklevel=2)
        return "root"
    for attempt in ("look", "make"):
        if attempt == "make":
            text = (
                f"creating the system user {PLAIN_USER}, as which jobs are submitted; make uninstall-slurm removes it"
            )
            print(text, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                subprocess.run(
                    [
                        "useradd",
                        "--system",
                        "--user-group",
                        "--no-create-home",
                        "--home-dir",
                        "/nonexistent",
                        "--shell",
                        "/bin/sh",
                        PLAIN_USER,
                    ],
                    capture_output=True,
                )
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(PLAIN_USER).pw_name
    return "nobody"


def others_can_run_us() -> bool:
    """Return whether other users can read this checkout and its virtual environment, which their submissions need."""
    return _reachable_by_all(Path(sys.prefix)) and _reachable_by_all(Path(__file__))


def _reachable_by_all(path: Path) -> bool:
    """Return whether other users may enter every folder on the path and read the last one."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents) and bool(path.stat().st_mode & 0o004)


def popen_as(
    user: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    stdin: int | IO[Any] | None,
    stdout: int | IO[Any] | None,
    stderr: int | IO[Any] | None,
) -> subprocess.Popen[str]:
    """Start a command as ``user`` in a session of its own, with exactly this environment."""
    account = pwd.getpwnam(user)
    other: dict[str, Any] = {}
    if os.geteuid() == 0:
        other = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
        **other,
    )


def call_as(user: str, function: Callable[[], None], env: Mapping[str, str], cwd: Path, timeout_s: float) -> None:
    """Run ``function`` as ``user`` in a forked child. Raises AssertionError with the child's traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(user, function, env, cwd, writing)
    os.close(writing)
    try:
        report = _read_until_closed(reading, timeout_s)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        report = f"not done within {timeout_s:.0f} s"
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    if report or status:
        raise AssertionError(f"as {user}: {report or f'wait status {status}'}")


def _child(user: str, function: Callable[[], None], env: Mapping[str, str], cwd: Path, report: int) -> None:
    """Drop the rights, run the function, report the result, and end without the parent's exit handlers."""
    code = 1
    try:
        os.set_inheritable(report, False)
        account = pwd.getpwnam(user)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        function()
        code = 0
    except BaseException:
        os.write(report, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read_until_closed(fd: int, timeout_s: float) -> str:
    deadline, text = time.monotonic() + timeout_s, b""
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(fd, 65536)):
            return text.decode(errors="replace")
        text += piece
    raise TimeoutError
