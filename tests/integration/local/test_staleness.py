"""``staleness = 0`` in a whole run: each step trains only on-policy tokens, even after the trainer was killed."""

from __future__ import annotations

import json
from pathlib import Path

from rrl.core.types import ReplicaId
from rrl.tests.support.runs import check_sound, light_job, submit_here

TRAINER = ReplicaId("trainer/0")
KILL = '[[faults.planned]]\nkind = "kill"\ntarget = "trainer/0"\nat = "step=2"\n'


def test_with_a_staleness_of_zero_each_step_is_on_policy_even_after_the_trainer_died(tmp_path: Path) -> None:
    toml = light_job("local", 6, spares=0, warm=False, one_node=True, extra=KILL).replace(
        "[sampling]", "[sampling]\nstaleness = 0"
    )
    run = submit_here(tmp_path, toml)
    state = run.wait_end()
    assert (state.outcome, state.step) == ("completed", 6), state.why
    assert state.replica(TRAINER).incarnation_number == 2
    run.wait_gone()
    check_sound(run.run)
    observed = set()
    for path in (run.run.path / "batches").glob("*.json"):
        number = int(path.name.partition(".")[0])
        assert {step for one in json.loads(path.read_text()) for step in one["weights"]} == {number - 1}
        observed.add(number)
    assert observed == set(range(1, 7))
    audit = json.loads((run.run.store / "audit.json").read_text())
    assert set(audit["dropped"]) <= {"the run is complete"}, (
        "a group was dropped for its age, although steps wait for groups"
    )
    assert (run.summary()["stale_groups"], run.summary()["max_age"], audit["max_age"]) == (0, 0, 0)
