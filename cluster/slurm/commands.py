"""Run Slurm's commands without a shell, with a deadline, in a clean environment, and within a budget of reads.

A failed command is either :class:`Refused` or :class:`Unanswered`, depending on what Slurm printed. Only texts that are
known to mean "certainly not done" are Refused. After a timeout, a broken connection or an unknown text the result is
unknown: an ``sbatch`` whose answer timed out was observed to take effect later.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from ...core.command_runner import MAX_OUTPUT_BYTES, CommandResult, run_async
from ..base import Refused, RefusedForNow, Unanswered
from .refusals import is_final

MANAGER = "manager"
"""Last part of ``<run>.manager``, the name of the Slurm jobs of a run's managers."""
_SCRUBBED = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SCANCEL", "SINFO", "SCONTROL", "PMI", "PMIX", "OMPI")
"""Prefixes of variables that Slurm sets inside a job, or that change the defaults and formats of its commands."""

_EPOCH_TIMES_ENV = {"SLURM_TIME_FORMAT": "%s"}
"""Variable that makes squeue print times in seconds since 1970. rrl parses no times printed by other commands."""

_NO_CLUSTER = "Could not establish a configuration source"
"""Message of Slurm's commands on a machine where they are installed but no cluster is configured."""
_REFUSED = re.compile(
    r"Batch job submission failed: |Job submit/allocate failed: |Unable to confirm allocation for job \d+: |"
    r"Unable to create step for job \d+: ",
    re.IGNORECASE,
)
"""Beginnings of slurmctld's refusals. A command that rejects its own arguments says so in other words (`is_final`)."""
_UNANSWERED = re.compile(
    r"timed out|contact slurm|Zero Bytes|Connection (refused|reset)|connect failure|(send|receive) failure|munge|"
    r"Unspecified error|Unexpected message|I/O error|Protocol authentication|"
    r"submission failed: .*temporarily un|allocate failed: .*temporarily un",  # MaxJobCount, for now
    re.IGNORECASE,
)
"""Errors after which the result is unknown. They take precedence over `_REFUSED`, because a message about a lost answer
can begin like a refusal ("Batch job submission failed: Socket timed out …")."""
_TASK_EXIT = re.compile(r"Exited with exit code (\d+)")
"""srun's report about a task that ran, for example ``srun: error: n1: task 0: Exited with exit code 2``."""
_NO_FREE_NODES = "Unable to allocate resources: "
"""salloc's message for a job that could not start immediately. sbatch, which is run next, reports whether the job
can start at all."""
NODE_UNKNOWN = re.compile(r"^Node (\S+) not found$", re.MULTILINE)
"""Line that ``scontrol show node`` prints on stdout for a node that Slurm does not know."""


class NoCluster(Unanswered):
    """Slurm's commands are installed on this machine, but no cluster is configured."""


class SlurmLimits(Struct, frozen=True):
    """Deadlines and budgets of the Slurm cluster."""

    read_timeout_s: float = 10.0
    """Timeout (s) of squeue and ``scontrol show``. Slurm's own MessageTimeout is 10 s by default."""
    write_timeout_s: float = 30.0
    """Timeout (s) of sbatch, salloc, scancel and ``scontrol update``. It is longer than ``read_timeout_s``, because the
    result of a killed command is unknown."""
    immediate_timeout_s: int = 10
    """Seconds that salloc waits for free nodes. By default Slurm's scheduler runs 2 s after a submission."""
    immediate_timeout_het_s: int = 45
    """Seconds that salloc waits for the free nodes of a heterogeneous job. Only the backfill scheduler starts such
    jobs. By default it runs every 30 s (slurm.conf(5))."""
    launch_watch_s: float = 2.0
    """Seconds for which a new srun is watched for an error. The wait ends as soon as the step starts (median 0.04 s in
    the lab)."""
    interpreter_watch_s: float = 0.25
    """Seconds for which a step's output is watched for a missing interpreter, after slurmstepd has opened the output
    file."""
    srun_release_delay_s: float = 1.0
    """Seconds that an srun is kept after its step has connected. By then slurmstepd no longer needs the srun."""
    step_queue_timeout_s: float = 60.0
    """Seconds after which srun stops waiting for resources of the allocation. By default it waits without limit
    (measured)."""
    step_retry_timeout_s: float = 15.0
    """Seconds for which an srun that is refused for now is repeated: slurmctld frees the memory of a dead step within
    3 s, and hears of all nodes within MessageTimeout (10 s by default) of its own restart."""
    step_retry_pause_s: float = 1.0
    """Seconds before an srun that was refused for now is repeated."""
    min_poll_interval_s: float = 1.0
    """Seconds within which a second poll returns the snapshot of the first poll, unless this process has issued a
    changing command in between."""
    reads_per_minute: int = 60
    """Maximum number of reading commands per minute of all managers of a user. A poll takes three of them. A manager
    that has used up its share returns a snapshot in which everything is unknown."""


class Budget:
    """A token bucket of reads, which refills at a constant rate.

    Reads that are needed to carry out an action are never refused (``credit`` in :meth:`spend`). The managers of a user
    share ``reads_per_minute`` equally. Each manager counts the other managers in the queue, which it polls for its
    jobs. So no file has to be shared between hosts, and a manager that has died no longer has a share.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._user_total = self._share = float(per_minute)
        self._available = self._share
        self._clock = clock
        self._refilled_at = clock()

    @property
    def per_minute(self) -> float:
        """Return this manager's share, in reads per minute."""
        return self._share

    def share(self, managers: int) -> None:
        """Set the number of running managers of this user, including this manager."""
        self._share = self._user_total / max(1, managers)
        self._available = min(self._available, self._share)

    def spend(self, count: int, credit: bool = False) -> bool:
        """Return whether ``count`` reads may be made now, and count them if so. With ``credit`` always return True."""
        now = self._clock()
        self._available = min(self._share, self._available + (now - self._refilled_at) * self._share / 60.0)
        self._refilled_at = now
        if self._available < count and not credit:
            return False
        self._available -= count
        return True


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return ``given`` without the variables that Slurm sets in a job or that change the defaults of its commands."""
    result = {k: v for k, v in given.items() if k == "SLURM_CONF" or k.partition("_")[0] not in _SCRUBBED}
    return result | {"LC_ALL": "C"}


def failure(command: str, result: CommandResult) -> Refused | Unanswered:
    """Return the exception for a command that ended with an error."""
    text = " / ".join(line for line in result.err.splitlines() if line.strip()) or f"exit code {result.code}"
    if reports_no_cluster(result.err):
        return NoCluster(f"{command}: {text}")
    final = is_final(result.err)
    if (final or _REFUSED.search(result.err)) and not unanswered(result.err):
        return (Refused if final else RefusedForNow)(f"{command}: {text}")
    return Unanswered(f"{command}: {text}")


def reports_no_cluster(text: str) -> bool:
    """Return whether the output of a Slurm command says that no cluster is configured on this machine."""
    return _NO_CLUSTER in text


def unanswered(text: str) -> bool:
    """Return whether the output of a command says that Slurm did not answer, even if it also reports an error."""
    return _UNANSWERED.search(text) is not None


def task_exit_code(srun_error: str) -> int | None:
    """Return the exit code of the step's task from srun's stderr; None if the task may never have started."""
    match = _TASK_EXIT.search(srun_error)
    return None if match is None else int(match[1])


def lacks_free_nodes(salloc: CommandResult) -> bool:
    """Return whether Slurm answered salloc that not enough nodes are free now."""
    return _NO_FREE_NODES in salloc.err and not unanswered(salloc.err)


def lacks_node(scontrol: CommandResult) -> bool:
    """Return whether ``scontrol show node`` reports that Slurm does not know a requested node."""
    return NODE_UNKNOWN.search(scontrol.out) is not None


def update_refused(scontrol: CommandResult) -> bool:
    """Return whether slurmctld answered that it refuses the change of a ``scontrol update``."""
    return "slurm_update error" in scontrol.err and not unanswered(scontrol.err)


def rejects_job(sbatch: CommandResult) -> bool:
    """Return whether slurmctld answered that the job of a failed ``sbatch --test-only`` cannot run.

    Since nothing is submitted, an "Unspecified error" can only be the refusal of a site's submit filter.
    """
    if unanswered(sbatch.err.replace("Unspecified error", "")):
        return False
    return "allocation failure" in sbatch.err or isinstance(failure("sbatch", sbatch), Refused)


async def output_of(argv: tuple[str, ...], timeout_s: float, stdin_text: str = "") -> str:
    """Run a command and return its stdout. Raises Refused or Unanswered if it fails."""
    ended = await execute(argv, timeout_s, stdin_text)
    if ended.code:
        raise failure(argv[0], ended)
    return ended.out


async def execute(argv: tuple[str, ...], timeout_s: float, stdin_text: str = "") -> CommandResult:
    """Run a command to its end.

    Raises:
        Unanswered: the command was killed because it did not end within ``timeout_s`` seconds or printed too much.
        Refused: the command cannot be started.
    """
    env = environment(os.environ) | (_EPOCH_TIMES_ENV if argv[0] == "squeue" else {})
    try:
        result = await run_async(argv, timeout_s, env=env, stdin_text=stdin_text)
    except TimeoutError as error:
        raise Unanswered(str(error)) from None
    except OSError as error:
        raise Refused(f"{argv[0]} cannot be started: {error}") from error
    if result.truncated:
        raise Unanswered(f"{argv[0]}: more than {MAX_OUTPUT_BYTES // 2**20} MiB were printed")
    return result
