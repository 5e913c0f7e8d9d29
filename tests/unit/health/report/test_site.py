"""The report about a site whose failures are known (tests/support/health/site_history.py)."""

from __future__ import annotations

import shlex
from itertools import product

import msgspec
import pytest

from rrl.core.types import Cause, Flag, Remedy, Verdict
from rrl.health.history import rates
from rrl.health.history.incidents import by_run, costs, incidents
from rrl.health.history.incidents import node_intervals as held_by
from rrl.health.history.rates import DAY_S, Signals, fails_more_often, score_lemon
from rrl.health.history.records import EvidenceLine, FindingRecord, Record, SourcedRecord
from rrl.health.report.drain_requests import open_requests
from rrl.health.report.model import DrainState, NodeReport, Report
from rrl.health.report.site import report
from rrl.tests.support.health.site_history import (
    ANNA,
    BEGAN,
    BEN,
    GPU,
    HOUR,
    acted,
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


def made(records: list[SourcedRecord], **drains: DrainState) -> Report:
    return report(records, BEGAN, NOW, drains)


def node(records: list[SourcedRecord], name: str, **drains: DrainState) -> NodeReport:
    return next(one for one in made(records, **drains).nodes if one.node == name)


# ── owners and causes ────────────────────────────────────────────────────────────────────────────────────────────────
def owners(records: list[SourcedRecord]) -> list[tuple[str, str, str]]:
    return [(one.node, one.owner, one.cause) for one in incidents(by_run(records))]


def test_failures_of_a_sample_week_have_the_expected_owner_and_cause() -> None:
    assert owners(week()) == [
        ("n3", "infra", "gpu"),
        ("n1", "software", "process"),
        ("n2", "software", "process"),
        ("n5", "infra", "fabric"),
        ("n6", "infra", "fabric"),
        ("n3", "infra", "gpu"),
        ("n7", "infra", "node"),
        ("n8", "user", "user"),
    ]


@pytest.mark.parametrize(
    ("raised", "cleared", "owner"),
    [
        (-599.0, -598.0, "infra"),
        (-700.0, -601.0, "software"),
        (299.0, None, "infra"),
        (301.0, None, "software"),
        (-5 * HOUR, None, "infra"),
        (-5 * HOUR, -590.0, "infra"),
    ],
)
def test_hardware_evidence_counts_from_ten_minutes_before_to_five_after(
    raised: float, cleared: float | None, owner: str
) -> None:
    at = DAY_S
    records = [began(0, "r", ANNA), *held(0, "n1"), found(at + raised, "n1"), failed(at, "n1")]
    if cleared is not None:
        records.append(found(at + cleared, "n1", Verdict.OK))
    assert [one[1] for one in owners(sourced(ANNA, "r", records))] == [owner]


@pytest.mark.parametrize(
    ("flags", "owner"), [((), "software"), ((Flag.OBSERVED,), "infra"), ((Flag.HELD_BACK,), "infra")]
)
def test_warning_is_no_evidence_unless_it_is_a_downgraded_failure(flags: tuple[Flag, ...], owner: str) -> None:
    records = [began(0, "r", ANNA), found(5, "n1", Verdict.WARN, proof=False, flags=flags), failed(10, "n1")]
    assert owners(sourced(ANNA, "r", records))[0][1] == owner


def test_evidence_of_another_run_counts_and_that_of_another_node_does_not() -> None:
    here = sourced(ANNA, "r", began(0, "r", ANNA), failed(10, "n1"), failed(10, "n2", "rollout/1#1"))
    there = sourced(BEN, "s", began(0, "s", BEN), found(5, "n1"))
    assert {one[0]: one[1] for one in owners(here + there)} == {"n1": "infra", "n2": "software"}


def test_finding_about_a_replica_does_not_affect_its_node() -> None:
    hangs = found(5, "n1", incarnation="rollout/0#1", cause=Cause.HANG)
    records = [began(0, "r", ANNA), hangs, failed(10, "n1", cause="hang")]
    assert owners(sourced(ANNA, "r", records)) == [("n1", "software", "hang")]


def test_node_failure_with_several_replicas_is_one_incident_with_the_sum_of_their_costs() -> None:
    records = [
        began(0, "r", ANNA),
        failed(10, "n1", "rollout/0#1", lost=True),
        failed(11, "n1", "rollout/1#1", lost=True),
        failed(12, "n1", "", lost=True),
        mended(100, "rollout/0", "n1", 10, 2.0),
        mended(100, "rollout/1", "n1", 11, 3.0),
    ]
    (one,) = incidents(by_run(sourced(ANNA, "r", records)))
    assert one.gpu_hours == pytest.approx(5.0)
    assert one.incarnations == ("rollout/0#1", "rollout/1#1")


def test_node_excluded_without_evidence_is_no_failure() -> None:
    assert owners(sourced(ANNA, "r", began(0, "r", ANNA), failed(12, "n1", ""))) == []


def test_fabric_incidents_of_two_nodes_within_ten_minutes_name_each_other_as_related() -> None:
    by_node = {one.node: one.related_nodes for one in incidents(by_run(week())) if one.cause == "fabric"}
    assert by_node == {"n5": ("n6",), "n6": ("n5",)}
    assert node(week(), "n5").related_nodes == ["n6"]


def test_finding_of_an_earlier_run_is_no_evidence_of_a_much_later_failure() -> None:
    first = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), found(HOUR, "n1"), over(2 * HOUR))
    soon = sourced(BEN, "s", began(DAY_S, "s", BEN), held(2 * HOUR, "n1"), failed(2 * HOUR + 300, "n1"))
    late = sourced(BEN, "s", began(DAY_S, "s", BEN), held(DAY_S, "n1"), failed(DAY_S + HOUR, "n1"))
    assert owners(first + soon)[0][1] == "infra"
    assert owners(first + late)[0][1] == "software"  # repaired or not: nobody knows


def test_evidence_counts_until_its_run_releases_the_node() -> None:
    back = [left(2 * HOUR, "n1"), over(DAY_S)]
    first = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1", "n2"), found(HOUR, "n1"), back)
    late = sourced(BEN, "s", began(4 * HOUR, "s", BEN), held(4 * HOUR, "n1"), failed(5 * HOUR, "n1"))
    assert owners(first + late)[0][1] == "software"


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_cost_of_an_outage_with_two_failures_is_split_at_the_second_failure() -> None:
    records = [
        began(0, "r", ANNA),
        failed(0, "n1", "rollout/0#1"),
        failed(300, "n2", "rollout/0#2"),
        mended(1200, "rollout/0", "n1", 0, 4.0),
    ]
    (chapter,) = by_run(sourced(ANNA, "r", records))
    assert [round(cost, 6) for _, cost in costs(chapter)] == [1.0, 3.0]


def test_cost_of_a_full_restart_is_charged_to_the_replica_that_failed() -> None:
    all_of_them = ("rollout/0", "trainer/0")
    records = [
        began(0, "r", ANNA),
        failed(0, "n1", "trainer/0#1", restarted=all_of_them),
        mended(60, "rollout/0", "n2", 0, 1.0),
        mended(90, "trainer/0", "n1", 0, 2.0),
    ]
    (chapter,) = by_run(sourced(ANNA, "r", records))
    assert [cost for _, cost in costs(chapter)] == [3.0]


def test_outage_without_a_failure_is_charged_to_no_node() -> None:
    records = [
        began(0, "r", ANNA),
        failed(0, "n1", "rollout/0#1"),
        mended(60, "rollout/0", "n1", 0, 1.0),
        mended(900, "rollout/0", "n1", 600, 9.0),
    ]
    (chapter,) = by_run(sourced(ANNA, "r", records))
    assert [cost for _, cost in costs(chapter)] == [1.0]


# ── the site ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_site_figures_of_a_sample_week_are_as_expected() -> None:
    site = made(week()).site
    # 4 days of ten nodes, 2 days of n3 and n4, 1 day of n7 (and 5 s), and 1 day of n8 and n9
    assert site.node_days == pytest.approx(40 + 4 + 1 + 2, abs=0.01)
    assert site.gpu_days == pytest.approx(8 * site.node_days, abs=0.01)
    assert (site.failures, site.other_failures, site.injected) == (5, 2, 1)
    assert site.failures_per_1000_node_days.value == pytest.approx(1000 * 5 / 47, abs=0.1)
    assert site.node_hours_between_failures.value == pytest.approx(47 * 24 / 5, abs=0.1)
    low, high = site.node_hours_between_failures.low, site.node_hours_between_failures.high
    assert (low, high) == pytest.approx((47 * 24 / 11.6683, 47 * 24 / 1.6235), rel=1e-3)
    assert [(one.owner, one.cause, one.failures) for one in site.causes] == [
        ("infra", "fabric", 2),
        ("infra", "gpu", 2),
        ("infra", "node", 1),
        ("software", "process", 1),
        ("user", "user", 1),
    ]
    assert site.gpu_hours_lost_to_infra == pytest.approx(4.0 + 4.0 + 2.0 + 1.4)
    assert site.gpu_hours_lost == pytest.approx(4.0 + 4.0 + 2.0 + 1.4 + 0.8)
    assert (site.clusters, site.runs, site.users) == (["lab"], 3, 3)


def test_failures_are_counted_by_day() -> None:
    days = made(week()).site.days
    assert [day.failures for day in days][:6] == [
        {},
        {"gpu": 1},
        {"software": 1},
        {"fabric": 2},
        {"gpu": 1},
        {"node": 1, "user": 1},
    ]
    assert [round(day.node_days) for day in days][:6] == [10, 10, 10, 10, 3, 4]


def test_records_before_the_window_are_in_no_figure() -> None:
    site = report(week(), BEGAN + 4 * DAY_S, NOW).site
    assert (site.failures, round(site.node_days)) == (2, 7)


def test_node_span_continues_over_a_change_of_managers_if_it_is_listed_again() -> None:
    records = [
        began(0, "r", ANNA),
        *held(0, "n1", "n2"),
        failed(HOUR, "n1"),
        began(2 * HOUR, "r", ANNA, 2),
        *held(2 * HOUR, "n1"),
        over(4 * HOUR),
    ]
    (chapter,) = by_run(sourced(ANNA, "r", records))
    spans = {name: [(a - BEGAN, b - BEGAN) for a, b in those] for name, (those, _) in held_by(chapter).items()}
    assert spans["n1"] == [(0.0, 4 * HOUR)]
    assert spans["n2"] == [(0.0, 2 * HOUR)]  # given back while no manager ran


def test_run_without_an_end_held_its_nodes_until_its_last_record() -> None:
    (chapter,) = by_run(sourced(ANNA, "r", began(0, "r", ANNA), *[held(0, "n1")], failed(HOUR, "n1")))
    assert [(a - BEGAN, b - BEGAN) for a, b in held_by(chapter)["n1"][0]] == [(0.0, HOUR)]


# ── a node ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_report_of_a_broken_node_has_verdict_remedy_facts_runs_and_cost() -> None:
    one = node(week(), "n3")
    assert (one.verdict, one.cause, one.remedy) == ("FAIL", "gpu", "reset_gpu")
    assert (one.incidents, one.count) == (2, 3)
    assert (one.first_reported_at, one.last_reported_at) == (BEGAN + DAY_S, BEGAN + 4.5 * DAY_S + 5)
    assert one.facts == {"uuid": GPU, "serial": "1650924012345", "boot_id": "77ab-1"}
    assert one.components == [GPU]
    assert (one.runs, one.users) == (["code-2", "math-1"], ["anna", "ben"])
    assert one.gpu_hours_lost == 8.0
    assert "reset its GPU" in one.action
    assert [line.text.partition(":")[0] for line in one.actions] == ["excluded", "drain requested", "excluded"]
    assert shlex.split(one.scontrol) == [
        "scontrol",
        "update",
        "nodename=n3",
        "state=drain",
        "reason=rrl:math-1: gpu: Xid 48: double-bit ECC error",
    ]
    assert 0 < len(one.evidence) <= 5


def test_worst_nodes_are_listed_first() -> None:
    assert [one.node for one in made(week()).nodes][:2] == ["n3", "n7"]


def test_drained_node_names_its_owner_and_gets_no_command() -> None:
    ours = node(week(), "n3", n3=DrainState("IDLE+DRAIN", True, "rrl", "rrl:math-1: gpu", "root"))
    assert (ours.drain.owner, ours.scontrol) == ("rrl", "")
    foreign = node(week(), "n3", n3=DrainState("IDLE+DRAIN", True, "foreign", "fan", "root"))
    assert (foreign.drain.owner, foreign.scontrol, foreign.action) == ("foreign", "", "none: it is already drained")


def test_cleared_finding_leaves_the_node_ok_with_its_evidence() -> None:
    one = node(week(), "n5")
    assert (one.verdict, one.count, one.scontrol) == ("OK", 1, "")
    assert [line.text for line in one.evidence] == ["mlx5_0/1 is DOWN, was ACTIVE"]


@pytest.mark.parametrize(("hours", "verdict"), [(0.5, "WARN"), (1.5, "OK")])
def test_uncleared_finding_expires_once_a_later_run_used_the_node_without_one(hours: float, verdict: str) -> None:
    first = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), found(HOUR, "n1"), over(2 * HOUR))
    later = sourced(BEN, "s", began(3 * HOUR, "s", BEN), held(3 * HOUR, "n1"), over((3 + hours) * HOUR))
    assert node(first + later, "n1").verdict == verdict


def test_release_of_a_node_does_not_clear_its_warning() -> None:
    away = [left(HOUR, "n1"), found(HOUR + 1, "n1", Verdict.OK), over(HOUR + 2)]
    records = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), found(60, "n1"), away)
    assert node(records, "n1").verdict == "WARN"


def test_intermittent_finding_is_counted_once_for_each_time() -> None:
    on_and_off: list[Record] = []
    for i in range(5):
        on_and_off += [found(i * HOUR, "n1"), found(i * HOUR + 60, "n1", Verdict.OK)]
    assert node(sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), on_and_off, over(DAY_S)), "n1").count == 5


def test_finding_counts_continue_across_managers() -> None:
    first = [began(0, "r", ANNA), *held(0, "n1"), found(60, "n1"), found(700, "n1", count=2)]
    then = [began(HOUR, "r", ANNA, 2), *held(HOUR, "n1"), found(HOUR, "n1", count=0), found(2 * HOUR, "n1", count=1)]
    assert node(sourced(ANNA, "r", first, then), "n1").count == 3


def test_injected_failure_does_not_count_against_a_node() -> None:
    hit = msgspec.structs.replace(found(60, "n1", cause=Cause.NODE, detector="node_down"), injected=True)
    one = node(
        sourced(
            ANNA,
            "r",
            began(0, "r", ANNA),
            held(0, "n1"),
            hit,
            failed(60, "n1", cause="node", lost=True, injected=True),
            over(HOUR),
        ),
        "n1",
    )
    assert (one.verdict, one.scontrol, one.lemon.score, one.injected) == ("OK", "", 0.0, 1)


def test_advice_for_a_node_drained_by_rrl_omits_the_drain() -> None:
    drained = DrainState("IDLE+DRAIN", True, "rrl", "rrl:math-1: gpu: Xid 48", "root")
    assert node(week(), "n3", n3=drained).action.startswith("reset its GPU")


def test_gpu_days_of_two_runs_on_one_node_are_added() -> None:
    both = [sourced(user, "r", began(0, "r", user), held(0, "n1", gpus=4), over(DAY_S)) for user in (ANNA, BEN)]
    site = made([*both[0], *both[1]]).site
    assert (site.node_days, site.gpu_days) == (1.0, 8.0)


def test_report_of_named_nodes_counts_only_runs_on_these_nodes() -> None:
    site = report(week(), BEGAN, NOW, {}, frozenset({"n8"})).site
    assert (site.nodes, site.runs, site.users) == (1, 2, 2)


def test_at_most_five_evidence_lines_are_reported() -> None:
    records = [found(i, "n1", detector=f"check{i}", text=f"reading {i}") for i in range(9)]
    assert len(node(sourced(ANNA, "r", began(0, "r", ANNA), records), "n1").evidence) == 5


def test_reason_with_shell_syntax_stays_one_argument() -> None:
    evil = "rrl:x'; rm -rf / #"
    records = [began(0, "r", ANNA), found(5, "n1"), acted(6, "n1", "drain_requested", reason=evil)]
    assert shlex.split(node(sourced(ANNA, "r", records, trusted=True), "n1").scontrol)[-1] == f"reason={evil}"


# ── lemons ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_score_matches_the_documented_formula() -> None:
    signals = Signals(node_failures_alone=2, xids=1, days=2)
    assert score_lemon(signals).score == pytest.approx(1 - 0.7**2 * 0.9, abs=1e-3)
    assert score_lemon(Signals()).score == 0.0


def weak_node(user: str, days: tuple[int, ...], trusted: bool = False) -> list[SourcedRecord]:
    """Return the records of a run of ``user`` in which n1 fails for a short time on each of these days.

    With ``trusted``, root owns the records.
    """
    records = [began(0, "r", user), *held(0, "n1", "n2", "n3", "n4")]
    for day in days:
        records += [found(day * DAY_S, "n1"), failed(day * DAY_S + 5, "n1"), found(day * DAY_S + 9, "n1", Verdict.OK)]
    return sourced(user, "r", records, over(6 * DAY_S), trusted=trusted)


def test_node_that_fails_repeatedly_is_a_lemon() -> None:
    everything = made(weak_node(ANNA, (1, 3)) + weak_node(BEN, (2, 4)))
    assert everything.site.lemons == ["n1"]
    one = everything.nodes[0]
    assert one.lemon.signals.node_failures_alone == 4
    assert one.lemon.signals.failure_rate == 1
    assert one.action.startswith("lemon: drain it")
    assert one.scontrol


def test_failures_on_a_single_day_make_no_lemon() -> None:
    many = Signals(node_failures_alone=9, hardware_findings=1, days=1)
    assert score_lemon(many).score > rates.LEMON_SCORE
    assert not score_lemon(many).lemon


def test_finding_on_many_nodes_at_once_is_reported_for_the_site() -> None:
    text = "mounts of /scratch on many nodes at the same time: n1, n2"
    at, line = BEGAN + 9, EvidenceLine(BEGAN + 9, "correlation", text)
    many = FindingRecord(at, "", "correlated", Verdict.WARN, Cause.STORAGE, Remedy.SUPPORT, at, evidence=(line,))
    site = made(sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1", "n2"), many, over(HOUR))).site
    assert [(one.source, one.text) for one in site.correlated] == [("anna/r", text)]


def test_finding_of_most_nodes_blames_none_of_them_even_with_proof() -> None:
    held_back = (Flag.HELD_BACK, Flag.ON_MOST_NODES)
    wrong = found(5, "n1", Verdict.WARN, detector="gpu_count", proof=False, flags=held_back)
    assert owners(sourced(ANNA, "r", began(0, "r", ANNA), wrong, failed(10, "n1")))[0][1] == "software"


def test_recurring_storage_failure_of_all_nodes_makes_no_lemon() -> None:
    outages: list[Record] = []
    for at, i in product((DAY_S / 4 * k for k in range(20)), range(4)):
        where = {"cause": Cause.STORAGE, "detector": "mounts", "component": "/scratch", "proof": False}
        outages.append(found(at + i, f"n{i}", Verdict.WARN, flags=(Flag.HELD_BACK,), **where))  # type: ignore[arg-type]
        outages.append(found(at + i + 600, f"n{i}", Verdict.OK, **where))  # type: ignore[arg-type]
    records = sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n0", "n1", "n2", "n3"), *outages)
    assert made(records).site.lemons == []
    assert node(records, "n1").lemon.signals.hardware_findings == 0


def test_a_crash_loop_of_a_users_own_program_makes_no_lemon() -> None:
    records = [failed(hour * HOUR, "n1", f"rollout/0#{hour}") for hour in range(1, 100)]
    one = node(sourced(ANNA, "r", began(0, "r", ANNA), held(0, "n1"), records), "n1")
    assert (one.lemon.score, one.other_failures, one.incidents) == (0.0, 99, 0)


def test_failure_count_is_excessive_only_relative_to_that_of_other_nodes() -> None:
    assert fails_more_often(4, DAY_S, 5, 1000 * DAY_S)
    assert not fails_more_often(4, DAY_S, 4000, 1000 * DAY_S)
    assert not fails_more_often(1, DAY_S, 1, 1000 * DAY_S)


# ── drains that are asked for ────────────────────────────────────────────────────────────────────────────────────────
def test_drain_request_stays_open_until_its_own_run_readmits_the_node() -> None:
    (one,) = open_requests(week())
    assert (one.node, one.cause, one.users, one.rejection) == ("n3", "gpu", ("anna",), "we may not drain nodes here")
    assert open_requests([*week(), *sourced(ANNA, "math-1", acted(3 * DAY_S, "n3", "readmitted"))]) == []
    assert len(open_requests([*week(), *sourced(BEN, "other", acted(3 * DAY_S, "n3", "readmitted"))])) == 1


def test_drain_request_is_closed_once_a_later_run_used_the_node_without_a_finding() -> None:
    requested = sourced(
        ANNA, "r", began(0, "r", ANNA), held(0, "n1"), found(60, "n1"), acted(61, "n1", "drain_requested"), over(90)
    )
    short = sourced(BEN, "s", began(DAY_S, "s", BEN), held(DAY_S, "n1"), over(DAY_S + 1800))
    longer = sourced(BEN, "s", began(DAY_S, "s", BEN), held(DAY_S, "n1"), over(DAY_S + 2 * HOUR))
    again = sourced(
        BEN, "s", began(DAY_S, "s", BEN), held(DAY_S, "n1"), found(DAY_S + HOUR, "n1"), over(DAY_S + 2 * HOUR)
    )
    assert [len(open_requests([*requested, *then])) for then in (short, longer, again)] == [1, 0, 1]


def test_drain_reason_of_a_request_gets_the_prefix_of_rrl() -> None:
    (one,) = open_requests(sourced(ANNA, "r", acted(0, "n1", "drain_requested", reason="because")))
    assert one.reason == "rrl:r: because"


def test_lost_node_and_remedy_support_are_reported() -> None:
    records = [began(0, "r", ANNA), *held(0, "n1"), found(5, "n1", remedy=Remedy.SUPPORT), left(9, "n1")]
    assert "field diagnostics" in node(sourced(ANNA, "r", records, trusted=True), "n1").action
