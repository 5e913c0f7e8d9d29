"""An agent that stores snapshots, started as in a run."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import Launch
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.snapshots.client import SnapshotClient
from rrl.roles.snapshots.connection import socket_name
from rrl.roles.snapshots.format import Fenced, SnapshotError
from rrl.tests.support.listening_manager import Lab, eventually
from rrl.tests.support.roles.snapshots.servers import keep
from rrl.tests.support.security.attacks import Footprint
from rrl.transport import messages as msg

GANG = ReplicaId("trainer/0")
SIZE = 30 * 2**20


def agent_on(at: Lab, node: str) -> Launch:
    return at.launch(replica=f"agent/{node}", node=node, env={"RRL_HEARTBEAT_INTERVAL": "0.1"})


def member(at: Lab, node: str, incarnation: int = 1) -> SnapshotClient:
    return SnapshotClient(at.run.id, NodeName(node), at.keys, GANG, 0, incarnation)


def _is_on(node: str, message: msg.AgentHello) -> bool:
    return message.node == node


async def test_agents_announce_snapshot_addresses_and_keep_snapshots_until_they_leave(at: Lab) -> None:
    async with at.manager() as manager:
        launches = {node: agent_on(at, node) for node in ("local1", "local2")}
        agents = {node: at.start(launch, "node_agent.main") for node, launch in launches.items()}
        addresses = {
            node: (await manager.wait_for(msg.AgentHello, partial(_is_on, node))).snapshot_address for node in launches
        }
        before = {node: Footprint.of(agent.pid) for node, agent in agents.items()}
        first, second = member(at, "local1"), member(at, "local2", 2)

        def train() -> None:
            for step in range(1, 4):
                keep(first, step, SIZE)
                first.copy_to(addresses["local2"])

        await asyncio.to_thread(train)
        first.close()
        for node, agent in agents.items():
            grown = Footprint.of(agent.pid).memory - before[node].memory
            assert grown < SIZE / 2, "the agent has mapped the stored snapshots"
        kept = await asyncio.to_thread(second.list_snapshots)
        assert [each.step for each in kept] == [3, 2]
        there = (await asyncio.to_thread(second.list_snapshots, addresses["local1"]))[0]
        assert (await asyncio.to_thread(second.fetch, addresses["local1"], there))[0] == b"step 3"
        manager.received.clear()
        await manager.wait_for(msg.AgentHeartbeat)
        for launch in launches.values():
            await manager.send(launch.incarnation, msg.Stop(launch.incarnation, 1.0, "done"))
        await eventually(lambda: all(agent.poll() is not None for agent in agents.values()))
        left = await asyncio.to_thread(Path("/proc/net/unix").read_text)
        assert not any(socket_name(at.run.id, NodeName(node), at.keys.secret) in left for node in launches)
        with pytest.raises(SnapshotError):
            await asyncio.to_thread(second.list_snapshots)
        second.close()


async def test_fenced_incarnation_cannot_store_snapshots(at: Lab) -> None:
    async with at.manager() as manager:
        launch = agent_on(at, "local1")
        at.start(launch, "node_agent.main")
        await manager.wait_for(msg.AgentHello)
        client = member(at, "local1")
        await asyncio.to_thread(keep, client, 1)
        await manager.send(
            launch.incarnation, msg.Fenced(Incarnation(ReplicaId("trainer/0.1"), 1), "its gang restarts")
        )

        async def fenced() -> bool:
            try:
                await asyncio.to_thread(client.list_snapshots)
            except Fenced:
                return True
            return False

        async with asyncio.timeout(30):
            while not await fenced():
                pass
        client.close()


async def test_agent_unreachable_from_other_nodes_keeps_snapshots_of_its_own_node(at: Lab) -> None:
    async with at.manager() as manager:
        launch = msgspec.structs.replace(agent_on(at, "local1"), network="nowhere0")
        write_atomically(at.run.launch_file(launch.tag), msgspec.json.encode(launch))
        at.start(launch, "node_agent.main")
        assert (await manager.wait_for(msg.AgentHello)).snapshot_address == ""
        client = member(at, "local1")
        await asyncio.to_thread(keep, client, 1)
        client.close()
