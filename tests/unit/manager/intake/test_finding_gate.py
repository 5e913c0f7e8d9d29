"""Findings that agents report about their nodes: which of them are accepted, and what the gate records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rrl.cluster.base import AllocationRequest, AllocationState, AllocationStatus
from rrl.core.launch import tag_of
from rrl.core.run_spec import HealthSpec
from rrl.core.types import STACKS, Cause, Evidence, Finding, Flag, Incarnation, NodeName, Remedy, ReplicaId, Verdict
from rrl.health.detection.attribution.correlation import SILENCE_GRACE_S
from rrl.health.detection.detectors.registry import NODE_DETECTORS
from rrl.health.detection.pipeline import HangStacks
from rrl.manager.intake.finding_gate import MANAGER_DETECTORS, MAX_FINDINGS_PER_NODE, to_manager_time
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Exclude, Launch, Readmit, Request, Why
from rrl.manager.planner import plan
from rrl.tests.support.manager.handling import Handling
from rrl.tests.support.manager.jobs import NODE, ROLLOUTS, RUN
from rrl.transport import messages as msg

N1, N2 = NodeName("n1"), NodeName("n2")
AGENT, OTHER = Incarnation(ReplicaId("agent/n1"), 1), Incarnation(ReplicaId("agent/n2"), 1)
TAG = tag_of(RUN, AGENT)
ROLE = Incarnation(ROLLOUTS[0], 1)
WHY = Why(("because",))
LAUNCHED: tuple[ev.Event, ...] = (
    ev.Intended(Request(AllocationRequest("pool", 2, NODE, 60.0), WHY)),
    ev.AllocationChanged("pool", AllocationStatus(AllocationState.RUNNING, "7", (N1, N2))),
    ev.Intended(Launch(AGENT, TAG, "pool", N1, WHY)),
    ev.Intended(Launch(OTHER, tag_of(RUN, OTHER), "pool", N2, WHY)),
)
UPTIME = 5000.0
"""Time (s) on the node's own clock."""


def found(
    text: str = "Xid 79",
    verdict: Verdict = Verdict.FAIL,
    *,
    node: NodeName | None = N1,
    detector: str = "xid",
    at: float = UPTIME - 3.0,
    component: str = "GPU-1",
    incarnation: Incarnation | None = None,
    proof: bool = False,
) -> Finding:
    evidence = (Evidence("nvml", text, at),) if verdict is not Verdict.OK else ()
    return Finding(detector, verdict, Cause.GPU, Remedy.REBOOT, at, evidence, incarnation, node, proof, component)


def hello(*findings: Finding, now: float = UPTIME, **more: object) -> msg.AgentHello:
    return msg.AgentHello(AGENT, TAG, N1, "host", 7, "boot", findings=findings, now=now, **more)  # type: ignore[arg-type]


def send_finding(
    finding: Finding, incarnation: Incarnation = AGENT, node: NodeName = N1, now: float = UPTIME
) -> msg.FindingReport:
    return msg.FindingReport(finding, incarnation, node, now)


def changes(handling: Handling) -> list[tuple[str, Verdict]]:
    return [(one.finding.key, one.finding.verdict) for one in handling.events if isinstance(one, ev.FindingChanged)]


@pytest.fixture
def hearing(tmp_path: Path) -> Handling:
    made = Handling(tmp_path, *LAUNCHED)
    made.handle(msg.AdmissionRequest(AGENT, TAG, N1, 7))
    made.events.clear()
    return made


KEY = "xid:n1:GPU-1"


def test_findings_of_an_agents_hello_are_recorded_before_it_joins(hearing: Handling) -> None:
    hearing.handle(hello(found()))
    assert [type(event) for event in hearing.events] == [ev.FindingChanged, ev.AgentJoined]
    assert hearing.state is not None
    actions = plan(hearing.state, 100.0).actions
    assert [action.node for action in actions if isinstance(action, Exclude)] == [N1]
    assert not [action for action in actions if isinstance(action, Launch)]


def test_times_are_converted_to_the_managers_clock_and_never_in_its_future(hearing: Handling) -> None:
    hearing.handle(hello(found(at=UPTIME - 3.0)), send_finding(found(component="GPU-2", at=UPTIME + 60.0)))
    times = {one.finding.component: one.finding for one in hearing.events if isinstance(one, ev.FindingChanged)}
    assert (times["GPU-1"].since, times["GPU-1"].evidence[0].at) == (97.0, 97.0)
    assert times["GPU-2"].since == 100.0
    assert to_manager_time(found(at=float("nan")), UPTIME, 100.0).since == 100.0


def test_repeated_finding_is_not_recorded_and_a_missing_one_is_cleared(hearing: Handling) -> None:
    hearing.handle(hello(found(), found(component="GPU-2")))
    before = len(hearing.events)
    again = found(at=UPTIME + 6.99)  # the same moment, reported 10 s later and with another delay of the message
    hearing.handle(send_finding(again, now=UPTIME + 10.0), hello(again, now=UPTIME + 10.0))
    assert changes(hearing)[2:] == [("xid:n1:GPU-2", Verdict.OK)]
    assert len(hearing.events) == before + 2, "more than the Hello and the cleared finding was recorded"


def test_finding_changes_with_its_evidence_and_ends_with_ok(hearing: Handling) -> None:
    hearing.handle(hello())
    hearing.handle(
        send_finding(found("hot", Verdict.WARN)), send_finding(found("hotter", Verdict.WARN)), send_finding(found())
    )
    hearing.handle(send_finding(found(verdict=Verdict.OK)), send_finding(found(verdict=Verdict.OK)))
    verdicts = [Verdict.WARN, Verdict.WARN, Verdict.FAIL, Verdict.OK]
    assert changes(hearing) == [(KEY, verdict) for verdict in verdicts]
    assert hearing.state is not None
    assert hearing.state.findings == {}


def test_unreadable_value_does_not_clear_an_earlier_finding(hearing: Handling) -> None:
    hearing.handle(hello(found()), send_finding(found("no answer", Verdict.UNKNOWN)))
    assert changes(hearing) == [(KEY, Verdict.FAIL)]


def test_unknown_is_recorded_once_and_so_is_its_end(hearing: Handling) -> None:
    unknown = found("no answer", Verdict.UNKNOWN)
    hearing.handle(hello(unknown), send_finding(unknown), send_finding(found(verdict=Verdict.OK)))
    assert changes(hearing) == [(KEY, Verdict.UNKNOWN), (KEY, Verdict.OK)]


NOT_ITS_OWN = {
    "about another node": found(node=N2),
    "about a role": found(node=None, incarnation=ROLE, component=""),
    "about both": found(incarnation=ROLE),
    "about nothing": found(node=None),
    "that its node is lost": found(detector="node_lost", component=""),
    "that its node is down": found(detector="node_down", component="", proof=True),
}


@pytest.mark.parametrize("finding", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_agent_may_report_its_own_node_only(
    hearing: Handling, finding: Finding, caplog: pytest.LogCaptureFixture
) -> None:
    hearing.handle(hello(finding), send_finding(finding))
    assert changes(hearing) == []
    assert "ignored finding" in caplog.text


def test_finding_from_a_replica_that_is_not_the_nodes_agent_is_ignored(hearing: Handling) -> None:
    tag = tag_of(RUN, OTHER)
    hearing.handle(
        msg.AdmissionRequest(OTHER, tag, N2, 8), msg.AgentHello(OTHER, tag, N2, "host", 8, "boot"), peer=b"other"
    )
    hearing.handle(send_finding(found(), OTHER), send_finding(found(), OTHER, N2), peer=b"other")
    hearing.handle(send_finding(found(), Incarnation(AGENT.replica, 2)), send_finding(found(), ROLE))
    assert changes(hearing) == []


def test_finding_on_another_connection_than_the_agents_hello_is_ignored(hearing: Handling) -> None:
    hearing.handle(hello())
    hearing.handle(send_finding(found()), peer=b"stranger")
    assert changes(hearing) == []
    hearing.handle(send_finding(found()))
    assert changes(hearing) == [(KEY, Verdict.FAIL)]


def test_new_manager_keeps_an_agents_finding_until_the_agent_clears_it(hearing: Handling) -> None:
    hearing.handle(hello(found(), found(component="GPU-2", proof=True)))
    hearing.next_manager()
    hearing.events.clear()
    hearing.handler.finding_gate.restore()
    hearing.handler.finding_gate.on_detected([], {})
    assert changes(hearing) == [], "findings were cleared before the agent has sent its Hello"
    hearing.handle(hello(found(at=UPTIME + 57.0), now=UPTIME + 60.0))
    assert changes(hearing) == [("xid:n1:GPU-2", Verdict.OK)]


def test_unproven_finding_is_cleared_if_the_next_manager_does_not_find_it(hearing: Handling) -> None:
    silent = found("silent", node=N2, detector="node_lost", component="", at=90.0)
    down = found("down", node=N2, detector="node_down", component="", at=90.0, proof=True)
    hearing.handler.finding_gate.on_detected([silent, down], {})
    hearing.next_manager()
    hearing.events.clear()
    hearing.handler.finding_gate.restore()
    hearing.handler.finding_gate.on_detected([], {})
    assert changes(hearing) == [("node_lost:n2", Verdict.OK)], "the only cleared finding must be the one without proof"


def test_worker_silent_together_with_other_nodes_is_not_failed_at_once(hearing: Handling) -> None:
    incarnations = [Incarnation(ReplicaId(name), 1) for name in ("rollout/0", "rollout/1", "trainer/0")]
    first = found("silent", node=None, detector="worker_silence", component="", at=90.0, incarnation=incarnations[0])
    silent = {incarnation: (NodeName(f"n{index}"), 90.0) for index, incarnation in enumerate(incarnations)}
    assert hearing.handler.finding_gate.on_detected([first], silent) == 100.0 + SILENCE_GRACE_S, (
        "the grace is not measured by the manager's clock"
    )
    assert changes(hearing) == [(first.key, Verdict.WARN), ("correlated:run:process:worker_silence", Verdict.WARN)]


def test_node_silent_together_with_others_is_not_failed_at_once(hearing: Handling) -> None:
    first = found("silent", node=N2, detector="node_lost", component="", at=90.0)
    first = msgspec.structs.replace(first, proof=False)
    absent = {NodeName(f"n{index}"): 90.0 for index in (2, 3, 4)}
    assert hearing.handler.finding_gate.on_detected([first], {}, absent) == 100.0 + SILENCE_GRACE_S, (
        "the grace is not measured by the manager's clock"
    )
    assert changes(hearing) == [(first.key, Verdict.WARN), ("correlated:run:node:node_lost", Verdict.WARN)]


def test_findings_of_a_released_or_readmitted_node_are_removed(hearing: Handling) -> None:
    hearing.handle(hello(found()))
    hearing.fold(ev.Decided(Exclude(N1, WHY, Cause.GPU)))
    hearing.fold(ev.Decided(Readmit(N1, WHY)))
    hearing.handler.finding_gate.forget(N1)
    hearing.handler.finding_gate.on_detected([], {})
    assert changes(hearing) == [(KEY, Verdict.FAIL)], "the finding of a readmitted node was recorded again"
    assert hearing.state is not None
    assert hearing.state.findings == {}


def test_storage_stall_that_an_agent_reports_reaches_the_detectors(hearing: Handling) -> None:
    def stalled() -> bool:
        return hearing.monitor.nodes[N1].storage_stall.stalled

    mount = msgspec.structs.replace(found(detector="mounts", component="/scratch"), flags=(Flag.STORAGE_STALLS,))
    hearing.handle(hello(mount))
    assert stalled()
    hearing.next_manager()
    hearing.handler.finding_gate.restore()
    assert stalled(), "the next manager has not restored the stall from the journal"
    hearing.handle(hello(mount), send_finding(msgspec.structs.replace(mount, flags=())))
    assert not stalled()
    hearing.handle(send_finding(mount))
    assert stalled()
    hearing.handler.finding_gate.forget(N1)
    assert not stalled()


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_manager_detectors_report_under_their_own_names() -> None:
    assert {detector.__name__ for detector in NODE_DETECTORS} == MANAGER_DETECTORS >= {"node_down", "node_lost"}


def test_settings_apply_to_findings_of_agents_too(tmp_path: Path) -> None:
    hearing = Handling(tmp_path, *LAUNCHED)
    assert hearing.state is not None
    view = msgspec.structs.replace(hearing.state.job, health=HealthSpec(checks={"xid": "observe", "ecc": "off"}))
    hearing.state = msgspec.structs.replace(hearing.state, job=view)
    hearing.handle(msg.AdmissionRequest(AGENT, TAG, N1, 7), hello(found(), found(detector="ecc")))
    assert changes(hearing) == [(KEY, Verdict.WARN)]


def test_agents_failure_with_a_cause_outside_of_the_node_is_recorded_with_the_reason(hearing: Handling) -> None:
    hearing.handle(hello(msgspec.structs.replace(found(), cause=Cause.SOFTWARE)))
    assert hearing.state is not None
    recorded = hearing.state.findings[KEY]
    assert (recorded.verdict, [line.source for line in recorded.evidence]) == (Verdict.WARN, ["nvml", "manager"])


# ── stacks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_hang_is_recorded_as_a_failure_once_its_stacks_are_collected(hearing: Handling) -> None:
    hang = found("no token", node=None, detector="no_progress", component="", at=90.0, incarnation=ROLE)
    line = Evidence(STACKS, "step (engine.py:95)", 99.0)
    gate = hearing.handler.finding_gate
    gate.on_detected([hang], {}, stacks={hang.key: HangStacks(pending=True)})
    gate.on_detected([hang], {}, stacks={hang.key: HangStacks(pending=False, evidence=(line,))})
    recorded = [event.finding for event in hearing.events if isinstance(event, ev.FindingChanged)]
    assert [finding.verdict for finding in recorded] == [Verdict.WARN, Verdict.FAIL]
    assert recorded[-1].evidence == (*hang.evidence, line)


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_load_of_a_step_is_attributed_to_its_incarnation(tmp_path: Path) -> None:
    tag = tag_of(RUN, ROLE)
    hearing = Handling(tmp_path, *LAUNCHED, ev.Intended(Launch(ROLE, tag, "pool", N1, WHY)))
    recorded_loads: list[tuple[Incarnation, float, float | None, bool]] = []

    def load(
        incarnation: Incarnation,
        cpu: float,
        gpu: float | None,
        now: float,
        tensor: float | None = None,
        stopped: bool = False,
    ) -> None:
        recorded_loads.append((incarnation, cpu, gpu, stopped))

    hearing.monitor.on_load = load  # type: ignore[method-assign]
    loads = (msg.Load(tag, 1.5, 0.25, stopped=True), msg.Load("another.step", 9.0), msg.Load(TAG, 0.1))
    hearing.handle(msg.AdmissionRequest(AGENT, TAG, N1, 7), hello(), msg.AgentHeartbeat(AGENT, N1, (tag,), loads))
    assert recorded_loads == [(ROLE, 1.5, 0.25, True)]


# ── several findings, and several managers ───────────────────────────────────────────────────────────────────────────
def both_agents_greet(handling: Handling, *mine: Finding, theirs: tuple[Finding, ...] = ()) -> None:
    """Let the agents of both nodes send their Hello."""
    tag = tag_of(RUN, OTHER)
    handling.handle(hello(*mine))
    wanted = msg.AdmissionRequest(OTHER, tag, N2, 8)
    handling.handle(
        wanted, msg.AgentHello(OTHER, tag, N2, "host", 8, "boot", findings=theirs, now=UPTIME), peer=b"other"
    )


def verdicts(handling: Handling) -> dict[str, Verdict]:
    assert handling.state is not None
    return {key: one.verdict for key, one in handling.state.findings.items()}


SHARED = {KEY: Verdict.WARN, "xid:n2:GPU-1": Verdict.WARN, "correlated:run:gpu:xid": Verdict.WARN}


def test_correlation_survives_a_new_manager_that_knows_one_of_two_nodes(hearing: Handling) -> None:
    both_agents_greet(hearing, found(), theirs=(found(node=N2),))
    assert verdicts(hearing) == SHARED
    hearing.next_manager()
    hearing.events.clear()
    hearing.handler.finding_gate.restore()
    hearing.handler.finding_gate.on_detected([], {})
    hearing.handle(hello(found(at=UPTIME + 57.0), now=UPTIME + 60.0))
    assert verdicts(hearing) == SHARED
    assert changes(hearing) == [], "findings that have not changed were recorded again"


def test_new_manager_does_not_correlate_an_old_failure_with_a_new_one(hearing: Handling) -> None:
    hearing.handle(hello(found(at=UPTIME - 3600.0)))
    hearing.next_manager()
    hearing.handler.finding_gate.restore()
    hearing.handler.finding_gate.on_detected([], {})
    both_agents_greet(hearing, found(at=UPTIME - 3600.0), theirs=(found(node=N2),))
    assert verdicts(hearing) == {KEY: Verdict.FAIL, "xid:n2:GPU-1": Verdict.FAIL}


@pytest.mark.parametrize("part", ["GPU-1", ""])
def test_restarted_agent_that_cannot_read_clears_no_finding(hearing: Handling, part: str) -> None:
    hearing.handle(hello(found(), found("hot", Verdict.WARN, detector="heat")))
    hearing.handle(hello(found("NVML does not answer", Verdict.UNKNOWN, component=part)))
    assert verdicts(hearing) == {KEY: Verdict.FAIL}, (
        "the agent has cleared a finding of a source that it cannot read, or kept another one"
    )


def test_agent_hello_for_another_node_is_ignored(hearing: Handling, caplog: pytest.LogCaptureFixture) -> None:
    both_agents_greet(hearing, theirs=(found(node=N2),))
    heard = hearing.monitor.nodes[N2].last_message_at
    hearing.events.clear()
    for lie in (
        msg.AgentHello(AGENT, TAG, N2, "host", 7, "boot"),
        msg.AgentHeartbeat(AGENT, N2, (tag_of(RUN, OTHER),)),
    ):
        caplog.clear()
        hearing.handle(lie)
        assert f"it is not the agent of {N2}" in caplog.text
    assert (hearing.events, hearing.monitor.nodes[N2].last_message_at) == ([], heard)
    assert verdicts(hearing) == {"xid:n2:GPU-1": Verdict.FAIL}


def test_excess_findings_keep_the_worst_with_limited_evidence(hearing: Handling) -> None:
    many = [found("hot " * 10_000, Verdict.WARN, component=f"GPU-{i}") for i in range(MAX_FINDINGS_PER_NODE)]
    hearing.handle(hello(*many, found(component="last")))
    hearing.handle(send_finding(found(component="later")), send_finding(found("hot", Verdict.WARN, component="less")))
    assert verdicts(hearing)["xid:n1:last"] is verdicts(hearing)["xid:n1:later"] is Verdict.FAIL
    assert "xid:n1:less" not in verdicts(hearing)
    assert len(verdicts(hearing)) == MAX_FINDINGS_PER_NODE
    assert hearing.state is not None
    assert max(len(one.evidence[0].text) for one in hearing.state.findings.values()) <= 1000


def test_unchanged_findings_of_a_thousand_nodes_are_not_evaluated_again(
    hearing: Handling, monkeypatch: pytest.MonkeyPatch
) -> None:
    hearing.handler.finding_gate.on_detected([], {})
    hearing.handle(hello(found("hot", Verdict.WARN)))
    monkeypatch.setattr("rrl.manager.intake.finding_gate.publish", None)
    assert hearing.handler.finding_gate.on_detected([], {}) == float("inf")
    with pytest.raises(TypeError):
        hearing.handle(send_finding(found()))
