"""Probes of a suspected role: which thread answers them, and when no thread answers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.types import Incarnation, ProbeResult, ReplicaId
from rrl.roles.worker.main_thread import ProbeResponder
from rrl.tests.support.roles.worker_scene import Manager, Scene, role_process
from rrl.transport.messages import Heartbeat, Inject, Injected, Probe, ProbeReply

ME = Incarnation(ReplicaId("rollout/0"), 1)
ANSWERS = """
import time, rrl
with rrl.join() as me:
    me.on_probe(lambda: f"worked {me.launch.incarnation}")
    with me.phase("generate"):
        while True:
            time.sleep(0.01)
            me.progress()
"""
WAITS_FOR_WEIGHTS = """
import rrl
with rrl.join() as me:
    me.on_probe(lambda: "no weights have been loaded yet")
    me.progress()
    me.lease(1)
"""
NO_ANSWER = """
import time, rrl
with rrl.join() as me:
    me.progress()
    time.sleep(1000)
"""


@pytest.fixture
def responses() -> Responses:
    return Responses()


class Responses:
    def __init__(self) -> None:
        self.answers: list[ProbeReply] = []
        self.probes = ProbeResponder(self.answers.append)

    def probe(self, number: int = 7, incarnation: Incarnation = ME) -> None:
        self.probes.on_request(Probe(incarnation, number), ME)


def test_probe_without_a_handler_is_answered_at_once(responses: Responses) -> None:
    responses.probe()
    assert responses.answers == [ProbeReply(ME, 7, ProbeResult.NO_HANDLER)]


def test_handler_runs_only_in_the_thread_that_registered_it(responses: Responses) -> None:
    ran_in: list[int] = []
    responses.probes.on_probe(lambda: ran_in.append(threading.get_ident()))

    def probe_and_call() -> None:
        responses.probe()
        responses.probes.answer()

    asking = threading.Thread(target=probe_and_call)
    asking.start()
    asking.join()
    assert responses.answers == []
    responses.probes.answer()
    assert responses.answers == [ProbeReply(ME, 7, ProbeResult.WORKS)]
    assert ran_in == [threading.get_ident()]
    responses.probes.answer()
    assert len(responses.answers) == 1, "a probe was answered twice"


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_exception_of_a_handler_is_the_answer_and_the_role_continues(
    kind: type[BaseException], responses: Responses
) -> None:

    def fail() -> None:
        raise kind("logits are not finite")

    responses.probes.on_probe(fail)
    responses.probe()
    responses.probes.answer()
    assert responses.answers == [ProbeReply(ME, 7, ProbeResult.FAILED, f"{kind.__name__}: logits are not finite")]


def test_handler_that_calls_the_api_is_not_reentered(responses: Responses) -> None:
    responses.probes.on_probe(responses.probes.answer)
    responses.probe(1)
    responses.probes.answer()
    assert [answer.id for answer in responses.answers] == [1]


def test_newest_of_several_probes_is_answered_with_one_run_of_the_handler(responses: Responses) -> None:
    ran: list[str] = []
    responses.probes.on_probe(lambda: ran.append("worked"))
    for number in (1, 2, 3):
        responses.probe(number)
    responses.probes.answer()
    responses.probes.answer()
    assert ([answer.id for answer in responses.answers], ran) == ([3], ["worked"])


def test_probe_of_another_incarnation_is_ignored(responses: Responses) -> None:
    responses.probe(incarnation=Incarnation(ME.replica, 2))
    responses.probes.answer()
    assert responses.answers == []


@pytest.mark.parametrize(("code", "result"), [(ANSWERS, ProbeResult.WORKS), (NO_ANSWER, ProbeResult.NO_HANDLER)])
async def test_real_role_answers_at_its_next_call_or_by_its_connection(
    scene: Scene, code: str, result: ProbeResult
) -> None:
    async with scene.manager() as manager, role_process(scene, manager, code) as (launch, _):
        await manager.send(launch.incarnation, Probe(launch.incarnation, 3))
        answer = await manager.wait_for(ProbeReply)
        assert (answer.incarnation, answer.id, answer.result) == (launch.incarnation, 3, result)


async def test_rollout_that_waits_for_its_first_weights_answers_each_probe(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, WAITS_FOR_WEIGHTS) as (launch, _):
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.phase == "wait_weights")
        await manager.send(launch.incarnation, Probe(launch.incarnation, 5))
        answer = await manager.wait_for(ProbeReply)
        assert (answer.id, answer.result) == (5, ProbeResult.WORKS)


async def test_role_with_a_dead_engine_sends_heartbeats_and_does_not_answer(scene: Scene) -> None:
    async with scene.manager() as manager, role_process(scene, manager, ANSWERS) as (launch, _):
        await manager.send(launch.incarnation, Inject(Fault("f1", FaultKind.ENGINE_DEAD), launch.tag))
        assert (await manager.wait_for(Injected)).ok
        await manager.send(launch.incarnation, Probe(launch.incarnation, 4))
        await _wait_for_heartbeats(manager, 20)
        assert not [message for message in manager.received if isinstance(message, ProbeReply)]


async def _wait_for_heartbeats(manager: Manager, more: int) -> None:
    """Wait for ``more`` heartbeats. A role that answers probes would have answered within this time."""
    before = sum(isinstance(message, Heartbeat) for message in manager.received)
    async with asyncio.timeout(30):
        while sum(isinstance(message, Heartbeat) for message in manager.received) < before + more:
            await asyncio.sleep(0.01)
