"""The report of a whole run, folded from its journal: how its time and its GPUs were used, and why. Pure.

:func:`account` folds the events once; ``rrl report`` shows the result as a table, as JSON or as a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ....core.types import TRAINER, NodeName, member_id
from ...model import events as ev
from ...model.actions import Action, Fence, InjectFault, Launch, Release, Request, Resize, RestartAll, Rung, StopStep
from ..decisions.explanations import Explanation, PoolSizes, subject_of, words_of
from ..failure_timeline import FailureTimeline
from .committed_steps import CommittedSteps
from .curves import CurveRecorder, Curves
from .gpu_time import GpuHours, ReservedTime, TrainerHours, gpu_hours, trainer_hours
from .interruptions import UNKNOWN, Interruption, Interruptions
from .lanes import LaneIncarnation, Lanes, Span
from .lost_time import lost_time
from .pool_use import PoolUse

MAX_DECISIONS = 1000
"""Maximum number of decisions in a report. If there are more, the newest decisions are left out, and the report
contains their number."""


class Loss(Struct, frozen=True):
    """Time (s) that was lost for one cause."""

    cause: str
    seconds: float
    stages: dict[str, float]
    """Seconds by stage."""


class InterruptionReport(Struct, frozen=True):
    """One interruption of a replica. Times are the manager's (s)."""

    replica: str
    number: int
    cause: str
    injected: bool
    charged: bool
    rung: str
    node: str
    node_after: str
    at: float
    until: float | None
    """When the replica worked again; None if it did not work again."""
    seconds: float
    stages: dict[str, float]
    evidence: tuple[str, ...]


class DecisionReport(Struct, frozen=True):
    """A decision of the manager, or an injected fault, with its evidence."""

    at: float
    what: str
    about: str
    rung: str
    evidence: tuple[str, ...]
    is_fault: bool


class LaneReport(Struct, frozen=True):
    """The activities of one member."""

    replica: str
    incarnations: list[LaneIncarnation]
    spans: list[Span]
    seconds: dict[str, float]
    """Seconds by phase; ``launching`` until an incarnation joined, ``down`` until the next incarnation was launched."""


class RunReport(Struct, frozen=True):
    """The report of one run. Times are the manager's (s since 1970), durations are in seconds."""

    run: str
    outcome: str
    why: str
    began: float
    until: float
    """Time of the newest event."""
    run_seconds: float
    """Seconds of the run without the time between an end and the next resume."""
    steps: int
    first_train: float | None
    last_commit: float | None
    wall_s: float
    """Seconds from the first ``train`` to the newest commit."""
    step_s: float | None
    """Median seconds of the undisturbed steps; None if no step is undisturbed."""
    ettr: float | None
    """Effective training time ratio, over ``wall_s``; None if no step is undisturbed."""
    lost: list[Loss]
    interruptions: list[InterruptionReport]
    decisions: list[DecisionReport]
    decisions_left_out: int
    gpu_hours: GpuHours
    managers: int
    curves: Curves
    lanes: list[LaneReport]
    pools: list[PoolUse]
    """Use of each rollout pool and of the guests; empty if the run has a single pool, and no extras and no guests."""
    trainer_hours: TrainerHours | None
    """None if the trainer does not lend its GPUs."""
    missing: list[str]
    """Sentences about data that the journal does not contain, and about the effect on the figures."""


class Account:
    """The fold of one run's events."""

    def __init__(self, event: ev.RunStarted, at: float) -> None:
        self.run, self.job, self.began, self.now = event.run, event.job, at, at
        self.timeline = FailureTimeline()
        self.interruptions = Interruptions(self.timeline)
        self.steps = CommittedSteps(self.interruptions)
        self.lanes = Lanes()
        self.curves = CurveRecorder()
        self.reserved = ReservedTime(event.job)
        self.pools: list[PoolUse] = []
        """Use of each rollout pool, which the state of the run has."""
        self._sizes = PoolSizes()
        self._sizes.begin(event.job)
        self.managers = 0
        self._outcome, self._why = "running", ""
        self._ended_at: float | None = None
        self._ended_s = 0.0
        self._away: list[tuple[float, float]] = []
        """Intervals (s) in which no manager ran."""
        self._decisions: list[DecisionReport] = []
        self._left_out = 0
        self._nodes: dict[str, NodeName] = {}
        """Node of each incarnation."""

    def apply(self, stamped: ev.Stamped) -> None:
        """Apply an event. The frequent weight versions and phases are passed only to the collectors that use them."""
        event, at = stamped.event, stamped.at
        before, self.now = self.now, at
        if isinstance(event, ev.WeightsRecorded):
            for incarnation, version in event.versions:
                self.curves.on_version(incarnation.replica, version, self.job)
            return
        if isinstance(event, ev.VersionAvailable):
            self.curves.on_version(event.incarnation.replica, event.version, self.job)
            if self.interruptions.open:
                self.interruptions.apply(stamped)
            if event.incarnation.replica == TRAINER:
                self.steps.apply(stamped, ())
            return
        if isinstance(
            event, ev.ClocksRecorded | ev.NoteChanged | ev.OutsideWaitChanged | ev.GpuUseRecorded | ev.ValuesLogged
        ):
            return
        self.timeline.apply(stamped)
        self.lanes.apply(stamped)
        if isinstance(event, ev.PhaseEntered) and event.incarnation.replica != TRAINER:
            return
        self.steps.apply(stamped, self.interruptions.apply(stamped))
        self._on_rare(event, at, before)

    def _on_rare(self, event: ev.Event, at: float, before: float) -> None:
        match event:
            case ev.StepCommitted():
                self.curves.on_committed(event, at)
            case ev.Decided():
                self._on_action(event.action, at)
            case ev.Intended():
                self.reserved.on_intended(event)
                self._on_action(event.action, at)
            case ev.AllocationChanged():
                self.reserved.on_allocation(event, at)
            case ev.ManagerStarted():
                self.managers += 1
                if self.managers > 1 and self._ended_at is None:
                    self._away.append((before, at))
            case ev.RunEnded():
                self._outcome, self._why, self._ended_at = event.outcome.value, event.why, at
            case ev.Resumed():
                self._ended_s += at - (at if self._ended_at is None else self._ended_at)
                self.job, self._outcome, self._why, self._ended_at = event.job, "running", "", None
                self._sizes.begin(event.job)

    def _on_action(self, action: Action, at: float) -> None:
        if isinstance(action, Launch):
            self._nodes[str(action.incarnation)] = action.node
            return
        size = self._sizes.apply(action)
        if isinstance(action, Fence):
            self.curves.on_replica_down(action.incarnation.replica)
        if isinstance(action, Resize):
            for id in (member_id(id, rank) for id in action.stop for rank in range(self.job.role(action.pool).ranks)):
                self.curves.on_replica_down(id)
        if isinstance(action, StopStep | Request | Release):
            return
        if len(self._decisions) >= MAX_DECISIONS:
            self._left_out += 1
            return
        node = self._nodes.get(str(getattr(action, "incarnation", "")), NodeName(getattr(action, "node", "")))
        if isinstance(action, RestartAll) and action.failed is not None:
            node = self._nodes.get(str(action.failed), NodeName(""))
        rung = action.rung if isinstance(action, Fence) else action.why.rung
        self._decisions.append(
            DecisionReport(
                at,
                words_of(action),
                subject_of(Explanation(0, at, 0, action, node, pool_size=size)),
                rung.value if isinstance(rung, Rung) else "",
                tuple(action.why.evidence),
                isinstance(action, InjectFault),
            )
        )

    def report(self) -> RunReport:
        """Return the report as of the newest event."""
        steps, until = self.steps, self.now
        run_seconds = max(until - self.began - self._ended_s, 1e-9)
        losses = lost_time(steps, self.interruptions.all, self._away)
        lanes = list(self.lanes.lanes.values())
        return RunReport(
            run=self.run,
            outcome=self._outcome,
            why=self._why,
            began=self.began,
            until=until,
            run_seconds=round(run_seconds, 2),
            steps=steps.steps[-1].step if steps.steps else 0,
            first_train=steps.began,
            last_commit=steps.ended,
            wall_s=round(steps.wall_s, 3),
            step_s=None if steps.step_s is None else round(steps.step_s, 4),
            ettr=None if steps.ettr is None else round(steps.ettr, 4),
            lost=[
                Loss(cause, round(sum(stages.values()), 3), {name: round(lost, 3) for name, lost in stages.items()})
                for cause, stages in losses.items()
            ],
            interruptions=[_interruption(one, until) for one in self.interruptions.all],
            decisions=self._decisions,
            decisions_left_out=self._left_out,
            gpu_hours=gpu_hours(self.reserved, lanes, steps, until),
            managers=self.managers,
            curves=self.curves.curves(self.steps.steps),
            lanes=[
                LaneReport(
                    lane.replica,
                    lane.incarnations,
                    lane.spans(self.began, until),
                    {activity.phase: round(seconds, 1) for activity, seconds in lane.seconds(until).items()},
                )
                for lane in lanes
            ],
            pools=self.pools,
            trainer_hours=trainer_hours(self.reserved, lanes, until) if self.job.guests else None,
            missing=list(self._missing()),
        )

    def _missing(self) -> Iterator[str]:
        """Yield a sentence for each figure for which the journal lacks data."""
        steps, curves = self.steps, self.curves.curves(self.steps.steps)
        if not self.reserved.weights:
            yield "The job has neither trainer nor rollouts: all reserved time is shown as idle."
        if not steps.steps:
            yield "No step is committed: there is no time to account for."
            return
        if not steps.began_with_train:
            yield "No phase `train` before the first commit: durations begin when the trainer joined."
        if steps.step_s is None:
            yield "No step was undisturbed: lost time and the ETTR are unknown."
        if without := [one for one in self.interruptions.all if one.cause == UNKNOWN]:
            yield f"Number of failures without a finding, whose cause is unknown: {len(without)}."
        late = [one for one in self.interruptions.all if one.worked_at is not None and one.weights_at is None]
        if with_weights := [one for one in late if self.job.traits_of(one.replica).has_weights]:
            yield (
                f"Number of recoveries without a weight version before the first work: {len(with_weights)}. Their"
                " time to load weights is not separated from the time to reconnect."
            )
        if not curves.reward:
            yield "The metrics of the steps have no `reward`."
        if not curves.tokens_per_second:
            yield "The metrics of the steps have no `tokens`: the throughput is unknown."
        if any(self.job.traits_of(one.replica).leases_turns and one.charged for one in self.interruptions.all):
            yield "Tokens that a failed rollout lost are not recorded: `redone` is GPU time of the trainer only."


class NoEvents(Exception):
    """The journal of a run has no events: the run has not begun."""


def account(events: Iterable[ev.Stamped]) -> Account:
    """Fold all events of a run. Raise NoEvents if there are no events."""
    folded: Account | None = None
    for stamped in events:
        if folded is None and isinstance(stamped.event, ev.RunStarted):
            folded = Account(stamped.event, stamped.at)
        if folded is not None:
            folded.apply(stamped)
    if folded is None:
        raise NoEvents("the journal has no events")
    return folded


def _interruption(one: Interruption, now: float) -> InterruptionReport:
    stages = {stage: round(seconds, 3) for stage, seconds in one.seconds(now).items()}
    ended_at = now if one.ended_at is None else one.ended_at
    return InterruptionReport(
        one.replica,
        one.number,
        one.cause,
        one.injected,
        one.charged,
        one.rung,
        one.node,
        one.node_after,
        one.failed_at,
        one.worked_at,
        round(max(0.0, ended_at - one.failed_at), 3),
        stages,
        one.evidence,
    )
