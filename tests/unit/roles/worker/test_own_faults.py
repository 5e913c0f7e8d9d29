"""Faults that a role performs on itself, in real processes that use the worker API."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.launch import Launch
from rrl.tests.support.listening_manager import TIMEOUT_S
from rrl.tests.support.roles.worker_scene import Manager, Scene, role_process
from rrl.transport.messages import Heartbeat, Inject, Injected

WORKS = """
import time, rrl
with rrl.join() as me:
    with me.phase("score"):
        while True:
            time.sleep(0.01)
            me.progress()
"""
COMPUTES = """
import time, rrl
with rrl.join() as me:
    me.progress()
    time.sleep(1000)
"""


def size_of(pid: int) -> int:
    """Return the bytes of a process's address space, which the agent limits for the fault ``out_of_memory``."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


async def fault_request(manager: Manager, launch: Launch, fault: Fault, tag: str = "") -> Injected:
    await manager.send(launch.incarnation, Inject(fault, tag or launch.tag))
    return await manager.wait_for(Injected)


@pytest.mark.parametrize("code", [WORKS, COMPUTES], ids=["working", "in a long computation"])
async def test_exit_fault_ends_a_busy_role_with_the_given_code(scene: Scene, code: str) -> None:
    async with scene.manager() as manager, role_process(scene, manager, code) as (launch, child):
        answer = await fault_request(manager, launch, Fault("f1", FaultKind.EXIT, amount=3))
        assert (answer.ok, answer.incarnation, answer.detail) == (
            True,
            launch.incarnation,
            "the role exits with code 3",
        )
        assert await asyncio.wait_for(child.wait(), TIMEOUT_S) == 3


async def test_exception_fault_is_raised_in_the_roles_code_at_its_next_call(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WORKS) as (launch, child):
        answer = await fault_request(manager, launch, Fault("f7", FaultKind.EXCEPTION))
        assert answer.ok, answer.detail
        _, stderr = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        assert child.returncode == 1
        assert 'File "<string>", line 7' in stderr.decode()  # me.progress()
        assert "InjectedError: injected fault f7" in stderr.decode()


async def test_exception_fault_waits_for_the_roles_next_call(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, COMPUTES) as (launch, child):
        await manager.send(launch.incarnation, Inject(Fault("f1", FaultKind.EXCEPTION), launch.tag))
        second = Fault("f2", FaultKind.ENGINE_DEAD)
        answer = await fault_request(manager, launch, second)  # received after the first one
        assert (answer.fault, answer.ok) == (second, False)
        assert answer.detail == "exception is still pending in this role"
        assert child.returncode is None


async def test_role_with_a_dead_engine_sends_heartbeats_and_makes_no_progress(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WORKS) as (launch, child):
        assert (await fault_request(manager, launch, Fault("f1", FaultKind.ENGINE_DEAD))).ok
        manager.received.clear()
        first = await manager.wait_for(Heartbeat)
        for _ in range(5):
            manager.received.clear()
            heartbeat = await manager.wait_for(Heartbeat)
            assert (heartbeat.phase, heartbeat.done) == ("score", first.done)
        assert child.returncode is None


async def test_out_of_memory_hits_a_role_that_does_not_grow(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WORKS) as (launch, child):
        resource.prlimit(child.pid, resource.RLIMIT_AS, (size_of(child.pid), resource.RLIM_INFINITY))
        await manager.send(launch.incarnation, Inject(Fault("f1", FaultKind.OUT_OF_MEMORY), launch.tag))
        _, stderr = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        assert child.returncode not in (0, None)
        assert b"MemoryError" in stderr or b"allocate memory" in stderr


async def test_engine_dead_for_a_time_continues_afterwards(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WORKS) as (launch, _):
        await fault_request(manager, launch, Fault("f1", FaultKind.ENGINE_DEAD, seconds=0.3))
        await manager.wait_for(Injected, lambda answer: answer.ended)
        manager.received.clear()
        first = await manager.wait_for(Heartbeat)
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.done > first.done)


@pytest.mark.parametrize(
    ("kind", "tag", "why"),
    [(FaultKind.EXIT, "run-1.rollout-0.1", "the fault is for"), (FaultKind.KILL, "", "cannot perform kill on itself")],
)
async def test_fault_for_another_step_or_of_another_kind_is_refused(
    scene: Scene, kind: FaultKind, tag: str, why: str
) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WORKS) as (launch, child):
        answer = await fault_request(manager, launch, Fault("f1", kind, amount=3), tag)
        assert not answer.ok
        assert why in answer.detail
        manager.received.clear()
        await manager.wait_for(Heartbeat)
        assert child.returncode is None
