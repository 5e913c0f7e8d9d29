"""A role does not start into GPU memory that somebody still holds, waits a while for it, and is started where nobody
can say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL

import msgspec

from rrl.core.launch import ExitReason, ExitRecord, Launch
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import Stop

GIB = 2**30
SLURMS = "os.environ.update({'SLURM_STEP_GPUS': '1', 'CUDA_VISIBLE_DEVICES': '1'})"
"""what Slurm gives a step: the second GPU"""


@asynccontextmanager
async def step(at: Lab, driver: FakeDriver, waits: float, patch: str = SLURMS, **more: object) -> AsyncIterator[Launch]:
    """A step that was given a GPU; it waits so many s for room there, and looks each 0.1 s."""
    launch = msgspec.structs.replace(at.launch("sleep", "1000"), gpus=1, **more)
    at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
    times = f"from rrl.roles.launcher import gpu_memory as gpu_room; gpu_room.FREE_TIMEOUT_S, gpu_room.POLL_INTERVAL_S = {waits}, 0.1"
    asker = (
        "gpu_room.CHECK_SCRIPT = f'from rrl.roles.launcher import gpu_memory as g;"
        " g.FREE_TIMEOUT_S, g.POLL_INTERVAL_S = {gpu_room.FREE_TIMEOUT_S}, 0.1; g.main()'"
    )
    at.start(launch, "launcher.step", f"import os; os.environ.update({driver.env()!r}); {patch}; {times}; {asker}")
    yield launch


async def ended(at: Lab, launch: Launch) -> ExitRecord:
    return await eventually(lambda: at.record(launch))


async def started(at: Lab, launch: Launch) -> None:
    await eventually(lambda: [p for p in at.processes(launch) if _is_the_command(p.pid)])


def test_a_role_is_not_started_into_memory_that_is_held_and_its_record_says_who_holds_it(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB).process(1, 4242)

    async def story(at: Lab) -> None:
        async with at.manager(), step(at, driver, waits=0.5) as launch:
            record = await ended(at, launch)
            assert record.reason is ExitReason.GPUS_OCCUPIED
            assert record.detail == f"3072 MiB of GPU {driver.uuid(1)} are still in use by process 4242"

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_a_role_waits_for_memory_that_is_given_back(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async def story(at: Lab) -> None:
        async with at.manager() as manager, step(at, driver, waits=60.0) as launch:
            await eventually(lambda: launch.incarnation in manager.peers)
            await asyncio.sleep(1.0)  # a step that does not wait has started by then, or soon will: so much is sure
            assert not [p for p in at.processes(launch) if _is_the_command(p.pid)]
            driver.set(1, "memory_used", 100 * 2**20)
            await started(at, launch)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def _is_the_command(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    except OSError:
        return False


def test_another_roles_gpu_and_what_the_driver_keeps_for_itself_hold_nobody_up(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(0, "memory_used", 70 * GIB).set(1, "memory_reserved", GIB)

    async def story(at: Lab) -> None:
        async with at.manager(), step(at, driver, waits=600.0) as launch:
            await started(at, launch)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_where_nobody_can_say_who_holds_what_the_role_is_started(tmp_path: Path) -> None:
    full = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)
    cases = {
        "no driver": (full, f"{SLURMS}; os.environ.pop('LD_LIBRARY_PATH')", {}),
        "nothing given": (full, "pass", {}),
        "a shadow": (full, SLURMS, {"standby": True}),
    }
    for name, (driver, patch, more) in cases.items():
        (home := tmp_path / name.replace(" ", "-")).mkdir()

        async def story(at: Lab, driver: FakeDriver = driver, patch: str = patch, more: dict[str, bool] = more) -> None:
            async with at.manager(), step(at, driver, waits=600.0, patch=patch, **more) as launch:
                await started(at, launch)

        with lab(home) as at:
            asyncio.run(story(at))


def test_a_driver_that_hangs_delays_a_role_and_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).hang("nvmlInit_v2")

    async def story(at: Lab) -> None:
        patch = f"{SLURMS}; from rrl.roles.launcher import gpu_memory as gpu_room; gpu_room.NVML_TIMEOUT_S = 0.5"
        async with at.manager(), step(at, driver, waits=0.5, patch=patch) as launch:
            await started(at, launch)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_who_waits_for_room_leaves_when_it_is_asked_to(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async def story(at: Lab) -> None:
        async with at.manager() as manager, step(at, driver, waits=600.0) as launch:
            await eventually(lambda: launch.incarnation in manager.peers)
            await manager.send(launch.incarnation, Stop(launch.incarnation, 1.0, "done"))
            record = await ended(at, launch)
            assert (record.reason, record.code, record.signal) == (ExitReason.STOPPED, None, None)

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_who_is_killed_while_it_waits_for_room_leaves_nothing_that_its_agent_does_not_find(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async def story(at: Lab) -> None:
        async with at.manager() as manager, step(at, driver, waits=600.0) as launch:
            await eventually(lambda: launch.incarnation in manager.peers)
            asker = await eventually(lambda: [p for p in at.processes(launch) if p.step and not p.module])
            assert not [p for p in asker if _is_the_command(p.pid)]
            os.kill(int(asker[0].step.partition(".")[0]), SIGKILL)
            at.start(at.launch(replica="agent/local1"), "agent.main")
            await eventually(lambda: not at.processes(launch))

    with lab(tmp_path) as at:
        asyncio.run(story(at))


def test_who_cannot_even_ask_for_room_starts(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async def story(at: Lab) -> None:
        none = "gpu_room.sys = type('S', (), {'executable': '/no'})"
        patch = f"{SLURMS}; from rrl.roles.launcher import gpu_memory as gpu_room; {none}"
        async with at.manager(), step(at, driver, waits=600.0, patch=patch) as launch:
            await started(at, launch)

    with lab(tmp_path) as at:
        asyncio.run(story(at))
