"""Commands that change a run while it is at work. Each imports its module only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..common.arguments import Json, NamedRun
from ..common.completion import faults, nodes, pools, replicas, targets
from .app import app


@app.command(short_help="Restart one replica of a run.")
def restart(
    run: NamedRun,
    replica: Annotated[
        str,
        typer.Argument(
            metavar="ROLE/REPLICA", show_default=False, autocompletion=replicas, help="trainer/0, rollout/3."
        ),
    ],
    wait: Annotated[bool, typer.Option(help="Wait until the replica has joined again.")] = True,
) -> None:
    """Restart one replica.

    Its process is ended, and a new process is started. A trainer restarts with all its ranks; no committed step is
    lost.
    """
    from ..run import control as command

    raise typer.Exit(command.restart(run, replica, wait=wait))


@app.command(short_help="Set the number of replicas of an elastic rollout pool.")
def resize(
    run: NamedRun,
    pool: Annotated[
        str, typer.Argument(metavar="POOL", show_default=False, autocompletion=pools, help="burst of [rollouts.burst].")
    ],
    replicas: Annotated[
        str, typer.Argument(metavar="N", show_default=False, help="Number of replicas; auto: the run chooses it.")
    ],
    wait: Annotated[bool, typer.Option(help="Wait until the manager has taken the command.")] = True,
) -> None:
    """Hold an elastic rollout pool at a number of replicas, between its min and max.

    The run requests and releases nodes until the pool has this number, as far as its node hours last. The pool keeps
    the number until the run is resumed, or until it is auto again.

    \b
    rrl resize quick burst 6
    rrl resize quick burst auto
    """
    from ..run import control as command

    raise typer.Exit(command.resize(run, pool, replicas, wait=wait))


Node = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node in Slurm.", show_default=False, autocompletion=nodes)
]


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
    from ..run import control as command

    raise typer.Exit(command.drain(run, node, reason, wait=wait))


@app.command(short_help="Use a node again.")
def undrain(
    run: NamedRun,
    node: Node,
    wait: Annotated[bool, typer.Option(help="Wait until it is done, and print the result.")] = True,
) -> None:
    """Use a node again that the run has left.

    Only a drain set by this run is removed. Replicas are placed on the node once its agent has joined.
    """
    from ..run import control as command

    raise typer.Exit(command.undrain(run, node, wait=wait))


@app.command(short_help="Inject a fault into a run.")
def inject(
    run: NamedRun,
    fault: Annotated[
        str,
        typer.Argument(
            metavar="FAULT",
            show_default=False,
            autocompletion=faults,
            help="kill, freeze, slow, exit, ... (docs/faults.md).",
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            metavar="ROLE/REPLICA|NODE",
            show_default=False,
            autocompletion=targets,
            help="Also a role (a random replica of it), one rank (trainer/0.1), agent/NODE, standby/NODE,"
            " guest/NODE or manager. Default: a random replica.",
        ),
    ] = "",
    at: Annotated[
        str | None,
        typer.Option(metavar="MOMENT", help="step=5, time=90s or phase=train. Default: at once.", show_default=False),
    ] = None,
    seconds: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TIME", help="Duration of the fault. Default: it does not end.", show_default=False
        ),
    ] = None,
    amount: Annotated[
        float, typer.Option(show_default=False, help="slow: share of speed left; exit: the exit code; delay: ms.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choice.", show_default=False)] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the fault; exit code 0 if it was performed.")] = False,
    json: Json = False,
) -> None:
    """Inject a fault into a run whose job spec allows it ([faults] allow = true).

    \b
    rrl inject quick kill --target rollout/0                at once
    rrl inject quick freeze --target trainer/0 --for 10s    stop it, and continue it after 10 s
    rrl inject quick crash --target rollout/1 --at step=20  crash its node
    """
    from ..run import inject as command

    raise typer.Exit(command.inject(run, fault, target, at, seconds, amount, seed, wait=wait, json=json))
