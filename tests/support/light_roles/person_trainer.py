"""A trainer without a model that waits for a person before its first step: ``person_trainer.py SECONDS``."""

from __future__ import annotations

import sys

import rrl
from rrl.tests.support.light_roles.paced_trainer import publish


def main() -> None:
    with rrl.join() as me:
        publish(me, me.committed or 0)
        with rrl.waiting("a person who evaluates the first weights"):
            me.stopping.wait(float(sys.argv[1]))
        for batch in me.batches(after=me.committed or 0):
            with me.phase("train"):
                file = me.checkpoint_dir(batch.number) / "step.json"
                file.write_text("{}")
            me.commit(batch.number, [file])
            publish(me, batch.number)


if __name__ == "__main__":
    main()
