"""Render one replica and one node of a run, and the rows of the tables of both. The functions are pure.

``rrl status`` shows replicas and nodes of a run together; each of these views shows everything about one replica or
node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ....api.watching.run_state import Failures
from ....core.phases import ClockReading
from ....core.text import span
from ....core.types import Finding, NodeName, Verdict, natural_sort_key
from ....manager.model.queries import gang
from ....manager.model.state import Node, Replica, State
from ...views.formatting import VERDICT_COLOUR, grid, labelled
from ...views.pace import delta_figures, percent
from ...views.replicas import REPLICA_COLUMNS, bounded, doing, replica_cells
from ...views.status import gpu_use_text, is_of_pool, node_trouble
from .widgets.list_table import SortKey, TableRow, by_number, by_text

NODE_COLUMNS = ("node", "state", "replicas", "gpus", "")
"""Headings of the table of nodes; the last column says why the run does not use a node."""
MAX_FAILURES = 10
"""Number of failures of a replica that are shown; ``rrl explain`` has all of them."""


# ── rows of the tables ───────────────────────────────────────────────────────────────────────────────────────────────
def replica_rows(state: State, now: float, failures: Failures) -> list[TableRow]:
    """Return a row for each replica of a run."""
    return [_replica_row(state, replica, now, failures) for replica in (*state.workers, *state.guests)]


def _replica_row(state: State, replica: Replica, now: float, failures: Failures) -> TableRow:
    cells = replica_cells(state, replica, now, failures)
    does, version = doing(state, replica, now, failures), replica.weight_version
    keys = (
        by_name(replica.id),
        by_number(replica.incarnation_number),
        by_name(replica.node or ""),
        by_text(does.word),
        by_number(now - does.since),
        by_number(None if version is None else version.step),
        by_text(cells[-1].plain),
    )
    assert len(keys) == len(cells) == len(REPLICA_COLUMNS)
    return TableRow(replica.id, cells, keys)


def node_rows(state: State, now: float) -> list[TableRow]:
    """Return a row for each node that a run holds, or has left and must not use again."""
    return [_node_row(state, state.nodes[name], now) for name in sorted(state.nodes, key=natural_sort_key)]


def _node_row(state: State, node: Node, now: float) -> TableRow:
    replicas, use = replicas_on(state, node.name), state.gpu_use.get(node.name)
    word, colour = _node_word(state, node)
    findings = [one for one in state.findings.values() if one.node == node.name]
    why = node.excluded or "; ".join(f"{one.verdict.value} {one.title}" for one in findings)
    gpus = "" if use is None else gpu_use_text(use)
    names = ", ".join(one.id for one in replicas)
    cells = (Text(node.name), Text(word, colour), Text(names or "–"), Text(gpus or "–"), Text(why, colour))
    busy = None if use is None else use.busy
    keys = (by_name(node.name), by_text(word), by_number(-len(replicas)), by_number(busy), by_text(why))
    return TableRow(node.name, cells, keys)


def by_name(name: str) -> SortKey:
    """Return the sort key of the name of a replica or node: numbers in it are compared by value."""
    return by_text("".join(f"{number:012}{text}" for number, text in natural_sort_key(name)))


def replicas_on(state: State, node: NodeName) -> list[Replica]:
    """Return the current members of roles that run on a node, or are being started on it."""
    return [one for one in state.workers if one.is_current and one.node == node]


def _node_word(state: State, node: Node) -> tuple[str, str]:
    """Return the state of a node in a word, and its colour."""
    if trouble := node_trouble(node):
        return trouble, "red"
    if node.name in state.node_commands:
        return f"{state.node_commands[node.name][0]}ing", "yellow"
    if any(one.node == node.name and one.verdict is Verdict.FAIL for one in state.findings.values()):
        return "failed", "red"
    if replicas_on(state, node.name):
        return "in use", "green"
    return "idle" if is_of_pool(state, node) else "spare", "cyan"


# ── one replica ──────────────────────────────────────────────────────────────────────────────────────────────────────
def replica_view(state: State, replica: Replica, now: float, failures: Failures) -> RenderableType:
    """Return everything that the state has about a replica."""
    does = doing(state, replica, now, failures)
    title = Text.assemble(
        (f"{replica.id}", "bold"), f"  #{replica.incarnation_number}  ", (f"● {does.word}", does.colour)
    )
    title.append(f"   for {span(now - does.since)}")
    if does.next:
        title.append(f", {does.next}", does.colour)
    return Group(title, labelled(_replica_facts(state, replica, now)), *_failures(replica, now))


def _replica_facts(state: State, replica: Replica, now: float) -> Iterator[tuple[str, Text]]:
    role = state.job.role(replica.role)
    if replica.node is not None:
        where = [replica.node, *([f"process {replica.pid}"] if replica.pid else [])]
        yield "node", Text(", ".join(where))
    members = gang(state, replica.id)
    if len(members) > 1:
        places = ", ".join(f"{one.id} on {one.node or '–'}" for one in members)
        yield "gang", Text(f"restarts as a whole: {places}")
    gpus, use = role.per_member.gpus, state.gpu_use.get(replica.node or NodeName(""))
    if gpus or use is not None:
        own = f"{gpus} for this process" if gpus else "none for this process"
        whole = f"; all {use.gpus} of {replica.node}: {gpu_use_text(use) or 'use unknown'}" if use is not None else ""
        yield "gpus", Text(f"{own}{whole}")
    if replica.phase and replica.is_current:
        order = [*replica.past_phases, replica.phase]
        yield "phases", Text(" → ".join(order))
    clock = state.idle_times.newest.get(replica.id)
    if clock is not None and clock.number == replica.incarnation_number:
        yield "time", _clock_text(clock.clock)
    if replica.weight_version is not None:
        yield "weights", Text(" · ").join([Text(f"of step {replica.weight_version.step}"), *delta_figures([replica])])
    if replica.waits_for is not None:
        yield "waits for", Text(replica.waits_for)
    if replica.promoted_from is not None:
        yield "was", Text(f"the standby process {replica.promoted_from}")
    if replica.note:
        yield "note", bounded(replica.note)
    about = (one for one in state.findings.values() if one.incarnation == replica.incarnation)
    on_node = (one for one in state.findings.values() if replica.node is not None and one.node == replica.node)
    yield from _findings((*about, *on_node), now)


def _clock_text(clock: ClockReading) -> Text:
    """Return the shares of a process's time by phase, the largest first, from its newest report."""
    total = sum(one.ns for one in clock.times) or 1
    parts = []
    for one in sorted(clock.times, key=lambda time: -time.ns):
        waits = f" (waits for {one.idle_cause})" if one.idle_cause else ""
        parts.append(f"{one.phase} {percent(one.ns / total)}{waits}")
    return Text(f"{' · '.join(parts)}, of {span(total / 1e9)}")


def _failures(replica: Replica, now: float) -> Iterator[RenderableType]:
    """Yield the newest failures that still count on the replica's budget, newest first."""
    if not replica.failures:
        return
    table = grid("none", expand=True)
    for failure in list(reversed(replica.failures))[:MAX_FAILURES]:
        injected = " (injected)" if failure.injected else ""
        table.add_row(
            Text(f"↻ {span(now - failure.at)} ago", "yellow"),
            bounded(f"failed on {failure.node}{injected}: {failure.why}"),
        )
    yield Text()
    yield table
    if (more := len(replica.failures) - MAX_FAILURES) > 0:
        yield Text(f"{more} more; e explains all of them", "bright_black")


# ── one node ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def node_view(state: State, node: Node, now: float) -> RenderableType:
    """Return everything that the state has about a node: what runs there, the evidence against it, and its drain."""
    word, colour = _node_word(state, node)
    title = Text.assemble((node.name, "bold"), "  ", (f"● {word}", colour))
    if node.excluded is not None:
        title.append(f"   left {span(now - node.excluded_at)} ago")
    return Group(title, labelled(_node_facts(state, node, now)))


def _node_facts(state: State, node: Node, now: float) -> Iterator[tuple[str, Text]]:
    if node.excluded is not None:
        yield "because", bounded(node.excluded)
    if node.status is not None and (node.status.detail or node.status.reason):
        yield "cluster", bounded(" ".join(part for part in (node.status.detail, node.status.reason) if part))
    if node.allocation and (allocation := state.allocations.get(node.allocation)) is not None:
        job = f"job {allocation.status.job}" if allocation.status is not None else "not granted"
        yield "allocation", Text(f"{node.allocation} ({job})")
    yield from _drain_facts(state, node, now)
    replicas = [f"{one.incarnation} {one.phase or one.status.value}" for one in replicas_on(state, node.name)]
    yield "replicas", Text(", ".join(replicas) or "none")
    if (use := state.gpu_use.get(node.name)) is not None:
        yield "gpus", Text(f"{use.gpus}: {gpu_use_text(use) or 'use unknown'}")
    if node.probe_error:
        yield "lacks", bounded(node.probe_error, "yellow")
    yield from _findings((one for one in state.findings.values() if one.node == node.name), now)


def _drain_facts(state: State, node: Node, now: float) -> Iterator[tuple[str, Text]]:
    if node.name in state.node_commands:
        command, by = state.node_commands[node.name]
        yield "drain", Text(f"{command} requested by {by}, in progress", "yellow")
    elif node.drain_requested_by:
        yield "drain", Text(f"requested by {node.drain_requested_by} {span(now - node.drain_requested_at)} ago")
    if node.drain_reason:
        yield "drained", bounded(f"by this run: {node.drain_reason}")
    if node.drain_error:
        yield "drained", bounded(f"not yet; an administrator has to do it: {node.drain_error}", "yellow")


def _findings(findings: Iterable[Finding], now: float) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) for each finding, and for each piece of its evidence."""
    for finding in sorted(findings, key=lambda one: -one.since):
        colour = VERDICT_COLOUR.get(finding.verdict, "none")
        component = f" ({finding.component})" if finding.component else ""
        proof = ", proved" if finding.proof else ""
        head = f"{finding.verdict.value} {finding.title}{component}, {span(now - finding.since)} ago{proof}"
        yield "finding", Text(head, colour)
        for evidence in finding.evidence:
            yield "", bounded(f"{evidence.source}: {evidence.text} ({span(now - evidence.at)} ago)")


def missing_view(what: str, names: Sequence[str]) -> RenderableType:
    """Return the view of a replica or node that the run no longer has; ``names`` lists the existing names."""
    return Text(f"the run has no {what} any more; it has {', '.join(names) or 'none'}", "yellow")
