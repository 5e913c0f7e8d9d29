"""What the doctor found, as something to look at. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rrl.cli.doctor.facts import Check
from rrl.cli.doctor.meanings import GROUPS
from rrl.spec.words import Verdict

_COLOUR = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red", Verdict.UNKNOWN: "magenta"}


def doctor_view(checks: Sequence[Check]) -> RenderableType:
    """One line for each check, and one below it for what to do. Those that are unknown for one reason are one line."""
    parts: list[RenderableType] = []
    for group, members in groupby(checks, lambda check: check.name.partition(".")[0]):
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=7, no_wrap=True)
        table.add_column(width=10, no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for verdict, name, found in _lines(list(members)):
            table.add_row(verdict, name, found)
        parts += [Text(GROUPS[group], "bold"), table, Text()]
    return Group(*parts, Text(tally(checks)))


def tally(checks: Sequence[Check]) -> str:
    """``24 OK, 3 WARN, 0 FAIL, 15 UNKNOWN``"""
    return ", ".join(f"{sum(check.verdict is one for check in checks)} {one.value}" for one in Verdict)


def _said(check: Check) -> tuple[Verdict, str, str, str]:
    """What lines that are drawn as one have in common: only what is unknown has the same reason again and again."""
    return check.verdict, check.found, check.fix, "" if check.verdict is Verdict.UNKNOWN else check.name


def _lines(checks: Sequence[Check]) -> Iterator[tuple[Text, Text, Text]]:
    for (verdict, found, fix, _), same in groupby(checks, _said):
        names = [check.name.partition(".")[2] for check in same]
        told = Text(found if len(names) == 1 else f"{found} ({', '.join(names)})")
        if fix:
            told.append(f"\n→ {fix}", "cyan")
        yield Text(verdict.value, _COLOUR[verdict]), Text(names[0] if len(names) == 1 else f"{len(names)} checks"), told
