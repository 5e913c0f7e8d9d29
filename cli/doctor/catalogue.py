"""The catalogue of ``rrl doctor``: the question of each check, and the fix if the answer is bad.

docs/doctor.md is generated from it. A check may give a better fix than the catalogue's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from ...config.import_paths import ENGINES
from ...core.types import Verdict
from .facts import Check
from .node_probe.host import Unavailable


class Meaning(Struct, frozen=True):
    """The question that a check answers, and what usually helps if the answer is bad.

    ``fix`` is a command, a key of job.toml, or a person to ask. A check may show a better fix instead.
    """

    question: str
    fix: str


GROUPS = {
    "host": "This machine",
    "runs": "The folder of all runs",
    "slurm": "Slurm",
    "node": "A compute node, checked by a job of 10 s with your consent",
}
"""Title of each group of checks, by the first part of the names of its checks."""

_ADMIN = "ask the admin of the cluster"
_RDMA = (
    "pip install '.[nixl]' in rrl's clone and write [transport] weights = \"nixl\", or install a UCX of the system"
    " (1.19 or newer) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true (docs/rdma.md)"
)
_NO_FILTER = 'write [transport] weights = "auto", which is plain TCP if there is no RDMA'
MEANINGS: dict[str, Meaning] = {
    # ── this machine
    "host.machine": Meaning(
        'Has this machine enough cores and memory for the local cluster (`kind = "local"`)?',
        "a local run needs about 4 GiB of memory; free some, or use a machine with more",
    ),
    "host.python": Meaning(
        "Which interpreter runs rrl, and on what file system is its environment? Every node uses the same path.",
        "put the virtual environment on storage that all nodes see, or name another one with [env] python",
    ),
    "host.address": Meaning(
        "Does the host name resolve to an address that nodes can reach, and which address does rrl use?",
        'name the network that the nodes share: [transport] network = "10.4.0.0/16", or an interface as in "ib0"',
    ),
    "host.nofile": Meaning(
        "How many files and sockets may a process have open?",
        "run ulimit -n 65536 before rrl submit; if that is refused, " + _ADMIN + " (limits.conf)",
    ),
    "host.memlock": Meaning(
        "How much memory may a process lock? RDMA registers its buffers by locking them. This limit counts for the"
        " local cluster; for a node of Slurm, node.memlock counts.",
        f"{_ADMIN} for memlock unlimited (limits.conf)",
    ),
    "host.core": Meaning(
        "Does a crash write core dumps? They can fill the home directory.", "run ulimit -c 0 before rrl submit"
    ),
    "host.tmp": Meaning(
        "Can temporary files be written, and is the path short enough for the names of sockets?",
        "export TMPDIR=/tmp, or another short path on a local disk",
    ),
    "host.torch": Meaning(
        "Are torch, transformers and reasoning-gym installed, which the built-in roles need?",
        "pip install '.[torch]' in rrl's clone, into the environment of rrl",
    ),
    **{
        f"host.{name}": Meaning(
            f'Is {row.package} installed? Rollouts with engine = "{name}" need it: {row.install}.', ""
        )
        for name, row in ENGINES.items()
        if row.package
    },
    "host.ucx": Meaning(
        "Which transports has the UCX library that ucxx loads? UCX's wheel from PyPI has none for RDMA.", _RDMA
    ),
    "host.filter": Meaning(
        "May this user close a port with a packet filter (SO_ATTACH_FILTER)? Without this right, [transport] weights ="
        ' "nixl" does not start over TCP.',
        _NO_FILTER,
    ),
    "host.nvml": Meaning(
        "Does the NVIDIA driver's library (NVML) answer, and which GPUs does it see?",
        "run nvidia-smi to see what the driver reports; then " + _ADMIN,
    ),
    "host.dcgm": Meaning("Is DCGM installed here (dcgmi on PATH, dcgm-exporter on port 9400)?", ""),
    # ── the folder of all runs
    "runs.writable": Meaning(
        "Can rrl write to this folder, in which each run gets its own folder?",
        "choose another folder: rrl --runs-dir DIR, or export RRL_RUNS_DIR=DIR",
    ),
    "runs.kind": Meaning(
        "On what file system is the folder? The login node and all compute nodes must see it.",
        "export RRL_RUNS_DIR=DIR with a folder on storage that all nodes see",
    ),
    "runs.space": Meaning(
        "Are enough bytes and inodes free? A quota may allow less than is free.",
        "free some space, or export RRL_RUNS_DIR=DIR with a folder on a file system that has more",
    ),
    "runs.durable": Meaning(
        "Can only one of two processes create the same file (O_EXCL), and how long does a write with fsync take? The"
        " journal relies on exclusive files, and waits for fsync.",
        "choose a folder on another file system: export RRL_RUNS_DIR=DIR",
    ),
    # ── Slurm
    "slurm.here": Meaning(
        "Are Slurm's commands on PATH, and is a cluster configured for them?",
        "for a cluster: log in to its login node, put Slurm's commands on PATH (module load slurm), or set SLURM_CONF",
    ),
    "slurm.version": Meaning(
        "Which version of Slurm is it? rrl is tested on 22.05, 24.11 and 26.05.",
        "no action is needed: rrl only reads output formats that these versions share; report what does not work",
    ),
    "slurm.answers": Meaning(
        "Does slurmctld answer, and how fast?",
        "if Slurm is slow, raise [limits] poll; if it does not answer, " + _ADMIN,
    ),
    "slurm.reader": Meaning(
        'With [cluster] reader = "auto", would a manager read Slurm by its commands or by pyslurm?',
        "no action is needed, the commands work everywhere; a pyslurm that was built for this version of Slurm needs"
        " less CPU time (docs/sites.md)",
    ),
    "slurm.pool": Meaning(
        'Would Slurm accept the job of form "pool": one job over several nodes? (sbatch --test-only)',
        "find out which partition, account or QOS the site requires; test it (rrl doctor --partition ... --account ..."
        " --qos ...), and write it into [slurm] of job.toml",
    ),
    "slurm.replica": Meaning(
        'Would Slurm accept the jobs of form "replica", one for each replica? (sbatch --test-only)',
        "find out which partition, account or QOS the site requires; test it (rrl doctor --partition ... --account ..."
        " --qos ...), and write it into [slurm] of job.toml",
    ),
    "slurm.hetjob": Meaning(
        'Would Slurm accept a heterogeneous job, form "hetjob"? (sbatch --test-only)',
        'use [cluster] form = "pool" or "replica", unless nodes of different shapes must start together',
    ),
    "slurm.manager": Meaning(
        "Is there a partition that accepts the manager's own job of 1 CPU and 1 GiB?",
        'write [manager] where = "pool" (on the first node of the pool), or use rrl submit --foreground on the login'
        " node",
    ),
    "slurm.gpus": Meaning(
        "Which partitions have GPUs, of what types, and how many on a node?",
        'name the type: [slurm] gres = "gpu:TYPE:COUNT"',
    ),
    "slurm.walltime": Meaning(
        "Does the partition allow the default walltime of a run, one day?",
        'write [cluster] walltime = "...", no longer than the partition allows',
    ),
    "slurm.accounting": Meaning(
        "Does Slurm store job accounting (slurmdbd)? Without it, Slurm forgets exit codes soon after a job's end. rrl"
        " loses nothing: its steps write exit records of their own.",
        "",
    ),
    "slurm.account": Meaning("Which accounts may the user submit under?", 'write [slurm] account = "..."'),
    "slurm.limits": Meaning(
        'How many jobs may the user have, according to association and QOS? A run of form "pool" has up to three at a'
        " time: the pool, the manager, a replacement node. rrl check counts them for a job.toml.",
        "rrl submit --foreground needs no job for the manager; or " + _ADMIN + " to raise MaxJobs and MaxSubmitJobs",
    ),
    "slurm.drain": Meaning(
        "May the user drain nodes: as root, as SlurmUser, or by the admin level in accounting? rrl tries no drain.",
        f"no action is needed: rrl keeps bad nodes out of its own requests. To drain them too, {_ADMIN}:"
        " sacctmgr modify user NAME set adminlevel=Administrator (an Operator may not)",
    ),
    "slurm.hold": Meaning(
        "Is InactiveLimit 0? If so, `salloc --no-shell` holds the pool, and the loss of a node does not end the pool.",
        f'{_ADMIN} for InactiveLimit=0, or write [cluster] form = "replica". Until then a batch script holds the'
        " pool: if the pool's first node loses its network for a while, the whole pool is lost",
    ),
    "slurm.select": Meaning(
        "Can jobs share a node, and does Slurm allocate memory (select/cons_tres, CR_..._Memory)?",
        "write [slurm] exclusive = true, so that no other job is on the nodes of a run",
    ),
    "slurm.confined": Meaning(
        "Does a step see only the GPUs and memory that it was given (ConstrainDevices, ConstrainRAMSpace)?",
        "write [slurm] exclusive = true; rrl requests GPUs for each step, but nothing stops a program from using more",
    ),
    "slurm.requeue": Meaning(
        "Does Slurm requeue a manager whose node died (JobRequeue)?",
        "after such a loss, run rrl manage RUN; the roles keep running until then",
    ),
    "slurm.killwait": Meaning(
        "How long after SIGTERM does Slurm send SIGKILL (KillWait)? A checkpoint may take longer.",
        "no action is needed: rrl continues from the last committed checkpoint",
    ),
    "slurm.steps": Meaning(
        "How many steps may a job have (MaxStepCount)? Each incarnation of a replica is one step, each agent too.",
        f"{_ADMIN} for MaxStepCount=40000, Slurm's default",
    ),
    "slurm.deadnodes": Meaning(
        "After how long does Slurm itself notice a dead node (SlurmdTimeout)? rrl does not wait for Slurm.", ""
    ),
    "slurm.private": Meaning(
        "Does Slurm show its nodes to users (PrivateData)? rrl must see their states.",
        f"{_ADMIN} to take nodes out of PrivateData; until then rrl learns the states of nodes only from its agents",
    ),
    "slurm.preemption": Meaning(
        "May Slurm take nodes away from jobs in the partition?",
        "name a [slurm] partition or qos whose jobs are not preempted, at least for the trainer",
    ),
    "slurm.filters": Meaning(
        "Does the site change or refuse jobs at submission (JobSubmitPlugins)?",
        "if the site refuses a job, rrl submit prints the reason; write options that the site requires into [slurm]",
    ),
    "slurm.prolog": Meaning(
        "If a Prolog fails (docs/hooks.md), does the job then start on other nodes, or stay held in the queue?",
        f"{_ADMIN} for SchedulerParameters=nohold_on_prolog_fail; until then: scontrol release JOBID",
    ),
    # ── a node
    "node.visit": Meaning(
        "Could a job run on a node and report what it found?",
        "run rrl doctor --yes when a node is free; --partition selects another partition",
    ),
    "node.folder": Meaning(
        "Does the node see what the login node wrote into the folder of all runs?",
        "export RRL_RUNS_DIR=DIR with a folder on storage that all nodes see",
    ),
    "node.answer": Meaning(
        "Does the login node see what the node wrote there, and after what delay?",
        "commands and status have the same delay; a file system with shorter caching (NFS: acdirmax) reduces it",
    ),
    "node.rrl": Meaning(
        "Does the same interpreter path run the same rrl on the node?",
        "put the virtual environment on storage that all nodes see, or name another one with [env] python",
    ),
    "node.packages": Meaning(
        "Are the same packages installed on the node and on this machine?",
        "put the virtual environment on storage that all nodes see, or name another one with [env] python",
    ),
    "node.torch": Meaning(
        "Can torch be imported there, how long does the import take, and does torch see the GPUs?",
        "in rrl's clone, pip install '.[torch]' into that environment, with a torch built for the node's driver",
    ),
    "node.address": Meaning(
        "On which networks is the node, and at which address would a role there listen?",
        'name the network that all nodes share: [transport] network = "10.4.0.0/16"',
    ),
    "node.reach": Meaning(
        "Can the node connect to this machine? A manager in the foreground needs that.",
        "submit without --foreground: the manager is then a job on the cluster, and commands reach it through files",
    ),
    "node.clock": Meaning(
        "How much does the node's clock differ from this machine's? rrl decides nothing by comparing clocks, but sorts"
        " merged logs by them.",
        f"{_ADMIN} about the nodes' time service (chronyc tracking)",
    ),
    "node.sbatch": Meaning(
        "May jobs be submitted from the node? A manager that runs as a job requests nodes from there.",
        "rrl submit --foreground on the login node, where jobs may be submitted",
    ),
    "node.nofile": Meaning(
        "How many files and sockets may a process have open there? Steps get the limits of slurmd, not those of the"
        " shell that submits.",
        f"{_ADMIN} (LimitNOFILE of slurmd)",
    ),
    "node.memlock": Meaning(
        "How much memory may a process lock there? Steps get the limits of slurmd, not those of the shell that"
        " submits.",
        f"{_ADMIN} for LimitMEMLOCK=infinity of slurmd",
    ),
    "node.tmp": Meaning(
        "Can temporary files be written there?",
        "roles get TMPDIR from [roles.*] env; name a folder that every node has",
    ),
    "node.ucx": Meaning("Which transports does UCX have there, and can they use the node's RDMA cards?", _RDMA),
    "node.filter": Meaning(
        'May this user close a port there with a packet filter? Without this right, [transport] weights = "nixl" does'
        " not start over TCP.",
        _NO_FILTER,
    ),
    "node.gpus": Meaning(
        "Do NVML and Slurm agree about the GPUs that the job was given?",
        f"run nvidia-smi on that node to see what the driver reports; then {_ADMIN}",
    ),
}


class Answer(NamedTuple):
    """The answer to the question of a check; its ``fix`` is None for that of the catalogue."""

    verdict: Verdict
    found: str
    fix: str | None = ""


def ok(found: str) -> Answer:
    """Return the answer that all is well."""
    return Answer(Verdict.OK, found)


def warn(found: str, fix: str | None = None) -> Answer:
    """Return a warning; ``fix`` replaces the catalogue's advice."""
    return Answer(Verdict.WARN, found, fix)


def fail(found: str, fix: str | None = None) -> Answer:
    """Return a failure; ``fix`` replaces the catalogue's advice."""
    return Answer(Verdict.FAIL, found, fix)


def unknown(why: Unavailable | str, fix: str | None = "") -> Answer:
    """Return why the question could not be answered."""
    return Answer(Verdict.UNKNOWN, why.why if isinstance(why, Unavailable) else why, fix)


def check(name: str, judge: Callable[..., Answer], *facts: object) -> Check:
    """Return the check with the answer of ``judge(*facts)``; UNKNOWN if one of the facts is unavailable."""
    why = next((fact for fact in facts if isinstance(fact, Unavailable)), None)
    verdict, found, fix = judge(*facts) if why is None else unknown(why)
    return Check(name, verdict, found, MEANINGS[name].fix if fix is None else fix)


def limit(value: int) -> str:
    """Return a resource limit as text; a negative value means unlimited."""
    return "unlimited" if value < 0 else str(value)
