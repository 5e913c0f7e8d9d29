"""A stand-in for pyslurm. It returns recorded objects of the real pyslurm, and can misbehave.

The process of the reader imports it instead of pyslurm. The file that ``FAKE_PYSLURM`` names controls its behaviour.
The file is read at each call, so that a test can change the next call.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

CONTROL_ENV = "FAKE_PYSLURM"
"""Environment variable with the path of the control file."""
JOB_ATTRIBUTES = (
    "id",
    "state",
    "allocated_nodes",
    "name",
    "state_reason",
    "comment",
    "heterogeneous_id",
    "heterogeneous_offset",
    "time_limit",
    "run_time",
    "start_time",
    "end_time",
    "user_id",
)
STEP_ATTRIBUTES = ("id", "allocated_nodes", "name", "user_id")
NODE_ATTRIBUTES = ("name", "state", "reason", "reason_time", "reason_user", "idle_cpus", "effective_cpus")
FOREVER_S = 3600.0


class Control(Struct):
    """The behaviour of the fake pyslurm."""

    recording: str
    """Path of a recording (:mod:`.recording`)."""
    moment: str
    """Moment of the recording whose objects are returned."""
    behaviour: str = ""
    """If empty, a read returns the recording. ``hang``: it never returns. ``die``: it ends the process. ``late``: it
    returns after ``late_s`` seconds. ``garbage``: it returns a job in a state that does not exist."""
    import_behaviour: str = ""
    """Behaviour of the import: ``hang``, ``die``, or empty for a successful import."""
    version: str = ""
    """Version to report; if empty, the recorded version."""
    late_s: float = 0.0
    modify_error: str = ""
    """Name of the recorded error that a change of a node raises; if empty, changes succeed."""
    queue_length: int = 0
    """Number of other users' jobs to add to the recorded jobs."""
    changes: str = ""
    """Path of a file to which each change of a node is appended; if empty, changes are not written."""


def write_control(path: Path, control: Control) -> None:
    """Replace the control file."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(control))
    new.rename(path)


def _control() -> Control:
    return msgspec.json.decode(Path(os.environ[CONTROL_ENV]).read_bytes(), type=Control)


def _recording() -> dict[str, Any]:
    control = _control()
    recording: dict[str, Any] = msgspec.json.decode(Path(control.recording).read_bytes())
    return recording


def _objects(kind: str) -> list[Any]:
    control, recording = _control(), _recording()
    if control.behaviour == "hang":
        time.sleep(FOREVER_S)
    if control.behaviour == "die":
        print("fatal: the false pyslurm ends the process", file=sys.stderr, flush=True)
        os._exit(1)
    if control.behaviour == "late":
        time.sleep(control.late_s)
    rows = recording["moments"][control.moment][kind]
    if kind == "jobs":
        foreign = {**rows[0], "user_id": os.geteuid() + 1}
        rows = [*rows, *({**foreign, "id": 10_000 + number} for number in range(control.queue_length))]
        if control.behaviour == "garbage":
            rows = [{**row, "state": "FLYING"} for row in rows]
    return [RecordedObject(row, recording["user"]) for row in rows]


class RecordedObject:
    """An object of pyslurm. The user of this process replaces the user who made the recording."""

    def __init__(self, attributes: dict[str, Any], user: int) -> None:
        self._attributes, self._user = attributes, user

    def __getattr__(self, name: str) -> Any:
        """Return the recorded value, or raise as pyslurm did."""
        value = self._attributes[name]
        if isinstance(value, dict):
            text = bytes.fromhex(value["bytes"])
            raise UnicodeDecodeError("utf-8", text, 0, 1, "recorded")
        return os.geteuid() if name == "user_id" and value == self._user else value


class RPCError(Exception):
    """An error that has Slurm's number."""

    def __init__(self, errno: int, msg: str) -> None:
        super().__init__(msg)
        self.errno = errno


def _recorded_error(name: str) -> RPCError:
    return RPCError(*_recording()["errors"][name])


class Jobs:
    """The recorded jobs."""

    @staticmethod
    def load() -> dict[int, Any]:
        """Return the jobs by id."""
        return {job.id: job for job in _objects("jobs")}


class JobSteps:
    """The recorded steps."""

    @staticmethod
    def load_all() -> dict[int, dict[Any, Any]]:
        """Return the steps by job and id."""
        found: dict[int, dict[Any, Any]] = {}
        for step in _objects("steps"):
            found.setdefault(step.job, {})[step.id] = step
        return found


class Nodes:
    """The recorded nodes."""

    @staticmethod
    def load() -> dict[str, Any]:
        """Return the nodes by name."""
        return {node.name: node for node in _objects("nodes")}


class Node:
    """A recorded node, or a change of a node."""

    def __init__(self, name: str | None = None, **changes: str) -> None:
        self.name, self.changes = name, changes

    @staticmethod
    def load(name: str) -> Any:
        """Return a node. Raises RPCError."""
        if name not in (nodes := Nodes.load()):
            raise _recorded_error("load_unknown_node")
        return nodes[name]

    def modify(self, change: Node) -> None:
        """Record the change, or raise the error that the control file names."""
        control = _control()
        if control.changes:
            with Path(control.changes).open("ab") as changes:
                changes.write(msgspec.json.encode([self.name, change.changes]) + b"\n")
        _objects("nodes")  # after the change, the call misbehaves as reads do
        if control.modify_error:
            raise _recorded_error(control.modify_error)


class config:  # pyslurm's own name
    """The recorded configuration."""

    def get(self) -> dict[str, Any]:
        """Return the settings by name."""
        settings: dict[str, Any] = _recording()["moments"][_control().moment]["config"]
        return settings


__version__ = ""
if CONTROL_ENV in os.environ:  # in the process of the reader; tests import only the names above
    if _control().import_behaviour == "hang":
        time.sleep(FOREVER_S)
    if _control().import_behaviour == "die":
        print("fatal: Unable to process configuration file", file=sys.stderr, flush=True)
        os._exit(1)
    __version__ = _control().version or _recording()["pyslurm"]
