"""A trainer without a model: its weights are the step number, and its checkpoint contains its input.

It writes the trajectories of each step to ``batches/<step>.<incarnation>.json`` in the run directory, and those of each
part to ``parts/<step>.<part>.<incarnation>.json``. The ranks of a gang wait for each other at every step by files in
``gang/``. If a rank is lost, the others keep waiting for it, as in a collective.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import rrl

STEP_SECONDS = float(os.environ.get("RRL_TEST_STEP_SECONDS", "0.1"))
HOLD, HELD = "hold.trainer", "held.trainer"
"""Names of control files in the run directory. While ``hold.trainer`` exists, the trainer waits after the publishing of
the first step since its last commit. It creates ``held.trainer`` when it begins to wait."""


def main() -> None:
    with rrl.join() as me:
        observed = me.run_dir.path / "batches"
        observed.mkdir(exist_ok=True)
        step = me.committed or 0
        meet(me, "start")
        if me.rank:
            _follow(me, step)
            return
        publish(me, step)
        taken: list[dict[str, Any]] = []
        for part in me.parts(after=step):
            with me.phase("train"):
                time.sleep(STEP_SECONDS)
                if part.index == 0:
                    taken = []
                taken += [
                    {
                        "id": t.id,
                        "tokens": t.tokens,
                        "marks": t.logprobs,
                        "weights": [v.step for v in t.versions],
                        "extras": {name: data.hex() for name, data in t.extras.items()},
                    }
                    for t in part.trajectories
                ]
                _note(me, part)
                if not part.last:
                    continue
                path = observed / f"{part.number}.{me.launch.incarnation.number}.json"
                path.write_text(json.dumps(taken))
                meet(me, str(part.number))
            step = part.number
            if me.job.trainer.next_checkpoint_step(step - 1, me.job.steps) == step:
                _commit(me, step, {"tokens": float(sum(len(one["tokens"]) for one in taken))})
            publish(me, step)
            if step == (me.committed or 0) + 1:
                _hold(me)
        if step > (me.committed or 0):  # the trainer was stopped between two checkpoints
            _commit(me, step)


def _commit(me: rrl.Worker, step: int, metrics: dict[str, float] | None = None) -> None:
    with me.phase("checkpoint"):
        file = me.checkpoint_dir(step) / "step.json"
        file.write_text(json.dumps(step))
        with file.open() as opened:
            os.fsync(opened.fileno())
        me.commit(step, [file], metrics)


def _hold(me: rrl.Worker) -> None:
    while (me.run_dir.path / HOLD).exists() and not me.stopping.is_set():
        (me.run_dir.path / HELD).touch()
        time.sleep(0.01)


def _note(me: rrl.Worker, part: rrl.Part) -> None:
    folder = me.run_dir.path / "parts"
    folder.mkdir(exist_ok=True)
    name = f"{part.number}.{part.index}.{me.launch.incarnation.number}.json"
    noted = {"digest": part.digest, "groups": part.groups, "last": part.last}
    (folder / f".{name}").write_text(json.dumps(noted))
    (folder / f".{name}").rename(folder / name)


def _follow(me: rrl.Worker, step: int) -> None:
    for part in me.parts(after=step):
        with me.phase("train"):
            time.sleep(STEP_SECONDS)
            if part.last:
                meet(me, str(part.number))


def meet(me: rrl.Worker, where: str) -> None:
    """Wait until all ranks of this incarnation have called this function."""
    folder = me.run_dir.path / "gang"
    folder.mkdir(exist_ok=True)
    marks = [folder / f"{where}.{me.launch.incarnation.number}.{rank}" for rank in range(me.world)]
    marks[me.rank].touch()
    while not all(mark.exists() for mark in marks) and not me.stopping.is_set():
        time.sleep(0.01)


def publish(me: rrl.Worker, step: int) -> None:
    with me.phase("publish"):
        me.publish(step, [("step", "uint8", (8,), memoryview(step.to_bytes(8, "big")))])


if __name__ == "__main__":
    main()
