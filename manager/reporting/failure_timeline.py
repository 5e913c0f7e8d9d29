"""The timeline of a run's failures: one record of each failure, folded from the run's events. Pure.

``summary.json``, the metrics, the health history and ``rrl logs --failed`` are views of the timeline, so they show the
same failures with the same times. A record (``failure_records.Failure``) begins with the first event that shows a
failure, and these events set its times:

====================  ================================================================================================
``recorded_at``       a FAIL finding, an unrequested end with an error, a rejected launch, or a charged fence
``symptom_at``        the end of the step or the earliest ``since`` of the FAIL findings, whichever was first
``detected_at``       the first of these findings
``fault_at``          the intent of an injected fault that can have caused the failure, or the report of its effect
``fenced_at``         the charged fence, which counts on the replica's budget: the failure has ended its incarnation
``joined_at``         the ``Joined`` of the successor, the first later incarnation of the replica that joins
``weights_at``        the successor's first complete weight version
``worked_at``         the successor's first unit of work
====================  ================================================================================================

Further rules:

- For ``symptom_at`` and ``detected_at``, findings about the incarnation itself take precedence over findings about its
  node, because the incarnation may have worked for a long time on a node with findings.
- A successor that fails before it joins is another failure, and both failures have the same later successor.
- Failures before a resume of the run get no successor.
- A rejected launch belongs to the failure that it should have repaired.
- An ``Outage`` records the GPU time that a replica lost. An outage also begins when a replica is moved.
- A replica that is removed from its pool has not failed. Its outage ends, and its failures get no successor.

A new manager continues from the restored state. The state contains every open outage, every finding that has not
cleared and every fault that is in effect, but not the failures recorded earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...core.launch import ExitReason
from ...core.run_spec import RoleSpec, RunSpec
from ...core.types import Finding, Incarnation, NodeName, Outcome, ReplicaId, Verdict, gang_of, is_support, role_of
from ..model import events as ev
from ..model.actions import Exclude, Fence, Finish, InjectFault, Launch, Readmit, Resize, RestartAll, StopStep
from ..model.queries import first_symptom_at
from ..model.reduce_nodes import DRAIN, UNDRAIN
from ..model.state import State, Status
from .failure_records import Changes, Diagnosis, Failure, InjectedFaults, Outage

_NO_CHANGES = Changes()


class FailureTimeline:
    """Builds the timeline from the events of a run, from the first event or from a restored ``state``."""

    def __init__(self, state: State | None = None) -> None:
        self.failures: dict[Incarnation | NodeName, Failure] = {}
        """All failures, in the order of their first records."""
        self.fenced: list[Failure] = []
        """Failures of roles for which an incarnation was fenced, in the order of the fences. Each failure occurs
        once."""
        self.outages: dict[ReplicaId, Outage] = {}
        """Outages of the replicas that are down."""
        self.lost_gpu_seconds = 0.0
        """GPU time (s) lost in outages that have ended."""
        self.faults = InjectedFaults()
        self._roles: dict[str, RoleSpec] = {}
        self._ending = False
        """True once the run's end is decided. From then on, no end of a step counts as a failure."""
        self._newest: dict[ReplicaId, Incarnation] = {}
        self._launched: dict[Incarnation, tuple[NodeName, float]] = {}
        """Node and time (s) of each incarnation's launch intent."""
        self._steps: dict[str, Incarnation] = {}
        """Incarnation by the tag of its step. After a promotion it is the incarnation of the member."""
        self._retired: set[Incarnation] = set()
        """Incarnations that are no longer current: fenced, promoted, or from before a resumption of the run."""
        self._stop_requested: set[Incarnation] = set()
        self._drained_nodes: set[str] = set()
        """Nodes that a user drains. The fence of an agent or a standby process on such a node is not a failure."""
        self._standing: dict[str, tuple[Finding, float]] = {}
        """FAIL findings that have not cleared, by key, each with the time (s) at which it became FAIL."""
        self._step_ended: dict[Incarnation, float] = {}
        self._unjoined: dict[ReplicaId, list[Failure]] = {}
        """Failures of each replica after which no incarnation of it has joined yet."""
        self._recovering: dict[Incarnation, list[Failure]] = {}
        """For each incarnation that has joined and has not worked yet: the failures that it repairs."""
        if state is not None:
            self._restore(state)

    def _restore(self, state: State) -> None:
        self._roles, self._ending = _roles(state.job), state.finish is not None
        for replica in state.replicas.values():
            incarnation = replica.incarnation
            if replica.incarnation_number == 0:
                continue
            self._newest[replica.id] = incarnation
            self._launched[incarnation] = replica.node or NodeName(""), 0.0
            if replica.step is not None:
                self._steps[replica.step] = incarnation
            if replica.fault:
                self.faults.restore(replica.fault, incarnation)
            if not replica.is_current:
                self._retired.add(incarnation)
                self._stop_requested.add(incarnation)
            if self._ending or is_support(replica.id):
                continue
            waiting = replica.status in (Status.WANTED, Status.LAUNCHING, Status.STARTING)
            if waiting and replica.ever_joined:  # the replica worked under an earlier manager
                self._begin_outage(incarnation, replica.down_since)
        self._standing = {
            key: (finding, finding.since) for key, finding in state.findings.items() if finding.verdict is Verdict.FAIL
        }

    def apply(self, stamped: ev.Stamped) -> Changes:
        """Apply an event and return what it changed."""
        handler = _HANDLERS.get(type(stamped.event))
        return _NO_CHANGES if handler is None else handler(self, stamped.event, stamped.at) or _NO_CHANGES

    # ── questions of the views ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def counted(self) -> list[Failure]:
        """Return the failures of roles for which an incarnation was fenced, or that ended the run."""
        return [*self.fenced, *(failure for failure in self.failures.values() if failure.ended_run)]

    def gpu_seconds_until(self, now: float) -> float:
        """Return the GPU time (s) lost up to ``now``, including replicas that are still down."""
        return self.lost_gpu_seconds + sum(outage.gpu_seconds(now) for outage in list(self.outages.values()))

    def diagnose_node(self, node: NodeName, at: float) -> Diagnosis:
        """Return the diagnosis of a node's failure at the manager's time ``at`` (s)."""
        raised = [(finding, raised_at) for finding, raised_at in self._standing.values() if finding.node == node]
        finding = raised[0][0] if raised else None
        symptom_at = first_symptom_at((finding for finding, _ in raised), None, node)
        detected_at = min((raised_at for _, raised_at in raised), default=at)
        return Diagnosis(finding, at if symptom_at is None else symptom_at, detected_at, self.fault_on(node, at))

    def fault_on(self, node: NodeName, at: float) -> float | None:
        """Return the time (s) of the newest fault that affects the node or a process on it.

        ``at`` is the time (s) at which the fault must have an effect. Returns None if there is no such fault.
        """
        if not self.faults:
            return None
        current = [one for one in self._newest.values() if one not in self._retired and self._node(one) == node]
        hits = [self._fault_of(incarnation, at) for incarnation in current]
        return max((hit for hit in hits if hit is not None), default=None)

    def _diagnose(self, incarnation: Incarnation, at: float) -> Diagnosis:
        node = self._node(incarnation)
        standing = self._standing.values()
        own = [(finding, raised_at) for finding, raised_at in standing if finding.incarnation == incarnation]
        of_node = [(finding, raised_at) for finding, raised_at in standing if node and finding.node == node]
        causes = of_node or own
        symptoms = own or of_node
        detected_at = min((raised_at for _, raised_at in symptoms), default=at)
        found_at = first_symptom_at((finding for finding, _ in standing), incarnation, node)
        times = () if found_at is None else (found_at,)
        symptom_at = min(*times, self._step_ended.get(incarnation, at), detected_at)
        finding = causes[0][0] if causes else None
        return Diagnosis(finding, symptom_at, detected_at, self._fault_of(incarnation, detected_at))

    def _fault_of(self, incarnation: Incarnation, failed_at: float) -> float | None:
        node, launched_at = self._launched.get(incarnation, (NodeName(""), 0.0))
        return self.faults.behind(incarnation, node, launched_at, failed_at)

    def _node(self, incarnation: Incarnation) -> NodeName:
        return self._launched[incarnation][0] if incarnation in self._launched else NodeName("")

    # ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _record(self, incarnation: Incarnation, at: float, ended: bool = False) -> Failure:
        """Return the failure of an incarnation; begin its record unless there is one."""
        failure = self.failures.get(incarnation)
        if failure is None:
            failure = Failure(incarnation, self._node(incarnation), at, self._diagnose(incarnation, at))
            self.failures[incarnation] = failure
            if self._newest.get(incarnation.replica) == incarnation:
                self._unjoined.setdefault(incarnation.replica, []).append(failure)
        failure.ended = failure.ended or ended
        return failure

    def _on_finding_changed(self, event: ev.FindingChanged, at: float) -> Changes | None:
        finding = event.finding
        known = self._standing.get(finding.key)
        if finding.verdict is not Verdict.FAIL:
            self._standing.pop(finding.key, None)
            return None
        about = finding.incarnation
        if about is None or about not in self._retired:
            self._standing[finding.key] = finding, at if known is None else known[1]
        changes = Changes(raised=finding if known is None and finding.key in self._standing else None)
        if self._ending:
            return changes
        if about is not None:
            changes.failures = [self._record(about, at)]
        elif finding.node is not None and finding.node not in self.failures:
            failure = Failure(None, finding.node, at, self.diagnose_node(finding.node, at))
            self.failures[finding.node] = failure
            changes.failures = [failure]
        return changes

    def _on_step_ended(self, event: ev.StepEnded, at: float) -> Changes | None:
        incarnation = self._steps.get(event.step, event.incarnation)
        self._step_ended.setdefault(incarnation, at)
        changes = Changes()
        requested = self._ending or incarnation in self._stop_requested or event.reason is ExitReason.STOPPED
        if not requested and event.code != 0:
            changes.failures = [self._record(incarnation, at, ended=True)]
        elif incarnation in self.failures:
            self.failures[incarnation].ended = True
        return changes

    def _on_intent_settled(self, event: ev.IntentSettled, at: float) -> Changes | None:
        if event.ok:
            return None
        self.faults.on_rejected(event.tag)
        if event.tag not in self._steps or self._ending:
            return None
        incarnation = self._steps[event.tag]
        earlier = self._unjoined.get(incarnation.replica, ())
        repaired = next((one for one in earlier if one.fence is not None and one.continues is None), None)
        failure = self._record(incarnation, at, ended=True)
        if failure is not repaired:
            failure.continues = repaired
        return Changes(failures=[failure])

    def _on_decided(self, event: ev.Decided, at: float) -> Changes | None:
        action = event.action
        if isinstance(action, Finish):
            return self._on_finish(action, at)
        if isinstance(action, Readmit):  # a readmission clears the findings about the node, as in the reducer
            self._standing = {key: kept for key, kept in self._standing.items() if kept[0].node != action.node}
            return None
        if isinstance(action, Exclude) or self._ending:
            return None
        if isinstance(action, Resize):
            return self._on_removed(set(action.stop), at)
        changes = Changes()
        for fence in fences(event):
            self._on_fence(fence, at, changes)
        return changes

    def _on_fence(self, fence: Fence, at: float, changes: Changes) -> None:
        incarnation = fence.incarnation
        support = is_support(incarnation.replica)
        stopped_at = at
        if not fence.charged or (support and self._node(incarnation) in self._drained_nodes):
            # The incarnation did not fail: it moves, restarts with others or on request, or is not needed on its node.
            self._stop_requested.add(incarnation)
        else:
            failure = self._record(incarnation, at, ended=True)
            changes.failures.append(failure)
            if failure.fence is None:
                failure.diagnosis = self._diagnose(incarnation, at)
                failure.fence, failure.fenced_at = fence, at
                if not support and failure.continues is None:
                    self.fenced.append(failure)
            for repaired in (failure, *((failure.continues,) if failure.continues is not None else ())):
                repaired.rung = fence.rung
            stopped_at = failure.diagnosis.symptom_at
        if not support:
            self._begin_outage(incarnation, stopped_at)
        self._retire(incarnation)

    def _on_removed(self, gangs: set[ReplicaId], at: float) -> Changes:
        """End all that concerns replicas that the run no longer has."""
        for incarnation in [one for id, one in self._newest.items() if gang_of(id) in gangs]:
            self._stop_requested.add(incarnation)
            self._retire(incarnation)
            self._recovering.pop(incarnation, None)
            self._unjoined.pop(incarnation.replica, None)
        return Changes(ended_outages=[(self._end_outage(id, at), False) for id in gangs & self.outages.keys()])

    def _on_finish(self, action: Finish, at: float) -> Changes:
        """End all outages; if the run fails, record the current failures as the failures that ended the run.

        These failures are recorded here, because a run that is ending fences no replica.
        """
        self._ending = True
        if action.outcome in (Outcome.FAILED, Outcome.REJECTED):
            failed = dict.fromkeys(finding.incarnation for finding, _ in self._standing.values())
            for incarnation in failed:
                if incarnation is None or is_support(incarnation.replica):
                    continue
                if self._newest.get(incarnation.replica) == incarnation:
                    failure = self._record(incarnation, at)
                    failure.diagnosis, failure.ended_run = self._diagnose(incarnation, at), True
        outages = [(self._end_outage(replica, at), False) for replica in list(self.outages)]
        return Changes(ended_outages=outages)

    def _retire(self, incarnation: Incarnation) -> None:
        """Drop the findings about an incarnation that is no longer current."""
        self._retired.add(incarnation)
        self._standing = {key: kept for key, kept in self._standing.items() if kept[0].incarnation != incarnation}

    # ── recoveries and outages ──────────────────────────────────────────────────────────────────────────────────────
    def _on_launch(self, action: Launch, at: float) -> None:
        incarnation = action.incarnation
        self._newest[incarnation.replica] = incarnation
        self._launched[incarnation] = action.node, at
        self._steps[action.step] = incarnation
        if action.standby is not None:
            self._retire(action.standby)
        for failure in self._unjoined.get(incarnation.replica, ()):
            failure.successor, failure.node_after = incarnation, action.node

    def _on_joined(self, event: ev.Joined, at: float) -> Changes | None:
        incarnation = event.incarnation
        if not self._is_current(incarnation):
            return None
        waiting = self._unjoined.pop(incarnation.replica, [])
        recovering = [failure for failure in waiting if failure.successor == incarnation]
        by_work = self.recovers_by_work(incarnation.replica)
        for failure in recovering:
            failure.joined_at, failure.works_by_joining = at, not by_work
        if recovering:
            self._recovering[incarnation] = recovering
        if len(recovering) < len(waiting):
            self._unjoined[incarnation.replica] = [one for one in waiting if one.successor != incarnation]
        return None if by_work else self._recovered(incarnation, at)

    def recovers_by_work(self, replica: ReplicaId) -> bool:
        """Return whether the outage of a replica ends with its first unit of work or a commit, not when it joins."""
        role = self._roles.get(role_of(replica))
        return role is not None and role.traits.has_weights

    def _on_version(self, event: ev.VersionAvailable, at: float) -> None:
        for failure in self._recovering.get(event.incarnation, ()):
            failure.weights_at = at if failure.weights_at is None else failure.weights_at

    def _on_first_work(self, event: ev.FirstWorkDone, at: float) -> Changes | None:
        for failure in self._recovering.pop(event.incarnation, ()):
            failure.worked_at = at
        return self._recovered(event.incarnation, at) if self._is_current(event.incarnation) else None

    def _on_step_committed(self, event: ev.StepCommitted, at: float) -> Changes | None:
        return self._recovered(event.incarnation, at) if self._is_current(event.incarnation) else None

    def _recovered(self, incarnation: Incarnation, at: float) -> Changes | None:
        gang = gang_of(incarnation.replica)
        return Changes(ended_outages=[(self._end_outage(gang, at), True)]) if gang in self.outages else None

    def _begin_outage(self, incarnation: Incarnation, since: float) -> None:
        gang = gang_of(incarnation.replica)
        if (outage := self.outages.get(gang)) is not None:
            self.outages[gang] = replace(outage, since=min(outage.since, since))
        else:
            self.outages[gang] = Outage(gang, self._node(incarnation), since, self._gpus(gang))

    def _end_outage(self, gang: ReplicaId, at: float) -> Outage:
        outage = self.outages.pop(gang)
        self.lost_gpu_seconds += outage.gpu_seconds(at)
        return outage

    def _gpus(self, gang: ReplicaId) -> int:
        """Return the number of GPUs of a whole replica (all members of a gang)."""
        role = self._roles.get(role_of(gang))
        return role.per_member.gpus * role.ranks if role is not None else 0

    # ── other events ────────────────────────────────────────────────────────────────────────────────────────────────
    def _on_run_started(self, event: ev.RunStarted, at: float) -> None:
        self._roles = _roles(event.job)
        self.faults.silence = event.job.limits.silence

    def _on_resumed(self, event: ev.Resumed, at: float) -> None:
        """Reset the timeline for a resumed run, because the resume is no recovery from earlier failures."""
        self._roles, self._ending = _roles(event.job), False
        self.faults.silence = event.job.limits.silence
        self._retired.update(self._newest.values())
        for pending in (self._unjoined, self._recovering, self._standing):
            pending.clear()

    def _on_intended(self, event: ev.Intended, at: float) -> None:
        action = event.action
        if isinstance(action, Launch):
            self._on_launch(action, at)
        elif isinstance(action, StopStep):
            self._stop_requested.add(action.incarnation)
        elif isinstance(action, InjectFault):
            target = action.incarnation or self._newest.get(ReplicaId(action.fault.target))
            self.faults.on_intended(action, target, at)

    def _on_fault_injected(self, event: ev.FaultInjected, at: float) -> None:
        self.faults.on_reported(event, at)

    def _on_command(self, event: ev.CommandReceived, at: float) -> None:
        if event.command == DRAIN:
            self._drained_nodes.add(event.target)
        elif event.command == UNDRAIN:
            self._drained_nodes.discard(event.target)

    def _is_current(self, incarnation: Incarnation) -> bool:
        return self._newest.get(incarnation.replica) == incarnation and incarnation not in self._retired


_HANDLERS: dict[type, Callable[[FailureTimeline, Any, float], Changes | None]] = {
    ev.RunStarted: FailureTimeline._on_run_started,
    ev.Resumed: FailureTimeline._on_resumed,
    ev.Intended: FailureTimeline._on_intended,
    ev.IntentSettled: FailureTimeline._on_intent_settled,
    ev.Decided: FailureTimeline._on_decided,
    ev.Joined: FailureTimeline._on_joined,
    ev.StepEnded: FailureTimeline._on_step_ended,
    ev.FirstWorkDone: FailureTimeline._on_first_work,
    ev.VersionAvailable: FailureTimeline._on_version,
    ev.StepCommitted: FailureTimeline._on_step_committed,
    ev.FindingChanged: FailureTimeline._on_finding_changed,
    ev.FaultInjected: FailureTimeline._on_fault_injected,
    ev.CommandReceived: FailureTimeline._on_command,
}


def fences(event: ev.Decided) -> tuple[Fence, ...]:
    """Return the fences that a decision contains."""
    if isinstance(event.action, RestartAll):
        return event.action.fences
    return (event.action,) if isinstance(event.action, Fence) else ()


def _roles(job: RunSpec) -> dict[str, RoleSpec]:
    return {role.name: role for role in job.roles}
