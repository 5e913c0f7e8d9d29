"""The metrics of one check, in the form that node_exporter's textfile collector reads for Prometheus."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rrl.core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from rrl.health.checks.xid_events import XidEvent
from rrl.health.node_metrics import MAX_FINDING_SERIES, NodeCheckResult, metrics, write_metrics

DOCS = Path(__file__).parents[3] / "docs"
ODD = 'a "path"\\with\nnewline é'


def finding(detector: str, verdict: Verdict, component: str = "") -> Finding:
    return Finding(detector, verdict, Cause.GPU, Remedy.REBOOT, 0.0, (Evidence("nvml", "x", 0.0),), component=component)


def result(*findings: Finding, drained: bool | None = True) -> NodeCheckResult:
    xids = (XidEvent("GPU-1", 79, 5.0), XidEvent("GPU-1", 79, 500.0), XidEvent("GPU-2", 48, 6.0))
    return NodeCheckResult(NodeName("n1"), Verdict.FAIL, findings, xids, 1_795_694_400.5, 2.5, drained)


FINDINGS = (
    finding("gpu_lost", Verdict.FAIL, ODD),
    finding("xid", Verdict.WARN),
    finding("disk", Verdict.OK),
    finding("dcgm_diag", Verdict.UNKNOWN),
)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_file_is_what_prometheus_reads_with_any_text_in_labels(tmp_path: Path) -> None:
    path = tmp_path / "rrl.prom"
    write_metrics(path, result(*FINDINGS))
    found = samples(path.read_text())
    assert all(("node", "n1") in labels for _, labels in found)
    of = {name: value for (name, labels), value in found.items() if len(labels) == 1}
    assert of == {
        "rrl_node_check_timestamp_seconds": 1_795_694_400.5,
        "rrl_node_check_duration_seconds": 2.5,
        "rrl_node_drained_by_hook": 1.0,
    }
    verdicts = {
        dict(labels)["verdict"]: value for (name, labels), value in found.items() if name == "rrl_node_check_verdict"
    }
    assert verdicts == {"OK": 0.0, "WARN": 0.0, "FAIL": 1.0, "UNKNOWN": 0.0}
    problems = [dict(labels) for name, labels in found if name == "rrl_node_findings"]
    assert {(one["detector"], one["verdict"], one["component"]) for one in problems} == {
        ("gpu_lost", "FAIL", ODD),
        ("xid", "WARN", ""),
    }
    xids = {
        (dict(labels)["gpu"], dict(labels)["code"]): value
        for (name, labels), value in found.items()
        if name == "rrl_node_xids"
    }
    assert xids == {("GPU-1", "79"): 2.0, ("GPU-2", "48"): 1.0}


def test_file_is_replaced_at_once_and_readable_by_the_exporter(tmp_path: Path) -> None:
    path = tmp_path / "rrl.prom"
    write_metrics(path, result(*FINDINGS))
    with path.open() as scraping:
        write_metrics(path, result())
        assert samples(scraping.read()) != samples(path.read_text())
    assert [one.name for one in tmp_path.iterdir()] == ["rrl.prom"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_links_that_another_user_has_left_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "rrl.prom"
    precious.write_text("kept")
    for name in (f".rrl.prom.{os.getpid()}", "rrl.prom"):
        (tmp_path / name).symlink_to(precious)
    write_metrics(path, result(*FINDINGS))
    assert precious.read_text() == "kept"
    assert path.is_file()
    assert not path.is_symlink()


def test_drain_is_left_out_where_it_is_unknown_and_findings_are_limited(tmp_path: Path) -> None:
    many = tuple(finding("mounts", Verdict.WARN, f"/{i}") for i in range(MAX_FINDING_SERIES + 50))
    names = [one.name for family in metrics(result(*many, drained=None)) for one in family.samples]
    assert "rrl_node_drained_by_hook" not in names
    assert names.count("rrl_node_findings") == MAX_FINDING_SERIES


def test_names_are_valid_and_documented(tmp_path: Path) -> None:
    page = (DOCS / "hooks.md").read_text()
    for family in metrics(result(*FINDINGS)):
        assert re.fullmatch(r"rrl_node_[a-z_]+[a-z]", family.name)
        assert not family.name.endswith(("_total", "_info"))  # suffixes of counters and of constants
        assert family.documentation.endswith(".")
        assert f"`{family.name}" in page


# ── dashboard ────────────────────────────────────────────────────────────────────────────────────────────────────────
def expressions(board: Any) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in board["templating"]["list"] if isinstance(one["query"], dict))


def test_dashboard_by_node_shows_every_metric_of_a_check() -> None:
    """tests/unit/manager/reporting/test_metrics.py tests that the dashboard's other metrics exist in a run."""
    board = json.loads((DOCS / "grafana-nodes.json").read_text())
    shown = {name for expr in expressions(board) for name in re.findall(r"\brrl_[a-z_]+", expr)}
    assert {one.name for family in metrics(result(*FINDINGS)) for one in family.samples} <= shown
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert board["uid"] != json.loads((DOCS / "grafana.json").read_text())["uid"]
