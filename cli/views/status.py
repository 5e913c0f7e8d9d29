"""Render ``State`` for a terminal. The same state and time always give the same view.

Every line fits 80 columns; wider terminals show more details. Texts wrap instead of being cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf, isfinite

from rich.console import Group, RenderableType
from rich.text import Text

from ...api.watching.run_state import NORMAL_STATUSES, Failures, failures_of, standing
from ...cluster.base import NodeState
from ...core.phases import STANDBY
from ...core.run_spec import INTEROPERABLE_TRANSPORTS
from ...core.text import plural, span
from ...core.types import AGENT, STANDBY_ROLE, GpuUse, NodeName, Outcome, OutsideKind, Verdict, natural_sort_key
from ...manager.model.figures import token_ages
from ...manager.model.figures.stream_figures import EPISODE_METRICS, SHOWN_METRICS, TOKENS_AGED, as_count
from ...manager.model.queries import progress, reached_step, weights_lag_steps
from ...manager.model.reduce_nodes import DRAIN
from ...manager.model.state import Allocation, Node, Replica, State, Status
from ...manager.storage.model_folders import ModelFolders
from .formatting import LABEL_COLUMNS, OUTCOME_COLOUR, bar, curve, folded, labelled, number, resampled
from .pace import (
    agent_figures,
    delta_figures,
    evaluation_figures,
    idle_shares_of_roles,
    length_figures,
    packed,
    percent,
    pool_texts,
    progress_figures,
    token_rates,
)
from .replicas import MAX_LISTED, NARROW_COLUMNS, bounded, doing, findings_view, replicas_view, restarts_view
from .summary import MAX_STALE_SHARE, model_folder_rows, unscored_text

MAX_NODES_LEFT = 3
"""Maximum number of nodes for which the view shows why the run has left them. The nodes that the run left last are
shown."""
MAX_GPU_NODES = 8
"""Maximum number of nodes for which the use of each node's GPUs is shown; for more nodes, only the extremes are
shown."""
MAX_GPU_USE_AGE_S = 120.0
"""Age (s) above which a record of the use of GPUs is not shown. A new record is made every 20 s."""
_LABEL_COLUMNS = LABEL_COLUMNS + 2
"""Columns of a row's label, including padding."""
_SEPARATE_METRICS = (
    "reward",
    token_ages.P50_METRIC,
    token_ages.MAX_METRIC,
    token_ages.RUN_MAX_METRIC,
    "unscored_groups",
    "unscored_share",
    "completion_len_p95",
    "completion_len_max",
    "sampled_tokens",
)
"""Metrics that are shown in a separate row."""


def status_view(
    state: State,
    now: float,
    width: int = 100,
    notes: Sequence[str] = (),
    known_standing: str = "",
    folders: ModelFolders = ModelFolders(),
    max_listed: int = MAX_LISTED,
) -> RenderableType:
    """Return the status view of a run.

    Args:
        state: The state of the run.
        now: The wall clock (s).
        width: Columns of the terminal.
        notes: Lines about the run's manager, which replace the information in the journal.
        known_standing: The standing of the run; empty selects the standing according to the journal (:func:`standing`).
        folders: The folders with the weights of the run.
        max_listed: Number of replicas of a role up to which all are listed.
    """
    facts = facts_view(state, now, width, notes, known_standing, folders)
    if state.outcome is not None:
        return facts
    failures = failures_now(state, now)
    replicas = replicas_view(state, known_until(state, now, notes), width, failures, max_listed)
    return Group(facts, Text(), replicas, *troubles_view(state, now, failures))


def facts_view(
    state: State,
    now: float,
    width: int = 100,
    notes: Sequence[str] = (),
    known_standing: str = "",
    folders: ModelFolders = ModelFolders(),
) -> RenderableType:
    """Return the title of the status view and the facts below it; the arguments are those of :func:`status_view`."""
    held = dict(_held_back_nodes(state, now))
    title = Text.assemble(*_title(state, known_until(state, now, notes), width, known_standing))
    return Group(title, labelled(_facts(state, now, width, [note for note in notes if note], held, folders)))


def known_until(state: State, now: float, notes: Sequence[str]) -> float:
    """Return the time (s) up to which the state is known: no manager writes the journal while there are ``notes``."""
    if state.ended is not None:
        return state.ended
    return state.at if any(notes) else now


def troubles_view(state: State, now: float, failures: Failures) -> list[RenderableType]:
    """Return the open findings and the recent failures and restarts, each after an empty line; often nothing."""
    views = (findings_view(state, now), restarts_view(state, now, failures))
    return [part for view in views if view is not None for part in (Text(), view)]


def failures_now(state: State, now: float) -> Failures:
    """Return the failures of a run, with the failed nodes that the circuit breaker keeps in use."""
    return failures_of(state, dict(_held_back_nodes(state, now)))


def one_line(state: State, now: float, note: str = "", known_standing: str = "") -> str:
    """Return the status of a run in one line, for a log: its standing, progress, newest reward and unusual replicas.

    A replica is unusual if its status is not in :data:`NORMAL_STATUSES`. ``note`` says what is wrong with the manager.
    """
    parts = [f"{state.run}: {known_standing or standing(state)}", _progress_text(state)]
    if state.rewards.latest is not None:
        parts.append(f"reward {number(state.rewards.latest)}")
    if state.finish is None and state.outcome is None:
        failures = failures_of(state)
        parts += [text.plain for text in pool_texts(state, now)]
        unusual = [one for one in state.workers if one.status not in NORMAL_STATUSES and not _is_queued(state, one)]
        parts += [f"{one.incarnation} {doing(state, one, now, failures).word}" for one in unusual[:MAX_LISTED]]
    if note:
        parts.append("its manager does not respond" if known_standing else note)
    return ", ".join(parts)


def _is_queued(state: State, replica: Replica) -> bool:
    """Return whether a replica waits for a node of its elastic pool, which is normal for any length of time."""
    return replica.status is Status.WANTED and not replica.failures and state.job.role(replica.role).is_elastic


# ── header ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _title(state: State, until: float, width: int, known_standing: str) -> Iterator[tuple[str, str] | str]:
    word = known_standing or standing(state)
    colour = "red" if known_standing else _standing_colour(state, word)
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
    (done, all_), trained = progress(state), reached_step(state)
    beyond = f" (trained: {trained})" if state.job.steps and trained > done else ""
    return f"{'step' if state.job.steps else 'done'} {done}/{all_}{beyond}"


def _standing_colour(state: State, word: str) -> str:
    """Return the colour of the run's standing, ``word``."""
    outcome = state.outcome or (state.finish.outcome if state.finish is not None else None)
    if outcome is not None:
        return OUTCOME_COLOUR[outcome]
    return {"waiting for nodes": "yellow", "running": "green"}.get(word, "cyan")


def _facts(
    state: State, now: float, width: int, notes: Sequence[str], held: dict[NodeName, str], folders: ModelFolders
) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) of all facts below the title."""
    until = known_until(state, now, notes)
    yield from _of_training(state, until, width, bool(notes))
    if state.outcome is None:
        yield from _of_nodes(state, now, until, width, held)
        if state.cluster_unknown:
            yield "cluster", bounded(_unknown_cluster(state, now), "yellow")
        for label, note in zip(("manager", ""), notes or (_manager(state, now),), strict=False):
            yield label, bounded(note, "red" if notes else "")
        if notes:
            yield "as of", Text(f"{span(now - state.at)} ago: nothing has been recorded since", "red")
        for store in (one for one in state.workers if one.is_current and one.outside is not None):
            yield "outside", bounded(f"the run {outside_wait_text(store, until)}", "yellow")
        yield from _notes_of_replicas(state)
    yield from model_folder_rows(folders)
    decided = "; ".join(state.finish.why.evidence) if state.finish is not None else ""
    if because := state.why if state.outcome is not None else decided:
        yield "because", Text(because)
    if state.outcome is not None and (jobs := retained_jobs(state)):
        kept = f"job {jobs}, while it lasts (rrl resume uses it, scancel {jobs} releases it)"
        yield "kept", Text(kept, "yellow")


def _of_training(state: State, until: float, width: int, frozen: bool) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) of rewards, pace and tokens, as known at ``until``; ``frozen`` figures forecast nothing."""
    free = width - _LABEL_COLUMNS
    if state.rewards.points:
        yield "reward", _rewards(state, free, width >= NARROW_COLUMNS)
    if width >= NARROW_COLUMNS and (metrics := _metrics(state, free)):
        yield "metrics", Text(metrics)
    ages = [_token_ages(state)] if state.token_ages.steps else []
    yield from packed("eval", evaluation_figures(state.evaluations), free)
    rows = (
        ("pace", progress_figures(state, until, frozen)),
        ("time", idle_shares_of_roles(state)),
        ("tokens", [*token_rates(state), *ages]),
        ("lengths", length_figures(state.stream_figures)),
        ("agents", agent_figures(state.episode_figures, state.outcome is not None)),
    )
    for label, parts in rows:
        yield from packed(label, parts, free)
    if (share := state.metrics.get("stale_share", 0.0)) > MAX_STALE_SHARE:
        yield (
            "stale",
            Text(f"{100 * share:.0f}% of all groups are dropped: older than [sampling] staleness allows", "yellow"),
        )
    if groups := as_count(state.metrics.get("unscored_groups", 0.0)):
        yield "dropped", bounded(unscored_text(groups, state.metrics.get("unscored_share", 0.0)), "yellow")


def _of_nodes(
    state: State, now: float, until: float, width: int, held: dict[NodeName, str]
) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) of nodes, rollout pools as known at ``until``, GPUs, drains, and weights.

    ``held`` has a line for each failed node that the circuit breaker keeps in use.
    """
    yield "nodes", _nodes(state)
    yield from packed("pools", pool_texts(state, until), width - _LABEL_COLUMNS)
    yield from packed("gpus", _gpus(state, now), width - _LABEL_COLUMNS)
    for label, line in _nodes_left(state, now):
        yield label, bounded(line, "yellow")
    for label, line in zip(("breaker", *[""] * MAX_LISTED), held.values(), strict=False):
        yield label, bounded(line, "yellow")
    yield from packed("weights", list(_weights(state)), width - _LABEL_COLUMNS)


def _rewards(state: State, free: int, mean: bool) -> Text:
    """Return the curve of the rewards in ``free`` columns, between the values at its two ends.

    The curve has a column for each step until it fills the space; then it keeps its width. With ``mean``, the mean of
    the last ten steps follows.
    """
    points = state.rewards.points
    last = f"   last ten steps {number(state.rewards.mean_last)}" if mean else ""
    free -= len(f"{number(points[0])}  {number(points[-1])}{last}") + 2  # a column's mean may have a minus sign
    columns = resampled(points, max(1, min(free, state.rewards.newest)))
    finite = [value for value in columns if isfinite(value)]
    first, newest = (finite[0], finite[-1]) if finite else (None, None)
    text = Text(f"{number(first)} ").append(curve(columns), "green").append(f" {number(newest)}")
    return text.append(last, "bright_black")


def _manager(state: State, now: float) -> str:
    number_text = f"number {state.epoch} of this run, " if state.epoch > 1 else ""
    return (
        f"{number_text}on {state.host or '?'} for {span(now - state.managed_since)},"
        f" last record {span(now - state.at)} ago"
    )


def _unknown_cluster(state: State, now: float) -> str:
    silent = f"no complete answer for {span(now - state.cluster_unknown_since)} ({state.cluster_unknown})"
    return f"{silent}: what needs one waits, such as a replacement; the roles go on"


def _weights(state: State) -> Iterator[Text]:
    """Yield how the weights get to the rollouts, and how far the rollouts are behind the trainer."""
    addresses = {one.weight_address for one in state.workers if one.is_current and one.weight_address}
    if transports := sorted({address.partition("://")[0] for address in addresses}):
        listed = " and ".join([*([", ".join(transports[:-1])] if len(transports) > 1 else []), transports[-1]])
        mixed = len(transports) > 1 and not INTEROPERABLE_TRANSPORTS.issuperset(transports)
        apart = "; not all of these can exchange weights" if mixed else ""
        yield Text(f"over {listed}{apart}", "red" if apart else "")
    if (lag := weights_lag_steps(state)) is not None:
        low, high = lag
        behind = f"{plural(high, 'step')}" if low == high else f"{low} to {high} steps"
        yield Text(f"rollouts {behind} behind the trainer" if high else "rollouts have those of the trainer")
    yield from delta_figures(state.workers)


def _notes_of_replicas(state: State) -> Iterator[tuple[str, Text]]:
    """Yield (label, text) for the notes of replicas; equal notes share a row."""
    notes: dict[str, list[str]] = {}
    for replica in (*state.workers, *state.guests):
        if replica.note and replica.is_current:
            notes.setdefault(replica.note, []).append(replica.id)
    for note, replicas in list(notes.items())[:MAX_LISTED]:
        more = f" and {len(replicas) - 1} more" if len(replicas) > 1 else ""
        yield "note", bounded(f"{replicas[0]}{more}: {note}")


def outside_wait_text(replica: Replica, now: float) -> str:
    """Return what the run waits for outside of itself according to the store, and for how long."""
    assert replica.outside is not None
    kind, episode, time = replica.outside.kind, replica.outside.episode, span(now - replica.outside_since)
    match kind:
        case OutsideKind.EPISODE:
            return f"waits for {time} for an outside agent to open an episode"
        case OutsideKind.AGENT:
            return f"waits for episode {episode} of outside agents, opened {time} ago"
        case OutsideKind.REWARD:
            return f"waits for the reward of episode {episode}, finished {time} ago"


def _held_back_nodes(state: State, now: float) -> Iterator[tuple[NodeName, str]]:
    """Yield each failed node that the circuit breaker keeps in use, and a line with duration, reason and evidence."""
    node_failed = any(one.verdict is Verdict.FAIL and one.node is not None for one in state.findings.values())
    if state.finish is not None or not node_failed:
        return
    from ...manager.planner.recovery.node_exclusion import deferred_exclusions

    for deferred in deferred_exclusions(state, now):
        until = "until Slurm reports otherwise" if deferred.until == inf else f"for {span(deferred.until - now)}"
        evidence = "; ".join(deferred.exclude.why.evidence)
        node = deferred.exclude.node
        yield node, f"{node} stays in use {until}: {deferred.why} ({evidence})"


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
    """Return a text about the nodes: in use, spare, warm, and unusable, with the reason.

    While the run has no nodes, the text gives the number of requested nodes. Nodes whose agent has not started are
    listed separately.
    """
    if not state.nodes:
        pending = [a.status.detail for a in state.allocations.values() if a.status is not None and a.status.detail]
        return Text(f"none yet, {state.job.nodes} wanted" + (f" ({pending[0]})" if pending else ""), "yellow")
    agents = {replica.node for replica in state.replicas.values() if replica.role == AGENT and replica.pid}
    used = {replica.node for replica in state.workers if replica.is_current}
    used |= {node.name for node in state.nodes.values() if is_of_pool(state, node)}
    good = [n for n in state.nodes.values() if not node_trouble(n)]
    spare = [n.name for n in good if n.name not in used]
    text = Text(folded(n.name for n in good if n.name in used) or "none in use")
    if spare:
        text.append(f"  spare {folded(spare)}", "bright_black")
    ready = {r.node for r in state.replicas.values() if r.role == STANDBY_ROLE and r.phase == STANDBY and r.is_current}
    if waiting := [n.name for n in good if n.name in ready]:
        text.append(f"  warm standby on {folded(waiting)}", "green")
    if without := [n.name for n in good if n.name not in agents]:
        text.append(f"  no agent yet on {folded(without)}", "yellow")
    troubles: dict[str, list[str]] = {}
    for node in state.nodes.values():
        if trouble := node_trouble(node):
            troubles.setdefault(trouble, []).append(node.name)
    for trouble, names in troubles.items():
        text.append(f"  {folded(names)} {trouble}", "red")
    queued = Counter[str]()
    for allocation in state.allocations.values():
        if allocation_text := _allocation_trouble(allocation):
            text.append(f"  {allocation_text}", "yellow")
        elif allocation.pending and allocation.status is not None:
            queued[allocation.status.detail] += allocation.request.count
    for detail, count in queued.items():
        text.append(f"  {count} more requested ({detail})", "yellow")
    return text


def is_of_pool(state: State, node: Node) -> bool:
    """Return whether a node is one of a further rollout pool, which is no spare even if it is idle."""
    return any(group.dedicated and group.name == node.node_group for group in state.job.node_groups)


def _nodes_left(state: State, now: float) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each node that a user drains, and for each that the run left without an open finding."""
    for name, (command, by) in list(state.node_commands.items())[:MAX_LISTED]:
        if command == DRAIN:
            yield "drain", f"{name}, requested by {by}"
    for node in state.nodes.values():
        if node.drain_error:
            yield "drain", f"{node.name}, which an administrator has to do: {node.drain_error}"
    explained = {finding.node for finding in state.findings.values()}
    excluded = [one for one in state.nodes.values() if one.excluded is not None and one.name not in explained]
    for node in sorted(excluded, key=lambda one: -one.excluded_at)[:MAX_NODES_LEFT]:
        yield node_trouble(node), f"{node.name} {span(now - node.excluded_at)} ago: {node.excluded}"


def _gpus(state: State, now: float) -> list[Text]:
    """Return how much the GPUs of the run's nodes are used; empty if no agent reports it."""
    if now - state.gpu_use_at > MAX_GPU_USE_AGE_S:
        return []
    used = [(name, state.gpu_use[name]) for name in sorted(state.gpu_use, key=natural_sort_key) if name in state.nodes]
    if len(used) <= MAX_GPU_NODES:
        return [_gpu_text(name, use) for name, use in used]
    texts = [Text(f"{sum(use.gpus for _, use in used)} on {len(used)} nodes")]
    busy = [(use.busy, name) for name, use in used if use.busy is not None]
    if busy:
        mean = sum(share for share, _ in busy) / len(busy)
        texts.append(Text(f"{percent(mean)} busy (least: {min(busy)[1]} {percent(min(busy)[0])})"))
    full = [(use.memory_used / use.memory_total, name) for name, use in used if use.memory_total]
    if full:
        mean = sum(share for share, _ in full) / len(full)
        texts.append(Text(f"memory {percent(mean)} full (most: {max(full)[1]} {percent(max(full)[0])})"))
    return texts


def _gpu_text(name: NodeName, use: GpuUse) -> Text:
    return Text(f"{name}: {gpu_use_text(use)}".rstrip(": "))


def gpu_use_text(use: GpuUse) -> str:
    """Return how busy the GPUs of a node are and how full their memory is; empty if neither is known."""
    gib = 2**30
    busy = [] if use.busy is None else [f"{percent(use.busy)} busy"]
    memory = [f"{use.memory_used / gib:.0f} of {use.memory_total / gib:.0f} GiB"] if use.memory_total else []
    return ", ".join([*busy, *memory])


def _allocation_trouble(allocation: Allocation) -> str:
    """Return a text if the cluster impairs the allocation, for example by suspending it; else an empty text."""
    if allocation.status is None or allocation.releasing or allocation.orphan:
        return ""
    nodes = folded(allocation.status.nodes)
    return f"{nodes} suspended" if allocation.suspended else f"{nodes} preempted" if allocation.reclaimed else ""


def node_trouble(node: Node) -> str:
    """Return in a word why the run does not use a node, or which problem the cluster reports for it; else empty."""
    if node.excluded is not None:
        return "drained" if node.drain_reason else "excluded"
    if node.status is not None and node.status.state not in (NodeState.UP, NodeState.UNKNOWN):
        return node.status.state.value
    return ""
