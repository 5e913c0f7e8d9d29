"""Compares a version that four ranks publish in parts with the same version published by one rank.

The ranks, and one receiver, are processes with the worker API, a real store and a stand-in for the manager. The
measured time begins with the first call of ``me.publish_shard`` and ends when the receiver has verified the last byte.
Each arm first publishes versions that are not measured, so that all memory has been written before. The memory of a
rank is the peak of its resident memory: its tensors, and the last two versions of its part. The arms take turns.

``python -m rrl.benchmarks._trainers_publish rank MIB`` is a rank, and ``... receive`` is the receiver.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import rrl
from rrl.benchmarks._table import print_table
from rrl.core.run_dir import write_atomically
from rrl.core.run_spec import TransportSpec
from rrl.tests.support.listening_manager import lab
from rrl.tests.support.roles.publishing_rank import gang, start
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import JOB, Scene
from rrl.tests.support.weights.source import content

WORLD = 4
TENSORS = 64
"""Number of tensors of a version."""
WARM_UP, MEASURED = 3, 2
"""Versions of each gang that are not measured, because memory is written for the first time, and that are."""
MAX_OVER_ONE = 1.0
"""Bar for ``publish_shards_over_one``."""
MAX_MEMORY_OVER_ONE = 0.5
"""Bar for ``largest_process_memory_over_one``."""


def measure(mib: int = 1024, rounds: int = 2) -> dict[str, object]:
    """Print a table, and return the figures and whether they are within their bars."""
    seconds: dict[int, list[float]] = {1: [], WORLD: []}
    memory: dict[int, list[int]] = {1: [], WORLD: []}
    for _ in range(rounds):
        for world in seconds:
            took, peak = asyncio.run(_run(world, mib))
            seconds[world] += took
            memory[world].append(peak)
    one, many = (statistics.median(seconds[world]) for world in (1, WORLD))
    over, memory_over = many / one, max(memory[WORLD]) / min(memory[1])
    rows = [
        [
            str(world),
            f"{statistics.median(seconds[world]):.2f}",
            f"{min(seconds[world]):.2f} to {max(seconds[world]):.2f}",
            f"{max(memory[world]) / 2**20:.0f}",
        ]
        for world in seconds
    ]
    print_table(["ranks", "s until received", "range", "MiB of the largest rank"], rows)
    return {
        "publish_shards_over_one": round(over, 3),
        "largest_process_memory_over_one": round(memory_over, 3),
        "publish_shards_s": round(many, 3),
        "publish_one_s": round(one, 3),
        "publish_shards_within_bars": over <= MAX_OVER_ONE and memory_over <= MAX_MEMORY_OVER_ONE,
    }


async def _run(world: int, mib: int) -> tuple[list[float], int]:
    """Return the seconds of each measured version, and the peak memory (bytes) of the largest rank."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as at:
        scene = Scene(at)
        job = msgspec.structs.replace(JOB, transport=TransportSpec("tcp"))
        write_atomically(at.run.run_spec, msgspec.json.encode(job))
        store = scene.open_store()
        async with scene.manager_and(store) as manager:
            receiver = await start(scene, crew.ROLLOUT, __spec__.name, "receive")
            async with gang(scene, manager, world, program=(__spec__.name, "rank", str(mib))) as ranks:
                for step in range(1, WARM_UP + MEASURED + 1):
                    for rank in ranks:
                        rank.start_publishing(step)
                    began = min([await rank.published() for rank in ranks])
                    received = await receiver.published()
                    if step > WARM_UP:
                        seconds.append((received - began) / 1e9)
                peak = max(_peak_bytes(rank.process.pid) for rank in ranks)
            await receiver.kill()
        store.close()
    return seconds, peak


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def _publish(mib: int) -> None:
    """Be a rank: publish for each step on standard input, and print the time (ns) of the call after its end."""
    with rrl.join() as me:
        me.progress()
        size = mib * 2**20 // TENSORS
        mine = [(f"w{index}", "uint8", (size,), content(size, index)) for index in range(me.rank, TENSORS, me.world)]
        for line in sys.stdin:
            began = time.monotonic_ns()
            me.publish_shard(int(line), mine, part=me.rank, of=me.world)
            print(began, flush=True)


def _receive() -> None:
    """Be the receiver: print the time (ns) at which each version was complete."""
    with rrl.join() as me:
        me.progress()
        while not me.stopping.is_set():
            if me.new_weights() is not None:
                print(time.monotonic_ns(), flush=True)
            time.sleep(0.002)


if __name__ == "__main__":
    if sys.argv[1:] == ["receive"]:
        _receive()
    elif sys.argv[1:2] == ["rank"]:
        _publish(int(sys.argv[2]))
    else:
        print(measure())
