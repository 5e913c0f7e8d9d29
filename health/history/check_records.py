"""Records of a node's own checks (``rrl health check --record``), which need no run.

``<history>/<user>/health-check.<node>.<month>.jsonl`` is one file per node and month (such as 202611), so that old
files can be removed. A prolog, an epilog and the HealthCheckProgram of one node append to it. A line is written only
when a finding appears, changes or clears, and every :data:`REPEAT_INTERVAL_S` for a standing finding. A node without
findings has no file. The records count as the node's own only if root owns the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from ...core.types import Cause, Finding, NodeName, Remedy, Verdict
from .incidents import HARDWARE_CAUSES
from .own_folder import open_file, user_name
from .records import (
    CHECK_RUN_PREFIX,
    MAX_EVIDENCE_LINES,
    MAX_FILE_BYTES,
    EvidenceLine,
    FindingRecord,
    NodeChecks,
    Record,
    clipped,
    encode_line,
    file_name,
    parse_file_name,
    read_line,
)

REPEAT_INTERVAL_S = 3600.0
"""Seconds after which a standing finding is recorded again (a run records it again after ten minutes)."""
RAISED = (Verdict.WARN, Verdict.FAIL)
_NEWEST_FILES = 2
"""Number of a node's files that are read to find its standing findings: the files of this month and of the month
before."""


class Standing(Struct, frozen=True):
    """A finding that was recorded and has not cleared."""

    detector: str
    component: str
    verdict: Verdict
    cause: Cause
    at: float
    """Time of the newest record (s since 1970)."""
    count: int


def record_findings(
    history: Path, node: NodeName, findings: Sequence[Finding], standing: Sequence[Standing] | None, at: float
) -> tuple[Standing, ...]:
    """Append the changes of findings to the node's file in ``history``, and return the standing findings.

    Blocks for as long as the storage does not answer. The storage is not touched if nothing has changed.

    Args:
        history: Folder of the site's history.
        node: Name of this node.
        findings: All findings of a check, with times in s since 1970.
        standing: Standing findings after the last record; None if they are unknown, so that they are read from the
            history.
        at: Time of the check (s since 1970).

    Raises:
        OSError: The history cannot be read or written.
    """
    if standing is None:
        standing = _read_standing(history, node)
    records, after = changes(standing, findings, node, at)
    if records:
        _append(history, node, records, at)
    return after


def changes(
    standing: Sequence[Standing], findings: Sequence[Finding], node: NodeName, at: float
) -> tuple[list[FindingRecord], tuple[Standing, ...]]:
    """Return the records of a check's ``findings``, and the findings that stand after the check.

    A standing finding clears if its check was made, reports nothing as unknown, and does not find it again.
    """
    before = {(one.detector, one.component): one for one in standing}
    raised = {(one.detector, one.component): one for one in findings if one.verdict in RAISED}
    unknown = {one.detector for one in findings if one.verdict is Verdict.UNKNOWN}
    judged = {one.detector for one in findings} - unknown
    records: list[FindingRecord] = []
    after: list[Standing] = []
    for key, finding in raised.items():
        verdict, earlier = _recorded_verdict(finding), before.get(key)
        if earlier is not None and earlier.verdict is verdict and at < earlier.at + REPEAT_INTERVAL_S:
            after.append(earlier)
            continue
        count = 1 if earlier is None else earlier.count + 1
        records.append(_record(finding, verdict, node, at, count))
        after.append(Standing(finding.detector, finding.component, verdict, finding.cause, at, count))
    for key, one in before.items():
        if key in raised:
            continue
        if one.detector in judged:
            records.append(
                FindingRecord(at, node, one.detector, Verdict.OK, one.cause, Remedy.NONE, at, component=one.component)
            )
        else:
            after.append(one)
    return records, tuple(after)


def _recorded_verdict(finding: Finding) -> Verdict:
    """Return the verdict with which the history records a WARN or FAIL: a FAIL only if its cause is hardware.

    A FAIL with any other cause, such as a user or software, is recorded as WARN.
    """
    return Verdict.WARN if finding.cause not in HARDWARE_CAUSES else finding.verdict


def _record(finding: Finding, verdict: Verdict, node: NodeName, at: float, count: int) -> FindingRecord:
    evidence = tuple(
        EvidenceLine(line.at, clipped(line.source), clipped(line.text))
        for line in finding.evidence[:MAX_EVIDENCE_LINES]
    )
    return FindingRecord(
        at,
        node,
        finding.detector,
        verdict,
        finding.cause,
        finding.remedy,
        finding.since,
        "",
        clipped(finding.component),
        finding.proof,
        count,
        evidence,
        False,
        finding.flags,
    )


def _read_standing(history: Path, node: NodeName) -> tuple[Standing, ...]:
    run, standing = f"{CHECK_RUN_PREFIX}{node}", dict[tuple[str, str], Standing]()
    folder = history / user_name()
    if not history.is_dir():
        raise FileNotFoundError(2, "No such file or directory", str(history))
    names = os.listdir(folder) if folder.is_dir() else []
    own = sorted(name for name in names if (parsed := parse_file_name(name)) is not None and parsed[0] == run)
    for record in (record for name in own[-_NEWEST_FILES:] for record in _read(history, name)):
        if isinstance(record, FindingRecord):
            key = record.detector, record.component
            standing.pop(key, None)
            if record.verdict in RAISED:
                standing[key] = Standing(*key, record.verdict, record.cause, record.at, record.count)
    return tuple(standing.values())


def _read(history: Path, name: str) -> Iterable[Record]:
    with open(open_file(history, name), "rb") as file:
        for line in file.read(MAX_FILE_BYTES).splitlines():
            if (record := read_line(line)) is not None:
                yield record


def _append(history: Path, node: NodeName, records: Sequence[Record], at: float) -> None:
    month = int(datetime.fromtimestamp(at, UTC).strftime("%Y%m"))
    fd = open_file(history, file_name(f"{CHECK_RUN_PREFIX}{node}", month))
    try:
        size = os.fstat(fd).st_size
        header = [] if size else [NodeChecks(at, node, user_name())]
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # an earlier write was cut off
        data = (b"\n" if torn else b"") + b"".join(map(encode_line, (*header, *records)))
        if size + len(data) > MAX_FILE_BYTES:
            raise OSError(0, f"the file of {node} has {size} bytes, and a report reads no more than {MAX_FILE_BYTES}")
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
