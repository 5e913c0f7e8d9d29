"""Causes failures of the virtual nodes of the local cluster."""

from __future__ import annotations

from pathlib import Path

from rrl.cluster.local import down_mark
from rrl.core.launch import read_launch
from rrl.core.processes import Process, processes, sweep
from rrl.core.run_dir import RunDir
from rrl.core.types import NodeName


def processes_on(run_dir: RunDir, node: str) -> list[Process]:
    """Return the run's running processes on this virtual node."""
    return [process for process in processes(str(run_dir.steps)) if read_launch(Path(process.launch)).node == node]


def crash(run_dir: RunDir, node: str) -> None:
    """Kill all processes on the node at once, including its agent; the node stays down."""
    down_mark(run_dir, NodeName(node)).touch()
    _, left = sweep(lambda: processes_on(run_dir, node), timeout=20.0)
    assert not left
