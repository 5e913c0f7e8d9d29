"""Standby processes: real connections and launchers, with a manager that only listens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, ExitRecord, Launch, tag_of
from rrl.core.role_environment import RENDEZVOUS_VARIABLES
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, ReplicaId, Version
from rrl.roles.launcher.environment import GPUS_ENV
from rrl.roles.launcher.process_group import NICE, select_gpus
from rrl.roles.trajectories.types import StepMetrics
from rrl.roles.worker import connection
from rrl.roles.worker.api import Worker
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually
from rrl.tests.support.roles.worker_scene import Manager, Scene
from rrl.transport.control.endpoints import Listener
from rrl.transport.messages import (
    AdmissionRequest,
    Admitted,
    ClockReport,
    Fenced,
    FirstWorkDone,
    Heartbeat,
    Hello,
    Inject,
    Injected,
    Peer,
    Promote,
    StepCommitted,
    Stop,
    VersionAvailable,
    Welcome,
)

STANDBY_PROCESS = Incarnation(ReplicaId("standby/local1"), 3)
MEMBER = Incarnation(ReplicaId("trainer/0.1"), 4)
WAITS = """
import os, rrl
me = rrl.join()
print("built", flush=True)
with me:
    print("inside as", me.launch.incarnation, me.rank, me.world, flush=True)
    me.progress()
    me.stopping.wait(1000)
"""


def standby_launch(scene: Scene, *argv: str) -> Launch:
    launch = scene.at.launch(
        *argv, replica=STANDBY_PROCESS.replica, number=STANDBY_PROCESS.number, env=dict(os.environ)
    )
    launch = msgspec.structs.replace(launch, standby=True)
    write_atomically(scene.at.run.launch_file(launch.tag), msgspec.json.encode(launch))
    return launch


def standby_worker(scene: Scene) -> Worker:
    return Worker(standby_launch(scene), scene.at.run, scene.at.keys)


def follows(me: Worker) -> bool:
    """Return whether a rollout pulls the newest versions."""
    return any("_follow" in repr(task) for task in me._connection._tasks)


def works(me: Worker, begun: threading.Event) -> Callable[[], None]:
    def work() -> None:
        begun.set()
        me.stopping.wait(TIMEOUT_S)

    return work


def promotion(scene: Scene, incarnation: Incarnation = MEMBER) -> Promote:
    return Promote(STANDBY_PROCESS, incarnation, tag_of(scene.at.run.id, STANDBY_PROCESS))


class Ranks(Manager):
    """A manager that names the address at which the two ranks of a trainer meet."""

    world = 2

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener)
        self._add(Peer(MEMBER.gang, joined=True, rendezvous_address="tcp://n7:29"))


@pytest.fixture
def ranks(scene: Scene) -> None:
    scene.manager_type = Ranks


# ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.torch
async def test_standby_reports_its_phase_and_waits_for_its_promotion(
    scene: Scene, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = standby_worker(scene)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    begun = threading.Event()
    async with scene.manager() as manager:
        role = scene.start(me, works(me, begun))
        hello = await manager.wait_for(Hello)
        assert (hello.incarnation, hello.tag, hello.phase) == (STANDBY_PROCESS, me.launch.tag, "standby")
        for _ in range(3):
            manager.received.clear()
            await manager.wait_for(
                Heartbeat, lambda heartbeat: heartbeat.incarnation == STANDBY_PROCESS and heartbeat.phase == "standby"
            )
        assert not begun.is_set(), "the work began with the Welcome of the standby process, before its promotion"
        await manager.send(STANDBY_PROCESS, promotion(scene))
        now = await manager.wait_for(Hello, lambda hello: hello.incarnation == MEMBER)
        assert (now.tag, now.pid, now.phase) == (hello.tag, hello.pid, "starting"), (
            "the member is not the same step and process"
        )
        await eventually(begun.is_set)
        assert (me.launch.incarnation, me.launch.tag, me.rank, me.world) == (MEMBER, hello.tag, 1, 2)
        assert [os.environ[name] for name in RENDEZVOUS_VARIABLES] == ["1", "2", "0", "1", "n7", "29"]
        assert me.options == {}
        await manager.stop(MEMBER)
        await role.end()


async def test_promotion_skips_no_heartbeat_and_none_has_the_old_incarnation_afterwards(scene: Scene) -> None:
    me = standby_worker(scene)
    async with scene.manager() as manager:
        role = scene.start(me, lambda: me.stopping.wait(TIMEOUT_S))
        await manager.wait_for(Heartbeat)
        await manager.send(STANDBY_PROCESS, promotion(scene))
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.incarnation == MEMBER)
        incarnations = [message.incarnation for message in manager.received]
        assert incarnations == sorted(incarnations, key=lambda incarnation: incarnation == MEMBER), (
            "heartbeats of the standby must come before those of the member"
        )
        first = manager.received[incarnations.index(MEMBER)]
        assert isinstance(first, Hello), "the first message must be a Hello, not a heartbeat of an unknown incarnation"
        await manager.stop(MEMBER)
        await role.end()


async def test_clock_of_a_promoted_process_begins_with_its_promotion(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLOCK_REPORT_INTERVAL_S", 0.0)

    me = standby_worker(scene)
    async with scene.manager() as manager:
        role = scene.start(me, lambda: me.stopping.wait(TIMEOUT_S))
        await eventually(lambda: sum(isinstance(message, Heartbeat) for message in manager.received) >= 3)
        assert not any(isinstance(message, ClockReport) for message in manager.received)
        began = me._connection.status.read_clock().began
        await manager.send(STANDBY_PROCESS, promotion(scene))
        report = await manager.wait_for(ClockReport)
        assert report.incarnation == MEMBER
        assert report.clock.began > began
        assert {time.phase for time in report.clock.times} <= {"starting"}
        await manager.stop(MEMBER)
        await role.end()


async def test_every_message_after_the_promotion_has_the_new_incarnation(scene: Scene) -> None:
    me, promoted = standby_worker(scene), MEMBER.gang
    done = threading.Event()

    def work() -> None:
        me.progress()
        me.publish(1, [])
        me._connection.on_commit([StepMetrics(1, {})])
        done.set()
        me.stopping.wait(TIMEOUT_S)

    async with scene.manager() as manager:
        role = scene.start(me, work)
        await manager.wait_for(Hello)
        await manager.send(STANDBY_PROCESS, promotion(scene, promoted))
        await eventually(done.is_set)
        assert (await manager.wait_for(FirstWorkDone)).incarnation == promoted
        assert (await manager.wait_for(StepCommitted)).incarnation == promoted
        assert (await manager.wait_for(Hello, lambda hello: hello.weight_address is not None)).incarnation == promoted
        assert (await manager.wait_for(VersionAvailable)).version == Version(1, promoted.number)
        fault = Fault("f1", FaultKind.ENGINE_DEAD, promoted.replica)
        await manager.send(promoted, Inject(fault, "another step"))
        assert (await manager.wait_for(Injected)).incarnation == promoted
        await manager.stop(promoted)
        await role.end()


async def test_repeated_or_foreign_promotion_changes_nothing(scene: Scene) -> None:
    me = standby_worker(scene)
    async with scene.manager() as manager:
        role = scene.start(me, lambda: me.stopping.wait(TIMEOUT_S))
        await manager.wait_for(Hello)
        other = Incarnation(ReplicaId("standby/local1"), 2)
        await manager.send(
            STANDBY_PROCESS, Promote(other, Incarnation(MEMBER.replica, 9), tag_of(scene.at.run.id, other))
        )
        await manager.send(STANDBY_PROCESS, promotion(scene))
        await manager.send(STANDBY_PROCESS, promotion(scene))
        await manager.send(STANDBY_PROCESS, promotion(scene, Incarnation(MEMBER.replica, 9)))
        for _ in range(3):
            manager.received.clear()
            await manager.wait_for(Heartbeat)
        assert {heartbeat.incarnation for heartbeat in manager.received} == {MEMBER}
        await manager.stop(MEMBER)
        await role.end()


async def test_promoted_standby_joins_the_next_manager_with_its_new_incarnation(scene: Scene) -> None:
    me = standby_worker(scene)
    begun = threading.Event()
    async with scene.manager() as first:
        role = scene.start(me, works(me, begun))
        await first.wait_for(Hello)
    async with scene.manager(epoch=2) as second:
        assert (await second.wait_for(Hello)).incarnation == STANDBY_PROCESS
        second.welcoming.clear()
        await second.send(STANDBY_PROCESS, promotion(scene))
        assert (await second.wait_for(Hello, lambda hello: hello.incarnation == MEMBER)).phase == "starting"
    assert not begun.is_set(), "the worker must wait for the welcome of its new incarnation"
    async with scene.manager(epoch=3) as third:
        assert (await third.wait_for(Hello)).incarnation == MEMBER
        await eventually(begun.is_set)
        await third.stop(MEMBER)
        await role.end()


# ── leaving ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _first_process(scene: Scene, manager: Manager, launch: Launch) -> subprocess.Popen[bytes]:
    """Start a standby process in a real step, and return the first process once the standby process waits."""
    child = scene.at.start(launch)
    await manager.wait_for(Hello, lambda hello: hello.phase == "standby")
    return child


class Admits(Manager):
    """A manager that also admits the first processes of steps."""

    async def serve(self) -> None:
        while True:
            incoming = await self.listener.receive()
            message = incoming.message
            self.received.append(message)
            if isinstance(message, AdmissionRequest):
                self.first = incoming.peer
                await self.listener.send(incoming.peer, Admitted(message.tag, True), incoming.request_id)
            else:
                self.peers[message.incarnation] = incoming.peer
            if isinstance(message, Hello):
                await self.listener.send(incoming.peer, Welcome(message.incarnation, self.current))


@pytest.fixture
def admits(scene: Scene) -> None:
    scene.manager_type = Admits


@pytest.mark.parametrize("how", ["signal", "stop"])
async def test_standby_stopped_by_sigterm_before_its_promotion_exits_cleanly(
    scene: Scene, admits: None, how: str
) -> None:
    launch = standby_launch(scene, sys.executable, "-c", WAITS)
    async with scene.manager() as manager:
        assert isinstance(manager, Admits)
        child = await _first_process(scene, manager, launch)
        if how == "signal":
            child.terminate()
        else:
            await manager.listener.send(manager.first, Stop(STANDBY_PROCESS, 20.0, "not needed"))
        await scene.at.end_of(child)
        record = scene.at.record(launch)
        assert record is not None
        assert (record.code, record.reason) == (0, ExitReason.STOPPED)
        assert "inside" not in scene.at.log(launch)


async def test_standby_stopped_by_the_manager_exits_cleanly(scene: Scene) -> None:
    me = standby_worker(scene)
    began = threading.Event()
    async with scene.manager() as manager:
        role = scene.start(me, began.set)
        await manager.wait_for(Hello)
        await manager.stop(STANDBY_PROCESS)
        with pytest.raises(SystemExit):
            await role.end()
    assert not began.is_set()


@pytest.mark.parametrize("how", ["worker", "first", "first, the worker stopped"])
async def test_fenced_promoted_standby_ends_at_once(scene: Scene, admits: None, how: str) -> None:
    """The process ends without the grace of 1000 s, although the launch file of its step names the standby process."""

    launch = standby_launch(scene, sys.executable, "-c", WAITS)
    launch = msgspec.structs.replace(launch, grace=1000.0)
    write_atomically(scene.at.run.launch_file(launch.tag), msgspec.json.encode(launch))
    async with scene.manager() as manager:
        assert isinstance(manager, Admits)
        child = await _first_process(scene, manager, launch)
        await manager.send(STANDBY_PROCESS, promotion(scene))
        pid = (await manager.wait_for(Hello, lambda hello: hello.incarnation == MEMBER)).pid
        if how == "worker":
            await manager.send(MEMBER, Fenced(MEMBER, "its gang restarts"))
        else:
            if how.endswith("stopped"):
                os.kill(pid, 19)
            await manager.listener.send(manager.first, Fenced(MEMBER, "its gang restarts", launch.tag))
        await scene.at.end_of(child)
        exit = await manager.wait_for(ExitRecord)
        assert (exit.incarnation, exit.tag) == (STANDBY_PROCESS, launch.tag), (
            "the exit must name the standby process: the manager knows which member the step became"
        )
        assert (exit.code, exit.signal) == ((FENCED_EXIT, None) if how == "worker" else (None, 9))


# ── CPU priority and GPUs ──────────────────────────────────────────────────────────────────────────────────────────
_NICE = """
import rrl
def nice():
    try:
        return open("/proc/self/autogroup").read().split()[-1]
    except FileNotFoundError:
        return "unknown"
me = rrl.join()
print("before", nice(), flush=True)
with me:
    print("after", nice(), flush=True)
    me.progress()
    me.stopping.wait(1000)
"""


async def test_standby_session_has_low_priority_until_its_promotion(scene: Scene, admits: None) -> None:
    launch = standby_launch(scene, sys.executable, "-c", _NICE)
    async with scene.manager() as manager:
        assert isinstance(manager, Admits)
        child = await _first_process(scene, manager, launch)
        await manager.send(STANDBY_PROCESS, promotion(scene))
        await manager.wait_for(FirstWorkDone)
        await manager.listener.send(manager.first, Stop(MEMBER, 20.0, "enough", launch.tag))
        await scene.at.end_of(child)
    lines = [line for line in scene.at.log(launch).splitlines() if line.startswith(("before", "after"))]
    assert lines in ([f"before {NICE}", "after 0"], ["before unknown", "after unknown"])


@pytest.mark.parametrize(
    ("chosen", "gpus", "visible"),
    [
        (("5", "7"), "5,7", "1,3"),
        (("GPU-b",), "4,5,6,7", "GPU-b"),
        ((), "4,5,6,7", "0,1,2,3"),
        (("all",), "4,5,6,7", "0,1,2,3"),
    ],
)
def test_promoted_standby_keeps_only_its_assigned_gpus(chosen: tuple[str, ...], gpus: str, visible: str) -> None:
    environ = {GPUS_ENV: "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert select_gpus(chosen, ("all",), environ) == (chosen or ("all",))
    assert environ == {GPUS_ENV: gpus, "CUDA_VISIBLE_DEVICES": visible}
