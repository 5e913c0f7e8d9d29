"""``make demo-slurm``: the quickstart on a real Slurm of five nodes on this machine, as a plain user.

Starts the cluster, submits, follows, and leaves nothing: the cluster and everything on it end with this program.
"""

from __future__ import annotations

import sys

from rrl.core.run_dir import RUNS_ENV
from rrl.tests.support.runs import QUICKSTART, RRL
from rrl.tests.support.slurm.lab import SlurmLab
from rrl.tests.support.supervisor import exit_on_sigterm

NODES = 5


def main() -> int:
    exit_on_sigterm()
    local = 'kind = "local"'
    toml = QUICKSTART.read_text()
    assert toml.count(local) == 1, "the quickstart's cluster kind is not where this program expects it"
    with SlurmLab.start(nodes=NODES) as lab:
        print(f"Slurm with {NODES} nodes runs in {lab.dir}; submitting as {lab.user}", flush=True)
        job = lab.user_home / "quickstart.toml"
        job.write_text(toml.replace(local, 'kind = "slurm"'))
        job.chmod(0o644)
        env = {RUNS_ENV: str(lab.user_home / "runs")}
        follow = lab.popen_as_user([RRL, "submit", "--wait", str(job)], env=env, stdout=sys.stdout.fileno())
        try:
            code = follow.wait()
        except KeyboardInterrupt:
            print("stopping the cluster and everything on it", file=sys.stderr)
            code = 130
        for summary in lab.user_home.glob("runs/*/summary.json"):  # the run directory goes with the cluster
            print(summary.read_text(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
