"""The application ``rrl`` and its global options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .command_group import CommandGroup

app = typer.Typer(
    name="rrl",
    cls=CommandGroup,
    invoke_without_command=True,
    add_completion=False,  # rrl completion prints the scripts instead of two more options
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _use_runs_dir(folder: Path | None) -> None:
    """Use the folder of ``--runs-dir``, also to complete a line: typer then calls only the callbacks of options."""
    if folder is not None:
        from ...core.run_dir import RUNS_ENV

        os.environ[RUNS_ENV] = str(folder.expanduser().absolute())


@app.callback()
def _global(
    context: typer.Context,
    runs_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the runs. Default: $RRL_RUNS_DIR, else ~/rrl-runs.", callback=_use_runs_dir
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log at level debug, here and in the run that is started.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Reinforcement-learning post-training on Slurm that continues when machines fail.

    \b
    rrl check job.toml           check the job spec, and show what would be started
    rrl submit job.toml --wait   start it and watch
    rrl status                   show the newest run
    rrl logs RUN rollout/0 -f    follow the log of one replica
    rrl cancel RUN               end it and release its nodes
    rrl resume RUN               continue from its last step
    rrl rm RUN                   remove it, when it has ended
    """
    if version:
        from ..common.output import print_version

        raise typer.Exit(print_version())
    if verbose:
        from ...core.log_lines import LOG_LEVEL_ENV, start_logging

        os.environ[LOG_LEVEL_ENV] = "debug"
        start_logging()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
