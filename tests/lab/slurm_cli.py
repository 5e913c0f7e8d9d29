"""``python -m rrl.tests.lab.slurm``: install, start, stop, status, env, crash, up."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rrl.tests.lab.slurm import SlurmLab, missing

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")


def install() -> str:
    """Install Debian's packages where something is missing (root only). Raises RuntimeError with what to do instead."""
    if not missing():
        return "Slurm and munge are installed"
    wanted = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"not installed: {', '.join(missing())}; ask root to run: {' '.join(wanted)}")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(wanted, env=env, capture_output=True).returncode:  # the package lists may be old or absent
        subprocess.run(["apt-get", "update"], env=env, check=True, capture_output=True)
        subprocess.run(wanted, env=env, check=True)
    if missing():
        raise RuntimeError(f"installed {' '.join(PACKAGES)}, and yet these are not there: {', '.join(missing())}")
    return "installed " + " ".join(PACKAGES)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rrl.tests.lab.slurm", description="A real Slurm on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install Debian's packages (root)")
    for name, text in (("start", "start a cluster that stays"), ("stop", "kill it and remove its folder"),
                       ("status", "states of its nodes, and its jobs"), ("env", "shell lines to use it"),
                       ("crash", "kill everything of a node"), ("up", "start a crashed node")):  # fmt: skip
        command = commands.add_parser(name, help=text)
        command.add_argument("--dir", type=Path, required=True, help="its folder; short, since sockets lie in it")
        if name in ("crash", "up"):
            command.add_argument("node")
        if name == "start":
            command.add_argument("--nodes", type=int, default=5)
            command.add_argument("--cpus", type=int, default=8, help="that each node claims to have")
            command.add_argument("--memory", type=int, default=8000, help="MiB that each node claims to have")
            command.add_argument("--gpus", type=int, default=0, help="false GPUs of each node")
    try:
        print(_perform(parser.parse_args(argv)))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


def _perform(asked: argparse.Namespace) -> str:
    if asked.command == "install":
        return install()
    if asked.command == "start":
        lab = SlurmLab.start(
            asked.dir, nodes=asked.nodes, cpus=asked.cpus, memory=asked.memory, gpus=asked.gpus, stays=True
        )
        return f"{len(lab.nodes)} nodes idle; jobs are submitted as {lab.user}"
    lab = SlurmLab.load(asked.dir)
    if asked.command == "stop":
        lab.stop()
        return "stopped"
    if asked.command == "env":
        return f"export SLURM_CONF={lab.conf}"
    if asked.command in ("crash", "up"):
        getattr(lab, asked.command)(asked.node)
    return "\n".join([*(f"{node} {state}" for node, state in lab.states().items()), *lab.jobs()])
