"""A trainer without a model whose steps have equal durations, independently of the load of the machine."""

from __future__ import annotations

import json
import os
import time

import rrl

PACE_S = 2.0
"""Seconds from the end of one step to the end of the next one, unless data, checkpoint and commit take longer."""


def main() -> None:
    with rrl.join() as me:
        publish(me, me.committed or 0)
        ended = time.monotonic()
        for part in me.parts(after=me.committed or 0):
            if not part.last:
                continue
            with me.phase("train"):
                time.sleep(max(0.0, ended + PACE_S - time.monotonic()))
            ended = time.monotonic()
            with me.phase("checkpoint"):
                file = me.checkpoint_dir(part.number) / "step.json"
                file.write_text(json.dumps(part.number))
                with file.open() as opened:
                    os.fsync(opened.fileno())
                me.commit(part.number, [file])
            publish(me, part.number)


def publish(me: rrl.Worker, step: int) -> None:
    with me.phase("publish"):
        me.publish(step, [("step", "uint8", (8,), memoryview(step.to_bytes(8, "big")))])


if __name__ == "__main__":
    main()
