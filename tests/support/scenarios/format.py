"""The tables of a scenario file. Everything has a default: a scenario says what is special about it, no more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from rrl.config.health_rules import Expect
from rrl.config.job.schema import HealthTable, LimitsTable, PhaseTable
from rrl.tests.support.scenarios.event_kinds import (
    CHANGES,
    KEYS,
    MANAGER_EVENTS,
    NEEDED,
    NODE_EVENTS,
    PROCESS_EVENTS,
    PROCESS_STATES,
    target_of,
)
from rrl.tests.support.scenarios.values import Lasting, Length, fixed

Share = Annotated[float, Field(ge=0, le=1)]
Cpu = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, strict=True)]
KernelKind = Literal["sxid", "mce", "oom", "nic", "io", "filesystem", "filesystem_back", "hung_task"]
CAUSES = Literal["process", "hang", "node", "gpu", "fabric", "storage", "software", "user"]


def _many(value: object) -> object:
    """One is a list of one."""
    return [value] if isinstance(value, str) else value


def _gpus(value: object) -> object:
    """``2``, ``[0, 3]`` or ``"*"``; the last is no number at all: which there are, the node knows."""
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
    """added to the first pass of a life"""
    rate: float | None = Field(default=None, gt=0)
    """units of work (tokens, samples) per s; none: it shows no progress"""
    every: Length = fixed(0.0)
    """between two rises of the progress counter; 0: at each beat"""
    waits: str = ""
    """the role whose work this phase waits for: it passes only as fast as the share of that role which works"""
    reports_waits_for: bool = False
    """its beats name whom it waits for (``waits_for``)"""
    cpu: Cpu | None = None
    """cores that the process uses meanwhile"""
    gpu: Share | None = None
    """share of the time in which a kernel runs on its GPUs; also ``gpu_use``, as in events"""
    tensor: Share | None = None
    """share of the time in which tensor cores work (what RobustRL reads)"""
    every_rounds: int = Field(default=1, ge=1)
    """N: the phase comes in rounds N, 2 N, 3 N ... only; the first round is number 1"""
    until: dict[str, str] = {}
    """role → phase: this phase ends when every replica of the role has ended that phase of the same round, too"""
    puts: dict[str, Count] = {}
    """queue → units that the replica puts there when the phase ends; it waits until there is room for all of them"""
    takes: dict[str, Count] = {}
    """queue → units that the replica takes when the phase ends; it waits until all of them are there"""

    @model_validator(mode="before")
    @classmethod
    def _as_in_events(cls, data: Any) -> Any:
        if isinstance(data, dict) and "gpu_use" in data and "gpu" not in data:
            return {("gpu" if key == "gpu_use" else key): value for key, value in data.items()}
        return data


class RoleTable(_Table):
    replicas: int = Field(default=1, ge=0, le=1024)
    """where it is not said, as many as the role of this name has by default"""
    ranks: int = Field(default=1, ge=1, le=512)
    """processes of each replica: a gang, one on each node"""
    gpus: int | None = Field(default=None, ge=0, le=16)
    """of each process; none: 8 for trainer and rollout, else 0"""
    probed: bool | None = None
    """it can be asked for a bit of work; none: rollouts can, others answer that they cannot"""
    on: tuple[str, ...] = ()
    """nodes, one for each process; none: of their own, in order; roles without GPUs share one"""
    starts: Length | None = None
    """from launch to Hello"""
    rhythm: tuple[RhythmPhase, ...] = ()
    """phases, again and again; none: that of the role of this name"""
    once: tuple[RhythmPhase, ...] | None = None
    """phases before the first round of a life; none: those of the role of this name"""


class QueueTable(_Table):
    """What replicas hand to each other: groups, samples, free slots."""

    holds: Count | None = None
    """units that it holds at most; none: any number"""
    has: int = Field(default=0, ge=0)
    """units in it at the beginning"""


class ClusterTable(_Table):
    spares: int = Field(default=1, ge=0, le=64)
    """nodes with an agent and nothing else"""
    cpus: int = Field(default=64, ge=1)
    restart: Length = fixed(2.0)
    """from a repair's decision to the launch of the next life"""
    allocation: Length = fixed(60.0)
    """until a node comes that replaces an excluded one where there is no spare"""
    readers: tuple[Literal["nvml", "dcgm", "kernel", "fabric", "host"], ...] = (
        "nvml", "dcgm", "kernel", "fabric", "host"
    )  # fmt: skip
    """that have something to read; the others say that they are absent. Without dcgm nobody tells rrl what tensor cores
    do; RobustRL's own profiler knows it anyway"""
    loads: bool = True
    """agents tell what CPU and GPU the roles use"""


class Event(_Table):
    """Something happens to somebody."""

    do: Literal[PROCESS_EVENTS, NODE_EVENTS, MANAGER_EVENTS]
    at: Length
    """from the beginning, or from when the event ``after`` struck"""
    after: str = ""
    """the name of another event"""
    who: tuple[str, ...] = ()
    """replicas (``rollout/1``, ``trainer/0.2``, ``rollout/*``) or nodes (``n3``, ``@rollout/1``: where that one is)"""
    name: str = ""
    """for ``of`` in [[truth]]; none: the deed's"""
    lasts: Annotated[Length | None, Field(alias="for")] = None
    phase: str | None = None
    """it strikes when the target is in this phase, for the first time after ``at``"""
    cpu: Cpu | None = None
    gpu_use: Share | None = None
    tensor: Share | None = None
    answers_after: Length | None = None
    """s that a probe takes to be answered meanwhile"""
    answer: Literal["no", "fails"] = "no"
    process_state: Literal["", "S", "D", "T", "t"] = ""
    """what the agent reads in /proc/PID/stat meanwhile; none: S of a hang, T of a freeze"""
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
    """None: all of the node's"""
    link: Annotated[tuple[int, ...] | None, PlainValidator(_links)] = None
    """of the GPU: ``set`` and ``grow`` are of these NVLinks"""
    xid: int = Field(default=0, ge=0)
    port: str = "mlx5_0/1"
    path: str = ""
    """of a mount (none: /home); device of a kernel line (none: as its text says)"""
    kind: KernelKind | None = None
    """none: as its text says"""
    by_readers: tuple[Literal["kernel", "nvml", "dcgm"], ...] = ("kernel", "nvml", "dcgm")
    """``by`` of an xid: who tells it"""
    age: Lasting | None = None
    """s before the scenario's beginning at which the kernel wrote it"""
    unread: tuple[str, ...] = ()
    """fields that cannot be read"""
    source: Literal["health", "diag"] = "health"
    """of an incident: dcgmi health, or a test of dcgmi diag"""
    system: str = ""
    incident: str = ""
    """DCGM_FR_* without its prefix"""
    severity: Literal["warn", "fail"] = "fail"
    reader: Literal["nvml", "dcgm", "kernel", "fabric", "host"] = "nvml"
    state: Literal["absent", "denied", "hung", "broken"] = "hung"
    set: dict[str, Any] = {}
    grow: dict[str, float] = {}
    """counter → by so much per s"""

    def gpus(self, there: int) -> tuple[int, ...]:
        """Which it concerns, of a node with so many."""
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
            raise ValueError(f"{self.do} needs set or grow")
        return self


class Truth(_Table):
    """Somebody has failed. Nothing else has: every other alarm is a false one."""

    who: str
    or_: Annotated[tuple[str, ...], BeforeValidator(_many), Field(alias="or")] = ()
    """whoever else may be charged in its place"""
    of: str = ""
    """the event that it comes from; none: the only one"""
    at: Length | None = None
    """since when; none: when the event struck"""
    within: Lasting = Field(default=300.0, gt=0)
    """to be found so soon"""
    cause: CAUSES
    causes: Annotated[tuple[CAUSES, ...], BeforeValidator(_many)] = ()
    """other names of it that are right too"""
    verdict: Literal["FAIL", "WARN"] = "FAIL"
    """WARN: it has to be told, and nothing need be done"""
    never: Literal["", "fail"] = ""
    """``fail``: to condemn for it is a false alarm"""
    required: bool = True
    """false: it may be found or not; to find it is no false alarm, not to find it is no miss"""
    exact: bool = False
    """of a gang, or a node and who lives there, only whom ``who`` and ``or`` name finds it"""

    @model_validator(mode="after")
    def _fits(self) -> Truth:
        if not self.required and "within" in self.model_fields_set:
            raise ValueError("within has no meaning with required = false")
        return self


class Scenario(_Table):
    about: str = Field(min_length=1)
    """one line: who does what, and what an operator wants"""
    lasts: Lasting = Field(default=1800.0, gt=0, le=12 * 3600.0)
    jitter: Length = fixed(30.0)
    """by up to so much all events come later, another amount with each seed"""
    cluster: ClusterTable = ClusterTable()
    roles: dict[str, RoleTable] = {}
    """none: a trainer, three rollouts, a store and a reward"""
    limits: LimitsTable = LimitsTable()
    phases: dict[str, PhaseTable] = {}
    health: HealthTable = HealthTable()
    expect: Annotated[Expect, PlainValidator(_expected)] = Expect()
    """what the site's rules expect of every node (health.toml)"""
    draws: dict[str, Length] = {}
    """durations that each seed draws once, for all places with ``{draw = "NAME"}``"""
    queues: dict[str, QueueTable] = {}
    event: tuple[Event, ...] = ()
    truth: tuple[Truth, ...] = ()
