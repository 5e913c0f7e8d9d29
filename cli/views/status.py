"""Render ``State`` for a terminal. Pure: the same state and time give the same view.

Every line fits 80 columns; wider terminals show more details. Only reasons wrap, because their ends matter: the reasons
of the newest finding and restart, of a missing manager, of unused nodes, and of the run's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...api.watching.run_state import NORMAL_STATUSES, standing
from ...core.phases import STANDBY, phase
from ...core.run_spec import INTEROPERABLE_TRANSPORTS
from ...core.types import AGENT, STANDBY_ROLE, Finding, Outcome, Verdict, standby_role_of
from ...manager.cluster.base import NodeState
from ...manager.model import token_ages
from ...manager.model.queries import progress, workers
from ...manager.model.reduce_nodes import DRAIN
from ...manager.model.state import Allocation, Node, Replica, State, Status
from ...manager.model.stream_figures import EPISODE_METRICS, SHOWN_METRICS, TOKENS_AGED, as_count
from .formatting import bar, curve, folded, number, span
from .pace import agent_figures, idle_shares_of_roles, length_figures, packed, token_rates
from .summary import MAX_STALE_SHARE, unscored_text

NARROW_COLUMNS = 95
"""Number of columns below which less important details are left out."""
MAX_LISTED = 12
"""Maximum number of replicas that are listed for a role.

If a role has more replicas, only replicas with a finding, an earlier failure or an unusual status are listed.
"""
RECENT_FAILURE_S = 600.0
"""Time (s) for which a failure or restart is shown."""
MAX_RESTARTS = 5
"""Maximum number of failures and restarts in the view."""
MAX_NODES_LEFT = 3
"""Maximum number of left nodes that are shown with the reason, newest first."""
_LABEL_COLUMNS = 11
"""Maximum number of columns of a row's label, including padding."""
MAX_TEXT = 300
"""Maximum number of characters of a text that wraps: four to six lines at 80 columns."""

_OUTCOME = {
    Outcome.COMPLETED: "green", Outcome.CANCELLED: "yellow", Outcome.FAILED: "red", Outcome.REJECTED: "red",
}  # fmt: skip
_STATUS = {
    Status.WANTED: "yellow", Status.LAUNCHING: "cyan", Status.STARTING: "cyan", Status.RETIRED: "bright_black",
    Status.COMPLETED: "green",
}  # fmt: skip
_SEPARATE_METRICS = (
    "reward", token_ages.P50_METRIC, token_ages.MAX_METRIC, token_ages.RUN_MAX_METRIC, "unscored_groups",
    "unscored_share",
)  # fmt: skip
"""Metrics that are shown in a separate row."""
_VERDICT = {Verdict.FAIL: "red", Verdict.WARN: "yellow"}


def status_view(
    state: State, now: float, width: int = 100, notes: Sequence[str] = (), known_standing: str = ""
) -> RenderableType:
    """Return the status view of a run.

    ``now`` is the wall clock (s). ``notes`` are lines about the run's manager, which replace the information in the
    journal. ``known_standing`` replaces the standing from the journal (:func:`standing`) if more is known.
    """
    until = now if state.ended is None else state.ended
    title = Text.assemble(*_title(state, until, width, known_standing), overflow="ellipsis", no_wrap=True)
    parts: list[RenderableType] = [title]
    parts.append(_facts(state, now, width, [note for note in notes if note]))
    if state.outcome is None:
        parts += [Text(), _replicas(state, until, width)]
    if state.outcome is None and (findings := _findings(state, until)):
        parts += [Text(), findings]
    if state.outcome is None and (restarts := _restarts(state, until)):
        parts += [Text(), restarts]
    return Group(*parts)


def one_line(state: State, silent: bool = False, known_standing: str = "") -> str:
    """Return the status in one line for a log: its standing and the replicas that are neither joined nor complete."""
    parts = [f"{state.run}: {known_standing or standing(state)}", _progress_text(state)]
    if state.rewards.latest is not None:
        parts.append(f"reward {number(state.rewards.latest)}")
    if state.finish is None and state.outcome is None:
        parts += [f"{replica.incarnation} {replica.status.value}" for replica in workers(state)
                  if replica.status not in NORMAL_STATUSES][:MAX_LISTED]  # fmt: skip
    if silent:
        parts.append("its manager does not respond")
    return ", ".join(parts)


# ── header ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _title(state: State, until: float, width: int, known_standing: str) -> Iterator[tuple[str, str] | str]:
    word, colour = (known_standing, "red") if known_standing else (standing(state), _standing_colour(state))
    done, all_ = progress(state)
    before, after = f"   {_progress_text(state)} ", f" {100 * done // max(1, all_)}%   {span(state.run_seconds(until))}"
    free = width - len(f"{state.run}  ● {word}{before}{after}")
    full, empty = bar(done, all_, max(0, min(24 if width >= NARROW_COLUMNS else 10, free)))
    yield (state.run, "bold")
    yield "  "
    yield (f"● {word}", colour)
    yield before
    yield (full, "green" if state.outcome in (None, Outcome.COMPLETED) else "yellow")
    yield (empty, "bright_black")
    yield after


def _progress_text(state: State) -> str:
    done, all_ = progress(state)
    return f"{'step' if state.job.steps else 'done'} {done}/{all_}"


def _standing_colour(state: State) -> str:
    """Return the colour of the run's standing."""
    outcome = state.outcome or (state.finish.outcome if state.finish is not None else None)
    if outcome is not None:
        return _OUTCOME[outcome]
    return {"waiting for nodes": "yellow", "running": "green"}.get(standing(state), "cyan")


def _facts(state: State, now: float, width: int, notes: Sequence[str]) -> RenderableType:
    facts = Table.grid(padding=(0, 2), expand=True)
    facts.add_column(style="bright_black", no_wrap=True)
    facts.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    first, newest = state.rewards.mean_first, state.rewards.mean_last
    if first is not None and newest is not None:
        reward = Text(f"{number(first)} → {number(newest)}  ")
        facts.add_row("reward", reward.append(curve(state.rewards.points, width - 30), "green"))
    if width >= NARROW_COLUMNS and (metrics := _metrics(state, width - 12)):
        facts.add_row("metrics", metrics)
    ages = [_token_ages(state)] if state.token_ages.steps else []
    free = width - _LABEL_COLUMNS
    tokens = [*token_rates(state), *ages]
    rows = (
        ("time", idle_shares_of_roles(state)), ("tokens", tokens), ("lengths", length_figures(state.stream_figures)),
        ("agents", agent_figures(state.episode_figures, state.outcome is not None)),
    )  # fmt: skip
    for row in (row for label, parts in rows for row in packed(label, parts, free)):
        facts.add_row(*row)
    if (share := state.metrics.get("stale_share", 0.0)) > MAX_STALE_SHARE:
        text = f"{100 * share:.0f}% of all groups are dropped: older than [sampling] staleness allows"
        facts.add_row("stale", Text(text, "yellow"))
    if groups := as_count(state.metrics.get("unscored_groups", 0.0)):
        facts.add_row("dropped", _wrapped(unscored_text(groups, state.metrics.get("unscored_share", 0.0)), "yellow"))
    if state.outcome is None:
        facts.add_row("nodes", _nodes(state))
        for label, text in _nodes_left(state, now):
            facts.add_row(label, _wrapped(text, "yellow"))
        if transports := sorted(
            {one.weight_address.partition("://")[0] for one in workers(state) if one.is_current and one.weight_address}
        ):
            listed = " and ".join([*([", ".join(transports[:-1])] if len(transports) > 1 else []), transports[-1]])
            mixed = len(transports) > 1 and not INTEROPERABLE_TRANSPORTS.issuperset(transports)
            apart = "; not all of these can exchange weights" if mixed else ""
            facts.add_row("weights", Text(f"over {listed}{apart}", "red" if apart else ""))
        manager = f"epoch {state.epoch} on {state.host or '?'}, last record {span(now - state.at)} ago"
        for label, line in zip(("manager", ""), notes or (manager,), strict=False):
            facts.add_row(label, _wrapped(line, "red") if notes else line)
        for label, line in zip(("breaker", *[""] * MAX_LISTED), _held_back_nodes(state, now), strict=False):
            facts.add_row(label, _wrapped(line, "yellow"))
        for replica in [one for one in workers(state) if one.note and one.is_current][:MAX_LISTED]:
            facts.add_row("note", _wrapped(f"{replica.id}: {replica.note}"))
    decided = "; ".join(state.finish.why.evidence) if state.finish is not None else ""
    if because := state.why if state.outcome is not None else decided:
        facts.add_row("because", Text(because, no_wrap=False, overflow="fold"))
    if state.outcome is not None and (jobs := retained_jobs(state)):
        text = f"job {jobs}, while it lasts (rrl resume uses it, scancel {jobs} releases it)"
        facts.add_row("kept", Text(text, "yellow"))
    return facts


def _held_back_nodes(state: State, now: float) -> Iterator[str]:
    """Yield a line for each failed node that the circuit breaker keeps in use, with duration, reason and evidence."""
    node_failed = any(one.verdict is Verdict.FAIL and one.node is not None for one in state.findings.values())
    if state.finish is not None or not node_failed:
        return
    from ...manager.planner.recovery.node_exclusion import deferred_exclusions

    for held_exclusion in deferred_exclusions(state, now):
        until = (
            "until Slurm reports otherwise"
            if held_exclusion.until == inf
            else f"for {span(held_exclusion.until - now)}"
        )
        evidence = "; ".join(held_exclusion.exclude.why.evidence)
        yield f"{held_exclusion.exclude.node} stays in use {until}: {held_exclusion.why} ({evidence})"


def _token_ages(state: State) -> Text:
    """Return the ages of the tokens of the newest steps, in training steps."""
    ages, limit = state.token_ages, state.job.sampling.staleness
    bound = "no limit" if limit is None else f"limit {limit}"
    colour = "yellow" if ages.warned is not None else "none"
    return Text(f"age p50 {ages.p50:.3g}, max {ages.max:g} training steps ({bound})", colour)


def retained_jobs(state: State) -> str:
    """Return the ids of the Slurm jobs that a user asked to keep after the run's end, separated by blanks."""
    jobs = [one.status.job for one in state.allocations.values() if one.status is not None and state.keep_allocations]
    return " ".join(sorted(jobs))


def _metrics(state: State, width: int) -> str:
    """Return as many whole metrics of the trainer's newest step as fit in ``width`` columns."""
    text, separate = "", (*_SEPARATE_METRICS, *SHOWN_METRICS, *EPISODE_METRICS)
    for name, value in sorted(state.metrics.items()):
        figure = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        longer = f"{text}  {name} {figure}".lstrip()
        if name not in separate and not name.startswith(TOKENS_AGED) and len(longer) <= width:
            text = longer
    return text


def _nodes(state: State) -> Text:
    """Return a text about the nodes: in use, spare, warm, and not usable with the reason.

    While the run has no nodes, the text gives the number of requested nodes. Nodes whose agent has not started are
    listed separately.
    """
    if not state.nodes:
        pending = [a.status.detail for a in state.allocations.values() if a.status is not None and a.status.detail]
        return Text(f"none yet, {state.job.nodes} wanted" + (f" ({pending[0]})" if pending else ""), "yellow")
    agents = {replica.node for replica in state.replicas.values() if replica.role == AGENT and replica.pid}
    used = {replica.node for replica in workers(state) if replica.is_current}
    good = [n for n in state.nodes.values() if not _node_trouble(n)]
    spare = [n.name for n in good if n.name not in used]
    text = Text(folded(n.name for n in good if n.name in used) or "none in use")
    if spare:
        text.append(f"  spare {folded(spare)}", "bright_black")
    for role in (role for role in state.job.roles if role.warm):
        standbys = (r for r in state.replicas.values() if r.role == STANDBY_ROLE and standby_role_of(r.id) == role.name)
        warm = {r.node for r in standbys if r.phase == STANDBY and r.is_current}
        if ready := [n.name for n in good if n.name in warm]:
            text.append(f"  warm {'standby' if role.standby_shares_node else role.name} on {folded(ready)}", "green")
    if without := [n.name for n in good if n.name not in agents]:
        text.append(f"  no agent yet on {folded(without)}", "yellow")
    for node in state.nodes.values():
        if trouble := _node_trouble(node):
            text.append(f"  {node.name} {trouble}", "red")
    for allocation in state.allocations.values():
        if allocation_text := _allocation_trouble(allocation):
            text.append(f"  {allocation_text}", "yellow")
    return text


def _nodes_left(state: State, now: float) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each node that a user drains, or that was left for a reason without an open finding."""
    for name, (command, by) in list(state.node_commands.items())[:MAX_LISTED]:
        if command == DRAIN:
            yield "drain", f"{name}, requested by {by}"
    explained = {finding.node for finding in state.findings.values()}
    excluded = [one for one in state.nodes.values() if one.excluded is not None and one.name not in explained]
    for node in sorted(excluded, key=lambda one: -one.excluded_at)[:MAX_NODES_LEFT]:
        yield _node_trouble(node), f"{node.name} {span(now - node.excluded_at)} ago: {node.excluded}"


def _allocation_trouble(allocation: Allocation) -> str:
    """Return a text if the cluster impairs the allocation, for example by suspending it; else an empty text."""
    if allocation.status is None or allocation.releasing or allocation.orphan:
        return ""
    nodes = folded(allocation.status.nodes)
    if allocation.pending:
        return f"{allocation.request.count} more requested ({allocation.status.detail})"
    return f"{nodes} suspended" if allocation.suspended else f"{nodes} preempted" if allocation.reclaimed else ""


def _node_trouble(node: Node) -> str:
    if node.excluded is not None:
        return "drained" if node.drain_reason else "excluded"
    if node.status is not None and node.status.state in (NodeState.DOWN, NodeState.DRAINING):
        return node.status.state.value
    return ""


# ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _replicas(state: State, now: float, width: int) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False, expand=True,
        header_style="bright_black", border_style="bright_black",
    )  # fmt: skip
    table.add_column("replica", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis", max_width=16 if width >= NARROW_COLUMNS else 10)
    table.add_column("doing", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for role in state.job.roles:
        replicas = [replica for replica in workers(state) if replica.role == role.name]
        shown = replicas if len(replicas) <= MAX_LISTED else [r for r in replicas if _unusual(state, r)][:MAX_LISTED]
        for replica in shown:
            _row(table, state, replica, now)
        if rest := [replica for replica in replicas if replica not in shown]:
            table.add_row(role.name, "", "", "", "", "", _summary_of_rest(state, rest), style="dim")
    return table


def _unusual(state: State, replica: Replica) -> bool:
    found = any(finding.incarnation == replica.incarnation for finding in state.findings.values())
    return found or replica.status not in NORMAL_STATUSES or bool(replica.failures)


def _summary_of_rest(state: State, replicas: list[Replica]) -> str:
    doing = Counter(_doing(state, replica)[0] for replica in replicas)
    return f"{len(replicas)} more: " + ", ".join(f"{count} {word}" for word, count in doing.most_common())


def _row(table: Table, state: State, replica: Replica, now: float) -> None:
    word, colour, since = _doing(state, replica)
    incarnation = f"#{replica.incarnation_number}" if replica.incarnation_number else "–"
    table.add_row(
        replica.id,
        Text(incarnation, "yellow" if replica.incarnation_number > 1 else "bright_black"),
        replica.node or "–",
        Text(word, colour),
        span(now - since),
        f"v{replica.weight_version.step}" if replica.weight_version is not None else "–",
        _remark(state, replica, now),
    )


def _doing(state: State, replica: Replica) -> tuple[str, str, float]:
    """Return (phase, colour, since) of a joined replica, and (status, colour, since) of any other replica.

    A replica that is retired while the run ends was stopped with the run.
    """
    if replica.status is Status.RETIRED and state.finish is not None:
        ending = any(orphan.incarnation == replica.incarnation for orphan in state.orphan_steps.values())
        return "stopping" if ending else "stopped", _STATUS[Status.RETIRED], replica.since
    if replica.status is Status.JOINED and replica.phase:
        return replica.phase, phase(replica.phase).colour, replica.phase_since or replica.since
    return replica.status.value, _STATUS.get(replica.status, "white"), replica.since


def _remark(state: State, replica: Replica, now: float) -> Text:
    finding = next((f for f in state.findings.values() if f.incarnation == replica.incarnation), None)
    if finding is not None:
        return Text(f"{finding.verdict.value} {_detector_text(finding)}", _VERDICT.get(finding.verdict, "white"))
    if replica.status is Status.WANTED and replica.not_before > now:
        return Text(f"starts in {span(replica.not_before - now + 1)}", "yellow")
    if replica.waits_for is not None and replica.status is Status.JOINED:
        return Text(f"waits for {replica.waits_for}", "bright_black")
    return Text()


# ── findings and restarts ────────────────────────────────────────────────────────────────────────────────────────────
def _findings(state: State, now: float) -> RenderableType | None:
    """Return a table of the open findings, newest first; None if there are none. Only the newest finding wraps."""
    if not state.findings:
        return None
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row, finding in enumerate(sorted(state.findings.values(), key=lambda f: -f.since)[:MAX_LISTED]):
        verdict = Text(f"! {finding.verdict.value}", _VERDICT.get(finding.verdict, "white"))
        evidence = "; ".join(one.text for one in finding.evidence)
        ago = f"{span(now - finding.since)} ago"
        subject, text = str(finding.incarnation or finding.node or "the run"), f"{_detector_text(finding)}: {evidence}"
        grid.add_row(verdict, subject, ago, text if row else _wrapped(text))
    return grid


def _detector_text(finding: Finding) -> str:
    return finding.detector.replace("_", " ")


def _wrapped(text: str, style: str = "") -> Text:
    """Return text that wraps in its column instead of being cut off there."""
    return Text(text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…", style, no_wrap=False, overflow="fold")


def _restarts(state: State, now: float) -> RenderableType | None:
    """Return the recent failures and restarts, newest first, and the progress of the newest replacements.

    Only the newest restart wraps. Only the newest restart of a replica names the present incarnation, which did not
    replace the earlier incarnations.
    """
    recent = sorted(
        (stop for stop in _stops(state, now) if now - stop.at < RECENT_FAILURE_S), key=lambda stop: -stop.at
    )
    if not recent:
        return None
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    newest = {stop.replica.id: stop for stop in reversed(recent)}
    failed_because = {stop.why for stop in recent if stop.failed}
    listed = [stop for stop in recent if stop.failed or stop.why not in failed_because]
    for row, stop in enumerate(listed[:MAX_RESTARTS]):
        now_text = _replacement(state, stop.replica) if newest[stop.replica.id] is stop else "replaced"
        line = f"{now_text}; {stop.text}" if now_text else stop.text
        grid.add_row(Text(f"↻ {stop.replica.id}", "yellow"), line if row else _wrapped(line))
    return grid


class _Stop(NamedTuple):
    """The end of an incarnation of a replica, at a manager's time (s)."""

    at: float
    replica: Replica
    failed: bool
    """False if the replica was stopped for a reason other than its own failure."""
    why: str
    text: str


def _stops(state: State, now: float) -> Iterator[_Stop]:
    """Yield the failures of all replicas, and the newest restart without a failure of each replica."""
    for replica in workers(state):
        for failure in replica.failures:
            ago = f"failed on {failure.node} {span(now - failure.at)} ago" if failure.node else "failed"
            ago += " (injected)" if failure.injected else ""
            text = f"{ago}: {failure.why}" if failure.why else ago
            yield _Stop(failure.at, replica, True, failure.why, text)
        if (restart := replica.uncharged_restart) is not None:
            text = f"stopped on {restart.node} {span(now - restart.at)} ago: {restart.why}"
            yield _Stop(restart.at, replica, False, restart.why, text)


def _replacement(state: State, replica: Replica) -> str:
    """Return a text about the replacement of the stopped incarnation; empty if the replica was stopped with the run."""
    if replica.status is Status.JOINED:
        return f"#{replica.incarnation_number} works on {replica.node}"
    if replica.status is Status.WANTED:
        return "to be launched again"
    if replica.status is Status.RETIRED:
        return "the run continues without it" if state.finish is None else ""
    if replica.status is Status.COMPLETED:
        return f"#{replica.incarnation_number} has completed its work"
    return f"#{replica.incarnation_number} is {replica.status.value} on {replica.node}"
