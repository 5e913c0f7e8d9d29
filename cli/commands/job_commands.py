"""Commands that prepare a job: its spec, and the machines for it. Each imports its module only when it runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..common.arguments import JobFiles, Json, Settings, Trust
from ..common.completion import script
from .app import app


@app.command(short_help="Write a commented job.toml for this site.")
def init(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    partition: Partition = "",
    account: Account = "",
    qos: Qos = "",
    yes: Consent = None,
) -> None:
    """Write a commented job.toml with the quickstart's task, for the cluster or machine that rrl doctor finds here.

    \b
    rrl init                           job.toml in this folder
    rrl init -p gpu --out big.toml     for a partition of your choice
    """
    from ..doctor.facts import DoctorOptions
    from ..job import init as command

    raise typer.Exit(command.init(out, DoctorOptions(partition, account, qos), force=force, consent=yes))


@app.command(short_help="Check a job spec; show what would be submitted.")
def check(
    job: JobFiles,
    settings: Settings = None,
    task: Annotated[
        bool,
        typer.Option(
            "--task/--no-task",
            help="Whether to build and try the task here. Without the packages it needs,"
            " for example on a login node, it is not tried.",
        ),
    ] = True,
    defaults: Annotated[bool, typer.Option("--defaults", help="Print every key of the job, with its value.")] = False,
    detection: Annotated[
        bool, typer.Option("--detection", help="Print after which time without progress each role would be restarted.")
    ] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Check a job spec; show what it needs, what is doubtful, what would be submitted, and two items of its task.

    The task is tried on this machine: prompts and answers of 100 items, and the rewards of a few answers. Changes
    nothing.

    \b
    rrl check job.toml                            nodes, jobs, GPU-hours, Slurm's estimate of the start, doubts
    rrl check job.toml --set cluster.walltime=8h  as rrl submit would merge it
    rrl check job.toml --defaults                 also every key that the job does not set
    rrl check job.toml --detection                also when a hang of each role would be found, and by which rule
    """
    from ..job import check as command

    shown = {"task": task, "defaults": defaults, "detection": detection, "json": json}
    raise typer.Exit(command.check(job, settings or [], trust=trust, **shown))


def _schemas() -> list[str]:
    from ..output_schemas import EVENTS, OUTPUTS

    return ["job", EVENTS, *OUTPUTS]


@app.command(short_help="Print the JSON Schema of job.toml, for editors, or of what a command prints.")
def schema(
    what: Annotated[str, typer.Argument(help="job, or an output: see docs/json.md.", autocompletion=_schemas)] = "job",
) -> None:
    """Print the JSON Schema of job.toml, with which editors complete, explain and check its keys.

    \b
    rrl schema > job.schema.json   beside a job.toml that begins with: #:schema ./job.schema.json
    rrl schema status              of what rrl status --json prints; docs/json.md lists the others
    rrl schema events              of the records of a run's journal
    """
    from ..common.output import indented_json

    if what == "job":
        from ...config.job.json_schema import json_schema

        typer.echo(indented_json(json_schema()), nl=False)
    else:
        from ..output_schemas import output_schema

        typer.echo(indented_json(output_schema(what)), nl=False)


class Shell(StrEnum):
    """A shell for which rrl has a completion script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(short_help="Print a script that lets a shell complete rrl.")
def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a script with which a shell completes commands, options, runs, roles, replicas, nodes and faults.

    Write it once, where the shell looks for it; then start a new shell:

    \b
    rrl completion bash > ~/.local/share/bash-completion/completions/rrl
    rrl completion zsh > ~/.zfunc/_rrl    with fpath+=~/.zfunc before compinit in ~/.zshrc
    rrl completion fish > ~/.config/fish/completions/rrl.fish
    """
    typer.echo(script(shell.value))


_LIKE_SBATCH = "As in sbatch. Default: what Slurm chooses."
Partition = Annotated[str, typer.Option("--partition", "-p", metavar="NAME", help=_LIKE_SBATCH, show_default=False)]
Account = Annotated[str, typer.Option("--account", "-A", metavar="NAME", help=_LIKE_SBATCH, show_default=False)]
Qos = Annotated[str, typer.Option("--qos", "-q", metavar="NAME", help=_LIKE_SBATCH, show_default=False)]
Consent = Annotated[
    bool | None,
    typer.Option("--yes/--no", help="Whether to run a job of 10 s that checks a compute node. Default: ask."),
]


@app.command(short_help="Check this machine and site, and show how to fix problems.")
def doctor(
    partition: Partition = "", account: Account = "", qos: Qos = "", yes: Consent = None, json: Json = False
) -> None:
    """Check this machine and site, and show how to fix each problem. Changes nothing; exit code 1 if a check fails.

    \b
    rrl doctor             this machine, the folder of runs, Slurm
    rrl doctor --yes       also a compute node, by a job of 10 s
    rrl doctor -p gpu      with the partition of your jobs
    """
    from ..doctor import command
    from ..doctor.facts import DoctorOptions

    raise typer.Exit(command.doctor(DoctorOptions(partition, account, qos), consent=yes, json=json))
