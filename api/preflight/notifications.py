"""Show the notifications of a job, and check that their command can be started on this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...config.job.schema import Job
from ...manager.bootstrap.preflight import Problem

_COMMAND_KEY = ("notify", "command")


def notifications_text(job: Job) -> str:
    """Return which notifications are sent, and their target without secret parts; empty if none is sent."""
    if job.notify is None:
        return ""
    notify = job.notify.without_secrets()
    target = f"posted to {notify.webhook}" if notify.webhook else f"to the command {' '.join(notify.command or ())}"
    return f"{', '.join(dict.fromkeys(notify.on))}: {target}, at most one an hour of each"


def notification_problems(job: Job, folder: Path) -> Iterator[Problem]:
    """Yield why the command of the notifications cannot be started on this machine; nothing if it can be started.

    ``folder`` is the folder of job.toml, where the command runs. The problem is certain if the manager runs on this
    machine.
    """
    if job.notify is None or job.notify.command is None:
        return
    name = job.notify.command[0]
    if "/" in name and not os.access(folder / name, os.X_OK):
        missing = "is not executable" if (folder / name).exists() else "does not exist"
        relative = "" if Path(name).is_absolute() else f" in {folder}, the folder of job.toml"
        text = f"{json.dumps(name)} {missing}{relative}"
    elif "/" not in name and shutil.which(name) is None:
        text = f"there is no command {json.dumps(name)} in PATH"
    else:
        return
    yield Problem(_COMMAND_KEY, text, certain=not job.cluster.traits.manager_is_a_job)
