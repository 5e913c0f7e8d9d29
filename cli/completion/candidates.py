"""Complete a command line of ``rrl`` for a shell.

A shell starts this module at each press of the Tab key, so its imports must be few and fast. The commands come
from ``commands.json`` (made by ``docs/make_completion.py``); runs, replicas and nodes come from the files of runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...core.run_dir import RunDir, run_dir_problem, runs_root

FILE, FOLDER = ":file", ":folder"
"""Candidates that tell the shell to complete names of files or folders itself."""
_DATA = Path(__file__).parent


def print_candidates(words: Sequence[str]) -> int:
    """Print the candidates for the last word, one a line: the word, a tab and its description. Return exit code 0.

    Args:
        words: The words after ``rrl`` up to the cursor; the last one is incomplete, and may be empty.
    """
    words = _joined(words) or [""]
    option, sign, value_so_far = words[-1].partition("=")
    begin = value_so_far if sign and option.startswith("--") else words[-1]
    for value, description in candidates(words):
        if value in (FILE, FOLDER) or value.startswith(begin):
            sys.stdout.write(f"{value}\t{description}\n" if description else f"{value}\n")
    return 0


def script(shell: str) -> str:
    """Return the completion script of ``rrl`` for a shell (bash, zsh, fish)."""
    return (_DATA / f"script.{shell}").read_text(encoding="utf-8")


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (word, description) for each candidate that may replace the last of ``words``."""
    line = _Line(json.loads((_DATA / "commands.json").read_text(encoding="utf-8")))
    *before, last = words
    for word in before:
        line.read(word)
    if line.awaited is None and last.startswith("--") and "=" in last:
        name, _, _ = last.partition("=")
        yield from _values(line.options.get(name, {}).get("value", ""), line)
    elif line.awaited is not None:
        yield from _values(line.awaited, line)
    elif last.startswith("-") and not line.only_arguments:
        yield from ((name, option["help"]) for name, option in line.options.items())
    else:
        yield from line.subcommands()
        yield from _values(line.argument_kind(), line)


class _Line:
    """The command, options and arguments before the cursor.

    Args:
        table: The commands by their names, ``""`` for ``rrl`` itself.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table
        self._command = ""
        self.arguments: list[str] = []
        """The arguments of the command so far, without options."""
        self.awaited: Any = None
        """Kind of the value that the last option needs; None if it needs none."""
        self.only_arguments = False
        """True after ``--``."""
        self.runs_root = runs_root()
        """The folder of runs."""
        self._option = ""

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the options of the command."""
        options: Mapping[str, Any] = self._table[self._command]["options"]
        return options

    @property
    def run(self) -> str | None:
        """Return the run that the arguments name; None if they name no run, so that the newest run is meant."""
        kinds = self._table[self._command]["arguments"]
        return self.arguments[kinds.index("run")] if "run" in kinds[: len(self.arguments)] else None

    def read(self, word: str) -> None:
        """Read one complete word."""
        if self.awaited is not None:
            self._take(self._option, word)
            self.awaited = None
        elif word == "--":
            self.only_arguments = True
        elif word.startswith("-") and len(word) > 1 and not self.only_arguments:
            name, sign, value = word.partition("=")
            option = self.options.get(name, {})
            if sign:
                self._take(name, value)
            elif "value" in option:
                self._option, self.awaited = name, option["value"]
        elif (inner := f"{self._command} {word}".strip()) in self._table and not self.arguments:
            self._command = inner
        else:
            self.arguments.append(word)

    def subcommands(self) -> Iterator[tuple[str, str]]:
        """Yield the commands that may follow."""
        if self.arguments:
            return
        for name, command in self._table.items():
            above, _, own = name.rpartition(" ")
            if name and above == self._command:
                yield own, command["help"]

    def argument_kind(self) -> Any:
        """Return the kind of the next argument; empty if the command accepts no further argument."""
        command = self._table[self._command]
        kinds = command["arguments"]
        if len(self.arguments) < len(kinds):
            return kinds[len(self.arguments)]
        return kinds[-1] if kinds and command.get("repeats") else ""

    def _take(self, option: str, value: str) -> None:
        if option == "--runs-dir":
            self.runs_root = Path(value).expanduser().absolute()


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words with ``--option``, ``=`` and ``value`` joined, because bash passes them as three words."""
    joined: list[str] = []
    for word in words:
        if word == "=" and joined and joined[-1].startswith("--"):
            joined[-1] += "="
        elif joined and joined[-1].startswith("--") and joined[-1].endswith("="):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


# ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _values(kind: Any, line: _Line) -> Iterator[tuple[str, str]]:
    """Yield the values of ``kind``, which is the name of a kind in ``commands.json`` or a list of values."""
    if isinstance(kind, list):
        yield from ((value, "") for value in kind)
    elif kind in ("file", "folder"):
        yield FILE if kind == "file" else FOLDER, ""
    elif kind == "run":
        yield from ((run.id, "") for run in _runs(line.runs_root))
    elif kind and (run := _find_run(line.runs_root, line.run)) is not None:
        yield from dict.fromkeys(_VALUES_OF_RUN[kind](run))


def _replicas(run: RunDir) -> Iterator[tuple[str, str]]:
    for role in _roles(run):
        for index in range(role.replicas):
            yield f"{role.name}/{index}", ""


def _selectors(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the selectors that ``rrl logs`` accepts."""
    yield from ((role.name, "all replicas") for role in _roles(run))
    yield from _replicas(run)
    yield from (("manager", ""), ("agent", "all agents"))
    yield from ((f"agent/{node}", "") for node, _ in _nodes(run))


def _targets(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the targets that ``rrl inject`` accepts."""
    yield from _replicas(run)
    yield from ((role.name, "one of its replicas, drawn at random") for role in _roles(run))
    for role in _roles(run):
        for index in range(role.replicas if role.ranks > 1 else 0):
            yield from ((f"{role.name}/{index}.{rank}", "") for rank in range(role.ranks))
    yield from _nodes(run)
    yield from ((f"agent/{node}", "") for node, _ in _nodes(run))
    yield "manager", ""


def _nodes(run: RunDir) -> Iterator[tuple[str, str]]:
    """Yield the nodes on which an agent of the run was started."""
    try:
        names = sorted(entry.name.removesuffix(".json") for entry in os.scandir(run.hardware))
    except OSError:
        return
    yield from ((name, "") for name in names if not name.startswith("."))


_VALUES_OF_RUN = {"replica": _replicas, "selector": _selectors, "target": _targets, "node": _nodes}
"""Functions that yield the values of each kind that depends on the run, with their descriptions."""


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _runs(root: Path) -> list[RunDir]:
    """Return the runs in the folder of runs, the newest submission or resume first."""
    try:
        entries = [RunDir(Path(entry.path)) for entry in os.scandir(root) if not entry.name.startswith(".")]
    except OSError:
        return []
    times = {run: _submitted_at(run) for run in entries if not run_dir_problem(run.path) and run.journal.is_dir()}
    return sorted(times, key=lambda run: (times[run], run.id), reverse=True)


def _submitted_at(run: RunDir) -> float:
    try:
        return run.resolved.stat().st_mtime
    except OSError:
        return 0.0


def _find_run(root: Path, name: str | None) -> RunDir | None:
    """Return the run with this id, unambiguous beginning of an id, or folder; without a name the newest run.

    Returns None if there is no such run.
    """
    if name is not None and "/" in name:
        run = RunDir(Path(name).expanduser().absolute())
        return run if run.journal.is_dir() and not run_dir_problem(run.path) else None
    runs = _runs(root)
    if name is not None:
        runs = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
        return runs[0] if len(runs) == 1 else None
    return runs[0] if runs else None


class _Role(NamedTuple):
    name: str
    replicas: int
    ranks: int


def _roles(run: RunDir) -> list[_Role]:
    """Return the roles in the run spec (:class:`rrl.core.run_spec.RoleSpec`); none if it cannot be read."""
    try:
        roles = json.loads(run.run_spec.read_bytes())["roles"]
        return [_Role(str(role["name"]), int(role["replicas"]), int(role.get("ranks", 1))) for role in roles]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
