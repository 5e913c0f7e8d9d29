"""Compute how long a replica may show no progress before it fails, for each phase of a role: what the detectors do.

The detectors themselves judge a replica that stands still, alone in its run, at several times; the bound is the first
time at which one of them fails it. So the bounds are those of the code, with the limits of the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from msgspec import Struct

from ...core.phases import PHASES, WAIT_EXTERNAL
from ...core.run_spec import Limits, RoleSpec, RunSpec
from ...core.text import span
from ...core.types import Finding, Incarnation, NodeName, Verdict, replica_id
from .detectors.probing import suspect_at
from .detectors.progress import endless_wait_due
from .detectors.registry import PROGRESS_DETECTORS
from .health_monitor import HealthMonitor
from .pipeline import attribute, first_match
from .progress_tracker import STARTING
from .records import ReplicaView, is_polling

_LOADS = {"idle": (0.0, 0.0), "at work": (1.0, 1.0), "no loads": None}
"""Conditions under which a replica stands still: CPU cores in use and share of the time with a running kernel, as the
node's agent reports them; None if it reports nothing."""
_ALL_ANSWER = ("; ".join(f"{load}, answers" for load in _LOADS), "answers probes")
_RULES = {
    "no_answer": "a probe is not answered",
    "idle_hang": "neither CPU nor GPU works ([limits] idle)",
    "no_progress": "no progress",
    "phase_overdue": "does not end",
}
"""What each detector that decides a bound has found."""
_LATEST_S = 48 * 3600.0
"""Time (s) after which a replica that has not failed never will."""


class Bound(Struct, frozen=True):
    """How long a replica may show no progress in one phase."""

    role: str
    phase: str
    condition: str
    """Loads of the replica, and whether it answers probes if it is probed."""
    first_s: float | None
    """Time (s) in the first pass of an incarnation, if no pass of the role is known; None if it never fails alone."""
    later_s: float | None
    """Time (s) once passes of the phase are known, if none took longer than a minute; None if it never fails alone."""
    rule: str
    """The rule from which the later bound follows."""


def bounds(job: RunSpec) -> list[Bound]:
    """Return the bounds of all roles of a job, by phase and condition; conditions with the same result are one."""
    watched = {role.name for role in job.roles if role.watch == "activity"}
    own = [name for name in job.limits.phases if name not in PHASES and name not in watched]
    return [bound for role in job.roles for phase in _phases(role, own) for bound in _of_phase(role, phase, job.limits)]


def _phases(role: RoleSpec, own: Sequence[str]) -> Sequence[str]:
    """Return the phases that a role may report; ``own`` are those that only the job declares."""
    if role.watch == "activity":  # its launcher reports one phase, with the name of the role
        return (role.name,)
    users_code = not role.built_in or role.traits.runs_model_code
    return (*role.traits.phases, *(() if role.built_in else own), *((WAIT_EXTERNAL,) if users_code else ()))


def _of_phase(role: RoleSpec, phase: str, limits: Limits) -> Iterator[Bound]:
    found: dict[tuple[float | None, float | None, str], list[str]] = {}
    for condition, load in _LOADS.items():
        for answers in (False, True):
            first, later = (_Still(role, phase, limits, load, answers, known) for known in (False, True))
            if answers and not later.probed:
                continue
            name = f"{condition}, {'answers' if answers else 'no answer'}" if later.probed else condition
            later_s = later.fails_after()
            found.setdefault((first.fails_after(), later_s, later.rule(later_s)), []).append(name)
    for (first_s, later_s, rule), conditions in found.items():
        condition = "any" if len(found) == 1 else "; ".join(conditions).replace(*_ALL_ANSWER)
        yield Bound(role.name, phase, condition, first_s, later_s, rule)


class _Still:
    """A replica that entered a phase at time 0 and stands still in it."""

    def __init__(
        self, role: RoleSpec, phase: str, limits: Limits, load: tuple[float, float] | None, answers: bool, known: bool
    ) -> None:
        self._limits, self._load, self._answers = limits, load, answers
        self._monitor = HealthMonitor()
        self._monitor.set_limits(limits)
        ranks = [replica_id(role.name, "0" if rank == 0 else f"0.{rank}") for rank in range(min(role.ranks, 2))]
        self._views = [self._enter(Incarnation(rank, 1), phase, known) for rank in ranks]
        self.view = self._views[0]
        self.view.role.answers_probes = role.built_in and role.traits.answers_probes
        self.view.probe.no_probe_handler = not self.view.role.answers_probes
        self.probed = self.view.role.answers_probes and suspect_at(self.view, limits) < inf

    def _enter(self, incarnation: Incarnation, phase: str, known: bool) -> ReplicaView:
        monitor, node = self._monitor, NodeName(incarnation.replica)
        monitor.on_hello(incarnation, node, STARTING, 0.0)
        view = monitor.replicas[incarnation.replica]
        if phase == STARTING:
            return view  # the duration of a start is not learned, since the next one may be on another node
        monitor.on_phase(incarnation, phase, 0, None, 0.0)
        if known:
            view.passed_phases.add(phase)
            view.usual_duration = view.slowest_duration = view.longest_pass = 1.0
            view.worked_before = True
        return view

    def fails_after(self) -> float | None:
        """Return the first whole second at which the replica fails; None if there is none."""
        if not self._failures(_LATEST_S):
            return None
        low, high = 0.0, _LATEST_S
        while high - low > 1.0:
            middle = (low + high) // 2
            low, high = (low, middle) if self._failures(middle) else (middle, high)
        return high

    def rule(self, fails_after: float | None) -> str:
        """Return the rule that fails the replica or, if none does, the one that applies instead."""
        phase, limits = self.view.declared, self._limits
        if fails_after is None and is_polling(self.view):
            longest = span(endless_wait_due(self.view, limits))
            return f"waits: only if all others that could end it wait, too, for {longest}"
        if fails_after is None:
            serves = f"serves: only if others wait for it, and it does nothing for {span(phase.shortest)}"
            return serves if phase.longest == inf else "only a warning"
        rule = _RULES[self._failures(fails_after)[0].detector]
        if rule not in (_RULES["no_progress"], _RULES["phase_overdue"]):
            return rule
        if phase.shortest == phase.longest:
            return f"{rule} within {span(phase.longest)}"
        usual = f"{limits.adaptive:g} x usual, {span(phase.shortest)} to {span(phase.longest)}"
        return f"{rule} within {usual}" + ("; longer for this load" if fails_after > phase.shortest else "")

    def _failures(self, now: float) -> list[Finding]:
        """Return the FAIL findings about the replica if it has stood still until ``now`` (s)."""
        found = []
        for view in self._views:
            view.last_message_at, view.heartbeats, view.probe.heartbeats = now, int(now), int(now)
            view.loads.reset()
            if self._load is not None:
                view.loads.add(*self._load, 0.0)
                idle = self._load[0] == 0.0
                view.loads.idle_loads, view.loads.cpu_working_loads = (99, 0) if idle else (0, 99)
                view.loads.latest_at = now
            self._probe(view, now)
            finding, _ = first_match(PROGRESS_DETECTORS, view, self._limits, now)
            found += [finding] if finding is not None else []
        return [one for one in attribute(found, self._monitor) if one.verdict is Verdict.FAIL]

    def _probe(self, view: ReplicaView, now: float) -> None:
        view.probe.reset()
        if self.probed and (at := suspect_at(view, self._limits)) <= now:
            view.probe.sent(at)
            view.probe.heartbeats = int(now - at)
            if self._answers:
                view.probe.answer_count, view.probe.pending_since, view.probe.answered_at = 1, None, now
