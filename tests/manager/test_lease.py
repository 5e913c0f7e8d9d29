"""One manager at a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path

import pytest

from rrl.manager import lease as lease_module
from rrl.manager.lease import Lease, LeaseHeld, LeaseLost, holder
from rrl.spec.rundir import RunDir
from rrl.tests.manager import virtual

PATIENCE = 10.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(lease_module, "time", virtual.Clock)
    run = RunDir(tmp_path / "small-1")
    run.create()
    return run


def acquire(run: RunDir) -> Lease:
    return virtual.run(Lease.acquire(run, PATIENCE))


async def live(lease: Lease) -> None:
    while True:
        await asyncio.sleep(PATIENCE / 5)
        lease.renew()


async def seconds(coroutine: Coroutine[None, None, Lease]) -> tuple[Lease, float]:
    began = asyncio.get_running_loop().time()
    return await coroutine, asyncio.get_running_loop().time() - began


def test_the_first_manager_need_not_wait(run: RunDir) -> None:
    lease, waited = virtual.run(seconds(Lease.acquire(run, PATIENCE)))
    assert (lease.epoch, waited) == (1, 0.0)
    held = holder(run)
    assert held is not None
    assert held.counter == 0


@pytest.mark.parametrize("held_before", [False, True], ids=["new run", "silent holder"])
def test_of_many_tasks_that_start_at_once_one_wins(run: RunDir, held_before: bool) -> None:
    if held_before:
        acquire(run)

    async def contend(living: list[asyncio.Task[None]]) -> Lease:
        lease = await Lease.acquire(run, PATIENCE)
        living.append(asyncio.create_task(live(lease)))
        return lease

    async def race() -> list[Lease | BaseException]:
        living: list[asyncio.Task[None]] = []
        results = await asyncio.gather(*(contend(living) for _ in range(5)), return_exceptions=True)
        for task in living:
            task.cancel()
        return results

    results = virtual.run(race())
    assert [result.epoch for result in results if isinstance(result, Lease)] == [1 + held_before]
    losers = [result for result in results if not isinstance(result, Lease)]
    assert len(losers) == 4
    assert all(isinstance(loser, LeaseHeld) for loser in losers), losers


def test_of_two_that_saw_the_same_newest_epoch_one_wins(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_newest", lambda run: 0)
    acquire(run)
    with pytest.raises(LeaseHeld, match="another manager of small-1 has just started"):
        acquire(run)


_CLAIM = """
import asyncio, sys
from pathlib import Path
from rrl.manager.lease import Lease, LeaseHeld
from rrl.spec.rundir import RunDir
sys.stdin.readline()
try:
    print(asyncio.run(Lease.acquire(RunDir(Path(sys.argv[1])), 0.2)).epoch)
except LeaseHeld:
    print("held")
"""


def test_of_many_processes_that_start_at_once_one_wins(run: RunDir) -> None:
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


def test_a_living_holder_is_respected_and_named(run: RunDir) -> None:
    async def challenge() -> None:
        lease = await Lease.acquire(run, PATIENCE)

        living = asyncio.create_task(live(lease))
        for _ in range(3):
            with pytest.raises(LeaseHeld, match=r"a manager of small-1 lives on .* \(pid \d+\)"):
                await Lease.acquire(run, PATIENCE)
        living.cancel()

    virtual.run(challenge())


def test_a_silent_holder_is_succeeded_after_the_patience_and_not_before(run: RunDir) -> None:
    acquire(run)
    lease, waited = virtual.run(seconds(Lease.acquire(run, PATIENCE)))
    assert lease.epoch == 2
    assert waited >= PATIENCE


def test_a_holder_that_died_before_its_first_word_is_succeeded(run: RunDir) -> None:
    (run.epochs / "000001").touch()
    lease, waited = virtual.run(seconds(Lease.acquire(run, PATIENCE)))
    assert lease.epoch == 2
    assert waited >= PATIENCE


def test_a_holder_that_begins_to_speak_while_it_is_watched_is_respected(run: RunDir) -> None:
    async def challenge() -> None:
        first = await Lease.acquire(run, PATIENCE)
        text = (run.epochs / "000001").read_bytes()
        (run.epochs / "000001").write_bytes(b"")
        rival = asyncio.create_task(Lease.acquire(run, PATIENCE))
        await asyncio.sleep(PATIENCE / 4)
        (run.epochs / "000001").write_bytes(text)
        await asyncio.sleep(PATIENCE / 4)
        first.renew()
        with pytest.raises(LeaseHeld, match="lives on"):
            await rival

    virtual.run(challenge())


def test_a_released_lease_needs_no_wait_and_has_no_holder(run: RunDir) -> None:
    acquire(run).release()
    assert holder(run) is None
    lease, waited = virtual.run(seconds(Lease.acquire(run, PATIENCE)))
    assert (lease.epoch, waited) == (2, 0.0)


def test_a_lease_that_is_released_while_it_is_watched_is_taken_soon(run: RunDir) -> None:
    async def hand_over() -> float:
        first = await Lease.acquire(run, PATIENCE)
        asyncio.get_running_loop().call_later(PATIENCE / 4, first.release)
        return (await seconds(Lease.acquire(run, PATIENCE)))[1]

    assert virtual.run(hand_over()) < PATIENCE / 2


def test_who_was_succeeded_may_neither_act_nor_renew(run: RunDir) -> None:
    first = acquire(run)
    first.check()
    first.renew()
    second = acquire(run)
    for forbidden in (first.check, first.renew):
        with pytest.raises(LeaseLost, match="epoch 2 has begun: another manager of small-1 took over"):
            forbidden()
    second.check()
    held = holder(run)
    assert held is not None
    assert held.counter == 0


def test_before_the_first_manager_nobody_holds(run: RunDir) -> None:
    assert holder(run) is None
