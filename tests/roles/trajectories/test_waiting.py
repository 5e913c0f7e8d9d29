"""``late = "wait"``: no token is too old when it is trained, no group is dropped for its age, nothing waits for ever."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrl.roles.trajectories.types import Denied, Done, NotYet
from rrl.tests.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    generate,
    lease,
    open_store,
    score,
    segment,
)
from rrl.tests.roles.trajectories.virtual_run import BROKEN, Setting, VirtualRun

SIZE = BATCH * GROUP
"""trajectories of a step"""
MAX_TICKS = 3000
"""in which the next few steps must come about once nothing goes wrong any more: some 20 times what they take"""


# ── whatever happens ───────────────────────────────────────────────────────────────────────────────────────────────
@st.composite
def _settings(draw: st.DrawFn) -> Setting:
    staleness = draw(st.integers(0, 4))
    return Setting(
        staleness=staleness,
        groups=draw(st.integers(1, 3)),
        size=draw(st.integers(2, 3)),
        ahead=draw(st.integers(0, 6)),
        uncommitted=draw(st.integers(0, 3)),
        rollouts=draw(st.integers(1, 3)),
        step_ticks=draw(st.integers(1, 12)),
        publish_every=draw(st.integers(1, staleness + 1)),
        fetch_chance=draw(st.sampled_from([0.05, 0.3, 1.0])),
        segment=draw(st.integers(1, 8)),
        unaskable=draw(st.sampled_from([0.0, 0.2])),
        unscorable=draw(st.sampled_from([0.0, 0.05])),
    )


_Mishap = st.tuples(
    st.integers(0, 25), st.sampled_from(["rollout", "rollout", "trainer", "store", "resume"]), st.integers(0, 4)
)
"""ticks until it, what happens, and to which rollout or with which limit"""


@settings(max_examples=60, deadline=None)
@given(setting=_settings(), mishaps=st.lists(_Mishap, max_size=15), seed=st.integers(0, 2**32))
def test_no_token_is_too_old_no_group_is_dropped_for_age_and_each_step_comes_about(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, mishaps: list[tuple[int, str, int]], seed: int
) -> None:
    run = VirtualRun(tmp_path_factory.mktemp("run"), setting, seed)
    resumed = {0: setting.staleness}
    for ticks, what, n in mishaps:
        for _ in range(ticks):
            run.tick()
        if what == "rollout":
            run.kill_rollout(f"rollout/{n % setting.rollouts}")
        elif what == "trainer":
            run.kill_trainer()
        elif what == "store":
            run.restart_store()
        else:
            before = run.store.audit()
            run.resume(max(n, setting.publish_every - 1))
            resumed[run.bound()] = run.setting.staleness
            dropped = _stale(run.store.audit().dropped) - _stale(before.dropped)
            assert not dropped or (run.setting.staleness or 0) < (setting.staleness or 0), "the limit did not shrink"
            setting = run.setting
    stale = _stale(run.store.audit().dropped)
    target, ticks = run.bound() + setting.groups + 8, 0
    while run.bound() < target:
        run.tick()
        ticks += 1
        assert ticks < MAX_TICKS, f"step {run.bound() + 1} does not come about: {run.store.waiting(run.bound() + 1)}"
    audit = run.store.audit()
    assert _stale(audit.dropped) == stale, "a group was dropped for its age without a resume"
    for step, age in run.ages.items():
        limit = resumed[max(first for first in resumed if first < step)]
        assert limit is not None
        assert age <= limit
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    run.store.close()


def _stale(dropped: dict[str, int]) -> int:
    return sum(count for reason, count in dropped.items() if reason.startswith("stale"))
