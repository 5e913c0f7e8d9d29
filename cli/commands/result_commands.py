"""Commands that read what a run leaves behind. Each imports its module only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.arguments import Json, NamedRun
from .app import app


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
    from ..logs import command

    raise typer.Exit(
        command.logs(
            run, selector, follow=follow, lines=lines, since=since, grep=grep, failed=failed, json=json, raw=raw
        )
    )


@app.command(short_help="Explain why a run was repaired, moved or ended.")
def explain(
    run: NamedRun,
    about: Annotated[
        str | None,
        typer.Argument(metavar="ROLE[/REPLICA]|NODE|STEP", show_default=False,
                       help="Only decisions about it: rollout/0, n042, or 120 for training step 120."),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Explain each decision of a run's manager: its evidence, the repair, and whether it worked.

    Also shows what the smaller repairs would have needed, and what was expected by when. Needs no running manager.

    \b
    rrl explain quick             all decisions, in order
    rrl explain quick rollout/0   why rollout/0 was restarted or moved
    rrl explain quick n042        what was decided about a node
    rrl explain quick 120         what happened in training step 120
    """
    from ..results import explain as command

    raise typer.Exit(command.explain_run(run, about, json=json))
