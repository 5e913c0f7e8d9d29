"""What a manager counts of its run while it goes: restarts, findings, steps, GPU time lost, effective time. Pure.

Counts begin with the manager: its successor's begin anew, as counters of Prometheus do. The effective time is what
replicas say of themselves at the moment; ``summary.json`` takes back what a failure's first trace disproves.
"""

from __future__ import annotations

from collections import Counter

from rrl.manager import events as ev
from rrl.manager.actions import Exclude
from rrl.manager.downtime import Downtime, fences
from rrl.manager.state import State, Status, workers
from rrl.spec.phases import phase
from rrl.spec.words import AGENT, SHADOW, Life, ReplicaId, Verdict, gang_of, role_of


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
