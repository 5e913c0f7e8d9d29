"""Who says what is checked against who is believed; only what changed becomes an event."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rrl.health.sightings import Watch
from rrl.manager import events as ev
from rrl.manager.actions import Finish, Launch, Request, Why
from rrl.manager.cluster import AllocationSeen, AllocationState, Ask
from rrl.manager.fold import fold
from rrl.manager.hearing import Ear
from rrl.manager.state import State
from rrl.spec.launch import ExitRecord, tag_of
from rrl.spec.rundir import RunDir
from rrl.spec.words import Life, NodeName, Outcome, Version
from rrl.tests.manager.jobs import NODE, ROLLOUTS, RUN, job
from rrl.transport import messages as msg
from rrl.transport.control import Incoming

N1 = NodeName("n1")
R1, R2 = Life(ROLLOUTS[0], 1), Life(ROLLOUTS[0], 2)
STEP = tag_of(RUN, R1)
WHY = Why(("because",))
LAUNCHED: tuple[ev.Event, ...] = (
    ev.Intended(Request(Ask("pool", 1, NODE, 60.0), WHY)),
    ev.AllocationChanged("pool", AllocationSeen(AllocationState.RUNNING, "7", (N1,))),
    ev.Intended(Launch(R1, STEP, "pool", N1, WHY)),
)
WANTED = msg.Wanted(R1, STEP, N1, 41)
HELLO = msg.Hello(R1, STEP, N1, "host", 42, "starting", serves="tcp://127.0.0.1:1")


class Hearing:
    """An ear, the events that it recorded, and what it answered."""

    def __init__(self, folder: Path, *events: ev.Event) -> None:
        self.run = RunDir(folder / RUN)
        self.run.create()
        self.events: list[ev.Event] = []
        self.sent: list[Any] = []
        self.state: State | None = None
        self.steps: dict[str, bytes] = {}
        for event in (ev.RunStarted(RUN, job()), *events):
            self._fold(event)
        self.ear = Ear(
            self.run, Watch(), self._now_state, self._record, self._send, lambda: 100.0,
            lambda life: msg.Welcome(life, msg.Peers(1, 1, {})), lambda tag: None, self.steps,
        )  # fmt: skip

    def hear(self, *messages: Any) -> list[Any]:
        """The answers to these messages."""
        self.sent.clear()
        for message in messages:
            asyncio.run(self.ear.hear(Incoming(b"peer", 1, message)))
        return list(self.sent)

    def _fold(self, event: ev.Event) -> None:
        seq = self.state.seq + 1 if self.state else 1
        self.state = fold(self.state, ev.Stamped(seq, 100.0, 1, event))

    def _now_state(self) -> State:
        assert self.state is not None
        return self.state

    def _record(self, event: ev.Event) -> None:
        self.events.append(event)
        self._fold(event)

    async def _send(self, peer: bytes, message: Any, ask: int | None) -> None:
        self.sent.append(message)


@pytest.fixture
def hearing(tmp_path: Path) -> Hearing:
    return Hearing(tmp_path, *LAUNCHED)


def test_a_launched_process_is_admitted_once_and_its_launch_is_settled(hearing: Hearing) -> None:
    assert hearing.hear(WANTED) == [msg.Admitted(STEP, True)]
    assert hearing.events == [ev.Admitted(R1, STEP, N1, 41)]
    assert hearing.hear(WANTED) == [msg.Admitted(STEP, True)], "to a new manager it says so again"
    assert len(hearing.events) == 1


@pytest.mark.parametrize(
    "wanted", [msg.Wanted(R2, tag_of(RUN, R2), N1, 41), msg.Wanted(R1, "another.tag", N1, 41)], ids=["life", "tag"]
)
def test_a_process_that_nobody_wants_is_sent_away(hearing: Hearing, wanted: msg.Wanted) -> None:
    (answer,) = hearing.hear(wanted)
    assert (answer.ok, bool(answer.why)) == (False, True)
    assert hearing.events == []


def test_who_was_admitted_is_asked_to_leave_in_order_when_it_comes_back_to_a_run_that_is_ending(tmp_path: Path) -> None:
    over = ev.Decided(Finish(Outcome.COMPLETED, WHY))
    hearing = Hearing(tmp_path, *LAUNCHED, ev.Admitted(R1, STEP, N1, 41), over)
    admitted, stop = hearing.hear(WANTED)
    assert admitted.ok
    assert (stop.life, stop.grace) == (R1, job().limits.step_grace)
    assert hearing.steps == {STEP: b"peer"}


def test_who_was_not_admitted_before_the_end_is_sent_away(tmp_path: Path) -> None:
    hearing = Hearing(tmp_path, *LAUNCHED, ev.Decided(Finish(Outcome.COMPLETED, WHY)))
    (answer,) = hearing.hear(WANTED)
    assert not answer.ok


def test_a_beat_is_no_event_but_a_new_phase_is(hearing: Hearing) -> None:
    hearing.hear(WANTED, HELLO)
    before = len(hearing.events)
    assert hearing.hear(msg.Beat(R1, "starting", 0), msg.Beat(R1, "starting", 5)) == []
    assert len(hearing.events) == before
    hearing.hear(msg.Beat(R1, "generate", 6), msg.Beat(R1, "generate", 7))
    assert hearing.events[before:] == [ev.PhaseEntered(R1, "generate")]


def test_a_hello_carries_what_a_new_manager_must_know(hearing: Hearing) -> None:
    hello = msgspec.structs.replace(HELLO, phase="generate", holds=Version(3, 1))
    (welcome,) = hearing.hear(WANTED, hello)[1:]
    assert isinstance(welcome, msg.Welcome)
    assert hearing.events[1:] == [
        ev.Joined(R1, N1, "host", 42, None, "tcp://127.0.0.1:1"),
        ev.PhaseEntered(R1, "generate"),
        ev.VersionHeld(R1, Version(3, 1)),
    ]
    hearing.hear(hello)
    assert len(hearing.events) == 4, "said again, it is no news"


STRANGERS = (
    msgspec.structs.replace(HELLO, life=R2),
    msg.Beat(R2, "generate", 1),
    msg.Holds(R2, Version(9, 9)),
    msg.Committed(R2, 9, {}),
)


@pytest.mark.parametrize("said", STRANGERS, ids=lambda message: type(message).__name__)
def test_what_a_life_says_that_is_not_believed_is_no_event_and_it_is_told(hearing: Hearing, said: Any) -> None:
    (answer,) = hearing.hear(said)
    assert isinstance(answer, msg.Fenced)
    assert hearing.events == []


def test_an_end_counts_once_and_only_of_the_step_that_the_life_is_known_by(hearing: Hearing) -> None:
    hearing.hear(msg.StepExit(R1, "another.tag", 0, None, "exited"), msg.StepExit(R2, STEP, 0, None, "exited"))
    assert hearing.events == []
    ended = msg.StepExit(R1, STEP, None, 9, "signalled")
    hearing.hear(ended, ended)
    assert hearing.events == [ev.StepEnded(R1, STEP, None, 9, "signalled")]


def test_a_witnessed_end_is_told_in_the_words_of_its_exit_record_where_there_is_one(hearing: Hearing) -> None:
    record = ExitRecord(STEP, R1, N1, 3, None, "exited", 0.0)
    hearing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    hearing.hear(msg.Gone(R1, STEP, N1))
    assert hearing.events == [ev.StepEnded(R1, STEP, 3, None, "exited")]


def test_an_end_that_nobody_told_is_read_from_its_exit_record(hearing: Hearing) -> None:
    hearing.ear.exit_records()
    assert hearing.events == []
    hearing.run.exit_file(STEP).write_bytes(b"")  # being written, or torn
    hearing.ear.exit_records()
    assert hearing.events == []
    record = ExitRecord(STEP, R1, N1, None, 9, "signalled", 0.0)
    hearing.run.exit_file(STEP).write_bytes(msgspec.json.encode(record))
    hearing.ear.exit_records()
    assert hearing.events == [ev.StepEnded(R1, STEP, None, 9, "signalled")]
