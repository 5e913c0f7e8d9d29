"""What a scenario says of somebody who is not there: mistakes that the tables alone do not show."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from random import Random
from typing import Any, get_type_hints

import msgspec

from rrl.spec.words import gang_of
from rrl.tests.lab.scenarios.deeds import target_of
from rrl.tests.lab.scenarios.format import Event, Scenario
from rrl.tests.lab.scenarios.hardware import COUNTERS, LINKS, PORTS, STRUCTS, gpus_of, values_of
from rrl.tests.lab.scenarios.places import placed
from rrl.tests.lab.scenarios.rhythms import roles_of

Mistake = tuple[tuple[str | int, ...], str]


def mistakes(scenario: Scenario) -> Iterator[Mistake]:
    """Where in the file, and what is wrong."""
    roles = roles_of(scenario)
    for name, table in roles.items():
        place = ("roles", name)
        for index, beat in enumerate(table.rhythm):
            if beat.waits and beat.waits not in roles:
                yield (*place, "rhythm", index, "waits"), f"there is no role {beat.waits}{_near(beat.waits, roles)}"
        if not any(beat.lasts.a or beat.lasts.b for beat in table.rhythm):
            yield (*place, "rhythm"), "all of its phases last 0 s"
        if len(table.on) > table.replicas * table.ranks:
            yield (*place, "on"), f"names {len(table.on)} nodes for {table.replicas * table.ranks} processes"
    nodes, gangs, _ = placed(scenario, 0, lambda what: Random(what))
    members = [str(one.life.replica) for gang in gangs.values() for one in gang.members]
    phases = {str(gang.id): _phases(gang.table) for gang in gangs.values()}
    names = [event.name or event.do for event in scenario.event]
    for index, event in enumerate(scenario.event):
        for key, words in _of_event(event, scenario, members, list(map(str, nodes)), phases, names):
            yield ("event", index, key), words
    for index, truth in enumerate(scenario.truth):
        for key, whom in (("who", truth.who), *(("or", each) for each in truth.or_)):
            agents = [f"agent/{node}" for node in nodes]
            known = [*members, *map(str, nodes), *agents]
            if whom.removeprefix("@") not in (members if whom.startswith("@") else known):
                yield ("truth", index, key), f"there is no {whom}{_near(whom, known)}; there are {_some(known)}"
        if truth.at is not None and truth.at.a >= scenario.lasts:
            yield ("truth", index, "at"), f"the scenario has ended by then: it lasts {scenario.lasts:g} s"


def _of_event(
    event: Event, scenario: Scenario, members: Sequence[str], nodes: Sequence[str],
    phases: dict[str, set[str]], names: Sequence[str],
) -> Iterator[tuple[str, str]]:  # fmt: skip
    if event.after and (event.after not in names or event.after == (event.name or event.do)):
        yield "after", f"there is no other event {event.after}; there are {', '.join(names)}"
    if event.at.a >= scenario.lasts:
        yield "at", f"the scenario has ended by then: it lasts {scenario.lasts:g} s"
    struck: set[str] = set()
    for pattern in event.who:
        process = target_of(event.do) == "process"
        known = members if process or pattern.startswith("@") else nodes
        found = {one for one in known if fnmatchcase(one, pattern if process else pattern.removeprefix("@"))}
        struck |= found
        if not found:
            kind = "process" if known is members else "node"
            yield "who", f"there is no {kind} {pattern}{_near(pattern, known)}; there are {_some(known)}"
    if event.phase is not None and target_of(event.do) == "process" and struck:
        of = set.union(*(phases[gang_of(one)] for one in struck))
        if event.phase not in of:
            yield "phase", f"no phase {event.phase} there{_near(event.phase, of)}; there are {_some(sorted(of))}"
    elif event.phase is not None and event.phase not in set().union(*phases.values()):
        of = set().union(*phases.values())
        yield "phase", f"nobody has a phase {event.phase}{_near(event.phase, of)}; there are {_some(sorted(of))}"
    if event.do in ("gpu", "gpu_lost", "xid") and event.gpu >= gpus_of(scenario):
        yield "gpu", f"nodes have {gpus_of(scenario)} GPUs here, counted from 0"
    if event.do == "port" and event.port not in PORTS:
        yield "port", f"there is no port {event.port}; there are {PORTS[0]} to {PORTS[-1]}"
    if event.do in STRUCTS:
        yield from _of_fields(event)


def _of_fields(event: Event) -> Iterator[tuple[str, str]]:
    struct = STRUCTS[event.do]
    types = get_type_hints(struct)
    own = [name for name in types if name != "unread"]
    for name, value in event.set.items():
        if name == "nvlink" and event.do == "gpu":
            if not isinstance(value, dict) or value.get("link") not in range(LINKS):
                yield "set", f"nvlink is a table with a link from 0 to {LINKS - 1}, as in {{link = 7, active = false}}"
                continue
        elif name not in own:
            yield "set", f"{struct.__name__} has no {name}{_near(name, own)}; it has {', '.join(own)}"
            continue
        try:
            values_of(struct, {name: value})
        except msgspec.ValidationError as error:
            yield "set", f"{name}: {error}"
    numbers = COUNTERS if event.do == "port" else [n for n in own if types[n] in (int, float, int | None, float | None)]
    for name in event.grow:
        if name not in numbers:
            yield "grow", f"there is no counter {name}{_near(name, numbers)}; there are {', '.join(numbers)}"


def _phases(table: Any) -> set[str]:
    return {"starting", *(beat.phase for beat in (*table.rhythm, *(table.once or ())))}


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _some(known: Sequence[str]) -> str:
    return ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
