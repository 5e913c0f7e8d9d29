"""Before a restart: the suspect is asked for work, and its stacks are taken, of its whole gang, in good time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.run_dir import RunDir
from rrl.core.run_spec import HealthView, JobView, Limits
from rrl.core.types import (
    AGENT,
    Cause,
    Evidence,
    Finding,
    Life,
    NodeName,
    ProbeResult,
    Remedy,
    ReplicaId,
    Verdict,
    replica_id,
)
from rrl.health.detection.detect import detect
from rrl.health.detection.watch import Watch
from rrl.manager.intake import hang_investigation
from rrl.manager.intake.hang_investigation import AGAIN, WITHIN, Suspicion
from rrl.manager.model import events as ev
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import ROLLOUTS, TRAINER, gang_job, job
from rrl.tests.support.manager.world import World
from rrl.transport import messages as msg

LIMITS = Limits(suspect=3.0, probe=3.0)
STUCK = 'Thread 7 (idle): "MainThread"\n    step (engine.py:95)\n    roll (main.py:9)\n'
WAITS = 'Thread 7 (idle): "MainThread"\n    all_reduce (c10d.py:11)\n    train (main.py:9)\n'


class Desk:
    """A :class:`Suspicion` over a run in which everybody works; what it sends and records. Time is the loop's."""

    def __init__(self, folder: Path, job: JobView, suspect: ReplicaId) -> None:
        self.world = World(job).steady()
        self.run = RunDir(folder / "run-1")
        self.run.path.mkdir()
        self.life = self.world.state.replica(suspect).life
        self.watch = Watch()
        self.sent: list[tuple[bytes, Any]] = []
        self.recorded: list[ev.Event] = []
        self.steps = {
            one.step: str(one.id).encode() for one in self.world.state.replicas.values()
            if one.id.startswith(AGENT) and one.step
        }  # fmt: skip
        self.workers = {self.life: b"worker"}
        self.suspicion = Suspicion(
            self.run, self.watch, lambda: self.world.state, self.recorded.append, self._send, self.now, self.workers,
            self.steps,
        )  # fmt: skip

    async def _send(self, peer: bytes, message: Any, ask: int | None) -> None:
        self.sent.append((peer, message))

    def now(self) -> float:
        return 1000.0 + asyncio.get_running_loop().time()

    def finding(self, verdict: Verdict = Verdict.WARN, cause: Cause = Cause.HANG, life: Life | None = None) -> Finding:
        remedy = Remedy.RESTART if verdict is Verdict.FAIL else Remedy.NONE
        return Finding("test", verdict, cause, remedy, 5.0, (Evidence("worker", "it hangs", 5.0),), life or self.life)

    async def consider(self, *findings: Finding) -> tuple[list[Finding], float]:
        """As the manager's turn does; what it set off has happened when this returns."""
        told = self.suspicion.consider(findings)
        await _settled()
        return told

    def orders(self) -> list[tuple[bytes, msg.TakeStacks]]:
        return [(peer, message) for peer, message in self.sent if isinstance(message, msg.TakeStacks)]

    async def answer(self, dump: str = STUCK, error: str = "", but: dict[Life, str] | None = None) -> None:
        """Every agent that was asked answers."""
        for peer, order in self.orders():
            agent = self.world.state.replica(ReplicaId(peer.decode())).life
            dumps = {} if error else {41: (but or {}).get(order.of, dump)}
            self.suspicion.heard(msg.Stacks(agent, order.of, order.id, dumps, error))
        self.sent.clear()
        await _settled()

    def taken(self) -> list[ev.StacksTaken]:
        return [event for event in self.recorded if isinstance(event, ev.StacksTaken)]


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(
    folder: Path, story: Callable[[Desk], Awaitable[None]], job: JobView | None = None,
    suspect: ReplicaId = ROLLOUTS[0],
) -> Desk:  # fmt: skip
    async def main() -> Desk:
        desk = Desk(folder, job or rollouts(), suspect)
        await story(desk)
        await desk.suspicion.close()
        return desk

    return virtual.run(main())


def rollouts() -> JobView:
    return job(limits=LIMITS)


def texts(finding: Finding) -> list[str]:
    return [line.text for line in finding.evidence]


# ── stacks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_warning_of_a_hang_has_its_nodes_agent_take_stacks_and_names_the_place(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        told, _ = await desk.consider(desk.finding())
        assert told == [desk.finding()], "nobody waits for them"
        node = desk.world.state.replica(desk.life.replica).node
        ((peer, order),) = desk.orders()
        assert (peer, order.of) == (f"agent/{node}".encode(), desk.life)
        assert order.tag == desk.world.state.replica(desk.life.replica).step
        await desk.answer()
        ((finding,), again) = await desk.consider(desk.finding())
        assert again == float("inf")
        (event,) = desk.taken()
        assert event.groups == (f"{desk.life}: step (engine.py:95) < roll (main.py:9)",)
        assert texts(finding) == ["it hangs", *event.groups, f"whole: {event.file}"]
        path = desk.run.path / event.file
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert "process 41" in path.read_text()
        assert STUCK in path.read_text() + "\n"

    play(tmp_path, story)


def test_a_failure_without_a_warning_is_told_as_one_until_its_stacks_are_here(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        ((held,), again) = await desk.consider(desk.finding(Verdict.FAIL))
        assert (held.verdict, held.remedy, held.key) == (Verdict.WARN, Remedy.NONE, desk.finding().key)
        assert again == desk.now() + WITHIN
        await desk.answer()
        ((told,), _) = await desk.consider(desk.finding(Verdict.FAIL))
        assert (told.verdict, told.remedy) == (Verdict.FAIL, Remedy.RESTART)
        assert any("engine.py:95" in text for text in texts(told))

    play(tmp_path, story)


def test_a_failure_waits_for_an_agent_that_does_not_answer_no_longer_than_said(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding(Verdict.FAIL))
        await asyncio.sleep(WITHIN - 0.1)
        ((held,), _) = await desk.consider(desk.finding(Verdict.FAIL))
        assert held.verdict is Verdict.WARN
        await asyncio.sleep(0.2)
        ((told,), _) = await desk.consider(desk.finding(Verdict.FAIL))
        assert told.verdict is Verdict.FAIL
        assert texts(told)[1:] == [f"no stacks: no answer within {WITHIN:g} s"]
        assert [event.file for event in desk.taken()] == [""]

    play(tmp_path, story)


def test_a_failure_after_a_warning_is_told_at_once_whether_stacks_came_or_not(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        await asyncio.sleep(WITHIN + 1)
        ((told,), _) = await desk.consider(desk.finding(Verdict.FAIL))
        assert told.verdict is Verdict.FAIL

    play(tmp_path, story)


def test_where_no_agent_can_be_asked_nothing_waits(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.steps.clear()
        told, again = await desk.consider(desk.finding(Verdict.FAIL))
        assert (told, again) == ([desk.finding(Verdict.FAIL)], float("inf"))
        assert desk.taken() == []

    play(tmp_path, story)


@pytest.mark.parametrize("cause", [Cause.PROCESS, Cause.GPU])
def test_what_is_no_hang_is_passed_on_untouched(tmp_path: Path, cause: Cause) -> None:
    async def story(desk: Desk) -> None:
        proved = msgspec.structs.replace(desk.finding(Verdict.FAIL), cause=cause)
        told, _ = await desk.consider(proved)
        assert (told, desk.sent) == ([proved], [])

    play(tmp_path, story)


@pytest.mark.parametrize("verdict", [Verdict.WARN, Verdict.FAIL])
def test_what_the_job_does_not_want_to_hear_of_is_not_looked_into(tmp_path: Path, verdict: Verdict) -> None:
    async def story(desk: Desk) -> None:
        told, again = await desk.consider(desk.finding(verdict))
        assert (told, again, desk.sent) == ([desk.finding(verdict)], float("inf"), [])

    play(tmp_path, story, msgspec.structs.replace(rollouts(), health=HealthView(checks={"test": "off"})))


def test_who_is_silent_while_its_node_is_heard_is_looked_into_before_it_is_restarted(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        silent = msgspec.structs.replace(
            desk.finding(Verdict.FAIL, Cause.PROCESS), detector="worker_silence"
        )  # fmt: skip
        ((held,), _) = await desk.consider(silent)
        assert held.verdict is Verdict.WARN
        await desk.answer()
        ((told,), _) = await desk.consider(silent)
        assert told.verdict is Verdict.FAIL
        assert any("engine.py:95" in text for text in texts(told))

    play(tmp_path, story)


def test_stacks_of_one_hang_are_taken_once_and_anew_when_it_comes_back_later(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        for _ in range(3):
            await desk.consider(desk.finding())
            await desk.answer()
        await desk.consider()
        await desk.consider(desk.finding())
        assert (desk.orders(), len(desk.taken())) == ([], 1)
        await asyncio.sleep(AGAIN + 1)
        await desk.consider()
        await desk.consider(desk.finding())
        assert len(desk.orders()) == 1

    play(tmp_path, story)


def test_a_failure_that_began_after_the_stacks_were_taken_is_looked_into_anew(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        await desk.answer(WAITS)
        await desk.consider()  # it went on, and now it really hangs
        hang = msgspec.structs.replace(desk.finding(Verdict.FAIL), since=desk.now() + 1)
        await asyncio.sleep(2)
        ((held,), _) = await desk.consider(hang)
        assert held.verdict is Verdict.WARN
        await desk.answer(STUCK)
        ((told,), _) = await desk.consider(hang)
        assert told.verdict is Verdict.FAIL
        assert any("step (engine.py" in text for text in texts(told))
        assert not any("all_reduce" in text for text in texts(told))

    play(tmp_path, story)


def test_all_members_of_a_gang_are_looked_into_and_the_one_that_stands_apart_is_named(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        members = sorted(order.of for _, order in desk.orders())
        assert [life.replica for life in members] == ["trainer/0", "trainer/0.1", "trainer/0.2", "trainer/0.3"]
        await desk.answer(WAITS, but={members[2]: STUCK})
        (event,) = desk.taken()
        assert event.outliers == (members[2],)
        assert event.groups[0].startswith("outlier trainer/0.2#")
        assert event.groups[1].startswith("3 of 4 alike: all_reduce")

    play(tmp_path, story, gang_job(4, 2, limits=LIMITS), TRAINER)


def test_a_gang_whose_members_all_hang_is_looked_into_once_and_each_is_told_of_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        members = [one.life for one in desk.world.state.replicas.values() if one.id.startswith("trainer/")]
        await desk.consider(*[desk.finding(life=life) for life in members])
        assert len(desk.orders()) == len(members) == 4
        await desk.answer(WAITS)
        told, _ = await desk.consider(*[desk.finding(Verdict.FAIL, life=life) for life in members])
        assert len(desk.taken()) == 1
        assert all(any("all_reduce" in text for text in texts(finding)) for finding in told)

    play(tmp_path, story, gang_job(4, 2, limits=LIMITS), TRAINER)


def test_of_very_many_hangs_at_once_some_are_looked_into_and_none_of_the_others_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_investigation, "AT_ONCE", 1)

    async def story(desk: Desk) -> None:
        other = desk.world.state.replica(ROLLOUTS[1]).life
        first, second = (await desk.consider(*[desk.finding(Verdict.FAIL, life=one) for one in (desk.life, other)]))[0]
        assert (first.verdict, second.verdict) == (Verdict.WARN, Verdict.FAIL)
        assert [order.of for _, order in desk.orders()] == [desk.life]

    play(tmp_path, story)


def test_members_that_cannot_be_looked_into_do_not_keep_the_others_from_being_told(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        (_, first), *rest = desk.orders()
        for peer, order in rest:
            agent = desk.world.state.replica(ReplicaId(peer.decode())).life
            desk.suspicion.heard(msg.Stacks(agent, order.of, order.id, {1: WAITS}))
        await asyncio.sleep(WITHIN + 0.1)
        await _settled()
        (event,) = desk.taken()
        assert "no answer" in (desk.run.path / event.file).read_text()
        assert str(first.of) not in event.groups[0]

    play(tmp_path, story, gang_job(4, 2, limits=LIMITS), TRAINER)


def test_why_there_are_no_stacks_is_told(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        await desk.answer(error="no process of it is left")
        ((told,), _) = await desk.consider(desk.finding())
        assert texts(told)[1:] == ["no stacks: no process of it is left"]

    play(tmp_path, story)


def test_what_another_agent_says_of_the_suspect_or_says_twice_does_not_count(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        ((peer, order),) = desk.orders()
        strangers = [one.life for one in desk.world.state.replicas.values()
                     if one.id.startswith(AGENT) and one.id != peer.decode()]  # fmt: skip
        desk.suspicion.heard(msg.Stacks(strangers[0], order.of, order.id, {1: WAITS}))
        desk.suspicion.heard(msg.Stacks(strangers[0], order.of, order.id + 1, {1: WAITS}))
        await _settled()
        assert desk.taken() == []
        await desk.answer()
        assert "engine.py" in desk.taken()[0].groups[0]

    play(tmp_path, story)


def test_a_run_directory_that_takes_no_file_costs_the_file_and_not_the_lines(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.run.stacks.write_text("in the way")
        await desk.consider(desk.finding())
        await desk.answer()
        (event,) = desk.taken()
        assert (event.file, len(event.groups)) == ("", 1)

    play(tmp_path, story)


def test_names_of_functions_do_not_reach_a_terminal_as_control_characters(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await desk.consider(desk.finding())
        await desk.answer('Thread 7 (idle): "MainThread"\n    a\x1b[31mb (x.py:1)\n')
        assert "\x1b" not in desk.taken()[0].groups[0]

    play(tmp_path, story)


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _generates_and_falls_silent(desk: Desk, until: Callable[[], bool]) -> list[Finding]:
    """It makes tokens for a while, then beats only; the findings once ``until`` holds."""
    node, done = NodeName(desk.world.state.replica(desk.life.replica).node or ""), 0
    agent = desk.world.state.replica(replica_id(AGENT, node)).life
    desk.watch.launched(desk.life, node, desk.now())
    desk.watch.joined(desk.life, node, "generate", desk.now())
    for second in range(120):
        done += second < 10
        desk.watch.agent_heard(node, agent, desk.now())
        desk.watch.heard(desk.life, "generate", done, None, desk.now())
        detected, _ = detect(desk.watch, LIMITS, desk.now())
        findings, _ = await desk.consider(*detected)
        if until():
            return findings
        await asyncio.sleep(1.0)
    raise AssertionError("it did not come to that")


def _probes(desk: Desk) -> list[msg.Probe]:
    return [message for peer, message in desk.sent if isinstance(message, msg.Probe) and peer == b"worker"]


def test_a_suspect_is_asked_for_work_and_believed_when_it_answers(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await _generates_and_falls_silent(desk, lambda: bool(_probes(desk)))
        probe = _probes(desk)[0]
        assert probe.life == desk.life
        desk.suspicion.heard(msg.Probed(desk.life, probe.id, ProbeResult.WORKS, "a token"))
        await asyncio.sleep(LIMITS.probe / 3)
        detected, _ = detect(desk.watch, LIMITS, desk.now())
        assert [one for one in detected if one.verdict is Verdict.FAIL] == []
        assert desk.watch.replicas[desk.life.replica].probes.answers == 1

    play(tmp_path, story)


def test_an_answer_that_it_cannot_work_fails_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await _generates_and_falls_silent(desk, lambda: bool(_probes(desk)))
        failed = msg.Probed(desk.life, _probes(desk)[0].id, ProbeResult.FAILED, "RuntimeError: \x1b not finite")
        desk.suspicion.heard(failed)
        (found,) = [one for one in detect(desk.watch, LIMITS, desk.now())[0] if one.verdict is Verdict.FAIL]
        assert "RuntimeError:   not finite" in found.evidence[0].text

    play(tmp_path, story)


def test_who_beats_and_does_not_answer_fails_with_the_stacks_taken_meanwhile(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        failed: list[Finding] = []

        def fails() -> bool:
            found = detect(desk.watch, LIMITS, desk.now())[0]
            failed[:] = [one for one in found if one.verdict is Verdict.FAIL]
            return bool(failed)

        await _generates_and_falls_silent(desk, lambda: bool(desk.orders()))
        await desk.answer()
        findings = await _generates_and_falls_silent(desk, fails)
        told = [one for one in findings if one.verdict is Verdict.FAIL]
        assert [one.detector for one in told] == ["no_answer"]
        assert any("engine.py:95" in text for text in texts(told[0]))

    play(tmp_path, story)


def test_who_cannot_be_reached_counts_as_asked(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.workers.clear()
        probes = desk.watch.replicas
        await _generates_and_falls_silent(desk, lambda: probes[desk.life.replica].probes.asked_at is not None)
        assert not [message for _, message in desk.sent if isinstance(message, msg.Probe)]

    play(tmp_path, story)


def test_an_answer_to_an_earlier_managers_question_is_none(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await _generates_and_falls_silent(desk, lambda: bool(_probes(desk)))
        desk.suspicion.heard(msg.Probed(desk.life, 1, ProbeResult.WORKS, "a token"))
        assert desk.watch.replicas[desk.life.replica].probes.answers == 0

    play(tmp_path, story)
