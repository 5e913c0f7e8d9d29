"""The isolation of readers: a failing reader affects no other, and no process is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from rrl.core.launch import LAUNCH_ENV
from rrl.core.processes import descendants, read_process, with_marks
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.isolation import client as reader_client
from rrl.health.readers.isolation.client import ReaderClient, read_all
from rrl.health.readers.samples import HostData, Reading
from rrl.tests.support.health import readers
from rrl.tests.support.health.readers import place

P = ParamSpec("P")
TIMEOUT_S = 60.0
"""Time limit in seconds, which no test reaches, not even on a busy machine."""
_POLL_INTERVAL_S = 0.02


def story(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @functools.wraps(test)
    def run(*args: P.args, **names: P.kwargs) -> None:
        asyncio.run(test(*args, **names))

    return run


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    before = {process.pid for process in descendants(os.getpid())}
    yield
    until(lambda: not [one for one in descendants(os.getpid()) if one.pid not in before])


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline, f"the condition does not hold after {TIMEOUT_S:.0f} s"
        time.sleep(_POLL_INTERVAL_S)


@contextlib.asynccontextmanager
async def isolated_reader(notes: Path, *kinds: type[readers.Good], **more: Any) -> AsyncIterator[ReaderClient]:
    client = ReaderClient([place(kind) for kind in kinds], ReaderOptions(proc=str(notes)), **more)
    client.start()
    try:
        yield client
    finally:
        await client.close()


async def first(client: ReaderClient, *, reader: str, state: str = "read") -> Reading:
    async def wait() -> Reading:
        while (reading := await client.next_reading()).reader != reader or reading.state != state:
            pass
        return reading

    return await asyncio.wait_for(wait(), TIMEOUT_S)


def count(reading: Reading) -> int:
    assert isinstance(reading.data, HostData)
    return reading.data.zombies


def noted(notes: Path, what: str) -> list[int]:
    """Return the pids of the processes that wrote the note ``what``."""
    return [int(note.suffix[1:]) for note in notes.glob(f"{what}.*")]


@story
async def test_readings_repeat_at_the_interval_of_the_reader(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Good) as client:
        readings = [await first(client, reader="good") for _ in range(5)]
    assert [count(reading) for reading in readings] == [1, 2, 3, 4, 5]
    times = [reading.at for reading in readings]
    assert times == sorted(times)
    assert times[-1] - times[0] >= 4 * readers.Good.interval_s - 0.01


@story
async def test_absent_denied_or_broken_source_is_reported_with_its_reason(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.IsAbsent, readers.IsDenied, readers.Raises) as client:
        found = [await asyncio.wait_for(client.next_reading(), TIMEOUT_S) for _ in range(3)]
    states = {(reading.reader, reading.state, reading.why) for reading in found}
    assert states == {
        ("absent", "absent", "no such device here"),
        ("denied", "denied", "not for you"),
        ("raises", "broken", "ValueError: no sense in this"),
    }
    assert all(reading.data is None for reading in found)


@story
async def test_reader_whose_module_is_missing_is_broken_and_other_readers_continue(tmp_path: Path) -> None:
    client = ReaderClient(["nowhere=rrl.nowhere:Nobody", place(readers.Good)], ReaderOptions(proc=str(tmp_path)))
    client.start()
    try:
        assert "No module named 'rrl.nowhere'" in (await first(client, reader="nowhere", state="broken")).why
        await first(client, reader="good")
    finally:
        await client.close()


@story
async def test_hung_reader_is_reported_once_and_again_when_it_returns(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    async with isolated_reader(tmp_path, readers.Hangs, readers.Good) as client:
        hung = await first(client, reader="hangs", state="hung")
        assert hung.why == "did not answer within 0.3 s"
        others = [
            await asyncio.wait_for(client.next_reading(), TIMEOUT_S) for _ in range(50)
        ]  # more than two deadlines long
        assert {reading.reader for reading in others} == {"good"}
        (tmp_path / "hang").unlink()
        assert count(await first(client, reader="hangs")) == 1
        assert len(noted(tmp_path, "hangs-made")) == 1  # the same process continues


@story
async def test_reader_that_hangs_for_long_gets_a_new_process(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.HangsInC, hung_timeout_s=0.5) as client:
        readings = [await asyncio.wait_for(client.next_reading(), TIMEOUT_S) for _ in range(2)]
    assert [reading.state for reading in readings] == ["hung", "hung"]
    assert len(noted(tmp_path, "stuck-made")) == 2


@story
async def test_new_process_reads_again_while_the_hung_one_still_waits(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    async with isolated_reader(tmp_path, readers.Hangs, hung_timeout_s=0.5) as client:
        await first(client, reader="hangs", state="hung")
        await asyncio.to_thread(until, lambda: len(noted(tmp_path, "hangs-made")) == 2)
        (tmp_path / "hang").unlink()
        assert count(await first(client, reader="hangs")) == 1


@story
async def test_reader_that_hangs_at_its_start_does_not_block_other_readers(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.HangsAtStart, readers.Good) as client:
        for _ in range(5):
            await first(client, reader="good")


@story
async def test_reader_that_dies_is_reported_and_restarted_with_backoff(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Dies, readers.Good) as client:
        deaths = [await first(client, reader="dies", state="broken") for _ in range(3)]
        await first(client, reader="good")
    assert {reading.why for reading in deaths} == {"its process ended by SIGKILL"}
    first_pause, second_pause = (later.at - earlier.at for earlier, later in itertools.pairwise(deaths))
    assert first_pause >= 1.0
    assert second_pause >= 2.0
    assert len(noted(tmp_path, "dies-made")) == 3


@story
async def test_reader_that_sends_garbage_does_not_affect_others(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Garbles, readers.Good) as client:
        reading = await first(client, reader="garbles", state="broken")
        assert reading.why == "its process sent an invalid frame"
        await first(client, reader="garbles", state="broken")  # of a new process
        await first(client, reader="good")
    assert len(noted(tmp_path, "good-made")) == 1


@story
async def test_other_readers_continue_if_one_process_cannot_be_started(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Good, readers.Dies) as client:
        await first(client, reader="dies", state="broken")
        await first(client, reader="good")
        most = resource.prlimit(0, resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        resource.prlimit(0, resource.RLIMIT_NOFILE, (used - 1, most[1]))
        try:
            reading = await first(client, reader="dies", state="broken")
            assert reading.why == "its process cannot be started: Too many open files"
            await first(client, reader="good")
        finally:
            resource.prlimit(0, resource.RLIMIT_NOFILE, most)
    assert len(noted(tmp_path, "good-made")) == 1


@story
async def test_closed_readers_release_their_resources(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Good) as client:
        await first(client, reader="good")
    assert noted(tmp_path, "good-closed") == noted(tmp_path, "good-made")


@story
async def test_closing_ends_a_reader_that_no_signal_handler_reaches(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.HangsInC, readers.Good) as client:
        await first(client, reader="stuck", state="hung")
    (stuck,) = noted(tmp_path, "stuck-stuck")
    assert read_process(stuck) is None
    assert noted(tmp_path, "stuck-closed") == []
    assert noted(tmp_path, "good-closed") != []  # the other readers had time to close


@story
async def test_cancelled_wait_for_the_next_reading_loses_no_reading(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Good) as client:
        counts: list[int] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(counts) < 20 and time.monotonic() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):
                counts.append(count(await asyncio.wait_for(client.next_reading(), 0.005)))
    assert counts == list(range(1, 21))


@story
async def test_reader_whose_readings_are_not_taken_is_not_read(tmp_path: Path) -> None:
    async with isolated_reader(tmp_path, readers.Floods) as client:
        await first(client, reader="floods")
        await asyncio.sleep(0.5)  # the reader reads without a pause, so that hundreds of readings pass in this time
        taken_at = time.monotonic()
        later = [await first(client, reader="floods") for _ in range(3)]
        assert [count(reading) for reading in later] == [2, 3, 4]  # none is missing
        assert later[-1].at > taken_at


@story
async def test_reader_processes_carry_the_launch_mark_and_no_step_mark(tmp_path: Path) -> None:
    launch = str(tmp_path / "steps" / "agent.launch")
    async with isolated_reader(tmp_path, readers.Good, env={LAUNCH_ENV: launch}) as client:
        await first(client, reader="good")
        (pid,) = noted(tmp_path, "good-made")
        process = read_process(pid)
        assert process is not None
        marks = with_marks(process)
        assert (marks.launch, marks.step, marks.module) == (launch, "", "")


_AGENT = """
import asyncio, sys
from rrl.health.readers.base import ReaderOptions
from rrl.health.readers.isolation.client import ReaderClient
async def main():
    client = ReaderClient(sys.argv[2:], ReaderOptions(proc=sys.argv[1]))
    client.start()
    seen = set()
    while True:
        reading = await client.next_reading()
        if reading.reader not in seen:
            seen.add(reading.reader)
            print(reading.reader, reading.state, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_readers_end_when_the_agent_is_killed_even_hung_ones(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", _AGENT, str(tmp_path), place(readers.Good), place(readers.HangsInC)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        lines = [agent.stdout.readline().split() for _ in range(2)]
        assert sorted(lines) == [["good", "read"], ["stuck", "hung"]]
        family = [process.pid for process in descendants(agent.pid)]
        assert len(family) == 2
        agent.send_signal(number)
    until(lambda: not [pid for pid in family if read_process(pid) is not None])
    assert noted(tmp_path, "good-closed") == noted(tmp_path, "good-made")  # closed before its end


def test_read_all_returns_one_reading_of_each_reader_without_an_event_loop(tmp_path: Path) -> None:
    kinds = (readers.Good, readers.HangsInC, readers.Dies, readers.IsAbsent)
    found = read_all([place(kind) for kind in kinds], 1.0, ReaderOptions(proc=str(tmp_path)))
    assert [(reading.reader, reading.state) for reading in found] == [
        ("good", "read"),
        ("stuck", "hung"),
        ("dies", "broken"),
        ("absent", "absent"),
    ]
    assert count(found[0]) == 1
    assert noted(tmp_path, "good-closed") == noted(tmp_path, "good-made")


def test_read_all_takes_as_long_as_the_caller_permits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_client, "PYTHON_START_S", 0.0)
    (reading,) = read_all([place(readers.HangsAtStart)], 0.5, ReaderOptions(proc=str(tmp_path)))
    assert (reading.state, reading.why) == ("hung", "did not start within 0.5 s")
