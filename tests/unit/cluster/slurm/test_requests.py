"""Partitions as sinfo describes them, and the requests that they permit."""

from __future__ import annotations

import pytest

from rrl.cluster.slurm.parsing import Unreadable, gpus_by_type
from rrl.cluster.slurm.requests import Partition, eligible, read_partitions, seconds_of
from rrl.core.types import Resources

INF = float("inf")


def sinfo(*rows: str) -> str:
    return "".join(f"\x1e{row.replace('|', chr(0x1F))}\n" for row in rows)


PARTITIONS = sinfo(
    "main*|6|8|8000|gpu:2|idle|infinite|1-infinite|up|OFF",
    "main*|1|8|8000|gpu:2|down*|infinite|1-infinite|up|OFF",
    "big|2|64|512000|gpu:a100:4(S:0-1),shard:8|mixed|1-00:00:00|1-2|drain|REQUEUE",
)


def partitions() -> dict[str, Partition]:
    return {partition.name: partition for partition in read_partitions(PARTITIONS)}


def test_nodes_that_are_down_count_as_existing_but_not_as_usable() -> None:
    main = partitions()["main"]
    assert main.fitting(Resources(cpus=8, gpus=2, mem=8000 * 2**20)) == 7
    assert main.fitting(Resources(cpus=8), usable=True) == 6
    assert main.fitting(Resources(cpus=9)) == 0
    assert (main.default, main.max_walltime_s, main.max_nodes) == (True, INF, INF)


def test_partition_limits_are_parsed() -> None:
    big = partitions()["big"]
    assert (big.default, big.max_walltime_s, big.max_nodes) == (False, 86400.0, 2.0)
    assert big.description() == "2 of 64 CPUs, 512000 MiB, 4 GPUs"
    assert [shape.gpus for shape in big.shapes] == [{"a100": 4}]
    assert [(one.up, one.preempted) for one in (big, partitions()["main"])] == [(False, True), (True, False)]


@pytest.mark.parametrize(
    ("node", "key"), [(Resources(cpus=65), "cpus"), (Resources(gpus=5), "gpus"), (Resources(mem=2**40), "mem")]
)
def test_missing_resource_names_the_key_that_no_node_satisfies(node: Resources, key: str) -> None:
    assert partitions()["big"].missing_resource(node) == key


def test_job_runs_in_its_named_partitions_or_the_default_one() -> None:
    known = read_partitions(PARTITIONS)
    assert [partition.name for partition in eligible(known, {})] == ["main"]
    assert [partition.name for partition in eligible(known, {"partition": "big,main"})] == ["main", "big"]
    assert eligible(known, {"partition": "nowhere"}) == []


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu", {"": 1}),
        ("gpu:2", {"": 2}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1),gpu:1,shard:16,mps:400", {"a100": 4, "": 1}),
        ("gpu:a100_3g.20gb:2", {"a100_3g.20gb": 2}),
        ("mps:gpu:3,craynetwork:4", {}),
    ],
)
def test_gpus_are_counted_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert gpus_by_type(gres) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"), [("30:00", 1800), ("12:00:00", 43200), ("7-00:00:00", 604800), ("infinite", INF), ("0:30", 30)]
)
def test_times_are_parsed_in_every_form(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("row", ["main*|six|8|8000|(null)|idle|infinite|1-infinite|up|OFF", "main*|6|8"])
def test_unknown_partition_output_is_unreadable(row: str) -> None:
    with pytest.raises(Unreadable):
        read_partitions(sinfo(row))
