"""``rrl doctor``: show which parts of rrl work here, which do not, and how to fix them.

The command reads the facts, judges them by all checks in the order in which the checks are shown, and draws the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.types import Verdict
from ..common.output import print_json, show
from ..views.formatting import VERDICT_COLOUR
from .catalogue import GROUPS
from .collect import read_facts
from .facts import Check, DoctorOptions, Facts
from .host_checks import host_checks, storage_checks
from .node_checks import node_checks
from .node_probe.host import Unavailable
from .slurm_checks import slurm_checks


class DoctorReport(Struct, frozen=True):
    """The output of ``rrl doctor --json``."""

    checks: list[Check]
    facts: Facts
    """The facts that were read, from which the checks were judged."""


def judge(facts: Facts) -> list[Check]:
    """Return the checks of the facts, in the order in which they are shown. The function is pure.

    A check whose facts could not be read is UNKNOWN, never OK.
    """
    return [*host_checks(facts), *storage_checks(facts), *slurm_checks(facts), *node_checks(facts)]


NOT_ALLOWED = "no node was checked: you did not allow a job on a node"
_QUESTION = "Check a compute node too, with a job of 10 s (1 CPU, 512 MiB, a GPU if one is free)? [y/N] "


def doctor(wanted: DoctorOptions, *, consent: bool | None, json: bool) -> int:
    """Run the checks and print their results. Returns exit code 1 if a check fails, else 0.

    ``consent`` says whether a job may be started on a node. If it is None, the user is asked, but only if stdin and
    stdout are a terminal and ``json`` is False.
    """
    facts = gather_facts(wanted, consent=consent, interactive=not json)
    checks = judge(facts)
    if json:
        print_json(DoctorReport(checks, facts))
    else:
        show(doctor_view(checks))
    return int(any(check.verdict is Verdict.FAIL for check in checks))


def gather_facts(wanted: DoctorOptions, *, consent: bool | None, interactive: bool) -> Facts:
    """Collect all facts, including those of a compute node if the user allows a job on it.

    If ``consent`` is None, the user is asked, provided that ``interactive`` is True and stdin and stdout are a
    terminal. Without consent no job is started.
    """
    facts = read_facts(wanted)
    if facts.slurm is None:
        return facts
    if consent is None and interactive and sys.stdin.isatty() and sys.stdout.isatty():
        consent = _ask_consent()
    if not consent:
        return msgspec.structs.replace(facts, node=Unavailable(NOT_ALLOWED))
    from .node_visit import visit_node

    print("checking a compute node with a job ...", file=sys.stderr, flush=True)
    return msgspec.structs.replace(facts, node=visit_node(facts))


def _ask_consent() -> bool:
    try:
        return input(_QUESTION).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def doctor_view(checks: Sequence[Check]) -> RenderableType:
    """Return the view of the checks: one line for each, and below it the fix.

    Unknown checks with the same reason share a line.
    """
    parts: list[RenderableType] = []
    for group, members in groupby(checks, lambda check: check.name.partition(".")[0]):
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=7, no_wrap=True)
        table.add_column(width=10, no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for verdict, name, found in _check_lines(list(members)):
            table.add_row(verdict, name, found)
        parts += [Text(GROUPS[group], "bold"), table, Text()]
    return Group(*parts, Text(tally(checks)))


def tally(checks: Sequence[Check]) -> str:
    """Return the number of checks by verdict, as ``24 OK, 3 WARN, 0 FAIL, 15 UNKNOWN``."""
    return ", ".join(f"{sum(check.verdict is one for check in checks)} {one.value}" for one in Verdict)


def _group_key(check: Check) -> tuple[Verdict, str, str, str]:
    """Return a key that is equal for checks that are drawn as one line: unknown checks with the same reason."""
    return check.verdict, check.found, check.fix, "" if check.verdict is Verdict.UNKNOWN else check.name


def _check_lines(checks: Sequence[Check]) -> Iterator[tuple[Text, Text, Text]]:
    for (verdict, found, fix, _), members in groupby(checks, _group_key):
        names = [check.name.partition(".")[2] for check in members]
        text = Text(found if len(names) == 1 else f"{found} ({', '.join(names)})")
        if fix:
            text.append(f"\n→ {fix}", "cyan")
        yield (
            Text(verdict.value, VERDICT_COLOUR[verdict]),
            Text(names[0] if len(names) == 1 else f"{len(names)} checks"),
            text,
        )
