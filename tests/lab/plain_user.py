"""Becoming somebody without rights: programs and functions run as another user, when root runs the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PLAIN_USER = "rrl-lab"


def plain_user() -> str:
    """Root's stand-in: a system user made for it, or ``nobody`` where that is not possible; else who we are."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    if not others_can_run_us():
        told = f"{Path(__file__).parents[2]} cannot be entered by other users: root submits, not a plain user"
        warnings.warn(told, stacklevel=2)
        return "root"
    for attempt in ("look", "make"):
        if attempt == "make":
            with contextlib.suppress(OSError):
                subprocess.run(["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent",
                                "--shell", "/bin/sh", PLAIN_USER], capture_output=True)  # fmt: skip
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(PLAIN_USER).pw_name
    return "nobody"


def others_can_run_us() -> bool:
    """Another user can read this checkout and its virtual environment: without that no plain user can submit."""
    return _reachable_by_all(Path(sys.prefix)) and _reachable_by_all(Path(__file__))


def _reachable_by_all(path: Path) -> bool:
    """Others may enter every folder on the way and read what is there."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents) and bool(path.stat().st_mode & 0o004)


def popen_as(
    user: str, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdin: int | IO[Any] | None,
    stdout: int | IO[Any] | None, stderr: int | IO[Any] | None,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start a command as ``user`` in a session of its own, with this environment and no other."""
    account = pwd.getpwnam(user)
    other: dict[str, Any] = {}
    if os.geteuid() == 0:
        other = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return subprocess.Popen(list(argv), env=dict(env), cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=True,
                            start_new_session=True, **other)  # fmt: skip


def call_as(user: str, function: Callable[[], None], env: Mapping[str, str], cwd: Path, within: float) -> None:
    """Run ``function`` as ``user`` in a forked child. Raises AssertionError with the child's traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(user, function, env, cwd, writing)
    os.close(writing)
    try:
        report = _read_until_closed(reading, within)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        report = f"not done within {within:.0f} s"
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    if report or status:
        raise AssertionError(f"as {user}: {report or f'wait status {status}'}")


def _child(user: str, function: Callable[[], None], env: Mapping[str, str], cwd: Path, report: int) -> None:
    """Drop the rights, run, say how it went, and end without the parent's exit handlers."""
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


def _read_until_closed(fd: int, within: float) -> str:
    deadline, text = time.monotonic() + within, b""
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(fd, 65536)):
            return text.decode(errors="replace")
        text += piece
    raise TimeoutError
