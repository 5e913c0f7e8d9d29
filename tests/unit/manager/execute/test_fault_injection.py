"""The process that injects each kind of fault, and the events that are recorded about the fault."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.cluster.base import Refused, Unanswered
from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason
from rrl.core.run_dir import RunDir
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import PeerConnections, RunContext
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


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class FaultyCluster:
    """A cluster that answers every fault with the same text or error."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.injected: list[Fault] = []

    async def inject_fault(self, fault: Fault) -> str:
        self.injected.append(fault)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Bench:
    """A fault injector in a steady run, with scripted peers and cluster."""

    def __init__(self, tmp_path: Path, answer: str | Exception = "done") -> None:
        self.world = World(msgspec.structs.replace(job(), faults_allowed=True)).steady()
        self.run = RunDir(tmp_path / "run-1")
        self.run.path.mkdir()
        self.sent: list[tuple[bytes, Any]] = []
        self.nodes = FaultyCluster(answer)
        self.incarnation = self.world.state.replica(R0).incarnation
        self.node = self.world.node_of(R0)
        agent = self.world.state.replica(ReplicaId(f"agent/{self.node}"))
        self.workers = {self.incarnation: b"worker"}
        cluster: Any = self.nodes
        self.injector = FaultInjector(
            self.context(PeerConnections(self.workers, {agent.step or "": b"agent"})), cluster
        )

    def context(self, connections: PeerConnections) -> RunContext:
        world = self.world
        return RunContext(
            self.run, HealthMonitor(), lambda: world.state, self.record, self._send, lambda: world.now, connections
        )

    def record(self, event: ev.Event) -> None:
        self.world.record(event)
        self.injector.on_event(event)

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

    def inject(
        self, action: InjectFault, during: Callable[[], Awaitable[None]] | None = None
    ) -> list[ev.FaultInjected]:
        async def scenario() -> None:
            injecting = asyncio.create_task(self.injector.inject(action))
            if during is not None:
                await during()
            async with asyncio.timeout(1000.0):
                await injecting
            assert action.tag not in self.world.state.intents
            assert action.fault.id in self.world.state.triggered_faults

        virtual.run(scenario())
        return self.events()


@pytest.mark.parametrize(("kind", "peer"), [(FaultKind.KILL, b"agent"), (FaultKind.EXCEPTION, b"worker")])
def test_signal_faults_go_to_the_agent_and_others_to_the_role(kind: FaultKind, peer: bytes, bench: Bench) -> None:
    action = bench.intend(kind, incarnation=bench.incarnation)

    async def answers() -> None:
        await eventually(lambda: bench.sent)
        bench.record(ev.FaultInjected("f0", bench.incarnation, True, "SIGKILL to process group 7"))

    (result,) = bench.inject(action, answers)
    assert bench.sent == [(peer, msg.Inject(action.fault, action.step))]
    assert (result.ok, result.detail) == (True, "SIGKILL to process group 7")


def test_unanswered_agent_leaves_the_fault_unknown(bench: Bench) -> None:
    (result,) = bench.inject(bench.intend(FaultKind.KILL, incarnation=bench.incarnation))
    assert (result.ok, result.unknown, result.incarnation) == (False, True, bench.incarnation)
    assert result.detail == "no confirmation within 20 s that the fault was injected"


def test_role_replaced_before_its_call_leaves_the_fault_unknown(bench: Bench) -> None:

    async def replaced() -> None:
        await asyncio.sleep(10 * fault_injection.ANSWER_TIMEOUT_S)  # the role may call the worker API at any later time
        assert bench.events() == []
        bench.record(ev.Decided(Fence(bench.incarnation, Rung.IN_PLACE, Why(("it hangs",)))))

    (result,) = bench.inject(bench.intend(FaultKind.EXCEPTION, incarnation=bench.incarnation), replaced)
    assert (result.ok, result.unknown) == (False, True)


@pytest.mark.parametrize("code", [3, 1])
def test_exit_with_a_lost_answer_is_confirmed_by_its_code(code: int, bench: Bench) -> None:
    action = bench.intend(FaultKind.EXIT, incarnation=bench.incarnation)
    action = msgspec.structs.replace(action, fault=msgspec.structs.replace(action.fault, amount=3.0))

    async def ends() -> None:
        await eventually(lambda: bench.sent)
        bench.record(ev.StepEnded(bench.incarnation, action.step, code, None, ExitReason.EXITED))
        bench.record(ev.Decided(Fence(bench.incarnation, Rung.IN_PLACE, Why(("it ended",)))))

    (result,) = bench.inject(action, ends)
    assert (result.ok, result.unknown) == (code == 3, code != 3)


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.EXCEPTION])
def test_unreachable_target_is_refused(kind: FaultKind, bench: Bench) -> None:
    bench.injector = FaultInjector(bench.context(PeerConnections()), bench.injector._cluster)
    (result,) = bench.inject(bench.intend(kind, incarnation=bench.incarnation))
    assert (result.ok, result.unknown, bench.sent) == (False, False, [])


def test_cluster_fault_is_injected_and_its_end_recorded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "n3 is gone")
    began, end = bench.inject(bench.intend(FaultKind.CRASH, seconds=60.0))
    assert [fault.target for fault in bench.nodes.injected] == [bench.node]
    assert (began.ok, began.detail, began.node, began.target) == (True, "n3 is gone", bench.node, R0)
    assert (end.ok, end.ended) == (True, True)


@pytest.mark.parametrize("answer", [Refused("not here"), Unanswered("timed out")])
def test_cluster_fault_that_fails_is_recorded(tmp_path: Path, answer: Exception) -> None:
    bench = Bench(tmp_path, answer)
    (result,) = bench.inject(bench.intend(FaultKind.OUTAGE, "", seconds=5.0))
    assert (result.ok, result.unknown) == (False, isinstance(answer, Unanswered))
    assert str(answer) in result.detail


def test_manager_fault_is_recorded_by_the_successor(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    action = bench.intend(FaultKind.KILL, "manager")
    asyncio.run(bench.injector.inject(action))
    assert killed == [(os.getpid(), signal.SIGKILL)]
    result = interrupted_event(action, 2)
    assert (result.ok, result.unknown, result.target, result.incarnation) == (True, False, "manager", None)


def test_fault_interrupted_by_the_managers_death_is_recorded_as_unknown(bench: Bench) -> None:
    result = interrupted_event(bench.intend(FaultKind.KILL, incarnation=bench.incarnation), 2)
    assert (result.ok, result.unknown, result.incarnation, result.node) == (False, True, bench.incarnation, bench.node)
    bench.record(result)
    assert bench.world.state.intents == {}


def test_full_disk_is_freed_after_its_time(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:

    def filled(run: RunDir) -> str:
        run.disk_filler.write_bytes(b"1")
        return "filled"

    async def full() -> None:
        await eventually(bench.run.disk_filler.exists)

    monkeypatch.setattr(fault_injection, "fill_disk", filled)
    began, end = bench.inject(bench.intend(FaultKind.DISK_FULL, "", seconds=30.0), full)
    assert not bench.run.disk_filler.exists()
    assert (began.detail, end.detail, end.ended) == ("filled", "the disk space is free again", True)


async def test_full_disk_is_freed_when_the_manager_exits_early(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(fault_injection, "fill_disk", lambda run: str(run.disk_filler.write_bytes(b"1")))

    task = asyncio.create_task(bench.injector.inject(bench.intend(FaultKind.DISK_FULL, "", seconds=1000.0)))
    await eventually(lambda: bool(bench.events()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert not bench.run.disk_filler.exists()
