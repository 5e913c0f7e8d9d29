"""Forks tracker processes from a process that has imported their packages, because MLflow takes 1 s of CPU to import.

This is a separate module, because the forked processes import it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

PACKAGES = ["mlflow.tracking", "wandb", "rrl.manager.tracking.main"]
"""Packages that are imported before the fork. TensorBoard's package is left out, because its import takes only 0.1
s."""
PARENT = "PARENT"
"""An argument that stands for the id of the process which forks the others."""


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServerContext]:
    """Provide the process from which others are forked; end it afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PACKAGES)
    try:
        yield context
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # without this, it runs as long as pytest


def start(
    server: ForkServerContext, program: str, argv: Sequence[str], env: Mapping[str, str], folder: Path, log: Path
) -> ForkServerProcess:
    """Start a process that runs a program as ``python -c`` does.

    Args:
        argv: Arguments of the process, including ``PARENT``.
        folder: Working directory of the process.
        log: The file to which the output of the process is appended.
    """
    process = server.Process(target=_run, args=(program, list(argv), dict(env), folder, log))
    process.start()
    return process


def _run(program: str, argv: list[str], env: dict[str, str], folder: Path, log: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = ["-c", *(str(os.getppid()) if word == PARENT else word for word in argv)]
    exec(compile(program, "-c", "exec"), {"__name__": "__main__"})
