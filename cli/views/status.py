"""``State`` as something to look at. Pure: the same state and time give the same picture.

Every line is built to fit: nothing wraps at 80 columns, and more columns show more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.phases import STANDBY, phase
from ...core.types import AGENT, SHADOW, Finding, Outcome, Verdict, stands_for
from ...manager.cluster.base import NodeState
from ...manager.model import token_ages
from ...manager.model.queries import progress, workers
from ...manager.model.state import Allocation, Node, Replica, State, Status
from .formatting import bar, curve, folded, number, span
from .summary import MOST_STALE

NARROW = 95
"""columns below which what is nice to know is left out"""
CROWD = 12
"""replicas of one role that are listed one by one; of more, only those that are not at their ordinary work"""
RECENT = 600.0
"""s for which a failure stays in the picture"""

_OUTCOME = {
    Outcome.COMPLETED: "green", Outcome.CANCELLED: "yellow", Outcome.FAILED: "red", Outcome.REJECTED: "red",
}  # fmt: skip
_STATUS = {
    Status.WANTED: "yellow", Status.LAUNCHING: "cyan", Status.STARTING: "cyan", Status.RETIRED: "bright_black",
    Status.COMPLETED: "green",
}  # fmt: skip
_SHOWN_APART = ("reward", token_ages.P50, token_ages.MAX, token_ages.RUN_MAX)
"""metrics that have a row of their own"""
_AT_EASE = (Status.JOINED, Status.COMPLETED)
"""nothing is to be said of who stands so"""
_VERDICT = {Verdict.FAIL: "red", Verdict.WARN: "yellow"}


def status_view(
    state: State, now: float, width: int = 100, notes: Sequence[str] = (), known_standing: str = ""
) -> RenderableType:
    """The whole picture of a run. ``now``: wall clock (s); ``notes``: lines about its manager that take the place of
    what the journal says of it; ``known_standing``: where the run stands, if more is known than its journal says."""
    until = now if state.ended is None else state.ended
    title = Text.assemble(*_title(state, until, width, known_standing), overflow="ellipsis", no_wrap=True)
    parts: list[RenderableType] = [title]
    parts.append(_facts(state, now, width, [note for note in notes if note]))
    if state.outcome is None:
        parts += [Text(), _replicas(state, until, width)]
    if state.outcome is None and (findings := _findings(state, until)):
        parts += [Text(), findings]
    if state.outcome is None and (failures := _failures(state, until)):
        parts += [Text(), failures]
    return Group(*parts)


def one_line(state: State, silent: bool = False, known_standing: str = "") -> str:
    """The same for a log: where the run stands, and who is not at work."""
    parts = [f"{state.run}: {known_standing or standing(state)[0]}", _so_far(state)]
    if state.rewards.latest is not None:
        parts.append(f"reward {number(state.rewards.latest)}")
    if state.verdict is None and state.outcome is None:
        parts += [f"{replica.life} {replica.status.value}" for replica in workers(state)
                  if replica.status not in _AT_EASE][:CROWD]  # fmt: skip
    if silent:
        parts.append("its manager is silent")
    return ", ".join(parts)


# ── header ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _title(state: State, until: float, width: int, known_standing: str) -> Iterator[tuple[str, str] | str]:
    word, colour = (known_standing, "red") if known_standing else standing(state)
    yield (state.run, "bold")
    yield "  "
    yield (f"● {word}", colour)
    done, all_ = progress(state)
    full, empty = bar(done, all_, 24 if width >= NARROW else 10)
    yield f"   {_so_far(state)} "
    yield (full, "green" if state.outcome in (None, Outcome.COMPLETED) else "yellow")
    yield (empty, "bright_black")
    yield f" {100 * done // max(1, all_)}%   {span(until - state.started)}"


def _so_far(state: State) -> str:
    done, all_ = progress(state)
    return f"{'step' if state.job.steps else 'done'} {done}/{all_}"


def standing(state: State) -> tuple[str, str]:
    """Where the run stands in one word, and its colour."""
    if state.outcome is not None:
        return state.outcome.value, _OUTCOME[state.outcome]
    if state.verdict is not None:
        return f"ending ({state.verdict.outcome.value})", _OUTCOME[state.verdict.outcome]
    if not any(allocation.running for allocation in state.allocations.values()):
        return "waiting for nodes", "yellow"
    failing = any(finding.verdict is Verdict.FAIL and not _left(state, finding) for finding in state.findings.values())
    if failing or any(replica.status not in _AT_EASE for replica in workers(state)):
        return ("recovering" if failing or state.recoveries else "starting"), "cyan"
    return "running", "green"


def _left(state: State, finding: Finding) -> bool:
    """About a node that is no longer used: nothing is to be recovered there."""
    node = state.nodes.get(finding.node) if finding.node is not None else None
    return node is not None and node.excluded is not None


def _facts(state: State, now: float, width: int, notes: Sequence[str]) -> RenderableType:
    facts = Table.grid(padding=(0, 2), expand=True)
    facts.add_column(style="bright_black", no_wrap=True)
    facts.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    first, newest = state.rewards.mean_first, state.rewards.mean_last
    if first is not None and newest is not None:
        reward = Text(f"{number(first)} → {number(newest)}  ")
        facts.add_row("reward", reward.append(curve(state.rewards.points, width - 30), "green"))
    if width >= NARROW and (metrics := _metrics(state, width - 12)):
        facts.add_row("metrics", metrics)
    if state.token_ages.steps:
        facts.add_row("tokens", _token_ages(state))
    if (share := state.metrics.get("stale_share", 0.0)) > MOST_STALE:
        told = f"{100 * share:.0f}% of what is made is dropped: older than [sampling] staleness allows"
        facts.add_row("stale", Text(told, "yellow"))
    if state.outcome is None:
        facts.add_row("nodes", _nodes(state))
        if pipes := sorted({one.serves.partition("://")[0] for one in workers(state) if one.believed and one.serves}):
            listed = " and ".join([*([", ".join(pipes[:-1])] if len(pipes) > 1 else []), pipes[-1]])
            mixed = "nixl" in pipes and len(pipes) > 1  # tcp and ucx understand each other
            apart = "; those cannot pull from each other" if mixed else ""
            facts.add_row("weights", Text(f"over {listed}{apart}", "red" if apart else ""))
        manager = f"epoch {state.epoch} on {state.host or '?'}, last record {span(now - state.at)} ago"
        for label, line in zip(("manager", ""), notes or (manager,), strict=False):
            facts.add_row(label, Text(line, "red" if notes else ""))
        for label, line in zip(("breaker", *[""] * CROWD), _held_back(state, now), strict=False):
            facts.add_row(label, Text(line, "yellow"))
        for replica in [one for one in workers(state) if one.note and one.believed][:CROWD]:
            facts.add_row("note", f"{replica.id}: {replica.note}")
    if state.why and state.outcome is not None:
        facts.add_row("because", state.why)
    if state.outcome is not None and (jobs := kept_jobs(state)):
        told = f"job {jobs}, while it lasts (rrl resume uses it, scancel {jobs} gives it back)"
        facts.add_row("kept", Text(told, "yellow"))
    return facts


def _held_back(state: State, now: float) -> Iterator[str]:
    """Nodes that failed and that the breaker does not let the run leave: for how long, why, and what was found."""
    condemning = any(one.verdict is Verdict.FAIL and one.node is not None for one in state.findings.values())
    if state.verdict is not None or not condemning:
        return
    from ...manager.planner.recovery.node_exclusion import held_back

    for held in held_back(state, now):
        until = "until Slurm says otherwise" if held.until == inf else f"for {span(held.until - now)}"
        yield f"{held.exclude.node} stays in use {until}: {held.why} ({'; '.join(held.exclude.why.evidence)})"


def _token_ages(state: State) -> Text:
    """Ages of the tokens of the newest steps, in weight versions."""
    ages, limit = state.token_ages, state.job.staleness
    bound = "no limit" if limit is None else f"limit {limit}"
    colour = "yellow" if ages.warned is not None else "none"
    return Text(f"age p50 {ages.p50:.3g}, max {ages.max:g} weight versions ({bound})", colour)


def kept_jobs(state: State) -> str:
    """Slurm's numbers of the jobs that a person wanted to keep beyond the run's end."""
    kept = [one.seen.job for one in state.allocations.values() if one.seen is not None and state.keep]
    return " ".join(sorted(kept))


def _metrics(state: State, width: int) -> str:
    """What the trainer said of its newest step, as much of it as fits in ``width`` columns: no figure is cut off."""
    told = ""
    for name, value in sorted(state.metrics.items()):
        figure = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        longer = f"{told}  {name} {figure}".lstrip()
        if name not in _SHOWN_APART and len(longer) <= width:
            told = longer
    return told


def _nodes(state: State) -> Text:
    """Which nodes are in use, and which are not and why; replicas' agents stand for their nodes."""
    if not state.nodes:
        pending = [a.seen.detail for a in state.allocations.values() if a.seen is not None and a.seen.detail]
        return Text(f"none yet, {state.job.nodes} wanted" + (f" ({pending[0]})" if pending else ""), "yellow")
    agents = {replica.node for replica in state.replicas.values() if replica.role == AGENT and replica.pid}
    used = {replica.node for replica in workers(state) if replica.believed}
    good = [n for n in state.nodes.values() if not _node_trouble(n)]
    spare = [n.name for n in good if n.name not in used]
    text = Text(folded(n.name for n in good if n.name in used) or "none in use")
    if spare:
        text.append(f"  spare {folded(spare)}", "bright_black")
    for role in (role for role in state.job.roles if role.warm):
        shadows = (r for r in state.replicas.values() if r.role == SHADOW and stands_for(r.id) == role.name)
        warm = {r.node for r in shadows if r.phase == STANDBY and r.believed}
        if ready := [n.name for n in good if n.name in warm]:
            text.append(f"  warm {'standby' if role.beside else role.name} on {folded(ready)}", "green")
    if without := [n.name for n in good if n.name not in agents]:
        text.append(f"  no agent yet on {folded(without)}", "yellow")
    for node in state.nodes.values():
        if trouble := _node_trouble(node):
            text.append(f"  {node.name} {trouble}", "red")
    for allocation in state.allocations.values():
        if told := _allocation_trouble(allocation):
            text.append(f"  {told}", "yellow")
    return text


def _allocation_trouble(allocation: Allocation) -> str:
    """What the cluster does with it that a person may want to know of."""
    if allocation.seen is None or allocation.releasing or allocation.stray:
        return ""
    nodes = folded(allocation.seen.nodes)
    if allocation.pending:
        return f"{allocation.ask.count} more asked for ({allocation.seen.detail})"
    return f"{nodes} suspended" if allocation.suspended else f"{nodes} preempted" if allocation.taken else ""


def _node_trouble(node: Node) -> str:
    if node.excluded is not None:
        return "drained" if node.drained else "excluded"
    if node.seen is not None and node.seen.state in (NodeState.DOWN, NodeState.DRAINING):
        return node.seen.state.value
    return ""


# ── replicas ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _replicas(state: State, now: float, width: int) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False, expand=True,
        header_style="bright_black", border_style="bright_black",
    )  # fmt: skip
    table.add_column("replica", no_wrap=True)
    table.add_column("life", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis", max_width=16 if width >= NARROW else 10)
    table.add_column("doing", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    for role in state.job.roles:
        replicas = [replica for replica in workers(state) if replica.role == role.name]
        shown = replicas if len(replicas) <= CROWD else [r for r in replicas if _unusual(state, r)][:CROWD]
        for replica in shown:
            _row(table, state, replica, now)
        if rest := [replica for replica in replicas if replica not in shown]:
            table.add_row(role.name, "", "", "", "", "", _crowd(rest), style="dim")
    return table


def _unusual(state: State, replica: Replica) -> bool:
    found = any(finding.life == replica.life for finding in state.findings.values())
    return found or replica.status not in _AT_EASE or bool(replica.failures)


def _crowd(replicas: list[Replica]) -> str:
    doing = Counter(_doing(replica)[0] for replica in replicas)
    return f"{len(replicas)} more: " + ", ".join(f"{count} {word}" for word, count in doing.most_common())


def _row(table: Table, state: State, replica: Replica, now: float) -> None:
    word, colour, since = _doing(replica)
    life = f"#{replica.incarnation}" if replica.incarnation else "–"
    table.add_row(
        replica.id,
        Text(life, "yellow" if replica.incarnation > 1 else "bright_black"),
        replica.node or "–",
        Text(word, colour),
        span(now - since),
        f"v{replica.holds.step}" if replica.holds is not None else "–",
        _remark(state, replica, now),
    )


def _doing(replica: Replica) -> tuple[str, str, float]:
    """Its phase once it has joined, until then its status; the colour; since when."""
    if replica.status is Status.JOINED and replica.phase:
        return replica.phase, phase(replica.phase).colour, replica.phase_since or replica.since
    return replica.status.value, _STATUS.get(replica.status, "white"), replica.since


def _remark(state: State, replica: Replica, now: float) -> Text:
    finding = next((f for f in state.findings.values() if f.life == replica.life), None)
    if finding is not None:
        return Text(f"{finding.verdict.value} {_named(finding)}", _VERDICT.get(finding.verdict, "white"))
    if replica.status is Status.WANTED and replica.not_before > now:
        return Text(f"starts in {span(replica.not_before - now + 1)}", "yellow")
    if replica.waits_for is not None:
        return Text(f"waits for {replica.waits_for}", "bright_black")
    return Text()


# ── findings and failures ──────────────────────────────────────────────────────────────────────────────────────────
def _findings(state: State, now: float) -> RenderableType | None:
    """Everything that is found wrong at this moment, newest first."""
    if not state.findings:
        return None
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for finding in sorted(state.findings.values(), key=lambda f: -f.since)[:CROWD]:
        verdict = Text(f"! {finding.verdict.value}", _VERDICT.get(finding.verdict, "white"))
        evidence = "; ".join(one.text for one in finding.evidence)
        ago = f"{span(now - finding.since)} ago"
        grid.add_row(verdict, str(finding.life or finding.node or "the run"), ago, f"{_named(finding)}: {evidence}")
    return grid


def _named(finding: Finding) -> str:
    return finding.detector.replace("_", " ")


def _failures(state: State, now: float) -> RenderableType | None:
    """What failed of late and how far its replacement is."""
    recent = [
        (failure, replica) for replica in workers(state) for failure in replica.failures if now - failure.at < RECENT
    ]
    if not recent:
        return None
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for failure, replica in sorted(recent, key=lambda pair: -pair[0].at)[:5]:
        ago = f"failed on {failure.node} {span(now - failure.at)} ago" if failure.node else "failed"
        ago += " (injected)" if failure.injected else ""
        why = f": {failure.why}" if failure.why else ""
        grid.add_row(Text(f"↻ {replica.id}", "yellow"), f"{_replacement(replica)}; {ago}{why}")
    return grid


def _replacement(replica: Replica) -> str:
    if replica.status is Status.JOINED:
        return f"#{replica.incarnation} works on {replica.node}"
    if replica.status is Status.WANTED:
        return "to be launched again"
    if replica.status is Status.RETIRED:
        return "the run goes on without it"
    if replica.status is Status.COMPLETED:
        return f"#{replica.incarnation} has done its work"
    return f"#{replica.incarnation} is {replica.status.value} on {replica.node}"
