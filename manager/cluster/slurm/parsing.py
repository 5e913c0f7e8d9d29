"""Reads what Slurm's commands print: pure, over their delimited text forms, which are alike in every version.

Records start with ASCII RS and fields are split by US: bars, spaces and line ends in names, comments and reasons do no
harm. What cannot be understood raises :class:`Unreadable`: unknown, which is neither there nor gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from ClusterShell.NodeSet import NodeSet, NodeSetException
from msgspec import Struct

from ....core.types import NodeName
from ....core.units import seconds
from ..base import AllocationState, NodeState, NodeStatus
from .commands import MANAGER

_RS, _US = "\x1e", "\x1f"
JOBS_FORMAT = _RS + _US.join(("%A", "%i", "%T", "%N", "%j", "%r", "%L", "%l", "%S", "%e", "%k"))
"""for ``squeue -h -o``: id, id as shown (``12+1``: component 1 of 12), state, nodes, name, reason, what is left of the
time limit, that limit, start, expected end (both in s since 1970 by SLURM_TIME_FORMAT), comment"""
STEPS_FORMAT = _RS + _US.join(("%i", "%N", "%j"))
"""for ``squeue -h -s -o``: id, nodes, name"""

_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT"}
_SUSPENDED = {"STOPPED", "SUSPENDED"}
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""Job states of squeue(1). COMPLETING has ended for us: nothing can be started in it any more."""

_DOWN = {"DOWN", "ERROR", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
_DRAINING = {"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "INVAL", "INVALID_REG"}
_UP = {"ALLOCATED", "COMPLETING", "IDLE", "MIXED"}
_UNKNOWN = {"NOT_RESPONDING", "NO_RESPOND", "UNKNOWN", "FUTURE", "POWERING_UP", "POWER_UP"}
"""Base states and flags of a node (sinfo(1), scontrol(1)), worst first. A pending reboot takes no new work."""


_NEVER_CLEARS = re.compile(
    "|".join((
        "AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS",
        "JobHoldMaxRequeue", "MaxMemPerLimit", "PartitionNodeLimit",
        "PartitionTimeLimit", "QOSNotAllowed", "ReservationDeleted", "launch failed requeued held",
        r"(Assoc|QOS)Max\w*Per(Job|Node)\w*",  # the job itself is larger than it may be
        r"QOSMin\w+",  # or smaller
        r"(Assoc|QOS)Grp\w*(?<!Run)Minutes(Limit)?|(Assoc|QOS)GrpWallLimit",  # a budget is used up
        r"Job's (account|QOS) not (known|permitted).*",
    ))
)  # fmt: skip
"""Reasons for which a job pends until somebody changes the job, an association or a QOS (squeue(1), JOB REASON CODES;
the names are those in libslurm 22.05.8). All others may clear: Resources and Priority, limits on what runs at a time
(AssocGrpJobsLimit, QOSMaxJobsPerUserLimit, AssocGrpCpuLimit ...), since somebody's job may end, nodes that are down or
drained (ReqNodeNotAvail; measured: PartitionNodeLimit is not said of those), partitions that are down or inactive. A
job that is held has somebody who means to let it go."""
_HOLD_REASONS = {
    "JobHeldAdmin": "held by an administrator (scontrol release)",
    "JobHeldUser": "held by its user (scontrol release)",
}
PREEMPTED_EARLY_S = 5.0
"""s before the end of its time limit that a job's expected end tells of preemption; without it they differ by none
(measured on 22.05)"""


_REASON = re.compile(r" Reason=(.+?)(?: \[(\S+@\S+)\]| [A-Z]\w+=|$)")
_RESERVED = {"MAINT", "PLANNED_MAINT", "RESERVED"}
"""flags by which somebody has other plans with a node that is up"""


class Unreadable(Exception):
    """Slurm printed something that we do not understand."""


class JobEnd(StrEnum):
    """How a job ends, or has ended."""

    COMPLETING = "completing"
    """it ends; Slurm says why once all of it has ended"""
    RECLAIMED = "reclaimed"
    """by no fault of what ran in it: preempted, or its time was over"""
    CANCELLED = "cancelled"
    OTHER = "other"


_ENDS = {
    "COMPLETING": JobEnd.COMPLETING, "PREEMPTED": JobEnd.RECLAIMED, "TIMEOUT": JobEnd.RECLAIMED,
    "DEADLINE": JobEnd.RECLAIMED, "CANCELLED": JobEnd.CANCELLED,
}  # fmt: skip
"""by squeue's word for the state"""


class Job(Struct, frozen=True):
    id: str
    """its own, for a component of a heterogeneous job too: its steps are listed under it"""
    state: AllocationState
    nodes: tuple[NodeName, ...]
    name: str
    detail: str
    comment: str
    unsatisfiable_reason: str = ""
    """the reason why it pends and never starts by itself"""
    time_left_s: float | None = None
    """s until Slurm takes it back: by its time limit, or sooner if it is preempted"""
    reclaimed: bool = False
    """it is preempted, and has GraceTime left"""
    leader: str = ""
    """of a component: the id of the heterogeneous job, which is that of its first component"""
    offset: int = 0
    """of a component: its number, from 0"""
    end: JobEnd | None = None
    """None: it has not ended"""

    @property
    def target(self) -> tuple[str, ...]:
        """What srun needs to start a step in it. A component's own id is refused (measured)."""
        return (f"--jobid={self.leader}", f"--het-group={self.offset}") if self.leader else (f"--jobid={self.id}",)


class StepLine(Struct, frozen=True):
    id: str
    """``<job>.<step>``"""
    nodes: tuple[NodeName, ...]
    name: str

    @property
    def job(self) -> str:
        return self.id.partition(".")[0]


class NodeInfo(Struct, frozen=True):
    """What people and slurmctld have laid down about a node."""

    state: str
    """with its flags, as Slurm writes it"""
    reason: str
    reason_by: str
    """who gave the reason, and when"""

    @property
    def flags(self) -> set[str]:
        return _flags(self.state)

    @property
    def draining(self) -> bool:
        return bool(self.flags & {"DRAIN", "DRAINED", "DRAINING"})

    @property
    def set_aside(self) -> bool:
        """It is drained, down, reserved or about to be rebooted, by somebody. (That it does not respond is nobody's
        doing.)"""
        return bool(self.flags & (_DOWN | _DRAINING | _RESERVED))

    @property
    def description(self) -> str:
        given = f" ({self.reason_by})" if self.reason_by else ""
        return f"{self.state}: {self.reason}{given}" if self.reason else self.state


def read_jobs(text: str) -> list[Job]:
    """From ``squeue -h -t all -o`` :data:`JOBS_FORMAT`. ``detail``: Slurm's state, and the reason if it gives one."""
    jobs = []
    for number, shown, state_name, nodes, name, reason, time_left, limit, start, end, comment in records(text, 11):
        state = _allocation_state(state_name)
        detail = state_name if reason in ("None", "") else f"{state_name}: {_HOLD_REASONS.get(reason, reason)}"
        comment = "" if comment == "(null)" else comment
        never = reason if state is AllocationState.PENDING and never_clears(reason) else ""
        leader, plus, offset = shown.partition("+")
        component = (leader, int(offset)) if plus and offset.isdigit() else ("", 0)
        time_left_s, reclaimed = (
            _time_left(time_left, limit, start, end) if state is AllocationState.RUNNING else (None, False)
        )
        how_it_ended = _ENDS.get(state_name, JobEnd.OTHER) if state is AllocationState.ENDED else None
        jobs.append(Job(number, state, _expand(nodes), name, detail, comment, never, time_left_s, reclaimed, *component,
                        how_it_ended))  # fmt: skip
    return jobs


def _time_left(left: str, limit: str, start: str, end: str) -> tuple[float | None, bool]:
    """How long a running job goes on, and whether it is preempted. ``left`` counts down to the time limit whatever
    happens; at preemption only the expected end moves to now + GraceTime, and at the end of a suspension it moves on
    (both measured on 22.05). Durations only: no clock but Slurm's own is read."""
    try:
        by_limit = float(seconds(left))
        early = float(start) + float(seconds(limit)) - float(end)
    except ValueError:  # UNLIMITED, NOT_SET, INVALID, or times that are not told in seconds
        return None, False
    return max(0.0, by_limit - max(0.0, early)), early > PREEMPTED_EARLY_S


def never_clears(reason: str) -> bool:
    """A job that pends for this reason does so until somebody changes something."""
    return _NEVER_CLEARS.fullmatch(reason) is not None


def managed_runs(jobs: Iterable[Job]) -> set[str]:
    """Runs that a manager looks after, by the jobs of their user: all that have one in the queue, wherever the manager
    itself is, but for those whose first manager still waits there. Their names are in the comments."""
    runs = set()
    for job in jobs:
        tokens = job.comment.split()
        waiting = tokens[-1:] == [MANAGER] and job.state is AllocationState.PENDING
        if len(tokens) > 1 and tokens[0] == "rrl" and job.state is not AllocationState.ENDED and not waiting:
            runs.add(tokens[1])
    return runs


def read_steps(text: str) -> list[StepLine]:
    """From ``squeue -h -s -o`` :data:`STEPS_FORMAT`: numbered steps, not batch, extern, interactive or pending ones."""
    lines = [StepLine(number, _expand(nodes), name) for number, nodes, name in records(text, 3)]
    return [line for line in lines if re.fullmatch(r"\d+\.\d+", line.id)]


def read_nodes(text: str) -> dict[NodeName, NodeStatus]:
    """From ``scontrol show node -o``. A line for a name that Slurm does not know makes it UNKNOWN."""
    nodes = {}
    for line in text.splitlines():
        if missing := re.fullmatch(r"Node (\S+) not found", line):
            nodes[NodeName(missing[1])] = NodeStatus(NodeState.UNKNOWN, "not known to Slurm")
            continue
        if not line.strip():
            continue
        name, state = re.match(r"NodeName=(\S+) ", line), re.search(r" State=(\S+)", line)
        if name is None or state is None:
            raise Unreadable(f"no node in {line[:80]!r}")
        reason = _REASON.search(line)
        detail = f"{state[1]}: {reason[1]}" if reason else state[1]
        nodes[NodeName(name[1])] = NodeStatus(node_state(state[1]), detail, reason[1] if reason else "")
    return nodes


def read_node_info(text: str) -> NodeInfo:
    """From ``scontrol show node -o`` of one node."""
    state = re.search(r" State=(\S+)", text)
    if state is None:
        raise Unreadable(f"no node in {text.strip()[:80]!r}")
    reason = _REASON.search(text.strip())
    return NodeInfo(state[1], reason[1] if reason else "", reason[2] or "" if reason else "")


def node_state(text: str) -> NodeState:
    """From ``MIXED+DRAIN``, ``DOWN*``, ``idle~``: the worst that base state and flags say.

    A node that only does not respond (yet) is UNKNOWN: Slurm itself waits for SlurmdTimeout before it says DOWN.
    """
    flags = _flags(text)
    for state, names in ((NodeState.DOWN, _DOWN), (NodeState.DRAINING, _DRAINING), (NodeState.UNKNOWN, _UNKNOWN)):
        if flags & names:
            return state
    return NodeState.UP if flags & _UP else NodeState.UNKNOWN


def _flags(text: str) -> set[str]:
    flags = {flag.rstrip("*~#!%$@^-+").upper() for flag in text.split("+")}
    if "*" in text:
        flags.add("NOT_RESPONDING")
    if "~" in text:
        flags.add("POWERED_DOWN")
    return flags


def inactive_limit(text: str) -> int:
    """Seconds, from ``scontrol show config``: 0 = a job without a living salloc is left alone."""
    if match := re.search(r"^InactiveLimit\s*=\s*(\d+)", text, re.MULTILINE):
        return int(match[1])
    raise Unreadable("scontrol show config tells no InactiveLimit")


def _allocation_state(state_name: str) -> AllocationState:
    for state, state_names in (
        (AllocationState.PENDING, _PENDING), (AllocationState.RUNNING, _RUNNING),
        (AllocationState.SUSPENDED, _SUSPENDED), (AllocationState.ENDED, _ENDED),
    ):  # fmt: skip
        if state_name in state_names:
            return state
    raise Unreadable(f"{state_name!r} is no state of a job")


def fields(*names: str) -> str:
    """The format for ``-o`` that :func:`records` reads."""
    return _RS + _US.join(names)


def records(text: str, fields: int) -> list[list[str]]:
    """Raises Unreadable when it is not records of so many fields."""
    head, *records = text.split(_RS)
    if head.strip():
        raise Unreadable(f"unexpected output: {head.strip()[:80]!r}")
    split = [record.removesuffix("\n").split(_US, fields - 1) for record in records]
    if short := next((record for record in split if len(record) != fields), None):
        raise Unreadable(f"{len(short)} fields where {fields} were asked for")
    return split


def _expand(nodes: str) -> tuple[NodeName, ...]:
    if nodes in ("", "(null)", "None assigned"):
        return ()
    try:
        return tuple(NodeName(node) for node in NodeSet(nodes))
    except NodeSetException as error:
        raise Unreadable(f"host list {nodes!r}: {error}") from error
