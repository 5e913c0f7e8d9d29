"""Commands for runs whose samples come from agents. Each imports its module only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.arguments import Json, Run
from .app import app


@app.command(short_help="List the episodes of a run's agents, or show one episode as a tree.")
def episodes(
    run: Run = None,
    episode: Annotated[
        int | None, typer.Argument(metavar="EPISODE", help="Number of the episode to show.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the episodes of a run's agents that its store has, or show one episode as a tree of its turns.

    \b
    rrl episodes quick       state, attempt, turns, branches, tokens, versions and reward of each
    rrl episodes quick 118   its turns: what was given and sampled, by which weights, and what is trained
    """
    from ..agents import episodes as command

    raise typer.Exit(command.episodes(run, episode, json=json))


@app.command(short_help="Show how agents outside of a run reach it.")
def endpoint(run: Run = None, json: Json = False) -> None:
    """Show where agents outside of a run reach its endpoint, and how they open an episode.

    The job must have a table [roles.endpoint]. Prints a key with which episodes of the run are opened: keep it secret.
    """
    from ..agents import endpoint as command

    raise typer.Exit(command.endpoint(run, json=json))


@app.command(short_help="Hold the calls of an outside agent while a run's endpoint restarts.")
def relay(
    run: Run = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 selects a free port, which is printed.")
    ] = 8000,
) -> None:
    """Serve a relay beside an agent outside of a run; the agent uses it as its base URL.

    The relay passes every call to the endpoint of the run, and holds it while the endpoint restarts: the agent sees a
    slower answer, and a stream goes on at the token that the agent has. Listens on 127.0.0.1 until Ctrl-C.

    \b
    rrl relay quick               base URL http://127.0.0.1:8000/v1
    rrl relay quick --port 8123
    """
    from ..agents import endpoint as command

    raise typer.Exit(command.relay(run, port))
