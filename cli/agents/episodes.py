"""``rrl episodes``: show the episodes of a run's agents, or one episode as a tree."""

from __future__ import annotations

import msgspec

from ...api.runs import find_run, job_of
from ...api.sampled_steps import read_store
from ...core.run_dir import RunDir
from ...core.types import OperationFailed, UsageError
from ..common.output import print_json, print_line, program, show
from ..views.episode_trees import Episode, episodes_of
from ..views.episodes import episode_view, episodes_view


def episodes(name: str | None, number: int | None, *, json: bool) -> int:
    """Print the episodes that the store of a run has, or one episode with its turns; returns exit code 0.

    Raises:
        UsageError: The job of the run has no agents, or the store does not have the episode.
        OperationFailed: The log of the store cannot be read.
    """
    run = find_run(name)
    found = _read(run)
    if number is not None:
        one = next((episode for episode in found if episode.episode == number), None)
        if one is None:
            raise UsageError(_unknown(run, number, found))
        if json:
            print_json(one)
        else:
            show(episode_view(one))
    elif json:
        print_json([_without_turns(episode) for episode in found])
    elif found:
        show(episodes_view(found))
    else:
        print_line(f"{run.id}: no episodes yet")
    return 0


def _read(run: RunDir) -> list[Episode]:
    job = job_of(run)
    if job is None:
        raise OperationFailed(f"{run.run_spec} cannot be read; without it nothing is known of the run's episodes")
    if job.agents is None and job.endpoint is None:
        raise UsageError(f"{run.id} has no episodes: its job has neither [roles.agents] nor [roles.endpoint]")
    state = read_store(run, job)
    return [] if state is None else episodes_of(state)


def _without_turns(episode: Episode) -> dict[str, object]:
    fields = msgspec.structs.asdict(episode)
    return fields | {"turns": len(episode.turns)}


def _unknown(run: RunDir, number: int, found: list[Episode]) -> str:
    if not found:
        return f"{run.id} has no episode {number}: it has no episodes yet"
    return (
        f"the store of {run.id} has no episode {number}; list those that it has: {program()} episodes {run.id}"
        " (older episodes are deleted once they are trained or dropped)"
    )
