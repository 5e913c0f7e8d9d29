"""Tell which refusals and pending reasons of Slurm last until somebody changes the request. Pure.

All others may be lifted by other jobs, an administrator or time. A text that is not known here counts as one of them,
because the other mistake would end a run that holds its nodes.
"""

from __future__ import annotations

import re

_NEVER_CLEARS = re.compile(
    "AccountNotAllowed|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|JobHoldMaxRequeue|"
    "MaxMemPerLimit|PartitionNodeLimit|PartitionTimeLimit|QOSNotAllowed|ReservationDeleted|"
    r"launch failed requeued held|(Assoc|QOS)Max\w*Per(Job|Node)\w*|"  # the job itself is larger than permitted
    r"QOSMin\w+|"  # or smaller
    r"(Assoc|QOS)Grp\w*(?<!Run)Minutes(Limit)?|(Assoc|QOS)GrpWallLimit|"  # a budget is used up
    r"Job's (account|QOS) not (known|permitted).*"
)
"""Reasons for which a job stays pending until somebody changes the job, an association or a QOS (squeue(1), JOB REASON
CODES; the names are from libslurm 22.05.8). All other reasons may clear. Resources, Priority and limits on running jobs
(AssocGrpJobsLimit, QOSMaxJobsPerUserLimit, AssocGrpCpuLimit …) clear when other jobs end. Nodes and partitions that are
down may come back (reason ReqNodeNotAvail; measured: Slurm does not report PartitionNodeLimit for down or drained
nodes). A hold may clear too, because the person who holds a job is expected to release it."""
_FINAL = re.compile(
    r"unrecognized option|requires an argument|is ambiguous|\binvalid\b(?! (authentication|job) credential| user id)|"
    r"\bdenied\b|not permitted|than permitted|not supported|not in this partition|no partition specified|"
    r"(node|partition) configuration (is )?not available|already completing|\bexpired\b",
    re.IGNORECASE,
)
"""Texts that say that the request itself is wrong, or that its job is over (slurm_errno.c of 22.05 to 26.05). Slurm
keeps a job for which too few nodes are up, so an sbatch without an available configuration asks for the impossible."""


def never_clears(reason: str) -> bool:
    """Return whether a job that is pending for this reason can never start by itself."""
    return _NEVER_CLEARS.fullmatch(reason) is not None


def is_final(text: str) -> bool:
    """Return whether Slurm's answer to a request says that the same request would be refused again.

    sbatch prints the code of a violated limit (``AssocMaxSubmitJobLimit``) in a line before its refusal.
    """
    return _FINAL.search(text) is not None or any(never_clears(part) for part in re.split(r"\n| / |; |: ", text))
