"""A user's own trainer with two ranks, each of which receives its share of every batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rrl.core.types import Outcome
from rrl.tests.support.runs import LIGHT, check_sound, light_job, submit_here

STEPS = 8

TRAINER = """
import json
import time

import rrl


def publish(step):
    with me.phase("publish"):
        me.publish(step, [("step", "uint8", (8,), memoryview(step.to_bytes(8, "big")))])


with rrl.join() as me:
    folder = me.run_dir.path / "shares"
    folder.mkdir(exist_ok=True)
    if me.rank == 0:
        publish(me.committed or 0)
    for batch in me.batches(after=me.committed, share=(me.rank, me.world)):
        with me.phase("train"):
            mine = batch.arrays
            note = {"digest": batch.digest, "all": mine.whole.ids.tolist(), "tokens": mine.tokens.tolist()}
            note |= {"ids": mine.ids.tolist(), "groups": mine.groups.tolist(), "starts": mine.starts.tolist()}
            note |= {"batches": len(mine.micro_batches(8))}
            notes = [folder / f"{batch.number}.{me.launch.incarnation.number}.{rank}" for rank in range(me.world)]
            begun = folder / f".{notes[me.rank].name}"
            begun.write_text(json.dumps(note))
            begun.rename(notes[me.rank])
            while not all(note.exists() for note in notes) and not me.stopping.is_set():
                time.sleep(0.01)  # as in a collective
        if me.rank == 0:
            with me.phase("checkpoint"):
                file = me.checkpoint_dir(batch.number) / "state"
                file.write_text("state")
                me.commit(batch.number, [file])
            publish(batch.number)
"""
KILL = """
[[faults.planned]]
kind = "kill"
target = "trainer/0.1"
at = "step=3"
"""


def test_two_ranks_divide_every_batch_although_one_of_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    toml = light_job("local", STEPS, rollouts=1, spares=0, warm=False, one_node=True, extra=KILL)
    own = toml.replace(f"{LIGHT}/light_trainer.py", "trainer.py").replace(
        "[roles.trainer]", "[roles.trainer]\nranks = 2"
    )
    run = submit_here(tmp_path, own)
    state = run.wait_end()
    assert (state.outcome, state.step) == (Outcome.COMPLETED, STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    notes: dict[int, dict[str, dict[int, dict[str, Any]]]] = {}
    for path in (run.run.path / "shares").iterdir():
        step, incarnation, rank = path.name.split(".")
        notes.setdefault(int(step), {}).setdefault(incarnation, {})[int(rank)] = json.loads(path.read_text())
    assert sorted(notes) == list(range(1, STEPS + 1))
    assert {incarnation for of_step in notes.values() for incarnation in of_step} == {"1", "2"}
    audit = json.loads((run.run.store / "audit.json").read_bytes())
    for number, incarnations in notes.items():
        digests = {note["digest"] for ranks in incarnations.values() for note in ranks.values()}
        assert len(digests) == 1, "an incarnation got another batch"
        first, second = next(ranks for ranks in incarnations.values() if len(ranks) == 2).values()
        assert sorted(first["ids"] + second["ids"]) == first["all"] == second["all"]
        bound = [group for part in audit["parts"][str(number)] for group in part]
        assert sorted({*first["groups"], *second["groups"]}) == sorted(bound)
        assert not set(first["groups"]) & set(second["groups"]), "a group was split"
        assert all(note["starts"][-1] == len(note["tokens"]) > 0 for note in (first, second))
        assert first["batches"] == second["batches"]
