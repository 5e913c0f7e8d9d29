"""Workers with a manager that only listens and a real store. Each worker has a thread of its own."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy
import pytest

import rrl
from rrl.core.launch import LAUNCH_ENV
from rrl.core.phases import WAIT_EXTERNAL
from rrl.core.types import Incarnation, ReplicaId, Version, WeightTraffic
from rrl.roles import reward
from rrl.roles.checkpoints.folders import DamagedCheckpoint
from rrl.roles.trajectories.types import CommittedState, Done, Item, Score, Scoring
from rrl.roles.worker import connection
from rrl.roles.worker.api import Worker
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.roles.worker.status import external_waits
from rrl.roles.worker.status.clocks import boot_time_ns
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import HEARTBEAT_S, JOB, STORE, Manager, Role, Scene
from rrl.transport.control.endpoints import Address
from rrl.transport.messages import (
    ClockReport,
    Fenced,
    FirstWorkDone,
    Goodbye,
    Heartbeat,
    Hello,
    Peers,
    PhaseEntered,
    StepCommitted,
    VersionAvailable,
)
from rrl.transport.weights.deltas import Deltas
from rrl.transport.weights.manifest import Manifest, describe
from rrl.transport.weights.store import WeightStore


@contextmanager
def not_started(me: Worker) -> Iterator[Worker]:
    try:
        yield me
    finally:
        me._connection._loop.close()


# ── joining and leaving ────────────────────────────────────────────────────────────────────────────────────────────
async def test_worker_starts_after_its_welcome(scene: Scene) -> None:
    begun = threading.Event()
    async with scene.manager() as manager:
        manager.welcoming.clear()
        role = scene.start(me := scene.worker(crew.REWARD), begun.set)
        hello = await manager.wait_for(Hello)
        assert (hello.incarnation, hello.tag, hello.phase) == (crew.REWARD, me.launch.tag, "starting")
        assert not begun.is_set()
        manager.welcoming.set()
        await eventually(begun.is_set)
        await manager.dismiss(role, crew.REWARD)


def test_worker_used_outside_of_its_with_block_raises_an_explanation(scene: Scene) -> None:
    with not_started(scene.worker(crew.ROLLOUT)) as me:
        for use in (lambda: next(me.work()), lambda: me.committed, lambda: next(me.batches())):
            with pytest.raises(RuntimeError, match=r"use `me` inside `with rrl\.join"):
                use()


def test_state_dict_in_place_of_packed_tensors_is_refused_with_the_right_call(scene: Scene) -> None:
    with not_started(scene.worker(crew.TRAINER)) as me, pytest.raises(TypeError, match=r"pass rrl\.pack\(state_dict\)"):
        me.publish(0, {"weight": object()})  # type: ignore[arg-type]


async def test_fenced_worker_ends_at_once_even_if_busy(scene: Scene) -> None:
    launch = scene.launch(crew.REWARD)
    code = "import time, rrl\nwith rrl.join() as me:\n    me.progress()\n    time.sleep(1000)"
    env = {"PATH": "/usr/bin:/bin", LAUNCH_ENV: str(scene.at.run.launch_file(launch.tag))}
    async with scene.manager() as manager:
        argv = [sys.executable, "-P", "-c", code]
        child = await asyncio.create_subprocess_exec(*argv, env=env, stderr=asyncio.subprocess.PIPE)
        await manager.wait_for(FirstWorkDone)
        await manager.send(crew.REWARD, Fenced(crew.REWARD, "succeeded"))
        _, stderr = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        assert child.returncode == FENCED_EXIT == 81
        assert b"is fenced: succeeded" in stderr


async def test_signal_to_a_role_is_a_stop_request_and_no_exception_in_what_it_does(scene: Scene) -> None:
    launch = scene.launch(crew.REWARD)
    code = "import os, rrl\nwith rrl.join() as me:\n    os.kill(os.getpid(), 2)\n    assert me.stopping.wait(60)"
    env = {"PATH": "/usr/bin:/bin", LAUNCH_ENV: str(scene.at.run.launch_file(launch.tag))}
    async with scene.manager():
        argv = [sys.executable, "-P", "-c", code]
        child = await asyncio.create_subprocess_exec(*argv, env=env, stderr=asyncio.subprocess.PIPE)
        _, stderr = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
        assert (child.returncode, stderr) == (0, b"")


async def test_finished_worker_sends_goodbye_and_heartbeats_until_its_stop(scene: Scene) -> None:
    async with scene.manager() as manager:
        role = scene.start(scene.worker(crew.REWARD))
        await manager.wait_for(Goodbye)
        for _ in range(3):  # one heartbeat may have been sent before the phase changed
            manager.received.clear()
            await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.phase == "stopping")
        assert not role.ended
        await manager.stop(crew.REWARD)
        await role.end()


async def test_stopped_role_does_not_wait_for_a_store_that_has_stopped(scene: Scene) -> None:
    worked = threading.Event()
    me = scene.worker(crew.REWARD)

    def score() -> None:
        for _ in me.scoring():
            pass
        worked.set()

    async with scene.manager() as manager:
        role = scene.start(me, score)
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.waits_for == STORE.replica)
        await manager.stop(crew.REWARD)
        await role.end()  # the store request raises Stopping, which ends the with block
    assert not worked.is_set()


async def test_trainer_stopped_while_waiting_for_a_batch_still_commits_its_last_step(scene: Scene) -> None:
    finished = threading.Event()
    me = scene.worker(crew.TRAINER)

    def train() -> None:
        assert list(me.batches()) == []
        finished.set()

    async with scene.manager() as manager:
        role = scene.start(me, train)
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.waits_for == STORE.replica)
        await manager.stop(crew.TRAINER)
        await role.end()
    assert finished.is_set()


async def test_member_reports_the_replica_it_waits_for_beside_its_phase(scene: Scene) -> None:
    go, gone_on = threading.Event(), threading.Event()
    me = scene.worker(crew.TRAINER)

    def train() -> None:
        with me.phase("checkpoint"):
            with me.blocked_on(STORE.replica):
                assert go.wait(TIMEOUT_S)
            assert gone_on.wait(TIMEOUT_S)

    async with scene.manager() as manager:
        role = scene.start(me, train)
        await manager.wait_for(
            Heartbeat, lambda heartbeat: (heartbeat.phase, heartbeat.waits_for) == ("checkpoint", STORE.replica)
        )
        go.set()
        await manager.wait_for(
            Heartbeat, lambda heartbeat: (heartbeat.phase, heartbeat.waits_for) == ("checkpoint", None)
        )
        gone_on.set()
        await manager.dismiss(role, crew.TRAINER)


async def test_wait_for_a_service_outside_of_the_run_is_reported_until_it_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_waits, "REPORTED_AFTER_S", 0.0)

    first, second, over = (threading.Event() for _ in range(3))
    me = scene.worker(crew.REWARD)

    def score() -> None:
        with me.phase("score"):
            with me.waiting("judge"):
                with rrl.waiting("embedder"):
                    assert first.wait(TIMEOUT_S)
                assert second.wait(TIMEOUT_S)
            assert over.wait(TIMEOUT_S)

    def reports(phase: str, note: str) -> Callable[[Heartbeat], bool]:
        return lambda heartbeat: (heartbeat.phase, heartbeat.waits_for, heartbeat.note) == (phase, None, note)

    async with scene.manager() as manager:
        role = scene.start(me, score)
        await manager.wait_for(Heartbeat, reports(WAIT_EXTERNAL, "waits for judge"))
        first.set()
        second.set()
        await manager.wait_for(Heartbeat, reports("score", ""))
        over.set()
        await manager.dismiss(role, crew.REWARD)


def test_wait_lasts_until_the_last_thread_that_waits_has_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_waits, "REPORTED_AFTER_S", 0.0)
    with rrl.waiting("judge"):
        with rrl.waiting("judge"):
            pass
        assert external_waits.reported_phase(("score", None)) == (WAIT_EXTERNAL, None)
    assert external_waits.reported_phase(("score", None)) == ("score", None)


def test_short_wait_for_a_service_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_waits, "REPORTED_AFTER_S", 1e6)
    with rrl.waiting("judge"):
        assert external_waits.reported_phase(("score", None)) == ("score", None)


def test_wait_for_a_service_ends_with_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_waits, "REPORTED_AFTER_S", 0.0)
    with pytest.raises(TimeoutError), rrl.waiting("judge"):
        raise TimeoutError
    assert external_waits.awaited_service() == ""


def test_services_whose_waits_are_over_take_no_memory() -> None:
    for number in range(100):
        with rrl.waiting(f"judge {number}"):
            pass
    assert not external_waits._services


def test_peers_callback_never_gets_older_peers_after_newer_ones(scene: Scene) -> None:
    with not_started(scene.worker(crew.REWARD)) as me:
        connection, received = me._connection, list[int]()
        connection.peers = Peers(1, 1, {})
        me.on_peers(lambda peers: received.append(peers.seq))
        connection._update_peers(Peers(1, 2, {}))  # before the event loop runs the scheduled callback
        connection._loop.run_until_complete(asyncio.sleep(0))
        assert received == [2, 2]


# ── the clock ──────────────────────────────────────────────────────────────────────────────────────────────────────
def clock_times(report: ClockReport) -> dict[tuple[str, str], int]:
    return {(time.phase, time.idle_cause): time.ns for time in report.clock.times}


async def test_worker_reports_its_clock_with_heartbeats_and_when_it_leaves(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = scene.worker(crew.REWARD)
    scored, over = threading.Event(), threading.Event()

    def score() -> None:
        with me.phase("score"):
            with me.idle("judge"):
                assert scored.wait(TIMEOUT_S)
            assert over.wait(TIMEOUT_S)

    async with scene.manager() as manager:
        role = scene.start(me, score)
        await manager.wait_for(ClockReport, lambda report: ("starting", "") in clock_times(report))
        monkeypatch.setattr(connection, "CLOCK_REPORT_INTERVAL_S", 0.0)
        me.progress(3)
        scored.set()
        await manager.wait_for(
            ClockReport, lambda report: {("score", "judge"), ("score", "")} <= {*clock_times(report)}
        )
        monkeypatch.setattr(connection, "CLOCK_REPORT_INTERVAL_S", 1e6)
        over.set()
        await manager.dismiss(role, crew.REWARD)
        last = await manager.wait_for(ClockReport, lambda report: ("stopping", "") in clock_times(report))
    assert last.clock.done == 3
    reports = [message for message in manager.received if isinstance(message, ClockReport)]
    assert reports[-1] == last
    assert {report.clock.began for report in reports} == {last.clock.began}
    totals = [sum(clock_times(report).values()) for report in reports]
    assert totals == sorted(totals)
    assert totals[-1] <= boot_time_ns() - last.clock.began


async def test_clock_is_not_reported_with_every_heartbeat(scene: Scene) -> None:
    over = threading.Event()
    async with scene.manager() as manager:
        role = scene.start(scene.worker(crew.REWARD), over.wait)
        await manager.wait_for(ClockReport)
        await eventually(lambda: sum(isinstance(message, Heartbeat) for message in manager.received) >= 10)
        over.set()
        await manager.wait_for(Goodbye)
        reports = sum(isinstance(message, ClockReport) for message in manager.received)
        heartbeats = sum(isinstance(message, Heartbeat) for message in manager.received)
        assert reports <= 1 + heartbeats * HEARTBEAT_S / connection.CLOCK_REPORT_INTERVAL_S + 1
        await manager.stop(crew.REWARD)
        await role.end()


async def test_commit_is_preceded_by_the_clock_and_waits_of_the_thread_at_work_are_idle(scene: Scene) -> None:
    """A commit in the thread of the phase waits for the store, which counts as idle.

    A commit in another thread does not make the phase idle.
    """

    store = scene.open_store()
    crew.generate(store)
    crew.score(store, reward=0.5)
    me = scene.worker(crew.TRAINER)
    me.job = msgspec.structs.replace(me.job, steps=2)

    def work() -> None:
        for batch in me.batches():
            file = me.checkpoint_dir(batch.number) / "state"
            file.write_bytes(b"state")
            with me.phase("train"):
                if batch.number == 1:
                    me.commit(1, [file])
                else:
                    saver = threading.Thread(target=me.commit, args=(2, [file]))
                    saver.start()
                    saver.join(TIMEOUT_S)

    async with scene.manager_and(store) as manager:
        role = scene.start(me, work)
        await manager.wait_for(StepCommitted, lambda message: message.step == 2)
        await manager.dismiss(role, crew.TRAINER)
        index = {m.step: i for i, m in enumerate(manager.received) if isinstance(m, StepCommitted)}
        first, second = manager.received[index[1] - 1], manager.received[index[2] - 1]
        assert isinstance(first, ClockReport)
        assert isinstance(second, ClockReport)
        assert {("wait_data", "rollouts"), ("train", "store")} <= {*clock_times(first)}
        last = [message for message in manager.received if isinstance(message, ClockReport)][-1]
        assert clock_times(last)["train", "store"] == clock_times(second)["train", "store"]
        assert clock_times(first)["train", "store"] == clock_times(last)["train", "store"]
        assert clock_times(last)["train", ""] > 0
    store.close()


# ── restarts of the manager ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("content", [b"", b'{"epoch":1', b"\0" * 40, b"[]", b'{"epoch":1,"endpoint":"\xff"}'])
def test_unreadable_address_counts_as_missing(scene: Scene, content: bytes) -> None:
    with not_started(scene.worker(crew.REWARD)) as me:
        scene.at.run.manager.write_bytes(content)
        assert me._connection._find_manager() is None
        address = Address(1, "tcp://127.0.0.1:1")
        scene.at.run.manager.write_bytes(msgspec.json.encode(address))
        assert me._connection._find_manager() == address


async def test_next_manager_receives_the_current_state_and_no_old_messages(scene: Scene) -> None:
    me = scene.worker(crew.TRAINER)
    over = threading.Event()

    async def outlast(seconds: float) -> None:
        """Wait for ``seconds`` of the loop's time, while heartbeats are sent and phases are reported."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(seconds), me._connection._loop))

    async with scene.manager() as first:
        role = scene.start(me, over.wait)
        await first.wait_for(Heartbeat)
    await eventually(lambda: not me._connection._dialer.connected)
    with me.phase("train"):
        await outlast(0.3)
    me.progress(1)
    me.publish(1, [])
    await outlast(3 * HEARTBEAT_S)
    me.progress(1)
    me.publish(2, [])
    await outlast(3 * HEARTBEAT_S)
    async with scene.manager(epoch=2) as second:
        await second.wait_for(Heartbeat)
        hello = second.received[0]
        assert isinstance(hello, Hello)
        assert (hello.phase, hello.weight_version) == ("between", Version(2, 1))
        assert {heartbeat.done for heartbeat in second.received if isinstance(heartbeat, Heartbeat)} == {2}
        assert not [message for message in second.received if isinstance(message, PhaseEntered | VersionAvailable)]
        assert FirstWorkDone(crew.TRAINER) in second.received, (
            "a message whose content no Hello repeats must be buffered"
        )
        over.set()
        await second.wait_for(Goodbye)
        await second.stop(crew.TRAINER)
        await role.end()


async def test_commit_unknown_to_the_manager_is_reported_by_the_next_trainer(scene: Scene) -> None:
    """The commit may be the last one of the run, so that no later commit would report it."""

    store = scene.open_store()
    crew.train(store, 1, metrics={"loss": 0.25})
    heir = crew.incarnation_of("trainer/0", 2)
    store.update_membership([*crew.ALL[:-1], heir])
    me = scene.worker(heir)
    async with scene.manager_and(store) as manager:
        role = scene.start(me, lambda: list(me.batches(after=me.committed)))
        await manager.wait_for(Goodbye)
        commit = await manager.wait_for(StepCommitted)
        assert (commit.step, commit.metrics["loss"]) == (1, 0.25)
        await manager.stop(heir)
        await role.end()
    store.close()


def test_worker_reads_the_typed_job_and_the_options_of_its_own_role(scene: Scene) -> None:
    judge = scene.worker(Incarnation(ReplicaId("judge/0"), 1))
    assert (judge.job, judge.options) == (JOB, {"until": 3})
    assert (judge.job.transport.chunk, judge.job.sampling.staleness, judge.job.reward.lease) == (2**20, None, 256)
    assert scene.worker(crew.TRAINER).options == {}


async def test_step_is_committed_in_another_thread_during_the_next_batch(scene: Scene, tmp_path: Path) -> None:
    store = scene.open_store()
    crew.generate(store)
    crew.score(store, reward=0.5)
    me = scene.worker(crew.TRAINER)
    me.job = msgspec.structs.replace(me.job, steps=2)
    given: list[int] = []

    def work() -> None:
        threads = []
        for batch in me.batches():
            given.append(batch.number)
            if batch.number == 2:  # the first step is complete, but not committed
                threads = [threading.Thread(target=commit, args=(number,)) for number in (1, 2)]
                threads[0].start()
                threads[0].join()
                threads[1].start()
        threads[1].join()
        with pytest.raises(ValueError, match="cannot commit step 2"):
            commit(2)

    def commit(number: int) -> None:
        folder = me.checkpoint_dir(number)
        files = [folder / name for name in ("mine", "another's")]
        files[0].write_bytes(b"bytes")
        me.commit(number, files, {"loss": 1.0}, {"another's": {"sha256": "00", "bytes": 3}})

    async with scene.manager_and(store) as manager:
        role = scene.start(me, work)
        await manager.wait_for(Goodbye)
        commits = [message for message in manager.received if isinstance(message, StepCommitted)]
        assert [(m.step, m.metrics["loss"], m.metrics["reward"]) for m in commits] == [(1, 1.0, 0.5), (2, 1.0, 0.5)]
        assert [m.metrics["token_age_max"] for m in commits] == [0.0, 1.0], (
            "the ages are not those of tokens of step 0's weights"
        )
        await manager.stop(crew.TRAINER)
        await role.end()
    assert given == [1, 2]
    state = store.committed(crew.TRAINER)
    assert isinstance(state, CommittedState)
    assert state.manifest is not None
    assert state.manifest["files"].keys() == {"mine", "another's"}
    assert state.manifest["files"]["another's"] == {"sha256": "00", "bytes": 3}
    store.close()


async def test_next_trainer_gets_the_committed_tree_by_relative_path_and_as_a_folder(scene: Scene) -> None:
    store = scene.open_store()
    crew.generate(store)
    crew.score(store)

    def commit() -> None:
        (batch,) = me.batches()
        folder = me.checkpoint_dir(batch.number)
        for name in ("model/a", "optimizer/a"):
            (folder / name).parent.mkdir()
            (folder / name).write_text(name)
        with pytest.raises(ValueError, match=r"is not in a folder that me\.checkpoint_dir\(step\) returned"):
            me.commit(1, [folder / "model", folder / ".." / "a"])
        known = me.digests([folder / "model"])
        assert known == {"model/a": {"sha256": hashlib.sha256(b"model/a").hexdigest(), "bytes": 7}}
        me.commit(1, [folder / "model", folder / "optimizer"], digests=known)
        (folder / "left over").touch()

    def resume() -> None:
        files = heir.committed_files()
        assert files is not None
        assert {name: path.read_text() for name, path in files.items()} == {
            "model/a": "model/a",
            "optimizer/a": "optimizer/a",
        }
        for share in (None, (0, 2), (1, 2)):
            assert (folder := heir.committed_folder(share)) is not None
            assert {path.name for path in folder.iterdir()} == {"model", "optimizer"}
        for function in (heir.committed_files, heir.committed_folder):
            with pytest.raises(ValueError, match=r"share=\(2, 2\): expected \(rank, world\)"):
                function((2, 2))
        files["model/a"].write_text("changed")
        with pytest.raises(DamagedCheckpoint, match="model/a has the digest"):
            [heir.committed_folder((rank, 2)) for rank in range(2)]

    me, heir = scene.worker(crew.TRAINER), scene.worker(crew.incarnation_of("trainer/0", 2))
    async with scene.manager_and(store) as manager:
        await manager.dismiss(scene.start(me, commit), crew.TRAINER)
        manager.received.clear()
        store.update_membership([*crew.ALL[:-1], heir.launch.incarnation])
        await manager.dismiss(scene.start(heir, resume), heir.launch.incarnation)
    store.close()


# ── restarts of the store ──────────────────────────────────────────────────────────────────────────────────────────
async def test_unreachable_store_does_not_end_other_roles(scene: Scene) -> None:
    store = scene.open_store()
    crew.generate(store)
    me = scene.worker(crew.REWARD)
    async with scene.manager() as manager:
        role = scene.start(me, lambda: next(me.scoring()))
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.waits_for == STORE.replica)
        loop, now = me._connection._loop, me._connection._loop.time
        me._connection.call_soon(setattr, loop, "time", lambda: now() + 10 * 3600)
        for _ in range(3):
            manager.received.clear()
            await manager.wait_for(Heartbeat)
        assert not role.ended
        async with scene.serve(store) as endpoint:
            manager.store_is(endpoint)
            await manager.send(crew.REWARD, manager.current)
            await manager.dismiss(role, crew.REWARD)
    store.close()


# ── rollout ────────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_rollout_that_leases_while_it_works_gets_each_trajectory_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given, phases = scene.open_store(), list[list[int]](), list[str]()
    me = scene.worker(crew.ROLLOUT)
    enter = me._connection.set_phase

    def entered(name: str, *more: Any) -> None:
        phases.append(name)
        enter(name, *more)

    def roll() -> None:
        me._connection.weights.offer(*_version(me))
        monkeypatch.setattr(me._connection, "set_phase", entered)
        given.append([item.trajectory for item in me.lease(2)])
        with me.phase("generate"):
            given.append([item.trajectory for item in me.lease(1, wait=False)])
        assert me.append([crew.segment(0), crew.segment(1, tokens=(5,))], [0]) == ()
        given.append([item.trajectory for item in me.lease(3)])

    async with scene.manager_and(store) as manager:
        role = scene.start(me, roll)
        await manager.dismiss(role, crew.ROLLOUT)
    assert given == [[0, 1], [2], [3, 4, 5]]
    assert phases[:5] == ["wait_work", "between", "generate", "between", "wait_work"]
    store.close()


async def test_trajectory_leased_by_a_lost_answer_is_leased_again(scene: Scene) -> None:
    store, given = scene.open_store(), list[int]()
    crew.lease(
        store, crew.ROLLOUT, at_most=2
    )  # trajectories 0 and 1 are leased to this incarnation, in an answer that it has not received
    me = scene.worker(crew.ROLLOUT)

    def roll() -> None:
        me._connection.weights.offer(*_version(me))
        given.extend(item.trajectory for _ in range(2) for item in me.lease(2))

    async with scene.manager_and(store) as manager:
        role = scene.start(me, roll)
        await manager.dismiss(role, crew.ROLLOUT)
    assert given == [0, 1, 2, 3]
    store.close()


async def test_lost_trajectory_is_forgotten_and_may_be_leased_again(scene: Scene) -> None:
    store, results = scene.open_store(), list[tuple[object, ...]]()
    me = scene.worker(crew.ROLLOUT)

    def roll() -> None:
        me._connection.weights.offer(*_version(me))
        me.lease(2)
        store.update_membership(
            [incarnation for incarnation in crew.ALL if incarnation != crew.ROLLOUT]
        )  # the manager concluded that ROLLOUT is dead ...
        crew.lease(store, crew.OTHER, at_most=1)
        assert store.append(crew.OTHER, [crew.segment(0, tokens=(5,))]) == Done()
        store.update_membership(
            [incarnation for incarnation in crew.ALL if incarnation != crew.OTHER]
        )  # ... and now concludes that OTHER is dead
        results.append(me.append([crew.segment(0), crew.segment(1, tokens=(5,))]))
        crew.lease(store, crew.ROLLOUT, at_most=1, holding=[1])  # the answer gets lost
        results.append(tuple((item.trajectory, len(item.so_far)) for item in me.lease(1)))

    async with scene.manager_and(store) as manager:
        role = scene.start(me, roll)
        await manager.dismiss(role, crew.ROLLOUT)
    assert results == [(0,), ((0, 1),)]
    store.close()


async def test_rollout_works_on_while_the_store_answers_its_append(scene: Scene) -> None:
    store, results = scene.open_store(), list[object]()
    me = scene.worker(crew.ROLLOUT)
    blocked = threading.Event()
    flush = store.flush
    store.flush = lambda: (blocked.wait(), flush())[1]  # type: ignore[method-assign]
    blocked.set()

    def roll() -> None:
        me._connection.weights.offer(*_version(me))
        me.lease(2)
        blocked.clear()
        pending = me.start_append([crew.segment(0), crew.segment(1, tokens=(5,))], [0], lease=2)
        results.append((pending.answered, me._connection.status.done))
        blocked.set()
        lost, leased = pending.finish()
        results.append((lost, [item.trajectory for item in leased], me._connection.status.done))
        results.append(me.append([crew.segment(1, 1), crew.segment(2)], [2]))
        results.append(me._leased.ids)

    async with scene.manager_and(store) as manager:
        role = scene.start(me, roll)
        await manager.dismiss(role, crew.ROLLOUT)
    assert results == [(False, 0), ((), [2, 3], 3), (), [1, 3]]
    store.close()


async def test_waiting_lease_gets_no_trajectory_that_an_append_has_leased(scene: Scene) -> None:
    store, results = scene.open_store(), list[object]()
    me = scene.worker(crew.ROLLOUT)

    def roll() -> None:
        me._connection.weights.offer(*_version(me))
        (first,) = me.lease(1)
        waiting = me.start_lease(2)
        pending = me.start_append([crew.segment(first.trajectory)], [first.trajectory], lease=3)
        items = [item.trajectory for item in (*waiting.finish(), *pending.finish().leased)]
        # The append may lease again the items that the store has already leased to the waiting request: then 3
        # items, not 5.
        results.append((len(items) in (3, 5), len(items) == len(set(items)), sorted(items) == me._leased.ids))
        results.append(me.append([crew.segment(trajectory) for trajectory in items], items))

    async with scene.manager_and(store) as manager:
        role = scene.start(me, roll)
        await manager.dismiss(role, crew.ROLLOUT)
    assert results == [(True, True, True), ()]
    store.close()


async def test_nothing_is_leased_before_the_first_version_and_a_stop_ends_the_wait(scene: Scene) -> None:
    store, given = scene.open_store(), list[tuple[Item, ...]]()
    me = scene.worker(crew.ROLLOUT)
    async with scene.manager_and(store) as manager:
        role = scene.start(me, lambda: given.append(me.lease(2)))
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.phase == "wait_weights")
        await manager.stop(crew.ROLLOUT)
        await role.end()
    assert given == [()]
    assert crew.lease(store, crew.OTHER, at_most=1)[0].trajectory == 0
    store.close()


def _version(me: Worker) -> tuple[Manifest, memoryview]:
    """Return the manifest and the content of a version without tensors."""
    return describe(Version(0, 1), [], memoryview(b""), me.keys.secret, 2**20), memoryview(b"")


# ── weight versions without the manager's reports ──────────────────────────────────────────────────────────────────
class Publisher:
    """A trainer that publishes the steps in its queue, until it takes None."""

    def __init__(self, me: Worker) -> None:
        self._me = me
        self.steps: queue.Queue[int | None] = queue.Queue()

    def play(self) -> None:
        while (step := self.steps.get(timeout=TIMEOUT_S)) is not None:
            self._me.publish(step, [("step", "uint8", (1,), memoryview(bytes([step])))])


class Receiver:
    """A rollout that records each version that it receives, with the version's content."""

    def __init__(self, me: Worker) -> None:
        self._me = me
        self.got: list[tuple[Version, bytes]] = []
        self.enough = threading.Event()

    def play(self) -> None:
        while not self.enough.is_set():
            if (new := self._me.new_weights()) is not None:
                self.got.append((new.version, bytes(new.flat)))
                again = self._me.new_weights(again=True)
                assert again is not None
                assert again.version >= new.version
                self.got += [] if again.version == new.version else [(again.version, bytes(again.flat))]
            time.sleep(0.01)

    def has(self, step: int) -> bool:
        return bool(self.got) and self.got[-1] == (Version(step, 1), bytes([step]))


@asynccontextmanager
async def publishing(scene: Scene, *rollouts: Incarnation) -> AsyncIterator[tuple[Manager, Publisher, list[Receiver]]]:
    """Yield (manager, publisher, receivers). The manager names no version."""
    publisher = Publisher(trainer := scene.worker(crew.TRAINER))
    workers = [scene.worker(incarnation) for incarnation in rollouts]
    receivers = [Receiver(worker) for worker in workers]
    async with scene.manager() as manager:
        roles = [scene.start(trainer, publisher.play)]
        roles += [scene.start(worker, receiver.play) for worker, receiver in zip(workers, receivers, strict=True)]
        yield manager, publisher, receivers
        publisher.steps.put(None)
        for receiver in receivers:
            receiver.enough.set()
        for incarnation in (crew.TRAINER, *rollouts):
            await manager.wait_for(Goodbye, partial(_is_of, incarnation))
            await manager.stop(incarnation)
        for role in roles:
            await role.end()


def _is_of_trainer(message: object) -> TypeGuard[Heartbeat]:
    return isinstance(message, Heartbeat) and message.incarnation == crew.TRAINER


def _is_of(incarnation: Incarnation, goodbye: Goodbye) -> bool:
    return goodbye.incarnation == incarnation


async def _store_is(manager: Manager, endpoint: str, epoch: int = 1) -> None:
    manager.store_is(endpoint, epoch)
    for replica in list(manager.peers):
        await manager.send(replica, manager.current)


async def test_rollouts_receive_each_version_without_the_manager(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store, traffic = scene.open_store(), WeightTraffic(3, 4, 1)
    monkeypatch.setattr(Deltas, "traffic", property(lambda _: traffic, lambda *_: None), raising=False)
    async with scene.serve(store) as endpoint:
        async with publishing(scene, crew.ROLLOUT, crew.OTHER) as (manager, publisher, receivers):
            await _store_is(manager, endpoint)
            for step in (1, 2, 3):
                publisher.steps.put(step)
                for receiver in receivers:
                    await eventually(partial(receiver.has, step), f"version {step}")
            newest = Version(3, 1)
            reported_last = await manager.wait_for(
                Heartbeat, lambda one: (one.incarnation, one.weights) == (crew.OTHER, newest)
            )
            assert reported_last.traffic == traffic

            def announces_both() -> bool:
                groups = () if store.newest_version is None else store.newest_version.sources
                return any(crew.OTHER in sources for held, sources in groups if held == (newest, Version(2, 1)))

            await eventually(announces_both, "a rollout announces both of its versions")
            assert all(one.traffic == WeightTraffic() for one in manager.received if _is_of_trainer(one))
            reported = [one for one in manager.received if isinstance(one, VersionAvailable)]
            assert [one.version.step for one in reported if one.incarnation == crew.TRAINER] == [1, 2, 3]
            assert sum(one.incarnation == crew.OTHER for one in reported) == 1, "only the first of a rollout"
    store.close()


async def test_restarted_store_receives_the_newest_version_again(scene: Scene) -> None:
    """The trainer publishes no further version, and a later rollout receives the version from the new store."""

    store = scene.open_store()
    async with publishing(scene, crew.ROLLOUT) as (manager, publisher, [receiver]):
        async with scene.serve(store) as endpoint:
            await _store_is(manager, endpoint)
            publisher.steps.put(1)
            await eventually(lambda: receiver.has(1))
        store.close()
        store = scene.open_store()
        assert store.newest_version is None
        async with scene.serve(store, epoch=2) as endpoint:
            await _store_is(manager, endpoint, epoch=2)
            named = await eventually(lambda: store.newest_version)
            assert named.version == Version(1, 1)
            await eventually(lambda: store.newest_version and len(store.newest_version.sources[0][1]) == 2)
    store.close()


async def test_rollout_pulls_from_another_one_if_the_trainer_died_early(scene: Scene) -> None:
    store = scene.open_store()
    with not_started(scene.worker(crew.TRAINER)) as trainer:
        trainer.publish(7, [("step", "uint8", (1,), memoryview(bytes([7])))])
        held = trainer._connection.weights.current()
    assert held is not None
    relay, late = scene.worker(crew.ROLLOUT), Receiver(me := scene.worker(crew.OTHER))
    over = threading.Event()
    async with scene.manager_and(store) as manager:
        assert store.report_versions(crew.TRAINER, (Version(7, 1),)) is None
        relay._connection.weights.offer(
            held.manifest, held.flat
        )  # the version that this rollout had pulled before the trainer died
        roles = [scene.start(relay, lambda: over.wait(TIMEOUT_S)), scene.start(me, late.play)]
        await eventually(lambda: late.has(7), "the version that only another rollout has")
        over.set()
        late.enough.set()
        for incarnation in (crew.ROLLOUT, crew.OTHER):
            await manager.wait_for(Goodbye, partial(_is_of, incarnation))
            await manager.stop(incarnation)
        for role in roles:
            await role.end()
    store.close()


# ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────────
TASK = """
import threading
first, go = threading.Event(), threading.Event()
class Task:
    def prompt(self, i): return ""
    def answer(self, i): return ""
    def score(self, i, text):
        if first.is_set():
            assert go.wait(60)
        first.set()
        return 1.0, 1.0
def make(seed): return Task()
"""


async def test_reward_role_reports_progress_while_it_scores_and_counts_each_item_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.at.run.path / "task_of_test_worker.py").write_text(TASK)
    # so that the entries of load_task are removed after the test
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "task_of_test_worker", raising=False)
    me = scene.worker(crew.REWARD)
    monkeypatch.setattr(rrl, "join", lambda: me, raising=False)

    store = scene.open_store()
    complete = len(crew.generate(store))
    assert complete > 2
    async with scene.manager_and(store) as manager:
        role = Role(reward.main)
        await manager.wait_for(Heartbeat, lambda heartbeat: (heartbeat.phase, heartbeat.done) == ("score", 1))
        sys.modules["task_of_test_worker"].go.set()
        await manager.wait_for(
            Heartbeat, lambda heartbeat: (heartbeat.phase, heartbeat.done) == ("wait_work", complete)
        )
        assert store.lease_scoring(crew.REWARD, 256) == Scoring(())
        await manager.stop(crew.REWARD)
        await role.end()
        assert max(heartbeat.done for heartbeat in manager.received if isinstance(heartbeat, Heartbeat)) == complete
    store.close()


@pytest.mark.parametrize("numpys", [False, True], ids=["failed", "scalars of numpy"])
async def test_scores_not_reported_as_progress_count_when_they_are_posted(scene: Scene, numpys: bool) -> None:
    store = scene.open_store()
    complete = len(crew.generate(store))
    me = scene.worker(crew.REWARD)

    def score() -> None:
        work = next(me.scoring())
        me.progress(2)
        reward: Any = numpy.float32(0.5)
        for item in work.items:  # two items are reported before the first post, the others by their posts
            if numpys:
                work.post([Score(item.trajectory, reward, training=reward)])
            else:
                work.post([], {item.trajectory: "no reason"})

    async with scene.manager_and(store) as manager:
        role = scene.start(me, score)
        heartbeat = await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.phase == "stopping")
        assert heartbeat.done == complete
        await manager.stop(crew.REWARD)
        await role.end()
    store.close()


# ── publishing ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_published_version_has_the_given_tensors(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrl.roles.worker.publishing._COPY_SLICE_BYTES", 100)
    long, short = bytes(range(256)) * 3, b"\x05\x06\x07"
    with not_started(scene.worker(crew.TRAINER)) as me:
        floats: Any = memoryview(long).cast("f")
        tensors = [
            ("a", "uint8", (3,), memoryview(short)),
            ("b", "float32", (192,), floats),
            ("c", "uint8", (0,), memoryview(b"")),
        ]
        me.publish(4, tensors)
        held = me._connection.weights.current()
        assert held is not None
        assert held.manifest.version == Version(4, 1)
        given = {spec.name: bytes(held.flat[spec.offset :][: spec.nbytes]) for spec in held.manifest.tensors}
        assert given == {"a": short, "b": long, "c": b""}
        me.publish(5, tensors)
        assert me._connection.weights.versions() == (Version(4, 1), Version(5, 1))


def test_publish_each_takes_tensors_one_after_another(scene: Scene) -> None:
    buffer = bytearray(4)

    def gathered() -> Iterator[memoryview]:
        for value in (1, 2, 3):  # each tensor reuses the memory of the one before
            buffer[:] = bytes([value]) * 4
            yield memoryview(buffer)

    with not_started(scene.worker(crew.TRAINER)) as me:
        me.publish_each(4, [(name, "uint8", (4,), 4) for name in "abc"], gathered())
        held = me._connection.weights.current()
        assert held is not None
        given = [bytes(held.flat[spec.offset :][: spec.nbytes]) for spec in held.manifest.tensors]
        assert given == [b"\1" * 4, b"\2" * 4, b"\3" * 4]


def test_publishing_allocates_no_memory_that_is_filled_under_the_gil(scene: Scene) -> None:
    """tracemalloc counts only allocations by Python itself, which are filled under the GIL."""
    data = memoryview(bytearray(2**24))
    with not_started(scene.worker(crew.TRAINER)) as me:
        tracemalloc.start()
        try:
            me.publish(1, [("w", "uint8", (2**24,), data)])
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


def test_other_threads_run_while_weights_are_copied(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test passes once another thread has observed a version of which only a part was copied."""
    data, step = memoryview(b"\1" * 2**26), 2**20
    memory: list[memoryview] = []
    make = WeightStore.allocate

    def remembered(store: WeightStore, nbytes: int) -> memoryview:
        memory[:] = [make(store, nbytes)]
        return memory[0]

    monkeypatch.setattr(WeightStore, "allocate", remembered)
    monkeypatch.setattr("rrl.roles.worker.publishing._COPY_SLICE_BYTES", step)
    results: set[int] = set()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for flat in memory[:]:
                results.add(bytes(flat[::step]).count(1))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with not_started(scene.worker(crew.TRAINER)) as me:
            deadline, number = time.monotonic() + TIMEOUT_S, 0
            while not results - {0, len(data) // step}:
                assert time.monotonic() < deadline, "no other thread ran while weights were copied"
                me.publish(number := number + 1, [("w", "uint8", (len(data),), data)])
    finally:
        over.set()
        looking.join()
