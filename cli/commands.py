"""The commands, their arguments and their help. What each does lies in a module of its own, imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rrl",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUN = "A run's id, an unambiguous beginning of it, or its folder. Left out: the newest run."
Run = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUN, show_default=False)]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help=_RUN.partition(" Left")[0], show_default=False)]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead, for programs.")]


@app.callback()
def _global(
    context: typer.Context,
    runs_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where runs lie. Default: $RRL_RUNS_DIR, else ~/rrl-runs.")
    ] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Reinforcement-learning post-training on Slurm that goes on when machines fail.

    \b
    rrl check job.toml           is the job spec right, and what would be started?
    rrl submit job.toml --wait   start it and watch
    rrl status                   how is the newest run?
    rrl logs RUN rollout/0 -f    what does that replica say?
    rrl cancel RUN               end it and give everything back
    """
    if version:
        from rrl.cli.app import print_version

        raise typer.Exit(print_version())
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif runs_dir is not None:
        from rrl.spec.rundir import RUNS_ENV

        os.environ[RUNS_ENV] = str(runs_dir.expanduser().absolute())


@app.command()
def submit(
    job: JobFile,
    foreground: Annotated[bool, typer.Option(help="Run the manager here; Ctrl-C cancels the run.")] = False,
    wait: Annotated[bool, typer.Option(help="Watch until the run ends; Ctrl-C stops watching only.")] = False,
    json: Json = False,
) -> None:
    """Start a run and print its id.

    \b
    rrl submit job.toml                returns at once
    rrl submit job.toml --wait         exit code 0 only if the run completes
    rrl submit job.toml --foreground   no background process and no manager job
    """
    from rrl.cli import submit as command

    raise typer.Exit(command.submit(job, foreground=foreground, wait=wait, json=json))


@app.command(short_help="Show how a run is doing.")
def status(
    run: Run = None,
    live: Annotated[bool, typer.Option("--live", help="Keep drawing until the run ends; q leaves it alone.")] = False,
    json: Json = False,
) -> None:
    """Show how a run is doing: its replicas, nodes, findings and recoveries.

    \b
    rrl status               the newest run
    rrl status quick --live  the run whose id begins with "quick", redrawn twice a second
    """
    from rrl.cli import status as command

    raise typer.Exit(command.status(run, live=live, json=json))


@app.command()
def logs(
    run: NamedRun,
    whose: Annotated[
        str | None,
        typer.Argument(metavar="ROLE[/REPLICA]", help="Whose logs: rollout, rollout/0, agent, manager.",
                       show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Newest lines of each log.")] = 20,
) -> None:  # fmt: skip
    """Show what a run's processes wrote.

    \b
    rrl logs quick                  the end of every log
    rrl logs quick rollout/0 -f     all lives of one replica, and those to come
    """
    from rrl.cli import logs as command

    raise typer.Exit(command.logs(run, whose, follow=follow, lines=lines))


@app.command(short_help="End a run and give everything back.")
def cancel(
    run: NamedRun,
    wait: Annotated[bool, typer.Option(help="Wait until everything is given back.")] = True,
) -> None:
    """End a run: its manager stops every role and gives all nodes back."""
    from rrl.cli import cancel as command

    raise typer.Exit(command.cancel(run, wait=wait))


@app.command("list")
def list_runs(json: Json = False) -> None:
    """List your runs, newest first."""
    from rrl.cli import listing as command

    raise typer.Exit(command.list_runs(json=json))


@app.command(short_help="Check a job spec; show what would be submitted.")
def check(job: JobFile, json: Json = False) -> None:
    """Check a job spec; print it with every default, and exactly what would be submitted. Touches nothing."""
    from rrl.cli import check as command

    raise typer.Exit(command.check(job, json=json))


@app.command(hidden=True)
def manage(run: NamedRun) -> None:
    """Run a manager for a run that has none, here. Ctrl-C leaves; the roles go on."""
    from rrl.cli import submit as command

    raise typer.Exit(command.manage(run))
