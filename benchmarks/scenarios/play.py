"""Plays a scenario with one seed to one judge and compares its alarms with the expected findings."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from rrl.benchmarks.scenarios import repairs
from rrl.benchmarks.scenarios.event_effects import ScenarioEvent, shifted
from rrl.benchmarks.scenarios.format import Scenario, Truth
from rrl.benchmarks.scenarios.hardware import Machines, uuid_of
from rrl.benchmarks.scenarios.judge import Judge
from rrl.benchmarks.scenarios.values import fixed, with_draws
from rrl.benchmarks.scenarios.world import World
from rrl.core.types import AGENT, Finding, Incarnation, NodeName, ReplicaId, Verdict, gang_of, role_of


class Alarm(Struct, frozen=True):
    """A new or changed finding of a judge: a FAIL, or a WARN if the scenario expects a WARN."""

    at: float
    verdict: str
    detector: str
    cause: str
    who: str
    """The replica or node that the alarm is about."""
    incarnation: int
    """Number of the incarnation; 0 for nodes."""
    text: str = ""
    until: float = inf
    """Time (s) from which the judge no longer reported the finding; inf if the judge reported it until the end."""


class Outcome(Struct, frozen=True):
    """The result of a play for one expected finding."""

    who: str
    cause: str
    verdict: str
    since: float
    found_at: float | None
    """Time (s) of the first alarm about the expected finding, even if it came too late; None if there was no alarm."""
    in_time: bool
    named: str
    """Cause in the first alarm about the expected finding."""
    detector: str = ""


class Played(Struct, frozen=True):
    scenario: str
    seed: int
    outcomes: tuple[Outcome, ...]
    false: tuple[Alarm, ...]
    """Each FAIL about a replica or node that had not failed."""
    lasts: float = 0.0
    """Duration of the play in virtual time (s)."""
    broken: str = ""
    """Names the events that had no target, so that the scenario did not do what it declares. Empty if all had
    targets."""
    warnings: tuple[Alarm, ...] = ()
    """Every WARN, whether or not a failure was the reason."""
    unexplained: tuple[Alarm, ...] = ()
    """Every WARN about a replica or node that had not failed."""


def play(name: str, scenario: Scenario, seed: int, judge: Judge) -> Played:
    """Play a scenario with one seed. Raises only exceptions of the judge."""
    scenario = with_draws(scenario, lambda draw: fixed(scenario.draws[draw].draw(Random(f"{name}:{seed}:draw {draw}"))))
    machines = Machines(scenario, seed)
    world = World(name, scenario, seed, judge)
    world.died = lambda member: judge.role_died(
        member.node.name, [uuid_of(member.node.name, index) for index in member.gpu_indices], world.clock
    )
    machines.used = world.used
    shift = world.chance("jitter").uniform(0.0, scenario.jitter.draw(world.chance("jitter of")))
    events = [ScenarioEvent(event, index, shift, world, machines) for index, event in enumerate(scenario.event)]
    for node in world.nodes.values():
        for one in events:
            if one.concerns(node.name):
                first = one.due if one.due < inf else min(each.due for each in events)
                machines.expect(node.name, one.event, first)
    following = [one for one in events if one.event.after]
    alarms: list[Alarm] = []
    previous: set[str] = set()
    standing: dict[str, int] = {}
    """Index of the alarm of each current finding, by the finding's text."""
    while world.now < scenario.lasts:
        for one in events:
            if world.now >= one.due:
                one.strike_due()
                if one.struck_at == world.now:
                    for other in following:
                        other.follows(one)
        world.tick()
        if world.is_deaf:
            continue
        for node in world.nodes.values():
            if not node.excluded and node.agent_is_running(world.now):
                for reading in machines.read(node.name, world.now):
                    judge.reading(node.name, reading, world.clock)
        findings = judge.findings(world.clock)
        current = {_alarm_text(one) for one in findings} if findings else set()
        new = [one for one in findings if _alarm_text(one) not in previous] if current else []
        for words in previous - current:
            if (index := standing.pop(words, None)) is not None:
                alarms[index] = replace(alarms[index], until=world.now)
        previous = current
        for finding in new:
            if finding.verdict in (Verdict.FAIL, Verdict.WARN):
                standing[_alarm_text(finding)] = len(alarms)
                alarms.append(_alarm(finding, world.now))
        for finding in findings:
            if finding.verdict is Verdict.FAIL:
                _repair(world, finding)
    return _scored(name, scenario, seed, events, alarms, world, shift)


def _alarm_text(finding: Finding) -> str:
    """Return a finding's text; a finding with another text is new.

    The text of a warning contains its first line of evidence.
    """
    first = finding.evidence[0].text if finding.verdict is Verdict.WARN and finding.evidence else ""
    return f"{finding.verdict}:{finding.key}:{first}"


def _alarm(finding: Finding, now: float) -> Alarm:
    who, incarnation = (str(finding.node), 0) if finding.incarnation is None else _whom(finding.incarnation)
    text = finding.evidence[0].text if finding.evidence else ""
    return Alarm(now, finding.verdict.value, finding.detector, finding.cause.value, who, incarnation, text)


def _whom(incarnation: Incarnation) -> tuple[str, int]:
    return str(incarnation.replica), incarnation.number


def _repair(world: World, finding: Finding) -> None:
    """Repair a reported failure, approximately as the planner does."""
    if finding.node is not None:
        node = world.nodes.get(finding.node)
        if node is not None and not node.excluded:
            repairs.exclude(world, node)
    elif finding.incarnation is not None and role_of(finding.incarnation.replica) == AGENT:
        node = world.nodes.get(NodeName(finding.incarnation.replica.partition("/")[2]))
        if node is not None and node.agent == finding.incarnation:
            repairs.restart_agent(world, node)
    elif finding.incarnation is not None and finding.incarnation in world.members_by_incarnation:
        repairs.restart(world, world.gang(finding.incarnation))


# ── comparison with the expected findings ────────────────────────────────────────────────────────────────────────────
def _scored(
    name: str,
    scenario: Scenario,
    seed: int,
    events: list[ScenarioEvent],
    alarms: list[Alarm],
    world: World,
    shift: float,
) -> Played:
    outcomes: list[Outcome] = []
    explained: set[int] = set()
    idle = [one.name for one in events if one.never_struck]
    broken = f"{', '.join(idle)} had no target before the end" if idle else ""
    for truth in scenario.truth:
        happening = next((one for one in events if one.name == truth.of), events[0] if events else None)
        if truth.at is not None:
            since = shifted(truth.at.draw(world.chance("truth")), shift)
        else:
            since = inf if happening is None or happening.struck_at is None else happening.struck_at
        if since >= scenario.lasts or (happening is not None and happening.struck_at is None):
            broken = broken or f"{truth.who} does not fail before the end"
            continue
        accepted, also = _accepted(truth, happening)
        first: Alarm | None = None
        for index, alarm in enumerate(alarms):
            stands = truth.verdict == "WARN" and alarm.verdict == "WARN" and alarm.until > since
            if (alarm.at < since and not stands) or (truth.never == "fail" and alarm.verdict == "FAIL"):
                continue
            if _is_among(alarm, accepted):
                explained.add(index)
                if first is None and (alarm.verdict == "FAIL" or truth.verdict == "WARN"):
                    first = replace(alarm, at=max(alarm.at, since))
            elif _is_among(alarm, also):
                explained.add(index)
        if not truth.required:
            continue
        in_time = first is not None and first.at <= since + truth.within
        if first is None and since + truth.within > scenario.lasts:
            broken = broken or f"the scenario ends before {truth.who} had to be found"
            continue
        outcomes.append(
            Outcome(
                truth.who,
                truth.cause,
                truth.verdict,
                since,
                first.at if first else None,
                in_time,
                first.cause if first else "",
                first.detector if first else "",
            )
        )
    false = tuple(_once(one for index, one in enumerate(alarms) if one.verdict == "FAIL" and index not in explained))
    warnings = tuple(one for one in alarms if one.verdict == "WARN")
    unexplained = tuple(one for i, one in enumerate(alarms) if one.verdict == "WARN" and i not in explained)
    return Played(name, seed, tuple(outcomes), false, scenario.lasts, broken, warnings, unexplained)


def _once(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Return one alarm per gang and time, even if there are alarms about several of its members."""
    first: dict[tuple[str, int, float], Alarm] = {}
    for one in alarms:
        gang = str(gang_of(ReplicaId(one.who))) if "/" in one.who else one.who
        first.setdefault((gang, one.incarnation, one.at), one)
    return list(first.values())


def _accepted(truth: Truth, happening: ScenarioEvent | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return (names that a right alarm may name, further names that the event also affects).

    Each name is mapped to the newest incarnation that was affected; a repair has started later incarnations. An alarm
    about a name of the second kind does not find the failure, but is not a false alarm.
    """
    named = (truth.who, *truth.or_)
    places = happening.places if happening is not None else {}
    accepted: dict[str, int] = {}
    also: dict[str, int] = {}
    for name in named:
        if name.startswith("@"):
            name = places.get(name[1:], name)
        accepted[name] = happening.incarnations.get(name, 10**6) if happening is not None else 10**6
    if happening is not None:
        for replica, node in happening.places.items():
            gang = str(gang_of(replica))
            if any(str(gang_of(one)) == gang for one in named if "/" in one):
                suffers = also if truth.exact else accepted
                suffers.setdefault(replica, happening.incarnations.get(replica, 1))
            if node in accepted:
                also[replica] = happening.incarnations.get(replica, 1)
                also[f"agent/{node}"] = 10**6
    return accepted, also


def _is_among(alarm: Alarm, who: dict[str, int]) -> bool:
    return alarm.who in who and alarm.incarnation <= who[alarm.who]
