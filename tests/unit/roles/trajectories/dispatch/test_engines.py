"""The facts that the store has about its rollouts' engines, and the work that each rollout gets because of them."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.trajectories.dispatch.engines import Engines, Known
from rrl.roles.trajectories.dispatch.lengths import GroupEstimate
from rrl.roles.trajectories.dispatch.token_times import TokenTimes

KNOWN = Known(GroupEstimate(math.log(500), 0.1, 0.3), 0, 20)
PLACES = 64
ROLLOUTS = [Incarnation(ReplicaId(f"rollout/{index}"), 1) for index in range(3)]


@pytest.mark.parametrize("token_s", [0.001, 0.3])
def test_new_rollout_gets_as_much_work_as_those_with_known_times(token_s: float) -> None:
    """The engine of a new rollout is assumed to be like the others.

    This also holds if the rollout requested work before any times were known.
    """
    times = defaultdict[Incarnation, TokenTimes](TokenTimes)
    engines = Engines(4_000, lambda trajectory: KNOWN, lambda engine: frozenset(), lambda engine: times[engine])
    for rollout in ROLLOUTS:
        engines.requested(rollout, PLACES)
    waiting = list(range(90))
    engines.share(ROLLOUTS[0], waiting, PLACES)  # computes the loads of all three before any times are known
    for rollout in ROLLOUTS[:2]:
        for running in (1, 8, 64):
            times[rollout].observe(running, token_s * (1 + running / 8))
        engines.appended(rollout, [], (), None)
    shares = [len(engines.share(rollout, waiting, PLACES)) for rollout in ROLLOUTS]
    assert shares == [pytest.approx(30, abs=3)] * 3
