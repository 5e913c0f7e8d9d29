"""Prometheus metrics of a run, served by its manager (``[health] metrics``): restarts, findings, steps, tokens, GPU
time lost, effective training time.

:func:`samples` is pure: metrics are computed from the state and a :class:`Tally`, which counts from the start of each
manager, as Prometheus' counters may. Effective time uses what replicas report at the moment; ``summary.json`` corrects
it by a failure's first symptom. Names, alerts and a dashboard: docs/alerts.yml, docs/grafana.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...core.phases import phase
from ...core.types import AGENT, SHADOW, Life, Outcome, ReplicaId, Verdict, gang_of, role_of
from ...health.detection.watch import Watch
from ..cluster.base import NodeState
from ..model import events as ev
from ..model.actions import Exclude
from ..model.queries import workers
from ..model.state import State, Status
from .downtime import Downtime, fences


class Tally:
    """``state``: as the manager found the run; ``at``: when its own first record was made."""

    def __init__(self, state: State | None, at: float) -> None:
        self.began = at
        self.downtime = Downtime(state)
        self.restarts: Counter[tuple[str, ...]] = Counter()
        """by role and rung"""
        self.failures: Counter[tuple[str, ...]] = Counter()
        """findings of FAIL that were raised, by detector and cause"""
        self.exclusions: Counter[str] = Counter()
        """by cause; ``person``: somebody asked for it"""
        self.steps = 0
        self._failing: dict[str, str] = {}
        """detector of each standing FAIL, by Finding.key"""
        self._working: dict[ReplicaId, Life] = {}
        self._at_work: Counter[str] = Counter()
        """replicas by role"""
        self._effective, self._rate, self._since = 0.0, 0.0, at
        if state is not None and state.verdict is None:
            for replica in workers(state):
                if replica.status is Status.JOINED and phase(replica.phase).useful:
                    self._works(replica.life)
            self._rate = self._now_effective(state)

    def enter(self, before: State | None, after: State, stamped: ev.Stamped) -> None:
        event, at = stamped.event, stamped.at
        self.downtime.enter(before, after, stamped)
        if isinstance(event, ev.PhaseEntered):
            if after.believed(event.life) and phase(event.phase).useful:
                self._works(event.life)
            else:
                self._rests(event.life)
        elif isinstance(event, ev.StepEnded):
            self._rests(event.life)
        elif isinstance(event, ev.StepCommitted):
            self.steps += before is not None and after.step > before.step
        elif isinstance(event, ev.FindingChanged):
            key, failing = event.finding.key, event.finding.verdict is Verdict.FAIL
            if failing and key not in self._failing:
                self.failures[event.finding.detector, event.finding.cause.value] += 1
                self._failing[key] = event.finding.detector
            elif not failing:
                self._failing.pop(key, None)
        elif isinstance(event, ev.Decided):
            self._decided(event)
        else:
            return
        self._settle(after, at)

    def effective(self, now: float) -> float:
        """Seconds of effective training since the manager began (docs/sources.md, ETTR)."""
        return self._effective + self._rate * max(0.0, now - self._since)

    def _decided(self, event: ev.Decided) -> None:
        if isinstance(event.action, Exclude):
            cause = event.action.cause
            self.exclusions["person" if event.action.by else cause.value if cause is not None else "none"] += 1
        for fence in fences(event):
            if role_of(fence.life.replica) in (AGENT, SHADOW):
                continue
            self._rests(fence.life)
            if fence.life.replica == gang_of(fence.life.replica):  # a gang restarts once
                self.restarts[role_of(fence.life.replica), fence.rung.value] += 1

    def _works(self, life: Life) -> None:
        if life.replica not in self._working:
            self._at_work[role_of(life.replica)] += 1
        self._working[life.replica] = life

    def _rests(self, life: Life) -> None:
        if self._working.get(life.replica) == life:
            del self._working[life.replica]
            self._at_work[role_of(life.replica)] -= 1

    def _settle(self, state: State, at: float) -> None:
        self._effective, self._since = self.effective(at), max(at, self._since)
        self._rate = 0.0 if state.verdict is not None else self._now_effective(state)

    def _now_effective(self, state: State) -> float:
        """Share of each second: 1 while every trainer works, else the rollouts' share of who trains and generates."""
        wanted = sum(role.replicas for role in state.job.kind("trainer"))
        ranks = sum(role.replicas * role.ranks for role in state.job.kind("trainer"))
        if ranks and self._at_work["trainer"] >= ranks:
            return 1.0
        rollouts = self._at_work["rollout"]
        return rollouts / (rollouts + wanted) if rollouts and state.step else 0.0


MOST_FINDINGS = 500
"""series of findings; what is beyond is told without its node, so that a bad day of a big run floods no Prometheus"""
RUN_STATES = ("waiting", "running", "ending", *(outcome.value for outcome in Outcome))


class Facts(Struct, frozen=True):
    """What the manager knows besides the state."""

    now: float
    """manager's time (s)"""
    tokens: int = 0
    """that rollouts generated under this manager"""
    lease_age: float = 0.0
    """s since it was last seen that there is no successor"""
    unwritten: int = 0
    """records that are not durable yet"""
    journal_lag: float = 0.0
    """s since the oldest of these"""
    history_lost: int = 0
    """lines of the history that could not be written"""


def samples(state: State, tally: Tally, facts: Facts) -> Iterator[Metric]:
    """All metrics of a run at one moment."""
    yield from _of_run(state, tally, facts)
    yield from _of_roles(state, tally, facts)
    yield from _of_nodes(state, tally)
    yield from _of_manager(state, facts)


def _of_run(state: State, tally: Tally, facts: Facts) -> Iterator[Metric]:
    info = {"run": state.run, "job": state.job.name, "cluster": state.job.cluster}
    yield _labelled("rrl_run_info", "The run that this manager manages.", tuple(info), {tuple(info.values()): 1.0})
    now = _run_state(state)
    yield _labelled("rrl_run_state", "1 for the state that the run is in.", ("state",),
                    {(name,): float(name == now) for name in RUN_STATES})  # fmt: skip
    yield _gauge("rrl_run_start_time_seconds", "When the run began, s since 1970.", state.started)
    yield _gauge("rrl_steps_completed", "Newest committed trainer step.", state.step)
    yield _gauge("rrl_steps_wanted", "Steps after which the run is complete; 0: it has no trainer.", state.job.steps)
    yield _counter("rrl_steps", "Trainer steps committed under this manager.", tally.steps)
    yield _gauge("rrl_token_age_median", "Median age of the tokens of the newest steps, in weight versions.",
                 state.token_ages.p50)  # fmt: skip
    yield _gauge("rrl_token_age_max", "Age of the oldest token of the newest steps, in weight versions.",
                 state.token_ages.max)  # fmt: skip
    yield _counter("rrl_tokens_generated", "Tokens that rollouts generated under this manager.", facts.tokens)
    spent, effective = max(0.0, facts.now - tally.began), tally.effective(facts.now)
    yield _counter("rrl_managed_seconds", "Time that this manager has managed the run.", spent)
    yield _counter("rrl_effective_seconds", "Of that, effective training (ETTR).", effective)
    yield _gauge("rrl_effective_time_ratio", "Share of effective training so far (ETTR).",
                 effective / spent if spent else 0.0)  # fmt: skip
    yield _counter("rrl_gpu_seconds_lost", "GPU time that replicas stood still, from failure to work.",
                   tally.downtime.gpu_seconds_by(facts.now))  # fmt: skip


def _of_roles(state: State, tally: Tally, facts: Facts) -> Iterator[Metric]:
    told = workers(state)
    counted = Counter((one.role, one.status.value) for one in told)
    all_pairs = [(role.name, status.value) for role in state.job.roles for status in Status]
    yield _labelled("rrl_replicas", "Processes by role and where they stand.", ("role", "status"),
                    {pair: float(counted[pair]) for pair in all_pairs})  # fmt: skip
    yield _labelled("rrl_replicas_wanted", "Processes that the job has, by role.", ("role",),
                    {(role.name,): float(role.replicas * role.ranks) for role in state.job.roles})  # fmt: skip
    yield _counted("rrl_restarts", "Restarts of replicas, by role and rung of the ladder.", ("role", "rung"),
                   tally.restarts)  # fmt: skip
    down = Counter(one.replica.partition("/")[0] for one in list(tally.downtime.down.values()))
    yield _labelled("rrl_replicas_down", "Replicas that stand still after a failure, by role.", ("role",),
                    {(role.name,): float(down[role.name]) for role in state.job.roles})  # fmt: skip


def _of_nodes(state: State, tally: Tally) -> Iterator[Metric]:
    nodes = Counter(
        "excluded" if one.excluded is not None else one.seen.state.value if one.seen is not None else "unknown"
        for one in state.nodes.values()
    )
    yield _labelled("rrl_nodes", "Nodes of the run by state; excluded: it does not use them any more.", ("state",),
                    {(name,): float(nodes[name]) for name in (*NodeState, "excluded")})  # fmt: skip
    yield _labelled("rrl_findings", "What stands against nodes and replicas.", ("verdict", "detector", "node"),
                    _findings(state))  # fmt: skip
    yield _counted("rrl_failures_found", "Findings of FAIL, by detector and cause.", ("detector", "cause"),
                   tally.failures)  # fmt: skip
    yield _counted("rrl_exclusions", "Nodes excluded, by cause.", ("cause",),
                   {(cause,): number for cause, number in tally.exclusions.items()})  # fmt: skip
    asked = sum(bool(one.not_drained) for one in state.nodes.values())
    yield _gauge("rrl_drain_requests", "Nodes that the run may not drain, and asks administrators to.", asked)


def _of_manager(state: State, facts: Facts) -> Iterator[Metric]:
    yield _gauge("rrl_manager_epoch", "Managers that the run has had.", state.epoch)
    yield _gauge("rrl_manager_lease_age_seconds", "Since this manager last saw that it has no successor.",
                 facts.lease_age)  # fmt: skip
    yield _gauge("rrl_journal_unwritten_records", "Records that are not durable yet.", facts.unwritten)
    yield _gauge("rrl_journal_lag_seconds", "Age of the oldest record that is not durable yet.", facts.journal_lag)
    yield _counter("rrl_history_lines_lost", "Lines that could not be written to the history.", facts.history_lost)


def _run_state(state: State) -> str:
    if state.outcome is not None:
        return state.outcome.value
    if state.verdict is not None:
        return "ending"
    return "waiting" if state.running_since is None else "running"


def _findings(state: State) -> dict[tuple[str, ...], float]:
    """By verdict, detector and node (of a replica's finding, where it is), the worst first where there are many."""
    found: Counter[tuple[str, ...]] = Counter()
    for one in sorted(state.findings.values(), key=lambda one: (one.verdict is not Verdict.FAIL, one.key)):
        node = one.node or (state.replica(one.life.replica).node if one.life is not None else None) or ""
        series = (one.verdict.value, one.detector, node)
        if series not in found and len(found) >= MOST_FINDINGS:
            series = (one.verdict.value, one.detector, "")
        found[series] += 1
    return {series: float(number) for series, number in found.items()}


def _gauge(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(name, told, value=value)


def _counter(name: str, told: str, value: float) -> Metric:
    """``_total`` is added to its name."""
    return CounterMetricFamily(name, told, value=value)


def _labelled(name: str, told: str, labels: Iterable[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, told, labels=list(labels))
    for series, value in values.items():
        family.add_metric(series, value)
    return family


def _counted(name: str, told: str, labels: Iterable[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, told, labels=list(labels))
    for series, value in dict(values).items():  # a copy: the manager goes on counting
        family.add_metric(series, value)
    return family


class Tokens:
    """Counts while one manager hears; two totals of the same epoch can be compared, no others."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._ended = 0

    def ends(self, life: Life) -> None:
        """This life is about to be forgotten; what it made stays."""
        seen = self._watch.replicas.get(life.replica)
        if seen is not None and seen.life == life and role_of(life.replica) == "rollout":
            self._ended += seen.done or 0

    def total(self) -> int:
        living = (seen.done or 0 for id, seen in self._watch.replicas.items() if role_of(id) == "rollout")
        return self._ended + sum(living)
