"""Snapshots of a member: stored by the agent of its node, copied to agents of other nodes, restored, and released."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rrl.core.types import Incarnation, ReplicaId
from rrl.roles.snapshots import connection
from rrl.roles.snapshots import server as server_module
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.format import (
    MAX_META_BYTES,
    PAYLOAD_OFFSET,
    Damaged,
    Fenced,
    SnapshotError,
    SnapshotInfo,
    digest_of,
)
from rrl.roles.snapshots.server import SnapshotServer
from rrl.tests.support.listening_manager import TIMEOUT_S, wait_until
from rrl.tests.support.roles.snapshots.servers import FAR, keep, member, process, snapshot_server
from rrl.tests.support.roles.snapshots.writer import GANG, NODE
from rrl.transport.keys import RunKeys
from rrl.transport.streams import connection as stream_connection
from rrl.transport.streams import framing
from rrl.transport.streams.connection import Connection, authenticate
from rrl.transport.streams.framing import send_bulk
from rrl.transport.streams.unix import UnixConnection

BIG = 24 * 2**20
"""Bytes of a snapshot that is larger than the buffers of two sockets."""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time for handshakes on a busy machine."""
    monkeypatch.setattr(stream_connection, "HANDSHAKE_TIMEOUT_S", 10.0)


@pytest.fixture
def keys() -> RunKeys:
    return RunKeys.make()


@pytest.fixture
def here(keys: RunKeys) -> Iterator[SnapshotServer]:
    with snapshot_server(keys) as made:
        yield made


@pytest.fixture
def far(keys: RunKeys) -> Iterator[SnapshotServer]:
    with snapshot_server(keys, FAR) as made:
        yield made


@pytest.fixture
def one(keys: RunKeys, here: SnapshotServer) -> Iterator[SnapshotClient]:
    with member(keys) as client:
        yield client


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the wait for the end of a member's process, because members are threads of the test's process here."""
    monkeypatch.setattr(server_module, "WRITER_END_TIMEOUT_S", 0.0)


def steps(stored: list[SnapshotInfo]) -> list[tuple[int, int]]:
    return [(each.step, each.incarnation) for each in stored]


# ── snapshots on the member's node ─────────────────────────────────────────────────────────────────────────────────
def test_last_two_snapshots_are_kept_and_can_be_read(one: SnapshotClient) -> None:
    contents = {step: keep(one, step, 5 * 2**20 + step) for step in (1, 2, 3)}
    kept = one.list_snapshots()
    assert steps(kept) == [(3, 1), (2, 1)]
    assert all(each.own and each.gang == GANG and each.rank == 0 for each in kept)
    for each in kept:
        meta, data = one.read(each)
        assert (meta, bytes(data)) == (b"step %d" % each.step, contents[each.step])


def test_unsealed_snapshot_does_not_count_and_leaves_the_one_before_it(one: SnapshotClient) -> None:
    keep(one, 1)
    keep(one, 2)
    one.buffer(1000, 3)[:] = b"3" * 1000
    assert steps(one.list_snapshots()) == [(2, 1)]
    assert bytes(one.buffer(1000, 3)) == b"3" * 1000, (
        "a repeated request does not return the view with the written bytes"
    )
    one.seal(3).result()
    assert steps(one.list_snapshots()) == [(3, 1), (2, 1)]


def test_memory_of_a_snapshot_grows_with_it_and_is_reused(keys: RunKeys, here: SnapshotServer) -> None:
    with member(keys) as one:
        for step, size in ((1, 10), (2, 10), (3, 100_000), (4, 10), (5, 5 * 2**20), (6, 0)):
            content = keep(one, step, size)
            assert bytes(one.read(one.list_snapshots()[0])[1]) == content
            if step == 2:
                before = _descriptors()
        assert steps(one.list_snapshots()) == [(6, 1), (5, 1)]
        wait_until(lambda: _descriptors() <= before)


class FakePinning:
    """A replacement that locks no pages, and records the sizes of the buffers that it should lock."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.calls = 0

    def pin(self, memory: memoryview) -> None:
        assert memory.nbytes > 0, "memory that is not mapped was to be locked"
        self.calls += 1
        self.pinned.append(memory.nbytes)

    def unpin(self, memory: memoryview) -> None:
        assert memory.nbytes > 0, "memory was unmapped before it was unlocked"
        if memory.nbytes in self.pinned:
            self.pinned.remove(memory.nbytes)


def test_each_buffer_is_page_locked_once_while_it_is_mapped(keys: RunKeys, here: SnapshotServer) -> None:
    pinning = FakePinning()
    with member(keys, pinning=pinning) as one:
        for step in (1, 2, 3, 4):
            keep(one, step)
        small = PAYLOAD_OFFSET + 1000
        assert len(pinning.pinned) == pinning.calls == 2
        assert all(size >= small for size in pinning.pinned)
        keep(one, 5, 5 * 2**20)  # a larger buffer replaces one of the two
        assert len(pinning.pinned) == 2
        assert pinning.calls == 3
        here.close()  # the agent dies, and the member maps the buffers of the next agent
        with snapshot_server(keys):
            keep(one, 6)
            keep(one, 7)
            assert len(pinning.pinned) == 2
    assert pinning.pinned == []


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sealing_runs_during_the_next_step_and_the_next_buffer_waits_for_it(
    one: SnapshotClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1)
    may = threading.Event()

    def held_back(meta: bytes, payload: memoryview) -> bytes:
        assert may.wait(TIMEOUT_S)
        return digest_of(meta, payload)

    monkeypatch.setattr("rrl.roles.snapshots.client.digest_of", held_back)
    one.buffer(1000, 2)
    sealed = one.seal(2)
    assert steps(one.list_snapshots()) == [(1, 1)]
    had = threading.Event()

    def buffers() -> None:
        one.buffer(1000, 3)
        had.set()

    waiting = threading.Thread(target=buffers)
    waiting.start()
    assert not had.wait(0.1)
    assert not sealed.done()
    may.set()
    waiting.join(TIMEOUT_S)
    assert had.is_set()
    assert sealed.result(TIMEOUT_S).step == 2
    assert steps(one.list_snapshots()) == [(2, 1)]


def test_invalid_seal_raises(one: SnapshotClient) -> None:
    with pytest.raises(ValueError, match="nothing to seal"):
        one.seal(1)
    one.buffer(10)
    with pytest.raises(ValueError, match=r"meta has \d+ bytes"):
        one.seal(1, bytes(MAX_META_BYTES + 1))
    one.seal(1, bytes(MAX_META_BYTES)).result()
    assert len(one.read(one.list_snapshots()[0])[0]) == MAX_META_BYTES


def test_changed_byte_of_a_snapshot_is_detected(one: SnapshotClient, here: SnapshotServer) -> None:
    keep(one, 1)
    keep(one, 2)
    newest, older = one.list_snapshots()
    buffer = here._buffers.find(newest)
    os.pwrite(buffer.fd, b"!", PAYLOAD_OFFSET + 999)
    with pytest.raises(Damaged, match="step 2 of trainer/0#1, rank 0"):
        one.read(newest)
    assert one.read(older)[0] == b"step 1"


def test_every_rank_and_every_node_has_its_own_memory(keys: RunKeys, here: SnapshotServer, far: SnapshotServer) -> None:
    with member(keys, rank=0) as zero, member(keys, rank=1) as one, member(keys, rank=1, node=FAR) as other:
        for number, client in enumerate((zero, one, other)):
            keep(client, 10 + number)
        assert {(each.rank, each.step) for each in zero.list_snapshots()} == {(0, 10), (1, 11)}
        assert {(each.rank, each.step) for each in other.list_snapshots()} == {(1, 12)}
        assert zero.list_snapshots(far.address) == other.list_snapshots()


def test_no_snapshot_is_kept_until_an_agent_runs_again(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_DELAY_S", 0.0)
    with member(keys) as client:
        with pytest.raises(SnapshotError, match=r"cannot connect .* in a container, it must use the node's network"):
            client.buffer(1000, 1)
        with snapshot_server(keys):
            keep(client, 2)
            keep(client, 3)
        wait_until(lambda: not client._agent.is_connected)
        with pytest.raises(SnapshotError):
            client.buffer(1000, 4)
        with snapshot_server(keys):
            assert client.list_snapshots() == []
            keep(client, 5)
            assert steps(client.list_snapshots()) == [(5, 1)]


def test_killed_agent_loses_only_its_snapshots(keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_DELAY_S", 0.0)
    with member(keys) as client:
        with process(keys, tmp_path) as (agent, _):
            keep(client, 1)
            view = client.buffer(1000, 2)
            agent.kill()
            agent.wait()
            view[:] = b"x" * 1000  # the member still has the memory mapped
            client.seal(2).result()
        with process(keys, tmp_path):
            keep(client, 3)
            assert steps(client.list_snapshots()) == [(3, 1)]


def test_hung_agent_is_not_contacted_at_every_step(
    keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_connection, "HANDSHAKE_TIMEOUT_S", 1.0)
    with process(keys, tmp_path) as (agent, _), member(keys) as client:
        _stop(agent)
        with pytest.raises(SnapshotError, match="no reply within"):
            client.buffer(1000, 1)
        for step in (2, 3):
            with pytest.raises(
                SnapshotError, match="not requested, because the last request got no answer less than 5 s ago"
            ):
                client.buffer(1000, step)
        asked = threading.Event()

        async def handshake(*args: Any, **more: Any) -> None:
            if asked.is_set():  # the agent hangs for the second time, and is contacted again
                agent.send_signal(signal.SIGCONT)
            asked.set()
            await authenticate(*args, **more)

        monkeypatch.setattr(connection, "authenticate", handshake)
        assert client.list_snapshots() == []
        keep(client, 4)


def _stop(agent: subprocess.Popen[str]) -> None:
    """Stop all threads of the agent, and return once none of them runs."""
    agent.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{agent.pid}/task")
    wait_until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads.glob("*/stat")))


def test_agent_that_hangs_after_its_answer_and_before_the_descriptors_counts_as_hung(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT_S", 1.0)

    async def sends_no_descriptors(*_: Any) -> None:
        await asyncio.Event().wait()

    with snapshot_server(keys), member(keys) as client:
        client.prepare(1000)
        with monkeypatch.context() as hung:
            hung.setattr(UnixConnection, "send_descriptors", sends_no_descriptors)
            with pytest.raises(SnapshotError, match="no reply within 1 s"):
                client.buffer(2000, 1)
        with pytest.raises(SnapshotError, match="the last request got no answer"):
            client.buffer(2000, 2)


def test_hung_agent_does_not_delay_a_member_that_has_its_memory(keys: RunKeys, tmp_path: Path) -> None:
    with process(keys, tmp_path) as (agent, _), member(keys) as client:
        keep(client, 1)
        keep(client, 2)
        _stop(agent)
        for step in range(3, 20):
            keep(client, step)
        agent.send_signal(signal.SIGCONT)
        assert steps(client.list_snapshots()) == [(19, 1), (18, 1)]


# ── memory limits ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_buffer_beyond_memory_share_is_refused_and_snapshots_stay(
    keys: RunKeys, one: SnapshotClient, here: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1, 2**20)
    keep(one, 2, 2**20)
    monkeypatch.setattr(here._buffers, "_free", lambda: 6 * 2**20)
    with member(keys, rank=1) as other, pytest.raises(SnapshotError, match="does not fit: snapshots may use 4 MB"):
        other.buffer(2**22, 1)
    with pytest.raises(SnapshotError, match="a buffer of 4 MB does not fit"):
        one.buffer(2**22, 3)
    assert steps(one.list_snapshots()) == [(2, 1), (1, 1)]
    keep(one, 3, 2**20)
    assert steps(one.list_snapshots()) == [(3, 1), (2, 1)]


def test_snapshot_larger_than_the_available_memory_is_refused(
    one: SnapshotClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrl.roles.snapshots.mapping.available_memory", lambda: 10**6)
    with pytest.raises(SnapshotError, match="a snapshot needs 41 MB more, but this node has only 1 MB left"):
        one.buffer(40 * 10**6, 1)


def test_file_size_limit_is_named_in_the_error(
    one: SnapshotClient, here: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(fd: int, size: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr("os.ftruncate", limited)
    with pytest.raises(SnapshotError, match=r"File too large \(ulimit -f\)"):
        one.buffer(1000, 1)


def test_two_hundred_steps_take_no_more_memory_and_descriptors_than_two(keys: RunKeys, tmp_path: Path) -> None:
    with (
        process(keys, tmp_path) as (agent, _),
        process(keys, tmp_path, FAR) as (buddy, address),
        member(keys) as client,
    ):
        size = 2**20
        for step in range(1, 201):
            keep(client, step, size)
            client.copy_to(address)
            if step == 20:
                before = [_footprint(pid) for pid in (os.getpid(), agent.pid, buddy.pid)]
        wait_until(lambda: all(_footprint(each.pid)[0] <= before[i + 1][0] for i, each in enumerate((agent, buddy))))
        after = [_footprint(pid) for pid in (os.getpid(), agent.pid, buddy.pid)]
        assert after[0][0] <= before[0][0]
        assert all(now - then < 3 * size for (_, now), (_, then) in zip(after, before, strict=True)), (before, after)


def _footprint(pid: int) -> tuple[int, int]:
    """Return (number of descriptors, bytes of memory) of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    rss = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    return len(os.listdir(f"/proc/{pid}/fd")), rss


# ── copies on other nodes ──────────────────────────────────────────────────────────────────────────────────────────
def test_a_copy_is_kept_by_another_nodes_agent_and_fetched_from_there(
    keys: RunKeys, one: SnapshotClient, far: SnapshotServer
) -> None:
    contents = {}
    for step in (1, 2, 3):
        contents[step] = keep(one, step, 9 * 2**20 + step)
        sent = one.copy_to(far.address)
        assert (sent.step, sent.own) == (step, False)
    with member(keys, 2, node=FAR) as successor:
        kept = successor.list_snapshots()
        assert kept == successor.list_snapshots(far.address)
        assert steps(kept) == [(3, 1), (2, 1)]
        for each in kept:
            for meta, data in (successor.read(each), successor.fetch(far.address, each)):
                assert (meta, bytes(data)) == (b"step %d" % each.step, contents[each.step])


def test_snapshot_that_exists_already_is_not_copied_again(
    one: SnapshotClient, far: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1)
    assert one.copy_to(far.address).step == 1
    monkeypatch.setattr("rrl.roles.snapshots.client.send_bulk", None)
    assert one.copy_to(far.address).step == 1


def test_copy_without_a_snapshot_or_without_a_target_is_an_error(one: SnapshotClient, far: SnapshotServer) -> None:
    with pytest.raises(SnapshotError, match="has not completed a snapshot yet"):
        one.copy_to(far.address)
    keep(one, 1)
    far.close()
    for address in (far.address, "tcp://127.0.0.1:1", "nowhere", ""):
        with pytest.raises(SnapshotError):
            one.copy_to(address)
    assert steps(one.list_snapshots()) == [(1, 1)]


def test_receiver_that_dies_during_a_copy_gives_an_error(
    keys: RunKeys, one: SnapshotClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1, BIG)
    with process(keys, tmp_path, FAR) as (agent, address):

        async def dies(line: Connection, data: memoryview) -> None:
            await send_bulk(line, data[: BIG // 2])
            if len(data) == BIG:
                agent.kill()
                agent.wait()
                await send_bulk(line, data[BIG // 2 :])

        monkeypatch.setattr("rrl.roles.snapshots.client.send_bulk", dies)
        with pytest.raises(SnapshotError):
            one.copy_to(address)
    assert steps(one.list_snapshots()) == [(1, 1)]
    keep(one, 2, BIG)


def test_sender_that_dies_during_a_copy_leaves_the_previous_copy(
    keys: RunKeys, one: SnapshotClient, far: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1, BIG)
    one.copy_to(far.address)
    keep(one, 2, BIG)

    async def dies(line: Connection, data: memoryview) -> None:
        await send_bulk(line, data[: BIG // 2])
        line.abort()

    with monkeypatch.context() as patched:
        patched.setattr("rrl.roles.snapshots.client.send_bulk", dies)
        with pytest.raises(SnapshotError):
            one.copy_to(far.address)
    assert steps(one.list_snapshots(far.address)) == [(1, 1)]
    one.copy_to(far.address)
    assert steps(one.list_snapshots(far.address)) == [(2, 1), (1, 1)]


def test_copy_that_was_damaged_on_the_way_is_rejected(
    one: SnapshotClient, far: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1)

    async def garbles(line: Connection, data: memoryview) -> None:
        await send_bulk(line, memoryview(bytes(len(data))))

    monkeypatch.setattr("rrl.roles.snapshots.client.send_bulk", garbles)
    with pytest.raises(SnapshotError, match="was received damaged"):
        one.copy_to(far.address)
    assert one.list_snapshots(far.address) == []


def test_copy_to_a_hung_receiver_is_given_up(
    keys: RunKeys, one: SnapshotClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1, BIG)
    monkeypatch.setattr(framing, "CHUNK_TIMEOUT_S", 0.2)
    with process(keys, tmp_path, FAR) as (agent, address):
        _stops_on_request(agent.pid, monkeypatch)
        with pytest.raises(SnapshotError, match=r"no reply within 0\.2 s"):
            one.copy_to(address)


def test_the_next_snapshot_does_not_wait_for_a_slow_copy_of_an_older_one(
    keys: RunKeys, one: SnapshotClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1, BIG)
    with process(keys, tmp_path, FAR) as (agent, address):
        stopped = _stops_on_request(agent.pid, monkeypatch)
        failed: list[str] = []

        def copy() -> None:
            try:
                one.copy_to(address)
            except SnapshotError as error:
                failed.append(str(error))

        copying = threading.Thread(target=copy)
        copying.start()
        assert stopped.wait(TIMEOUT_S)
        keep(one, 2, BIG)
        assert copying.is_alive(), "the copy was aborted, though it reads from the other buffer"
        keep(one, 3, BIG)
        copying.join(TIMEOUT_S)
        assert failed == ["the copy of the snapshot of step 1 was aborted, because the next snapshot needs its memory"]
    assert steps(one.list_snapshots()) == [(3, 1), (2, 1)]


def _stops_on_request(pid: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the copy stop its receiver once the receiver is ready, and return an event that is set after the stop."""
    stopped = threading.Event()

    async def stops(line: Connection, data: memoryview) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.set()
        await send_bulk(line, data)

    monkeypatch.setattr("rrl.roles.snapshots.client.send_bulk", stops)
    return stopped


# ── fenced incarnations ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.usefixtures("hasty")
def test_fenced_member_cannot_change_the_snapshots_of_its_successor(
    keys: RunKeys, one: SnapshotClient, far: SnapshotServer
) -> None:
    keep(one, 1)
    keep(one, 2)
    late = one.buffer(1000, 3)
    with member(keys, 2) as second:
        assert steps(second.list_snapshots()) == [(2, 1)]
        content = keep(second, 3)
        late[:] = b"late" * 250
        one.seal(3).result()  # the first member is alive, and still has its memory mapped
        assert second.read(second.list_snapshots()[0])[1] == content
        second.list_snapshots(far.address)
        for say in (one.list_snapshots, lambda: one.copy_to(far.address), lambda: one.list_snapshots(far.address)):
            with pytest.raises(Fenced, match="trainer/0#1 is fenced: its successor is #2"):
                say()
        keep(second, 4)
        # the snapshots of the first incarnation are gone
        wait_until(lambda: steps(second.list_snapshots()) == [(4, 2), (3, 2)])


@pytest.mark.usefixtures("hasty")
def test_copy_of_a_fenced_incarnation_is_refused(keys: RunKeys, one: SnapshotClient, far: SnapshotServer) -> None:
    keep(one, 1)
    far.fence(Incarnation(ReplicaId("trainer/0.3"), 1))
    with pytest.raises(Fenced):
        one.copy_to(far.address)
    with member(keys, 2, rank=1, gang=ReplicaId("trainer/1")) as other:
        keep(other, 1)
        assert other.copy_to(far.address).step == 1


def test_copy_whose_sender_is_fenced_during_the_transfer_is_rejected(
    one: SnapshotClient, far: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(one, 1)

    async def late(line: Connection, data: memoryview) -> None:
        far._buffers.fence(GANG, 2)
        await send_bulk(line, data)

    monkeypatch.setattr("rrl.roles.snapshots.client.send_bulk", late)
    with pytest.raises(Fenced):
        one.copy_to(far.address)
    assert far._buffers.snapshots(GANG) == []


@pytest.mark.usefixtures("hasty")
def test_incarnation_set_back_replaces_the_steps_it_repeats(
    keys: RunKeys, one: SnapshotClient, far: SnapshotServer
) -> None:
    for step in (1, 2):
        keep(one, step)
        one.copy_to(far.address)
    with member(keys, 2) as second:
        keep(second, 2)  # from step 1 again
        assert steps(second.list_snapshots()) == [(2, 2), (2, 1), (1, 1)]
        second.copy_to(far.address)
        assert steps(second.list_snapshots(far.address)) == [(2, 2), (1, 1)]
        keep(second, 3)
        second.copy_to(far.address)
        assert steps(second.list_snapshots(far.address)) == [(3, 2), (2, 2)]


@pytest.mark.parametrize("goes_on_from", [1, 2])
def test_restored_snapshot_is_not_overwritten_before_the_first_own_snapshot(
    keys: RunKeys, one: SnapshotClient, here: SnapshotServer, monkeypatch: pytest.MonkeyPatch, goes_on_from: int
) -> None:
    keep(one, 1)
    keep(one, 2)
    monkeypatch.setattr(server_module, "_has_ended", lambda pidfd: True)
    with member(keys, 2) as second:
        second.read(next(kept for kept in second.list_snapshots() if kept.step == goes_on_from))
        second.buffer(1000, 2)  # the successor trains the step again, or completes its commit
        assert steps(second.list_snapshots()) == [(goes_on_from, 1)]
        second.seal(2).result()
        keep(second, 3)
        assert steps(second.list_snapshots()) == [(3, 2), (2, 2)]


@pytest.mark.usefixtures("hasty")
def test_snapshots_on_the_previous_node_of_a_moved_rank_are_released(
    keys: RunKeys, one: SnapshotClient, here: SnapshotServer, far: SnapshotServer
) -> None:
    keep(one, 1)
    with member(keys, rank=1) as beside, member(keys, 2, node=FAR) as moved:
        keep(beside, 1)
        keep(moved, 2)
        moved.forget(here.address)
        assert {(each.rank, each.step) for each in moved.list_snapshots(here.address)} == {(1, 1)}


def test_snapshot_memory_is_named_after_the_run_and_leaves_no_file(one: SnapshotClient, here: SnapshotServer) -> None:
    shm = set(os.listdir("/dev/shm"))
    keep(one, 1)
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert any(name.startswith("/memfd:rrl/run-1/snapshot") for name in names)
    assert set(os.listdir("/dev/shm")) == shm
    assert f"@rrl/run-1/{here._name[-16:]}" in Path("/proc/net/unix").read_text()
    assert NODE not in here._name


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")
