"""A role waits for GPU memory that other processes use, and starts at once if NVML cannot read it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from signal import SIGKILL

import msgspec

from rrl.core.launch import LAUNCH_ENV, ExitReason, ExitRecord, Launch
from rrl.core.types import Incarnation, NodeName, guest_id
from rrl.tests.support.listening_manager import Lab, eventually, lab
from rrl.tests.support.nvml.driver import FakeDriver
from rrl.transport.messages import Stop

GIB = 2**30
SLURM_GPU = "os.environ.update({'SLURM_STEP_GPUS': '1', 'CUDA_VISIBLE_DEVICES': '1'})"
"""Python code that sets the variables with which Slurm assigns the second GPU to a step."""


@asynccontextmanager
async def step(
    at: Lab, driver: FakeDriver, waits: float, patch: str = SLURM_GPU, **more: object
) -> AsyncIterator[Launch]:
    """Start a step that waits up to ``waits`` seconds for the memory of its only GPU, and checks it every 0.1 s."""
    launch = msgspec.structs.replace(at.launch("sleep", "1000"), gpus=1, **more)
    at.run.launch_file(launch.tag).write_bytes(msgspec.json.encode(launch))
    times = (
        "from rrl.roles.launcher import gpu_memory;"
        f" gpu_memory.FREE_TIMEOUT_S, gpu_memory.POLL_INTERVAL_S = {waits}, 0.1"
    )
    check = (
        "gpu_memory.CHECK_SCRIPT = f'from rrl.roles.launcher import gpu_memory as g;"
        " g.FREE_TIMEOUT_S, g.POLL_INTERVAL_S = {gpu_memory.FREE_TIMEOUT_S}, 0.1; g.main()'"
    )
    at.start(launch, "launcher.step", f"import os; os.environ.update({driver.env()!r}); {patch}; {times}; {check}")
    yield launch


async def ended(at: Lab, launch: Launch) -> ExitRecord:
    return await eventually(lambda: at.record(launch))


async def started(at: Lab, launch: Launch) -> None:
    await eventually(lambda: [p for p in at.processes(launch) if _is_the_command(p.pid)])


async def test_role_on_an_occupied_gpu_is_not_started_and_its_record_names_the_process(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB).process(1, 4242)

    async with at.manager(), step(at, driver, waits=0.5) as launch:
        record = await ended(at, launch)
        assert record.reason is ExitReason.GPUS_OCCUPIED
        assert record.detail == f"3072 MiB of GPU {driver.uuid(1)} are still in use by process 4242"


@contextmanager
def process_of(at: Lab, replica: str) -> Iterator[int]:
    """Run a process of this replica, as its launcher marks it, and yield its pid."""
    launch = at.launch("sleep", "1000", replica=replica)
    marked = os.environ | {LAUNCH_ENV: str(at.run.launch_file(launch.tag))}
    process = subprocess.Popen(["sleep", "1000"], env=marked)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def test_memory_of_the_runs_guests_does_not_delay_a_trainer(at: Lab, tmp_path: Path) -> None:
    with process_of(at, "guest/local1") as guest:
        driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 41 * GIB).process(1, guest, 41 * GIB - 2**20)

        async with at.manager(), step(at, driver, waits=0.5) as launch:
            await started(at, launch)


async def test_memory_of_others_beside_a_guest_still_delays_a_trainer(at: Lab, tmp_path: Path) -> None:
    with process_of(at, "guest/local1") as guest, process_of(at, "rollout/7") as rollout:
        driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 9 * GIB)
        driver.process(1, guest, 6 * GIB).process(1, rollout, 3 * GIB)

        async with at.manager(), step(at, driver, waits=0.5) as launch:
            record = await ended(at, launch)
            assert record.reason is ExitReason.GPUS_OCCUPIED
            assert record.detail.startswith(f"3072 MiB of GPU {driver.uuid(1)} are still in use")


async def test_guest_starts_while_the_trainer_uses_its_gpus(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 60 * GIB)

    incarnation = Incarnation(guest_id(NodeName("local1")), 1)
    async with at.manager(), step(at, driver, waits=600.0, incarnation=incarnation) as launch:
        await started(at, launch)


async def test_role_waits_for_gpu_memory_that_is_released(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async with at.manager() as manager, step(at, driver, waits=60.0) as launch:
        await eventually(lambda: launch.incarnation in manager.peers)
        await asyncio.sleep(1.0)  # long enough for the step to start, if it did not wait
        assert not [p for p in at.processes(launch) if _is_the_command(p.pid)]
        driver.set(1, "memory_used", 100 * 2**20)
        await started(at, launch)


def _is_the_command(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
    except OSError:
        return False


async def test_other_gpus_and_the_drivers_reserve_do_not_delay_a_role(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(0, "memory_used", 70 * GIB).set(1, "memory_reserved", GIB)

    async with at.manager(), step(at, driver, waits=600.0) as launch:
        await started(at, launch)


def test_role_starts_if_nvml_cannot_read_the_memory(tmp_path: Path) -> None:
    full = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)
    cases = {
        "no driver": (full, f"{SLURM_GPU}; os.environ.pop('LD_LIBRARY_PATH')", {}),
        "nothing given": (full, "pass", {}),
        "a standby": (full, SLURM_GPU, {"standby": True}),
    }
    for name, (driver, patch, more) in cases.items():
        (home := tmp_path / name.replace(" ", "-")).mkdir()

        async def story(at: Lab, driver: FakeDriver = driver, patch: str = patch, more: dict[str, bool] = more) -> None:
            async with at.manager(), step(at, driver, waits=600.0, patch=patch, **more) as launch:
                await started(at, launch)

        with lab(home) as at:
            asyncio.run(story(at))


async def test_hung_driver_delays_a_role_but_does_not_prevent_its_start(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).hang("nvmlInit_v2")

    patch = f"{SLURM_GPU}; from rrl.roles.launcher import gpu_memory; gpu_memory.DRIVER_TIMEOUT_S = 0.5"
    async with at.manager(), step(at, driver, waits=0.5, patch=patch) as launch:
        await started(at, launch)


async def test_step_that_waits_for_gpu_memory_exits_on_a_stop_request(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async with at.manager() as manager, step(at, driver, waits=600.0) as launch:
        await eventually(lambda: launch.incarnation in manager.peers)
        await manager.send(launch.incarnation, Stop(launch.incarnation, 1.0, "done"))
        record = await ended(at, launch)
        assert (record.reason, record.code, record.signal) == (ExitReason.STOPPED, None, None)


async def test_killed_step_leaves_a_gpu_memory_check_that_its_agent_finds(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    async with at.manager() as manager, step(at, driver, waits=600.0) as launch:
        await eventually(lambda: launch.incarnation in manager.peers)
        asker = await eventually(lambda: [p for p in at.processes(launch) if p.step and not p.module])
        assert not [p for p in asker if _is_the_command(p.pid)]
        os.kill(int(asker[0].step.partition(".")[0]), SIGKILL)
        at.start(at.launch(replica="agent/local1"), "node_agent.main")
        await eventually(lambda: not at.processes(launch))


async def test_role_starts_if_the_gpu_memory_check_cannot_start(at: Lab, tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path).gpus(2).set(1, "memory_used", 3 * GIB)

    none = "gpu_memory.sys = type('S', (), {'executable': '/no'})"
    patch = f"{SLURM_GPU}; from rrl.roles.launcher import gpu_memory; {none}"
    async with at.manager(), step(at, driver, waits=600.0, patch=patch) as launch:
        await started(at, launch)
