"""What failed in a run, from its events alone: findings, ends that nobody asked for, launches that were refused, and
how each was got over."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals

from msgspec import Struct, structs

from ...core.faults import TRAITS, Hits
from ...core.launch import ExitReason, exit_text
from ...core.types import AGENT, SHADOW, STACKS, Finding, Life, NodeName, Verdict, role_of
from ...manager.model import events as ev
from ...manager.model.actions import Decision, Fence, Finish, Launch, RestartAll, StopStep
from ...manager.model.reduce_nodes import DRAIN, UNDRAIN

STACKS_NEAR = 60.0
"""s between a failure and stacks that tell something of it"""


class Failure(Struct, frozen=True):
    """One life that failed, or a node that failed with nobody on it. Times are the manager's, s since the epoch."""

    at: float
    """the first trace of it"""
    life: Life | None
    node: NodeName | None
    told: tuple[str, ...]
    """findings and ends, in the words of their evidence, each once"""
    injected: bool = False
    over: bool = False
    """the life has ended or is no longer believed; else it went on"""
    rung: str = ""
    """what was done"""
    back: Life | None = None
    """the life that took its place and worked (an agent or a role without a first unit of work: that joined)"""
    back_at: float | None = None
    stacks: bool = False
    """``told`` has what its stacks showed"""


def failures(events: Iterable[ev.Stamped]) -> list[Failure]:
    """In the order of their first traces."""
    account = _Account()
    for stamped in events:
        account.enter(stamped.event, stamped.at)
    return [account.with_stacks(failure) for failure in account.found.values()]


class _Account:
    def __init__(self) -> None:
        self.found: dict[Life | NodeName, Failure] = {}
        self._nodes: dict[Life, NodeName] = {}
        self._launches: dict[str, Life] = {}
        self._asked: set[Life] = set()
        self._injected: set[Life] = set()
        self._nodes_hit: set[NodeName] = set()
        self._left: set[str] = set()
        """nodes that a person has the run leave: their agents and shadows end with that"""
        self._stacks: dict[Life, tuple[float, ev.StacksTaken]] = {}
        """the newest of each, and when they were taken"""
        self._ending = False
        """everything that ends from here on was asked to"""

    def enter(self, event: ev.Event, at: float) -> None:
        if isinstance(event, ev.Intended):
            self._intended(event)
        elif isinstance(event, ev.Decided):
            self._decided(event.action, at)
        elif isinstance(event, ev.FindingChanged):
            if event.finding.verdict is Verdict.FAIL and not self._ending:
                self._finding(event.finding, at)
        elif isinstance(event, ev.StepEnded):
            self._step_ended(event, at)
        elif isinstance(event, ev.Done) and not event.ok and event.tag in self._launches and not self._ending:
            self._failed(self._launches[event.tag], at, f"not launched: {event.detail}", over=True)
        elif isinstance(event, ev.FaultInjected) and event.ok and not event.ended:
            self._hit(event)
        elif isinstance(event, ev.StacksTaken):
            self._stacks[event.life] = at, event
        elif isinstance(event, ev.Resumed):
            self._ending = False
        elif isinstance(event, ev.Commanded) and event.command == DRAIN:
            self._left.add(event.target)
        elif isinstance(event, ev.Commanded) and event.command == UNDRAIN:
            self._left.discard(event.target)
        elif isinstance(event, ev.Joined | ev.FirstWorkDone):
            self._back(event.life, at, worked=isinstance(event, ev.FirstWorkDone))

    def with_stacks(self, failure: Failure) -> Failure:
        """With what its processes were seen to do shortly before or after, where no finding says it already."""
        if failure.life not in self._stacks:
            return failure
        at, taken = self._stacks[failure.life]
        said = [*taken.groups, *([f"whole: {taken.file}"] if taken.file else [])]
        if abs(at - failure.at) > STACKS_NEAR or failure.stacks:
            return failure
        return structs.replace(failure, told=(*failure.told, *(f"stacks: {line}" for line in said)))

    def _hit(self, event: ev.FaultInjected) -> None:
        if event.life is not None:
            self._injected.add(event.life)
        if event.kind is not None and TRAITS[event.kind].hits is Hits.NODE:  # with everybody who is on it by now
            self._injected.update(life for life, node in self._nodes.items() if node == event.node)
            self._nodes_hit.add(event.node)

    def _intended(self, event: ev.Intended) -> None:
        action = event.action
        if isinstance(action, Launch):
            self._nodes[action.life] = action.node
            self._launches[action.step] = action.life
        elif isinstance(action, StopStep):
            self._asked.add(action.life)

    def _decided(self, action: Decision, at: float) -> None:
        if isinstance(action, Finish):
            self._ending = True
        elif isinstance(action, Fence | RestartAll) and not self._ending:
            for fence in action.fences if isinstance(action, RestartAll) else (action,):
                helps = role_of(fence.life.replica) in (AGENT, SHADOW)
                if not fence.charged or (helps and self._nodes.get(fence.life) in self._left):
                    # it has not failed: it moves, or restarts for another's sake, or is not needed there any more
                    self._asked.add(fence.life)
                    continue
                self._failed(fence.life, at, *fence.why.evidence, over=True)
                held = self.found[fence.life]
                self.found[fence.life] = structs.replace(held, rung=fence.rung.value)

    def _finding(self, finding: Finding, at: float) -> None:
        told = [f"{finding.detector}: {one.source}: {one.text}" for one in finding.evidence]
        if finding.life is not None:
            self._failed(finding.life, at, *told)
            if any(one.source == STACKS for one in finding.evidence):
                self.found[finding.life] = structs.replace(self.found[finding.life], stacks=True)
        elif finding.node is not None:
            held = self.found.get(finding.node)
            if held is None:
                self.found[finding.node] = Failure(at, None, finding.node, tuple(told), finding.node in self._nodes_hit)

    def _step_ended(self, event: ev.StepEnded, at: float) -> None:
        life = event.life
        if life in self.found:
            self.found[life] = structs.replace(self.found[life], over=True)
        if self._ending or life in self._asked or event.reason is ExitReason.STOPPED or event.code == 0:
            return
        number = event.signal
        how = f"exit code {event.code}, " if event.code is not None else f"{_signal(number)}, " if number else ""
        self._failed(life, at, f"its step ended: {how}{exit_text(event.reason, event.detail)}", over=True)

    def _failed(self, life: Life, at: float, *told: str, over: bool = False) -> None:
        held = self.found.get(life)
        if held is None:
            held = Failure(at, life, self._nodes.get(life), (), life in self._injected)
        words = tuple(dict.fromkeys((*held.told, *told)))
        self.found[life] = structs.replace(
            held, told=words, over=held.over or over, injected=held.injected or life in self._injected
        )

    def _back(self, life: Life, at: float, worked: bool) -> None:
        for key, held in self.found.items():
            if held.life is None or not _follows(life, held.life):
                continue
            if held.back is None or (worked and held.back == life):
                self.found[key] = structs.replace(held, back=life, back_at=at)


def _follows(life: Life, failed: Life) -> bool:
    return life.replica == failed.replica and life.incarnation > failed.incarnation


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def of(whose: str | None, failure: Failure) -> bool:
    """Whether it is a failure of that role, replica or life; without one all are."""
    life = failure.life
    if whose is None or life is None:
        return whose is None
    return whose in (role_of(life.replica), life.replica, str(life))
