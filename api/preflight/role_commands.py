"""Find the command of each role on this machine, as its launcher will, so that a missing command is reported early."""

from __future__ import annotations

import ast
import difflib
import json
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import decode_source
from itertools import pairwise
from pathlib import Path

from ...config.job.schema import Job
from ...core.role_environment import prelude
from ...core.run_spec import RoleSpec, RunSpec
from ...manager.bootstrap.preflight import Problem
from ...manager.execute.launch import environment

_INTERPRETER = re.compile(r"(python|python\d+(\.\d+)?|bash|sh)")
"""Commands whose first argument is a file, except if this argument is an option."""
_PYTHON_KEY = ("env", "python")
"""Key of the interpreter with which the built-in roles run."""


def command_problems(job: Job, spec: RunSpec, folder: Path) -> list[Problem]:
    """Return which commands of roles, or scripts that they run, are missing or cannot be executed on this machine.

    Commands in containers are not checked. On a Slurm cluster only paths of files are checked, since PATH may differ on
    the nodes. A problem is ``certain`` if the roles run on this machine.

    Args:
        job: The job, from which the key of a problem is found.
        spec: The run spec of this job.
        folder: Folder of job.toml, where relative paths start.
    """
    problems = []
    if (folder / "rrl.py").exists():
        text = f"rrl.py in {folder} hides the package rrl from every Python program that runs there; rename the file"
        problems.append(Problem((), text, certain=True))
    for role in spec.roles:
        if role.launcher != "direct":
            continue
        commands = {_PYTHON_KEY if role.built_in else (*job.table_of(role.name), "command"): role.argv}
        if role.built_in and role.kind == "agents" and spec.agents is not None and spec.agents.command is not None:
            commands["roles", "agents", "command"] = spec.agents.command
        for key, argv in commands.items():
            texts = (_program(job, spec, role, key, argv, folder), _script(argv, folder))
            problems += [Problem(key, text, certain=job.cluster.traits.roles_run_here) for text in texts if text]
            if mistake := _syntax_error(argv, folder):
                own = os.path.realpath(shutil.which(argv[0]) or "") == os.path.realpath(sys.executable)
                problems.append(Problem(key, mistake, certain=own and not prelude(spec.env)))
    first_of_each = {problem.key: problem for problem in reversed(problems)}  # built-in roles have one interpreter
    return list(first_of_each.values())[::-1]


def _program(job: Job, spec: RunSpec, role: RoleSpec, key: tuple[str, ...], argv: Sequence[str], folder: Path) -> str:
    """Return why the program of a role cannot be started; empty if it can be started or only a node can check it."""
    name = argv[0]
    if "/" in name:
        path = folder / Path(name).expanduser() if key == _PYTHON_KEY else folder / name
        if not path.exists():
            return _missing(name, folder)
        if path.is_dir():
            return f"{json.dumps(name)} is a folder"
        if not os.access(path, os.X_OK):
            return f"{json.dumps(name)} is not executable; run chmod +x on it, or name its interpreter first"
        return ""
    if not job.cluster.traits.roles_run_here or prelude(spec.env):  # [env] may change PATH
        return ""
    env = environment(spec, role.per_member, str(folder)) | role.env
    if shutil.which(name, path=env.get("PATH", os.defpath)) is not None:
        return ""
    write = f'"python", {json.dumps(name)}' if name.endswith(".py") else json.dumps(f"./{name}")
    hint = f"; for the file in {folder} write {write}" if (folder / name).exists() else ""
    return f"there is no command {json.dumps(name)} in PATH{hint}"


def _script(argv: Sequence[str], folder: Path) -> str:
    """Return an error text if the script, the first argument of an interpreter, does not exist; empty if it exists."""
    if len(argv) < 2 or not _INTERPRETER.fullmatch(Path(argv[0]).name):
        return ""
    script = argv[1]
    if script.startswith("-") or (folder / script).exists():
        return ""
    return _missing(script, folder)


def _syntax_error(argv: Sequence[str], folder: Path) -> str:
    """Return the first syntax error in the Python files that a command names, or that these import from their folder.

    The files are only compiled, by this interpreter: the command may run another version of Python. The text is empty
    if there is no error.
    """
    modules = [f"{module.replace('.', '/')}.py" for option, module in pairwise(argv) if option == "-m"]
    files = [folder / name for name in (*argv, *modules) if name.endswith(".py")]
    for file in files:  # it grows
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(decode_source(file.read_bytes()))
                compile(tree, file, "exec", dont_inherit=True)
        except (OSError, RecursionError, MemoryError):
            continue
        except (SyntaxError, ValueError) as error:  # ValueError: null bytes, or not UTF-8
            place = f"{os.path.relpath(file, folder)}:{getattr(error, 'lineno', None) or 1}"
            return f"{place}: {getattr(error, 'msg', error)} (Python {platform.python_version()})"
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
        found = dict.fromkeys(file.parent / f"{name.replace('.', '/')}.py" for name in names if name)
        files += [path for path in found if path not in files]
    return ""


def _missing(name: str, folder: Path) -> str:
    place = "" if Path(name).is_absolute() else f" in {folder}, the folder of job.toml"
    path = folder / name
    near = difflib.get_close_matches(path.name, _names(path.parent), 1)
    hint = f"; did you mean {json.dumps(str(Path(name).with_name(near[0])))}?" if near else ""
    return f"{json.dumps(name)} does not exist{place}{hint}"


def _names(folder: Path) -> Iterator[str]:
    try:
        yield from os.listdir(folder)
    except OSError:
        return
