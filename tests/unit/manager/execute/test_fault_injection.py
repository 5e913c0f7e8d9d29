"""Who is asked to perform a fault, and what is told of it whatever becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.manager.cluster.base import Refused, Unanswered
from rrl.manager.execute import fault_injection
from rrl.manager.execute.fault_injection import FaultInjector, interrupted_event
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, InjectFault, Rung, Why
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.manager import virtual
from rrl.tests.support.manager.jobs import ROLLOUTS, job
from rrl.tests.support.manager.world import World
from rrl.transport import messages as msg

R0 = ROLLOUTS[0]


class Nodes:
    """What a cluster answers to a fault request."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.harmed: list[Fault] = []

    async def inject_fault(self, fault: Fault) -> str:
        self.harmed.append(fault)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bench:
    def __init__(self, tmp_path: Path, answer: str | Exception = "done") -> None:
        self.world = World(msgspec.structs.replace(job(), faults_allowed=True)).steady()
        self.run = RunDir(tmp_path / "run-1")
        self.run.path.mkdir()
        self.sent: list[tuple[bytes, Any]] = []
        self.nodes = Nodes(answer)
        self.incarnation = self.world.state.replica(R0).incarnation
        self.node = self.world.node_of(R0)
        agent = self.world.state.replica(ReplicaId(f"agent/{self.node}"))
        self.workers = {self.incarnation: b"worker"}
        cluster: Any = self.nodes
        self.performer = FaultInjector(
            self.run, cluster, lambda: self.world.state, self.record, self._send, {agent.step or "": b"agent"},
            self.workers.get,
        )  # fmt: skip

    def record(self, event: ev.Event) -> None:
        self.world.record(event)
        self.performer.on_event(event)

    async def _send(self, peer: bytes, message: Any, request: int | None) -> None:
        self.sent.append((peer, message))

    def intend(
        self, kind: FaultKind, target: str = R0, seconds: float = 0.0, incarnation: Incarnation | None = None
    ) -> InjectFault:
        fault = Fault("f0", kind, target, seconds=seconds)
        node = self.node if target == R0 else NodeName("")
        step = self.world.state.replica(R0).step or ""
        action = InjectFault(fault, step, node, Why(("because",)), incarnation)
        self.record(ev.Intended(action))
        return action

    def events(self) -> list[ev.FaultInjected]:
        return [stamped.event for stamped in self.world.events if isinstance(stamped.event, ev.FaultInjected)]

    def play(self, action: InjectFault, during: Callable[[], Awaitable[None]] | None = None) -> list[ev.FaultInjected]:
        async def story() -> None:
            performing = asyncio.create_task(self.performer.inject(action))
            if during is not None:
                await during()
            async with asyncio.timeout(1000.0):
                await performing
            assert action.tag not in self.world.state.intents
            assert action.fault.id in self.world.state.triggered_faults

        virtual.run(story())
        return self.events()


@pytest.mark.parametrize(("kind", "peer"), [(FaultKind.KILL, b"agent"), (FaultKind.EXCEPTION, b"worker")])
def test_signals_are_the_agents_and_the_rest_is_the_roles_own(tmp_path: Path, kind: FaultKind, peer: bytes) -> None:
    bench = Bench(tmp_path)
    action = bench.intend(kind, incarnation=bench.incarnation)

    async def answers() -> None:
        await eventually(lambda: bench.sent)
        bench.record(ev.FaultInjected("f0", bench.incarnation, True, "SIGKILL to process group 7"))

    (told,) = bench.play(action, answers)
    assert bench.sent == [(peer, msg.Inject(action.fault, action.step))]
    assert (told.ok, told.detail) == (True, "SIGKILL to process group 7")


def test_an_agent_that_does_not_answer_leaves_it_unknown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (told,) = bench.play(bench.intend(FaultKind.KILL, incarnation=bench.incarnation))
    assert (told.ok, told.unknown, told.incarnation) == (False, True, bench.incarnation)
    assert told.detail == "nobody said within 20 s that it was performed"


def test_a_role_that_is_replaced_before_it_called_leaves_it_unknown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def replaced() -> None:
        await asyncio.sleep(10 * fault_injection.ANSWER_TIMEOUT_S)  # it may take as long as it likes to call
        assert bench.events() == []
        bench.record(ev.Decided(Fence(bench.incarnation, Rung.IN_PLACE, Why(("it hangs",)))))

    (told,) = bench.play(bench.intend(FaultKind.EXCEPTION, incarnation=bench.incarnation), replaced)
    assert (told.ok, told.unknown) == (False, True)


@pytest.mark.parametrize("code", [3, 1])
def test_an_exit_whose_answer_was_lost_is_known_by_its_code(tmp_path: Path, code: int) -> None:
    bench = Bench(tmp_path)
    action = bench.intend(FaultKind.EXIT, incarnation=bench.incarnation)
    action = msgspec.structs.replace(action, fault=msgspec.structs.replace(action.fault, amount=3.0))

    async def ends() -> None:
        await eventually(lambda: bench.sent)
        bench.record(ev.StepEnded(bench.incarnation, action.step, code, None, ExitReason.EXITED))
        bench.record(ev.Decided(Fence(bench.incarnation, Rung.IN_PLACE, Why(("it ended",)))))

    (told,) = bench.play(action, ends)
    assert (told.ok, told.unknown) == (code == 3, code != 3)


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.EXCEPTION])
def test_who_cannot_be_told_is_not_hit(tmp_path: Path, kind: FaultKind) -> None:
    bench = Bench(tmp_path)
    bench.performer = FaultInjector(
        bench.run, bench.performer._cluster, lambda: bench.world.state, bench.record, bench._send, {},
        lambda incarnation: None,
    )  # fmt: skip
    (told,) = bench.play(bench.intend(kind, incarnation=bench.incarnation))
    assert (told.ok, told.unknown, bench.sent) == (False, False, [])


def test_a_cluster_is_asked_to_harm_the_node_and_what_lasts_is_told_to_be_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "n3 is gone")
    began, over = bench.play(bench.intend(FaultKind.CRASH, seconds=60.0))
    assert [fault.target for fault in bench.nodes.harmed] == [bench.node]
    assert (began.ok, began.detail, began.node, began.target) == (True, "n3 is gone", bench.node, R0)
    assert (over.ok, over.ended) == (True, True)


@pytest.mark.parametrize("answer", [Refused("not here"), Unanswered("timed out")])
def test_what_a_cluster_refuses_or_does_not_answer_is_told(tmp_path: Path, answer: Exception) -> None:
    bench = Bench(tmp_path, answer)
    (told,) = bench.play(bench.intend(FaultKind.OUTAGE, "", seconds=5.0))
    assert (told.ok, told.unknown) == (False, isinstance(answer, Unanswered))
    assert str(answer) in told.detail


def test_the_manager_kills_itself_and_its_successor_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    action = bench.intend(FaultKind.KILL, "manager")
    asyncio.run(bench.performer.inject(action))
    assert killed == [(os.getpid(), signal.SIGKILL)]
    told = interrupted_event(action, 2)
    assert (told.ok, told.unknown, told.target, told.incarnation) == (True, False, "manager", None)


def test_a_fault_whose_manager_died_over_it_is_told_as_unknown(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    told = interrupted_event(bench.intend(FaultKind.KILL, incarnation=bench.incarnation), 2)
    assert (told.ok, told.unknown, told.incarnation, told.node) == (False, True, bench.incarnation, bench.node)
    bench.record(told)
    assert bench.world.state.intents == {}


def test_a_full_disk_is_given_back_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    def filled(run: RunDir) -> str:
        run.disk_filler.write_bytes(b"1")
        return "filled"

    async def full() -> None:
        await eventually(bench.run.disk_filler.exists)

    monkeypatch.setattr(fault_injection, "fill_disk", filled)
    began, over = bench.play(bench.intend(FaultKind.DISK_FULL, "", seconds=30.0), full)
    assert not bench.run.disk_filler.exists()
    assert (began.detail, over.detail, over.ended) == ("filled", "the room is given back", True)


def test_a_full_disk_is_given_back_when_the_manager_leaves_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    monkeypatch.setattr(fault_injection, "fill_disk", lambda run: str(run.disk_filler.write_bytes(b"1")))

    async def story() -> None:
        task = asyncio.create_task(bench.performer.inject(bench.intend(FaultKind.DISK_FULL, "", seconds=1000.0)))
        await eventually(lambda: bool(bench.events()))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert not bench.run.disk_filler.exists()
