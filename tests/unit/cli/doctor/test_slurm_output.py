"""Slurm's configuration, partitions and nodes are parsed as 22.05 prints them, and in the forms of other sites."""

from __future__ import annotations

import pytest

from rrl.cli.doctor import slurm_output as text
from rrl.cli.doctor.facts import Accounts, Node, Partition
from rrl.cluster.base import NodeState
from rrl.cluster.slurm.parsing import Unreadable
from rrl.cluster.slurm.requests import gpus_by_type
from rrl.tests.support.cli.findings import RECORDED


def recorded(name: str) -> str:
    return (RECORDED / f"{name}-22.05.txt").read_text()


def test_configuration_printed_by_slurm_is_parsed() -> None:
    values = text.read_config(recorded("config"))
    assert values["SLURM_VERSION"] == "22.05.8"
    assert (values["InactiveLimit"], values["SlurmUser"]) == ("0 sec", "root(0)")
    assert values["JobSubmitPlugins"] == ""  # (null)
    assert values["SchedulerParameters"] == "sched_interval=2,sched_min_interval=0,bf_interval=2"


def test_cgroup_settings_are_parsed_from_the_configuration_printed_by_slurm() -> None:
    more = "\nCgroup Support Configuration:\nConstrainDevices        = yes\nCgroupPlugin            = autodetect\n"
    assert text.read_config(recorded("config") + more)["ConstrainDevices"] == "yes"
    assert text.read_pairs("# ours\nConstrainDevices=yes # GPUs\n ConstrainRAMSpace = no\n") == {
        "ConstrainDevices": "yes",
        "ConstrainRAMSpace": "no",
    }


def test_output_without_a_slurm_configuration_is_rejected() -> None:
    with pytest.raises(Unreadable, match="printed: 'slurm_load_ctl_conf error'"):
        text.read_config("slurm_load_ctl_conf error\n")


def test_partitions_are_parsed() -> None:
    assert text.read_partitions(recorded("partitions")).partitions == (Partition("main", True, True, None, False),)
    line = "PartitionName=preempt AllowGroups=ALL Default=NO MaxTime=1-12:00:00 State=DOWN PreemptMode=REQUEUE"
    assert text.read_partitions(line).partitions == (Partition("preempt", False, False, 129600.0, True),)


def test_nodes_are_parsed() -> None:
    nodes = text.read_nodes(recorded("nodes")).nodes
    assert nodes[0] == Node("n1", ("main",), NodeState.UP, 8, 8000 * 2**20, {"": 2})
    assert len(nodes) == 3
    with pytest.raises(Unreadable, match="RealMemory=''"):
        text.read_nodes("NodeName=n1 CPUTot=8 State=IDLE")
    with pytest.raises(Unreadable, match="no NodeName"):
        text.read_nodes("what is this")
    assert text.read_nodes("No nodes in the system\n").nodes == ()


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2", {"": 2}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1),gpu:1,shard:16,mps:400", {"a100": 4, "": 1}),
        ("gpu", {"": 1}),
        ("gpu:a100_3g.20gb:2", {"a100_3g.20gb": 2}),
        ("craynetwork:4", {}),
        ("", {}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert gpus_by_type(gres) == gpus


def test_accounts_printed_by_sacctmgr_are_parsed() -> None:
    assert text.read_accounts("None|astro\n", "astro\nbio\nastro\n") == Accounts("None", "astro", ("astro", "bio"))
    assert text.read_accounts("", "") == Accounts("", "", ())
    with pytest.raises(Unreadable, match="what"):
        text.read_accounts("what is this\n", "")
