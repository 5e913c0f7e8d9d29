"""Run ``rrl health check`` on other nodes now, as a small job of this user on each node. The call blocks.

The job first requests all GPUs of the node, because Slurm may hide GPUs that a job has not requested. If a GPU is in
use, a second job requests only a CPU; it can still check the kernel log, the fabric and the mounts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from ...cluster.base import Refused, Unanswered
from ...cluster.slurm.commands import execute
from ...core.types import Finding
from ...health.report.model import DrainState

MAX_NODES = 32
"""Maximum number of nodes that one command checks. It is limited, because a check occupies a node for some seconds."""
MAX_CONCURRENT_CHECKS = 8
"""Maximum number of checks at a time. Each check is one srun, so that even this number is a small load on slurmctld."""
START_S = 10
"""Maximum time (s) for which a job waits for its node. It is short, because a node in use is not checked."""
CHECK_S = 20
"""Time limit (s) of the check itself, as in the prolog of examples/health."""
_SRUN_SLACK_S = 20.0
"""Time (s), beyond ``START_S`` and ``CHECK_S``, for srun to start and to end."""
_MAX_OUTPUT_CHARACTERS = 4 * 2**20
"""Maximum number of characters of a check's JSON. A node with 64 components gives about 100,000 characters."""
_CHECK = "from rrl.cli.main import main; main()"


class NotChecked(Struct, frozen=True):
    """The result for a node that could not be checked."""

    reason: str


class _Checked(Struct, frozen=True):
    """The fields of the check's JSON that are used."""

    node: str
    findings: tuple[Finding, ...]


def check(nodes: Mapping[str, DrainState]) -> dict[str, tuple[Finding, ...] | NotChecked]:
    """Run ``rrl health check`` on each node of ``nodes``, as the user of this process.

    A check takes about 5 s if its node is free. It takes at most 2 x (START_S + CHECK_S + _SRUN_SLACK_S) s, because
    a node with GPUs may need two jobs one after the other (see the top of this module).
    """
    return asyncio.run(_check(dict(list(nodes.items())[:MAX_NODES]))) | {
        node: NotChecked(f"this command checked {MAX_NODES} nodes, which is its limit: run it again for this node")
        for node in list(nodes)[MAX_NODES:]
    }


async def _check(nodes: Mapping[str, DrainState]) -> dict[str, tuple[Finding, ...] | NotChecked]:
    free = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)

    async def check_node(node: str, state: DrainState) -> tuple[Finding, ...] | NotChecked:
        async with free:
            if state.gpus:
                checked = await _check_node(node, state, (f"--gres=gpu:{state.gpus}",))
                if not isinstance(checked, NotChecked):
                    return checked
            return await _check_node(node, state, ())

    found = await asyncio.gather(*(check_node(node, state) for node, state in nodes.items()))
    return dict(zip(nodes, found, strict=True))


async def _check_node(node: str, state: DrainState, options: tuple[str, ...]) -> tuple[Finding, ...] | NotChecked:
    partition = (f"--partition={','.join(state.partitions)}",) if state.partitions else ()
    argv = (
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        *partition,
        *options,
        "--mem=256M",
        "--time=2",
        f"--immediate={START_S}",
        "--job-name=rrl-health-check",
        "--quiet",
        "--chdir=/",
        sys.executable,
        "-P",
        "-c",
        _CHECK,
        "health",
        "check",
        "--json",
        "--within",
        f"{CHECK_S}s",
    )
    try:
        ended = await execute(argv, START_S + CHECK_S + _SRUN_SLACK_S)
    except (Refused, Unanswered) as error:
        return NotChecked(str(error))
    try:
        if len(ended.out) > _MAX_OUTPUT_CHARACTERS:
            return NotChecked(f"srun: more than {_MAX_OUTPUT_CHARACTERS} characters were printed")
        checked = msgspec.json.decode(ended.out, type=_Checked)
    except msgspec.MsgspecError:
        errors = [line.strip() for line in ended.err.splitlines() if line.strip()]
        return NotChecked(errors[-1] if errors else f"srun: exit code {ended.code}, and no verdict was printed")
    if checked.node != node:
        return NotChecked(f"the check ran on {checked.node} instead")
    return checked.findings
