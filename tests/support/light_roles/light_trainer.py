"""A trainer without a model: its weights are the step's number, its checkpoint is what it was given.

``batches/<step>.<incarnation>.json`` in the run directory tells the test whose tokens went into each step. As a gang
its ranks meet at every step by files (``gang/``): when one is gone, the others wait for it, as in a collective.
"""

from __future__ import annotations

import json
import os
import time

import rrl

STEP_SECONDS = 0.1


def main() -> None:
    with rrl.join() as me:
        observed = me.run_dir.path / "batches"
        observed.mkdir(exist_ok=True)
        step = me.committed or 0
        _meet(me, "start")
        if me.rank:
            _follow(me, step)
            return
        _publish(me, step)
        for batch in me.batches(after=step):
            with me.phase("train"):
                time.sleep(STEP_SECONDS)
                taken = [{"id": t.id, "tokens": t.tokens, "marks": t.logprobs, "weights": [v.step for v in t.versions]}
                         for t in batch.trajectories]  # fmt: skip
                path = observed / f"{batch.number}.{me.launch.incarnation.number}.json"
                path.write_text(json.dumps(taken))
                _meet(me, str(batch.number))
            with me.phase("checkpoint"):
                file = me.checkpoint_dir(batch.number) / "step.json"
                file.write_text(json.dumps(batch.number))
                with file.open() as opened:
                    os.fsync(opened.fileno())
                me.commit(batch.number, [file])
            _publish(me, batch.number)


def _follow(me: rrl.Worker, step: int) -> None:
    for batch in me.batches(after=step):
        with me.phase("train"):
            time.sleep(STEP_SECONDS)
            _meet(me, str(batch.number))


def _meet(me: rrl.Worker, where: str) -> None:
    """Returns once all ranks of this incarnation are there."""
    folder = me.run_dir.path / "gang"
    folder.mkdir(exist_ok=True)
    marks = [folder / f"{where}.{me.launch.incarnation.number}.{rank}" for rank in range(me.world)]
    marks[me.rank].touch()
    while not all(mark.exists() for mark in marks) and not me.stopping.is_set():
        time.sleep(0.01)


def _publish(me: rrl.Worker, step: int) -> None:
    with me.phase("publish"):
        me.publish(step, [("step", "uint8", (8,), memoryview(step.to_bytes(8, "big")))])


if __name__ == "__main__":
    main()
