"""Render what each replica does, the open findings, and the recent failures and restarts. The functions are pure.

Reasons wrap instead of being cut off at the width of their column, because their ends matter. Only a reason of more
than :data:`MAX_TEXT` characters is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from ...api.watching.run_state import NORMAL_STATUSES, Failures
from ...core.phases import phase
from ...core.text import span
from ...core.types import GUEST_ROLE, Cause
from ...manager.model.state import FailedIncarnation, Replica, State, Status, UnchargedRestart
from .formatting import VERDICT_COLOUR, grid, plain_table

NARROW_COLUMNS = 95
"""Number of columns below which less important details are left out."""
MAX_LISTED = 12
"""Maximum number of listed replicas of a role, and of listed findings.

If a role has more replicas, only replicas with a finding, an earlier failure or an unusual status are listed.
"""
RECENT_FAILURE_S = 600.0
"""Time (s) for which a failure or restart is shown."""
MAX_RESTARTS = 5
"""Maximum number of failures and restarts in the view."""
MAX_TEXT = 1200
"""Maximum number of characters of a reason. The reasons that rrl itself writes are shorter; a user's code may write
longer reasons."""

REPLICA_COLUMNS = ("replica", "#", "node", "doing", "for", "weights", "")
"""Headings of the table of replicas; the last column has remarks."""

_STATUS_COLOUR = {
    Status.WANTED: "yellow",
    Status.LAUNCHING: "cyan",
    Status.STARTING: "cyan",
    Status.RETIRED: "bright_black",
    Status.COMPLETED: "green",
}
_FAILED = {Cause.PROCESS: "dead", Cause.HANG: "hung", Cause.NODE: "lost"}
"""Word for a replica that has failed, by the cause in the finding; ``failed`` for other causes."""


class Doing(NamedTuple):
    """The activity of a replica.

    ``since`` is the manager's time (s) at which the activity began. ``next`` is a text about what comes next in the
    replica's recovery; it is empty if that is not known or needs no mention.
    """

    word: str
    colour: str
    since: float
    next: str = ""


def doing(state: State, replica: Replica, now: float, failures: Failures) -> Doing:
    """Return what a replica does: its phase while it works, otherwise its state and what comes next.

    A replica that is retired while the run ends was stopped with the run.
    """
    if replica.status is Status.RETIRED and state.finish is not None:
        ending = any(orphan.incarnation == replica.incarnation for orphan in state.orphan_steps.values())
        return Doing("stopping" if ending else "stopped", _STATUS_COLOUR[Status.RETIRED], replica.since)
    if replica.status is Status.JOINED:
        return _joined(state, replica, failures)
    colour = _STATUS_COLOUR.get(replica.status, "none")
    if replica.status is Status.COMPLETED:
        return Doing("completed", colour, replica.since)
    stop = _last_stop(replica)
    if replica.status in (Status.LAUNCHING, Status.STARTING):
        down = f"down for {span(now - replica.down_since)}" if stop is not None and replica.ever_joined else ""
        return Doing(replica.status.value, colour, replica.since, down)
    following = _next_start(state, replica, now, "starts" if stop is None else "restarts")
    if stop is None:
        return Doing("waiting", colour, replica.since, following)
    if isinstance(stop, UnchargedRestart):
        return Doing("stopped", colour, stop.at, following)
    return Doing("dead", "red", replica.down_since if replica.ever_joined else stop.at, following)


def _joined(state: State, replica: Replica, failures: Failures) -> Doing:
    finding = failures.about(replica)
    if finding is not None and state.finish is None:
        word = "dead" if replica.step is None else _FAILED.get(finding.cause, "failed")
        following = "about to be replaced" if finding.node not in failures.held_nodes else "stays on this node for now"
        return Doing(word, "red", finding.since, following)
    if replica.step is None:
        return Doing("dead", "red", state.at, "" if state.finish is not None else "about to be replaced")
    if not replica.phase:
        return Doing(replica.status.value, "none", replica.since)
    colour = phase(replica.phase).colour
    return Doing(replica.phase, "none" if colour == "white" else colour, replica.phase_since or replica.since)


def _last_stop(replica: Replica) -> FailedIncarnation | UnchargedRestart | None:
    """Return the replica's last failure or its last restart without a failure, whichever was later.

    None if the replica has neither failed nor been restarted.
    """
    stops = (*replica.failures[-1:], *((replica.uncharged_restart,) if replica.uncharged_restart is not None else ()))
    return max(stops, key=lambda stop: stop.at, default=None)


def _next_start(state: State, replica: Replica, now: float, verb: str) -> str:
    """Return when and where a replica that does not run is started."""
    if state.finish is not None:
        return ""
    if replica.status is Status.RETIRED:
        due = max((failure.at for failure in replica.failures), default=0.0) + state.job.recovery.window
        again = f"; tried again in {span(due - now)}" if due > now else ""
        return f"the run goes on without it{again}"
    where = f" on {replica.preferred_node}" if replica.preferred_node else ""
    if replica.not_before > now:
        return f"{verb} in {span(replica.not_before - now + 1)}{where}"
    if where:
        return f"{verb}{where}"
    requested = any(allocation.pending for allocation in state.allocations.values())
    return "waits for requested nodes" if requested else "waits for a free node"


# ── table ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def replicas_view(state: State, now: float, width: int, failures: Failures, max_listed: int) -> RenderableType:
    """Return the table of the replicas.

    If a role has more than ``max_listed`` replicas, only unusual replicas have a row, and the others are counted.
    """
    table = plain_table(expand=True)
    table.add_column("replica", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis", max_width=16 if width >= NARROW_COLUMNS else 10)
    table.add_column("doing", no_wrap=True)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("", ratio=1, overflow="fold")
    by_role: dict[str, list[Replica]] = {}
    for replica in (*state.workers, *state.guests):
        by_role.setdefault(replica.role, []).append(replica)
    found = {finding.incarnation for finding in state.findings.values()}
    nodes_failed = {subject for subject in failures.of if isinstance(subject, str)}
    for role in (*(one.name for one in state.job.roles), GUEST_ROLE):
        replicas = by_role.get(role, [])
        shown = replicas
        if len(replicas) > max_listed:
            unusual = (
                one for one in replicas if one.incarnation in found or one.node in nodes_failed or is_unusual(one)
            )
            shown = sorted(unusual, key=lambda replica: replica.status in NORMAL_STATUSES)[:MAX_LISTED]
        for replica in shown:
            table.add_row(*replica_cells(state, replica, now, failures))
        listed = {replica.id for replica in shown}
        if rest := [replica for replica in replicas if replica.id not in listed]:
            summary = _summary_of_rest(state, rest, now, failures, len(rest) < len(replicas))
            table.add_row(role, "", "", "", "", "", summary, style="dim")
    return table


def is_unusual(replica: Replica) -> bool:
    """Return whether a replica has failed recently, or neither works nor has completed its work."""
    return replica.status not in NORMAL_STATUSES or bool(replica.failures)


def _summary_of_rest(state: State, replicas: Sequence[Replica], now: float, failures: Failures, more: bool) -> str:
    words = Counter(doing(state, replica, now, failures).word for replica in replicas)
    all_words = ", ".join(f"{number} {word}" for word, number in words.most_common())
    if not more:
        return all_words
    return f"{len(replicas)} more: {all_words}" if len(words) > 1 else f"{len(replicas)} more {next(iter(words))}"


def replica_cells(state: State, replica: Replica, now: float, failures: Failures) -> tuple[Text, ...]:
    """Return the cells of a replica's row in the table, in the order of :data:`REPLICA_COLUMNS`."""
    does = doing(state, replica, now, failures)
    incarnation = f"#{replica.incarnation_number}" if replica.incarnation_number else "–"
    return (
        Text(replica.id),
        Text(incarnation, "yellow" if replica.incarnation_number > 1 else "bright_black"),
        Text(replica.node or "–"),
        Text(does.word, does.colour),
        Text(span(now - does.since)),
        Text(f"v{replica.weight_version.step}" if replica.weight_version is not None else "–"),
        _remark(state, replica, does),
    )


def _remark(state: State, replica: Replica, does: Doing) -> Text:
    if does.next:
        return Text(does.next, does.colour)
    finding = next((f for f in state.findings.values() if f.incarnation == replica.incarnation), None)
    if finding is not None:
        return Text(f"{finding.verdict.value} {finding.title}", VERDICT_COLOUR.get(finding.verdict, "none"))
    if replica.waits_for is not None and replica.status is Status.JOINED:
        return Text(f"waits for {replica.waits_for}", "bright_black")
    return Text()


# ── findings and restarts ────────────────────────────────────────────────────────────────────────────────────────────
def findings_view(state: State, now: float) -> RenderableType | None:
    """Return a table of the open findings, newest first; None if there are none."""
    if not state.findings:
        return None
    table = grid("none", "none", "none", expand=True)
    newest_first = sorted(state.findings.values(), key=lambda finding: -finding.since)
    for finding in newest_first[:MAX_LISTED]:
        verdict = Text(f"! {finding.verdict.value}", VERDICT_COLOUR.get(finding.verdict, "none"))
        evidence = "; ".join(one.text for one in finding.evidence)
        ago = f"{span(now - finding.since)} ago"
        subject = str(finding.incarnation or finding.node or "the run")
        table.add_row(verdict, subject, ago, bounded(f"{finding.title}: {evidence}"))
    if (more := len(newest_first) - MAX_LISTED) > 0:
        table.add_row("", f"{more} more", "", "rrl status --json lists all")
    return table


def bounded(text: str, style: str = "") -> Text:
    """Return a text that wraps in its column. Only a text of more than :data:`MAX_TEXT` characters is cut off."""
    return Text(text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…", style)


def restarts_view(state: State, now: float, failures: Failures) -> RenderableType | None:
    """Return the recent failures and restarts, newest first, and the progress of the newest replacements.

    Only the newest restart of a replica shows the progress of the present incarnation; earlier ones show "replaced".
    """
    recent = sorted(
        (stop for stop in _stops(state, now) if now - stop.at < RECENT_FAILURE_S), key=lambda stop: -stop.at
    )
    if not recent:
        return None
    table = grid("none", expand=True)
    newest = {stop.replica.id: stop for stop in reversed(recent)}
    failed_because = {stop.why for stop in recent if stop.failed}
    listed = [stop for stop in recent if stop.failed or stop.why not in failed_because]
    for stop in listed[:MAX_RESTARTS]:
        now_text = _replacement(state, stop.replica, failures) if newest[stop.replica.id] is stop else "replaced"
        line = f"{now_text}; {stop.text}" if now_text else stop.text
        table.add_row(Text(f"↻ {stop.replica.id}", "yellow"), bounded(line))
    if (more := len(listed) - MAX_RESTARTS) > 0:
        table.add_row(f"{more} more", "rrl explain has all of them")
    return table


class _Stop(NamedTuple):
    """The end of an incarnation of a replica, at a manager's time (s)."""

    at: float
    replica: Replica
    failed: bool
    """False if the replica was stopped for a reason other than its own failure."""
    why: str
    text: str


def _stops(state: State, now: float) -> Iterator[_Stop]:
    """Yield, for each replica, all its failures, and its newest restart that was not caused by its own failure."""
    for replica in state.workers:
        for failure in replica.failures:
            ago = f"failed on {failure.node} {span(now - failure.at)} ago" if failure.node else "failed"
            ago += " (injected)" if failure.injected else ""
            text = f"{ago}: {failure.why}" if failure.why else ago
            yield _Stop(failure.at, replica, True, failure.why, text)
        if (restart := replica.uncharged_restart) is not None:
            text = f"stopped on {restart.node} {span(now - restart.at)} ago: {restart.why}"
            yield _Stop(restart.at, replica, False, restart.why, text)


def _replacement(state: State, replica: Replica, failures: Failures) -> str:
    """Return a text about the replacement of the stopped incarnation; empty if the replica was stopped with the run."""
    if replica.status is Status.JOINED:
        if failures.about(replica) is not None or replica.step is None:
            return f"#{replica.incarnation_number} has failed, too"
        return f"#{replica.incarnation_number} works on {replica.node}"
    if replica.status is Status.WANTED:
        return "to be launched again"
    if replica.status is Status.RETIRED:
        return "the run continues without it" if state.finish is None else ""
    if replica.status is Status.COMPLETED:
        return f"#{replica.incarnation_number} has completed its work"
    return f"#{replica.incarnation_number} is {replica.status.value} on {replica.node}"
