"""Commands end with their children at the deadline, and both variants of the runner return the same result."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rrl.core.command_runner import CommandResult, run, run_async, run_coroutine
from rrl.core.processes import read_process
from rrl.tests.support.listening_manager import wait_until

TIMEOUT_S = 60.0


def _run_async(*args: Any, **options: Any) -> CommandResult:
    return asyncio.run(run_async(*args, **options))


@pytest.fixture(params=[run, _run_async], ids=["run", "run_async"])
def execute(request: pytest.FixtureRequest) -> Callable[..., CommandResult]:
    execute: Callable[..., CommandResult] = request.param
    return execute


def test_command_gets_its_input_and_returns_its_output(execute: Callable[..., CommandResult]) -> None:
    assert execute(["cat"], TIMEOUT_S, stdin_text="hello\n") == CommandResult(0, "hello\n", "")
    assert execute(["cat"], TIMEOUT_S) == CommandResult(0, "", "")
    ended = execute(["sh", "-c", "echo out; echo no >&2; echo $WAY >&2; exit 3"], TIMEOUT_S, env={"WAY": "way"})
    assert (ended.code, ended.out, ended.message) == (3, "out\n", "no / way")
    assert execute(["sh", "-c", "kill -KILL $$"], TIMEOUT_S).code == -9


def test_command_runs_in_the_folder_that_is_named(tmp_path: Path) -> None:
    assert run(["pwd", "-P"], TIMEOUT_S, cwd=str(tmp_path)).out == f"{tmp_path.resolve()}\n"


def test_command_that_cannot_be_started_raises_oserror(execute: Callable[..., CommandResult]) -> None:
    with pytest.raises(FileNotFoundError):
        execute(["/nope"], TIMEOUT_S)


def test_output_beyond_the_limit_is_dropped_while_the_command_ends(execute: Callable[..., CommandResult]) -> None:
    many = "head -c 3000000 /dev/zero; head -c 4000 /dev/zero >&2; echo -n end"
    ended = execute(["sh", "-c", many], TIMEOUT_S, max_output_bytes=4000)
    assert (ended.code, len(ended.out), len(ended.err), ended.truncated) == (0, 4000, 4000, True)
    assert not execute(["sh", "-c", "head -c 4000 /dev/zero"], TIMEOUT_S, max_output_bytes=4000).truncated


def test_command_beyond_its_deadline_is_killed_with_its_children(
    execute: Callable[..., CommandResult], tmp_path: Path
) -> None:
    script = "trap '' TERM; sleep 600 & echo $! $$ > new; mv new pids; while :; do wait; done"
    for pid in _pids_at_the_deadline(execute, script, tmp_path):
        _expect_ended(pid)


def test_command_that_prints_without_end_is_ended_at_its_deadline(execute: Callable[..., CommandResult]) -> None:
    with pytest.raises(TimeoutError, match=r"^yes: no answer within 0.2 s$"):
        execute(["yes"], 0.2, max_output_bytes=100)


def test_command_with_a_grace_may_end_itself_on_sigterm(execute: Callable[..., CommandResult], tmp_path: Path) -> None:
    script = "trap 'echo ended > mark; exit' TERM; echo $$ > new; mv new pids; sleep 600 & wait"
    _pids_at_the_deadline(execute, script, tmp_path, term_grace_s=TIMEOUT_S)
    assert (tmp_path / "mark").read_text() == "ended\n"


def test_command_that_ignores_sigterm_is_killed_after_its_grace(
    execute: Callable[..., CommandResult], tmp_path: Path
) -> None:
    script = "trap '' TERM; echo $$ > new; mv new pids; sleep 600"
    for pid in _pids_at_the_deadline(execute, script, tmp_path, term_grace_s=0.1):
        _expect_ended(pid)


async def test_cancelled_caller_ends_its_command(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; echo $$ > new; mv new pids; sleep 600"
    task = asyncio.create_task(run_async(["sh", "-c", script], TIMEOUT_S))
    while not (tmp_path / "pids").exists():
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()

    _expect_ended(int((tmp_path / "pids").read_text()))


def test_command_is_ended_if_its_caller_is_cancelled_during_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancel_during_the_start() -> asyncio.subprocess.Process:
        create = asyncio.create_subprocess_exec
        started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()

        async def create_slowly(*argv: str, **options: Any) -> asyncio.subprocess.Process:
            started.set_result(await create(*argv, **options))
            await asyncio.sleep(0.1)
            return await started

        monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
        task = asyncio.create_task(run_async(["sleep", "600"], TIMEOUT_S))
        process = await started
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return process

    _expect_ended(asyncio.run(cancel_during_the_start()).pid)


def test_cancellation_as_the_command_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeProcess:
        returncode = 0

        def __init__(self) -> None:
            self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()

        async def wait(self) -> int:
            return 0

    async def cancel_after(turns: int) -> None:
        started: list[FakeProcess] = []

        async def start(*argv: str, **how: object) -> FakeProcess:
            started.append(FakeProcess())
            return started[-1]

        async def execute_repeatedly() -> None:
            while True:
                await run_async(("squeue",), TIMEOUT_S)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        task = asyncio.create_task(execute_repeatedly())
        for _ in range(5):
            await asyncio.sleep(0)
        started[0].stdout.feed_eof()
        started[0].stderr.feed_eof()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert task.cancelled(), turns

    for turns in range(6):
        asyncio.run(cancel_after(turns))


def test_blocking_variant_does_not_import_asyncio() -> None:
    code = (
        "import sys; from rrl.core.command_runner import run; run(['true'], 60.0); sys.exit('asyncio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def _pids_at_the_deadline(
    execute: Callable[..., CommandResult], script: str, folder: Path, **options: float
) -> list[int]:
    """Return the pids that a script has written when its deadline ends it. Try longer deadlines if it wrote none."""
    for timeout_s in (0.5, 4.0, 32.0):
        with pytest.raises(TimeoutError, match=f"^sh: no answer within {timeout_s:g} s$"):
            execute(["/bin/sh", "-c", f"cd {folder}; {script}"], timeout_s, **options)
        if (folder / "pids").exists():
            return [int(pid) for pid in (folder / "pids").read_text().split()]
    raise AssertionError("the script wrote no pids within 32 s")


def _expect_ended(pid: int) -> None:
    wait_until(lambda: read_process(pid) is None, f"process {pid} is still running")


def test_coroutine_completes_within_a_running_event_loop() -> None:
    def blocking() -> CommandResult:
        return run_coroutine(run_async(["echo", "hello"], TIMEOUT_S))

    async def cell() -> CommandResult:
        return blocking()

    assert blocking() == asyncio.run(cell()) == CommandResult(0, "hello\n", "")


def test_exception_of_a_coroutine_is_raised_within_a_running_event_loop() -> None:
    async def cell() -> None:
        run_coroutine(run_async(["/no/such/command"], TIMEOUT_S))

    with pytest.raises(FileNotFoundError):
        asyncio.run(cell())
