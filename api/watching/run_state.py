"""The state of a run in a few values, as ``rrl list`` shows and ``Run.state()`` returns it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ...cluster.traits import traits_of
from ...core.run_dir import RunDir
from ...core.run_spec import RunSpec
from ...core.types import Finding, Incarnation, NodeName, OperationFailed, Outcome, UsageError, Verdict
from ...manager.model.state import Replica, State, Status
from ..runs import job_of, read_state, resume_pending
from .manager_liveness import Liveness, SlurmJobs, ask_slurm, liveness, owner_of
from .start_check import StartCheck

NORMAL_STATUSES = (Status.JOINED, Status.COMPLETED)
"""Statuses of replicas that need no attention."""


class Failures(NamedTuple):
    """The oldest finding of each incarnation and each node that failed, and the failed nodes that stay in use."""

    of: Mapping[Incarnation | NodeName, Finding]
    held_nodes: Collection[NodeName] = ()

    def about(self, replica: Replica) -> Finding | None:
        """Return the finding about the replica; if there is none, the finding about its node, or else None."""
        own = self.of.get(replica.incarnation)
        return own if own is not None or replica.node is None else self.of.get(replica.node)


def failures_of(state: State, held_nodes: Collection[NodeName] = ()) -> Failures:
    """Return the failures of a run; ``held_nodes`` are failed nodes that stay in use."""
    failing = sorted(
        (one for one in state.findings.values() if one.verdict is Verdict.FAIL), key=lambda one: -one.since
    )
    subjects = ((one.incarnation or one.node, one) for one in failing)
    return Failures({subject: finding for subject, finding in subjects if subject is not None}, held_nodes)


class RunState(Struct, frozen=True):
    """The state of a run. Times are the manager's (s since 1970)."""

    run: str
    """The run's id."""
    name: str
    """``run.name`` of the job; empty if the job cannot be read."""
    outcome: Outcome | None
    """How the run ended (``completed``, ``failed``, ``cancelled``, ``rejected``); None while it has not ended, and
    while a request to resume it is open."""
    standing: str
    """The outcome, or ``submitted``, ``waiting for nodes``, ``starting``, ``running``, ``recovering`` or ``ending``;
    without a manager ``unattended``, ``interrupted`` or ``unknown``."""
    step: int
    """Newest committed training step."""
    steps: int | None
    """``run.steps`` of the job; 0 for a run without a trainer, None if the job cannot be read."""
    reward: float | None
    """Mean reward of the newest step that reported a reward."""
    recoveries: int
    started: float | None
    ended: float | None
    run_seconds: float | None
    """Run time in seconds, without the pauses before a resume; None before the run began."""
    run_dir: str
    why: str = ""
    """Why the run ended, was rejected, does not go on or has no manager; empty if nothing is wrong."""


def run_state(run: RunDir) -> RunState:
    """Return the state of a run.

    Raises:
        UsageError: The journal of the run is damaged.
        OperationFailed: The run cannot be read.
    """
    return _run_state(run, {})


def listed_states(runs: Iterable[RunDir]) -> list[RunState]:
    """Return the state of each run, or why it is unreadable; Slurm is queried at most once for each owner."""
    slurm: dict[int, SlurmJobs] = {}
    found = []
    for run in runs:
        try:
            found.append(_run_state(run, slurm))
        except (UsageError, OperationFailed) as error:
            found.append(unreadable(run, job_of(run), error))
    return found


def standing(state: State) -> str:
    """Return the run's standing according to its journal alone, such as ``running`` or ``waiting for nodes``."""
    if state.outcome is not None:
        return state.outcome.value
    if state.finish is not None:
        return f"ending ({state.finish.outcome.value})"
    if not any(allocation.running for allocation in state.allocations.values()):
        return "waiting for nodes"
    failures = failures_of(state)
    failing = any(failures.about(replica) is not None for replica in state.workers) or any(
        finding.verdict is Verdict.FAIL and not _is_on_excluded_node(state, finding)
        for finding in state.findings.values()
    )
    at_work = Counter(replica.role for replica in state.workers if replica.status in NORMAL_STATUSES)
    if failing or any(at_work[role.name] < role.replicas * role.ranks for role in state.job.roles):
        return "recovering" if failing or state.recoveries else "starting"
    return "running"


def _is_on_excluded_node(state: State, finding: Finding) -> bool:
    """Return whether the finding is about a node that the run no longer uses, so that no recovery is needed there."""
    node = state.nodes.get(finding.node) if finding.node is not None else None
    return node is not None and node.excluded is not None


def _run_state(run: RunDir, slurm: dict[int, SlurmJobs]) -> RunState:
    """Return the state of a run.

    ``slurm`` maps a uid to that user's jobs; all listed runs share this mapping. The jobs of a user are added when they
    are first needed: for a run of this user whose lease is no longer renewed, or whose journal has no record yet.
    """
    job, resumes, state = job_of(run), resume_pending(run), read_state(run)
    failure, judged = "", Liveness()
    if state is None:
        failure = _start_failure(run, job, slurm)
    elif state.outcome is not None and resumes:
        failure = StartCheck(run).failure(state)
    else:
        judged = _liveness(run, state, slurm)
    return assembled(run, job, state, judged, resumes=resumes, start_failure=failure, now=time.time())


def assembled(
    run: RunDir,
    job: RunSpec | None,
    state: State | None,
    liveness: Liveness,
    *,
    resumes: bool,
    start_failure: str,
    now: float,
) -> RunState:
    """Return the state of a run, from data that was read already.

    Args:
        run: The run.
        job: Its run spec; None if it cannot be read.
        state: The state from its journal; None if the journal has no record yet.
        liveness: What is known of its manager.
        resumes: Whether a user has requested to resume it, and no manager has carried out the request yet.
        start_failure: Why no manager will ever begin or resume the run; empty if a manager may.
        now: The wall clock (s).
    """
    if state is None:
        outcome = Outcome.REJECTED if start_failure else None
        return replace(submitted(run, job), outcome=outcome, standing=outcome or "submitted", why=start_failure)
    if state.outcome is not None and resumes:
        if not start_failure:
            return replace(submitted(run, job), step=state.step, reward=state.rewards.latest, started=state.started)
        why = f"{run.id} was to be resumed, but {start_failure}; to try again: rrl manage {run.id}"
        state = replace(state, why=why)
    known_until = state.at if liveness.note else now  # nobody knows whether a run without a manager still goes on
    return RunState(
        run.id,
        job.name if job else "",
        state.outcome,
        liveness.standing or standing(state),
        state.step,
        state.job.steps,
        state.rewards.latest,
        state.recoveries,
        state.started,
        state.ended,
        round(state.run_seconds(known_until), 2),
        str(run.path),
        state.why if state.outcome else str(liveness),
    )


def unreadable(run: RunDir, job: RunSpec | None, error: Exception) -> RunState:
    """Return what ``rrl list`` shows of a run that cannot be read. Its standing says why it cannot be read."""
    reason = f"unreadable: {str(error).removeprefix(f'{run.id} is ')}"
    return submitted(run, job, reason)


def submitted(run: RunDir, job: RunSpec | None, standing: str = "submitted") -> RunState:
    """Return what ``rrl list`` shows of a run if only its job is known, with the given standing."""
    name, steps = (job.name, job.steps) if job else ("", None)
    return RunState(run.id, name, None, standing, 0, steps, None, 0, None, None, None, str(run.path))


def _liveness(run: RunDir, state: State, slurm: dict[int, SlurmJobs]) -> Liveness:
    """Return what is known of the manager of a run; an empty result if nothing is known."""
    try:
        return liveness(run, state, lambda: _jobs_of_owner(run, slurm))
    except OperationFailed:
        return Liveness()


def _start_failure(run: RunDir, job: RunSpec | None, slurm: dict[int, SlurmJobs]) -> str:
    """Return why a run without a journal will never begin: all its managers have ended; empty if it may begin.

    ``rrl status`` calls a run that will never begin rejected. ``slurm`` maps a uid to the jobs of that user. Slurm is
    queried about this run in particular only if the jobs of the run's owner do not include a manager job of the run.
    """
    if job is not None and traits_of(job.cluster).manager_is_a_job:
        from ...manager.bootstrap.manager_job import job_name

        try:
            jobs = _jobs_of_owner(run, slurm)
        except OperationFailed:
            return ""
        if jobs.unknown or job_name(run.id, job) in {listed.name for listed in jobs.jobs}:
            return ""
    return StartCheck(run).failure(None)


def _jobs_of_owner(run: RunDir, slurm: dict[int, SlurmJobs]) -> SlurmJobs:
    """Return the Slurm jobs of the run's owner; query Slurm if ``slurm`` lacks them.

    Raises OperationFailed if the run directory cannot be read.
    """
    owner = owner_of(run)
    if owner not in slurm:
        slurm[owner] = ask_slurm(owner)
    return slurm[owner]
