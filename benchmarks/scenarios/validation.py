"""Finds mistakes of a scenario that a single table does not show, such as the name of a node that does not exist."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from rrl.benchmarks.scenarios.actors import STORE_PHASES
from rrl.benchmarks.scenarios.event_kinds import target_of
from rrl.benchmarks.scenarios.format import Event, KernelKind, RoleTable, Scenario, Truth
from rrl.benchmarks.scenarios.hardware import LINKS, PORTS, STRUCTS, gpus_of, struct_of, values_of
from rrl.benchmarks.scenarios.places import placed
from rrl.benchmarks.scenarios.rhythms import KNOWN_ROLES, roles_of
from rrl.benchmarks.scenarios.values import draws_in, with_draws
from rrl.core.phases import PHASES
from rrl.core.types import ReplicaId, gang_of, rank_of
from rrl.health.checks.node_state import PORT_COUNTERS
from rrl.health.readers.dcgm.parsing import code_by_number
from rrl.health.readers.kernel_log import recognise
from rrl.health.readers.nvml.names import clock_reasons, fabric_state, recovery_action
from rrl.health.readers.samples import FabricPort, Mount, NvidiaGpu, NvLink

_OF_GPUS = ("gpu", "gpu_lost", "gpu_gone", "xid", "dcgm")
_NUMBERED = ("unknown (", "bit_")
"""Prefixes of the names that readers make for values that have no known name."""
_FEW = range(32)
_OTHER_CODES = (
    "CLOCK_THROTTLE_THERMAL",
    "CLOCK_THROTTLE_POWER",
    "BLACKLISTED_DRIVER",
    "VOLATILE_DBE",
    "VOLATILE_SBE",
    "FABRIC_MANAGER_TRAINING_ERROR",
    "BROKEN_P2P_PCIE_MEMORY_DEVICE",
    "BROKEN_P2P_PCIE_WRITER_DEVICE",
    "BROKEN_P2P_NVLINK_MEMORY_DEVICE",
    "BROKEN_P2P_NVLINK_WRITER_DEVICE",
    "TEST_SKIPPED",
    "SRAM_THRESHOLD",
    "NVLINK_EFFECTIVE_BER_THRESHOLD",
    "NVLINK_SYMBOL_BER_THRESHOLD",
    "IMEX_UNHEALTHY",
    "FABRIC_PROBE_STATE",
    "BINARY_PERMISSIONS",
    "NVLINK_ERROR",
    "POWER_BRAKE",
    "ERROR_SENTINEL",
)
"""Codes of older and newer versions of DCGM, and abbreviations that stand for several codes."""
CODES = (*(code for number in range(200) if (code := code_by_number(number))), *_OTHER_CODES)
ALLOWED_VALUES: dict[tuple[type[msgspec.Struct], str], tuple[str, ...]] = {
    (NvidiaGpu, name): tuple(word for word in words if not word.startswith(_NUMBERED))
    for name, words in (
        ("clock_reasons", [word for bit in _FEW for word in clock_reasons(1 << bit)]),
        ("recovery_action", [recovery_action(number) for number in _FEW]),
        ("fabric_state", [fabric_state(number) for number in _FEW]),
    )
} | {
    # linux drivers/infiniband/core/sysfs.c: state_show, phys_state_to_str
    (FabricPort, "state"): ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"),
    (FabricPort, "physical"): (
        "Sleep",
        "Polling",
        "Disabled",
        "PortConfigurationTraining",
        "LinkUp",
        "LinkErrorRecovery",
        "Phy Test",
    ),
}
"""For each field, the values that readers report."""
_OTHER_NAMES = {"store": "trajectories", "judge": "reward"}
"""Real name of a default role, by a name that authors may expect."""

Mistake = tuple[tuple[str | int, ...], str]


def mistakes(scenario: Scenario) -> Iterator[Mistake]:
    """Yield each mistake as its place in the file and a description."""
    if wrong_draws := list(_of_draws(scenario)):
        yield from wrong_draws
        return
    scenario = with_draws(scenario, scenario.draws.__getitem__)
    roles = roles_of(scenario)
    yield from _of_names(scenario, roles)
    yield from _of_queues(scenario, roles)
    for name, table in roles.items():
        place = ("roles", name)
        for index in range(len(table.rhythm)):
            for key, words in _of_waits(name, index, roles):
                yield (*place, "rhythm", index, key), words
        for index, phase in enumerate(table.once or ()):
            for key in sorted(phase.model_fields_set & {"every_rounds", "until", "puts", "takes"}):
                yield (*place, "once", index, key), "is a key of the rhythm, and not of the phases before it"
        if not any(phase.lasts.greatest for phase in table.rhythm):
            yield (*place, "rhythm"), "all of its phases last 0 s"
        if len(table.on) > table.replicas * table.ranks:
            yield (*place, "on"), f"names {len(table.on)} nodes for {table.replicas * table.ranks} processes"
    if scenario.jitter.greatest >= scenario.lasts:
        yield ("jitter",), f"is as long as the scenario, which lasts {scenario.lasts:g} s: its events may never come"
    nodes, gangs, _ = placed(scenario, 0, lambda what: Random(what))
    members = [str(one.incarnation.replica) for gang in gangs.values() for one in gang.members]
    phases = {str(gang.id): _phases(gang.table) for gang in gangs.values()}
    names = [event.name or event.do for event in scenario.event]
    for index, event in enumerate(scenario.event):
        for key, words in _of_event(event, scenario, members, list(map(str, nodes)), phases, names):
            yield ("event", index, key), words
    for index, truth in enumerate(scenario.truth):
        if words := _of_origin(truth, names):
            yield ("truth", index, "of"), words
        for key, whom in (("who", truth.who), *(("or", each) for each in truth.or_)):
            agents = [f"agent/{node}" for node in nodes]
            known = [*members, *map(str, nodes), *agents]
            if whom.removeprefix("@") not in (members if whom.startswith("@") else known):
                yield ("truth", index, key), f"there is no {whom}{_near(whom, known)}; there are {_some(known)}"
        if truth.at is not None and truth.at.least >= scenario.lasts:
            yield ("truth", index, "at"), f"the scenario has ended by then: it lasts {scenario.lasts:g} s"


def _of_names(scenario: Scenario, roles: Mapping[str, RoleTable]) -> Iterator[Mistake]:
    """Yield the mistakes in names of roles, and in the names of phases in ``[phases.NAME]``."""
    for name, table in scenario.roles.items():
        if name in KNOWN_ROLES or table.rhythm:
            continue
        meant = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, KNOWN_ROLES, 1)), "")
        hint = f'; did you mean "{meant}"?' if meant else "."
        known = ", ".join(sorted(KNOWN_ROLES))
        words = (
            f"there is no default role {name}{hint} There are {known}; one of your own needs [[roles.{name}.rhythm]]"
        )
        yield ("roles", name), words
    phases = {*PHASES, *(phase for table in roles.values() for phase in _phases(table))}
    for name in scenario.phases:
        if name not in phases:
            yield (
                ("phases", name),
                f"no role has a phase {name}{_near(name, phases)}; there are {_some(sorted(phases))}",
            )


def _of_draws(scenario: Scenario) -> Iterator[Mistake]:
    """Yield the mistakes in ``[draws]`` and in its uses."""
    used = list(draws_in(scenario))
    for place, name in used:
        if place[0] == "draws":
            yield place, "is itself a draw: write a duration that does not name another draw"
        elif name not in scenario.draws:
            known = ", ".join(scenario.draws) or "none"
            yield place, f"there is no {name} in [draws]{_near(name, scenario.draws)}; there are {known}"
    for name in set(scenario.draws) - {name for _, name in used}:
        yield ("draws", name), f'nothing uses it; write {{draw = "{name}"}} in place of a duration'


def _of_queues(scenario: Scenario, roles: Mapping[str, RoleTable]) -> Iterator[Mistake]:
    """Yield the mistakes in ``[queues]``, and in the units that phases add and take."""
    used: set[str] = set()
    for role, table in roles.items():
        for index, phase in enumerate(table.rhythm):
            for key, units_of in (("puts", phase.puts), ("takes", phase.takes)):
                used |= units_of.keys()
                for name, units in units_of.items():
                    place = ("roles", role, "rhythm", index, key)
                    if (queue := scenario.queues.get(name)) is None:
                        known = ", ".join(scenario.queues) or "none: write [queues.NAME]"
                        yield place, f"there is no queue {name}{_near(name, scenario.queues)}; there are {known}"
                    elif queue.holds is not None and units > queue.holds:
                        yield place, f"{units} of {name} are more than the queue holds: {queue.holds}"
    for name, queue in scenario.queues.items():
        if name not in used:
            yield ("queues", name), "no phase of a rhythm adds units (puts) or takes units (takes)"
        if queue.holds is not None and queue.has > queue.holds:
            yield ("queues", name, "has"), f"is more than the queue holds: {queue.holds}"


def _of_waits(role: str, index: int, roles: Mapping[str, RoleTable]) -> Iterator[tuple[str, str]]:
    """Yield the mistakes in those keys of a phase that say what it waits for."""
    phase = roles[role].rhythm[index]
    if phase.waits and phase.waits not in roles:
        yield "waits", f"there is no role {phase.waits}{_near(phase.waits, roles)}"
    if phase.reports_waits_for and not (phase.waits or phase.until or phase.phase in STORE_PHASES):
        yield (
            "reports_waits_for",
            (
                "needs waits or until, which name the role to report: only phases that need the store report it without"
                f" them: {', '.join(sorted(STORE_PHASES))}"
            ),
        )
    for other, ended in phase.until.items():
        if other not in roles:
            yield "until", f"there is no role {other}{_near(other, roles)}"
            continue
        known = [one.phase for one in roles[other].rhythm]
        if ended not in known:
            yield "until", f"the rhythm of {other} has no phase {ended}{_near(ended, known)}; it has {', '.join(known)}"
        elif other == role and known.index(ended) >= index:
            yield "until", f"{ended} does not come before {phase.phase}, so that {phase.phase} never ends"


def _of_origin(truth: Truth, names: Sequence[str]) -> str:
    """Return a description of what is wrong with the event that an expected finding names; empty if it is valid."""
    known = ", ".join(dict.fromkeys(names)) or "none"
    if truth.at is None and not truth.of and len(names) != 1:
        return f"is needed if there is not exactly one event: name an event, or give at; events: {known}"
    if truth.of and truth.of not in names:
        return f"there is no event {truth.of}{_near(truth.of, names)}; there are {known}"
    if names.count(truth.of) > 1:
        return f"several events are called {truth.of}; give each its own name"
    return ""


def _of_event(
    event: Event,
    scenario: Scenario,
    members: Sequence[str],
    nodes: Sequence[str],
    phases: dict[str, set[str]],
    names: Sequence[str],
) -> Iterator[tuple[str, str]]:
    if event.after and (event.after not in names or event.after == (event.name or event.do)):
        yield "after", f"there is no other event {event.after}; there are {', '.join(names)}"
    elif event.after and names.count(event.after) > 1:
        yield "after", f"several events are called {event.after}; give each its own name"
    elif circle := _circle(event, scenario.event):
        yield "after", f"{', '.join(circle)} wait for each other, so none of them occurs"
    if event.at.least >= scenario.lasts:
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
            yield "phase", f"the targets lack a phase {event.phase}{_near(event.phase, of)}; known: {_some(sorted(of))}"
    elif event.phase is not None and event.phase not in set().union(*phases.values()):
        of = set().union(*phases.values())
        yield "phase", f"no replica has a phase {event.phase}{_near(event.phase, of)}; there are {_some(sorted(of))}"
    there = gpus_of(scenario)
    wrong = (event.gpu is None and not there) or any(one >= there for one in event.gpu or ())
    if wrong and event.do in _OF_GPUS and (event.do != "dcgm" or "gpu" in event.model_fields_set):
        yield "gpu", f"nodes of this scenario have {there} GPUs, counted from 0"
    if event.age is not None and event.at.draw(Random(0)) > 0:
        yield "age", 'is only for lines that are in the log from the beginning: at = "0s"'
    if event.do == "stretch":
        for pattern in event.who:
            if rank_of(ReplicaId(pattern)):
                gang = gang_of(ReplicaId(pattern))
                yield "who", f"stretch affects a whole gang: write {gang}; for one rank use quiet or slow"
    if event.do == "dcgm" and (code := event.incident.removeprefix("DCGM_FR_")) and code not in CODES:
        yield "incident", f"DCGM has no code {code}{_near(code, CODES)} (DCGM_FR_* in DCGM's documentation)"
    if event.do == "kernel" and (wrong_line := _of_kernel_line(event)):
        yield "text" if event.text else "do", wrong_line
    if event.do in ("port", "hca_gone") and event.port not in PORTS:
        yield "port", f"there is no port {event.port}; there are {PORTS[0]} to {PORTS[-1]}"
    if event.do in STRUCTS:
        yield from _of_fields(event)


def _circle(event: Event, events: Sequence[Event]) -> list[str]:
    """Return the events that wait for each other in a circle; empty if ``event`` is not the first of them."""
    by_name = {one.name or one.do: one for one in events}
    circle = [event]
    while (before := by_name.get(circle[-1].after)) is not None:
        if before in circle:
            first = before is event and min(circle, key=events.index) is event
            return [one.name or one.do for one in circle] if first else []
        circle.append(before)
    return []


def _of_kernel_line(event: Event) -> str:
    """Return a description of what is wrong with a line of the kernel log; empty if it is valid."""
    if event.kind is not None:
        return ""
    known = recognise(event.text.encode(), 0.0)
    if known is None:
        kinds = ", ".join(get_args(KernelKind))
        return (
            f"rrl's reader of the kernel log ignores {'this line' if event.text else 'a line without text'}; correct "
            f"it, or give the kind of line that it stands for: {kinds}"
        )
    return 'an Xid is an event of its own: do = "xid", xid = 79' if known.kind == "xid" else ""


def _of_fields(event: Event) -> Iterator[tuple[str, str]]:
    struct = struct_of(event)
    types = get_type_hints(struct)
    own = [name for name in types if name != "unread"]
    if event.link is not None and any(one >= LINKS for one in event.link):
        yield "link", f"every GPU has {LINKS} NVLinks, counted from 0"
    for name, value in event.set.items():
        if name == "nvlink" and event.do == "gpu" and event.link is None:
            if not isinstance(value, dict) or value.get("link") not in range(LINKS):
                yield "set", f"nvlink is a table with a link from 0 to {LINKS - 1}, as in {{link = 7, active = false}}"
            elif wrong := next((one for one in value if one not in NvLink.__struct_fields__), ""):
                fields = NvLink.__struct_fields__
                yield "set", f"nvlink has no {wrong}{_near(wrong, fields)}; it has {', '.join(fields)}"
        elif event.do == "port" and name in PORT_COUNTERS:
            yield "set", f"{name} is a counter: write grow = {{{name} = 2.0}} to increase it by 2 per s"
        elif name not in own:
            yield "set", f"{struct.__name__} has no {name}{_near(name, own)}; it has {', '.join(own)}"
        elif wrong := _of_value(struct, name, types[name], value):
            yield "set", f"{name} {wrong}"
    numbers = (
        PORT_COUNTERS if event.do == "port" else [n for n in own if types[n] in (int, float, int | None, float | None)]
    )
    for name in event.grow:
        if name not in numbers:
            yield "grow", f"there is no counter {name}{_near(name, numbers)}; there are {', '.join(numbers)}"
    may = [name for name in own if type(None) in get_args(types[name])] if "unread" in types else []
    for name in event.unread:
        if name not in may:
            yield "unread", f"{name} cannot be unreadable{_near(name, may)}; there are {', '.join(may)}"


def _of_value(struct: type[msgspec.Struct], name: str, of: Any, value: Any) -> str:
    """Return a description of what is wrong with the value; empty if it is valid."""
    try:
        values_of(struct, {name: value})
    except msgspec.ValidationError as error:
        return f"must be {_kind(of) or error}, not {json.dumps(value, default=str)}"[:300]
    allowed = {name: known for (table, name), known in ALLOWED_VALUES.items() if table is struct}.get(name, ())
    for one in value if isinstance(value, list) else [value]:
        if allowed and one and one not in allowed and not str(one).startswith(_NUMBERED):
            return f"cannot be {one}{_near(str(one), allowed)}; it can be {', '.join(allowed)}"
    if struct is Mount and name in ("used", "inodes_used") and not 0 <= value <= 1:
        return f"is a share, from 0 to 1, not {value:g}"
    return ""


def _kind(of: Any) -> str:
    """Return a type in plain words."""
    plain = [one for one in get_args(of) if one is not type(None)] if type(None) in get_args(of) else [of]
    if len(plain) != 1:
        return ""
    known = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
    if plain[0] in known:
        return known[plain[0]]
    if get_origin(plain[0]) is tuple:
        inner = get_args(plain[0])[0]
        return "a list of texts" if inner is str else f"a list of tables with {', '.join(inner.__struct_fields__)}"
    return "a table" if get_origin(plain[0]) is dict else ""


def _phases(table: RoleTable) -> set[str]:
    return {"starting", *(phase.phase for phase in (*table.rhythm, *(table.once or ())))}


def _near(name: str, known: Iterable[str]) -> str:
    by_lower_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, 1)
    return f'; did you mean "{by_lower_case[near[0]]}"?' if near else ""


def _some(known: Sequence[str]) -> str:
    return ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
