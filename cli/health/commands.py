"""The commands of ``rrl health``, for administrators, with their arguments and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..common.arguments import Json
from ..common.completion import nodes

health = typer.Typer(name="health", help="Health of nodes and site, for administrators.", rich_markup_mode=None)

Histories = Annotated[
    list[Path] | None,
    typer.Option(
        "--history",
        metavar="DIR",
        show_default=False,
        help="Folder of health histories; may be repeated. Default: $RRL_HISTORY.",
    ),
]
Since = Annotated[str, typer.Option(metavar="TIME", help='Since when: "7d" (ago), "2026-11-20".')]


@health.command(short_help="Report on the health of nodes and site.")
def report(
    since: Since = "7d",
    node: Annotated[
        str | None,
        typer.Option(metavar="NODES", show_default=False, autocompletion=nodes, help="Only these nodes: n12, n[1-8]."),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            metavar="table|json|html", help="Format of the report.", autocompletion=lambda: ["table", "json", "html"]
        ),
    ] = "table",
    history: Histories = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", show_default=False, help="Write the report to this file."),
    ] = None,
) -> None:
    """Report on the health of nodes and site, from the findings of all users' runs.

    For each node: verdict, evidence, cost, drain and what to do. For the site: failure rate, mean time between
    failures, causes.

    \b
    rrl health report                           the last week, worst nodes first
    rrl health report --since 28d --node n12    one node
    rrl health report --format html -o r.html   one file with plots, to pass on
    """
    from . import report as command

    raise typer.Exit(command.report(since, node, format, history or [], output))


@health.command("check", short_help="Check whether this node is fit for use.")
def health_check(
    json: Json = False,
    prolog: Annotated[
        bool, typer.Option("--prolog", help="Exit code 2 for FAIL, else 0; the job's GPUs must be free.")
    ] = False,
    epilog: Annotated[
        bool,
        typer.Option("--epilog", help="Like --prolog, but after a job; also remember that the job's GPUs are free."),
    ] = False,
    within: Annotated[str, typer.Option(metavar="TIME", help="Time limit.")] = "20s",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="The site's rules. Default: $RRL_HEALTH_CONFIG, else /etc/rrl/health.toml if it is there.",
        ),
    ] = None,
    checks: Annotated[
        str | None, typer.Option(metavar="A,B", show_default=False, help="Only these checks. Default: all.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(metavar="PATH", show_default=False, help="Path that must answer; repeatable.")
    ] = None,
    rates: Annotated[bool, typer.Option("--rates", help="Read twice, 2 s apart, to find rising counters.")] = False,
    remember: Annotated[
        bool, typer.Option("--remember", help="Remember on this node whether the check passed, for --fresh.")
    ] = False,
    fresh: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            show_default=False,
            help="If the node has passed a remembered full check within this time, skip the check.",
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record findings in the site's history, for rrl health report.")
    ] = False,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            metavar="DIR",
            show_default=False,
            help="Folder of the site's history for --record. Default: $RRL_HISTORY.",
        ),
    ] = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write metrics to this file (*.prom) of node_exporter's textfile collector.",
        ),
    ] = None,
) -> None:
    """Check this node: GPUs, links, kernel log, network, mounts, host. Changes nothing on the node.

    Exit code: 0 OK, 1 WARN, 2 FAIL, 3 UNKNOWN or an error of the check itself.

    \b
    rrl health check                                   everything
    rrl health check --checks mounts,disk --json       two checks, for programs
    rrl health check --prolog --config /etc/rrl/health.toml
    """
    from . import check as command

    options = command.CheckOptions(
        within, config, checks, mount or (), rates, json, prolog, epilog, remember, fresh, record, history, prometheus
    )
    raise typer.Exit(command.check(options))


@health.command("drain-node", short_help="Drain this node, for the hooks in examples/health.")
def drain_node(
    why: Annotated[str, typer.Option(metavar="TEXT", help="What the check found: the reason of the drain.")],
    node: Annotated[
        str | None, typer.Option(metavar="NODE", show_default=False, help="Name of the node. Default: this one.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="The site's rules. Default: $RRL_HEALTH_CONFIG, else /etc/rrl/health.toml if it is there.",
        ),
    ] = None,
) -> None:
    """Drain a node that failed its check, with the reason "rrl:health: TEXT".

    The limit on nodes that hooks may drain ([hooks] of the site's rules) applies. Exit code: 0 drained, 1 not drained
    because of that limit, 3 Slurm refused or did not answer. The outcome is printed.

    \b
    rrl health drain-node --why "mounts: /scratch: did not answer within 15 s"
    """
    from . import hook_drains as command

    raise typer.Exit(command.drain_node(why, node, config))


@health.command("undrain-node", short_help="Take back the hooks' drain of this node.")
def undrain_node(
    node: Annotated[
        str | None, typer.Option(metavar="NODE", show_default=False, help="Name of the node. Default: this one.")
    ] = None,
) -> None:
    """Take back a drain of this node by rrl health drain-node, once the node passes its check again.

    A drain by anybody else stays. Slurm is not queried if the node remembers that it was not drained. Exit code: 0 no
    drain by the hooks is left, 3 Slurm refused or did not answer.
    """
    from . import hook_drains as command

    raise typer.Exit(command.undrain_node(node))


@health.command("drain-requests", short_help="List nodes that an administrator should drain.")
def drain_requests(
    apply: Annotated[
        bool, typer.Option("--apply", help="Drain the nodes in Slurm; needs the rights to do so.")
    ] = False,
    since: Since = "28d",
    history: Histories = None,
    json: Json = False,
) -> None:
    """List the nodes that runs found broken but may not drain, with a command to paste for each, for administrators.

    \b
    rrl health drain-requests            list the nodes, and why
    rrl health drain-requests --apply    drain them; exit code 1 if any was refused
    """
    from . import drain_requests as command

    raise typer.Exit(command.drain_requests(since, history or [], apply=apply, json=json))
