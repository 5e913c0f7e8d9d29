"""Parse what Slurm's commands print, in delimited text formats that are the same in every version. Pure.

Records start with ASCII RS and their fields are separated by US, so bars, spaces and line ends in names, comments and
reasons do no harm. Text that cannot be parsed raises :class:`Unreadable`; the state of the cluster is then unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

from ClusterShell.NodeSet import NodeSet, NodeSetException
from msgspec import Struct

from ...core.drains import DrainOwner, drain_owner
from ...core.types import NodeName
from ...core.units import seconds
from ..base import AllocationState, NodeState, NodeStatus, Unanswered
from .commands import MANAGER, NODE_UNKNOWN
from .node_states import DRAIN, RESERVATIONS, marks, node_state
from .refusals import never_clears

T = TypeVar("T")
_RS, _US = "\x1e", "\x1f"
JOBS_FORMAT = _RS + _US.join(("%A", "%i", "%T", "%N", "%j", "%r", "%L", "%l", "%S", "%e", "%k"))
"""Format for ``squeue -h -o``: id, displayed id (``12+1``: component 1 of job 12), state, nodes, name, reason, time
left, time limit, start, expected end (both in s since 1970 by SLURM_TIME_FORMAT), comment."""
STEPS_FORMAT = _RS + _US.join(("%i", "%N", "%j"))
"""Format for ``squeue -h -s -o``: id, nodes, name."""

_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "RESIZING", "SIGNALING", "STAGE_OUT"}
_SUSPENDED = {"STOPPED", "SUSPENDED"}
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REVOKED",
    "TIMEOUT",
}
"""Job states of squeue(1). A COMPLETING job counts as ended, because nothing can be started in it."""


_HOLD_REASONS = {
    "JobHeldAdmin": "held by an administrator (scontrol release)",
    "JobHeldUser": "held by its user (scontrol release)",
}
PREEMPTED_EARLY_S = 5.0
"""A running job counts as preempted if its expected end is more than this many seconds before the end of its time
limit. Without preemption both times are equal (measured on 22.05)."""


_STAMPED_REASON = re.compile(r" Reason=(.*) \[(\S+@\d{4}-\d\d-\d\dT[\d:]+)\]")
"""Pattern of a node's reason that Slurm has stamped with author and time in brackets. The reason itself may contain
brackets and words such as ``Key=``.
"""
_REASON = re.compile(r" Reason=(.+?)(?: \[(\S+@\S+)\]| [A-Z]\w+=|$)")
_NODE_FIELDS = ("NodeName", "State", "Partitions", "Gres", "BootTime")
UNKNOWN_NODE = NodeStatus(NodeState.UNKNOWN, "not known to Slurm")
"""Status of a node that Slurm does not know."""


class Unreadable(Exception):
    """Slurm printed text that cannot be parsed."""


def parsed(command: str, parse: Callable[[str], T], text: str) -> T:
    """Return what ``parse`` reads in the output of a command. Raises Unanswered if it cannot be parsed."""
    try:
        return parse(text)
    except Unreadable as error:
        raise Unanswered(f"{command}: {error}") from error


class JobEnd(StrEnum):
    """The way in which a job is ending or has ended."""

    COMPLETING = "completing"
    """The job is ending; Slurm reports the cause once all its nodes are released."""
    RECLAIMED = "reclaimed"
    """The job was preempted or reached its time limit; nothing that ran in it failed."""
    CANCELLED = "cancelled"
    OTHER = "other"


_ENDS = {
    "COMPLETING": JobEnd.COMPLETING,
    "PREEMPTED": JobEnd.RECLAIMED,
    "TIMEOUT": JobEnd.RECLAIMED,
    "DEADLINE": JobEnd.RECLAIMED,
    "CANCELLED": JobEnd.CANCELLED,
}
"""How a job ends, by squeue's name for its state. Every other state of an ended job means OTHER."""


class Job(Struct, frozen=True):
    """One line of squeue: a job, or a component of a heterogeneous job."""

    id: str
    """Id of the job or component. Each component of a heterogeneous job has its own id, under which its steps are
    listed."""
    state: AllocationState
    nodes: tuple[NodeName, ...]
    name: str
    detail: str
    comment: str
    unsatisfiable_reason: str = ""
    """Why the pending job can never start by itself, as Slurm names it; empty if it may start."""
    time_left_s: float | None = None
    """Seconds until Slurm ends the job: at its time limit, or earlier if it is preempted. None if the job does not run,
    has no time limit, or its times are unknown."""
    reclaimed: bool = False
    """True if the job is being preempted and runs only until its GraceTime is over."""
    leader: str = ""
    """For a component: id of its heterogeneous job, which is also the id of the first component. Empty for other
    jobs."""
    offset: int = 0
    """For a component: its index in the heterogeneous job, from 0."""
    end: JobEnd | None = None
    """How the job ended; None if it has not ended."""

    @property
    def target(self) -> tuple[str, ...]:
        """Return the options by which srun starts a step in this job. srun rejects a component's own id (measured)."""
        return (f"--jobid={self.leader}", f"--het-group={self.offset}") if self.leader else (f"--jobid={self.id}",)


class JobTimes(Struct, frozen=True):
    """The times of a job that has a time limit; start and end in s since 1970."""

    left_s: float
    """Seconds until the time limit; suspensions do not count."""
    limit_s: float
    start: float
    end: float
    """End of the job, or its expected end."""


class StepLine(Struct, frozen=True):
    """One line of ``squeue -s``: a numbered job step."""

    id: str
    """Id of the step: ``<job>.<step>``."""
    nodes: tuple[NodeName, ...]
    name: str

    @property
    def job(self) -> str:
        """Return the id of the step's job."""
        return self.id.partition(".")[0]


class NodeInfo(Struct, frozen=True):
    """A node as Slurm's administrators see it: its state with flags, the recorded reason, and what the node offers."""

    state: str
    """State with its flags, as Slurm prints it."""
    reason: str
    reason_by: str
    """User who recorded the reason, and the time, as Slurm prints them."""
    partitions: tuple[str, ...] = ()
    gpus: int | None = None
    """Number of GPUs; None if Slurm does not manage GPUs there, although the node may have some."""
    booted: float = 0.0
    """Time of its boot (s since 1970); 0 if unknown."""

    @property
    def draining(self) -> bool:
        """Return whether the node is draining or drained."""
        return DRAIN in marks(self.state)

    @property
    def drain_owner(self) -> DrainOwner | None:
        """Return who drained the node; None if it is not drained."""
        return drain_owner(self.reason) if self.draining else None

    @property
    def reason_at(self) -> float:
        """Return when the reason was recorded (s since 1970, by slurmctld's clock); 0 if unknown."""
        return _time(self.reason_by.rpartition("@")[2])

    @property
    def set_aside(self) -> bool:
        """Return whether somebody has drained, downed or reserved the node, or scheduled its reboot.

        A node that does not respond does not count as set aside.
        """
        reserved = bool(marks(self.state) & RESERVATIONS)
        return reserved or node_state(self.state) not in (NodeState.UP, NodeState.UNKNOWN)

    @property
    def description(self) -> str:
        """Return state, reason and author in one line."""
        given = f" ({self.reason_by})" if self.reason_by else ""
        return f"{self.state}: {self.reason}{given}" if self.reason else self.state


def read_jobs(text: str) -> list[Job]:
    """Parse the output of ``squeue -h -t all -o`` :data:`JOBS_FORMAT`.

    ``detail`` of a job is Slurm's state, followed by the reason if there is one.
    """
    jobs = []
    for job_id, displayed_id, state_name, nodes, name, reason, time_left, limit, start, end, comment in records(
        text, 11
    ):
        leader, plus, offset = displayed_id.partition("+")
        component = (leader, int(offset)) if plus and offset.isdigit() else ("", 0)
        times = _job_times(time_left, limit, start, end)
        comment = "" if comment == "(null)" else comment
        jobs.append(job(job_id, state_name, nodes, name, reason, comment, component, times))
    return jobs


def job(
    job_id: str,
    state_name: str,
    nodes: str,
    name: str,
    reason: str,
    comment: str,
    component: tuple[str, int],
    times: JobTimes | None,
) -> Job:
    """Return a job from Slurm's own texts. Raises Unreadable for a state or a host list that is not known.

    Args:
        job_id: id of the job or component.
        state_name: name of the state, as squeue prints it in full.
        nodes: host list in Slurm's folded notation.
        name: name of the job.
        reason: reason of the state; an empty text or the text ``None`` if there is no reason.
        comment: comment of the job.
        component: id of the heterogeneous job and index in it; ``("", 0)`` for other jobs.
        times: times of the job; None if the job has no time limit, or its times are unknown.
    """
    state = _allocation_state(state_name)
    detail = state_name if reason in ("None", "") else f"{state_name}: {_HOLD_REASONS.get(reason, reason)}"
    unsatisfiable = reason if state is AllocationState.PENDING and never_clears(reason) else ""
    time_left_s, reclaimed = (
        _time_left(times) if times is not None and state is AllocationState.RUNNING else (None, False)
    )
    job_end = _ENDS.get(state_name, JobEnd.OTHER) if state is AllocationState.ENDED else None
    return Job(
        job_id, state, expand(nodes), name, detail, comment, unsatisfiable, time_left_s, reclaimed, *component, job_end
    )


def _job_times(left: str, limit: str, start: str, end: str) -> JobTimes | None:
    try:
        return JobTimes(float(seconds(left)), float(seconds(limit)), float(start), float(end))
    except ValueError:  # UNLIMITED, NOT_SET, INVALID, or times that are not in seconds
        return None


def _time_left(times: JobTimes) -> tuple[float, bool]:
    """Return (seconds that a running job has left, whether it is being preempted).

    Preemption changes only the expected end, to now + GraceTime, and not the time left until the time limit. The end of
    a suspension moves the expected end to a later time (both measured on 22.05). Only differences between Slurm's times
    are used, so the clock of this host does not matter.
    """
    early = times.start + times.limit_s - times.end
    return max(0.0, times.left_s - max(0.0, early)), early > PREEMPTED_EARLY_S


def managed_runs(jobs: Iterable[Job]) -> set[str]:
    """Return the ids of the runs that have a manager, from the jobs of their user.

    A run counts as managed if it has an unfinished job other than a pending manager job. A run whose manager runs
    outside of Slurm is found by its other jobs, since every job's comment contains the run's id.
    """
    runs = set()
    for job in jobs:
        tokens = job.comment.split()
        pending_manager = tokens[-1:] == [MANAGER] and job.state is AllocationState.PENDING
        if len(tokens) > 1 and tokens[0] == "rrl" and job.state is not AllocationState.ENDED and not pending_manager:
            runs.add(tokens[1])
    return runs


def read_steps(text: str) -> list[StepLine]:
    """Parse ``squeue -h -s -o`` :data:`STEPS_FORMAT` into numbered steps.

    Batch, extern, interactive and pending steps are skipped.
    """
    lines = [StepLine(number, expand(nodes), name) for number, nodes, name in records(text, 3)]
    return [line for line in lines if re.fullmatch(r"\d+\.\d+", line.id)]


def read_nodes(text: str) -> dict[NodeName, NodeStatus]:
    """Parse the output of ``scontrol show node -o``. A node that Slurm does not know is UNKNOWN."""
    unknown = {NodeName(name): UNKNOWN_NODE for name in NODE_UNKNOWN.findall(text)}
    return unknown | {name: node_status(info.state, info.reason) for name, info in read_node_infos(text).items()}


def node_status(state: str, reason: str) -> NodeStatus:
    """Return the status of a node from its state with flags and the recorded reason, which may be empty."""
    return NodeStatus(node_state(state), f"{state}: {reason}" if reason else state, reason)


def read_node_infos(text: str) -> dict[NodeName, NodeInfo]:
    """Parse the output of ``scontrol show node -o``, without nodes that Slurm does not know."""
    infos = {}
    for line in text.splitlines():
        if not line.strip() or NODE_UNKNOWN.fullmatch(line):
            continue
        values = {key: match[1] for key in _NODE_FIELDS if (match := re.search(rf"(?:^| ){key}=(\S+)", line))}
        if "NodeName" not in values or "State" not in values:
            raise Unreadable(f"a line has no NodeName or no State: {line[:80]!r}")
        infos[NodeName(values["NodeName"])] = NodeInfo(
            values["State"],
            *_reason(line.strip()),
            tuple(filter(None, values.get("Partitions", "").split(","))),
            sum(gpus_by_type(values.get("Gres", "")).values()) or None,
            _time(values.get("BootTime", "")),
        )
    return infos


def gpus_by_type(gres: str) -> dict[str, int]:
    """Return a node's GPUs as {type: count} from a gres such as ``gpu:h100:8(S:0-1),gpu:2,shard:16`` or ``(null)``."""
    gpus: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        if match := re.fullmatch(r"gpu(?::([^:]+?))??(?::(\d+))?", resource):
            kind = match[1] or ""
            gpus[kind] = gpus.get(kind, 0) + int(match[2] or 1)
    return gpus


def _time(text: str) -> float:
    """Return a time such as ``2026-11-22T01:00:00``, in the time zone of this machine, in s since 1970; 0 if none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _reason(line: str) -> tuple[str, str]:
    """Return (reason, who recorded it and when) from the line of a node; both are empty if there is no reason."""
    match = _STAMPED_REASON.search(line) or _REASON.search(line)
    return (match[1], match[2] or "") if match else ("", "")


def read_config(text: str) -> dict[str, str]:
    """Parse ``scontrol show config`` into {name: value}, with its ``Cgroup Support Configuration`` if present."""
    values = dict(re.findall(r"^(\w+(?:\[\d+\])?)\s*= ?(.*?)\s*$", text, re.MULTILINE))
    if not re.match(r"\d", values.get("InactiveLimit", "")):
        raise Unreadable(f"the output is no configuration of Slurm: {text.strip()[:80]!r}")
    return {name: "" if value == "(null)" else value for name, value in values.items()}


def _allocation_state(state_name: str) -> AllocationState:
    for state, state_names in (
        (AllocationState.PENDING, _PENDING),
        (AllocationState.RUNNING, _RUNNING),
        (AllocationState.SUSPENDED, _SUSPENDED),
        (AllocationState.ENDED, _ENDED),
    ):
        if state_name in state_names:
            return state
    raise Unreadable(f"{state_name!r} is not a known job state")


def fields(*names: str) -> str:
    """Return the format for ``-o`` whose output :func:`records` reads."""
    return _RS + _US.join(names)


def records(text: str, fields: int) -> list[list[str]]:
    """Split ``text`` into records of exactly ``fields`` fields. Raises Unreadable for any other text."""
    head, *lines = text.split(_RS)
    if head.strip():
        raise Unreadable(f"unexpected output: {head.strip()[:80]!r}")
    split = [line.removesuffix("\n").split(_US, fields - 1) for line in lines]
    if short := next((record for record in split if len(record) != fields), None):
        raise Unreadable(f"a record has {len(short)} fields, expected {fields}")
    return split


def expand(nodes: str) -> tuple[NodeName, ...]:
    """Return the nodes of a host list in Slurm's folded notation. Raises Unreadable."""
    if nodes in ("", "(null)", "None assigned"):
        return ()
    try:
        return tuple(NodeName(node) for node in NodeSet(nodes))
    except NodeSetException as error:
        raise Unreadable(f"host list {nodes!r}: {error}") from error


def estimated_start(text: str) -> str | None:
    """Return when ``sbatch --test-only`` expects the job to start; None if the output names no time.

    The format is ``2026-11-20T09:19:27``, in the client's local time. For a heterogeneous job, the latest start of its
    components counts.
    """
    return max(re.findall(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text), default=None)
