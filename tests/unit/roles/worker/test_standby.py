"""Processes that are kept warm: against a manager that only listens, real links, real first processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import ExitReason, Launch, tag_of
from rrl.core.run_dir import write_atomically
from rrl.core.types import Life, ReplicaId, Version
from rrl.roles.launcher.environment import GPUS_ENV
from rrl.roles.launcher.process_group import NICE, keep_gpus
from rrl.roles.worker.api import Worker
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.listening_manager import PATIENCE, eventually
from rrl.tests.unit.roles.worker.test_api import Manager, Scene, play, scene
from rrl.transport.messages import (
    Admitted,
    Beat,
    Become,
    Committed,
    Fenced,
    FirstWork,
    Hello,
    Holds,
    Inject,
    Injected,
    StepExit,
    Stop,
    Wanted,
    Welcome,
)

__all__ = ["scene"]

SHADOW = Life(ReplicaId("shadow/local1"), 3)
MEMBER = Life(ReplicaId("trainer/0.1"), 4)
WAITS = """
import os, rrl
me = rrl.join()
print("built", flush=True)
with me:
    print("inside as", me.launch.life, me.rank, me.world, flush=True)
    me.progress()
    me.stopping.wait(1000)
"""


def shadow_launch(scene: Scene, *argv: str) -> Launch:
    launch = scene.at.launch(*argv, replica=SHADOW.replica, incarnation=SHADOW.incarnation, env=dict(os.environ))
    launch = msgspec.structs.replace(launch, standby=True)
    write_atomically(scene.at.run.launch_file(launch.tag), msgspec.json.encode(launch))
    return launch


def shadow_worker(scene: Scene) -> Worker:
    return Worker(shadow_launch(scene), scene.at.run, scene.at.keys)


def follows(me: Worker) -> bool:
    """It pulls every newest version."""
    return any("_follow" in repr(task) for task in me._link._tasks)


def works(me: Worker, begun: threading.Event) -> Callable[[], None]:
    def work() -> None:
        begun.set()
        me.stopping.wait(PATIENCE)

    return work


def become(scene: Scene, life: Life = MEMBER) -> Become:
    return Become(SHADOW, life, tag_of(scene.at.run.id, SHADOW))


class Ranks(Manager):
    """Welcomes members with their ranks."""

    async def serve(self) -> None:
        while True:
            incoming = await self.listener.receive()
            message = incoming.message
            self.heard.append(message)
            self.peers[message.life] = incoming.peer
            if isinstance(message, Hello):
                welcome = Welcome(message.life, self.believed, 0 if message.life == SHADOW else 1, 2)
                await self.listener.send(incoming.peer, welcome)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.tests.unit.roles.worker.test_api.Manager", Ranks)


# ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_shadow_says_that_it_stands_by_and_waits_until_it_is_told_what_it_becomes(scene: Scene, ranks: None) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        begun = threading.Event()
        async with scene.manager() as manager:
            role = scene.start(me, works(me, begun))
            hello = await manager.hears(Hello)
            assert (hello.life, hello.tag, hello.phase) == (SHADOW, me.launch.tag, "standby")
            for _ in range(3):
                manager.heard.clear()
                await manager.hears(Beat, lambda beat: beat.life == SHADOW and beat.phase == "standby")
            assert not begun.is_set(), "welcome as a shadow is no reason to begin"
            await manager.tell(SHADOW, become(scene))
            now = await manager.hears(Hello, lambda hello: hello.life == MEMBER)
            assert (now.tag, now.pid, now.phase) == (hello.tag, hello.pid, "starting"), "the same step and process"
            await eventually(begun.is_set)
            assert (me.launch.life, me.launch.tag, me.rank, me.world) == (MEMBER, hello.tag, 1, 2)
            assert me.settings == me.job["roles"]["trainer"]
            await manager.stop(MEMBER)
            await role.end()

    play(story)


def test_no_beat_is_left_out_and_none_speaks_under_the_old_name_once_it_has_become_something(scene: Scene) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        async with scene.manager() as manager:
            role = scene.start(me, lambda: me.stopping.wait(PATIENCE))
            await manager.hears(Beat)
            await manager.tell(SHADOW, become(scene))
            await manager.hears(Beat, lambda beat: beat.life == MEMBER)
            lives = [message.life for message in manager.heard]
            assert lives == sorted(lives, key=lambda life: life == MEMBER), "first the one, then the other"
            first = manager.heard[lives.index(MEMBER)]
            assert isinstance(first, Hello), "its first word is a Hello, and not a beat of somebody unknown"
            await manager.stop(MEMBER)
            await role.end()

    play(story)


def test_everything_that_it_says_from_then_on_carries_the_life_that_it_became(scene: Scene) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        done = threading.Event()

        def work() -> None:
            me.progress()
            me.publish(1, [])
            me._link.committed(1, {})
            done.set()
            me.stopping.wait(PATIENCE)

        async with scene.manager() as manager:
            role = scene.start(me, work)
            await manager.hears(Hello)
            await manager.tell(SHADOW, become(scene))
            await eventually(done.is_set)
            assert (await manager.hears(FirstWork)).life == MEMBER
            assert (await manager.hears(Committed)).life == MEMBER
            assert (await manager.hears(Hello, lambda hello: hello.serves is not None)).life == MEMBER
            assert (await manager.hears(Holds)).version == Version(1, MEMBER.incarnation)
            fault = Fault("f1", FaultKind.ENGINE_DEAD, MEMBER.replica)
            await manager.tell(MEMBER, Inject(fault, "another step"))
            assert (await manager.hears(Injected)).life == MEMBER
            await manager.stop(MEMBER)
            await role.end()

    play(story)


def test_one_of_a_rollout_has_its_settings_from_the_start_and_pulls_weights_once_it_has_become_one(
    scene: Scene,
) -> None:
    engine = Life(ReplicaId("shadow/local1:rollout"), 1)

    async def story() -> None:
        launch = scene.at.launch(replica=engine.replica, incarnation=1, env=dict(os.environ))
        me = Worker(msgspec.structs.replace(launch, standby=True), scene.at.run, scene.at.keys)
        assert me.settings == me.job["roles"]["rollout"]
        async with scene.manager() as manager:
            role = scene.start(me, lambda: me.stopping.wait(PATIENCE))
            hello = await manager.hears(Hello)
            assert (hello.life, hello.phase, hello.holds) == (engine, "standby", None)
            assert hello.serves, "what takes time is open already"
            assert not follows(me), "and nothing comes in by it yet"
            rollout = Life(ReplicaId("rollout/1"), 2)
            await manager.tell(engine, Become(engine, rollout, launch.tag))
            assert (await manager.hears(Hello, lambda told: told.life == rollout)).serves == hello.serves
            await eventually(lambda: follows(me))
            await manager.stop(rollout)
            await role.end()

    play(story)


def test_told_twice_or_told_what_is_not_meant_for_it_it_is_what_it_became_first(scene: Scene) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        async with scene.manager() as manager:
            role = scene.start(me, lambda: me.stopping.wait(PATIENCE))
            await manager.hears(Hello)
            other = Life(ReplicaId("shadow/local1"), 2)
            await manager.tell(SHADOW, Become(other, Life(MEMBER.replica, 9), tag_of(scene.at.run.id, other)))
            await manager.tell(SHADOW, become(scene))
            await manager.tell(SHADOW, become(scene))
            await manager.tell(SHADOW, become(scene, Life(MEMBER.replica, 9)))
            for _ in range(3):
                manager.heard.clear()
                await manager.hears(Beat)
            assert {beat.life for beat in manager.heard} == {MEMBER}
            await manager.stop(MEMBER)
            await role.end()

    play(story)


def test_to_the_next_manager_it_is_what_it_has_become(scene: Scene) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        begun = threading.Event()
        async with scene.manager() as first:
            role = scene.start(me, works(me, begun))
            await first.hears(Hello)
        async with scene.manager(epoch=2) as second:
            assert (await second.hears(Hello)).life == SHADOW
            second.welcoming.clear()
            await second.tell(SHADOW, become(scene))
            assert (await second.hears(Hello, lambda hello: hello.life == MEMBER)).phase == "starting"
        assert not begun.is_set(), "nobody has welcomed it as that"
        async with scene.manager(epoch=3) as third:
            assert (await third.hears(Hello)).life == MEMBER
            await eventually(begun.is_set)
            await third.stop(MEMBER)
            await role.end()

    play(story)


# ── leaving ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def _first_process(scene: Scene, manager: Manager, launch: Launch) -> subprocess.Popen[bytes]:
    """A shadow in a real step, once it stands by."""
    child = scene.at.start(launch)
    await manager.hears(Hello, lambda hello: hello.phase == "standby")
    return child


class Admits(Manager):
    """Answers first processes as well."""

    async def serve(self) -> None:
        while True:
            incoming = await self.listener.receive()
            message = incoming.message
            self.heard.append(message)
            if isinstance(message, Wanted):
                self.first = incoming.peer
                await self.listener.send(incoming.peer, Admitted(message.tag, True), incoming.ask)
            else:
                self.peers[message.life] = incoming.peer
            if isinstance(message, Hello):
                await self.listener.send(incoming.peer, Welcome(message.life, self.believed))


@pytest.fixture
def admits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.tests.unit.roles.worker.test_api.Manager", Admits)


@pytest.mark.parametrize("how", ["signal", "stop"])
def test_asked_to_leave_before_it_became_anything_it_ends_in_order(scene: Scene, admits: None, how: str) -> None:
    async def story() -> None:
        launch = shadow_launch(scene, sys.executable, "-c", WAITS)
        async with scene.manager() as manager:
            assert isinstance(manager, Admits)
            child = await _first_process(scene, manager, launch)
            if how == "signal":
                child.terminate()
            else:
                await manager.listener.send(manager.first, Stop(SHADOW, 20.0, "not needed"))
            await scene.at.end_of(child)
            record = scene.at.record(launch)
            assert record is not None
            assert (record.code, record.reason) == (0, ExitReason.STOPPED)
            assert "inside" not in scene.at.log(launch)

    play(story)


def test_a_worker_that_hears_stop_while_it_stands_by_ends_in_order(scene: Scene) -> None:
    async def story() -> None:
        me = shadow_worker(scene)
        began = threading.Event()
        async with scene.manager() as manager:
            role = scene.start(me, began.set)
            await manager.hears(Hello)
            await manager.stop(SHADOW)
            with pytest.raises(SystemExit):
                await role.end()
        assert not began.is_set()

    play(story)


@pytest.mark.parametrize("how", ["worker", "first", "first, the worker stopped"])
def test_fenced_as_what_it_became_all_of_it_ends_at_once(scene: Scene, admits: None, how: str) -> None:
    """The grace of 1000 s is not used. Its first process was started under the shadow's name."""

    async def story() -> None:
        launch = shadow_launch(scene, sys.executable, "-c", WAITS)
        launch = msgspec.structs.replace(launch, grace=1000.0)
        write_atomically(scene.at.run.launch_file(launch.tag), msgspec.json.encode(launch))
        async with scene.manager() as manager:
            assert isinstance(manager, Admits)
            child = await _first_process(scene, manager, launch)
            await manager.tell(SHADOW, become(scene))
            pid = (await manager.hears(Hello, lambda hello: hello.life == MEMBER)).pid
            if how == "worker":
                await manager.tell(MEMBER, Fenced(MEMBER, "its gang restarts"))
            else:
                if how.endswith("stopped"):
                    os.kill(pid, 19)
                await manager.listener.send(manager.first, Fenced(MEMBER, "its gang restarts", launch.tag))
            await scene.at.end_of(child)
            exit = await manager.hears(StepExit)
            assert (exit.life, exit.tag) == (SHADOW, launch.tag), "the manager knows whose step it is"
            assert (exit.code, exit.signal) == ((FENCED_EXIT, None) if how == "worker" else (None, 9))

    play(story)


# ── what it does not take ──────────────────────────────────────────────────────────────────────────────────────────
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


def test_its_session_is_nice_to_all_others_until_it_has_become_something(scene: Scene, admits: None) -> None:
    async def story() -> None:
        launch = shadow_launch(scene, sys.executable, "-c", _NICE)
        async with scene.manager() as manager:
            assert isinstance(manager, Admits)
            child = await _first_process(scene, manager, launch)
            await manager.tell(SHADOW, become(scene))
            await manager.hears(FirstWork)
            await manager.listener.send(manager.first, Stop(MEMBER, 20.0, "enough", launch.tag))
            await scene.at.end_of(child)
        said = [line for line in scene.at.log(launch).splitlines() if line.startswith(("before", "after"))]
        assert said in ([f"before {NICE}", "after 0"], ["before unknown", "after unknown"])

    play(story)


@pytest.mark.parametrize(
    ("chosen", "gpus", "visible"),
    [
        (("5", "7"), "5,7", "1,3"),
        (("GPU-b",), "4,5,6,7", "GPU-b"),
        ((), "4,5,6,7", "0,1,2,3"),
        (("all",), "4,5,6,7", "0,1,2,3"),
    ],
)
def test_of_the_gpus_that_it_sees_it_keeps_those_that_it_is_given(
    chosen: tuple[str, ...], gpus: str, visible: str
) -> None:
    environ = {GPUS_ENV: "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert keep_gpus(chosen, ("all",), environ) == (chosen or ("all",))
    assert environ == {GPUS_ENV: gpus, "CUDA_VISIBLE_DEVICES": visible}
