"""``python -m rrl.tests.support.slurm.lab``: installs Slurm, starts and stops labs, and injects failures."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.tests.support.slurm import fault_service
from rrl.tests.support.slurm import root as slurm_root
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.slurm.packages import install, uninstall

_FAULTS = ("crash", "up", "cut", "heal", "delay", "outage")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rrl.tests.support.slurm.lab", description="A real Slurm on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("install", help="install Debian's packages (root)")
    command.add_argument("--accounting", action="store_true", help="also install slurmdbd and a database server")
    commands.add_parser("uninstall", help="remove the packages that install has added, and the labs' user (root)")
    command = commands.add_parser("root", help="fetch the programs of another version, and print their folder")
    command.add_argument("version", choices=slurm_root.SUITES)
    for name, text in (
        ("start", "start a cluster that keeps running"),
        ("stop", "kill a cluster and remove its folder"),
        ("status", "print the nodes' states and the jobs"),
        ("env", "print shell lines to use a cluster"),
        ("crash", "kill all processes of a node"),
        ("up", "start a crashed node"),
        ("cut", "take a node's link down"),
        ("heal", "take a node's link up, without delay"),
        ("delay", "delay a node's packets"),
        ("outage", "stop slurmctld for a while"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--dir", type=Path, required=True, help="the cluster's folder; its path must be short")
        if name in _FAULTS and name != "outage":
            command.add_argument("node")
        if name == "delay":
            command.add_argument("ms", type=float)
        if name in _FAULTS:
            command.add_argument("--seconds", type=float, required=name == "outage", help="duration of the fault (s)")
        if name == "start":
            command.add_argument("--nodes", type=int, default=5)
            command.add_argument("--cpus", type=int, default=8, help="CPUs that each node claims to have")
            command.add_argument("--memory", type=int, default=8000, help="MiB that each node claims to have")
            command.add_argument("--gpus", type=int, default=0, help="number of fake GPUs of each node")
            command.add_argument("--isolated", action="store_true", help="each node has its own network (root)")
            command.add_argument("--accounting", action="store_true", help="run slurmdbd, which enforces limits")
            command.add_argument("--slurm", metavar="VERSION", choices=slurm_root.SUITES, help="run this version")
    try:
        print(_perform(parser.parse_args(argv)))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def _perform(options: argparse.Namespace) -> str:
    if options.command == "install":
        return install(options.accounting)
    if options.command == "uninstall":
        return uninstall()
    if options.command == "root":
        return str(slurm_root.ensure(options.version))
    if options.command == "start":
        lab = SlurmLab.start(
            options.dir,
            nodes=options.nodes,
            cpus=options.cpus,
            memory=options.memory,
            gpus=options.gpus,
            stays=True,
            isolated=options.isolated,
            accounting=options.accounting,
            root=slurm_root.ensure(options.slurm) if options.slurm else None,
        )
        return f"{len(lab.nodes)} nodes idle; jobs are submitted as {lab.user}"
    lab = SlurmLab.load(options.dir)
    if options.command == "stop":
        lab.stop()
        return "stopped"
    if options.command == "env":
        of_user = {name: lab.user_env()[name] for name in ("SLURM_CONF", "RRL_NETWORK", fault_service.ENV)}
        if lab.root:
            of_user["PATH"] = f"{slurm_root.programs_of(lab.root)}:$PATH"
        return "\n".join(f"export {name}={value}" for name, value in of_user.items())
    if options.command in _FAULTS:
        answer = fault_service.request_fault(
            fault_service.socket_of(lab.dir),
            do=options.command,
            node=getattr(options, "node", None),
            ms=getattr(options, "ms", None),
            seconds=options.seconds,
        )
        if not answer.ok:
            raise RuntimeError(answer.detail)
    return "\n".join([*(f"{node} {state}" for node, state in lab.states().items()), *lab.jobs()])
