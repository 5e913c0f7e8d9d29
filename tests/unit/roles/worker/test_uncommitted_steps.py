from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest

from rrl.roles.trajectories.types import PackedPart
from rrl.roles.worker.uncommitted_steps import UncommittedSteps

FIRST = PackedPart(9, (4,), "first", (b"",), (), 0, False)
SECOND = PackedPart(9, (2, 3), "second", (b"", b""), (), 1, True)


def test_step_without_its_last_part_cannot_be_committed() -> None:
    steps = UncommittedSteps()
    steps.add(FIRST)
    with pytest.raises(ValueError, match=r"cannot commit step 9: it has no uncommitted batch; .* are \[\]"):
        steps.get(9)
    steps.add(SECOND)
    assert steps.get(9).digest == "second"


def test_committed_steps_are_forgotten() -> None:
    steps = UncommittedSteps()
    for number in (7, 8, 9):
        steps.add(msgspec.structs.replace(FIRST, number=number, last=True))
    steps.remove_through(8)
    assert steps.get(9).digest == "first"
    with pytest.raises(ValueError, match=r"the uncommitted steps are \[9\]"):
        steps.get(8)


def test_commit_may_give_metrics_again_that_the_step_has() -> None:
    steps = UncommittedSteps()
    steps.add(FIRST)
    steps.add(SECOND)
    steps.trained(9, {"reward": 7.0, "loss": 1.0})
    assert steps.with_metrics(9, {"loss": 2.0}).metrics == {"reward": 7.0, "loss": 2.0}
    assert steps.get(9).metrics == {"reward": 7.0, "loss": 1.0}


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"loss": "0.5"}, r"metrics of step 9: 'loss' = '0\.5' is not a name and a number"),
        ({"loss": numpy.zeros(2)}, r"'loss' = array\(\[0\., 0\.\]\) is not"),
        ({"loss": None}, "'loss' = None is not"),
        ({1: 0.5}, r"1 = 0\.5 is not a name and a number"),
        ([0.5], r"metrics of step 9: \[0\.5\] is not a dict of names and numbers"),
    ],
)
def test_metric_that_the_store_would_drop_is_refused(metrics: Any, why: str) -> None:
    steps = UncommittedSteps()
    steps.add(SECOND)
    with pytest.raises(TypeError, match=why):
        steps.with_metrics(9, metrics)
    right: Any = {"loss": numpy.float32(0.5)}
    assert steps.with_metrics(9, right).metrics["loss"] == 0.5


@pytest.mark.parametrize("number", ["9", 9.0, None, numpy.int64(9)])
def test_step_that_is_no_int_is_refused(number: Any) -> None:
    steps = UncommittedSteps()
    steps.add(SECOND)
    with pytest.raises(ValueError, match="cannot commit step "):
        steps.get(number)
