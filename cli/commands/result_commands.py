"""Commands that read the results of a run. Each imports its module only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.arguments import Json, NamedRun, Run
from ..common.completion import selectors
from .app import app


@app.command()
def logs(
    run: Run = None,
    selector: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLE[/REPLICA[#INCARNATION]]",
            show_default=False,
            autocompletion=selectors,
            help="For example rollout, rollout/0, rollout/0#2, agent, manager.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the run ends.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            "-n",
            min=0,
            show_default=False,
            help="Number of the newest lines of each log. Default: 20; all with --since or --grep.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help='Only lines since "10m" (ago) or "2026-11-20T09:00".', show_default=False),
    ] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only lines that match this expression.", show_default=False)
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show each failure: its reason, and the last lines before it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead, one object a line, for programs.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not escape control characters (colours, cursor, title).")
    ] = False,
) -> None:
    """Show the output of a run's processes, merged by time.

    \b
    rrl logs                               the end of every log of the newest run
    rrl logs quick                         the same for the run whose id begins with "quick"
    rrl logs quick rollout/0 -f            all incarnations of one replica, and later ones
    rrl logs quick rollout/0#2             one incarnation
    rrl logs quick --failed                each failure, with the lines before it
    rrl logs quick --since 10m --grep OOM  lines of the last 10 minutes that contain OOM
    """
    from ..logs import command

    raise typer.Exit(
        command.logs(
            run, selector, follow=follow, lines=lines, since=since, grep=grep, failed=failed, json=json, raw=raw
        )
    )


@app.command(short_help="Print a line for each committed step of a run.")
def metrics(
    run: Run = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of JSON.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new steps too, until the run ends.")] = False,
) -> None:
    """Print each committed step of a run once, as one JSON object a line (docs/tracking.md).

    A line has the step's time and rates, staleness and metrics, and the failures and restarts since the previous step.

    \b
    rrl metrics quick                  all steps
    rrl metrics quick --follow | jq .metrics.reward
    rrl metrics quick --csv > quick.csv
    """
    from ..results import track as command

    raise typer.Exit(command.metrics(run, as_csv=csv, follow=follow))


@app.command(short_help="Show what the model answered in a step.")
def samples(
    run: Run = None,
    step: Annotated[
        int | None,
        typer.Argument(metavar="STEP", show_default=False, help="A committed step. Default: the newest one."),
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="The N trajectories of highest reward.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="The N trajectories of lowest reward.")
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=0, metavar="G", show_default=False, help="The answers to one prompt.")
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="TEXT", show_default=False, help="Those with this text in the prompt or answer."),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids instead of text.")] = False,
    json: Json = False,
) -> None:
    """Show prompts, answers, rewards and advantages of a committed step (docs/samples.md).

    The store keeps some trajectories of each step, and all trajectories of the newest steps: --best, --worst, --group
    and --grep look through all that are there. The run may be at work or have ended.

    \b
    rrl samples quick              the newest step
    rrl samples quick 40 --worst 5
    rrl samples quick --grep "I cannot"
    """
    from ...api.sampled_steps import Selection
    from ..results import step_samples as command

    selection = Selection(best, worst, group, grep)
    raise typer.Exit(command.samples(run, step, selection, tokens=tokens, json=json))


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


@app.command(short_help="Send the steps of a run to experiment trackers.")
def track(
    run: NamedRun,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="TRACKER",
            show_default=False,
            help="Name in [track] to, several times or with commas. Default: those of the job.",
        ),
    ] = None,
) -> None:
    """Send the steps of a run to experiment trackers, each step once, also of a run that has ended.

    A run with [track] in its job does this by itself (docs/tracking.md). Keys and addresses of trackers come from
    this shell: WANDB_API_KEY, MLFLOW_TRACKING_URI. While the run goes on, its new steps are sent too.

    \b
    rrl track quick --to tensorboard
    rrl track quick --to wandb,mlflow
    """
    from ..results import track as command

    raise typer.Exit(command.track(run, to or []))


@app.command(short_help="Write a trained model as a Hugging Face folder.")
def export(
    run: NamedRun,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="A step whose checkpoint is kept. Default: the newest such step."),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Write only the adapter (LoRA), as peft does, instead of the merged model."),
    ] = False,
    json: Json = False,
) -> None:
    """Write a committed checkpoint as a Hugging Face folder: weights (safetensors), configuration and tokenizer.

    The run may still be running, since it is only read. The files must have the digests that were committed. The folder
    appears when it is complete. Needs no GPU.

    \b
    rrl export quick models/quick            the newest checkpoint
    rrl export quick models/s40 --step 40    the checkpoint of step 40 (older ones: [roles.trainer] keep_checkpoints)
    """
    from ...api import run as api
    from ..common.output import print_json, print_line
    from ..views.formatting import size

    done = api.run(run).export(folder, step, adapter=adapter)
    if json:
        print_json(done)
    else:
        print_line(f"step {done.step} of {done.run}: {done.folder}  ({size(done.nbytes)}, {done.dtype})")


@app.command(short_help="Account for a run's time and GPUs.")
def report(
    run: Run = None,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second run, to compare.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page instead.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Account for a run: effective training time, time lost by cause and by stage, and GPU-hours (docs/report.md).

    Two runs are compared: rewards and evaluations at equal steps and at equal times, and the keys of job.toml that
    differ. The page also has a lane for each replica, decisions with their evidence, and curves. Only files of the runs
    are read, so a run may be at work or have ended.

    \b
    rrl report quick                        how the time of a run was used
    rrl report quick --html quick.html      the same as a page
    rrl report quick slow                   the same of two runs, and how they compare
    """
    from ..results import reports as command

    raise typer.Exit(command.report(run, other, html, json=json))


@app.command(short_help="Explain why a run was repaired, moved or ended.")
def explain(
    run: NamedRun,
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLE[/REPLICA]|NODE|STEP",
            show_default=False,
            help="Only decisions about a replica, a node or a training step: rollout/0, n042, 120.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain each decision of a run's manager: its evidence, the repair, and whether it worked.

    Also shows what the smaller repairs would have needed, and which effect was expected by when. Needs no running
    manager.

    \b
    rrl explain quick             all decisions, in order
    rrl explain quick rollout/0   why rollout/0 was restarted or moved
    rrl explain quick n042        what was decided about a node
    rrl explain quick 120         what happened in training step 120
    """
    from ..results import explain as command

    raise typer.Exit(command.explain_run(run, about, json=json))
