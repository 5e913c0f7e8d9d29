"""A gang without a model whose checkpoint is a tree. Each rank writes a part of it, and a file that is not committed.

Rank 1 of the first incarnation kills itself while it writes its part of step :data:`DIES_AT`. All ranks of the third
kill themselves when step :data:`ALL_DIE_AT` is committed and not yet published. Rank 0 of each later incarnation
creates ``linked.<incarnation>`` in the run directory once it has the folder of the commit, and waits for
``go.<incarnation>`` before it reads from it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import rrl
from rrl.tests.support.light_roles.light_trainer import meet, publish

DIES_AT = 3
ALL_DIE_AT = 4


def main() -> None:
    with rrl.join() as me:
        step = _restored(me)
        if me.rank == 0:
            publish(me, step)
        for batch in me.batches(after=step):
            with me.phase("checkpoint"):
                part = _folder(me, batch.number) / f"rank-{me.rank}" / "deep"
                part.mkdir(parents=True)
                (part / "state").write_text(str(batch.number))
                if (me.launch.incarnation.number, me.rank, batch.number) == (1, 1, DIES_AT):
                    os.kill(os.getpid(), signal.SIGKILL)
                (part / "more").write_text("more")
                part.parent.with_name(f"scratch-{me.rank}").touch()
                meet(me, f"{batch.number}-written")
                if me.rank == 0 and not me.stopping.is_set():
                    me.commit(batch.number, [part.parent.with_name(f"rank-{rank}") for rank in range(me.world)])
            if (me.launch.incarnation.number, batch.number) == (3, ALL_DIE_AT):
                meet(me, "committed")
                os.kill(os.getpid(), signal.SIGKILL)
            if me.rank == 0:
                publish(me, batch.number)


def _restored(me: rrl.Worker) -> int:
    """Return the step that is restored; 0 if nothing is committed."""
    folder, number = me.committed_folder(share=(me.rank, me.world)), me.launch.incarnation.number
    if folder is None:
        return 0
    if me.rank == 0:
        (me.run_dir.path / f"linked.{number}").write_text(str(folder))
        while not (me.run_dir.path / f"go.{number}").exists() and not me.stopping.is_set():
            time.sleep(0.01)
    steps = {int((folder / f"rank-{rank}" / "deep" / "state").read_text()) for rank in range(me.world)}
    assert steps == {me.committed}
    return steps.pop()


def _folder(me: rrl.Worker, step: int) -> Path:
    """Return the folder of a step's checkpoint, which rank 0 makes."""
    file = me.run_dir.path / "gang" / f"folder.{step}.{me.launch.incarnation.number}"
    if me.rank == 0:
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".new").write_text(str(me.checkpoint_dir(step)))
        file.with_suffix(".new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return Path(file.read_text())


if __name__ == "__main__":
    main()
