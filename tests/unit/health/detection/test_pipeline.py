"""The stages of the findings pipeline: their order, their changes, and the reason that each adds to a finding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rrl.core.run_spec import HealthSpec, Limits
from rrl.core.types import Cause, DataReport, Evidence, Finding, Flag, Incarnation, NodeName, Remedy, ReplicaId, Verdict
from rrl.health.detection.attribution.correlation import CorrelationContext
from rrl.health.detection.attribution.gangs import blame_gang_members
from rrl.health.detection.attribution.untaken_data import blame_trainer_for_untaken_data
from rrl.health.detection.attribution.wait_chains import blame_ends_of_wait_chains
from rrl.health.detection.detectors.base import Result
from rrl.health.detection.pipeline import (
    PIPELINE,
    TERMINAL_DETECTORS,
    HangStacks,
    PublicationContext,
    apply_settings,
    await_stacks,
    correlate,
    first_match,
    publish,
    suppress_on_failed_nodes,
)
from rrl.tests.support.health.traces import IDLE, LIMITS, ROLLOUT, ROLLOUTS, STORE, TRAINER, Trace

N1, N2 = NodeName("n1"), NodeName("n2")
RANKS = (TRAINER, Incarnation(ReplicaId("trainer/0.1"), 1))
NOW = PublicationContext(1000.0)


def about_node(node: NodeName = N1, cause: Cause = Cause.GPU, detector: str = "xid", proof: bool = False) -> Finding:
    evidence = (Evidence("nvml", "Xid 79", 900.0),)
    return Finding(detector, Verdict.FAIL, cause, Remedy.REBOOT, 900.0, evidence, node=node, proof=proof)


def about(
    incarnation: Incarnation, detector: str = "no_progress", verdict: Verdict = Verdict.FAIL, proof: bool = False
) -> Finding:
    remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
    evidence = (Evidence("worker", f"{detector} of {incarnation}", 900.0),)
    return Finding(detector, verdict, Cause.HANG, remedy, 900.0, evidence, incarnation, proof=proof)


def settings(**health: object) -> PublicationContext:
    return replace(NOW, settings=HealthSpec(**health))  # type: ignore[arg-type]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# ── the list of stages ───────────────────────────────────────────────────────────────────────────────────────────────
Change = tuple[Finding, Finding, str]
"""(finding before a stage, finding after it, source of the line of evidence that the stage must have added)."""


def culprit_among_overdue_members() -> Change:
    trace = Trace().node("n1", RANKS[0], phase="train").node("n2", RANKS[1], phase="train")
    overdue = [about(rank, "phase_overdue") for rank in RANKS]
    return overdue[0], only(blame_gang_members(overdue, trace.monitor)), "blame"


def member_that_computes_nothing(*idle: Incarnation) -> Change:
    trace = Trace()
    for number, rank in enumerate(idle):
        trace.node(f"n{number}", rank, phase="train")
        trace.loads[rank] = IDLE
    trace.play(60)
    raw = [about(rank, "computes_nothing", Verdict.UNKNOWN) for rank in idle]
    return raw[0], only(blame_gang_members(raw, trace.monitor)), "blame"


def load_that_others_completed() -> Change:
    trace = Trace().node("n1", *ROLLOUTS, phase="loading_weights")
    view = trace.monitor.replicas[ROLLOUT.replica]
    view.role.newest_load_began = view.last_change_at + 1
    raw = about(ROLLOUT, "load_stalled", Verdict.UNKNOWN)
    return raw, only(blame_gang_members([raw], trace.monitor)), "blame"


def service_that_a_trainer_waits_for() -> Change:
    trace = Trace().node("n1", TRAINER, phase="wait_data").node("n2", STORE, phase="serve")
    trace.monitor.replicas[TRAINER.replica].waits_for = STORE.replica
    raw = [about(TRAINER, "wait_overdue", Verdict.UNKNOWN), about(STORE, "idle", Verdict.UNKNOWN)]
    return replace(raw[1], evidence=()), only(blame_ends_of_wait_chains(raw, trace.monitor)), "blame"


def trainer_that_leaves_data_at_the_store() -> Change:
    trace = Trace().node("n1", TRAINER, phase="wait_data").node("n2", STORE, phase="serve")
    trace.loads[TRAINER], trace.data = IDLE, DataReport(untaken=True)
    trace.play(200)
    raw = about(TRAINER, "wait_long", Verdict.UNKNOWN)
    return raw, only(blame_trainer_for_untaken_data([raw], trace.monitor)), "store"


def failed_node_with_a_hung_replica() -> Change:
    trace = Trace().node("n1", ROLLOUT)
    node = about_node(detector="node_down")
    return node, only(suppress_on_failed_nodes([node, about(ROLLOUT)], trace.monitor)), "manager"


def hang_without_stacks() -> Change:
    hang = about(ROLLOUT)
    return hang, only(await_stacks([hang], replace(NOW, stacks={hang.key: HangStacks(pending=True)}))[0]), "manager"


def cause_that_does_not_blame_the_node() -> Change:
    finding = about_node(cause=Cause.SOFTWARE)
    return finding, only(apply_settings([finding], NOW)[0]), "manager"


def check_that_is_only_observed() -> Change:
    return about_node(), only(apply_settings([about_node()], settings(checks={"xid": "observe"}))[0]), "job"


def node_like_many_others() -> Change:
    findings = [about_node(N1), about_node(N2)]
    return findings[0], correlate(findings, replace(NOW, run=CorrelationContext(4)))[0][0], "correlation"


CHANGES: dict[Callable[..., object], tuple[Callable[[], Change], ...]] = {
    first_match: (),  # first_match stops at the first detector that finds something, so it drops no finding
    blame_gang_members: (
        culprit_among_overdue_members,
        lambda: member_that_computes_nothing(*RANKS),
        lambda: member_that_computes_nothing(TRAINER),
        load_that_others_completed,
    ),
    blame_trainer_for_untaken_data: (trainer_that_leaves_data_at_the_store,),
    blame_ends_of_wait_chains: (service_that_a_trainer_waits_for,),
    suppress_on_failed_nodes: (failed_node_with_a_hung_replica,),
    await_stacks: (hang_without_stacks,),
    apply_settings: (cause_that_does_not_blame_the_node, check_that_is_only_observed),
    correlate: (node_like_many_others,),
}
"""Every stage, with each way in which it changes a verdict or drops findings in favour of another finding."""


def test_pipeline_lists_its_stages_in_order() -> None:
    assert list(PIPELINE) == list(CHANGES)


@pytest.mark.parametrize(
    "change",
    [pytest.param(change, id=f"{stage.__name__}-{i}") for stage in CHANGES for i, change in enumerate(CHANGES[stage])],
)
def test_stage_that_changes_a_finding_adds_the_reason(change: Callable[[], Change]) -> None:
    before, after, source = change()
    assert after.evidence[: len(before.evidence)] == before.evidence, (
        "the stage has changed or removed earlier evidence"
    )
    assert [line.source for line in after.evidence[len(before.evidence) :]][-1:] == [source]


# ── single stages ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_detector_behind_the_first_match_is_not_evaluated() -> None:
    calls = []

    def detector(name: str, found: bool, then: float) -> Callable[[object, Limits, float], Result]:
        def evaluate(view: object, limits: Limits, now: float) -> Result:
            calls.append(name)
            return about(ROLLOUT, name) if found else None, then

        return evaluate

    ladder = (detector("a", False, 70.0), detector("b", True, 90.0), detector("c", True, 50.0))
    finding, then = first_match(ladder, None, LIMITS, 0.0)
    assert finding is not None
    assert (finding.detector, then, calls) == ("b", 70.0, ["a", "b"])


def test_overdue_member_without_others_keeps_its_finding_unchanged() -> None:
    trace = Trace().node("n1", RANKS[0], phase="train").node("n2", RANKS[1], phase="train")
    overdue = about(RANKS[0], "phase_overdue")
    assert blame_gang_members([overdue], trace.monitor) == [overdue]


def test_failed_node_keeps_proof_and_findings_of_other_nodes() -> None:
    trace = Trace().node("n1", *ROLLOUTS[:2]).node("n2", ROLLOUTS[2])
    kept = [about_node(), about(ROLLOUTS[0], "exit_record", proof=True), about(ROLLOUTS[2])]
    unknown = about(ROLLOUTS[1], "worker_silence", Verdict.UNKNOWN)
    assert suppress_on_failed_nodes([*kept, unknown], trace.monitor) == kept, (
        "an UNKNOWN on a failed node was not dropped"
    )


def test_failed_node_names_the_findings_of_its_replicas() -> None:
    trace = Trace().node("n1", *ROLLOUTS)
    dropped = [about(ROLLOUTS[0]), about(ROLLOUTS[1]), about(ROLLOUTS[2], "straggler", Verdict.WARN)]
    (node,) = suppress_on_failed_nodes([*dropped, about_node()], trace.monitor)
    assert node.evidence[-1].text.endswith(": no progress, straggler")
    assert (node.verdict, node.remedy) == (Verdict.FAIL, Remedy.REBOOT)


@pytest.mark.parametrize("finding", [about(ROLLOUT, proof=True), about(ROLLOUT, verdict=Verdict.WARN)])
def test_proof_and_warnings_do_not_wait_for_stacks(finding: Finding) -> None:
    assert await_stacks([finding], replace(NOW, stacks={finding.key: HangStacks(pending=True)}))[0] == [finding]


def test_collected_stacks_are_added_to_their_hang_only() -> None:
    line = Evidence("stacks", "step (engine.py:95)", 990.0)
    hang, other = about(ROLLOUTS[0]), about(ROLLOUTS[1])
    context = replace(NOW, stacks={hang.key: HangStacks(pending=False, evidence=(line,))})
    assert await_stacks([hang, other], context)[0] == [replace(hang, evidence=(*hang.evidence, line)), other]


def test_check_acts_observes_or_is_off_as_the_job_says() -> None:
    fail = about_node(proof=True)
    assert apply_settings([fail], NOW)[0] == [fail]
    assert apply_settings([fail], settings(checks={"xid": "off"}))[0] == []
    assert apply_settings([fail], settings(checks={"ecc": "off"}))[0] == [fail]
    for context in (settings(checks={"xid": "observe"}), settings(observe_only=True)):
        observed = only(apply_settings([fail], context)[0])
        assert (observed.verdict, observed.remedy, observed.proof) == (Verdict.WARN, Remedy.NONE, False)
        assert observed.flags == (Flag.OBSERVED,)
        assert "observe only" in observed.evidence[-1].text
        warn = replace(fail, verdict=Verdict.WARN)
        assert apply_settings([warn], context)[0] == [warn]


@pytest.mark.parametrize("cause", [Cause.USER, Cause.SOFTWARE])
def test_cause_that_does_not_blame_the_node_only_warns(cause: Cause) -> None:
    warning = only(apply_settings([about_node(cause=cause, proof=True)], NOW)[0])
    assert (warning.verdict, warning.remedy, warning.proof) == (Verdict.WARN, Remedy.REBOOT, False)
    assert cause in warning.evidence[-1].text


@pytest.mark.parametrize("detector", sorted(TERMINAL_DETECTORS))
def test_no_setting_turns_off_proof_of_an_end(detector: str) -> None:
    gone = about_node(detector=detector, cause=Cause.PROCESS, proof=True)
    context = settings(observe_only=True, checks={detector: "off"})
    assert apply_settings([gone], context)[0] == [gone]
    assert apply_settings([replace(gone, proof=False)], context)[0] == []


# ── the whole pipeline ───────────────────────────────────────────────────────────────────────────────────────────────
def test_observed_findings_of_many_nodes_are_not_correlated() -> None:
    findings = [about_node(N1), about_node(N2)]
    context = replace(NOW, run=CorrelationContext(4))
    assert [finding.detector for finding in publish(findings, context)[0]] == ["xid", "xid", "correlated"]
    observed, _ = publish(findings, replace(context, settings=HealthSpec(observe_only=True)))
    assert [(finding.detector, finding.flags) for finding in observed] == [("xid", (Flag.OBSERVED,))] * 2


def test_correlation_remembers_an_event_for_the_next_publication() -> None:
    _, context = publish([about_node(N1), about_node(N2)], replace(NOW, run=CorrelationContext(4)))
    assert context.next_check > NOW.now
    late, _ = publish([about_node(N1)], replace(context, now=NOW.now + 60))
    assert (late[0].detector, late[0].verdict) == ("xid", Verdict.WARN)
