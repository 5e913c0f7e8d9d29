"""Records that contradict the clock, their run or the hardware are left out, and all others are kept."""

from __future__ import annotations

import msgspec
import pytest

from rrl.health.history.plausibility import CLOCK_SKEW_S, MAX_USER_RECORDS_OF_KIND, plausible
from rrl.health.history.rates import DAY_S
from rrl.health.history.records import Failed, Record, SourcedRecord
from rrl.tests.support.health.site_history import (
    ANNA,
    BEGAN,
    BEN,
    HOUR,
    began,
    failed,
    found,
    held,
    left,
    mended,
    over,
    sourced,
    week,
)

NOW = BEGAN + 7 * DAY_S
HONEST = [
    began(0, "r", ANNA),
    *held(0, "n1"),
    found(5, "n1"),
    failed(6, "n1"),
    mended(HOUR, "rollout/0", "n1", 6, 7.9),
    left(DAY_S, "n1"),
    over(DAY_S + 5),
]


def test_honest_records_are_all_kept() -> None:
    records = [*sourced(ANNA, "r", HONEST), *week()]
    assert plausible(records, NOW, {}) == (records, ())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (found(7 * DAY_S + 2 * CLOCK_SKEW_S, "n1"), "in the future"),
        (msgspec.structs.replace(found(9, "n1"), evidence=found(8 * DAY_S, "n1").evidence), "in the future"),
        (found(-BEGAN + 5, "n1"), "before 2020"),
        (found(-DAY_S, "n1"), "before their run began"),
        (mended(HOUR, "rollout/0", "n1", 3 * HOUR, 1.0), "that end before they begin"),
        (mended(HOUR, "rollout/0", "n1", 0, 17.0), "with more GPU-hours than the run's nodes could give"),
    ],
)
def test_implausible_record_is_left_out_with_its_reason(record: Record, reason: str) -> None:
    records = sourced(ANNA, "r", HONEST)
    kept, left_out = plausible([*records, *sourced(ANNA, "r", record)], NOW, {})
    assert kept == records
    assert left_out == (f"{ANNA}: 1 record {reason}",)


def test_gpu_hours_are_measured_by_the_gpus_that_slurm_knows() -> None:
    records = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1", gpus=4), mended(HOUR, "rollout/0", "n1", 0, 7.0))
    assert plausible(records, NOW, {"n1": 8})[1] == ()
    (left_out,) = plausible(records, NOW, {"n1": 4})[1]
    assert left_out.endswith("with more GPU-hours than the run's nodes could give")


def runs_at_once(user: str, count: int, *, gpus: int = 8, apart: float = 0.0) -> list[SourcedRecord]:
    records: list[SourcedRecord] = []
    for i in range(count):
        at = i * apart
        records += sourced(
            user,
            f"r{i}",
            began(at, f"r{i}", user),
            held(at, "n1", gpus=gpus),
            found(at + 5, "n1"),
            left(at + DAY_S, "n1"),
            over(at + DAY_S + 5),
        )
    return records


def test_claims_of_more_gpus_than_a_node_has_are_left_out() -> None:
    claims, honest = runs_at_once(ANNA, 15), runs_at_once(BEN, 1)
    kept, left_out = plausible([*claims, *honest], NOW, {"n1": 8})
    assert {(one.user, getattr(one.record, "node", "")) for one in kept} == {(ANNA, ""), (BEN, ""), (BEN, "n1")}
    assert left_out == (
        f"{ANNA}: 45 records about nodes on which the user's runs claim more GPUs at the same time than the nodes have",
    )


@pytest.mark.parametrize("how", [{"count": 2, "gpus": 4}, {"count": 5, "apart": DAY_S - 60.0}])
def test_runs_that_share_a_node_or_follow_each_other_claim_no_more_than_it_has(how: dict[str, float]) -> None:
    records = runs_at_once(ANNA, **how)  # type: ignore[arg-type]
    assert plausible(records, NOW, {"n1": 8})[1] == ()


def test_only_the_newest_failures_of_a_user_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_USER_RECORDS_OF_KIND, type(failed(0, "n1")), 10)
    many = sourced(ANNA, "r", began(0, "r", ANNA), [failed(i * 60.0, "n1", f"rollout/0#{i}") for i in range(30)])
    kept, left_out = plausible([*many, *sourced(BEN, "s", failed(5, "n1"))], NOW, {})
    kept_incarnations = [one.record.incarnation for one in kept if one.user == ANNA and isinstance(one.record, Failed)]
    assert kept_incarnations == [f"rollout/0#{i}" for i in range(20, 30)]
    assert sum(one.user == BEN for one in kept) == 1
    assert left_out == (f"{ANNA}: 20 records beyond the limit for one user: only the newest count",)


def test_repeated_finding_counts_once_against_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_USER_RECORDS_OF_KIND, type(found(0, "n1")), 2)
    again = sourced(ANNA, "r", began(0, "r", ANNA), [found(i * 600.0, "n1", count=i + 1) for i in range(50)])
    assert plausible(again, NOW, {}) == (again, ())
