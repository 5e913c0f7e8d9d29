"""What the checks of a node found, as something to look at. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rrl.spec.words import WORST_FIRST, Finding, Remedy, Verdict

_COLOUR = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red", Verdict.UNKNOWN: "magenta"}
_TOLD = {
    Remedy.RESTART: "restart what runs there",
    Remedy.EXCLUDE: "use another node",
    Remedy.RESET_GPU: "reset the GPU",
    Remedy.REBOOT: "reboot the node",
    Remedy.DRAIN: "drain the node",
    Remedy.SUPPORT: "ask the administrators or the maker",
}


def headline(verdict: Verdict, findings: Sequence[Finding]) -> str:
    """One line for a drain's reason: the verdict and its first reason."""
    worst = next((finding for finding in findings if finding.verdict is verdict), None)
    if verdict is Verdict.OK or worst is None:
        return f"{verdict.value} {_tally(findings)}"
    return f"{verdict.value} {worst.detector}: {worst.evidence[0].text}"


def health_check_view(findings: Sequence[Finding]) -> RenderableType:
    """A line for each finding, the worst first; those that are well are one, those unknown for one reason too."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=19, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for verdict in WORST_FIRST:
        for name, told in _lines([one for one in findings if one.verdict is verdict], verdict):
            table.add_row(Text(verdict.value, _COLOUR[verdict]), name, told)
    return Group(Text(), table)


def _lines(findings: Sequence[Finding], verdict: Verdict) -> Iterator[tuple[Text, Text]]:
    if verdict in (Verdict.FAIL, Verdict.WARN):
        for finding in findings:
            told = Text("\n".join(evidence.text for evidence in finding.evidence))
            if finding.remedy in _TOLD:
                told.append(f"\n→ {_TOLD[finding.remedy]}", "cyan")
            yield Text(finding.detector), told
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
    """``18 checks; 21 not to be known here``"""
    well = sum(finding.verdict is Verdict.OK for finding in findings)
    unknown = sum(finding.verdict is Verdict.UNKNOWN for finding in findings)
    return f"{well} checks" + (f"; {unknown} not to be known here" if unknown else "")
