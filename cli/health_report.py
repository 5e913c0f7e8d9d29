"""``rrl health report``: how nodes and site have been doing, from the histories of all runs."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from msgspec import Struct
from rich.console import Console

from rrl.cli import node_drains
from rrl.cli.asking import BadInput, Failed
from rrl.cli.histories import read, warn, without_impossible
from rrl.cli.moments import moment
from rrl.cli.screen import PLAIN_WIDTH, Escaped, show
from rrl.cli.views.figures import folded
from rrl.cli.views.health_report import report_view, to_paste
from rrl.health import lemons
from rrl.health.history import is_node
from rrl.health.history_cache import Sources
from rrl.health.report import report as make_report
from rrl.health.report_values import DrainState, Report
from rrl.spec.rundir import write_atomically
from rrl.spec.screen_text import escaped_json

FORMATS = ("table", "json", "html")
MOST_NODES = 100_000
"""that a list may name"""
_now = time.time
READABLE = 0o644
"""a report is made to be passed on"""


class Document(Struct, frozen=True):
    """The JSON: the report, and what it is made from."""

    report: Report
    sources: Sources
    drains_unknown: str
    """why the cluster was not asked for drains; empty: it was"""


def report(since: str, nodes: str | None, format: str, history: Sequence[Path], output: Path | None) -> int:
    """Exit code 0 whatever is said in it; 2 where there is no history."""
    if format not in FORMATS:
        raise BadInput(f'--format "{format}" is none; there are {", ".join(FORMATS)}')
    only = _only(nodes)
    now = _now()
    begin = max(0.0, moment(since, now))
    if begin >= now:
        raise BadInput(f'--since "{since}" is not in the past: there is nothing to tell')
    told, sources = read(history, min(begin, now - lemons.WINDOW))
    named = {getattr(one.record, "node", "") for one in told} - {""}
    drains, unknown = _drains(sorted(named if only is None else named & only))
    told, sources = without_impossible(told, sources, now, drains)
    whole = make_report(told, begin, now, drains, only)
    warn(sources)
    if unheard := sorted((only or frozenset()) - {one.node for one in whole.nodes}):
        print(f"rrl: nothing is known of {folded(unheard)}: no run had it in this time", file=sys.stderr)
    _put(Document(whole, sources, unknown), format, output)
    return 0


def _drains(nodes: list[str]) -> tuple[dict[str, DrainState], str]:
    try:
        return (node_drains.look(nodes) if nodes else {}), ""
    except node_drains.NotAsked as error:
        return {}, str(error)


def _only(nodes: str | None) -> frozenset[str] | None:
    if nodes is None:
        return None
    named: list[str] = []
    spans = [int(last) - int(first) + 1 for first, last in re.findall(r"(\d{1,20})-(\d{1,20})", nodes)]
    if math.prod(spans) <= MOST_NODES and max(spans, default=1) <= MOST_NODES:  # ClusterShell would expand it first
        with contextlib.suppress(NodeSetException):
            named = list(NodeSet(nodes, resolver=RESOLVER_NOGROUP))
    if not named or not all(is_node(name) for name in named):
        raise BadInput(f'--node "{nodes}" names no nodes; write for example n12 or n[1-8]')
    return frozenset(named)


def _put(document: Document, format: str, output: Path | None) -> None:
    """A table is as wide as the terminal that it goes to."""
    if format == "table" and output is None:
        show(report_view(document.report, document.sources, document.drains_unknown))
        sys.stdout.write(to_paste(document.report))
        return
    text = _rendered(document, format)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        write_atomically(output, text.encode(), READABLE)
    except OSError as error:
        raise Failed(f"{output}: {error.strerror}") from None


def _rendered(document: Document, format: str) -> str:
    if format == "json":
        return escaped_json(msgspec.json.format(msgspec.json.encode(document), indent=2).decode()) + "\n"
    if format == "html":
        from rrl.cli.views.health_html import page

        return page(document.report, document.sources, document.drains_unknown)
    screen = Console(file=io.StringIO(), width=PLAIN_WIDTH, markup=False, highlight=False, emoji=False)
    with screen.capture() as captured:
        screen.print(Escaped(report_view(document.report, document.sources, document.drains_unknown)))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()) + to_paste(document.report)
