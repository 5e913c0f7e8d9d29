"""Send one notification: ``python -m rrl.manager.notifications.sender RUN_DIR``, with the JSON document on stdin.

The target is a webhook or a command. Only the run's job.toml contains it. Other files of the run and messages do not,
since an address or an argument may be a secret. If the target is a command, it replaces this process. On failure one
line is written to stderr, for the manager's log. Exit code 0 means that the notification was accepted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ...core.run_dir import RunDir

REQUEST_TIMEOUT_S = 20.0
"""Seconds for each operation on the connection to a webhook."""
LIFETIME_S = 60
"""Seconds after which the kernel ends this process, or the command that replaces it. The manager kills the process
earlier, except if the manager itself has died."""


class NotSent(Exception):
    """The notification was not accepted. The text says why in one line, without anything secret."""


def main(run_dir: str) -> None:
    """Send the document on stdin to the target that the job names."""
    signal.alarm(LIFETIME_S)  # survives execve
    run = RunDir(Path(run_dir))
    target = _target(run)
    if command := target.get("command"):
        _replace_by(command, _working_folder(run))
    _post(str(target.get("webhook", "")), sys.stdin.buffer.read())


def _target(run: RunDir) -> dict[str, Any]:
    """Return the table [notify] of the run's job. Raises NotSent."""
    try:
        text = run.job_toml.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text).get("notify")
    except (OSError, ValueError) as error:
        raise NotSent(f"{run.job_toml} cannot be read: {getattr(error, 'strerror', None) or 'not valid'}") from None
    if not isinstance(table, dict) or not (table.get("command") or table.get("webhook")):
        raise NotSent(f"{run.job_toml} has no table [notify] with command or webhook")
    return table


def _working_folder(run: RunDir) -> Path:
    """Return the folder of the submitted job.toml, in which roles work too; if it is gone, return the run directory."""
    try:
        folder = Path(str(json.loads(run.resolved.read_bytes())["source"])).parent
    except (OSError, ValueError, KeyError):
        return run.path
    return folder if folder.is_dir() else run.path


def _replace_by(command: list[str], folder: Path) -> NoReturn:
    """Run the command in place of this process, with the document on stdin and no output. Raises NotSent."""
    os.chdir(folder)
    reporting = os.dup(2)
    os.set_inheritable(reporting, False)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.dup2(reporting, 2)
        raise NotSent(f'the command "{command[0]}" cannot be started: {error.strerror}') from None


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: a document is posted to the address that the user wrote, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(webhook: str, document: bytes) -> None:
    """Post the document. Raises NotSent, which names only the webhook's host, since the path may be secret."""
    host = urlsplit(webhook).hostname or "?"
    request = Request(webhook, document, {"Content-Type": "application/json", "User-Agent": "rrl"})
    try:
        with build_opener(_NoRedirects).open(request, timeout=REQUEST_TIMEOUT_S) as answer:
            answer.read(1)
    except HTTPError as error:
        raise NotSent(f"the webhook at {host} answered {error.code}") from None
    except URLError as error:
        raise NotSent(f"the webhook at {host} cannot be reached: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise NotSent(f"the request to the webhook at {host} failed: {type(error).__name__}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except NotSent as error:
        sys.stderr.write(f"{error}\n")  # the manager reads it
        raise SystemExit(1) from None
