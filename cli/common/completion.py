"""Words that a shell offers for the values of arguments. typer offers commands and options by itself.

A shell starts ``rrl`` at each press of the Tab key, so the modules that read runs are imported only when needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from ...core.run_dir import RunDir

if TYPE_CHECKING:
    from ...core.run_spec import RoleSpec


def script(shell: str) -> str:
    """Return typer's completion script of ``rrl`` for a shell (bash, zsh, fish)."""
    return str(get_completion_script(prog_name="rrl", complete_var="_RRL_COMPLETE", shell=shell))


def prepare() -> None:
    """Make typer ready to answer the script of a shell.

    bash divides ``--option=value`` into three words, which typer would read as an option and two arguments.
    """
    completion_init()
    words = os.environ.get("COMP_WORDS", "")
    if divided := words.count("\n=\n"):
        os.environ["COMP_WORDS"] = words.replace("\n=\n", "=")
        os.environ["COMP_CWORD"] = str(int(os.environ["COMP_CWORD"]) - 2 * divided)


def runs() -> list[str]:
    """Return the ids of all runs, newest first."""
    from ...api.runs import all_runs

    return [run.id for run in all_runs()]


def faults() -> list[str]:
    """Return the kinds of faults."""
    from ...core.faults import FaultKind

    return [kind.value for kind in FaultKind]


def _of_run(words: Callable[[RunDir], Iterable[str]]) -> Callable[[typer.Context], list[str]]:
    """Return a function that returns ``words`` of the run that the command line names, else of the newest run."""

    def of_run(context: typer.Context) -> list[str]:
        from ...api.runs import find_run

        return list(words(find_run(context.params.get("run"))))

    return of_run


def _roles(run: RunDir) -> tuple[RoleSpec, ...]:
    from ...api.runs import job_of

    job = job_of(run)
    return job.roles if job is not None else ()


def _pools(run: RunDir) -> Iterator[str]:
    """Yield the rollout pools that can be resized."""
    return (role.name for role in _roles(run) if role.is_elastic)


def _replicas(run: RunDir) -> Iterator[str]:
    """Yield the replicas of a run; those of a job whose number changes are read from the state of the run."""
    from ...api.runs import job_of, read_state

    job = job_of(run)
    varies = job is not None and any(job.most_replicas(role) > role.replicas for role in job.roles)
    if varies and (state := read_state(run)) is not None:
        return (members[0].id for members in state.gangs)
    return (f"{role.name}/{index}" for role in _roles(run) for index in range(role.replicas))


def _agent_nodes(run: RunDir) -> list[str]:
    """Return the nodes on which an agent of the run was started."""
    names = sorted(os.listdir(run.hardware)) if run.hardware.is_dir() else []
    return [name.removesuffix(".json") for name in names if not name.startswith(".")]


def _processes(run: RunDir) -> Iterator[str]:
    yield from (role.name for role in _roles(run))
    yield from _replicas(run)
    yield "manager"
    yield from (f"agent/{node}" for node in _agent_nodes(run))


def _targets(run: RunDir) -> Iterator[str]:
    yield from _processes(run)
    yield from _agent_nodes(run)
    ranks = {role.name: role.ranks for role in _roles(run)}
    gangs = {gang: ranks.get(gang.partition("/")[0], 1) for gang in _replicas(run)}
    yield from (f"{gang}.{rank}" for gang, count in gangs.items() for rank in range(count) if count > 1)


nodes, pools, replicas = _of_run(_agent_nodes), _of_run(_pools), _of_run(_replicas)
targets = _of_run(_targets)
selectors = _of_run(lambda run: [*_processes(run), "agent"])
