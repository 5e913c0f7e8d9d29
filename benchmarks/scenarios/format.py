"""The tables of a scenario file. Most keys have defaults, so that a scenario only states the other values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from rrl.benchmarks.scenarios.event_kinds import (
    CHANGES,
    KEYS,
    MANAGER_EVENTS,
    NEEDED,
    NODE_EVENTS,
    PROCESS_EVENTS,
    PROCESS_STATES,
    target_of,
)
from rrl.benchmarks.scenarios.values import Lasting, Length, fixed
from rrl.config.health_rules import Expect
from rrl.config.job.schema import HealthTable, LimitsTable, PhaseTable

Share = Annotated[float, Field(ge=0, le=1)]
Cpu = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
KernelKind = Literal["sxid", "mce", "oom", "nic", "io", "filesystem", "filesystem_back", "hung_task"]
CAUSES = Literal["process", "hang", "node", "gpu", "fabric", "storage", "software", "user"]


def _many(value: object) -> object:
    """Return a list; a single value becomes a list with this value."""
    return [value] if isinstance(value, str) else value


def _gpus(value: object) -> object:
    """Parse ``2``, ``[0, 3]`` or ``"*"``.

    Return None for ``"*"``, because the file does not give the number of GPUs of the node.
    """
    if value == "*":
        return None
    several = value if isinstance(value, list | tuple) else [value]
    if several and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in several):
        return tuple(several)
    raise ValueError('must be a number of a GPU, counted from 0, a list as in [0, 1], or "*"')


def _links(value: object) -> object:
    several = value if isinstance(value, list | tuple) else [value]
    if several and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in several):
        return tuple(several)
    raise ValueError("must be a number of an NVLink, counted from 0, or a list as in [0, 1]")


def _expected(value: object) -> object:
    try:
        return msgspec.convert(value, Expect)
    except msgspec.ValidationError as error:
        known = ", ".join(Expect.__struct_fields__)
        raise ValueError(f"{error}; what can be expected of a node (docs/health.md): {known}") from None


_EVERYBODYS = ("do", "at", "after", "who", "name")


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=True, use_attribute_docstrings=True, populate_by_name=True
    )


class RhythmPhase(_Table):
    """One phase of a role's rhythm."""

    phase: str
    lasts: Length
    first: Length = fixed(0.0)
    """Seconds that are added to the first pass of an incarnation."""
    rate: float | None = Field(default=None, gt=0)
    """Units of work (tokens, samples) per s; None if the phase reports no progress."""
    every: Length = fixed(0.0)
    """Seconds between two increases of the progress counter; 0 means that it increases at each heartbeat."""
    waits: str = ""
    """Role whose work this phase waits for. The speed of the phase is the share of the role's replicas that work."""
    reports_waits_for: bool = False
    """Whether heartbeats name the role that the replica waits for (``waits_for``)."""
    cpu: Cpu | None = None
    """CPU cores that the process uses during the phase."""
    gpu: Share | None = None
    """Share of the time in which a kernel runs on the process's GPUs; the key may also be ``gpu_use``, as in events."""
    tensor: Share | None = None
    """Share of the time in which tensor cores work (RobustRL's signal)."""
    every_rounds: int = Field(default=1, ge=1)
    """With the value N, the phase takes place only in rounds N, 2 N, 3 N ...; the first round has number 1."""
    until: dict[str, str] = {}
    """A phase of each named role. This phase ends when every replica of these roles has ended the named phase of this
    round."""
    puts: dict[str, Count] = {}
    """Units that the replica adds to each queue when the phase ends. It waits until there is space for all of them."""
    takes: dict[str, Count] = {}
    """Units that the replica takes from each queue when the phase ends. It waits until the queue has all of them."""

    @model_validator(mode="before")
    @classmethod
    def _as_in_events(cls, data: Any) -> Any:
        if isinstance(data, dict) and "gpu_use" in data and "gpu" not in data:
            return {("gpu" if key == "gpu_use" else key): value for key, value in data.items()}
        return data


class RoleTable(_Table):
    replicas: int = Field(default=1, ge=0, le=1024)
    """Number of replicas; by default the number that the default role with this name has."""
    ranks: int = Field(default=1, ge=1, le=512)
    """Number of processes of each replica: a gang, with one process on each node."""
    gpus: int | None = Field(default=None, ge=0, le=16)
    """GPUs of each process; None means 8 for trainer and rollout, and 0 for other roles."""
    probed: bool | None = None
    """Whether the role answers probes for work. None means that rollouts and services answer, and that other roles
    reply that they have no handler."""
    standby: bool = False
    """Whether each process of the role has a standby process on its node, which takes its place after a failure."""
    on: tuple[str, ...] = ()
    """Nodes, one for each process. If empty, each process has a node of its own, in order, and roles without GPUs share
    one node."""
    starts: Length | None = None
    """Time from the launch to the Hello; None means the time of the default role with this name."""
    rhythm: tuple[RhythmPhase, ...] = ()
    """Phases of a round, which is repeated; if empty, the phases of the default role with this name."""
    once: tuple[RhythmPhase, ...] | None = None
    """Phases before the first round of an incarnation; None means the phases of the default role with this name."""


class QueueTable(_Table):
    """A queue between replicas: groups, samples, free slots."""

    holds: Count | None = None
    """Largest number of units in the queue; None means no limit."""
    has: int = Field(default=0, ge=0)
    """Units in the queue at the beginning."""


class ClusterTable(_Table):
    spares: int = Field(default=1, ge=0, le=64)
    """Number of nodes with an agent and no other process."""
    cpus: int = Field(default=64, ge=1)
    restart: Length = fixed(2.0)
    """Time from the decision on a repair to the launch of the next incarnation."""
    allocation: Length = fixed(60.0)
    """Time until a replacement of an excluded node arrives, if there is no spare."""
    readers: tuple[Literal["nvml", "dcgm", "kernel", "fabric", "host"], ...] = (
        "nvml",
        "dcgm",
        "kernel",
        "fabric",
        "host",
    )
    """Readers whose source exists; the other readers report their source as absent. Without dcgm, rrl has no
    information about tensor cores; RobustRL always has this information from its own profiler."""
    loads: bool = True
    """Whether agents report the CPU and GPU load of the roles."""


class Event(_Table):
    """An event: a change of one or more targets."""

    do: Literal[PROCESS_EVENTS, NODE_EVENTS, MANAGER_EVENTS]
    at: Length
    """Time from the beginning, or from the event that ``after`` names."""
    after: str = ""
    """Name of another event."""
    who: tuple[str, ...] = ()
    """Targets: replicas (``rollout/1``, ``trainer/0.2``, ``rollout/*``) or nodes (``n3``; ``@rollout/1`` is that
    replica's node)."""
    name: str = ""
    """Name by which ``of`` in [[truth]] refers to the event; if empty, its kind is its name."""
    lasts: Annotated[Length | None, Field(alias="for")] = None
    phase: str | None = None
    """Phase in which the target must be; the event takes effect when the target is first in this phase after ``at``."""
    cpu: Cpu | None = None
    gpu_use: Share | None = None
    tensor: Share | None = None
    answers_after: Length | None = None
    """Seconds that an answer to a probe takes during the event."""
    answer: Literal["no", "fails"] = "no"
    process_state: Literal["", "S", "D", "T", "t"] = ""
    """Process state that the agent reads in /proc/PID/stat during the event; if empty, S for a hang and T for a
    freeze."""
    signal: int = Field(default=9, ge=1, le=64)
    code: int = Field(default=1, ge=0, le=255)
    last_line: str = ""
    text: str = ""
    factor: float = Field(default=1.0, gt=0)
    by: Length | None = None
    forward: Length | None = None
    back: Length | None = None
    down_after: Lasting = 300.0
    back_after: Lasting = float("inf")
    times: int = Field(default=1, ge=1)
    every: Length = fixed(60.0)
    gpu: Annotated[tuple[int, ...] | None, PlainValidator(_gpus)] = (0,)
    """GPUs that the event affects; None means all GPUs of the node."""
    link: Annotated[tuple[int, ...] | None, PlainValidator(_links)] = None
    """NVLinks of the GPU that ``set`` and ``grow`` change."""
    xid: int = Field(default=0, ge=0)
    port: str = "mlx5_0/1"
    path: str = ""
    """Path of a mount (default: /home), or device of a kernel line (default: the device in the text of the line)."""
    kind: KernelKind | None = None
    """Kind of the kernel line; with None it is derived from the text of the line."""
    by_readers: tuple[Literal["kernel", "nvml", "dcgm"], ...] = ("kernel", "nvml", "dcgm")
    """Readers that report an Xid (key ``by``)."""
    exists: bool = True
    """Whether the node has the device whose PCI address an SXid names."""
    age: Lasting | None = None
    """Age (s) of the kernel line when the scenario begins; None if the kernel writes the line during the scenario."""
    unread: tuple[str, ...] = ()
    """Fields that cannot be read."""
    source: Literal["health", "diag"] = "health"
    """Source of a DCGM incident: dcgmi health, or a test of dcgmi diag."""
    system: str = ""
    incident: str = ""
    """Code of a DCGM incident: the name of a constant DCGM_FR_* without this prefix."""
    severity: Literal["warn", "fail"] = "fail"
    reader: Literal["nvml", "dcgm", "kernel", "fabric", "host"] = "nvml"
    state: Literal["absent", "denied", "hung", "broken"] = "hung"
    set: dict[str, Any] = {}
    grow: dict[str, float] = {}
    """Increase per s of each counter."""

    def gpus(self, there: int) -> tuple[int, ...]:
        """Return the GPUs that the event affects on a node with ``there`` GPUs."""
        return tuple(range(there)) if self.gpu is None else tuple(one for one in self.gpu if one < there)

    @model_validator(mode="before")
    @classmethod
    def _one_or_many(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "gpu" in data and "gpu_use" in KEYS.get(str(data.get("do")), ()) and "gpu_use" not in data:
            data = {("gpu_use" if key == "gpu" else key): value for key, value in data.items()}
        own = KEYS.get(str(data.get("do")))
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if own is not None and bool(data.get("who")) != (target_of(str(data["do"])) == "manager"):
            for key in data:
                if key in known and key not in (*_EVERYBODYS, *own):
                    raise ValueError(f"{data['do']} has no {key}; it has {', '.join(own) or 'no keys'}")
        if data.get("do") == "xid" and "by" in data:
            data = {("by_readers" if key == "by" else key): value for key, value in data.items()}
        return {**data, "who": [data["who"]]} if isinstance(data.get("who"), str) else data

    @model_validator(mode="after")
    def _fits(self) -> Event:
        if bool(self.who) == (target_of(self.do) == "manager"):
            raise ValueError(f"{self.do} needs {'no who' if self.who else 'a who'}")
        given = {type(self).model_fields[field].alias or field for field in self.model_fields_set}
        if (needed := NEEDED.get(self.do)) is not None and needed not in given:
            raise ValueError(f"{self.do} needs {needed}")
        if self.do == "clock_jumps" and (self.forward is None) == (self.back is None):
            raise ValueError("clock_jumps needs forward or back")
        if self.process_state and self.process_state not in PROCESS_STATES[self.do]:
            may = " or ".join(PROCESS_STATES[self.do])
            raise ValueError(f"process_state of {self.do} must be {may}, not {self.process_state}")
        if self.do in CHANGES and not given & {"set", "grow", "unread"}:
            raise ValueError(f"{self.do} needs set, grow or unread")
        return self


class Truth(_Table):
    """An expected finding about a replica or node that has failed. Every other alarm is a false alarm."""

    who: str
    or_: Annotated[tuple[str, ...], BeforeValidator(_many), Field(alias="or")] = ()
    """Further replicas or nodes that the finding may name instead."""
    of: str = ""
    """Name of the event that causes the failure; if empty, the only event."""
    at: Length | None = None
    """Time of the failure; None means the time of the event."""
    within: Lasting = Field(default=300.0, gt=0)
    """Time (s) within which the failure must be found."""
    cause: CAUSES
    causes: Annotated[tuple[CAUSES, ...], BeforeValidator(_many)] = ()
    """Further causes that are accepted."""
    verdict: Literal["FAIL", "WARN"] = "FAIL"
    """Expected verdict; with WARN the failure must be reported, and no action may follow."""
    never: Literal["", "fail"] = ""
    """With ``fail``, a FAIL about the replica or node counts as a false alarm."""
    required: bool = True
    """If false, the finding is optional: if it is raised, it is not a false alarm, and if it is not raised, it is not a
    miss."""
    exact: bool = False
    """If true, only an alarm about ``who`` or ``or`` itself counts. Alarms about another member of the gang, or about a
    process on the node, do not count."""

    @model_validator(mode="after")
    def _fits(self) -> Truth:
        if not self.required and "within" in self.model_fields_set:
            raise ValueError("within has no meaning with required = false")
        return self


class Scenario(_Table):
    about: str = Field(min_length=1)
    """One line about the events and about the findings that an operator expects."""
    lasts: Lasting = Field(default=1800.0, gt=0, le=12 * 3600.0)
    jitter: Length = fixed(30.0)
    """Largest time by which all events are delayed; each seed draws another delay."""
    cluster: ClusterTable = ClusterTable()
    roles: dict[str, RoleTable] = {}
    """Roles; if empty, a trainer, three rollouts, a store and a reward."""
    limits: LimitsTable = LimitsTable()
    phases: dict[str, PhaseTable] = {}
    health: HealthTable = HealthTable()
    expect: Annotated[Expect, PlainValidator(_expected)] = Expect()
    """Hardware that the site's rules (health.toml) expect on every node."""
    draws: dict[str, Length] = {}
    """Durations that each seed draws once. All places with ``{draw = "NAME"}`` have the drawn value."""
    queues: dict[str, QueueTable] = {}
    event: tuple[Event, ...] = ()
    truth: tuple[Truth, ...] = ()
