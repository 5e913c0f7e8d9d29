"""Compute the Prometheus metrics of a run: restarts, findings, steps, tokens, lost GPU time, effective training time.

The manager serves them if ``[health] metrics`` is set. :func:`samples` is pure. It computes metrics from the state, the
timeline of failures and :class:`RunCounters`. These counters start at 0 with each manager, as Prometheus permits.
Alerts and a dashboard on these metrics are in docs/alerts.yml and docs/grafana.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...cluster.base import NodeState
from ...core.types import Incarnation, Outcome, Verdict, gang_of, is_support, role_of
from ...health.detection.health_monitor import HealthMonitor
from ..model import events as ev
from ..model.actions import Exclude
from ..model.figures.idle_times import IdleTimes, idle_shares
from ..model.figures.stream_figures import EpisodeFigures, StreamFigures
from ..model.pools import extras, lending_figures, pool_figures
from ..model.queries import weights_lag_steps
from ..model.state import State, Status
from .accounting.pool_use import pool_uses
from .failure_records import Changes
from .failure_timeline import FailureTimeline, fences


class RunCounters:
    """The counters of one manager, whose ``timeline`` of failures continues from the state that it restored."""

    def __init__(self, timeline: FailureTimeline) -> None:
        self.timeline = timeline
        self.restarts: Counter[tuple[str, ...]] = Counter()
        """Restarts of replicas, by role and rung."""
        self.failures: Counter[tuple[str, ...]] = Counter()
        """Findings that became FAIL, by detector and cause."""
        self.exclusions: Counter[str] = Counter()
        """Excluded nodes, by cause; the cause is ``person`` for nodes that a user excluded."""
        self.steps = 0
        self.weight_bytes_received: Counter[tuple[str, ...]] = Counter()
        self.weight_bytes: Counter[tuple[str, ...]] = Counter()
        self.delta_fallbacks: Counter[tuple[str, ...]] = Counter()
        """Sums of :class:`.WeightTraffic` by role."""

    def apply(self, before: State | None, after: State, stamped: ev.Stamped, changes: Changes) -> None:
        """Count an event that changed the state from ``before`` to ``after``.

        ``changes`` is what the event changed in the timeline.
        """
        event = stamped.event
        if isinstance(event, ev.StepCommitted):
            self.steps += before is not None and after.step > before.step
        elif isinstance(event, ev.WeightsRecorded) and before is not None:
            for replica in {incarnation.replica for incarnation, _ in event.versions}:
                received = after.replica(replica).traffic.since(before.replica(replica).traffic)
                role = (role_of(replica),)
                self.weight_bytes_received[role] += received.received
                self.weight_bytes[role] += received.nbytes
                self.delta_fallbacks[role] += received.fallbacks
        elif isinstance(event, ev.Decided):
            self._decided(event)
        if changes.raised is not None:
            self.failures[changes.raised.detector, changes.raised.cause.value] += 1

    def _decided(self, event: ev.Decided) -> None:
        """Count exclusions and restarts."""
        if isinstance(event.action, Exclude):
            cause = event.action.cause
            self.exclusions["person" if event.action.by else cause.value if cause is not None else "none"] += 1
        for fence in fences(event):
            replica = fence.incarnation.replica
            if replica == gang_of(replica) and not is_support(replica):  # a gang restarts once
                self.restarts[role_of(replica), fence.rung.value] += 1


MAX_FINDING_SERIES = 500
"""Maximum number of series of findings, which limits the load on Prometheus. Further findings are counted without their
node."""
RUN_STATES = ("waiting", "running", "ending", *(outcome.value for outcome in Outcome))
"""Values of the label ``state`` of rrl_run_state."""


class Facts(Struct, frozen=True):
    """Inputs of :func:`samples` that are not part of the state."""

    now: float
    """Manager's time (s)."""
    tokens: int = 0
    """Tokens that rollouts generated under this manager."""
    lease_age: float = 0.0
    """Seconds since this manager last confirmed that it has no successor."""
    unwritten: int = 0
    """Journal records that are not durable yet."""
    journal_lag: float = 0.0
    """Age in seconds of the oldest record that is not durable yet."""
    history_lost: int = 0
    """Records of the health history that could not be written."""


def samples(state: State, counters: RunCounters, facts: Facts) -> Iterator[Metric]:
    """Yield all metrics of a run at one moment."""
    yield from _of_run(state, counters, facts)
    yield from _of_roles(state, counters, facts)
    yield from _of_nodes(state, counters)
    yield from _of_manager(state, facts)


def _of_run(state: State, counters: RunCounters, facts: Facts) -> Iterator[Metric]:
    info = (state.run, state.job.name, state.job.cluster)
    yield _labelled("rrl_run_info", "The run that this manager manages.", ("run", "job", "cluster"), {info: 1.0})
    now = _run_state(state)
    yield _labelled(
        "rrl_run_state",
        "1 for the state that the run is in.",
        ("state",),
        {(name,): float(name == now) for name in RUN_STATES},
    )
    yield _gauge("rrl_run_start_time_seconds", "Start of the run, in seconds since 1970.", state.started)
    yield _gauge("rrl_steps_completed", "Newest committed training step.", state.step)
    yield _gauge("rrl_steps_wanted", "Steps after which the run is complete; 0 if it has no trainer.", state.job.steps)
    yield _counter("rrl_steps", "Training steps committed under this manager.", counters.steps)
    yield _gauge(
        "rrl_token_age_median", "Median age of the tokens of the newest steps, in training steps.", state.token_ages.p50
    )
    yield _gauge(
        "rrl_token_age_max", "Age of the oldest token of the newest steps, in training steps.", state.token_ages.max
    )
    yield _gauge(
        "rrl_unscored_groups",
        "Groups dropped because an answer could not be scored, as of the newest step.",
        state.metrics.get("unscored_groups", 0.0),
    )
    yield _counter("rrl_tokens_generated", "Tokens that rollouts generated under this manager.", facts.tokens)
    if state.ettr is not None:
        yield _gauge(
            "rrl_effective_time_ratio",
            "Effective training time ratio (ETTR) of the whole run; absent until one step is undisturbed.",
            state.ettr,
        )
    yield _counter(
        "rrl_gpu_seconds_lost",
        "GPU time lost while replicas were down, until they work again.",
        counters.timeline.gpu_seconds_until(facts.now),
    )


def _of_roles(state: State, counters: RunCounters, facts: Facts) -> Iterator[Metric]:
    replicas = state.workers
    counted = Counter((replica.role, replica.status.value) for replica in replicas)
    all_pairs = [(role.name, status.value) for role in state.job.roles for status in Status]
    yield _labelled(
        "rrl_replicas",
        "Processes by role and status.",
        ("role", "status"),
        {pair: float(counted[pair]) for pair in all_pairs},
    )
    yield _labelled(
        "rrl_replicas_wanted",
        "Processes that the job wants, by role.",
        ("role",),
        {(role.name,): float(role.replicas * role.ranks) for role in state.job.roles},
    )
    yield _counted(
        "rrl_restarts", "Restarts of replicas, by role and rung of the ladder.", ("role", "rung"), counters.restarts
    )
    down = Counter(role_of(outage.replica) for outage in list(counters.timeline.outages.values()))
    yield from _of_clocks(state.idle_times)
    yield from _of_pools(state, facts.now)
    yield from _of_lending(state)
    yield from _of_stream(state.stream_figures)
    if state.episode_figures != EpisodeFigures():
        yield from _of_episodes(state.episode_figures)
    if (lag := weights_lag_steps(state)) is not None:
        yield _labelled(
            "rrl_weights_lag_steps",
            "Training steps by which weights of rollouts are behind the trainer.",
            ("rollout",),
            {("first",): float(lag[0]), ("last",): float(lag[1])},
        )
    yield _counted(
        "rrl_weight_bytes_received",
        "Bytes received for weight versions under this manager.",
        ("role",),
        counters.weight_bytes_received,
    )
    yield _counted(
        "rrl_weight_bytes",
        "Full size of these weight versions; the bytes received are fewer if deltas are sent.",
        ("role",),
        counters.weight_bytes,
    )
    yield _counted(
        "rrl_delta_fallbacks",
        "Deltas with wrong results, after which whole chunks were requested.",
        ("role",),
        counters.delta_fallbacks,
    )
    yield _labelled(
        "rrl_replicas_down",
        "Replicas that are down after a failure, by role.",
        ("role",),
        {(role.name,): float(down[role.name]) for role in state.job.roles},
    )


def _of_pools(state: State, now: float) -> Iterator[Metric]:
    """Yield the figures of each rollout pool and of the guests.

    Yields nothing if the run has a single pool and had neither extras nor guests.
    """
    uses = pool_uses(state, now)
    pools = {role.name: role for role in state.job.kind("rollout")}
    figures = [(one.pool, pool_figures(state, pools[one.pool], now)) for one in uses if one.pool in pools]
    counts: dict[tuple[str, ...], float] = {}
    for name, pool in figures:
        counts |= {(name, "at_work"): pool.at_work, (name, "wanted"): pool.wanted, (name, "queued"): pool.queued_nodes}
    yield _labelled(
        "rrl_pool_replicas",
        "Replicas of a rollout pool that work or are wanted, and nodes of its node group that are in the queue.",
        ("pool", "what"),
        counts,
    )
    yield _labelled("rrl_extras", "Rollouts that work on spares.", (), {(): float(extras(state))} if uses else {})
    tokens: dict[tuple[str, ...], float] = {(one.pool,): one.tokens for one in uses}
    yield _counted("rrl_pool_tokens", "Tokens that a rollout pool has generated.", ("pool",), tokens)
    hours: dict[tuple[str, ...], float] = {(one.pool,): one.node_hours for one in uses}
    yield _counted("rrl_pool_node_hours", "Node hours that a rollout pool has used.", ("pool",), hours)
    limits: dict[tuple[str, ...], float] = {(one.pool,): one.budget_node_hours for one in uses if one.budget_node_hours}
    yield _labelled("rrl_pool_node_hours_limit", "Node hours that an elastic rollout pool may use.", ("pool",), limits)


def _of_lending(state: State) -> Iterator[Metric]:
    """Yield how much the trainer lends its GPUs; nothing if the job does not lend."""
    figures = lending_figures(state)
    if figures is None:
        return
    yield _gauge("rrl_trainer_lent_ratio", "Share of the last minutes that the trainer lent its GPUs.", figures.lent)
    if figures.hand_over_s is not None:
        yield _gauge(
            "rrl_hand_over_seconds", "Time that lending the GPUs and taking them back cost.", figures.hand_over_s
        )
    yield _labelled(
        "rrl_guests",
        "Rollouts on nodes of the trainer that have joined, and that the run has if all of them exist.",
        ("what",),
        {("at_work",): float(figures.guests_at_work), ("wanted",): float(figures.guests)},
    )


def _of_clocks(times: IdleTimes) -> Iterator[Metric]:
    """Yield the seconds and idle shares by role and idle cause (``none``: time at work), and the trained tokens."""
    now, before = times.now, times.before
    seconds: dict[tuple[str, ...], float] = {
        (role, cause or "none"): ns / 1e9 for role, point in now.roles.items() for cause, ns in point.ns.items()
    }
    yield _counted(
        "rrl_process_seconds",
        "Run time of processes, by role and by what they waited for (none: at work).",
        ("role", "cause"),
        seconds,
    )
    shares: dict[tuple[str, ...], float] = {
        (role, cause): share for role in now.roles for cause, share in idle_shares(now, before, role).items()
    }
    yield _labelled(
        "rrl_idle_ratio",
        "Share of the last minutes that a role was idle, by what it waited for.",
        ("role", "cause"),
        shares,
    )
    yield _counter("rrl_tokens_trained", "Tokens that the committed steps trained on.", times.trained_tokens)


def _of_stream(figures: StreamFigures) -> Iterator[Metric]:
    """Yield the metrics of :class:`StreamFigures`; values that no step has reported are left out."""
    if figures.steps:
        yield _gauge("rrl_parts_per_step", "Mean number of parts of a training step.", figures.parts / figures.steps)
    yield _counted(
        "rrl_tokens_trained_by_age",
        "Trained tokens by age in training steps (15: 15 or more).",
        ("age",),
        {(str(age),): float(tokens) for age, tokens in figures.ages.items()},
    )
    if figures.length_bias is not None:
        yield _gauge(
            "rrl_length_bias",
            "Mean length of trained answers divided by the mean length of all finished answers.",
            figures.length_bias,
        )
    if figures.recall20 is not None:
        yield _gauge(
            "rrl_length_recall",
            "Share of the longest fifth of recent groups that was expected to be long.",
            figures.recall20,
        )
    yield _gauge(
        "rrl_long_groups", "Groups that are expected to be more than twice as long as usual.", figures.long_groups
    )


def _of_episodes(figures: EpisodeFigures) -> Iterator[Metric]:
    """Yield the numbers of episodes and turns of a run with agents."""
    yield _gauge("rrl_episodes_at_work", "Episodes with an attempt in progress at the newest commit.", figures.at_work)
    ends = {
        "finished": figures.finished,
        "retried": figures.retried,
        "replayed": figures.replayed,
        "dropped": figures.dropped,
    }
    yield _counted(
        "rrl_episodes",
        "Episodes that finished or were dropped; attempts that were retried or replayed.",
        ("what",),
        {(what,): float(count) for what, count in ends.items()},
    )
    yield _counter("rrl_turns", "Turns of finished episodes.", figures.turns)
    yield _counter("rrl_branches", "Samples of finished episodes.", figures.branches)
    yield _counter(
        "rrl_given_tokens", "Given tokens (not sampled) in the turns of finished episodes.", figures.given_tokens
    )
    yield _counter(
        "rrl_untrained_turns", "Turns that are not trained: of another policy, or not used.", figures.untrained_turns
    )
    yield _counter(
        "rrl_token_drift",
        "Tokens trained in another context than they were sampled in; must be 0.",
        figures.token_drift,
    )


def _of_nodes(state: State, counters: RunCounters) -> Iterator[Metric]:
    nodes = Counter(
        "excluded" if node.excluded is not None else node.status.state.value if node.status is not None else "unknown"
        for node in state.nodes.values()
    )
    yield _labelled(
        "rrl_nodes",
        "Nodes of the run by state; the run no longer uses excluded nodes.",
        ("state",),
        {(name,): float(nodes[name]) for name in (*NodeState, "excluded")},
    )
    yield _labelled(
        "rrl_findings", "Standing findings about nodes and replicas.", ("verdict", "detector", "node"), _findings(state)
    )
    yield _counted(
        "rrl_failures_found",
        "Findings that became FAIL, by detector and cause.",
        ("detector", "cause"),
        counters.failures,
    )
    yield _counted(
        "rrl_exclusions",
        "Nodes excluded, by cause.",
        ("cause",),
        {(cause,): number for cause, number in counters.exclusions.items()},
    )
    drain_requests = sum(bool(node.drain_error) for node in state.nodes.values())
    yield _gauge(
        "rrl_drain_requests", "Nodes that administrators should drain because the run may not.", drain_requests
    )


def _of_manager(state: State, facts: Facts) -> Iterator[Metric]:
    yield _gauge("rrl_manager_epoch", "Managers that the run has had.", state.epoch)
    yield _gauge(
        "rrl_manager_lease_age_seconds",
        "Time since this manager last confirmed that it has no successor.",
        facts.lease_age,
    )
    yield _gauge("rrl_journal_unwritten_records", "Records that are not durable yet.", facts.unwritten)
    yield _gauge("rrl_journal_lag_seconds", "Age of the oldest record that is not durable yet.", facts.journal_lag)
    yield _counter(
        "rrl_history_lines_lost", "Records that could not be written to the health history.", facts.history_lost
    )


def _run_state(state: State) -> str:
    if state.outcome is not None:
        return state.outcome.value
    if state.finish is not None:
        return "ending"
    return "waiting" if state.running_since is None else "running"


def _findings(state: State) -> dict[tuple[str, ...], float]:
    """Count the findings by verdict, detector and node (for a finding about a replica, the replica's node).

    If there are more than MAX_FINDING_SERIES series, further findings are counted without their node. FAIL findings are
    counted first, so that this affects them last.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    failures_first = sorted(
        state.findings.values(), key=lambda finding: (finding.verdict is not Verdict.FAIL, finding.key)
    )
    for finding in failures_first:
        about = finding.incarnation
        node = finding.node or (state.replica(about.replica).node if about is not None else None) or ""
        series = (finding.verdict.value, finding.detector, node)
        if series not in counts and len(counts) >= MAX_FINDING_SERIES:
            series = (finding.verdict.value, finding.detector, "")
        counts[series] += 1
    return {series: float(number) for series, number in counts.items()}


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    """Return a counter; the Prometheus client appends ``_total`` to its name."""
    return CounterMetricFamily(name, help_text, value=value)


def _labelled(name: str, help_text: str, labels: Iterable[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=list(labels))
    for series, value in values.items():
        family.add_metric(series, value)
    return family


def _counted(name: str, help_text: str, labels: Iterable[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=list(labels))
    for series, value in dict(values).items():  # a copy, since the manager's thread changes the counters
        family.add_metric(series, value)
    return family


class TokenCounter:
    """The number of tokens generated under one manager. Only totals of the same epoch are comparable."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self._monitor = monitor
        self._retired_total = 0

    def retire(self, incarnation: Incarnation) -> None:
        """Keep the number of tokens of a rollout's incarnation that is about to be removed from the health monitor."""
        view = self._monitor.replicas.get(incarnation.replica)
        if view is not None and view.incarnation == incarnation and view.role.traits.leases_turns:
            self._retired_total += view.done or 0

    def total(self) -> int:
        """Return the number of tokens generated so far."""
        current = (view.done or 0 for view in self._monitor.replicas.values() if view.role.traits.leases_turns)
        return self._retired_total + sum(current)
