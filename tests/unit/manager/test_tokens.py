"""How much rollouts have generated: what is counted once stays counted."""

from __future__ import annotations

from pathlib import Path

from rrl.core.run_dir import RunDir
from rrl.core.types import Life, NodeName
from rrl.manager.cluster.local import LocalCluster
from rrl.manager.runtime import Manager
from rrl.tests.support.manager.jobs import ROLLOUTS, RUN, TRAINER, job

R0, R1 = (Life(id, 1) for id in ROLLOUTS)
N1, N2 = NodeName("n1"), NodeName("n2")


def test_what_was_made_on_a_node_that_is_gone_is_not_unmade(tmp_path: Path) -> None:
    run = RunDir(tmp_path / RUN)
    manager = Manager(run, LocalCluster(run, python="python"), job(), "job.toml", "host")
    watch, tokens = manager._watch, manager._tokens
    for life, node, made in ((R0, N1, 100), (R1, N2, 50), (Life(TRAINER, 1), N2, 7)):
        watch.launched(life, node, 1.0)
        watch.joined(life, node, "generate", 1.0)
        watch.heard(life, "generate", made, None, 2.0)
    assert tokens.total() == 150
    manager._forget_node(N1)
    assert tokens.total() == 150
    tokens.ends(R0)  # its fence comes afterwards
    tokens.ends(R1)
    watch.forget(R1)
    assert tokens.total() == 150
