"""The epoch lease permits one manager at a time, even while storage or processes are frozen."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from rrl.core.run_dir import RunDir
from rrl.manager.storage import lease as lease_module
from rrl.manager.storage.lease import Lease, LeaseHeld, LeaseHolder, LeaseLost, holder
from rrl.tests.support.manager import virtual

TIMEOUT_S = 10.0
pytestmark = pytest.mark.usefixtures("runner")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(lease_module, "time", virtual.Clock)
    run = RunDir(tmp_path / "small-1")
    run.create()
    return run


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=virtual.VirtualLoop) as runner:
        yield runner


def acquire(run: RunDir) -> Lease:
    return virtual.run(Lease.acquire(run, TIMEOUT_S))


async def keep_renewing(lease: Lease) -> None:
    while True:
        await asyncio.sleep(TIMEOUT_S / 5)
        lease.renew()


async def seconds(coroutine: Coroutine[None, None, Lease]) -> tuple[Lease, float]:
    began = asyncio.get_running_loop().time()
    return await coroutine, asyncio.get_running_loop().time() - began


def test_first_manager_acquires_the_lease_without_waiting(run: RunDir) -> None:
    lease, waited = virtual.run(seconds(Lease.acquire(run, TIMEOUT_S)))
    assert (lease.epoch, waited) == (1, 0.0)
    current = holder(run)
    assert current is not None
    assert current.counter == 0


@pytest.mark.parametrize("held_before", [False, True], ids=["new run", "silent holder"])
def test_concurrent_tasks_have_one_winner(run: RunDir, held_before: bool) -> None:
    if held_before:
        acquire(run)

    async def contend(renewing: list[asyncio.Task[None]]) -> Lease:
        lease = await Lease.acquire(run, TIMEOUT_S)
        renewing.append(asyncio.create_task(keep_renewing(lease)))
        return lease

    async def race() -> list[Lease | BaseException]:
        renewing: list[asyncio.Task[None]] = []
        results = await asyncio.gather(*(contend(renewing) for _ in range(5)), return_exceptions=True)
        for task in renewing:
            task.cancel()
        return results

    results = virtual.run(race())
    assert [result.epoch for result in results if isinstance(result, Lease)] == [1 + held_before]
    losers = [result for result in results if not isinstance(result, Lease)]
    assert len(losers) == 4
    assert all(isinstance(loser, LeaseHeld) for loser in losers), losers


def test_claims_of_the_same_epoch_have_one_winner(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_newest", lambda run: 0)
    acquire(run)
    with pytest.raises(LeaseHeld, match="another manager of small-1 has just started"):
        acquire(run)


_CLAIM = """
import asyncio, sys
from pathlib import Path
from rrl.manager.storage.lease import Lease, LeaseHeld
from rrl.core.run_dir import RunDir, write_atomically
sys.stdin.readline()
try:
    print(asyncio.run(Lease.acquire(RunDir(Path(sys.argv[1])), 0.2)).epoch)
except LeaseHeld:
    print("held")
"""


def test_concurrent_processes_have_one_winner(run: RunDir) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _CLAIM, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    claimed = sorted(racer.communicate(timeout=60)[0].strip() for racer in racers)
    epochs = [int(word) for word in claimed if word != "held"]
    assert epochs == list(range(1, len(epochs) + 1)), claimed  # never two of one epoch
    assert sorted(path.name for path in run.epochs.iterdir()) == [f"{epoch:06}" for epoch in epochs]


async def test_running_holder_is_respected_and_named(run: RunDir) -> None:
    lease = await Lease.acquire(run, TIMEOUT_S)

    renewing = asyncio.create_task(keep_renewing(lease))
    for _ in range(3):
        with pytest.raises(LeaseHeld, match=r"a manager of small-1 is running on .* \(pid \d+\)"):
            await Lease.acquire(run, TIMEOUT_S)
    renewing.cancel()


@pytest.mark.parametrize("wrote", [True, False], ids=["silent", "died before it wrote its file"])
def test_silent_holder_is_succeeded_after_the_timeout_and_not_before(run: RunDir, wrote: bool) -> None:
    if wrote:
        acquire(run)
    else:
        (run.epochs / "000001").touch()
    lease, waited = virtual.run(seconds(Lease.acquire(run, TIMEOUT_S)))
    assert lease.epoch == 2
    assert waited >= TIMEOUT_S


@pytest.mark.parametrize("share", [0.25, 0.9])
async def test_holder_that_renews_while_it_is_watched_is_respected(run: RunDir, share: float) -> None:
    first = await Lease.acquire(run, TIMEOUT_S)
    text = (run.epochs / "000001").read_bytes()
    (run.epochs / "000001").write_bytes(b"")
    rival = asyncio.create_task(Lease.acquire(run, TIMEOUT_S))
    await asyncio.sleep(share * TIMEOUT_S)
    (run.epochs / "000001").write_bytes(text)
    await asyncio.sleep(TIMEOUT_S / 4)
    first.renew()
    with pytest.raises(LeaseHeld, match="is running on"):
        await rival


def test_released_lease_needs_no_wait_and_has_no_holder(run: RunDir) -> None:
    acquire(run).release()
    assert holder(run) is None
    lease, waited = virtual.run(seconds(Lease.acquire(run, TIMEOUT_S)))
    assert (lease.epoch, waited) == (2, 0.0)


def test_lease_released_while_it_is_watched_is_acquired_soon(run: RunDir) -> None:
    async def hand_over() -> float:
        first = await Lease.acquire(run, TIMEOUT_S)
        asyncio.get_running_loop().call_later(TIMEOUT_S / 4, first.release)
        return (await seconds(Lease.acquire(run, TIMEOUT_S)))[1]

    assert virtual.run(hand_over()) < TIMEOUT_S / 2


async def test_succeeded_manager_may_neither_act_nor_renew(run: RunDir) -> None:
    first = await Lease.acquire(run, TIMEOUT_S)
    first.check()
    first.renew()
    second = await Lease.acquire(run, TIMEOUT_S)
    text = "epoch 2 has begun: another manager of small-1 took over"
    for forbidden in (first.check, first.renew):
        with pytest.raises(LeaseLost, match=text):
            forbidden()
    for waited_for in (first.check_in_thread, first.ensure_current):
        with pytest.raises(LeaseLost, match=text):
            await waited_for()
    await second.check_in_thread()
    await second.ensure_current()

    current = holder(run)
    assert current is not None
    assert current.counter == 0


def test_lease_is_checked_at_renewals_and_at_once_after_a_freeze(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async def freeze() -> list[int]:
        first, reads = await Lease.acquire(run, TIMEOUT_S), []
        monkeypatch.setattr(Lease, "check", lambda lease: reads.append(1))
        for pause in (0.0, 0.4, 0.2):
            await asyncio.sleep(pause * TIMEOUT_S)
            await first.ensure_current()
            reads.append(0)
        return reads

    assert virtual.run(freeze()) == [0, 0, 1, 0]


async def test_successor_that_appears_during_a_renewal_is_noticed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await Lease.acquire(run, TIMEOUT_S)

    write = lease_module._write

    def slow(path: Path, holder: LeaseHolder) -> None:
        (run.epochs / "000002").touch()
        write(path, holder)

    monkeypatch.setattr(lease_module, "_write", slow)
    with pytest.raises(LeaseLost):
        first.renew()


async def test_renewal_needs_no_space_and_says_that_the_journal_cannot_be_written(run: RunDir) -> None:
    lease, file = await Lease.acquire(run, TIMEOUT_S), run.epochs / "000001"
    before = file.stat()
    for number in (errno.EDQUOT, 0):
        lease.write_errno = number
        lease.renew()
        assert (holder(run) or LeaseHolder("", 0, 0)).write_errno == number
    lease.release()
    assert ((after := file.stat()).st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert holder(run) is None


def test_claim_that_cannot_be_written_leaves_no_epoch(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            acquire(run)
    assert acquire(run).epoch == 1


def test_read_that_meets_a_renewal_still_finds_the_holder(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire(run)
    whole = (run.epochs / "000001").read_bytes()
    reads = iter((whole[:20], whole))
    monkeypatch.setattr(Path, "read_bytes", lambda path: next(reads))
    assert holder(run) is not None


class Storage:
    """Makes ``os.listdir`` of the epochs, or each read of an epoch's file, fail while ``away`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing_call: str, number: int) -> None:
        self.away = False
        self.failed = 0
        listdir, read = os.listdir, Path.read_bytes

        def fail(folder: str) -> None:
            if self.away and "/epochs" in folder:
                self.failed += 1
                raise OSError(number, os.strerror(number), folder)

        def listing(path: Path) -> list[str]:
            fail(str(path))
            return listdir(path)

        def reading(path: Path) -> bytes:
            fail(str(path))
            return read(path)

        if failing_call == "list":
            monkeypatch.setattr(os, "listdir", listing)
        else:
            monkeypatch.setattr(Path, "read_bytes", reading)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("failing_call", ["list", "read"])
async def test_time_without_a_readable_lease_does_not_count_as_silence(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, failing_call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = await Lease.acquire(run, TIMEOUT_S)
    renewing = asyncio.create_task(keep_renewing(first))
    rival = asyncio.create_task(Lease.acquire(run, TIMEOUT_S))
    await asyncio.sleep(TIMEOUT_S / 20)
    storage = Storage(monkeypatch, failing_call, number)
    storage.away = True
    await asyncio.sleep(3 * TIMEOUT_S)
    assert storage.failed > 3
    assert not rival.done()
    storage.away = False
    with pytest.raises(LeaseHeld, match="is running on"):
        await rival
    renewing.cancel()

    assert len(caplog.records) == 1, "the unreadable lease was not logged exactly once"
    assert "cannot read the lease of small-1, so another manager may be running" in caplog.text


def test_silent_holder_is_succeeded_after_storage_is_back_for_the_timeout(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(run)

    async def outage() -> float:
        storage = Storage(monkeypatch, "read", errno.EIO)
        for moment, away in ((TIMEOUT_S / 3, True), (2 * TIMEOUT_S, False)):
            asyncio.get_running_loop().call_later(moment, setattr, storage, "away", away)
        return (await seconds(Lease.acquire(run, TIMEOUT_S)))[1]

    assert 3 * TIMEOUT_S <= virtual.run(outage()) < 3.5 * TIMEOUT_S


@pytest.mark.parametrize("flickers", [lambda read: read % 2 == 0, lambda read: read % 7 != 0], ids=["half", "mostly"])
async def test_lease_that_is_readable_only_at_times_is_respected(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, flickers: Callable[[int], bool]
) -> None:
    renewing = asyncio.create_task(keep_renewing(await Lease.acquire(run, TIMEOUT_S)))
    reads, read = 0, lease_module._read

    def torn(run: RunDir, epoch: int) -> lease_module.LeaseHolder | None:
        nonlocal reads
        reads += 1
        return None if flickers(reads) else read(run, epoch)

    monkeypatch.setattr(lease_module, "_read", torn)
    with pytest.raises(LeaseHeld, match="is running on"):
        await Lease.acquire(run, TIMEOUT_S)
    renewing.cancel()


async def test_challenger_that_was_frozen_restarts_its_watch(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder may have been frozen at the same time and for the same reason."""

    first = await Lease.acquire(run, TIMEOUT_S)
    rival = asyncio.create_task(Lease.acquire(run, TIMEOUT_S))
    await asyncio.sleep(TIMEOUT_S / 10)
    passed = virtual.Clock.monotonic
    monkeypatch.setattr(virtual.Clock, "monotonic", staticmethod(lambda: passed() + 100 * TIMEOUT_S))
    await asyncio.sleep(TIMEOUT_S / 4)
    first.renew()
    with pytest.raises(LeaseHeld, match="is running on"):
        await rival


@pytest.mark.parametrize("hours", [-1, 1])
async def test_jump_of_the_wall_clock_loses_no_lease(run: RunDir, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    first = await Lease.acquire(run, TIMEOUT_S)
    renewing = asyncio.create_task(keep_renewing(first))
    rival = asyncio.create_task(Lease.acquire(run, TIMEOUT_S))
    await asyncio.sleep(TIMEOUT_S / 10)
    wall = virtual.Clock.time
    monkeypatch.setattr(virtual.Clock, "time", staticmethod(lambda: wall() + 3600 * hours))
    with pytest.raises(LeaseHeld, match="is running on"):
        await rival
    await first.ensure_current()
    renewing.cancel()


def test_run_without_a_manager_has_no_holder(run: RunDir) -> None:
    assert holder(run) is None
