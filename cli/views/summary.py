"""Render ``summary.json`` of one run, and the list of runs. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from ...api.watching.run_state import RunState
from ...core.run_spec import ROLE_TRAITS
from ...core.text import span
from ...core.types import GUEST_ROLE
from ...manager.model.pools import LendingFigures
from ...manager.storage.model_folders import ModelFolders
from .formatting import OUTCOME_COLOUR, grid, number, plain_table, stage
from .pace import guests_text, idle_text, lent_text

MAX_STALE_SHARE = 0.5
"""Share of groups dropped for their age (among trained and dropped groups) above which the view warns."""
MAX_DROP_REASONS = 3
"""Maximum number of reasons why episodes were dropped that the view lists. The most frequent ones are listed."""
_STAGES = ("detect_s", "decide_s", "start_s", "weights_s", "first_work_s", "total_s")


def summary_view(summary: dict[str, Any]) -> RenderableType:
    """Return the view of a decoded summary.json (:class:`rrl.manager.reporting.summary.Summary`).

    Missing fields are shown as dashes.
    """
    outcome = str(summary.get("outcome", "unknown"))
    title = Text(str(summary.get("run", "run")), "bold")
    title.append(f"  ● {outcome}", OUTCOME_COLOUR.get(outcome, "white"))
    trained = summary.get("steps") != 0  # a run of commands alone trains nothing
    duration = span(summary.get("run_seconds") or 0)
    title.append(f"   {summary.get('steps', 0)} steps in {duration}" if trained else f"   in {duration}", "none")
    facts = grid("bright_black")
    if outcome != "completed" and summary.get("why"):
        facts.add_row("because", Text(str(summary["why"])))
    first, last = summary.get("reward_first10"), summary.get("reward_last10")
    if trained:
        facts.add_row("reward", f"{number(first)} → {number(last)}  (mean of the first and the last ten steps)")
        facts.add_row("training", f"{_share(summary.get('ettr'))} of the time was effective (ETTR)")
    recoveries = summary.get("recoveries") or []
    stream = summary.get("stream") or {}
    with_weights = [role for role, kind in (stream.get("kinds") or {}).items() if ROLE_TRAITS[kind].has_weights]
    lending = LendingFigures(**summary["lending"]) if summary.get("lending") else None
    texts = [
        idle_text(role, stream["idle"][role])
        + (lent_text(lending) if lending and ROLE_TRAITS[stream["kinds"][role]].trains else "")
        for role in with_weights
        if role in stream["idle"]
    ]
    for index, text in enumerate((*texts, *([guests_text(lending)] if lending else []))):
        facts.add_row("" if index else "time", text)
    for index, pool in enumerate(summary.get("rollout_pools") or []):
        facts.add_row("" if index else "pools", _pool_text(pool))
    if agents := _agents(summary):
        facts.add_row("agents", agents)
    if (age := summary.get("max_age")) is not None:
        facts.add_row("tokens", f"at most {age} training steps old when they were trained on")
    facts.add_row("faults", _faults(summary.get("faults") or 0, recoveries, summary.get("unprovoked")))
    if tokens := summary.get("outage_tokens"):
        facts.add_row("kept", f"{tokens} tokens that rollouts generated while the trainer was down")
    if stale := summary.get("stale_groups"):
        share = summary.get("stale_share") or 0.0
        text = (
            f"{stale} groups, {_share(share)} of those generated, were dropped: older than [sampling] staleness allows"
        )
        facts.add_row("stale", Text(text, "yellow" if share > MAX_STALE_SHARE else "none"))
    if unscored := int(summary.get("unscored_groups") or 0):
        facts.add_row("dropped", Text(unscored_text(unscored, summary.get("unscored_share") or 0.0), "yellow"))
    for row in _model_rows(summary.get("export"), str(summary.get("export_failure") or "")):
        facts.add_row(*row)
    facts.add_row("folder", Text(str(summary.get("run_dir", ""))))
    return Group(title, facts, *([Text(), recoveries_view(recoveries)] if recoveries else []))


def _model_rows(export: dict[str, Any] | None, failure: str) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) for the newest export by the run itself, and for an export that failed after it."""
    if export is not None:
        yield "exported", Text(f"step {export.get('step')}: {export.get('path')}")
    if failure:
        yield "export", Text(f"failed: {failure}", "yellow")


def model_folder_rows(folders: ModelFolders) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) for each folder with the weights of a run."""
    if folders.checkpoint is not None:
        yield "checkpoint", Text(f"step {folders.checkpoint.step}: {folders.checkpoint.path}")
    export = None if folders.export is None else msgspec.structs.asdict(folders.export)
    yield from _model_rows(export, folders.export_failure)


def _pool_text(pool: dict[str, Any]) -> str:
    hours, budget, rate = (pool.get(key) for key in ("node_hours", "budget_node_hours", "tokens_per_node_hour"))
    of = "" if budget is None else f" of {budget:.3g}"
    each = "" if rate is None else f", {rate:,.0f} in each"
    tokens = f"{pool.get('pool')} {pool.get('tokens') or 0:,} tokens"
    return tokens if pool.get("pool") == GUEST_ROLE else f"{tokens} in {hours or 0:.3g}{of} node hours{each}"


def _agents(summary: dict[str, Any]) -> Text | None:
    """Return the numbers of episodes and turns, and why episodes were dropped; None in a run without agents."""
    counts = summary.get("episodes") or {}
    if not counts.get("finished") and not counts.get("dropped"):
        return None
    shown = [f"{counts[name]:,} {name}" for name in ("finished", "retried", "replayed", "dropped") if counts.get(name)]
    text = Text(f"episodes {', '.join(shown)} · turns {summary.get('turns') or 0:,}")
    reasons = sorted((counts.get("dropped_by_reason") or {}).items(), key=lambda reason: -reason[1])
    for reason, count in reasons[:MAX_DROP_REASONS]:
        text.append(f"\ndropped {count:,}: {reason}", "yellow")
    if len(reasons) > MAX_DROP_REASONS:
        text.append(f"\nand {len(reasons) - MAX_DROP_REASONS} more (summary.json)", "yellow")
    if drift := summary.get("token_drift"):
        text.append(f"\n{drift:,} tokens were trained in a wrong context: a bug of rrl", "red")
    return text


def unscored_text(groups: int, share: float) -> str:
    """Return a text with the number and share of groups that were dropped because an answer could not be scored."""
    count = "1 group was" if groups == 1 else f"{groups} groups were"
    return f"{count} dropped ({_share(share)}): an answer could not be scored, see the log of the reward role"


def next_steps_view(summary: dict[str, Any], job_steps: int, weights: str, program: str = "rrl") -> RenderableType:
    """Return a line with the path of the weights, and a line for each command that is useful after a run.

    Args:
        summary: The decoded summary.json.
        job_steps: Number of training steps of the job; 0 for a job that has only user commands and trains nothing.
        weights: Where the weights are, or how the user gets them; empty if there are none.
        program: How the user starts rrl.
    """
    run, outcome, done = str(summary.get("run", "")), summary.get("outcome"), int(summary.get("steps") or 0)
    lines: list[tuple[str, str]] = []
    if weights and done:
        lines.append((weights, f"weights of step {done}"))
    if outcome in ("failed", "rejected"):
        lines.append((f"{program} logs {run} --failed", "what failed, and its last lines"))
    else:
        lines.append((f"{program} logs {run}", "what its roles printed"))
    if outcome == "completed" and job_steps:
        lines.append((f"{program} resume {run} --steps {2 * job_steps}", "trains on"))
    elif outcome in ("failed", "cancelled"):
        lines.append((f"{program} resume {run}", f"goes on from step {done}" if job_steps else "goes on"))
    lines.append((f"{program} list", "all runs"))
    columns, view = max(len(command) for command, _ in lines), Text(no_wrap=True, overflow="ignore")
    for row, (command, effect) in enumerate(lines):  # no line is wrapped, so that each command can be copied
        view.append("\n      " if row else "next  ", "bright_black")
        view.append(command.ljust(columns)).append(f"  {effect}", "bright_black")
    return view


def recoveries_view(recoveries: list[dict[str, Any]]) -> RenderableType:
    """Return the stage times of the recovery from each failure and, below them, the cause.

    Each failure is shown with the failed incarnation and, if it has joined, the replacement.
    """
    table = plain_table(["failure"], [name.removesuffix("_s").replace("_", " ") for name in _STAGES])
    causes = grid("none", expand=True)
    for one in recoveries:
        failed = f"{one.get('replica')}#{one.get('failed', '?')}"
        joined = one.get("start_s") is not None
        table.add_row(
            f"{failed} → #{one.get('incarnation')}" if joined else failed, *(stage(one.get(name)) for name in _STAGES)
        )
        causes.add_row(Text(f"↻ {failed}", "yellow"), Text(_recovery_text(one, joined)))
    return Group(table, Text(), causes)


def _recovery_text(one: dict[str, Any], joined: bool) -> str:
    """Return a text with the repair, the nodes and the cause; ``joined`` is True if the replacement has joined."""
    before, after = one.get("node_before") or "?", one.get("node_after") or "?"
    where = f"on {before}" if before == after or not joined else f"{before} → {after}"
    return f"{one.get('rung', '')} {where}; {'injected; ' if one.get('injected') else ''}{one.get('cause', '')}"


def _faults(injected: int, recoveries: list[dict[str, Any]], unprovoked: int | None) -> str:
    recovered = sum(one.get("total_s") is not None for one in recoveries)
    real = f"; {unprovoked} of them not injected" if unprovoked and injected else ""
    lost = (
        f", {len(recoveries) - recovered} not" if recovered < len(recoveries) else ""
    )  # no replacement of these failures ever worked
    return f"{injected} injected; {recovered} recovered from{lost}{real}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


RUN_COLUMNS = ("run", "standing", "step", "reward", "recoveries", "took", "started")
"""Headings of the table of runs."""
_STANDING_COLOUR = OUTCOME_COLOUR | {"running": "green", "interrupted": "red", "unattended": "red"}


def runs_view(states: Sequence[RunState], now: float) -> RenderableType:
    """Return a table of runs; ``now`` is the wall clock (s)."""
    table = plain_table()
    first, second, *figures = RUN_COLUMNS
    table.add_column(first, no_wrap=True)
    table.add_column(second, no_wrap=True, overflow="ellipsis", max_width=30)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for state in states:
        table.add_row(*run_cells(state, now))
    return table


def run_cells(state: RunState, now: float) -> tuple[Text, ...]:
    """Return the cells of a run's row in the table, in the order of :data:`RUN_COLUMNS`."""
    return (
        Text(state.run),
        Text(state.standing, _STANDING_COLOUR.get(state.standing, "cyan")),
        Text(_steps(state.step, state.steps)),
        Text(number(state.reward)),
        Text(str(state.recoveries)),
        Text("–" if state.run_seconds is None else span(state.run_seconds)),
        Text("–" if state.started is None else f"{span(now - state.started)} ago"),
    )


def _steps(step: int, steps: int | None) -> str:
    """Return done and total steps as ``3/20``; a dash for a run of only user commands, which has no steps."""
    return "–" if steps == 0 else f"{step}/{'?' if steps is None else steps}"
