"""Parse the output of Slurm's commands in text forms that all versions share. The functions are pure.

They raise :class:`rrl.cluster.slurm.parsing.Unreadable` if a command's output does not have its usual form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...cluster.base import NodeState
from ...cluster.slurm.node_states import node_state, takes_jobs
from ...cluster.slurm.parsing import Unreadable
from ...cluster.slurm.requests import gpus_by_type
from ...core.units import seconds
from .facts import Accounts, Node, Nodes, Partition, Partitions

_NO_LIMIT_VALUES = ("UNLIMITED", "INFINITE", "NONE", "N/A", "")


def read_config(text: str) -> dict[str, str]:
    """Parse ``scontrol show config`` into {name: value}, with its ``Cgroup Support Configuration`` if present.

    Raises Unreadable if the output is not a configuration.
    """
    values = dict(re.findall(r"^(\w+(?:\[\d+\])?)\s*= ?(.*?)\s*$", text, re.MULTILINE))
    if "SlurmctldTimeout" not in values:
        raise Unreadable(f"cannot read Slurm's configuration; scontrol show config printed: {text.strip()[:80]!r}")
    return {name: "" if value == "(null)" else value for name, value in values.items()}


def read_pairs(text: str) -> dict[str, str]:
    """Parse one of Slurm's configuration files, such as cgroup.conf: ``Name=value`` lines, with comments."""
    return dict(re.findall(r"^\s*(\w+)\s*=\s*([^\s#]*)", text, re.MULTILINE))


def read_partitions(text: str) -> Partitions:
    """Parse ``scontrol show partition -o``."""
    found = []
    for line in _lines(text, "PartitionName"):
        found.append(
            Partition(
                line["PartitionName"],
                default=line.get("Default") == "YES",
                up=line.get("State") == "UP",
                max_time=_time(line.get("MaxTime", "")),
                preempted=line.get("PreemptMode", "OFF") not in ("OFF", "N/A"),
            )
        )
    return Partitions(tuple(found))


def read_nodes(text: str) -> Nodes:
    """Parse ``scontrol show node -o``."""
    found = []
    for line in _lines(text, "NodeName"):
        partitions = tuple(filter(None, line.get("Partitions", "").split(",")))
        state = NodeState.UP if takes_jobs(line.get("State", "")) else node_state(line.get("State", ""))
        found.append(
            Node(
                line["NodeName"],
                partitions,
                state,
                cpus=_count(line, "CPUTot"),
                memory=_count(line, "RealMemory") * 2**20,
                gpus=gpus_by_type(line.get("Gres", "")),
            )
        )
    return Nodes(tuple(found))


def read_accounts(user: str, associations: str) -> Accounts:
    """Parse a user's admin level, default account and accounts.

    ``user`` is the output of ``sacctmgr -n -P show user format=AdminLevel,DefaultAccount``, ``associations`` the output
    of ``sacctmgr -n -P show assoc format=Account``.
    """
    rows = [line.split("|") for line in user.splitlines() if line.strip()]
    if any(len(fields) != 2 for fields in rows):
        raise Unreadable(f"cannot read the user's accounts; sacctmgr printed: {user.strip()[:80]!r}")
    admin, default = rows[0] if rows else ("", "")
    names = dict.fromkeys(line.strip().rstrip("|") for line in associations.splitlines() if line.strip())
    return Accounts(admin, default, tuple(names))


def _lines(text: str, first: str) -> Iterator[dict[str, str]]:
    """Yield the ``Name=value`` pairs of each line as a dict. Raises Unreadable for a line without the field ``first``.

    A value is cut at its first blank (for example a node's OS or Reason). ``(null)`` becomes the empty string.
    """
    for line in text.splitlines():
        if not line.strip() or line.startswith(("No ", "Node ")):
            continue
        pairs = dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(\S*)", line))
        if first not in pairs:
            raise Unreadable(f"a line of Slurm's output has no {first}: {line[:80]!r}")
        yield {name: "" if value == "(null)" else value for name, value in pairs.items()}


def _count(line: dict[str, str], name: str) -> int:
    if (value := line.get(name, "")).isdigit():
        return int(value)
    raise Unreadable(f"{line.get('NodeName', '?')}: {name}={value!r} is not a number")


def _time(text: str) -> float | None:
    """Convert Slurm's ``[days-]hours:minutes:seconds`` to s; None for no limit."""
    if text.upper() in _NO_LIMIT_VALUES:
        return None
    try:
        return seconds(text)
    except ValueError as error:
        raise Unreadable(str(error)) from error
