"""Try the task of a job in a child process, and show two of its items with the rewards of their answers.

The child process runs :mod:`.task_trial` with the interpreter and the environment of the trajectory store.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from ...config.job.schema import Job
from ...core.command_runner import CommandResult, run
from ...core.role_environment import prelude, select_variables, wrap
from ...core.run_spec import RunSpec
from ...core.text import escaped_lines, last_lines, on_one_line, plural
from ...manager.bootstrap.preflight import Problem
from ...manager.execute.launch import environment
from .task_trial import Sample, TaskTrial, TrialRequest, source_key

DEADLINE_S = 60.0
"""Timeout (s) for building and trying the task. Importing a large package from a busy network file system takes about
30 s. A download takes longer, but a run must not download, since it may not reach the internet."""
_KILL_MARGIN_S = 15.0
"""Seconds, in addition to the deadline, for the start of the child process and its report of the current activity."""
_MAX_SHOWN_CHARS = 1000
"""Maximum number of characters shown of a prompt or an answer."""
_TRIAL_MODULE = "rrl.cli.job.task_trial"


class TaskReport(Struct, frozen=True):
    """The result of trying the task of a job."""

    problem: Problem | None = None
    """Why a run with this task cannot work; None if no reason was found."""
    not_tried: str = ""
    """Why the task was not tried; empty if it was tried, or if there is no task."""
    samples: tuple[Sample, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the samples as text; empty if there are none."""
        return "\n".join(_sample_text(sample) for sample in self.samples)


def try_task(job: Job, spec: RunSpec, path: Path) -> TaskReport:
    """Try the task of ``job`` on this machine, and return the result.

    Args:
        job: The job.
        spec: The run spec of the job.
        path: The file with the job spec. The task is tried in its folder.
    """
    if job.task is None:
        return TaskReport()
    role, here = spec.kind("trajectories")[0], job.cluster.traits.roles_run_here
    if not role.built_in:
        return TaskReport(not_tried="[roles.trajectories] has a command of its own")
    if role.launcher != "direct":
        return TaskReport(not_tried=f"it runs in a container ({role.launcher})")
    if shutil.which(role.argv[0]) is None:
        return TaskReport(not_tried=f"{role.argv[0]} does not exist on this machine")
    if spec.model.path is not None and not Path(spec.model.path).exists():
        return TaskReport(not_tried="the folder of [model] path does not exist on this machine")
    tasks = {"task": spec.task, "eval.task": spec.eval.task if spec.eval is not None else None}
    for table, task in tasks.items():
        if task is not None and not all(Path(source.path).exists() for source in task.sources):
            return TaskReport(not_tried=f"a file of [{table}] does not exist on this machine")
    folder = path.absolute().parent
    command: Sequence[str] = (role.argv[0], "-P", "-B", "-m", _TRIAL_MODULE)  # -B: writes no __pycache__ there
    if here and (script := prelude(spec.env)):  # [env] is for the nodes; a login node may differ from them
        # the script closes these two descriptors when it has succeeded, and must not close stderr
        command = ("bash", "-c", 'exec 3>&2 4>&2; exec "$@"', "rrl", *wrap(script, 3, 4, command))
    env = environment(spec, role.per_member, str(folder)) | select_variables(spec.env.passed, os.environ) | role.env
    request = msgspec.json.encode(TrialRequest(spec, str(folder), DEADLINE_S)).decode()
    source = source_key(spec.task)
    try:
        ended = run(command, DEADLINE_S + _KILL_MARGIN_S, env=env, cwd=str(folder), stdin_text=request)
        # the commands of [env] may print lines before the result
        trial = msgspec.json.decode(ended.out.rpartition("\n")[2], type=TaskTrial)
    except TimeoutError:
        text = f"the task was not built and tried within {DEADLINE_S:g} s; --no-task checks the rest of the job"
        return TaskReport(Problem(source, text))
    except OSError as error:
        return TaskReport(not_tried=f"{command[0]} cannot be started: {error.strerror}")
    except msgspec.DecodeError:
        return TaskReport(Problem(("env", "python") if job.env.python else source, _death_text(ended)))
    if trial.problem is None:
        return TaskReport(samples=trial.samples, warnings=tuple(map(on_one_line, trial.warnings)))
    if trial.problem.missing_package and not here:
        return TaskReport(not_tried=f"{trial.problem.missing_package} is not installed on this machine")
    elsewhere = "" if here else " (tried on this machine; --no-task checks the rest of the job)"
    return TaskReport(Problem(trial.problem.key, on_one_line(trial.problem.text) + elsewhere))


def _death_text(ended: CommandResult) -> str:
    """Return a text about the end of a child process that reported no result."""
    cause = f"signal {signal.Signals(-ended.code).name}" if ended.code < 0 else f"exit code {ended.code}"
    output = on_one_line(last_lines(ended.err))
    return f"the process in which the task was tried ended with {cause}{': ' if output else ''}{output}"


def _sample_text(sample: Sample) -> str:
    name = f"item {sample.item}{f' of {sample.source}' if sample.source else ''}"
    if not sample.prompt_tokens:  # the item is for an agent, which makes the prompts itself
        return f"{name}  {_shown(sample.prompt)}"
    lines = [name, f"  prompt        {_shown(sample.prompt)}  ({plural(sample.prompt_tokens, 'token')})"]
    if sample.answer:
        lines.append(f"  right answer  {_shown(sample.answer)}  ({plural(sample.answer_tokens, 'token')})")
    if sample.scored != sample.answer:
        lines.append(f"  scored as     {_shown(sample.scored)}")
    if sample.rewards is not None:
        lines.append(f"  reward        {_reward_text(sample.rewards, sample.parts)}")
    if sample.wrong_rewards is not None:
        lines.append(f"  wrong answer  {_shown(sample.wrong) or '(empty)'}")
        lines.append(f"  reward        {_reward_text(sample.wrong_rewards, sample.wrong_parts)}")
    return "\n".join(lines)


def _shown(text: str) -> str:
    """Return the text without control characters; all lines but the first are indented."""
    shown = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}... ({len(text)} characters)"
    return escaped_lines(shown).replace("\n", "\n" + " " * 16)


def _reward_text(rewards: tuple[float, float], parts: Mapping[str, float]) -> str:
    reported, trained = rewards
    text = f"{reported:g}" if reported == trained else f"{reported:g}, trained on {trained:g}"
    return f"{text}  ({', '.join(f'{name} {part:g}' for name, part in parts.items())})" if parts else text
