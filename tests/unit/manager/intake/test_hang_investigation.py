"""Before a suspected replica is restarted it is probed, and the stacks of its whole gang are collected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import HealthSpec, Limits, RunSpec
from rrl.core.types import (
    AGENT,
    Cause,
    Evidence,
    Finding,
    Incarnation,
    NodeName,
    ProbeResult,
    Remedy,
    ReplicaId,
    Verdict,
    replica_id,
)
from rrl.health.detection.detect import Detection
from rrl.health.detection.detectors.stack_samples import FIRST_SAMPLE_S
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.health.detection.pipeline import PublicationContext, await_stacks
from rrl.manager.context import PeerConnections, RunContext
from rrl.manager.intake import hang_investigation
from rrl.manager.intake.hang_investigation import RECOLLECT_AFTER_S, STACKS_TIMEOUT_S, HangInvestigator
from rrl.manager.model import events as ev
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World
from rrl.transport import messages as msg

LIMITS = Limits(suspect=3.0, probe=3.0)
STUCK = 'Thread 7 (idle): "MainThread"\n    step (engine.py:95)\n    roll (main.py:9)\n'
WAITS = 'Thread 7 (idle): "MainThread"\n    all_reduce (c10d.py:11)\n    train (main.py:9)\n'


class Investigation:
    """A :class:`HangInvestigator` over a run in which all replicas work, with its messages and events.

    The investigator uses the time of the event loop.
    """

    def __init__(self, folder: Path, job: RunSpec, suspect: ReplicaId) -> None:
        self.world = World(job).steady()
        self.run = RunDir(folder / "run-1")
        self.run.path.mkdir()
        self.incarnation = self.world.state.replica(suspect).incarnation
        self.monitor = HealthMonitor()
        self.sent: list[tuple[bytes, Any]] = []
        self.recorded: list[ev.Event] = []
        self.steps = {
            one.step: str(one.id).encode()
            for one in self.world.state.replicas.values()
            if one.id.startswith(AGENT) and one.step
        }
        self.workers = {self.incarnation: b"worker"}
        self.suspicion = HangInvestigator(
            RunContext(
                self.run,
                self.monitor,
                lambda: self.world.state,
                self.recorded.append,
                self._send,
                self.now,
                PeerConnections(self.workers, self.steps),
            )
        )

    async def _send(self, peer: bytes, message: Any, request: int | None) -> None:
        self.sent.append((peer, message))

    def now(self) -> float:
        return 1000.0 + asyncio.get_running_loop().time()

    def finding(
        self, verdict: Verdict = Verdict.WARN, cause: Cause = Cause.HANG, incarnation: Incarnation | None = None
    ) -> Finding:
        remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
        return Finding(
            "test", verdict, cause, remedy, 5.0, (Evidence("worker", "it hangs", 5.0),), incarnation or self.incarnation
        )

    async def consider(self, *findings: Finding) -> tuple[list[Finding], float]:
        """Investigate findings as the manager does, and wait until all tasks that were started have run.

        Return the published findings, and the time (s) at which the investigator must be called again.
        """
        stacks, again = self.suspicion.investigate(findings)
        published, _ = await_stacks(findings, PublicationContext(self.now(), stacks=stacks))
        await _settled()
        return published, again

    def stack_requests(self) -> list[tuple[bytes, msg.DumpStacks]]:
        return [(peer, message) for peer, message in self.sent if isinstance(message, msg.DumpStacks)]

    async def answer(self, dump: str = STUCK, error: str = "", but: dict[Incarnation, str] | None = None) -> None:
        """Let the agents answer all requests for stack dumps with ``dump``, or with ``error`` if it is given.

        ``but`` has the dumps of the incarnations that differ.
        """
        for peer, order in self.stack_requests():
            agent = self.world.state.replica(ReplicaId(peer.decode())).incarnation
            dumps = {} if error else {41: (but or {}).get(order.target, dump)}
            self.suspicion.on_reply(msg.Stacks(agent, order.target, order.id, dumps, error))
        self.sent.clear()
        await _settled()

    def taken(self) -> list[ev.StacksCollected]:
        return [event for event in self.recorded if isinstance(event, ev.StacksCollected)]


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def rollouts() -> RunSpec:
    return job(limits=LIMITS)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=virtual.VirtualLoop) as runner:
        yield runner


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path, runner: asyncio.Runner) -> Iterator[Investigation]:
    """Return the investigation of a rollout, or of the run and replica that the test's parameter names."""
    desk = Investigation(tmp_path, *getattr(request, "param", (rollouts(), ROLLOUTS[0])))
    yield desk
    runner.run(desk.suspicion.close())


in_a_gang = pytest.mark.parametrize("desk", [(gang_job(4, 2, limits=LIMITS), TRAINER)], indirect=True)


def texts(finding: Finding) -> list[str]:
    return [line.text for line in finding.evidence]


# ── stacks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_warning_of_a_hang_collects_stacks_and_names_the_place(desk: Investigation) -> None:
    published, _ = await desk.consider(desk.finding())
    assert published == [desk.finding()], "a warning was delayed until its stacks were collected"
    node = desk.world.state.replica(desk.incarnation.replica).node
    ((peer, order),) = desk.stack_requests()
    assert (peer, order.target) == (f"agent/{node}".encode(), desk.incarnation)
    assert order.tag == desk.world.state.replica(desk.incarnation.replica).step
    await desk.answer()
    ((finding,), again) = await desk.consider(desk.finding())
    assert again == float("inf")
    (event,) = desk.taken()
    assert event.groups == (f"{desk.incarnation}: step (engine.py:95) < roll (main.py:9)",)
    assert texts(finding) == ["it hangs", *event.groups, f"all stacks: {event.file}"]
    path = desk.run.path / event.file
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert "process 41" in path.read_text()
    assert STUCK in path.read_text() + "\n"


async def test_fail_without_a_warning_is_a_warning_until_its_stacks_arrive(desk: Investigation) -> None:
    ((held,), again) = await desk.consider(desk.finding(Verdict.FAIL))
    assert (held.verdict, held.remedy, held.key) == (Verdict.WARN, Remedy.NONE, desk.finding().key)
    assert again == desk.now() + STACKS_TIMEOUT_S
    await desk.answer()
    ((published,), _) = await desk.consider(desk.finding(Verdict.FAIL))
    assert (published.verdict, published.remedy) == (Verdict.FAIL, Remedy.RESTART)
    assert any("engine.py:95" in text for text in texts(published))


async def test_fail_waits_at_most_the_timeout_for_an_agent_without_reply(desk: Investigation) -> None:
    await desk.consider(desk.finding(Verdict.FAIL))
    await asyncio.sleep(STACKS_TIMEOUT_S - 0.1)
    ((held,), _) = await desk.consider(desk.finding(Verdict.FAIL))
    assert held.verdict is Verdict.WARN
    await asyncio.sleep(0.2)
    ((published,), _) = await desk.consider(desk.finding(Verdict.FAIL))
    assert published.verdict is Verdict.FAIL
    assert texts(published)[1:] == [f"no stacks: no answer within {STACKS_TIMEOUT_S:g} s"]
    assert [event.file for event in desk.taken()] == [""]


async def test_fail_after_a_warning_is_published_at_once(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    await asyncio.sleep(STACKS_TIMEOUT_S + 1)
    ((published,), _) = await desk.consider(desk.finding(Verdict.FAIL))
    assert published.verdict is Verdict.FAIL


async def test_fail_is_not_deferred_if_no_agent_is_connected(desk: Investigation) -> None:
    desk.steps.clear()
    published, again = await desk.consider(desk.finding(Verdict.FAIL))
    assert (published, again) == ([desk.finding(Verdict.FAIL)], float("inf"))
    assert desk.taken() == []


@pytest.mark.parametrize("cause", [Cause.PROCESS, Cause.GPU])
async def test_finding_that_is_not_a_hang_is_unchanged(desk: Investigation, cause: Cause) -> None:
    proved = msgspec.structs.replace(desk.finding(Verdict.FAIL), cause=cause)
    published, _ = await desk.consider(proved)
    assert (published, desk.sent) == ([proved], [])


@pytest.mark.parametrize(
    "desk",
    [(msgspec.structs.replace(rollouts(), health=HealthSpec(checks={"test": "off"})), ROLLOUTS[0])],
    indirect=True,
)
@pytest.mark.parametrize("verdict", [Verdict.WARN, Verdict.FAIL])
async def test_hang_whose_check_is_off_is_not_investigated(desk: Investigation, verdict: Verdict) -> None:
    published, again = await desk.consider(desk.finding(verdict))
    assert (published, again, desk.sent) == ([desk.finding(verdict)], float("inf"), [])


async def test_silent_worker_on_a_live_node_is_investigated_before_its_restart(desk: Investigation) -> None:
    silent = msgspec.structs.replace(desk.finding(Verdict.FAIL, Cause.PROCESS), detector="worker_silence")
    ((held,), _) = await desk.consider(silent)
    assert held.verdict is Verdict.WARN
    await desk.answer()
    ((published,), _) = await desk.consider(silent)
    assert published.verdict is Verdict.FAIL
    assert any("engine.py:95" in text for text in texts(published))


async def test_stacks_of_a_hang_are_collected_once_and_again_if_it_returns(desk: Investigation) -> None:
    for _ in range(3):
        await desk.consider(desk.finding())
        await desk.answer()
    await desk.consider()
    await desk.consider(desk.finding())
    assert (desk.stack_requests(), len(desk.taken())) == ([], 1)
    await asyncio.sleep(RECOLLECT_AFTER_S + 1)
    await desk.consider()
    await desk.consider(desk.finding())
    assert len(desk.stack_requests()) == 1


async def test_fail_that_began_after_the_stacks_is_investigated_again(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    await desk.answer(WAITS)
    await desk.consider()  # the replica continued in between, and now it really hangs
    hang = msgspec.structs.replace(desk.finding(Verdict.FAIL), since=desk.now() + 1)
    await asyncio.sleep(2)
    ((held,), _) = await desk.consider(hang)
    assert held.verdict is Verdict.WARN
    await desk.answer(STUCK)
    ((published,), _) = await desk.consider(hang)
    assert published.verdict is Verdict.FAIL
    assert any("step (engine.py" in text for text in texts(published))
    assert not any("all_reduce" in text for text in texts(published))


@in_a_gang
async def test_stacks_of_all_gang_members_are_collected_and_the_outlier_is_named(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    members = sorted(order.target for _, order in desk.stack_requests())
    assert [incarnation.replica for incarnation in members] == [
        "trainer/0",
        "trainer/0.1",
        "trainer/0.2",
        "trainer/0.3",
    ]
    await desk.answer(WAITS, but={members[2]: STUCK})
    (event,) = desk.taken()
    assert event.outliers == (members[2],)
    assert event.groups[0].startswith("outlier trainer/0.2#")
    assert event.groups[1].startswith("3 of 4 alike: all_reduce")


@in_a_gang
async def test_gang_whose_members_all_hang_is_investigated_once(desk: Investigation) -> None:
    members = [one.incarnation for one in desk.world.state.replicas.values() if one.id.startswith("trainer/")]
    await desk.consider(*[desk.finding(incarnation=incarnation) for incarnation in members])
    assert len(desk.stack_requests()) == len(members) == 4
    await desk.answer(WAITS)
    published, _ = await desk.consider(
        *[desk.finding(Verdict.FAIL, incarnation=incarnation) for incarnation in members]
    )
    assert len(desk.taken()) == 1
    assert all(any("all_reduce" in text for text in texts(finding)) for finding in published)


async def test_hangs_beyond_the_limit_are_neither_investigated_nor_deferred(
    desk: Investigation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_investigation, "MAX_CONCURRENT", 1)

    other = desk.world.state.replica(ROLLOUTS[1]).incarnation
    first, second = (
        await desk.consider(*[desk.finding(Verdict.FAIL, incarnation=one) for one in (desk.incarnation, other)])
    )[0]
    assert (first.verdict, second.verdict) == (Verdict.WARN, Verdict.FAIL)
    assert [order.target for _, order in desk.stack_requests()] == [desk.incarnation]


@in_a_gang
async def test_member_without_stacks_does_not_suppress_those_of_the_others(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    (_, first), *rest = desk.stack_requests()
    for peer, order in rest:
        agent = desk.world.state.replica(ReplicaId(peer.decode())).incarnation
        desk.suspicion.on_reply(msg.Stacks(agent, order.target, order.id, {1: WAITS}))
    await asyncio.sleep(STACKS_TIMEOUT_S + 0.1)
    await _settled()
    (event,) = desk.taken()
    assert "no answer" in (desk.run.path / event.file).read_text()
    assert str(first.target) not in event.groups[0]


async def test_missing_stacks_are_explained_in_the_evidence(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    await desk.answer(error="the step has no process left")
    ((published,), _) = await desk.consider(desk.finding())
    assert texts(published)[1:] == ["no stacks: the step has no process left"]


async def test_stacks_from_another_agent_or_repeated_ones_are_ignored(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    ((peer, order),) = desk.stack_requests()
    strangers = [
        one.incarnation
        for one in desk.world.state.replicas.values()
        if one.id.startswith(AGENT) and one.id != peer.decode()
    ]
    desk.suspicion.on_reply(msg.Stacks(strangers[0], order.target, order.id, {1: WAITS}))
    desk.suspicion.on_reply(msg.Stacks(strangers[0], order.target, order.id + 1, {1: WAITS}))
    await _settled()
    assert desk.taken() == []
    await desk.answer()
    assert "engine.py" in desk.taken()[0].groups[0]


async def test_unwritable_run_directory_loses_the_file_but_not_the_evidence(desk: Investigation) -> None:
    desk.run.stacks.write_text("in the way")
    await desk.consider(desk.finding())
    await desk.answer()
    (event,) = desk.taken()
    assert (event.file, len(event.groups)) == ("", 1)


async def test_function_names_are_cleaned_of_control_characters(desk: Investigation) -> None:
    await desk.consider(desk.finding())
    await desk.answer('Thread 7 (idle): "MainThread"\n    a\x1b[31mb (x.py:1)\n')
    assert "\x1b" not in desk.taken()[0].groups[0]


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _generates_then_stalls(investigation: Investigation, until: Callable[[], bool]) -> list[Finding]:
    """Let the replica make tokens for 10 s and then only send heartbeats. Return the findings once ``until`` holds."""
    node, done = NodeName(investigation.world.state.replica(investigation.incarnation.replica).node or ""), 0
    agent = investigation.world.state.replica(replica_id(AGENT, node)).incarnation
    investigation.monitor.on_launched(investigation.incarnation, node, investigation.now())
    investigation.monitor.on_hello(investigation.incarnation, node, "generate", investigation.now())
    for second in range(120):
        done += second < 10
        investigation.monitor.on_agent_message(node, agent, investigation.now())
        investigation.monitor.on_heartbeat(investigation.incarnation, "generate", done, None, investigation.now())
        detected, _ = Detection(investigation.monitor).detect(LIMITS, investigation.now())
        findings, _ = await investigation.consider(*detected)
        if until():
            return findings
        await asyncio.sleep(1.0)
    raise AssertionError("the condition does not hold after 120 s")


def _probes(investigation: Investigation) -> list[msg.Probe]:
    return [message for peer, message in investigation.sent if isinstance(message, msg.Probe) and peer == b"worker"]


async def test_suspect_that_replies_to_its_probe_is_not_failed(desk: Investigation) -> None:
    await _generates_then_stalls(desk, lambda: bool(_probes(desk)))
    probe = _probes(desk)[0]
    assert probe.incarnation == desk.incarnation
    desk.suspicion.on_reply(msg.ProbeReply(desk.incarnation, probe.id, ProbeResult.WORKS, "a token"))
    await asyncio.sleep(LIMITS.probe / 3)
    detected, _ = Detection(desk.monitor).detect(LIMITS, desk.now())
    assert [one for one in detected if one.verdict is Verdict.FAIL] == []
    assert desk.monitor.replicas[desk.incarnation.replica].probe.answer_count == 1


async def test_probe_reply_that_work_is_impossible_fails_the_replica(desk: Investigation) -> None:
    await _generates_then_stalls(desk, lambda: bool(_probes(desk)))
    failed = msg.ProbeReply(desk.incarnation, _probes(desk)[0].id, ProbeResult.FAILED, "RuntimeError: \x1b not finite")
    desk.suspicion.on_reply(failed)
    (found,) = [one for one in Detection(desk.monitor).detect(LIMITS, desk.now())[0] if one.verdict is Verdict.FAIL]
    assert "RuntimeError:   not finite" in found.evidence[0].text


async def test_unconnected_suspect_counts_as_probed(desk: Investigation) -> None:
    desk.workers.clear()
    probes = desk.monitor.replicas
    await _generates_then_stalls(desk, lambda: probes[desk.incarnation.replica].probe.pending_since is not None)
    assert not [message for _, message in desk.sent if isinstance(message, msg.Probe)]


async def test_reply_to_an_earlier_managers_probe_is_ignored(desk: Investigation) -> None:
    await _generates_then_stalls(desk, lambda: bool(_probes(desk)))
    desk.suspicion.on_reply(msg.ProbeReply(desk.incarnation, 1, ProbeResult.WORKS, "a token"))
    assert desk.monitor.replicas[desk.incarnation.replica].probe.answer_count == 0


# ── samples of stacks ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("desk", [(gang_job(ranks=2), TRAINER)], indirect=True)
async def test_long_blind_step_has_its_stacks_sampled_without_a_record(desk: Investigation) -> None:
    members = [replica_id("trainer", 0), ReplicaId("trainer/0.1")]

    began = desk.now()
    for one in members:
        replica = desk.world.state.replica(one)
        assert replica.node is not None
        desk.monitor.on_launched(replica.incarnation, replica.node, began)
        desk.monitor.on_hello(replica.incarnation, replica.node, "train", began)
    await asyncio.sleep(FIRST_SAMPLE_S)
    for one in members:
        incarnation = desk.world.state.replica(one).incarnation
        desk.monitor.on_heartbeat(incarnation, "train", 0, None, desk.now())
        desk.monitor.on_load(incarnation, 1.0, 1.0, desk.now())
    Detection(desk.monitor).detect(LIMITS, desk.now())
    await desk.consider()
    assert {order.target.replica for _, order in desk.stack_requests()} == set(members)
    await desk.consider()
    assert len(desk.stack_requests()) == len(members), "a second sample was requested before the first one was complete"
    await desk.answer(WAITS)
    await asyncio.sleep(1)
    view = desk.monitor.replicas[members[0]]
    assert view.stacks.sample is not None
    assert view.stacks.sample.alike
    assert view.stacks.still_since == desk.now() - 1
    assert desk.taken() == []
    await desk.consider()
    assert desk.stack_requests() == [], "the next sample was requested too early"


@pytest.mark.parametrize("desk", [(rollouts(), TRAINER)], indirect=True)
async def test_sample_that_no_agent_answers_counts_as_unequal(desk: Investigation) -> None:
    replica = desk.world.state.replica(TRAINER)
    assert replica.node is not None
    desk.monitor.on_launched(replica.incarnation, replica.node, desk.now())
    desk.monitor.on_hello(replica.incarnation, replica.node, "train", desk.now())
    await asyncio.sleep(FIRST_SAMPLE_S)
    desk.monitor.on_heartbeat(replica.incarnation, "train", 0, None, desk.now())
    desk.monitor.on_load(replica.incarnation, 1.0, 1.0, desk.now())
    Detection(desk.monitor).detect(LIMITS, desk.now())
    await desk.consider()
    assert desk.stack_requests() != []
    await asyncio.sleep(STACKS_TIMEOUT_S + 1)
    view = desk.monitor.replicas[TRAINER]
    assert (view.stacks.sample, view.stacks.latest_at) == (None, desk.now() - 1)
