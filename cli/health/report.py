"""``rrl health report``: report on the health of nodes and site, from the histories of all runs."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from ...cluster.base import Refused, Unanswered
from ...core.run_dir import HISTORY_ENV, errors_about, write_atomically
from ...core.types import UsageError
from ...health.history import rates
from ...health.history.cache import HistoryCache, Sources
from ...health.history.plausibility import plausible
from ...health.history.records import SourcedRecord, is_node
from ...health.report.model import DrainState, Report
from ...health.report.site import report as make_report
from ..common.output import PLAIN_WIDTH, Escaped, json_document, parse_time, print_line, show
from ..views.formatting import folded
from ..views.health.health_report import report_view, to_paste
from . import node_drains

NO_HISTORY_MESSAGE = (
    f"no history folder is named: name it with --history DIR or {HISTORY_ENV}=DIR. A run records its history with"
    f" [health] history = DIR in its job.toml, or with {HISTORY_ENV}=DIR in the environment of rrl submit"
)


def read_records(folders: Sequence[Path], since: float) -> tuple[list[SourcedRecord], Sources]:
    """Return the records from ``since`` (s since 1970) on, and counts of the files and records that were read.

    Raises UsageError if there is no history or it cannot be read.
    """
    named = list(folders) or [Path(one) for one in os.environ.get(HISTORY_ENV, "").split(os.pathsep) if one]
    if not named:
        raise UsageError(NO_HISTORY_MESSAGE)
    existing = [folder.expanduser() for folder in named]
    for folder in existing:
        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; name the folder in which the runs of this site record their history"
            )
    cache = HistoryCache(existing)
    try:
        sources = cache.refresh()
        return cache.records(since), sources
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    finally:
        cache.close()


def without_implausible(
    records: Sequence[SourcedRecord], sources: Sources, now: float, drains: Mapping[str, DrainState]
) -> tuple[list[SourcedRecord], Sources]:
    """Return the plausible records, and ``sources`` with lines that count the other records by user and reason.

    Args:
        records: The records.
        sources: The counts of the files and records that were read.
        now: Time (s since 1970). Records that cannot be true at this time are not plausible.
        drains: The drain state of each node that Slurm knows. It contains the node's number of GPUs, with which the
            records about the node must be compatible.
    """
    plausible_records, left_out = plausible(
        records, now, {node: one.gpus for node, one in drains.items() if one.gpus is not None}
    )
    return plausible_records, replace(sources, left_out=left_out)


def warn(sources: Sources) -> None:
    """Print a line to stderr for each rejected file, each group of left-out records, and the skipped lines."""
    for what, lines in (("not read", sources.refused), ("left out", sources.left_out)):
        if lines:
            more = f" (and {len(lines) - 1} more; --format json shows all)" if len(lines) > 1 else ""
            print_line(f"rrl: {what}: {lines[0]}{more}", to_stderr=True)
    if sources.skipped:
        print(f"rrl: {sources.skipped} lines were skipped: damaged, or of another version", file=sys.stderr)


FORMATS = ("table", "json", "html")
MAX_LISTED_NODES = 100_000
"""Maximum number of nodes in a list given by the user."""
_now = time.time
REPORT_FILE_MODE = 0o644
"""Mode of the report file: readable by all, since a report is made to be passed on."""


class Document(Struct, frozen=True):
    """The JSON document: the report and its sources."""

    report: Report
    sources: Sources
    drains_unknown: str
    """Why the cluster was not queried for drains; empty if it was queried."""


def report(since: str, nodes: str | None, format: str, history: Sequence[Path], output: Path | None) -> int:
    """Print the health report, or write it to ``output``. Always returns exit code 0.

    Raises UsageError if there is no history, or an argument is not valid.
    """
    if format not in FORMATS:
        raise UsageError(f'--format "{format}" does not exist; the formats are {", ".join(FORMATS)}')
    only = _selected_nodes(nodes)
    now = _now()
    begin = max(0.0, parse_time(since, now))
    if begin >= now:
        raise UsageError(f'--since "{since}" is not in the past: there is nothing to report')
    records, sources = read_records(history, min(begin, now - rates.LEMON_WINDOW_S))
    named = {getattr(one.record, "node", "") for one in records} - {""}
    drains, unknown = _drains(sorted(named if only is None else named & only))
    records, sources = without_implausible(records, sources, now, drains)
    whole = make_report(records, begin, now, drains, only)
    warn(sources)
    if nodes_without_records := sorted((only or frozenset()) - {one.node for one in whole.nodes}):
        print(
            f"rrl: nothing is known about {folded(nodes_without_records)}: no run used them in this time",
            file=sys.stderr,
        )
    _write(Document(whole, sources, unknown), format, output)
    return 0


def _drains(nodes: list[str]) -> tuple[dict[str, DrainState], str]:
    try:
        return (node_drains.drain_states(set(nodes)) if nodes else {}), ""
    except (Refused, Unanswered) as error:
        return {}, str(error)


def _selected_nodes(nodes: str | None) -> frozenset[str] | None:
    if nodes is None:
        return None
    named: list[str] = []
    spans = [int(last) - int(first) + 1 for first, last in re.findall(r"(\d{1,20})-(\d{1,20})", nodes)]
    if (
        math.prod(spans) <= MAX_LISTED_NODES and max(spans, default=1) <= MAX_LISTED_NODES
    ):  # else ClusterShell would expand a huge list
        with contextlib.suppress(NodeSetException):
            named = list(NodeSet(nodes, resolver=RESOLVER_NOGROUP))
    if not named or not all(is_node(name) for name in named):
        raise UsageError(f'--node "{nodes}" names no nodes; write for example n12 or n[1-8]')
    return frozenset(named)


def _write(document: Document, format: str, output: Path | None) -> None:
    """Write the report to ``output``, or print it; a printed table is as wide as the terminal."""
    if format == "table" and output is None:
        show(report_view(document.report, document.sources, document.drains_unknown))
        sys.stdout.write(to_paste(document.report))
        return
    text = _rendered(document, format)
    if output is None:
        sys.stdout.write(text)
        return
    with errors_about(output):
        write_atomically(output, text.encode(), REPORT_FILE_MODE)


def _rendered(document: Document, format: str) -> str:
    if format == "json":
        return json_document(document)
    if format == "html":
        from ..views.health.health_page import page

        return page(document.report, document.sources, document.drains_unknown)
    screen = Console(file=io.StringIO(), width=PLAIN_WIDTH, markup=False, highlight=False, emoji=False)
    with screen.capture() as captured:
        screen.print(Escaped(report_view(document.report, document.sources, document.drains_unknown)))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()) + to_paste(document.report)
