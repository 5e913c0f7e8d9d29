"""Turn objects of pyslurm 22.05 to 24.11 into replies. Runs in the child process only.

Peculiarities of pyslurm that this module hides:

- 22.05 reports a node that is partly allocated as ALLOCATED; later versions report MIXED, as scontrol does.
- In all versions the nodes of a step are a list, and the nodes of a job are a text.
- InactiveLimit is a value of the class ``config`` of the old API. 25.11 also has it in ``slurmctld.Config``.
- A text that is not UTF-8, which any user may put into a reason, cannot be read as an attribute.

pyslurm returns None for a text that is empty or ``None``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any

from ....core.types import NodeName
from ..parsing import Job, JobTimes, NodeInfo, StepLine, expand, job
from .base import SlurmConfig
from .messages import Done, Failed, JobRows, NodeRows, StepRows

MAX_SINGLE_NODES = 8
"""Largest number of nodes that are read one by one, with two requests to slurmctld each. If more are needed, all nodes
of the cluster are read in one request. Two requests for one node take slurmctld less time than one request for
thousands of nodes."""
OWN_ERROR = -1
"""Error number that pyslurm itself sets, for example for a node that does not exist (SLURM_ERROR)."""
INVALID_NODE_NAME = 2018
"""ESLURM_INVALID_NODE_NAME (slurm_errno.h, the same in 22.05 and 24.11)."""
MIXED, ALLOCATED = "MIXED", "ALLOCATED"


class PyslurmObjects:
    """Loads jobs, steps, nodes and settings by pyslurm for the user of this process, and changes nodes.

    Raises:
        AttributeError: this pyslurm is older than 22.5.2 or 23.2.1 and has no classes for jobs and nodes.
    """

    def __init__(self, pyslurm: ModuleType) -> None:
        self._pyslurm: Any = pyslurm
        self._jobs, self._steps = pyslurm.Jobs, pyslurm.JobSteps
        self._nodes, self._node = pyslurm.Nodes, pyslurm.Node
        self._user = os.geteuid()

    def jobs(self) -> JobRows:
        """Return the jobs of this user. pyslurm reads the jobs of all users, so the other jobs are left out here."""
        jobs = list(self._jobs.load().values())
        return JobRows(tuple(_job(one) for one in jobs if one.user_id == self._user), len(jobs))

    def steps(self) -> StepRows:
        """Return the numbered steps of this user. pyslurm reads the steps of all users, so others are left out here."""
        return StepRows(
            tuple(
                StepLine(f"{job_id}.{step.id}", expand(",".join(step.allocated_nodes or ())), _text(step, "name"))
                for job_id, steps in self._steps.load_all().items()
                for step in steps.values()
                if isinstance(step.id, int) and step.user_id == self._user
            )
        )

    def nodes(self, names: Sequence[NodeName] | None) -> NodeRows:
        """Return the nodes of these names that exist, or all nodes."""
        if names is not None and len(names) <= MAX_SINGLE_NODES:
            return NodeRows({node.name: _node(node) for node in self._single_nodes(names)})
        wanted = None if names is None else set(names)
        found = (node for node in self._nodes.load().values() if node.name and (not wanted or node.name in wanted))
        return NodeRows({node.name: _node(node) for node in found})

    def _single_nodes(self, names: Sequence[str]) -> Iterator[Any]:
        for name in names:
            try:
                yield self._node.load(name)
            except self._pyslurm.RPCError as error:
                if error.errno not in (OWN_ERROR, INVALID_NODE_NAME):
                    raise

    def config(self) -> SlurmConfig:
        """Return the settings of slurmctld."""
        values = self._pyslurm.config().get()
        return SlurmConfig(str(values["version"]), int(values["inactive_limit"]))

    def drain(self, name: str, reason: str) -> Done:
        """Drain a node."""
        self._node(name).modify(self._node(state="DRAIN", reason=reason))
        return Done()

    def undrain(self, name: str) -> Done:
        """Remove a node's drain."""
        self._node(name).modify(self._node(state="UNDRAIN"))
        return Done()

    def failed(self, error: Exception) -> Failed:
        """Return the reply for an exception that a method of this class has raised."""
        number = error.errno if isinstance(error, self._pyslurm.RPCError) else getattr(error, "errno", None)
        return Failed(number if isinstance(number, int) else 0, f"{error}" or type(error).__name__)


def _job(one: Any) -> Job:
    times, limit_min = None, one.time_limit
    if limit_min is not None and one.start_time is not None and one.end_time is not None:
        limit_s = limit_min * 60.0
        times = JobTimes(limit_s - (one.run_time or 0.0), limit_s, one.start_time, one.end_time)
    leader = one.heterogeneous_id or 0
    component = (str(leader), one.heterogeneous_offset or 0) if leader else ("", 0)
    nodes, name, reason = (_text(one, key) for key in ("allocated_nodes", "name", "state_reason"))
    return job(str(one.id), one.state, nodes, name, reason, _text(one, "comment"), component, times)


def _node(node: Any) -> NodeInfo:
    reason, at = _text(node, "reason"), node.reason_time
    by = f"{_user_name(node)}@{datetime.fromtimestamp(at).isoformat()}" if reason and at else ""
    return NodeInfo(_state(node), reason, by)


def _state(node: Any) -> str:
    base, plus, flags = str(node.state).partition("+")
    partly = node.idle_cpus and node.idle_cpus != node.effective_cpus
    return f"{MIXED if base.startswith(ALLOCATED) and partly else base}{plus}{flags}"


def _user_name(node: Any) -> str:
    try:
        return node.reason_user or "Unknown"
    except KeyError:  # the user does not exist on this machine
        return "Unknown"


def _text(value: Any, attribute: str) -> str:
    """Return an attribute as text; bytes that are not UTF-8 are replaced, as in the output of a command."""
    try:
        return getattr(value, attribute) or ""
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")
