"""``rrl init``: write a commented job.toml that fits the cluster as ``rrl doctor`` found it."""

from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from msgspec import Struct

from ...cluster.slurm.requests import Partition
from ...core.command_runner import CommandResult
from ...core.run_dir import errors_about, write_atomically
from ...core.types import Resources, UsageError, Verdict
from ...core.units import duration_text
from ..common.output import print_warnings
from ..doctor.command import gather_facts, judge
from ..doctor.facts import DoctorOptions, Facts, Slurm, Visit
from ..doctor.host_checks import candidate_networks
from ..doctor.node_checks import common_networks
from ..doctor.node_probe.host import Unavailable
from ..doctor.slurm_checks import account_for, chosen_partition, gpu_shapes
from ..views.formatting import size

DEFAULT_WALLTIME_S = 3600.0
"""Walltime (s) to request if the partition permits it. It is short, because a job with the quickstart's task takes
minutes, and Slurm starts short jobs sooner."""
SCHEMA_FILE = "job.schema.json"
"""Name of the file with the JSON Schema of the job spec. Editors look for this file in the folder of the job spec."""
_GIB = 2**30


class JobShape(Struct, frozen=True):
    """The distribution of the job's roles over nodes, and the cores and memory that each node must have.

    ``exclusive`` is True if the trainer and each rollout have a node of their own, ``fits`` if the nodes that are up
    suffice.
    """

    rollouts: int
    spares: int
    exclusive: bool
    cpus: int
    mem: str
    fits: bool = True


_SEPARATE_SHAPES = (JobShape(2, 1, True, 2, "3GiB"), JobShape(2, 0, True, 2, "3GiB"), JobShape(1, 0, True, 2, "3GiB"))
_SHARED_SHAPES = (JobShape(2, 1, False, 6, "6GiB"), JobShape(2, 0, False, 6, "6GiB"), JobShape(1, 0, False, 4, "4GiB"))
"""Shapes in the order in which they are tried, best first.

In an exclusive shape, store and reward share a node, and the trainer and each rollout have nodes of their own. In a
shared shape, all roles are on one node. Each role takes 1 core and 1 GiB (config/job/roles.py).
"""


def init(out: Path, wanted: DoctorOptions, *, force: bool, consent: bool | None) -> int:
    """Write a job spec to ``out``.

    Raises UsageError if the file exists already or its folder is missing, OperationFailed if it cannot be written.
    """
    if not force and os.path.lexists(out):
        raise UsageError(f"{out} already exists; name another file with --out, or replace it with --force")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}; create it first, or name another file with --out")
    facts = gather_facts(wanted, consent=consent, interactive=True)
    text = job_toml(facts, out)
    with errors_about(out):
        if force:
            write_atomically(out, text.encode(), mode=0o644)
        else:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
    print(f"wrote {out}; see what it would start: rrl check {out}")
    failed = (check for check in judge(facts) if check.verdict is Verdict.FAIL)
    print_warnings(f"{check.name}: {check.found}; {check.fix}" for check in failed)
    return 0


def job_toml(facts: Facts, out: Path) -> str:
    """Return the text of the job spec. The function is pure."""
    slurm = facts.slurm
    why = f"there is no Slurm here: {facts.no_slurm}" if slurm is None else _why_local(slurm, facts.wanted)
    place: dict[str, Any] = {"slurm": None, "why_local": why, "place": "this machine", "shape": _SEPARATE_SHAPES[0]}
    if slurm is not None and not why:
        name = slurm.settings.get("ClusterName", "")
        place = {
            "slurm": _slurm(slurm, facts),
            "shape": choose_shape(slurm, facts.wanted),
            "place": f"the cluster {name}",
        }
    schema = str(out.with_name(SCHEMA_FILE))
    return _TEMPLATES.get_template("job.toml.j2").render(file=str(out), schema=schema, **place)


def choose_shape(slurm: Slurm, wanted: DoctorOptions) -> JobShape:
    """Return the largest job that fits on the nodes that are up.

    If even the smallest job does not fit, return the smallest job with ``fits`` False.
    """
    partition = chosen_partition(slurm, wanted)
    for one in (*_SEPARATE_SHAPES, *_SHARED_SHAPES):
        needs = (2 + one.rollouts if one.exclusive else 1) + one.spares
        node = Resources(one.cpus, mem=int(one.mem.removesuffix("GiB")) * _GIB)
        if isinstance(partition, Partition) and partition.fitting(node, usable=True) >= needs:
            return one
    return msgspec.structs.replace(_SHARED_SHAPES[-1], fits=False)


def _why_local(slurm: Slurm, wanted: DoctorOptions) -> str:
    """Return why the job spec is for the local cluster although this machine has Slurm; empty if it is for Slurm."""
    answer = slurm.trials if isinstance(slurm.trials, Unavailable) else slurm.trials.forms["pool"]
    if isinstance(answer, Unavailable):
        return _comment(f"Slurm does not answer: {answer.why}")
    partition = chosen_partition(slurm, wanted)
    if answer.code == 0 and not isinstance(partition, Unavailable):
        return ""
    return _comment(partition.why if isinstance(partition, Unavailable) else f"Slurm refuses jobs: {answer.message}")


def _slurm(slurm: Slurm, facts: Facts) -> dict[str, Any]:
    """Return the template's values for a Slurm cluster; strings are already encoded as TOML."""
    partition, wanted = chosen_partition(slurm, facts.wanted), facts.wanted
    assert not isinstance(partition, Unavailable)
    config, longest = slurm.settings, partition.max_walltime_s
    walltime = min(DEFAULT_WALLTIME_S, longest)
    allowed = "no limit" if longest == inf else f'at most "{duration_text(longest)}"'
    account, names = account_for(slurm, wanted), _accounts(slurm)
    manager = _manager(slurm)
    hold = config.get("InactiveLimit", "")
    return {
        "version": config.get("SLURM_VERSION", ""),
        "held": "" if not hold else "by salloc --no-shell" if hold.startswith("0 ") else "by a batch script",
        "walltime": _value(duration_text(walltime)),
        "walltime_why": f"short jobs start sooner; {partition.name} has {allowed}",
        "partition": _value(partition.name),
        "partition_name": partition.name,
        "partition_why": "as you requested" if wanted.partition else "the default partition",
        "node": _comment(_smallest(partition, choose_shape(slurm, wanted))),
        "gpus": _comment(gpu_shapes(partition.usable))[:60],
        "account": _value(account) if account else "",
        "account_why": _comment(
            "as you requested"
            if wanted.account
            else "your only account"
            if account
            else f"one of {', '.join(names)}; without it, your default one"
            if names
            else ""
        ),
        "qos": _value(wanted.qos) if wanted.qos else "",
        "preempted": partition.preempted and config.get("PreemptType", "preempt/none") != "preempt/none",
        "manager_pool": manager == "",
        "manager_partition": _value(manager) if manager not in (None, "", partition.name) else "",
        **_networks(facts),
    }


def _smallest(partition: Partition, job_shape: JobShape) -> str:
    """Return a text about the least cores and memory of the nodes that are up, and whether this job fits there."""
    if not (nodes := [shape.node for shape in partition.usable]):
        return f"no node of {partition.name} is known to be up now"
    text = f"the smallest node of {partition.name} has {min(one.cpus for one in nodes)} cores and"
    text += f" {size(min(one.mem for one in nodes))}"
    return text if job_shape.fits else f"{text}: TOO LITTLE for this job; choose another partition"


def _manager(slurm: Slurm) -> str | None:
    """Return the partition to name for the manager's job: the first partition that accepts it.

    Returns an empty string if no partition accepts the manager's job. Returns None if no partition has to be named,
    because the partition of the run accepts the job or Slurm did not answer.
    """
    if isinstance(slurm.trials, Unavailable):
        return None
    answers = slurm.trials.manager
    for index, (partition, answer) in enumerate(answers.items()):
        if isinstance(answer, CommandResult) and answer.code == 0:
            return partition if index else None
    return "" if answers and all(isinstance(answer, CommandResult) for answer in answers.values()) else None


def _networks(facts: Facts) -> dict[str, Any]:
    """Return the template's values for [transport] network; empty values if there is no choice.

    There is a choice only if this machine is on several networks and the environment names none of them. If the visited
    node shares exactly one network with this machine, that network is proposed.
    """
    network = facts.host.network
    if isinstance(network, Unavailable) or network.requested or len(candidate_networks(network)) < 2:
        return {"networks": [], "network": "", "visited": ""}
    shared = common_networks(facts.host, facts.node.report.host) if isinstance(facts.node, Visit) else {}
    return {
        "networks": list(candidate_networks(network)),
        "network": _value(next(iter(shared))) if len(shared) == 1 else "",
        "visited": facts.node.report.node if isinstance(facts.node, Visit) else "",
    }


def _accounts(slurm: Slurm) -> list[str]:
    return [] if isinstance(slurm.accounts, Unavailable) else list(slurm.accounts.names)


def _value(text: str) -> str:
    """Return the text as a TOML string."""
    return json.dumps(text, ensure_ascii=False)


def _comment(text: str) -> str:
    """Return the text as one line of at most 110 printable characters, for a comment."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:110]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
