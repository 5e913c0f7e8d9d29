"""``rrl health drain-node`` and ``undrain-node`` with a simulated cluster in place of Slurm's commands."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from rrl.cli import main
from rrl.cli.health import hook_drains
from rrl.cli.health.check_outputs import write_prometheus
from rrl.cluster.slurm.readers import command_reader
from rrl.core.command_runner import CommandResult
from rrl.core.types import NodeName, Verdict
from rrl.health.check_memory import FOLDER_ENV


class Cluster:
    """Nodes n0, n1 and so on, each with the state and reason that scontrol shows."""

    def __init__(self, count: int) -> None:
        self.nodes = {f"n{index}": ("idle", 0.0, "none") for index in range(count)}
        self.answers = True
        self.asked = 0
        """Number of commands that were run."""
        self.at_same_time: list[str] = []
        """Nodes that other hooks drain just before the next change of a node's state."""

    def drain(self, node: str, reason: str = "rrl:health: x", ago: float = 0.0) -> None:
        self.nodes[node] = ("drained", time.time() - ago, reason)

    def drained(self) -> list[str]:
        return [node for node, (state, _, _) in self.nodes.items() if state == "drained"]

    def _line(self, node: str) -> str:
        state, at, reason = self.nodes[node]
        if state != "drained":
            return f"NodeName={node} State=IDLE"
        stamp = datetime.fromtimestamp(at).isoformat(timespec="seconds")
        return f"NodeName={node} State=IDLE+DRAIN Reason={reason} [root@{stamp}]"

    async def command(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        self.asked += 1
        if not self.answers:
            return CommandResult(1, "", "slurm_load_partitions: Unable to contact slurm controller (connect failure)")
        if "show" in argv:
            shown = [argv[-1]] if argv[-1] in self.nodes else list(self.nodes)
            return CommandResult(0, "\n".join(map(self._line, shown)), "")
        changes = dict(word.split("=", 1) for word in argv[2:])
        node = changes["NodeName"]
        for other in self.at_same_time:
            self.drain(other, ago=1.0)
        self.nodes[node] = ("idle", 0.0, "none")
        if changes["State"] == "DRAIN":
            self.drain(node, changes["Reason"])
        return CommandResult(0, "", "")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "state"))
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    made = Cluster(10)
    monkeypatch.setattr(command_reader, "execute", made.command)
    monkeypatch.setattr(hook_drains, "DRAIN_SETTLE_S", 0.0)
    return made


def drain(node: str = "n5") -> int:
    return main.run(["health", "drain-node", "--node", node, "--why", "mounts: /scratch hangs"])


def test_a_node_is_drained_with_a_reason_of_the_hooks(cluster: Cluster) -> None:
    assert drain() == 0
    assert cluster.nodes["n5"][2] == "rrl:health: mounts: /scratch hangs"


def test_drain_beyond_the_limit_is_held_back_with_the_reason(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.drain("n1")
    cluster.drain("n2", ago=300.0)
    assert drain() == 1
    assert cluster.drained() == ["n1", "n2"]
    assert capsys.readouterr().out.startswith("held back: hooks have drained 2 of 10 nodes within 600 s")


def test_drains_by_others_do_not_count_against_the_limit(cluster: Cluster) -> None:
    for node in ("n1", "n2", "n3", "n4"):
        cluster.drain(node, "the fan is loud")
    assert drain() == 0


def test_concurrent_drain_beyond_the_limit_is_taken_back(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.at_same_time = ["n1", "n2"]
    assert drain() == 1
    assert cluster.drained() == ["n1", "n2"]
    assert "held back" in capsys.readouterr().out


def test_leftover_drain_beyond_the_limit_is_taken_back_by_the_next_call(cluster: Cluster) -> None:
    for ago, node in enumerate(("n5", "n2", "n1")):
        cluster.drain(node, ago=60.0 * ago)
    assert drain("n5") == 1
    assert drain("n2") == 0
    assert cluster.drained() == ["n1", "n2"]


def test_node_drained_by_another_user_is_left_as_it_is(cluster: Cluster) -> None:
    cluster.drain("n5", "the fan is loud")
    assert drain() == 0
    assert cluster.nodes["n5"][2] == "the fan is loud"


@pytest.mark.parametrize(
    ("reason", "gauge"), [("rrl:health: gpu_lost", 1.0), ("rrl:run7: gpu_lost", 0.0), ("the fan is loud", 0.0)]
)
def test_metric_of_a_failing_node_counts_only_a_drain_of_the_hooks(
    cluster: Cluster, tmp_path: Path, reason: str, gauge: float
) -> None:
    cluster.drain("n0", reason, ago=7200.0)
    assert drain("n0") == 0
    file = tmp_path / "rrl.prom"
    assert write_prometheus(file, NodeName("n0"), Verdict.FAIL, (), (), 1.0) == ""
    assert f'rrl_node_drained_by_hook{{node="n0"}} {gauge}' in file.read_text().splitlines()


def test_undrain_takes_back_only_a_drain_of_the_hooks(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain() == 0
    cluster.drain("n6", "the fan is loud")
    for node in ("n5", "n6", "n7"):
        assert main.run(["health", "undrain-node", "--node", node]) == 0
    assert cluster.drained() == ["n6"]
    assert capsys.readouterr().out == "undrained\n"


def test_node_that_was_not_drained_queries_slurm_once_until_it_is_drained(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    undrain = ["health", "undrain-node"]
    cluster.answers = False
    assert main.run(undrain) == 3, (
        "undrain-node did not fail, though Slurm does not answer and the node has no record of a drain"
    )
    assert "not undrained: scontrol:" in capsys.readouterr().out
    cluster.answers = True
    asked = cluster.asked
    assert [main.run(undrain) for _ in range(5)] == [0] * 5
    assert cluster.asked == asked + 1
    assert main.run(["health", "drain-node", "--why", "mounts"]) == 0
    assert main.run(undrain) == 0
    assert cluster.drained() == []
    asked = cluster.asked
    assert main.run(undrain) == 0
    assert cluster.asked == asked


def test_no_node_is_drained_if_slurm_does_not_answer(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.answers = False
    assert drain() == 3
    assert "not drained: scontrol: slurm_load_partitions: Unable to contact" in capsys.readouterr().out
    cluster.answers = True
    assert drain("n77") == 3
