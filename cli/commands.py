"""The commands with their arguments and help. Each command's module is imported only when the command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .common.arguments import Json
from .health.commands import health

app = typer.Typer(
    name="rrl",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_RUN = "The run's id, an unambiguous beginning of it, or its folder. Default: the newest run."
Run = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUN, show_default=False)]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help=_RUN.partition(" Default")[0], show_default=False)]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job spec.", show_default=False)]


@app.callback()
def _global(
    context: typer.Context,
    runs_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs. Default: $RRL_RUNS_DIR, else ~/rrl-runs.")
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
        from .common.output import print_version

        raise typer.Exit(print_version())
    if verbose:
        from ..core.log_lines import LOG_LEVEL_ENV, start_logging

        os.environ[LOG_LEVEL_ENV] = "debug"
        start_logging()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif runs_dir is not None:
        from ..core.run_dir import RUNS_ENV

        os.environ[RUNS_ENV] = str(runs_dir.expanduser().absolute())


@app.command()
def submit(
    job: JobFile,
    foreground: Annotated[bool, typer.Option(help="Run the manager here; Ctrl-C cancels the run.")] = False,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends; q ends only this command.")] = False,
    json: Json = False,
) -> None:
    """Start a run and print its id.

    \b
    rrl submit job.toml                returns at once
    rrl submit job.toml --wait         exit code 0 only if the run completes
    rrl submit job.toml --foreground   no background process and no manager job
    """
    from .run import submit as command

    raise typer.Exit(command.submit(job, foreground=foreground, wait=wait, json=json))


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
        from .run.follow import show_live

        raise typer.Exit(show_live(run))
    from .run import status as command

    raise typer.Exit(command.status(run, json=json))


@app.command()
def logs(
    run: NamedRun,
    selector: Annotated[
        str | None,
        typer.Argument(metavar="ROLE[/REPLICA[#INCARNATION]]", show_default=False,
                       help="For example rollout, rollout/0, rollout/0#2, agent, manager."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the run ends.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, show_default=False,
                     help="Number of the newest lines of each log. Default: 20; all with --since or --grep."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help='Only lines since: "10m" (ago), "2026-11-20T09:00".', show_default=False),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only lines that match.", show_default=False)
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show each failure: its reason, and the last lines before it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead, one object a line, for programs.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not escape control characters (colours, cursor, title).")
    ] = False,
) -> None:  # fmt: skip
    """Show the output of a run's processes, merged by time.

    \b
    rrl logs quick                         the end of every log
    rrl logs quick rollout/0 -f            all incarnations of one replica, and later ones
    rrl logs quick rollout/0#2             one incarnation
    rrl logs quick --failed                each failure, with the lines before it
    rrl logs quick --since 10m --grep OOM  lines about memory of the last 10 minutes
    """
    from .logs import command

    raise typer.Exit(
        command.logs(
            run, selector, follow=follow, lines=lines, since=since, grep=grep, failed=failed, json=json, raw=raw
        )
    )


@app.command(short_help="End a run and release its nodes.")
def cancel(
    run: NamedRun,
    wait: Annotated[bool, typer.Option(help="Wait until the nodes are released.")] = True,
    keep_allocation: Annotated[
        bool,
        typer.Option("--keep-allocation", help="On Slurm: keep the nodes for rrl resume; scancel releases them."),
    ] = False,
) -> None:
    """End a run: its manager stops every role and gives all nodes back. rrl resume continues it."""
    from .run import control as command

    raise typer.Exit(command.cancel(run, wait=wait, keep=keep_allocation))


@app.command(short_help="Continue a run that has ended.")
def resume(
    run: NamedRun,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.TOML", show_default=False,
                     help="Continue with this job spec; name, model, task and seed must be those of the run."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Train up to this step instead of run.steps.")
    ] = None,
    walltime: Annotated[
        str | None, typer.Option(metavar="TIME", show_default=False, help='Walltime from now on: "8h".')
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the run until it ends; q ends only this command.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Continue an ended run (failed, cancelled, out of walltime) from its last committed step, under the same id.

    \b
    rrl resume quick                   with the same job spec
    rrl resume quick --walltime 8h     with nodes for eight more hours
    rrl resume quick --steps 500       train more steps than planned
    rrl resume quick --job other.toml  on another partition, with more rollouts ...
    """
    from .run import resume as command

    raise typer.Exit(command.resume(run, changed=job, steps=steps, walltime=walltime, wait=wait, json=json))


@app.command(short_help="Restart one replica of a run.")
def restart(
    run: NamedRun,
    replica: Annotated[str, typer.Argument(metavar="ROLE/REPLICA", show_default=False, help="trainer/0, rollout/3.")],
    wait: Annotated[bool, typer.Option(help="Wait until it has joined again.")] = True,
) -> None:
    """Restart one replica.

    Its process is ended and a new one started. A trainer restarts with all its ranks; no committed step is lost.
    """
    from .run import control as command

    raise typer.Exit(command.restart(run, replica, wait=wait))


Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node in Slurm.", show_default=False)]


@app.command(short_help="Move a run off a node, and drain the node.")
def drain(
    run: NamedRun,
    node: Node,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", show_default=False, help="Reason that Slurm shows for the drain.")
    ] = "",
    wait: Annotated[bool, typer.Option(help="Wait until it is done, and print the result.")] = True,
) -> None:
    """Move a run off a node, and drain the node in Slurm.

    Its replicas move to other nodes first. Without the right to drain nodes, the run requests the drain in its
    summary.json.

    \b
    rrl drain quick n042 --reason "fan is loud"
    rrl undrain quick n042   removes only a drain that this run has set
    """
    from .run import control as command

    raise typer.Exit(command.drain(run, node, reason, wait=wait))


@app.command(short_help="Use a node again.")
def undrain(
    run: NamedRun,
    node: Node,
    wait: Annotated[bool, typer.Option(help="Wait until it is done, and print the result.")] = True,
) -> None:
    """Use a node again that the run has left.

    Only a drain set by this run is removed. Replicas are placed there once the node's agent has joined.
    """
    from .run import control as command

    raise typer.Exit(command.undrain(run, node, wait=wait))


@app.command(short_help="Inject a fault into a run.")
def inject(
    run: NamedRun,
    fault: Annotated[
        str, typer.Argument(metavar="FAULT", show_default=False, help="kill, freeze, slow, exit, ... (docs/faults.md).")
    ],
    target: Annotated[
        str,
        typer.Option(metavar="ROLE/REPLICA|NODE", show_default=False,
                     help="Also a role (a random replica of it), one rank (trainer/0.1), agent/NODE, standby/NODE"
                          " or manager. Default: a random replica."),
    ] = "",
    at: Annotated[
        str | None,
        typer.Option(metavar="MOMENT", help="step=5, time=90s or phase=train. Default: at once.", show_default=False),
    ] = None,
    seconds: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Duration of the fault. Default: it does not end.",
                                 show_default=False)
    ] = None,
    amount: Annotated[
        float, typer.Option(show_default=False, help="slow: share of speed left; exit: the exit code; delay: ms.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice.", show_default=False)] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the fault; exit code 0 if it was performed.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Inject a fault into a run whose job spec allows it ([faults] allow = true).

    \b
    rrl inject quick kill --target rollout/0                at once
    rrl inject quick freeze --target trainer/0 --for 10s    stop it, and continue it after 10 s
    rrl inject quick crash --target rollout/1 --at step=20  crash its node
    """
    from .run import inject as command

    raise typer.Exit(command.inject(run, fault, target, at, seconds, amount, seed, wait=wait, json=json))


@app.command("rm", short_help="Remove runs that have ended.")
def remove(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", show_default=False, help="Ids, or unambiguous beginnings of ids."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default=False, help='All your runs that ended longer ago than "7d".'),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs that have ended, with their logs and checkpoints, and say how much space that frees.

    Only your own runs are removed. Copy a trained model out of its run's folder first.

    \b
    rrl rm quick-1120-064114       one run
    rrl rm --older-than 7d --yes   for a cron job
    """
    from .run import remove as command

    raise typer.Exit(command.remove(runs or [], older_than, yes=yes))


@app.command("list")
def list_runs(json: Json = False) -> None:
    """List your runs, newest first."""
    from .run import status as command

    raise typer.Exit(command.list_runs(json=json))


@app.command(short_help="List the episodes of a run's agents, or show one as a tree.")
def episodes(
    run: Run = None,
    episode: Annotated[
        int | None, typer.Argument(metavar="EPISODE", help="Number of one episode.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the episodes of a run's agents that its store has, or show one as a tree of its turns.

    \b
    rrl episodes quick       state, attempt, turns, branches, tokens, versions and reward of each
    rrl episodes quick 118   its turns: what was given and sampled, by which weights, and what is trained
    """
    from .agents import episodes as command

    raise typer.Exit(command.episodes(run, episode, json=json))


@app.command(short_help="Show how agents outside of a run reach it.")
def endpoint(run: Run = None, json: Json = False) -> None:
    """Show where agents outside of a run reach its endpoint, and how they open an episode.

    The job must have a table [roles.endpoint]. Prints a key with which episodes of the run are opened: keep it secret.
    """
    from .agents import endpoint as command

    raise typer.Exit(command.endpoint(run, json=json))


@app.command(short_help="Hold the calls of an outside agent while a run's endpoint restarts.")
def relay(
    run: Run = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one, which is printed.")
    ] = 8000,
) -> None:
    """Serve a relay beside an agent outside of a run; the agent uses it as its base URL.

    The relay passes every call to the endpoint of the run, and holds it while the endpoint restarts: the agent sees a
    slower answer, and a stream goes on at the token that the agent has. Listens on 127.0.0.1 until Ctrl-C.

    \b
    rrl relay quick               base URL http://127.0.0.1:8000/v1
    rrl relay quick --port 8123
    """
    from .agents import relay as command

    raise typer.Exit(command.relay(run, port))


@app.command(short_help="Check a job spec; show what would be submitted.")
def check(
    job: JobFile,
    task: Annotated[
        bool,
        typer.Option("--task/--no-task", help="Whether to build and try the task here. Without the packages it needs,"
                                              " for example on a login node, it is not tried."),
    ] = True,
    json: Json = False,
) -> None:  # fmt: skip
    """Check a job spec; print it with every default, exactly what would be submitted, and two items of its task.

    The task is tried on this machine: prompts and answers of 100 items, and the rewards of a few answers. Changes
    nothing.
    """
    from .job import check as command

    raise typer.Exit(command.check(job, task=task, json=json))


_LIKE_SBATCH = "As for sbatch. Default: that of Slurm."
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
    from .doctor import command
    from .doctor.facts import DoctorOptions

    raise typer.Exit(command.doctor(DoctorOptions(partition, account, qos), consent=yes, json=json))


@app.command(short_help="Write a commented job.toml for this site.")
def init(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write.")] = Path("job.toml"),
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    partition: Partition = "", account: Account = "", qos: Qos = "", yes: Consent = None,
) -> None:  # fmt: skip
    """Write a commented job.toml that fits what rrl doctor finds here: the quickstart's task, on Slurm if there is one.

    \b
    rrl init                           job.toml in this folder
    rrl init -p gpu --out big.toml     for a partition of your choice
    """
    from .doctor.facts import DoctorOptions
    from .job import init as command

    raise typer.Exit(command.init(out, DoctorOptions(partition, account, qos), force=force, consent=yes))


@app.command(short_help="Run a manager here for a run that has none.")
def manage(run: NamedRun) -> None:
    """Run a manager here for a run that has none, for example after a reboot of the machine that managed a local run.

    It takes over the roles that still work, or starts them again from the last committed step. Ctrl-C ends only this
    manager; the roles continue. rrl status says when a run needs this command. On Slurm the next manager job starts by
    itself.
    """
    from .run import submit as command

    raise typer.Exit(command.manage(run))


app.add_typer(health)
