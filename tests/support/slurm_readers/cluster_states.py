"""Brings a lab with preemption into every state that all readers of Slurm must report alike."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from rrl.tests.support.slurm.lab import SlurmLab

RUN = "readers"
"""Id of the run that the jobs belong to."""
ODD_REASONS = (
    "rrl:run-1:gpu: xid: agent: Xid 79, [GPU 3] fell = off",
    "Foo=1 Comment=2 [me@2020-01-01T00:00:00] State=IDLE",
    "ends with Reason=",
    "quotes ' and \" and | bars \\ and %s",
    "défaut mémoire ✓",
    "x" * 300,
    "[root@nowhere]",
    " spaces around ",
)
"""Reasons of drains that a parser of text might misread."""
DRAINED, CRASHED, DOWN = "n5", "n4", "n3"
"""The node that is drained with odd reasons, the node that crashes, and the node that is set down."""
DOWN_REASON = "bad fan"


class Jobs(Struct):
    """The Slurm ids of the jobs."""

    running: str = ""
    suspended: str = ""
    het: str = ""
    held: str = ""
    pending: str = ""
    never: str = ""
    failed: str = ""
    cancelled: str = ""
    preempted: str = ""
    completing: str = ""


def play(lab: SlurmLab, look: Callable[[str], None]) -> Jobs:
    """Bring the lab into all states one after the other; at each moment to be read, call ``look`` with its name.

    The moments are ``preempting``, ``completing``, ``settled``, ``reason-N`` for each odd reason, and ``down``.
    """
    jobs = Jobs()
    jobs.running = submit(lab, "srun --job-name=readers.s1 sleep 900", "-w", "n1", "-n2", "--mem=200", name="pool")
    jobs.suspended = submit(lab, "sleep 900", "-w", "n2", "-n1", "--mem=200", name="suspended")
    jobs.het = submit(lab, "sleep 900", "-w", "n1", "-n1", "--mem=200", ":", "-w", "n2", "-n1", "--mem=200", name="het")
    jobs.preempted = submit(lab, "trap '' TERM; while :; do sleep 1; done", "-p", "low", "-w", "n3", "-n8", name="low")
    jobs.completing = submit(lab, "sleep 900", "-w", CRASHED, "-n1", "--mem=200", name="completing")
    jobs.failed = submit(lab, "exit 3", "-w", "n1", "-n1", "--mem=200", name="failed")
    for job in (jobs.running, jobs.suspended, jobs.preempted, jobs.completing, jobs.het):
        wait_state(lab, job, "RUNNING")
    wait_state(lab, jobs.failed, "FAILED")
    lab.wait_for(lambda: f"{jobs.running}.0" in lab.slurm("squeue", "-h", "-s", "-o", "%i"), "the step does not run")
    jobs.held = submit(lab, "true", "-n1", "--hold", name="held")
    jobs.never = submit(lab, "true", "-n1", f"--dependency=afterok:{jobs.failed}", name="never")
    jobs.cancelled = submit(lab, "true", "-n1", "--hold", name="cancelled")
    lab.slurm("scancel", jobs.cancelled)
    lab.slurm("scontrol", "suspend", jobs.suspended)
    wait_state(lab, jobs.suspended, "SUSPENDED")
    jobs.pending = submit(lab, "true", "-w", "n1", "-n8", name="pending")
    wait_reason(lab, jobs.never, "DependencyNeverSatisfied")
    preempting = submit(lab, "sleep 900", "-w", "n3", "-n8", name="preempting")
    lab.wait_for(lambda: ends_early(lab, jobs.preempted), "the job is not preempted")
    look("preempting")
    wait_state(lab, jobs.preempted, "PREEMPTED")
    wait_state(lab, preempting, "RUNNING")
    lab.crash(CRASHED)
    lab.slurm("scancel", jobs.completing)
    wait_state(lab, jobs.completing, "COMPLETING")
    look("completing")
    lab.wait_for(lambda: "down" in lab.states()[CRASHED], f"{CRASHED} does not become down")
    look("settled")
    for number, reason in enumerate(ODD_REASONS):
        lab.slurm("scontrol", "update", f"NodeName={DRAINED}", "State=DRAIN", f"Reason={reason}")
        look(f"reason-{number}")
        lab.slurm("scontrol", "update", f"NodeName={DRAINED}", "State=RESUME")
        # a resumed node counts as not responding for some time
        lab.wait_for(lambda: lab.states()[DRAINED] == "idle", f"{DRAINED} does not become idle")
    lab.slurm("scontrol", "update", f"NodeName={DRAINED}", "State=DRAIN", "Reason=bad disk")
    lab.slurm("scontrol", "update", f"NodeName={DOWN}", "State=DOWN", f"Reason={DOWN_REASON}")
    look("down")
    return jobs


def submit(lab: SlurmLab, command: str, *options: str, name: str) -> str:
    """Submit a job of the run as the plain user; return its id."""
    comment = f"--comment=rrl {RUN} {RUN}.{name}"
    common = (f"--job-name={RUN}.{name}", comment, "--time=10", "--output=/dev/null", "--no-requeue")
    component: list[str] = []
    for option in options:
        component += [option, *common] if option == ":" else [option]
    done = lab.run_as_user(["sbatch", "--parsable", *common, *component, f"--wrap={command}"])
    return done.stdout.strip().split(";")[0]


def wait_state(lab: SlurmLab, job: str, wanted: str) -> None:
    """Wait until Slurm shows this state of a job."""
    lab.wait_for(
        lambda: wanted in lab.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").split(),
        f"job {job} is not {wanted}",
    )


def wait_reason(lab: SlurmLab, job: str, wanted: str) -> None:
    """Wait until Slurm shows this reason of a pending job."""
    lab.wait_for(
        lambda: wanted in lab.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%r"),
        f"job {job} does not wait for {wanted}",
    )


def ends_early(lab: SlurmLab, job: str) -> bool:
    """Return whether a running job is expected to end before its time limit."""
    text = lab.slurm("scontrol", "show", "job", "-o", job)
    values = dict(part.split("=", 1) for part in text.split() if "=" in part)
    if values.get("JobState") != "RUNNING":
        return True
    start, end = (time.mktime(time.strptime(values[key], "%Y-%m-%dT%H:%M:%S")) for key in ("StartTime", "EndTime"))
    return end - start < 595


def restore(lab: SlurmLab) -> None:
    """Make all nodes idle again."""
    for node in lab.nodes:
        with contextlib.suppress(subprocess.CalledProcessError):  # if the node is neither drained nor down
            lab.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    lab.clear()


@contextlib.contextmanager
def states(lab: SlurmLab, look: Callable[[str], None]) -> Iterator[Jobs]:
    """Provide :func:`play` for a lab, and restore the lab after the block."""
    try:
        yield play(lab, look)
    finally:
        restore(lab)
