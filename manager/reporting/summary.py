"""Summarise a run from its events alone.

The summary contains the recoveries with the durations of their stages, effective training time, rewards, and the nodes
that an administrator should drain. Failures and recoveries come from the timeline of failures (``failure_timeline``),
and what the run's state contains comes from the state. ``committed_steps`` explains ETTR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from ...core.run_dir import RunDir, write_atomically
from ...core.run_spec import RoleKind, RunSpec
from ...core.text import escaped_lines
from ..model import events as ev
from ..model.figures import token_ages
from ..model.figures.idle_times import START, IdleTimes, idle_shares, phase_times
from ..model.figures.stream_figures import EpisodeFigures, StreamFigures, as_count
from ..model.pools import LendingFigures, lending_figures
from ..model.reducer import fold
from ..model.state import Evaluation, Node, State
from ..storage.journal import replay
from ..storage.model_folders import ModelFolders, model_folders
from .accounting.pool_use import PoolUse, pool_uses
from .failure_records import Failure
from .failure_timeline import FailureTimeline


class DrainRequest(Struct, frozen=True):
    """A node that an administrator should drain."""

    node: str
    cause: str
    """Cause such as ``gpu`` or ``node``; empty if a user requested the drain."""
    evidence: list[str]
    at: float
    """Wall-clock time (s) of the node's exclusion."""
    requested_by: str
    """User who requested the drain; empty if the run itself requested it."""
    drain_error: str
    """Reason why the cluster did not drain the node."""


class Recovery(Struct, frozen=True):
    """The recovery of one replica, from its failure to its first work.

    A stage time (s) is None if that stage was not reached.
    """

    replica: str
    failed: int
    """Number of the incarnation that failed."""
    incarnation: int
    """Number of the incarnation that replaced the failed incarnation. Until a replacement has joined, number of the
    newest launched incarnation."""
    cause: str
    detector: str
    """Detector of the finding; empty if the replica failed without a finding, for example because it was not
    launched."""
    rung: str
    injected: bool
    node_before: str
    node_after: str
    detect_s: float | None
    """Seconds from the injected fault (or else the failure's first symptom) to the finding."""
    decide_s: float | None
    """Seconds from the finding to the fence of the failed incarnation."""
    start_s: float | None
    """Seconds from the fence to the new incarnation's Hello."""
    weights_s: float | None
    """Seconds from the new incarnation's Hello to a complete weight version."""
    first_work_s: float | None
    """Seconds from a complete weight version to the first unit of work (a rollout's first token)."""
    total_s: float | None


class StreamSummary(Struct, frozen=True):
    """The section ``stream`` of ``summary.json`` and ``rrl status --json``: idle shares, parts, ages, lengths."""

    idle: dict[str, dict[str, float]] = {}
    """Idle shares of each role over the whole run (0 to 1), by idle cause."""
    recent_idle: dict[str, dict[str, float]] = {}
    """Idle shares of each role over about the last five minutes (0 to 1), by idle cause."""
    seconds: dict[str, dict[str, float]] = {}
    """Seconds of the processes of each role, by phase; they add up to the lifetimes of the processes."""
    parts: float | None = None
    """Mean number of parts of a step; None if no step has reported it."""
    most_parts: int = 0
    ages: dict[int, int] = {}
    """Number of trained tokens by age in training steps."""
    max_age: int | None = None
    """Largest key of ``ages``; None if ``ages`` is empty."""
    length_bias: float | None = None
    """Mean length of trained answers divided by the mean length of all finished answers, as of the newest step. None if
    no step has reported it."""
    recall20: float | None = None
    """Among the longest fifth of the newest groups, the share of those that were expected to be in the longest fifth,
    as of the newest step. None if no step has reported it."""
    long_groups: int = 0
    """Number of groups that are expected to be more than twice as long as usual, as of the newest step."""
    longest_expected: int = 0
    """Expected answer tokens of the longest group that is being generated, as of the newest step."""
    kinds: dict[str, RoleKind] = {}
    """Kind of each role."""


def stream_summary(job: RunSpec, times: IdleTimes, figures: StreamFigures) -> StreamSummary:
    """Return the section ``stream`` from the clocks' ``times`` and the steps' ``figures``."""
    roles = sorted(times.now.roles)
    return StreamSummary(
        {role: _rounded(idle_shares(times.now, START, role)) for role in roles},
        {role: _rounded(idle_shares(times.now, times.before, role)) for role in roles},
        {role: _seconds_by_phase(times, role) for role in roles},
        round(figures.parts / figures.steps, 2) if figures.steps else None,
        figures.most_parts,
        figures.ages,
        max(figures.ages, default=None),
        _round(figures.length_bias),
        _round(figures.recall20),
        figures.long_groups,
        figures.longest_expected,
        {role.name: role.kind for role in job.roles},
    )


class EpisodeCounts(Struct, frozen=True):
    """The section ``episodes`` of ``summary.json`` and ``rrl status --json``; all 0 in a run without agents."""

    finished: int = 0
    retried: int = 0
    """Attempts that began an episode again from its beginning."""
    replayed: int = 0
    """Attempts that began with the turns of an earlier attempt whose process had died."""
    dropped: int = 0
    dropped_by_reason: dict[str, int] = {}
    """Number of dropped episodes by the reason of the drop; empty before the store has ended."""


def episode_counts(figures: EpisodeFigures, reasons: dict[str, int] | None = None) -> EpisodeCounts:
    """Return the section ``episodes`` of a run."""
    return EpisodeCounts(figures.finished, figures.retried, figures.replayed, figures.dropped, reasons or {})


def _round(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {cause: round(share, 4) for cause, share in shares.items()}


def _seconds_by_phase(times: IdleTimes, role: str) -> dict[str, float]:
    ns = Counter[str]()
    for time in phase_times(times, role):
        ns[time.phase] += time.ns
    return {phase: round(spent / 1e9, 3) for phase, spent in sorted(ns.items())}


class RunFigures(ModelFolders, frozen=True, kw_only=True):
    """What ``summary.json`` and ``rrl status --json`` both contain of a run."""

    stream: StreamSummary = StreamSummary()
    episodes: EpisodeCounts = EpisodeCounts()
    lending: LendingFigures | None = None
    """How much the trainer lends its GPUs: in the last minutes, or in the whole of an ended run. None if it never
    does."""
    turns: int = 0
    """Turns of the finished episodes."""
    branches: int = 0
    """Number of samples of the finished episodes: one for each leaf of an episode's tree of turns."""
    given_tokens: int = 0
    """Tokens that were given, not sampled, in the turns of the finished episodes."""
    untrained_turns: int = 0
    """Turns that were sampled from another policy than the one that is trained, or whose answers were not used."""
    token_drift: int = 0
    """Trained tokens whose context is not what the engine had when it sampled them; must be 0."""


def run_figures(state: State, folders: ModelFolders = ModelFolders()) -> dict[str, Any]:
    """Return the fields of :class:`RunFigures`."""
    episodes = asdict(state.episode_figures)
    return {
        **asdict(folders),
        "stream": stream_summary(state.job, state.idle_times, state.stream_figures),
        "episodes": episode_counts(state.episode_figures),
        "lending": lending_figures(state),
        **{name: episodes[name] for name in RunFigures.__struct_fields__ if name in episodes},
    }


class Summary(RunFigures, frozen=True):
    """The content of ``summary.json``."""

    run: str
    run_dir: str
    outcome: str
    why: str
    steps: int
    reward_first10: float | None
    reward_last10: float | None
    faults: int
    """Number of injected faults that were performed, whether planned or requested."""
    recoveries: list[Recovery]
    unprovoked: int
    """Number of failures that were not injected, and after which a replica was fenced or the run ended."""
    run_seconds: float
    epochs: int
    """Number of managers that this run has had."""
    ettr: float | None = None
    """Effective training time ratio, from the first ``train`` to the newest commit; None if no step is undisturbed."""
    outage_tokens: int = 0
    """Tokens that rollouts generated while the trainer was down, and that were kept. Only outages within one manager's
    epoch count."""
    max_age: int | None = None
    """Age of the oldest token that was trained on, in training steps; None if no step reported it."""
    stale_groups: int = 0
    """Groups that were dropped because a token was older than ``[sampling] staleness`` allows."""
    stale_share: float = 0.0
    """Share of the ``stale_groups`` among all groups that were trained or dropped for their age."""
    unscored_groups: int = 0
    """Groups that were dropped because an answer could not be scored: the scorer raised an exception or did not return
    two finite numbers."""
    unscored_share: float = 0.0
    """Share of the ``unscored_groups`` among all groups that were trained or dropped because they could not be
    scored."""
    evaluations: list[Evaluation] = msgspec.field(default_factory=list)
    """The results of the evaluations, in the order of their steps."""
    rollout_pools: list[PoolUse] = msgspec.field(default_factory=list)
    """Use of each rollout pool and of the guests; empty if the run has a single pool, and no extras and no guests."""
    drain_requests: list[DrainRequest] = msgspec.field(default_factory=list)
    """Nodes that an administrator should drain because the cluster did not let the run drain them."""


def _escaped(value: Any) -> Any:
    """Return a document of plain values without control characters.

    Evidence comes from roles and nodes, and must not control the terminal of a user who shows the summary with ``cat``.
    """
    if isinstance(value, str):
        return escaped_lines(value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return value


def write_summary(run: RunDir) -> Summary:
    """Replay the run's journal, write ``summary.json`` and return the summary.

    The reasons for dropped episodes are read from the store's ``audit.json``, and the folders of the weights are found
    in the run directory.
    """
    summary = summarize(replay(run), str(run.path))
    summary = replace(summary, **asdict(model_folders(run, summary.steps)))
    if summary.episodes.dropped:
        episodes = replace(summary.episodes, dropped_by_reason=_drop_reasons(run))
        summary = replace(summary, episodes=episodes)
    document = _escaped(msgspec.to_builtins(summary))
    write_atomically(run.summary, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return summary


class _Audit(Struct, frozen=True):
    """The part of ``audit.json`` that the summary contains. The store writes this file when it is stopped."""

    dropped: dict[str, int] = {}
    expected: tuple[str, ...] = ()


def _drop_reasons(run: RunDir) -> dict[str, int]:
    """Return the number of dropped episodes by reason; empty if the store has written no ``audit.json``.

    Groups that were dropped because they have no signal are left out, since no episode of theirs has failed.
    """
    try:
        audit = msgspec.json.decode(run.audit.read_bytes(), type=_Audit)
    except (OSError, msgspec.MsgspecError):
        return {}
    return {reason: count for reason, count in audit.dropped.items() if reason not in audit.expected}


def summarize(events: Iterable[ev.Stamped], run_dir: str = "") -> Summary:
    """Return the summary of all events. Raise ValueError if there are no events."""
    state: State | None = None
    builder = _SummaryBuilder()
    for stamped in events:
        state = fold(state, stamped)
        builder.apply(stamped)
    if state is None:
        raise ValueError("the journal has no events")
    return builder.summary(state, run_dir)


class _SummaryBuilder:
    """Collects from the events what the state of the run does not contain."""

    def __init__(self) -> None:
        self.timeline = FailureTimeline()
        self.rewards: dict[int, float] = {}
        """Mean reward by training step."""
        self.evaluations: list[Evaluation] = []
        self.step, self.epochs = 0, 0
        self.outage_tokens = 0
        self.max_age: float | None = None
        self.dropped: dict[str, float] = {}
        """Number of the groups dropped as stale or because they could not be scored, and their shares, as of the newest
        step that reported them."""
        self.tokens_before: dict[int, int] = {}
        """Token count at the beginning of the trainer's current outage, by epoch."""

    def apply(self, stamped: ev.Stamped) -> None:
        event = stamped.event
        self.timeline.apply(stamped)
        if isinstance(event, ev.StepCommitted):
            self._committed(event)
        elif isinstance(event, ev.Evaluated):
            if not self.evaluations or event.step > self.evaluations[-1].step:
                self.evaluations.append(Evaluation(event.step, event.metrics))
        elif isinstance(event, ev.ManagerStarted):
            self.epochs += 1
        elif isinstance(event, ev.TokensCounted):
            self._tokens_counted(event)

    def _committed(self, event: ev.StepCommitted) -> None:
        metrics = event.metrics
        for count, share in (("stale_groups", "stale_share"), ("unscored_groups", "unscored_share")):
            if count in metrics and event.step >= self.step:
                self.dropped |= {count: metrics[count], share: metrics.get(share, 0.0)}
        ages = [metrics[name] for name in (token_ages.MAX_METRIC, token_ages.RUN_MAX_METRIC) if name in metrics]
        self.max_age = max(ages if self.max_age is None else [self.max_age, *ages], default=None)
        self.step = max(self.step, event.step)
        if "reward" in metrics:
            self.rewards.setdefault(event.step, metrics["reward"])

    def _tokens_counted(self, event: ev.TokensCounted) -> None:
        if event.trainer_down:  # this event may be recorded several times in one outage
            self.tokens_before.setdefault(self.epochs, event.total)
        else:
            before = self.tokens_before.get(self.epochs, event.total)
            self.outage_tokens += event.total - before
            self.tokens_before.clear()

    def summary(self, state: State, run_dir: str) -> Summary:
        """Return the summary as of the newest event, which led to ``state``."""
        rewards = [reward for _, reward in sorted(self.rewards.items())]
        return Summary(
            run=state.run,
            run_dir=run_dir,
            outcome="running" if state.outcome is None else state.outcome.value,
            why=state.why,
            steps=state.step,
            reward_first10=_mean(rewards[:10]),
            reward_last10=_mean(rewards[-10:]),
            faults=self.timeline.faults.performed,
            recoveries=[_recovery(failure, state.job) for failure in self.timeline.fenced],
            unprovoked=sum(not failure.injected for failure in self.timeline.counted),
            run_seconds=round(state.run_seconds(state.at), 2),
            epochs=self.epochs,
            ettr=state.ettr,
            outage_tokens=self.outage_tokens,
            max_age=None if self.max_age is None else as_count(self.max_age),
            stale_groups=as_count(self.dropped.get("stale_groups", 0.0)),
            stale_share=round(self.dropped.get("stale_share", 0.0), 4),
            unscored_groups=as_count(self.dropped.get("unscored_groups", 0.0)),
            unscored_share=round(self.dropped.get("unscored_share", 0.0), 4),
            evaluations=self.evaluations,
            rollout_pools=pool_uses(state, state.at),
            drain_requests=[_drain_request(node) for node in state.nodes.values() if node.drain_error],
            **run_figures(state),
        )


def _drain_request(node: Node) -> DrainRequest:
    cause = "" if node.cause is None else node.cause.value
    evidence = [node.excluded] if node.excluded else []
    return DrainRequest(node.name, cause, evidence, node.excluded_at, node.drain_requested_by, node.drain_error)


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _recovery(failure: Failure, job: RunSpec) -> Recovery:
    """Return the recovery from a failure for which an incarnation was fenced."""
    assert failure.incarnation is not None, failure
    assert failure.fence is not None, failure
    incarnation, detected_at = failure.incarnation, failure.diagnosis.detected_at
    needs_weights = job.traits_of(incarnation.replica).gets_weights
    ready = failure.weights_at if needs_weights else failure.joined_at
    return Recovery(
        replica=incarnation.replica,
        failed=incarnation.number,
        incarnation=incarnation.number + 1 if failure.successor is None else failure.successor.number,
        cause="; ".join(failure.fence.why.evidence),
        detector=failure.diagnosis.finding.detector if failure.diagnosis.finding is not None else "",
        rung=(failure.rung or failure.fence.rung).value,
        injected=failure.injected,
        node_before=failure.node,
        node_after=failure.node_after or "",
        detect_s=_duration(failure.failed_at, detected_at),
        decide_s=_duration(detected_at, failure.fenced_at),
        start_s=_duration(failure.fenced_at, failure.joined_at),
        weights_s=_duration(failure.joined_at, failure.weights_at) if needs_weights else None,
        first_work_s=_duration(ready, failure.worked_at),
        total_s=_duration(failure.failed_at, failure.worked_at),
    )


def _duration(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 3)
