"""The findings of a node's own checks in the history: which of them are recorded, and in which file.

The tests at the end are about these findings in a report.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rrl.core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from rrl.health.history import check_records
from rrl.health.history.cache import HistoryCache
from rrl.health.history.check_records import REPEAT_INTERVAL_S, Standing, changes, record_findings
from rrl.health.history.own_folder import open_file, user_name
from rrl.health.history.records import FindingRecord, NodeChecks, Record, read_line
from rrl.health.report.site import report

N1 = NodeName("n1")
NOON = 1_795_694_400.0
"""The time 2026-11-26 12:00 UTC."""
FILE = "health-check.n1.202611.jsonl"


def finding(
    detector: str = "xid", verdict: Verdict = Verdict.FAIL, component: str = "GPU-1", cause: Cause = Cause.GPU
) -> Finding:
    return Finding(
        detector,
        verdict,
        cause,
        Remedy.REBOOT,
        NOON,
        (Evidence("kernel", "Xid 79", NOON),),
        node=N1,
        component=component,
        proof=True,
    )


def passed(detector: str = "xid") -> Finding:
    return Finding(detector, Verdict.OK, Cause.NODE, Remedy.NONE, NOON, (), node=N1)


def unknown(detector: str = "xid") -> Finding:
    return Finding(detector, Verdict.UNKNOWN, Cause.NODE, Remedy.NONE, NOON, (), node=N1)


def verdicts(records: list[FindingRecord]) -> list[tuple[str, str]]:
    return [(record.component, record.verdict.value) for record in records]


# ── recorded findings ────────────────────────────────────────────────────────────────────────────────────────────────
def test_finding_is_recorded_when_it_appears_each_hour_and_when_it_clears() -> None:
    records, standing = changes((), [finding()], N1, NOON)
    assert verdicts(records) == [("GPU-1", "FAIL")]
    records, standing = changes(standing, [finding()], N1, NOON + 300)
    assert records == []
    records, standing = changes(standing, [finding()], N1, NOON + REPEAT_INTERVAL_S)
    assert [record.count for record in records] == [2]
    records, standing = changes(standing, [passed()], N1, NOON + REPEAT_INTERVAL_S + 300)
    assert (verdicts(records), standing) == ([("GPU-1", "OK")], ())


def test_component_that_is_not_found_again_clears_while_another_still_fails() -> None:
    _, standing = changes((), [finding(), finding(component="GPU-2")], N1, NOON)
    records, standing = changes(standing, [finding(component="GPU-2")], N1, NOON + 300)
    assert verdicts(records) == [("GPU-1", "OK")]
    assert [one.component for one in standing] == ["GPU-2"]


@pytest.mark.parametrize("result", [[unknown()], [passed("mounts")], [], [finding(component="GPU-2"), unknown()]])
def test_check_that_could_not_be_made_clears_nothing(result: list[Finding]) -> None:
    _, standing = changes((), [finding()], N1, NOON)
    records, after = changes(standing, result, N1, NOON + 300)
    assert ("GPU-1", "OK") not in verdicts(records)
    assert standing[0] in after


def test_failure_that_a_user_caused_is_recorded_as_a_warning() -> None:
    records, _ = changes((), [finding("gpu_memory", cause=Cause.USER)], N1, NOON)
    assert verdicts(records) == [("GPU-1", "WARN")]


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def records_in(history: Path, name: str = FILE) -> list[Record | None]:
    return [read_line(line) for line in (history / user_name() / name).read_bytes().splitlines()]


def test_each_node_has_a_file_for_each_month_and_none_without_findings(tmp_path: Path) -> None:
    standing = record_findings(tmp_path, N1, [passed()], (), NOON)
    assert list(tmp_path.iterdir()) == []
    standing = record_findings(tmp_path, N1, [finding()], standing, NOON)
    record_findings(tmp_path, N1, [finding()], standing, NOON + 31 * 86400)
    record_findings(tmp_path, NodeName("n2"), [finding()], (), NOON)
    names = sorted(path.name for path in (tmp_path / user_name()).iterdir())
    assert names == [FILE, "health-check.n1.202612.jsonl", "health-check.n2.202611.jsonl"]
    header, record = records_in(tmp_path)
    assert header == NodeChecks(NOON, "n1", user_name())
    assert isinstance(record, FindingRecord)
    path = tmp_path / user_name() / FILE
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o644, 0o755)


def test_after_a_boot_the_standing_findings_are_read_from_the_history(tmp_path: Path) -> None:
    record_findings(tmp_path, N1, [finding(), finding(component="GPU-2")], (), NOON)
    record_findings(tmp_path, N1, [finding()], None, NOON + 300)
    assert record_findings(tmp_path, N1, [passed()], None, NOON + 600) == ()
    assert [record.component for record in records_in(tmp_path)[3:] if isinstance(record, FindingRecord)] == [
        "GPU-2",
        "GPU-1",
    ]


def test_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    record_findings(tmp_path, N1, [finding()], (), NOON)
    with (tmp_path / user_name() / FILE).open("ab") as file:
        file.write(b'{"kind":"find')
    record_findings(tmp_path, N1, [finding(component="GPU-2")], (), NOON + 1)
    found = records_in(tmp_path)
    assert [type(record).__name__ for record in found] == ["NodeChecks", "FindingRecord", "NoneType", "FindingRecord"]


def test_full_file_takes_no_further_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_findings(tmp_path, N1, [finding()], (), NOON)
    monkeypatch.setattr(check_records, "MAX_FILE_BYTES", 500)
    with pytest.raises(OSError, match="a report reads no more"):
        record_findings(tmp_path, N1, [finding(component="GPU-2")], (), NOON + 1)


def test_missing_history_is_an_error_and_is_not_created(tmp_path: Path) -> None:
    for standing in ((), None):
        with pytest.raises(FileNotFoundError):
            record_findings(tmp_path / "history", N1, [finding()], standing, NOON)
    assert not (tmp_path / "history").exists()


@pytest.mark.parametrize("planted", ["folder", "file"])
def test_link_that_another_user_planted_is_not_followed(tmp_path: Path, planted: str) -> None:
    history, victim = tmp_path / "history", tmp_path / "victim"
    history.mkdir()
    victim.mkdir()
    if planted == "folder":
        (history / user_name()).symlink_to(victim)
    else:
        (history / user_name()).mkdir()
        (history / user_name() / FILE).symlink_to(victim / "cron")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        record_findings(history, N1, [finding()], (), NOON)
    assert list(victim.iterdir()) == []


if os.geteuid() == 0:  # only root can give a folder to another user

    def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
        (tmp_path / user_name()).mkdir()
        os.chown(tmp_path / user_name(), 65534, -1)
        with pytest.raises(OSError, match="belongs to another user"):
            open_file(tmp_path, FILE)

    def test_storage_that_maps_root_to_another_user_keeps_no_folder_of_that_user(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        really = os.open

        def squashed(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_DIRECTORY:
                os.chown(path, 65534, -1)
            return really(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", squashed)
        with pytest.raises(OSError, match="the storage gives the folder of root to another user"):
            open_file(tmp_path, FILE)
        assert list(tmp_path.iterdir()) == []


# ── in the report ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_report_shows_a_node_that_no_run_used_and_counts_no_run(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    record_findings(history, N1, [finding()], (), NOON)
    cache = HistoryCache([history], tmp_path / "cache.sqlite")
    assert cache.refresh().skipped == 0
    made = report(cache.records(NOON - 86400), NOON - 86400, NOON + 60)
    cache.close()
    (node,) = made.nodes
    assert (node.node, node.detectors, node.runs) == ("n1", ["xid"], ["health-check.n1"])
    assert (made.site.runs, made.site.users, made.site.node_days, made.site.failures) == (0, 0, 0.0, 0)
    trusted = os.geteuid() == 0
    assert node.verdict == ("FAIL" if trusted else "WARN"), (
        "only records of root may fail a node without the evidence of another user"
    )
    assert bool(node.scontrol) == trusted


def test_records_of_a_node_do_not_belong_to_another_nodes_file(tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.mkdir()
    record_findings(history, N1, [finding()], (), NOON)
    folder = history / user_name()
    (folder / FILE).rename(folder / "health-check.n2.202611.jsonl")
    cache = HistoryCache([history], tmp_path / "cache.sqlite")
    assert cache.refresh().skipped == 1
    cache.close()


def test_standing_finding_is_not_repeated_within_the_hour_after_a_boot(tmp_path: Path) -> None:
    (standing,) = record_findings(tmp_path, N1, [finding()], (), NOON)
    assert record_findings(tmp_path, N1, [finding()], None, NOON + 60) == (
        Standing("xid", "GPU-1", Verdict.FAIL, Cause.GPU, standing.at, 1),
    )
    assert len(records_in(tmp_path)) == 2
