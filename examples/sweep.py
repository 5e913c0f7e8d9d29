"""Train with three learning rates at the same time, and name the run with the best reward.

    .venv/bin/python examples/sweep.py examples/quickstart.toml

On Slurm the three runs wait and work at the same time; on a local machine they share its cores. Ctrl-C ends only this
program: the runs continue (rrl list).
"""

from __future__ import annotations

import sys

import rrl

LEARNING_RATES = (1e-4, 3e-4, 1e-3)


def sweep(job: str) -> rrl.Run:
    """Submit the job with each learning rate, and return the run whose last ten steps have the best mean reward."""
    runs = {rate: rrl.submit(job, set={"roles.trainer.learning_rate": rate}) for rate in LEARNING_RATES}
    rewards: dict[rrl.Run, float] = {}
    for rate, run in runs.items():
        try:
            rewards[run] = run.wait().reward_last10 or 0.0
            print(f"learning rate {rate:g}: reward {rewards[run]:.2f} ({run.id})")
        except rrl.OperationFailed as error:  # the other runs may still succeed
            print(f"learning rate {rate:g}: {error}")
    return max(rewards, key=lambda run: rewards[run])


if __name__ == "__main__":
    print(f"the best: {sweep(sys.argv[1]).id}")
