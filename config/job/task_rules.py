"""Check the rules of the tables ``[task]`` and ``[eval.task]``: prompt files, rewards, and what is held out."""

from __future__ import annotations

from os.path import expanduser, normpath

from ...core.task_spec import TaskFile
from ..prompt_file import prompt_columns
from .base import mistake
from .schema import TaskFileTable, TaskTable

_FILES = ("file", "files")
_SOURCES_OF_TASK_KEYS = {
    "answer_column": _FILES,
    "reward": _FILES,
    "rewards": _FILES,
    "args": ("dataset", "function"),
    "size": ("dataset", "function"),
    "prompt": ("dataset", *_FILES, "function"),
}
"""The sources of a task for which each key of [task] is permitted."""
_RESERVED_REWARDS = ("source", "spread")
"""First words of names that rewards may not have: ``reward_source_math`` and ``reward_spread`` are other figures."""


def check_task(task: TaskTable, at: tuple[str, ...]) -> None:
    """Check that every key of the task table ``at`` has an effect, and that its prompt names columns of the files."""
    source = next(name for name in ("dataset", "function", "file", "files") if getattr(task, name) not in (None, ()))
    for key, sources in _SOURCES_OF_TASK_KEYS.items():
        if source not in sources and getattr(task, key) != type(task).model_fields[key].default:
            raise mistake((*at, key), f"has no effect with `{source}`; remove this key")
    columns = prompt_columns(task.prompt) if source in _FILES else {"": False}
    if source in _FILES and (not columns or "" in columns or any(name.isdecimal() for name in columns)):
        raise mistake((*at, "prompt"), f'{task.prompt!r} must name a column of the file in braces: "{{question}}"')
    _task_files(task.files, (*at, "files"))
    if task.rewards:
        _rewards(task, at)


def _task_files(files: tuple[TaskFileTable, ...], at: tuple[str, ...]) -> None:
    """Check that prompt files have names and paths of their own, and that one of them is trained on."""
    for index, one in enumerate(files):
        earlier = files[:index]
        if any(one.name == other.name for other in earlier):
            raise mistake((*at, index, "name"), f'"{one.name}" is the name of another file; write another name')
        if any(_same_file(one.path, other.path) for other in earlier):
            raise mistake((*at, index, "path"), "is named above; remove this file, and raise the weight of the other")
    if files and not any(one.weight for one in files):
        raise mistake((*at, 0, "weight"), "is 0 like that of all files, so nothing is trained on; raise one")


def _rewards(task: TaskTable, at: tuple[str, ...]) -> None:
    """Check that several rewards have an effect, and names that no other figure has."""
    if task.reward is not None:
        raise mistake((*at, "reward"), "is the only reward, but there is [task.rewards] too; remove one of both")
    if task.partial_credit:
        text = "is not added to several rewards: return two numbers in one of them; remove this key"
        raise mistake((*at, "partial_credit"), text)
    for name in task.rewards:
        if name.split("_")[0] in _RESERVED_REWARDS:
            text = f"reward_{name} is the name of another figure of a step; rename this reward"
            raise mistake((*at, "rewards", name), text)
    if not any(term.weight for term in task.rewards.values()):
        first = next(iter(task.rewards))
        text = "is 0 like that of all rewards, so all answers would be equal; write another number for one"
        raise mistake((*at, "rewards", first, "weight"), text)


def check_held_out(evaluated: TaskTable, trained: TaskTable) -> None:
    """Check that an evaluation has no file of the training, and no key that concerns only training."""
    at = ("eval", "task")
    check_task(evaluated, at)
    for key, path in prompt_files(evaluated):
        if any(_same_file(path, other) for _, other in prompt_files(trained)):
            text = "is a file of [task]" if trained.files else "is the file of [task]"
            raise mistake((*at, *key), f"{text}, whose rows are trained on; name another file")
    for index, one in enumerate(evaluated.files):
        if one.weight != TaskFile("", "").weight:  # the default stands in a job spec that rrl has written
            text = "has no effect: an evaluation has as many prompts of each file; remove this key"
            raise mistake((*at, "files", index, "weight"), text)
    if evaluated.partial_credit:
        raise mistake((*at, "partial_credit"), "has no effect: nothing is trained on; remove this key")


def prompt_files(task: TaskTable) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the key and the value of each prompt file's path."""
    single: list[tuple[tuple[str | int, ...], str]] = [] if task.file is None else [(("file",), task.file)]
    return single + [(("files", index, "path"), one.path) for index, one in enumerate(task.files)]


def _same_file(one: str, other: str) -> bool:
    """Return whether two paths name the same file, however they are spelled; symbolic links are not resolved."""
    return normpath(expanduser(one)) == normpath(expanduser(other))
