"""Read the files of prompts that a job names, completely, so that a bad row is reported before the run starts."""

from __future__ import annotations

from pathlib import Path

from ...config.job.schema import Job, TaskTable
from ...config.prompt_file import PromptFileError, open_rows
from ...core.run_spec import TaskSpec
from ...manager.bootstrap.preflight import Problem


def task_file_problems(job: Job) -> list[Problem]:
    """Return a problem for each file of prompts that cannot be used.

    A problem is certain if the file itself is wrong, or if the roles that read it run on this machine. Otherwise the
    nodes may have a file, or a package, that this machine lacks.
    """
    readers = (job.roles.trajectories, job.roles.reward)
    here = job.cluster.traits.roles_run_here and all(role.launcher == "direct" for role in readers)
    tasks = {("task", "file"): job.task, ("eval", "task", "file"): job.eval.task if job.eval is not None else None}
    found = (_problem(key, task, here) for key, task in tasks.items() if task is not None)
    return [problem for problem in found if problem is not None]


def _problem(key: tuple[str, ...], task: TaskTable, here: bool) -> Problem | None:
    if task.file is None:
        return None
    if not Path(task.file).exists():
        text = "does not exist" if here else "does not exist on this machine"
        return Problem(key, f"{task.file!r} {text}{'; name a file that does' if here else ''}", certain=here)
    spec = TaskSpec(answer_column=task.answer_column, reward=task.reward, partial_credit=task.partial_credit)
    named = (task.answer_column,) if "answer_column" in task.model_fields_set else spec.required_columns
    try:
        open_rows(Path(task.file), task.prompt, named)
    except PromptFileError as error:
        return Problem(key, str(error), certain=here or not error.missing_package)
    return None
