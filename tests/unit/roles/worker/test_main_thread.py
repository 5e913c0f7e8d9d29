"""A role that is asked for work while it is suspected: who answers, in which thread, and who does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rrl.core.faults import Fault, FaultKind
from rrl.core.types import Life, ProbeResult, ReplicaId
from rrl.roles.worker.main_thread import Probes
from rrl.tests.unit.roles.worker.test_api import Manager, Scene, play, scene
from rrl.tests.unit.roles.worker.test_own_faults import role
from rrl.transport.messages import Beat, Inject, Injected, Probe, Probed

__all__ = ["scene"]

ME = Life(ReplicaId("rollout/0"), 1)
ANSWERS = """
import time, rrl
with rrl.join() as me:
    me.on_probe(lambda: f"worked {me.launch.life}")
    with me.phase("generate"):
        while True:
            time.sleep(0.01)
            me.progress()
"""
SILENT = """
import time, rrl
with rrl.join() as me:
    me.progress()
    time.sleep(1000)
"""


class Told:
    def __init__(self) -> None:
        self.answers: list[Probed] = []
        self.probes = Probes(self.answers.append)

    def ask(self, number: int = 7, life: Life = ME) -> None:
        self.probes.asked(Probe(life, number), ME)


def test_without_a_handler_the_answer_is_that_the_process_lives() -> None:
    told = Told()
    told.ask()
    assert told.answers == [Probed(ME, 7, ProbeResult.NO_HANDLER)]


def test_a_handler_answers_only_when_its_own_thread_comes_by() -> None:
    told = Told()
    ran_in: list[int] = []
    told.probes.on_probe(lambda: ran_in.append(threading.get_ident()))

    def ask_and_come_by() -> None:
        told.ask()
        told.probes.answer()

    asking = threading.Thread(target=ask_and_come_by)
    asking.start()
    asking.join()
    assert told.answers == []
    told.probes.answer()
    assert told.answers == [Probed(ME, 7, ProbeResult.WORKS)]
    assert ran_in == [threading.get_ident()]
    told.probes.answer()
    assert len(told.answers) == 1, "a question is answered once"


def test_what_a_handler_raises_is_the_answer_and_the_role_goes_on() -> None:
    told = Told()

    def fail() -> None:
        raise RuntimeError("logits are not finite")

    told.probes.on_probe(fail)
    told.ask()
    told.probes.answer()
    assert told.answers == [Probed(ME, 7, ProbeResult.FAILED, "RuntimeError: logits are not finite")]


def test_a_handler_that_calls_the_api_itself_is_not_run_within_itself() -> None:
    told = Told()
    told.probes.on_probe(told.probes.answer)
    told.ask(1)
    told.probes.answer()
    assert [answer.id for answer in told.answers] == [1]


def test_of_several_questions_the_newest_is_answered_and_the_work_is_done_once() -> None:
    told = Told()
    ran: list[str] = []
    told.probes.on_probe(lambda: ran.append("worked"))
    for number in (1, 2, 3):
        told.ask(number)
    told.probes.answer()
    told.probes.answer()
    assert ([answer.id for answer in told.answers], ran) == ([3], ["worked"])


def test_a_question_to_another_life_is_nobodys_here() -> None:
    told = Told()
    told.ask(life=Life(ME.replica, 2))
    told.probes.answer()
    assert told.answers == []


@pytest.mark.parametrize(("code", "result"), [(ANSWERS, ProbeResult.WORKS), (SILENT, ProbeResult.NO_HANDLER)])
def test_a_real_role_answers_at_its_next_call_or_by_its_link(scene: Scene, code: str, result: ProbeResult) -> None:
    async def story() -> None:
        async with scene.manager() as manager, role(scene, manager, code) as (launch, _):
            await manager.tell(launch.life, Probe(launch.life, 3))
            answer = await manager.hears(Probed)
            assert (answer.life, answer.id, answer.result) == (launch.life, 3, result)

    play(story)


def test_a_role_whose_engine_is_dead_beats_and_does_not_answer(scene: Scene) -> None:
    async def story() -> None:
        async with scene.manager() as manager, role(scene, manager, ANSWERS) as (launch, _):
            await manager.tell(launch.life, Inject(Fault("f1", FaultKind.ENGINE_DEAD), launch.tag))
            assert (await manager.hears(Injected)).ok
            await manager.tell(launch.life, Probe(launch.life, 4))
            await _beats(manager, 20)
            assert not [message for message in manager.heard if isinstance(message, Probed)]

    play(story)


async def _beats(manager: Manager, more: int) -> None:
    """So many further beats are heard: by then a role that answers would have."""
    before = sum(isinstance(message, Beat) for message in manager.heard)
    async with asyncio.timeout(30):
        while sum(isinstance(message, Beat) for message in manager.heard) < before + more:
            await asyncio.sleep(0.01)
