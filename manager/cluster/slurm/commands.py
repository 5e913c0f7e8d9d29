"""Runs Slurm's commands: no shell, a deadline each, a clean environment, a budget of reads, and one of two failures.

What Slurm said decides between :class:`Refused` and :class:`Unanswered`: only texts that are known to mean "certainly
not done" refuse. A timeout, a broken connection or a text that we do not know leaves it open; an ``sbatch`` whose
answer timed out was seen to land later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from ..base import Refused, Unanswered

MANAGER = "manager"
"""``<run>.manager`` is the name of the jobs that run the managers of a run, one at a time"""
_SCRUBBED = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SCANCEL", "SINFO", "SCONTROL", "PMI", "PMIX", "OMPI")
"""Prefixes of what Slurm sets inside a job, and of what changes its commands' defaults and formats."""

_EPOCH_TIMES_ENV = {"SLURM_TIME_FORMAT": "%s"}
"""Times as seconds since 1970, where programs read them; what other commands say of times, people read."""

NO_CLUSTER = "Could not establish a configuration source"
"""what Slurm's commands say where they are installed and no cluster is configured"""
_REFUSED = re.compile(
    "|".join((
        # the command did not even ask
        r"(unrecognized|invalid) option|option .* requires an argument|option .* is ambiguous",
        r"Invalid --\S+ specification|Invalid (generic resource|numeric value|time specification|argument)",
        r"Expired or invalid job",
        # slurmctld answered, and said no
        r"Batch job submission failed: |Job submit/allocate failed: |Unable to confirm allocation for job \d+: ",
        r"Unable to create step for job \d+: |Access/permission denied|Invalid job id specified",
    )),
    re.IGNORECASE,
)  # fmt: skip
_UNANSWERED = re.compile(
    r"timed out|contact slurm|Zero Bytes|Connection (refused|reset)|connect failure|(send|receive) failure|munge|"
    r"Unspecified error|Unexpected message|I/O error|Protocol authentication|"
    r"submission failed: .*temporarily un|allocate failed: .*temporarily un",  # MaxJobCount, for now
    re.IGNORECASE,
)
"""Wins over a refusal: the same sentences carry lost answers ("Batch job submission failed: Socket timed out ...")."""


class CommandResult(Struct, frozen=True):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


class SlurmLimits(Struct, frozen=True):
    """Deadlines (s) and budgets of the Slurm backend."""

    read_timeout_s: float = 10.0
    """for squeue and scontrol show; Slurm's own MessageTimeout is 10 s by default"""
    write_timeout_s: float = 30.0
    """for sbatch, salloc and scancel: killing one early leaves an open question"""
    immediate_timeout_s: int = 10
    """salloc waits so long for nodes that are free; by default Slurm's scheduler runs 2 s after a submission"""
    immediate_timeout_het_s: int = 45
    """for several components: only the backfill scheduler starts those, every 30 s by default (slurm.conf(5))"""
    launch_watch_s: float = 2.0
    """so long a fresh srun is watched for a refusal; a step that starts is seen before (median 0.04 s in the lab)"""
    interpreter_watch_s: float = 0.25
    """once slurmstepd has opened a step's output, so long it is watched for an interpreter that is not there"""
    srun_release_delay_s: float = 1.0
    """an srun lives on for so long after its step has joined, until slurmstepd surely needs it no more"""
    step_queue_timeout_s: float = 60.0
    """after so long srun gives up waiting for resources of the allocation: for ever is its default (measured)"""
    min_poll_interval_s: float = 1.0
    """a look asked for sooner than this gets the answer of the one before, unless we changed something since"""
    reads_per_minute: int = 60
    """commands of all managers of a user, of which a look takes three; above its share of them, a manager's answer is:
    unknown"""


class Budget:
    """A bucket of reads that refills steadily. What must be read to carry out an action is taken on credit.

    The managers of a user share ``per_minute`` by their number, which each reads off the queue that it looks at anyhow:
    no file to agree on between hosts, and a manager that died holds nothing.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._user_total = self._share = float(per_minute)
        self._available = self._share
        self._clock = clock
        self._refilled_at = clock()

    @property
    def per_minute(self) -> float:
        """This manager's share."""
        return self._share

    def share(self, managers: int) -> None:
        """So many managers of this user live, this one included."""
        self._share = self._user_total / max(1, managers)
        self._available = min(self._available, self._share)

    def spend(self, count: int, credit: bool = False) -> bool:
        """Whether ``count`` reads may be made now; they are counted if so."""
        now = self._clock()
        self._available = min(self._share, self._available + (now - self._refilled_at) * self._share / 60.0)
        self._refilled_at = now
        if self._available < count and not credit:
            return False
        self._available -= count
        return True


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """``given`` without what a surrounding Slurm job or a user's habits would tell Slurm's commands."""
    result = {k: v for k, v in given.items() if k == "SLURM_CONF" or k.partition("_")[0] not in _SCRUBBED}
    return result | {"LC_ALL": "C"}


def failure(command: str, result: CommandResult) -> Refused | Unanswered:
    """What a command that ended with an error means."""
    text = " / ".join(line for line in result.err.splitlines() if line.strip()) or f"exit code {result.code}"
    if _REFUSED.search(result.err) and not unanswered(result.err):
        return Refused(f"{command}: {text}")
    return Unanswered(f"{command}: {text}")


def unanswered(text: str) -> bool:
    """A command says that it had no answer, whatever else it says."""
    return _UNANSWERED.search(text) is not None


async def execute(argv: tuple[str, ...], timeout_s: float, stdin_text: str = "") -> CommandResult:
    """Run a command to its end. Raises Unanswered when it does not end in time, Refused when it cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=environment(os.environ) | (_EPOCH_TIMES_ENV if argv[0] == "squeue" else {}), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise Refused(f"{argv[0]} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):  # Python 3.11's wait_for may forget a cancellation
            out, err = await process.communicate(stdin_text.encode())
    except TimeoutError:
        raise Unanswered(f"{argv[0]}: no answer within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            kill_session(process)
            await process.wait()
    return CommandResult(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


def kill_session(process: asyncio.subprocess.Process) -> None:
    """SIGKILL a command and its children at once (it leads a session of its own).

    For srun this is a matter of life: it has a child that ends the step when srun alone is killed (measured: the step
    is gone 2.5 s later), so both are stopped first and neither sees the other die. Then the step goes on.
    """
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
