"""``make demo-slurm``: the quickstart on a real Slurm of five nodes on this machine, as a plain user.

Starts the cluster, submits the job, follows the run, and shows Slurm's queue each time the run's steps have changed.
The cluster and all its processes end with this program. The run directory is copied to the caller's runs, where ``rrl
status`` finds it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rrl.core.run_dir import RUNS_ENV, runs_root
from rrl.tests.support.runs import QUICKSTART, RRL
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import exit_on_sigterm

NODES = 5
SQUEUE_INTERVAL_S = 10.0
"""Seconds between two prints of Slurm's queue."""


def main() -> int:
    exit_on_sigterm()
    local = 'kind = "local"'
    toml = QUICKSTART.read_text()
    assert toml.count(local) == 1, "examples/quickstart.toml has no [cluster] kind that this program could replace"
    with SlurmLab.start(nodes=NODES) as lab:
        print(f"Slurm with {NODES} nodes runs in {lab.dir}; submitting as {lab.user}", flush=True)
        job = lab.user_home / "quickstart.toml"
        job.write_text(toml.replace(local, 'kind = "slurm"'))
        job.chmod(0o644)
        runs = lab.user_home / "runs"
        try:
            code = _follow(lab, [RRL, "submit", "--wait", str(job)], {RUNS_ENV: str(runs)})
        except KeyboardInterrupt:
            print("stopping the cluster and all its processes", file=sys.stderr)
            return 130
        kept = keep_runs(runs, runs_root())
    for run in kept:
        print(
            f"The cluster is gone; the run is kept in {run}.\nSee it with: .venv/bin/rrl status {run.name}", flush=True
        )
    return code


def _follow(lab: SlurmLab, submit: list[str], env: dict[str, str]) -> int:
    """Submit the job, print its output and from time to time Slurm's queue, and return the exit code."""
    with lab.popen_as_user(submit, env=env, stdout=-1) as following:
        assert following.stdout is not None
        shown, looked_at = set[str](), time.monotonic()
        for line in following.stdout:
            print(line, end="", flush=True)
            if time.monotonic() - looked_at >= SQUEUE_INTERVAL_S and following.poll() is None:
                looked_at = time.monotonic()
                steps = _squeue(lab, "--steps", "%i|%j|%M|%N")
                if (ids := {row[0] for row in steps}) != shown:
                    shown = ids
                    print_table("squeue", _squeue(lab, "--all", "%i|%j|%M|%N|%T"))
                    print_table("squeue --steps", steps)
    return following.returncode


def _squeue(lab: SlurmLab, option: str, columns: str) -> list[list[str]]:
    return [line.split("|") for line in lab.slurm("squeue", option, "--noheader", f"--format={columns}").splitlines()]


def print_table(title: str, rows: list[list[str]]) -> None:
    """Print id, name, time, nodes and state of jobs or steps; the run's id is removed from the names."""
    print(f"$ {title}")
    for number, name, age, *rest in rows:
        print(f"{number:>10}  {name.partition('.')[2] or name:<20} {age:>6}  {'  '.join(rest)}", flush=True)


def keep_runs(runs: Path, to: Path) -> list[Path]:
    """Copy each ended run in ``runs`` into the folder ``to``, without sockets; return the copies."""

    def special(folder: str, names: list[str]) -> Iterable[str]:
        return [name for name in names if not ((path := Path(folder) / name).is_file() or path.is_dir())]

    to.mkdir(parents=True, exist_ok=True)
    ended = [summary.parent for summary in sorted(runs.glob("*/summary.json"))]
    return [Path(shutil.copytree(run, to / run.name, symlinks=True, ignore=special)) for run in ended]


if __name__ == "__main__":
    sys.exit(main())
