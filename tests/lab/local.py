"""Accidents of the local cluster's virtual nodes."""

from __future__ import annotations

from pathlib import Path

from rrl.manager.cluster.local import down_mark
from rrl.spec.launch import read_launch
from rrl.spec.processes import Process, processes, sweep
from rrl.spec.rundir import RunDir
from rrl.spec.words import NodeName


def processes_on(run_dir: RunDir, node: str) -> list[Process]:
    """Everything of the run that lives on this virtual node."""
    return [process for process in processes(str(run_dir.steps)) if read_launch(Path(process.launch)).node == node]


def crash(run_dir: RunDir, node: str) -> None:
    """The node dies at once with everything on it, its agent too, and stays down."""
    down_mark(run_dir, NodeName(node)).touch()
    _, left = sweep(lambda: processes_on(run_dir, node), within=20.0)
    assert not left
