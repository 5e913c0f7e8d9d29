"""Measures what a snapshot of a trainer's state costs.

Four times are measured: the copy that a step waits for (compared with a memcpy of the same bytes), the digest in the
background, the copy to another node, and the read of the snapshot after a restart. Two real agents run on this machine
and the copy goes over loopback; one thread copies. ``python snapshots.py [MB] [ROUNDS]``: MB is the size of the state
of one rank. The default is 600, as for each of two ranks that share the state of 100 M parameters with AdamW in fp32.
With the default, the benchmark takes 3 GB of memory. Prints a table, and one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rrl.benchmarks._provenance import provenance
from rrl.benchmarks._requirements import check_requirements
from rrl.benchmarks._table import print_table
from rrl.core.types import NodeName, ReplicaId
from rrl.roles.snapshots.client import SnapshotClient
from rrl.tests.support.listening_manager import Lab, Manager, lab
from rrl.transport.messages import AgentHeartbeat, AgentHello

DEFAULT_MB, DEFAULT_ROUNDS = 600, 6
HEARTBEAT_INTERVAL_S = 0.1
"""Seconds between two heartbeats of an agent. The interval is shorter than in a run, so that a delayed
heartbeat is visible."""
GANG = ReplicaId("trainer/0")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mb", nargs="?", type=int, default=DEFAULT_MB, help="size of the state in MB (600)")
    parser.add_argument("rounds", nargs="?", type=int, default=DEFAULT_ROUNDS, help="number of rounds (6)")
    options = parser.parse_args()
    check_requirements("snapshots")
    size, rounds = options.mb * 10**6, options.rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rrl-bench-") as folder, lab(Path(folder)) as lab_run:
        figures = asyncio.run(_measure(lab_run, size, rounds))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {size / 1e6:.0f} MB, {rounds} rounds, medians")
    print_table(["what", "s"], [[name, f"{value:.3f}"] for name, value in figures.items()])
    print(json.dumps({"bytes": size, **{name: round(value, 4) for name, value in figures.items()}, **provenance()}))


async def _measure(lab_run: Lab, size: int, rounds: int) -> dict[str, float]:
    async with lab_run.manager() as manager:
        agents = {}
        for node in ("local1", "local2"):
            launch = lab_run.launch(
                replica=f"agent/{node}", node=node, env={"RRL_HEARTBEAT_INTERVAL": str(HEARTBEAT_INTERVAL_S)}
            )
            agents[node] = lab_run.start(launch, "agent").pid
        hello = await manager.wait_for(AgentHello, lambda reported: reported.node == "local2")
        gaps = asyncio.create_task(_collect_heartbeat_gaps(manager))
        baseline_pss = {node: _pss(pid) for node, pid in agents.items()}
        client = SnapshotClient(lab_run.run.id, NodeName("local1"), lab_run.keys, GANG, 0, 1)
        figures = await asyncio.to_thread(_figures, client, hello.snapshot_address, size, rounds)
        gaps.cancel()
        await asyncio.gather(gaps, return_exceptions=True)
        figures["longest_between_beats"] = max(_heartbeat_gaps, default=0.0)
        figures["agents_pss_growth_mb"] = max(_pss(pid) - baseline_pss[node] for node, pid in agents.items())
        client.close()
        return figures


def _figures(client: SnapshotClient, buddy: str, size: int, rounds: int) -> dict[str, float]:
    """Return the figures.

    Up to five copies of the state are in memory at once: three of this process and its own agent, and two of the other
    agent (``buddy``).
    """
    source, own = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    own.copy_(source)
    prepare = _timed(lambda: client.prepare(size))
    memcpy, block, seal, push = [], [], [], []
    for step in range(1, rounds + 1):
        memcpy.append(_timed(partial(own.copy_, source)))
        block.append(_timed(partial(_copy_and_seal, client, source, step)))
        seal.append(_timed(client.wait_until_sealed))
    del own
    for step in range(rounds + 1, rounds + 5):
        _copy_and_seal(client, source, step)
        client.wait_until_sealed()
        push.append(_timed(lambda: client.copy_to(buddy)))
    own_snapshot, buddy_snapshot = client.list_snapshots()[0], client.list_snapshots(buddy)[0]
    read = _timed(lambda: client.read(own_snapshot))
    data = torch.frombuffer(client.read(own_snapshot)[1], dtype=torch.uint8)
    load = [_timed(partial(source.copy_, data)) for _ in range(3)]
    del source, data
    fetch = [_timed(lambda: client.fetch(buddy, buddy_snapshot)) for _ in range(3)]
    median = statistics.median
    return {
        "memcpy": median(memcpy),
        "block": median(block),
        "block_over_memcpy": median(block) / median(memcpy),
        "first_blocks": max(block[:2]),
        "prepare_both_buffers": prepare,
        "seal": median(seal),
        "push_first_two": median(push[:2]),
        "push": median(push[2:]),
        "read_verified": read,
        "copy_out": median(load),
        "fetch_verified": median(fetch),
    }


def _copy_and_seal(client: SnapshotClient, source: torch.Tensor, step: int) -> None:
    """Copy and seal the state; a step waits for these two operations only."""
    torch.frombuffer(client.buffer(source.numel(), step), dtype=torch.uint8).copy_(source)
    client.seal(step)


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


_heartbeat_gaps: list[float] = []


async def _collect_heartbeat_gaps(manager: Manager) -> None:
    """Collect the times (s) between two heartbeats of the same agent, as the manager receives them."""
    last: dict[str, float] = {}
    while True:
        now = time.perf_counter()
        messages, manager.received = manager.received, []
        for heartbeat in messages:
            if isinstance(heartbeat, AgentHeartbeat):
                if heartbeat.node in last:
                    _heartbeat_gaps.append(now - last[heartbeat.node])
                last[heartbeat.node] = now
        await asyncio.sleep(0.002)


def _pss(pid: int) -> float:
    """Return the PSS of a process in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


if __name__ == "__main__":
    main()
