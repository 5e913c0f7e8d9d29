"""What the state of a node means, for every word that Slurm 22.05 to 26.05 prints, and for words that nobody knows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rrl.cluster.base import NodeState
from rrl.cluster.slurm.node_states import MARKS, marks, node_state, takes_jobs
from rrl.cluster.slurm.parsing import read_nodes
from rrl.cluster.slurm.requests import read_partitions
from rrl.core.types import NodeName
from rrl.docs import make_node_states
from rrl.health.detection.health_monitor import HealthMonitor

UP, UNKNOWN, LEAVING, DRAINING, DOWN = (
    NodeState.UP,
    NodeState.UNKNOWN,
    NodeState.LEAVING,
    NodeState.DRAINING,
    NodeState.DOWN,
)
BASES = ("DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE", "UNKNOWN")
FLAGS = (
    "BLOCKED",
    "CLOUD",
    "COMPLETING",
    "DRAIN",
    "DYNAMIC_FUTURE",
    "DYNAMIC_NORM",
    "EXTERNAL",
    "INVALID_REG",
    "FAIL",
    "MAINTENANCE",
    "POWER_DOWN",
    "POWER_UP",
    "PERFCTRS",
    "POWERED_DOWN",
    "REBOOT_REQUESTED",
    "REBOOT_ISSUED",
    "RESERVED",
    "RESUME",
    "NOT_RESPONDING",
    "PLANNED",
    "POWERING_UP",
    "POWERING_DOWN",
)
"""Base states and flags as scontrol prints them (node_states and node_state_flags in slurm_protocol_defs.c)."""
LONG = (
    "inval maint reboot draining drained failing fail reboot_issued cancel_reboot cloud external power_down power_up"
    " powering_down powered_down powering_up undrain dynamic_future dynamic_norm down allocated completing perfctrs"
    " reserved blocked planned idle mixed future resume unknown"
)
COMPACT = (
    "inval maint boot drng drain failg fail canc_r cloud ext pow_dn pow_up powring_dn powered_dn powering_up down alloc"
    " comp npc resv block plnd idle mix futr resm unk"
)
"""Words of sinfo without suffix (node_state_string and node_state_string_compact)."""


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("IDLE", UP),
        ("ALLOCATED+COMPLETING", UP),
        ("MIXED+PLANNED", UP),
        ("alloc+", UP),
        ("mix-", UP),
        ("npc", UP),
        ("maint", UP),
        ("IDLE+MAINTENANCE+RESERVED", UP),
        ("mixed$", UP),
        ("blocked", UP),
        ("IDLE+DYNAMIC_NORM", UP),
        ("idle*", UNKNOWN),
        ("mixed*", UNKNOWN),
        ("maint*", UNKNOWN),
        ("IDLE+POWERING_UP", UNKNOWN),
        ("alloc#", UNKNOWN),
        ("FUTURE", UNKNOWN),
        ("NEWSTATE", UNKNOWN),
        ("MIXED+NEWFLAG", UNKNOWN),
        ("?", UNKNOWN),
        ("CLOUD", UNKNOWN),
        ("ALLOCATED+CLOUD+POWERED_DOWN", UNKNOWN),
        ("ALLOCATED+NOT_RESPONDING+POWERING_UP+REBOOT_ISSUED", UNKNOWN),
        ("MIXED+REBOOT_REQUESTED", LEAVING),
        ("mixed@", LEAVING),
        ("boot", LEAVING),
        ("ALLOCATED+POWER_DOWN", LEAVING),
        ("mix!", LEAVING),
        ("alloc%", LEAVING),
        ("MIXED+REBOOT_REQUESTED+NOT_RESPONDING", LEAVING),
        ("drained*", DRAINING),
        ("MIXED+DRAIN+REBOOT_REQUESTED", DRAINING),
        ("drng@", DRAINING),
        ("inval", DRAINING),
        ("failg", DRAINING),
        ("DRAIN+NEWFLAG+MIXED", DRAINING),
        ("down*", DOWN),
        ("DOWN*+DRAIN", DOWN),
        ("idle~", DOWN),
        ("IDLE+CLOUD+POWERED_DOWN", DOWN),
        ("reboot^", DOWN),
        ("DOWN+REBOOT_ISSUED", DOWN),
        ("IDLE+POWERING_DOWN", DOWN),
        ("down~", DOWN),
        ("DOWN+NEWFLAG", DOWN),
    ],
)
def test_node_state_accounts_for_suffixes_and_flags(text: str, state: NodeState) -> None:
    assert node_state(text) is state


def test_every_word_of_slurm_is_in_the_table_and_no_node_that_runs_jobs_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    suffixes = ("", *(mark.suffix for mark in MARKS if mark.suffix))
    words = [word + suffix for word in {*LONG.split(), *COMPACT.split()} for suffix in suffixes]
    flags = ["+".join((base, *two)) for base in BASES for two in itertools.combinations(FLAGS, 2)]
    used = ("alloc", "mix", "draining", "drng", "failing", "failg", "ALLOCATED+", "MIXED+")
    assert [text for text in (*words, *flags) if text.startswith(used) and node_state(text) is DOWN] == []
    assert all(node_state(text) is DOWN for text in flags if text.startswith(("DOWN+", "ERROR+")))
    assert [node_state(text) for text in (*words, *flags)]
    assert caplog.messages == [], "rrl does not know these words"


def test_long_and_compact_word_mean_the_same() -> None:
    assert [mark.names for mark in MARKS if len({node_state(name) for name in mark.names}) > 1] == []
    assert marks("drng@") == marks("DRAINING+REBOOT_REQUESTED") == {"DRAIN", "REBOOT_REQUESTED"}


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("planned", True),
        ("reserved", True),
        ("maint", True),
        ("blocked", True),
        ("mixed-", True),
        ("idle~", True),
        ("allocated+", True),
        ("completing", True),
        ("drained", False),
        ("down~", False),
        ("idle*", False),
        ("reboot", False),
        ("inval", False),
        ("idle%", False),
        ("n/a", False),
        ("newstate", False),
    ],
)
def test_check_counts_the_nodes_on_which_slurm_starts_jobs_by_itself(state: str, usable: bool) -> None:
    line = "\x1e" + "\x1f".join(("main*", "3", "8", "8000", "(null)", state, "infinite", "1-infinite", "up", "OFF"))
    (partition,) = read_partitions(line)
    assert takes_jobs(state) is partition.shapes[0].usable is usable


def test_unknown_word_is_reported_once_and_is_no_proof(caplog: pytest.LogCaptureFixture) -> None:
    lines = "".join(f"NodeName=n{i} Arch=x86_64 State=MIXED+TELEPORTING ThreadsPerCore=1\n" for i in range(3))
    assert {status.state for status in (*read_nodes(lines).values(), *read_nodes(lines).values())} == {UNKNOWN}
    assert caplog.messages == [
        "Slurm reports the node state TELEPORTING, which rrl does not know; it counts as neither up nor down"
    ]


def test_node_that_reboots_once_it_is_idle_is_no_loss_and_no_flap() -> None:
    monitor = HealthMonitor()
    for at, state in enumerate((UP, LEAVING, UP, LEAVING, UP, LEAVING, UP, LEAVING)):
        monitor.on_node_status(NodeName("n1"), state, "", float(at))
    view = monitor.nodes[NodeName("n1")]
    assert (view.reported_down, list(view.flaps)) == (None, [])


def test_table_in_the_page_about_sites_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[4] / "docs/sites.md").read_text()
    assert make_node_states.with_table(page) == page, f"run .venv/bin/python -m {make_node_states.__name__}"
