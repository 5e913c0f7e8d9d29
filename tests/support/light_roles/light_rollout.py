"""A rollout without a model. It answers each prompt token by token, with its incarnation number as log-probability.

Worker API, store and weight transport are real; only the computation is missing. The rollout is slow on purpose, so
that there are always unfinished trajectories when it is killed.
"""

from __future__ import annotations

import os
import struct
import time

import rrl
from rrl.core.types import Version
from rrl.roles.trajectories.types import Item, Segment
from rrl.roles.worker.work_items import WorkLease

TOKEN_SECONDS = 0.05
EOS = 1
BEST_RATE_ENV = "RRL_TEST_BEST_RATE"
"""Environment variable with a learning rate. If it is set, answers are right only in a job that has this learning
rate."""
HOLD = "hold.{}"
"""Name of a control file in the run directory, with the index of a rollout, or with ``burst-0`` for ``burst/0`` of a
further pool. While it exists, that rollout stops in the middle of its work and creates ``held.<index>``. A test that
kills it then knows that its trajectories are unfinished."""
FURTHER_MARK = -10_000.0
"""Log-probability that rollouts of further pools add to theirs."""


def main() -> None:
    with rrl.join() as me:
        print(f"{me.launch.incarnation} is here", flush=True)
        best_rate = float(os.environ.get(BEST_RATE_ENV, me.job.trainer.learning_rate))
        right = me.job.trainer.learning_rate == best_rate
        version = Version(0, 0)
        for work in me.work(at_most=8):
            if new := me.new_weights():
                version = new.version
                assert bytes(new.flat) == version.step.to_bytes(8, "big"), "weights of another version"
            with me.phase("generate"):
                answer(me, work, version, right)


def answer(me: rrl.Worker, work: WorkLease, version: Version, right: bool = True) -> None:
    """Answer all prompts of a lease, token by token."""
    role, index = me.launch.incarnation.replica.split("/")
    mark = -(int(index) * 100.0 + me.launch.incarnation.number) + (0.0 if role == "rollout" else FURTHER_MARK)
    progress = {item.trajectory: sum(len(s.tokens) for s in item.so_far) for item in work.items}
    while progress:
        time.sleep(TOKEN_SECONDS)
        segments = [
            _next(item, progress[item.trajectory], mark, version, right, bool(me.job.sampling.extras))
            for item in work.items
            if item.trajectory in progress
        ]
        finished = [s.trajectory for s in segments if s.tokens == (EOS,)]
        lost = work.append(segments, finished)
        if not finished:
            _hold(me)
        for segment in segments:
            progress[segment.trajectory] += 1
        for trajectory in (*finished, *lost):
            progress.pop(trajectory, None)


def _hold(me: rrl.Worker) -> None:
    index = me.launch.incarnation.replica.removeprefix("rollout/").replace("/", "-")
    hold = me.run_dir.path / HOLD.format(index)
    while hold.exists():
        (me.run_dir.path / f"held.{index}").touch()
        time.sleep(TOKEN_SECONDS)


def _next(item: Item, offset: int, mark: float, version: Version, right: bool, marked: bool) -> Segment:
    """Return the next token of the answer: the prompt's digit four times (in wrong answers twice), then the end.

    ``mark`` is the log-probability of the token. With ``marked``, the extra ``place`` has its trajectory and offset.
    """
    token = EOS if offset == (4 if right else 2) else item.prompt[0]
    extras = {"place": struct.pack("<IB", item.trajectory, offset)} if marked else {}
    return Segment(item.trajectory, offset, (token,), (mark,), version, extras=extras)


if __name__ == "__main__":
    main()
