"""Extras of a rollout of one's own reach a trainer of one's own with exactly their tokens, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import struct
from pathlib import Path

from rrl.core.types import ReplicaId
from rrl.tests.support.runs import check_sound, joined_incarnations, light_job, submit_here

STEPS = 16
EXTRAS = 'extras.place.per_token = "5B"'


def test_extras_of_continued_trajectories_are_exact_although_rollout_and_store_are_killed(tmp_path: Path) -> None:
    toml = light_job("local", STEPS, spares=0, warm=False, one_node=True, extra='[recovery]\nbackoff = "100ms"\n')
    run = submit_here(tmp_path, toml.replace("[sampling]\n", f"[sampling]\n{EXTRAS}\n"))
    before = joined_incarnations(run)
    run.hold_in_the_middle(0)
    for victim in ("rollout/0", "trajectories/0"):
        pid = before[ReplicaId(victim)][1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    run.let_go(0)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", STEPS), state.why
    run.wait_gone()
    check_sound(run.run)
    assert run.continued(-1.0), "no trajectory was begun by the killed rollout and finished by another incarnation"
    trained = [one for path in run.run.path.glob("batches/*.json") for one in json.loads(path.read_text())]
    assert len({one["id"] for one in trained}) == STEPS * 8
    for one in trained:
        places = b"".join(struct.pack("<IB", one["id"], offset) for offset in range(len(one["tokens"])))
        assert one["extras"] == {"place": places.hex()}
