"""Render the results of node checks and ``rrl doctor``, and the drains that runs request. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.text import span
from ...core.types import WORST_FIRST, Finding, Remedy, Verdict
from ...health.report.drain_requests import DrainRequest
from ...health.report.model import DrainState
from .formatting import VERDICT_COLOUR, grid
from .health.health_report import drain_text

_REMEDY_TEXT = {
    Remedy.RESTART: "restart what runs there",
    Remedy.EXCLUDE: "use another node",
    Remedy.RESET_GPU: "reset the GPU",
    Remedy.REBOOT: "reboot the node",
    Remedy.DRAIN: "drain the node",
    Remedy.SUPPORT: "ask the administrators or the vendor",
}


def headline(verdict: Verdict, findings: Sequence[Finding]) -> str:
    """Return one line for a drain's reason: the verdict and the first finding with this verdict.

    If there is no such finding, or the verdict is OK, the line gives the verdict and the number of checks.
    """
    worst = next((finding for finding in findings if finding.verdict is verdict), None)
    if verdict is Verdict.OK or worst is None:
        return f"{verdict.value} {_tally(findings)}"
    return f"{verdict.value} {worst.detector}: {worst.evidence[0].text}"


def health_check_view(findings: Sequence[Finding]) -> RenderableType:
    """Return one line for each finding, the most severe first.

    Passed checks share a line, and so do checks with the verdict UNKNOWN and the same reason.
    """
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=19, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for verdict in WORST_FIRST:
        for name, text in _finding_lines([one for one in findings if one.verdict is verdict], verdict):
            table.add_row(Text(verdict.value, VERDICT_COLOUR[verdict]), name, text)
    return Group(Text(), table)


def _finding_lines(findings: Sequence[Finding], verdict: Verdict) -> Iterator[tuple[Text, Text]]:
    if verdict in (Verdict.FAIL, Verdict.WARN):
        for finding in findings:
            text = Text("\n".join(evidence.text for evidence in finding.evidence))
            if finding.remedy in _REMEDY_TEXT:
                text.append(f"\n→ {_REMEDY_TEXT[finding.remedy]}", "cyan")
            yield Text(finding.detector), text
        return
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        why = "" if verdict is Verdict.OK else "; ".join(evidence.text for evidence in finding.evidence)
        reasons.setdefault(why, []).append(finding.detector)
    for why, names in reasons.items():
        if len(names) == 1:
            yield Text(names[0]), Text(why or "nothing wrong")
        else:
            listed = ", ".join(names)
            yield Text(f"{len(names)} checks"), Text(f"{why} ({listed})" if why else listed)


def _tally(findings: Sequence[Finding]) -> str:
    """Return the numbers of passed and of unknown checks, as ``18 checks; 21 unknown here``."""
    well = sum(finding.verdict is Verdict.OK for finding in findings)
    unknown = sum(finding.verdict is Verdict.UNKNOWN for finding in findings)
    return f"{well} checks" + (f"; {unknown} unknown here" if unknown else "")


def requests_view(
    requests: Sequence[DrainRequest], drains: Mapping[str, DrainState], unknown: str, now: float
) -> RenderableType:
    """Return the drain requests as a table."""
    if not requests:
        return Text("no run requests a drain", "green")
    table = grid("none", "none", "none", "none")
    for one in requests:
        state = drains.get(one.node, DrainState())
        request_text = f"requested by {one.requested_by}" if one.requested_by else "; ".join(one.evidence) or one.reason
        table.add_row(
            Text(one.node, "bold"),
            Text(one.cause or "person", "red"),
            f"{span(now - one.at)} ago",
            ",".join(one.users),
            Text(request_text),
        )
        if state.drained:
            table.add_row("", Text("drained", "yellow"), "", "", Text(drain_text(state)))
        elif state.booted > one.at:
            remark = f"booted {span(now - state.booted)} ago, after the drain was requested: repaired?"
            table.add_row("", Text("booted", "yellow"), "", "", Text(remark))
        elif not one.accused:
            users = " and ".join(one.users)
            remark = f"only records of {users}: --apply drains it only if rrl health check there confirms them"
            table.add_row("", Text("alone", "yellow"), "", "", Text(remark))
    note = [Text(f"it is unknown which of these nodes are drained: {unknown}", "yellow")] if unknown else []
    return Group(table, *note)
