"""Drains that runs ask for, as something to look at. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rrl.cli.views.figures import span
from rrl.cli.views.health_report import whose
from rrl.health.drain_requests import Request
from rrl.health.report_values import DrainState


def requests_view(
    requests: Sequence[Request], drains: Mapping[str, DrainState], unknown: str, now: float
) -> RenderableType:
    if not requests:
        return Text("no run asks for a drain", "green")
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in requests:
        state = drains.get(one.node, DrainState())
        asked = f"asked for by {one.by}" if one.by else "; ".join(one.evidence) or one.reason
        table.add_row(Text(one.node, "bold"), Text(one.cause or "person", "red"), f"{span(now - one.at)} ago",
                      ",".join(one.users), Text(asked))  # fmt: skip
        if state.drained:
            table.add_row("", Text("drained", "yellow"), "", "", Text(whose(state)))
        elif state.booted > one.at:
            said = f"booted {span(now - state.booted)} ago, after it was asked for: repaired?"
            table.add_row("", Text("booted", "yellow"), "", "", Text(said))
        elif not one.accused:
            said = f"only records of {' and '.join(one.users)} say so: --apply has rrl health check there confirm it"
            table.add_row("", Text("alone", "yellow"), "", "", Text(said))
    note = [Text(f"which of them are drained is not known: {unknown}", "yellow")] if unknown else []
    return Group(table, *note)
