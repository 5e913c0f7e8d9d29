"""Commands that start, show, continue and end runs, and that connect agents to them.

Each imports its module only when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.arguments import JobFiles, Json, NamedRun, Run, Settings, Trust
from ..common.completion import runs as known_runs
from .app import app


@app.command()
def submit(
    job: JobFiles,
    settings: Settings = None,
    foreground: Annotated[bool, typer.Option(help="Run the manager here; Ctrl-C cancels the run.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends; q ends only this command.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Start a run and print its id.

    \b
    rrl submit job.toml                returns at once
    rrl submit job.toml --wait         exit code 0 only if the run completes
    rrl submit job.toml --foreground   no background process and no manager job
    rrl submit base.toml more.toml --set roles.trainer.learning_rate=1e-6
                                       later files and settings replace values of earlier ones
    """
    from ..run import submit as command

    raise typer.Exit(command.submit(job, settings or [], foreground=foreground, wait=wait, trust=trust, json=json))


@app.command(short_help="Show the state of a run.")
def status(
    run: Run = None,
    live: Annotated[bool, typer.Option("--live", help="Refresh until the run ends; q ends only the view.")] = False,
    json: Json = False,
) -> None:
    """Show the state of a run: its replicas, nodes, findings and recoveries.

    \b
    rrl status               the newest run
    rrl status quick --live  the run whose id begins with "quick", redrawn twice a second
    """
    if live:
        from ..run.follow import show_live

        raise typer.Exit(show_live(run))
    from ..run import status as command

    raise typer.Exit(command.status(run, json=json))


@app.command(short_help="Watch and change runs on the whole terminal.")
def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            autocompletion=known_runs,
            help="The run to open first: its id, an unambiguous beginning of it, or its folder.",
        ),
    ] = None,
) -> None:
    """Show your runs in a table, and each run, replica and node on a screen of its own.

    Enter opens the row that has the cursor, Esc goes back, ? shows the keys. Restarts, drains and faults are confirmed
    first. Needs the package textual: pip install '.[tui]' in rrl's clone.

    \b
    rrl top         all runs
    rrl top quick   the run whose id begins with "quick"
    """
    from ..run.top import command

    raise typer.Exit(command.top(run))


@app.command("list")
def list_runs(json: Json = False) -> None:
    """List your runs, newest first."""
    from ..run import status as command

    raise typer.Exit(command.list_runs(json=json))


@app.command(short_help="End a run and release its nodes.")
def cancel(
    run: NamedRun,
    wait: Annotated[bool, typer.Option(help="Wait until the nodes are released.")] = True,
    keep_allocation: Annotated[
        bool, typer.Option("--keep-allocation", help="On Slurm: keep the nodes for rrl resume; scancel releases them.")
    ] = False,
) -> None:
    """End a run: its manager stops every role and gives all nodes back. rrl resume continues it."""
    from ..run import control as command

    raise typer.Exit(command.cancel(run, wait=wait, keep=keep_allocation))


@app.command(short_help="Continue a run that has ended.")
def resume(
    run: NamedRun,
    job: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="JOB.TOML",
            show_default=False,
            help="Continue with this job spec; name, model, task and seed must be those of the run. May be"
            " repeated: each file adds keys to those before it, or replaces their values.",
        ),
    ] = None,
    settings: Settings = None,
    steps: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Train up to this step instead of run.steps.")
    ] = None,
    walltime: Annotated[
        str | None, typer.Option(metavar="TIME", show_default=False, help='Time for the run from now on: "8h".')
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends; q ends only this command.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Continue an ended run (failed, cancelled, out of walltime) from its last committed step, under the same id.

    \b
    rrl resume quick                   with the same job spec
    rrl resume quick --walltime 8h     with nodes for eight more hours
    rrl resume quick --steps 500       train more steps than planned
    rrl resume quick --job other.toml  on another partition, with more rollouts ...
    rrl resume quick --set roles.rollout.replicas=8
    """
    from ..run import submit as command

    changes = command.changes(settings or [], steps, walltime)
    raise typer.Exit(command.resume(run, job or [], changes, wait=wait, trust=trust, json=json))


@app.command("rm", short_help="Remove runs that have ended.")
def remove(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            show_default=False,
            autocompletion=known_runs,
            help="Ids, or unambiguous beginnings of ids.",
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default=False, help='All your runs that ended longer ago than TIME: "7d".'),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs that have ended, with their logs and checkpoints, and say how much space that frees.

    Only your own runs are removed. To keep a trained model, rrl export it first.

    \b
    rrl rm quick-1120-064114       one run
    rrl rm --older-than 7d --yes   for a cron job
    """
    from ..run import remove as command

    raise typer.Exit(command.remove(runs or [], older_than, yes=yes))


@app.command(short_help="Run a manager here for a run that has none.")
def manage(run: NamedRun) -> None:
    """Run a manager here for a run that has none, for example after a reboot of the machine that managed a local run.

    It takes over the roles that still work, or starts them again from the last committed step. Ctrl-C ends only this
    manager; the roles continue. rrl status says when a run needs this command. On Slurm the next manager job starts by
    itself.
    """
    from ..run import submit as command

    raise typer.Exit(command.manage(run))


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
