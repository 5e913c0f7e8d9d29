"""The count of generated tokens never decreases."""

from __future__ import annotations

from pathlib import Path

from rrl.cluster.local import LocalCluster
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName
from rrl.manager.runtime import Manager
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, TRAINER, job

R0, R1 = (Incarnation(id, 1) for id in ROLLOUTS)
N1, N2 = NodeName("n1"), NodeName("n2")


def test_tokens_generated_on_a_lost_node_still_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path / RUN)
    manager = Manager(run, LocalCluster(run, python="python"), job(), "job.toml", "host")
    watch, tokens = manager._monitor, manager._tokens
    watch.set_roles(job().roles)
    for incarnation, node, made in ((R0, N1, 100), (R1, N2, 50), (Incarnation(TRAINER, 1), N2, 7)):
        watch.on_launched(incarnation, node, 1.0)
        watch.on_hello(incarnation, node, "generate", 1.0)
        watch.on_heartbeat(incarnation, "generate", made, None, 2.0)
    assert tokens.total() == 150
    manager._drop_node(N1)
    assert tokens.total() == 150
    tokens.retire(R0)  # its fence comes afterwards
    tokens.retire(R1)
    watch.remove(R1)
    assert tokens.total() == 150
