"""The Python API: submit a job, and watch, change, end or export its run (docs/python.md).

The commands of ``rrl`` use the same functions and print their results. A call blocks until it is done, prints
nothing, and may be made in a notebook, whose event loop is running. Ctrl-C ends only the call: the run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.run_dir import RunDir
from ..core.types import OperationFailed, UsageError
from .command_sender import wait_until_taken
from .interventions import await_end, await_restarted, request_end, request_resize, request_restart
from .logs.log_reader import LogLine, LogReader, line_filter, matcher
from .runs import find_run
from .step_rows import step_rows
from .watching.run_state import RunState, run_state
from .watching.run_watcher import completed_summary

if TYPE_CHECKING:  # modules that need the job's models or a checkpoint are imported when they are used
    from ..config.job.document import JobPart, Setting
    from ..manager.reporting.accounting.run_report import RunReport
    from ..manager.reporting.step_metrics import StepRow
    from ..manager.reporting.summary import Summary
    from ..roles.trainer.checkpoint_export import Exported
    from .sampled_steps import SamplesDocument

JobSpec = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a job.toml, its text (a string of several lines), or its tables as a dict."""


def submit(
    job: JobSpec | Sequence[JobSpec], set: Mapping[str, Any] | None = None, *, trust_folder: bool = False
) -> Run:
    """Start a run, as ``rrl submit`` does.

    Args:
        job: The job spec, or a list of job specs. Each job spec adds keys to those before it, or replaces their values.
            Relative paths start at the folder of the first file, or without a file at the current folder.
        set: Values that replace those of the job, by dotted key: ``{"roles.trainer.learning_rate": 1e-6}``.
        trust_folder: Whether to start the run although other users can write the job's folder.

    Returns:
        The run, whose manager has been started or is in Slurm's queue. Its ``warnings`` say why it may fail or wait.

    Raises:
        UsageError: The job is wrong, or cannot work on this cluster.
        OperationFailed: The run could not be started.
    """
    from ..config.job.document import JobDocument
    from ..config.job.load import job_from
    from .preflight.job_preflight import checked
    from .submission import start

    document = JobDocument(_parts(job), _settings(set))
    checked_job = checked(job_from(document), document, trust_folder=trust_folder)
    run_dir, warnings = start(checked_job, _announce)
    return Run(run_dir, (*checked_job.preflight.doubts, *warnings))


def run(id: str | os.PathLike[str] | None = None) -> Run:
    """Return a run that was submitted before, from Python or by ``rrl submit``.

    Args:
        id: The run's id, an unambiguous beginning of it, or its folder; by default the newest run.

    Raises:
        UsageError: No run, or several runs, match.
        OperationFailed: The run is another user's.
    """
    return Run(find_run(id if id is None or isinstance(id, str) else os.path.abspath(id)))


class Run:
    """A run of this user. No file stays open between calls: each call reads what is new in the run directory.

    Attributes:
        id: The run's id.
        path: The run directory.
        warnings: Why the run may fail or wait, as far as :func:`submit` or :meth:`resume` has found out; empty for a
            run from :func:`run`.
    """

    def __init__(self, run_dir: RunDir, warnings: tuple[str, ...] = ()) -> None:
        self._run_dir = run_dir
        self.id: str = run_dir.id
        self.path: Path = run_dir.path
        self.warnings = warnings

    def __repr__(self) -> str:
        return f"<rrl.Run {self.id}>"

    def state(self) -> RunState:
        """Return the state of the run, as ``rrl list --json`` shows it.

        Raises:
            UsageError: The journal of the run is damaged.
            OperationFailed: The run cannot be read.
        """
        return run_state(self._run_dir)

    def metrics(self, *, follow: bool = False) -> Iterator[StepRow]:
        """Yield each committed step once, as ``rrl metrics`` does; with ``follow`` until the run ends.

        Raises:
            UsageError: The journal of the run is damaged.
            OperationFailed: The run cannot be read.
        """
        for rows in step_rows(self._run_dir, follow=follow):
            yield from rows

    def samples(
        self,
        step: int | None = None,
        *,
        best: int | None = None,
        worst: int | None = None,
        group: int | None = None,
        grep: str | None = None,
        tokens: bool = False,
    ) -> SamplesDocument:
        """Return what the model answered in a committed step, as ``rrl samples`` does (docs/samples.md).

        Args:
            step: The step; by default the newest one.
            best: Only so many trajectories, those with the highest rewards.
            worst: Only so many trajectories, those with the lowest rewards.
            group: Only the trajectories of this group.
            grep: Only those with this text in the prompt or answer, in upper or lower case.
            tokens: Return tokens instead of text, without the job's tokenizer.

        Raises:
            UsageError: The step is not committed, no samples of it are kept, or the arguments exclude each other.
            OperationFailed: The samples cannot be read, or the tokenizer cannot be opened here.
        """
        from .sampled_steps import Selection, samples_of

        return samples_of(self._run_dir, step, Selection(best, worst, group, grep), tokens=tokens)

    def report(self) -> RunReport:
        """Return how the time and the GPUs of the run were used, as ``rrl report`` does (docs/report.md).

        Raises:
            UsageError: The journal of the run is damaged or empty.
            OperationFailed: The run cannot be read.
        """
        from .accounts import account_of

        return account_of(self._run_dir).report()

    def wait(self) -> Summary:
        """Wait until the run has completed, and return its summary (``summary.json``).

        Raises:
            UsageError: The cluster rejected the run, or no manager will ever begin it.
            OperationFailed: The run failed or was cancelled, or no manager is left to end it.
        """
        return completed_summary(self._run_dir)

    def logs(
        self,
        selector: str | None = None,
        *,
        lines: int | None = None,
        since: datetime | None = None,
        grep: str | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """Return the lines of the logs of the run's processes, merged by time, as ``rrl logs`` does.

        Args:
            selector: A role, a replica or an incarnation: ``rollout``, ``rollout/0``, ``rollout/0#2``, ``manager``.
            lines: Number of the newest lines of each log; by default 20, or all with ``since`` or ``grep``.
            since: Only lines from this time on.
            grep: Only lines in which this regular expression is found.
            follow: Whether new lines are returned too, until the run ends.

        Raises:
            UsageError: There is no such log (yet), or ``grep`` is not valid.
            OperationFailed: A log cannot be read.
        """
        wanted = line_filter(
            lines, None if since is None else since.timestamp(), None if grep is None else matcher(grep, "grep")
        )
        reader = LogReader(self._run_dir, selector, wanted, follow=follow)
        return (LogLine.read(log, line) for batch in reader.batches() for log, line in batch)

    def cancel(self, *, wait: bool = True, keep_allocation: bool = False) -> None:
        """End the run, as ``rrl cancel`` does; nothing happens if it has ended. :meth:`resume` continues it.

        Args:
            wait: Whether to return only when the nodes are released.
            keep_allocation: On Slurm: keep the nodes for :meth:`resume`.

        Raises:
            UsageError: The run has no allocation that could be kept.
            OperationFailed: No manager ends the run.
        """
        request = request_end(self._run_dir, keep=keep_allocation)
        if wait and request.command:
            await_end(self._run_dir, request.command)

    def resume(
        self,
        job: JobSpec | Sequence[JobSpec] | None = None,
        set: Mapping[str, Any] | None = None,
        *,
        trust_folder: bool = False,
    ) -> None:
        """Continue the run, which has ended, from its last committed step, as ``rrl resume`` does.

        Args:
            job: The job spec to continue with; by default the job spec of the run.
            set: Values that replace those of the job: ``{"run.steps": 500, "cluster.walltime": "8h"}``.
            trust_folder: Whether to continue although other users can write the job's folder.

        Raises:
            UsageError: The run has not ended, or cannot continue with this job.
            OperationFailed: The run could not be started; it is unchanged.
        """
        from .submission import prepare_resume, resume

        parts = [] if job is None else _parts(job)
        resumption = prepare_resume(self._run_dir, parts, _settings(set), trust_folder=trust_folder)
        self.warnings = (*resumption.checked.preflight.doubts, *resume(resumption, _announce))

    def restart(self, replica: str, *, wait: bool = True) -> None:
        """Restart a replica, such as ``rollout/0``, as ``rrl restart`` does.

        Args:
            replica: The replica; for a role with several ranks, the gang.
            wait: Whether to return only when the replica has joined again.

        Raises:
            UsageError: There is no such replica, or nothing of the run can be restarted.
            OperationFailed: The replica has not joined again in time.
        """
        request = request_restart(self._run_dir, replica)
        if wait:
            await_restarted(self._run_dir, request)

    def resize(self, pool: str, replicas: int | None, *, wait: bool = True) -> None:
        """Hold an elastic rollout pool at a number of replicas, as ``rrl resize`` does, until the run is resumed.

        Args:
            pool: The name of the pool.
            replicas: The number of replicas; None lets the run choose it again.
            wait: Whether to return only when the manager has taken the request. The nodes may come later.

        Raises:
            UsageError: The run has ended, or the pool cannot have this number of replicas.
            OperationFailed: No manager takes the request.
        """
        name = request_resize(self._run_dir, pool, replicas)
        if wait:
            wait_until_taken(self._run_dir, name, f"resize {pool}")

    def export(self, folder: str | os.PathLike[str], step: int | None = None, *, adapter: bool = False) -> Exported:
        """Write a committed checkpoint as a Hugging Face folder, as ``rrl export`` does (docs/export.md).

        Args:
            folder: A new folder.
            step: The training step whose checkpoint is exported; by default the newest step with a checkpoint on disk.
            adapter: Write only the adapter of a run with [roles.trainer.lora], as peft does, instead of the merged
                model.

        Raises:
            UsageError: The step is not committed, or the folder is not empty, or the run trains no adapter.
            OperationFailed: The checkpoint cannot be read or written.
        """
        from ..roles.trainer.checkpoint_export import export_checkpoint

        path = Path(folder).expanduser()
        try:
            return export_checkpoint(self._run_dir, step, path, adapter=adapter)
        except OSError as error:
            place = error.filename or path
            raise OperationFailed(f"{place}: {error.strerror or error}; nothing was exported") from None


def _announce(run_dir: RunDir, interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt(f"{run_dir.id} was started; to end it: rrl cancel {run_dir.id}")


def _parts(job: JobSpec | Sequence[JobSpec]) -> list[JobPart]:
    """Return the parts of a job spec. Raises UsageError if ``job`` is not a job spec."""
    parts = job if isinstance(job, list | tuple) else [job]
    if not parts:
        raise UsageError("job is an empty list; name a job.toml, or give its text or a dict")
    return [_part(part) for part in parts]


def _part(part: Any) -> JobPart:
    if isinstance(part, Mapping) or (isinstance(part, str) and "\n" in part):
        return part
    if isinstance(part, str | os.PathLike):
        return Path(part).expanduser()
    raise UsageError(f"job must be a path, TOML text, a dict or a list of these, not of type {type(part).__name__}")


def _settings(values: Mapping[str, Any] | None) -> list[Setting]:
    from ..config.job.document import typed_setting

    return [typed_setting(key, value) for key, value in (values or {}).items()]
