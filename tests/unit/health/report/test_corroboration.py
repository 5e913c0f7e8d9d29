"""A node can be accused by the evidence of two users or of root, but never by the evidence of one user alone."""

from __future__ import annotations

import pytest

from rrl.core.types import Cause, Remedy
from rrl.health.history.rates import DAY_S
from rrl.health.history.records import Record, SourcedRecord
from rrl.health.report.drain_requests import open_requests
from rrl.health.report.model import DrainState, NodeReport
from rrl.health.report.site import report
from rrl.tests.support.health.site_history import (
    ANNA,
    BEGAN,
    BEN,
    CARL,
    HOUR,
    acted,
    began,
    failed,
    found,
    held,
    left,
    mended,
    over,
    sourced,
)

NOW = BEGAN + 20 * DAY_S
NODES = [f"n{i}" for i in range(1, 9)]
CHECKED = DrainState("IDLE+DRAIN", True, "rrl", "rrl:health: Xid 79", "root", by_check=True)


def reports(records: list[SourcedRecord], **drains: DrainState) -> dict[str, NodeReport]:
    return {one.node: one for one in report(records, BEGAN, NOW, drains).nodes}


def invented(user: str, runs: int) -> list[SourcedRecord]:
    """Return runs in which every node fails with proof, is excluded and has an open drain request.

    Each run is at a time of its own.
    """
    records: list[SourcedRecord] = []
    for day in range(runs):
        for i, node in enumerate(NODES):
            at, run = day * DAY_S + i * HOUR, f"r{day}-{i}"
            records += sourced(
                user,
                run,
                began(at, run, user),
                held(at, node),
                found(at + 5, node, remedy=Remedy.REBOOT),
                failed(at + 6, node, cause="gpu"),
                acted(at + 7, node, "excluded"),
                acted(at + 8, node, "drain_requested"),
                mended(at + 60, "rollout/0", node, at + 6, 0.1),
                left(at + 120, node),
                over(at + 130),
            )
    return records


def test_fifteen_invented_runs_of_one_user_accuse_no_node() -> None:
    for node in reports(invented("eve", 15)).values():
        assert (node.verdict, node.remedy, node.scontrol, node.accused) == ("WARN", "none", "", False)
        assert not node.lemon.lemon
        assert node.lemon.score <= 0.5
        assert node.witnesses == ["eve"]
        assert "records of eve" in node.action
    assert not any(one.accused for one in open_requests(invented("eve", 15)))


def test_same_evidence_from_two_users_accuses_the_node() -> None:
    both = invented(ANNA, 3) + invented(BEN, 3)
    for node in reports(both).values():
        assert (node.verdict, node.remedy, node.accused) == ("FAIL", "reboot", True)
        assert node.lemon.lemon
        assert node.scontrol.startswith(f"scontrol update nodename={node.node} state=drain")
        assert node.witnesses == [ANNA, BEN]
    assert all(one.accused for one in open_requests(both))


@pytest.mark.parametrize("honest", ["crash", "other cause", "taken back", "exclusion"])
def test_unrelated_record_of_an_honest_user_does_not_confirm_invented_evidence(honest: str) -> None:
    at = 2 * DAY_S
    those: dict[str, list[Record]] = {
        # this crash counts as a failure of the infrastructure only because of eve's own findings
        "crash": [failed(at, "n1")],
        "other cause": [found(at, "n1", cause=Cause.FABRIC, detector="port_state")],
        "taken back": [found(at, "n1"), found(at + 5, "n1", verdict=found(0, "n1").verdict.OK)],
        "exclusion": [acted(at, "n1", "excluded")],
    }
    records = sourced(CARL, "c", began(0, "c", CARL), held(0, "n1"), those[honest], over(at + 60)) + invented("eve", 15)
    node = reports(records)["n1"]
    assert node.verdict == "WARN"
    assert not node.lemon.lemon
    assert not node.accused


@pytest.mark.parametrize("proof", [True, False])
def test_proof_of_one_user_accuses_the_node_if_the_sites_own_check_confirms_it(proof: bool) -> None:
    records = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), found(19 * DAY_S, "n1", proof=proof))
    assert reports(records)["n1"].verdict == "WARN"
    assert reports(records, n1=CHECKED)["n1"].verdict == ("FAIL" if proof else "WARN")


def test_record_of_root_accuses_alone_and_confirms_that_of_one_user() -> None:
    records = sourced("root", "r", began(0, "r", "root"), held(0, "n1"), found(19 * DAY_S, "n1"), trusted=True)
    assert reports(records)["n1"].verdict == "FAIL"
    weeks = [found(day * DAY_S, "n1", count=day) for day in range(1, 19)]
    fails = [failed(day * DAY_S + 5, "n1") for day in range(1, 19)]
    alone = sourced(ANNA, "s", began(0, "s", ANNA), held(0, "n1"), weeks, fails)
    assert not reports(alone)["n1"].lemon.lemon
    assert reports(alone + records)["n1"].lemon.lemon
