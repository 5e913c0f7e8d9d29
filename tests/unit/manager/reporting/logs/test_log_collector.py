"""Real steps send lines to a real collector: which lines survive the loss of a step, of its file or of the manager."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils import z85

from rrl.core.launch import ExitReason, Launch
from rrl.core.log_lines import STAMP_BYTES
from rrl.core.types import Incarnation, ReplicaId
from rrl.health.detection.health_monitor import HealthMonitor
from rrl.manager.context import RunContext
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Fence, Rung, Why
from rrl.manager.model.state import Replica, State, Status
from rrl.manager.reporting.logs import log_buffers
from rrl.manager.reporting.logs.log_collector import LogCollector, _is_current
from rrl.tests.support.cli.story import Story
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.transport.control.endpoints import Address
from rrl.transport.control.log_messages import LOG_BOUNDS, LogLines, LogLinesAck
from rrl.transport.control.sockets import encode_frame

TALKER = ("sh", "-c", "echo its last words; sleep 1000")
STATE = Story("run-1").works().recorded()
INCARNATION = Incarnation(ReplicaId("rollout/0"), 1)


def _unused(*_: Any) -> Any:
    raise AssertionError("the log collector has recorded an event or sent a message to a peer")


@asynccontextmanager
async def collecting(at: Lab, epoch: int = 1, state: State = STATE) -> AsyncIterator[LogCollector]:
    context = RunContext(at.run, HealthMonitor(), lambda: state, _unused, _unused, now=lambda: state.at)
    collector = LogCollector(context, epoch)
    try:
        await collector.open(at.keys, "127.0.0.1")
        yield collector
    finally:
        await collector.close()


def shipped(at: Lab, launch: Launch, epoch: int = 1) -> list[str]:
    path = at.run.logs / f"{launch.tag}.shipped-{epoch}.log"
    return [line[STAMP_BYTES + 1 :] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_buffers, "COMPLETION_GRACE_S", 0.0)


def test_last_lines_of_a_killed_step_are_kept_without_its_file(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager(), collecting(at) as collector:
            launch = at.launch(*TALKER)
            os.mkfifo(at.run.log_file(launch.tag))  # open() of this pipe hangs, as on storage that does not answer
            step = at.start(launch, patch="import rrl.roles.launcher.logs.pump as p; p.STUCK_AFTER_S = 1000.0")
            await eventually(lambda: collector.buffers.size)
            assert shipped(at, launch) == [], "lines were written before they were needed"
            step.kill()  # its node is gone
            collector.on_event(ev.StepEnded(launch.incarnation, launch.tag, None, None, ExitReason.LOST))
            assert await eventually(lambda: shipped(at, launch)) == ["its last words"]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_lines_of_a_promoted_step_are_kept_under_its_own_name(tmp_path: Path) -> None:
    standby, member = Incarnation(ReplicaId("standby/n2"), 1), Incarnation(ReplicaId("trainer/0"), 2)
    replicas = {
        **STATE.replicas,
        standby.replica: Replica(standby.replica, Status.WANTED, 1),
        member.replica: msgspec.structs.replace(
            STATE.replica(member.replica), incarnation_number=2, promoted_from=standby, step=f"{STATE.run}.standby-n2.1"
        ),
    }
    state = msgspec.structs.replace(STATE, replicas=replicas)
    assert _is_current(state, standby), "a standby process is not current although its member is"

    async def story(at: Lab) -> None:
        async with at.manager(), collecting(at, state=state) as collector:
            launch = at.launch(*TALKER, replica=standby.replica)
            os.mkfifo(at.run.log_file(launch.tag))
            step = at.start(launch, patch="import rrl.roles.launcher.logs.pump as p; p.STUCK_AFTER_S = 1000.0")
            await eventually(lambda: collector.buffers.size)
            assert shipped(at, launch) == []
            step.kill()
            collector.on_event(ev.StepEnded(member, launch.tag, None, None, ExitReason.LOST))
            assert await eventually(lambda: shipped(at, launch)) == ["its last words"]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_manager_writes_the_lines_of_a_step_that_cannot(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager(), collecting(at):
            launch = at.launch(*TALKER)
            at.run.log_file(launch.tag).symlink_to("/dev/full")
            step = at.start(launch, patch="import rrl.roles.launcher.logs.pump as p; p.STUCK_AFTER_S = 0.05")
            assert await eventually(lambda: shipped(at, launch)) == ["its last words"]
            assert step.poll() is None, "the step has ended before its lines were written"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_end_of_an_unwritable_log_is_sent_before_the_step_leaves(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager(), collecting(at) as collector:
            launch = at.launch("sh", "-c", "echo traceback; exit 3")
            at.run.log_file(launch.tag).symlink_to("/dev/full")
            assert await at.end_of(at.start(launch)) == 3
            assert shipped(at, launch) == ["traceback"]
            assert collector.buffers.size == 0

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_step_whose_file_is_complete_leaves_no_buffer(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager(), collecting(at) as collector:
            launch = at.launch("sh", "-c", "echo hello; sleep 0.2; exit 3")
            step = at.start(launch)
            await eventually(lambda: collector.buffers.size)
            assert await at.end_of(step) == 3
            await eventually(lambda: collector.buffers.size == 0)
            collector.on_event(ev.StepEnded(launch.incarnation, launch.tag, 3, None, ExitReason.EXITED))
        assert at.log(launch) == "hello\n"
        assert shipped(at, launch) == []

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_next_manager_receives_the_newest_lines_again(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with at.manager():
            launch = at.launch(*TALKER)
            async with collecting(at, epoch=1) as first:
                step = at.start(launch)
                await eventually(lambda: first.buffers.size)
            async with collecting(at, epoch=2) as second:
                await eventually(lambda: second.buffers.size)
                step.kill()
                second.on_event(ev.Decided(Fence(launch.incarnation, Rung.SPARE, Why(("node lost: silent",)))))
                assert await eventually(lambda: shipped(at, launch, 2)) == ["its last words"]

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_member_that_sends_garbage_or_too_much_is_disconnected(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with collecting(at) as collector:
            address = await eventually(lambda: Address.read(at.run.log_collector))
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

            def member() -> zmq.Socket[bytes]:
                socket = context.socket(zmq.DEALER)
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.RCVTIMEO, 30_000)
                socket.set(zmq.CURVE_SERVERKEY, at.keys.server_public.encode())
                socket.set(zmq.CURVE_PUBLICKEY, at.keys.client_public.encode())
                socket.set(zmq.CURVE_SECRETKEY, at.keys.client_secret.encode())
                socket.connect(address.endpoint)
                return socket

            def rubbish() -> bytes:
                bad = member()
                bad.send(b"\xff" * 1000)
                bad.send(encode_frame(1, 1, LogLines(INCARNATION, b"not a line")))
                bad.send(encode_frame(1, 2, LogLines(INCARNATION, bytes(LOG_BOUNDS.max_frame_bytes + 1))))
                good = member()
                good.send(encode_frame(1, 7, LogLines(INCARNATION, b"2026-11-20T09:00:00.000000Z x\n")))
                answer = good.recv()
                bad.close()
                good.close()
                return answer

            assert await asyncio.to_thread(rubbish) == encode_frame(1, 7, LogLinesAck())
            await eventually(lambda: collector.buffers.refused == 1)
            assert collector.buffers.size == 30
            context.term()

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_lines_of_incarnations_that_the_run_never_had_are_ignored() -> None:
    fenced = Story("run-1").works().recovers("rollout/0").recorded()
    assert _is_current(STATE, INCARNATION) is True
    assert _is_current(fenced, INCARNATION) is False
    for incarnation in (
        Incarnation(INCARNATION.replica, 0),
        Incarnation(INCARNATION.replica, 2),
        Incarnation(ReplicaId("judge/0"), 1),
    ):
        assert _is_current(STATE, incarnation) is None


def test_full_run_directory_does_not_prevent_the_start(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        away = tmp_path / "away"
        at.run.path.rename(away)
        async with collecting(at):
            away.rename(at.run.path)
            await eventually(lambda: Address.read(at.run.log_collector))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_sender_without_the_runs_keys_is_ignored(tmp_path: Path) -> None:
    async def story(at: Lab) -> None:
        async with collecting(at) as collector:
            address = await eventually(lambda: Address.read(at.run.log_collector))
            public, secret = zmq.curve_keypair()
            assert len(z85.decode(public)) == 32
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            monitor.set(zmq.RCVTIMEO, 30_000)
            for option, value in (
                (zmq.LINGER, 0), (zmq.CURVE_SERVERKEY, at.keys.server_public.encode()),
                (zmq.CURVE_PUBLICKEY, public), (zmq.CURVE_SECRETKEY, secret),
            ):  # fmt: skip
                stranger.set(option, value)
            stranger.connect(address.endpoint)
            stranger.send(encode_frame(1, 1, LogLines(INCARNATION, b"2026-11-20T09:00:00.000000Z x\n")))
            await asyncio.to_thread(monitor.recv_multipart)
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close(0)
            context.term()
            assert (collector.buffers.size, collector.buffers.refused) == (0, 0)

    with lab(tmp_path) as at:
        asyncio.run(story(at))
