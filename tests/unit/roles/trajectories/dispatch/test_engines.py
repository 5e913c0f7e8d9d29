"""The facts that the store has about its rollouts' engines, and the work that each rollout gets because of them."""

from __future__ import annotations

from collections import defaultdict

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.trajectories.dispatch.engines import Engines
from rrl.roles.trajectories.dispatch.token_times import TokenTimes

PLACES = 64
ROLLOUTS = [Incarnation(ReplicaId(f"rollout/{index}"), 1) for index in range(3)]


@pytest.mark.parametrize("token_s", [0.001, 0.3])
def test_new_rollout_gets_as_much_work_as_those_with_known_times(token_s: float) -> None:
    """The engine of a new rollout is assumed to be like the others."""
    times = defaultdict[Incarnation, TokenTimes](TokenTimes)
    engines = Engines(lambda engine: frozenset(), lambda engine: times[engine])
    for rollout in ROLLOUTS:
        engines.requested(rollout, PLACES)
    for rollout in ROLLOUTS[:2]:
        for running in (1, 8, 64):
            times[rollout].observe(running, token_s * (1 + running / 8))
    shares = [len(engines.share(rollout, list(range(90)), PLACES)) for rollout in ROLLOUTS]
    assert shares == [pytest.approx(30, abs=3)] * 3
