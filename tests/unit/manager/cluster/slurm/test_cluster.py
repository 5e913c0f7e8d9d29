"""What a poll reports once, with scripts that print the output of Slurm's commands."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rrl.core.types import NodeName
from rrl.manager.cluster.base import NodeState
from rrl.manager.cluster.slurm.cluster import SlurmCluster
from rrl.manager.cluster.slurm.commands import SlurmLimits
from rrl.tests.unit.manager.cluster.slurm.test_salloc import HELD, commands, squeue


def test_node_state_that_nobody_knows_is_reported_once_and_counts_as_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = "".join(f"NodeName=n{i} State=MIXED+TELEPORTING Weight=1\\n" for i in (1, 2))
    commands(tmp_path / "bin", squeue=squeue(HELD), scontrol=f"printf '{nodes}'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    async def polls() -> None:
        slurm = SlurmCluster("run-1", "python", SlurmLimits(min_poll_interval_s=0.0), allocate_with="salloc")
        for _ in range(3):
            snapshot = await slurm.observe()
            assert snapshot.nodes is not None, snapshot
            assert {snapshot.nodes[NodeName(name)].state for name in ("n1", "n2")} == {NodeState.UNKNOWN}
        await slurm.close()

    with caplog.at_level(logging.WARNING, "rrl.manager"):
        asyncio.run(polls())
    assert [record.getMessage() for record in caplog.records] == [
        "a node is MIXED+TELEPORTING: TELEPORTING is not known to rrl, so the node counts as neither up nor down"
    ]
