"""The format of snapshots, without an agent: heads, digests, choice of the next slot, and available memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.types import ReplicaId
from rrl.roles.snapshots.buffers import SnapshotBuffers, available_memory
from rrl.roles.snapshots.format import EMPTY_HEAD, Digest, Head, SnapshotError, SnapshotInfo, digest_of, next_slot
from rrl.roles.snapshots.messages import Member
from rrl.transport.streams.framing import CHUNK_BYTES

_number = st.integers(0, 2**64 - 1)
_heads = st.builds(Head, _number, _number, _number, _number, _number, st.binary(min_size=16, max_size=16))
GANG = ReplicaId("trainer/0")


@given(_heads, _heads, st.data())
def test_torn_head_is_rejected_unless_it_equals_the_old_or_the_new_one(
    old: Head, new: Head, data: st.DataObject
) -> None:
    written, below = new.encode(), data.draw(st.sampled_from([EMPTY_HEAD, old.encode()]))
    assert Head.decode(written) == new
    torn = written[: (cut := data.draw(st.integers(0, len(written))))] + below[cut:]
    assert Head.decode(torn) in ((new,) if torn == written else (old,) if torn == old.encode() else (None,))


@pytest.mark.parametrize("junk", [b"", b"rrlsnap1", EMPTY_HEAD, b"\xff" * 100])
def test_invalid_head_is_rejected(junk: bytes) -> None:
    assert Head.decode(junk) is None


def test_digest_depends_on_each_byte_the_order_of_chunks_and_the_end_of_the_meta() -> None:
    payload = bytearray(2 * CHUNK_BYTES + 5)
    payload[7] = 1
    observed = {digest_of(b"", memoryview(payload))}
    for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 4):
        payload[at] ^= 1
        observed.add(digest_of(b"", memoryview(payload)))
        payload[at] ^= 1
    swapped = payload[CHUNK_BYTES : 2 * CHUNK_BYTES] + payload[:CHUNK_BYTES] + payload[2 * CHUNK_BYTES :]
    observed |= {digest_of(b"", memoryview(swapped)), digest_of(b"\0", memoryview(payload)[1:])}
    assert len(observed) == 7
    piecewise = Digest(b"m")
    for start in range(0, len(payload), CHUNK_BYTES):
        piecewise.add(memoryview(payload)[start : start + CHUNK_BYTES])
    assert piecewise.value() == digest_of(b"m", memoryview(payload))


def _head(sequence: int, step: int) -> Head:
    return Head(sequence, step, 1, 1, 0, bytes(16))


@pytest.mark.parametrize(
    ("heads", "step", "selector"),
    [
        ((None, None), 1, 0),
        ((_head(1, 1), None), 2, 1),
        ((None, _head(1, 1)), 2, 0),
        ((_head(3, 3), _head(2, 2)), 4, 1),
        ((_head(1, 1), _head(2, 2)), 3, 0),
        ((_head(1, 1), _head(2, 2)), 2, 1),  # an incarnation that went back to step 1
        ((_head(1, 7), _head(2, 8)), 1, 1),  # and one that began anew
    ],
)
def test_next_slot_is_the_older_snapshot_or_one_of_a_later_step(
    heads: tuple[Head | None, Head | None], step: int, selector: int
) -> None:
    assert next_slot(heads, step) == selector


# ── available memory ───────────────────────────────────────────────────────────────────────────────────────────────
def _machine(folder: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    return proc, cgroups


def _limit(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_available_memory_is_the_least_of_the_machine_and_of_all_parent_cgroups(tmp_path: Path) -> None:
    proc, cgroups = _machine(tmp_path, "0::/slurm/job_1/step_0\n")
    assert available_memory(proc, cgroups) == 5000 * 1024
    _limit(cgroups / "slurm/job_1/step_0", memory__max="max", memory__current="7")
    assert available_memory(proc, cgroups) == 5000 * 1024
    stat = "file 9\ninactive_file 100"
    _limit(cgroups / "slurm/job_1", memory__max="4000", memory__current="3500", memory__stat=stat)
    assert available_memory(proc, cgroups) == 600
    _limit(cgroups / "slurm", memory__max="1000", memory__current="2000", memory__stat="inactive_file 0")
    assert available_memory(proc, cgroups) == 0


def test_available_memory_respects_cgroups_of_version_1(tmp_path: Path) -> None:
    proc, cgroups = _machine(tmp_path, "4:cpu,memory:/slurm/job_1\n1:name=systemd:/\n0::/\n")
    job = cgroups / "memory/slurm/job_1"
    _limit(job, memory__stat="total_inactive_file 1")
    (job / "memory.limit_in_bytes").write_text("4096\n")
    (job / "memory.usage_in_bytes").write_text("1000\n")
    assert available_memory(proc, cgroups) == 3097


def test_available_memory_of_the_real_machine_is_positive() -> None:
    assert available_memory() > 2**20


# ── snapshots that the agent keeps ─────────────────────────────────────────────────────────────────────────────────
def test_snapshots_of_a_node_share_its_memory_and_closed_ones_free_it() -> None:
    snapshot_buffers = SnapshotBuffers("rrl/test", lambda: 10_000_000)
    try:
        for rank, size in ((0, 2_000_000), (1, 2_000_000)):
            who = Member(GANG, rank, 1)
            snapshot_buffers.attach(who, None, ended=True)
            snapshot_buffers.resize(who, 0, size)
        with pytest.raises(SnapshotError, match=r"does not fit: snapshots may use 5 MB .* 4 MB of which are in use"):
            snapshot_buffers.resize(Member(GANG, 1, 1), 1, 2_000_000)
        snapshot_buffers.forget(Member(GANG, 0, 2))
        snapshot_buffers.resize(Member(GANG, 1, 1), 1, 2_000_000)
    finally:
        snapshot_buffers.close()


def test_one_copy_of_a_rank_is_in_transfer_at_a_time() -> None:
    snapshot_buffers, who = SnapshotBuffers("rrl/test"), Member(GANG, 0, 1)
    kept = SnapshotInfo(GANG, 0, 1, 1, 10, bytes(16), False)
    try:
        buffer, sequence = snapshot_buffers.allocate_copy(who, kept)
        assert sequence == 1
        with buffer.in_use(writing=True):
            with pytest.raises(SnapshotError, match="another snapshot of rank 0 is being received"):
                snapshot_buffers.allocate_copy(who, kept)
            snapshot_buffers.forget(Member(GANG, 0, 2))  # a process that still writes to the copy keeps its descriptor
            assert buffer.head is None
        with pytest.raises(OSError, match="Bad file"):
            buffer.clear()
    finally:
        snapshot_buffers.close()


def test_two_abandoned_incarnations_keep_the_newer_snapshot() -> None:
    snapshot_buffers = SnapshotBuffers("rrl/test")
    try:
        for incarnation in (1, 2, 3):
            who = Member(GANG, 0, incarnation)
            snapshot_buffers.admit(who)
            snapshot_buffers.attach(who, None, ended=False)
            if incarnation < 3:
                buffer = snapshot_buffers.resize(who, 0, 10)
                os.pwrite(buffer.fd, Head(1, 9 - incarnation, incarnation, 10, 0, bytes(16)).encode(), 0)
        assert [(each.step, each.incarnation) for each in snapshot_buffers.snapshots(GANG)] == [(8, 1)]
    finally:
        snapshot_buffers.close()
