"""A real agent on a node, the steps that a test starts beside it, and a manager that only receives messages."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rrl.core.launch import Launch
from rrl.core.processes import Process
from rrl.tests.support.listening_manager import Lab, Manager, eventually
from rrl.transport.messages import AgentHeartbeat

SLEEP = ("sleep", "1000")


class Node:
    """A manager, an agent on ``local1``, and the steps that the test starts."""

    def __init__(self, at: Lab, manager: Manager, agent: subprocess.Popen[bytes], launch: Launch) -> None:
        self.at, self.manager, self.agent, self.launch = at, manager, agent, launch

    async def step(self, *argv: str, replica: str = "rollout/0", node: str = "local1") -> tuple[Launch, Process]:
        """Start a step; return its launch and its command."""
        launch = self.at.launch(*argv, replica=replica, node=node)
        self.at.start(launch)
        return launch, await eventually(lambda: command(self.at, launch))

    async def wait_for_steps(self, *launches: Launch) -> None:
        """Wait for a heartbeat that names exactly these steps."""
        self.manager.received.clear()
        tags = tuple(sorted(launch.tag for launch in launches))
        await self.manager.wait_for(AgentHeartbeat, lambda heartbeat: heartbeat.alive == tags)


def command(at: Lab, launch: Launch) -> Process | None:
    ours = at.processes(launch)
    return next((p for p in ours if p.step and p.group == p.pid and p.step.startswith(f"{p.parent}.")), None)


def first_of(at: Lab, launch: Launch) -> Process:
    return next(process for process in at.processes(launch) if process.module)


@asynccontextmanager
async def node(at: Lab, patch: str = "") -> AsyncIterator[Node]:
    async with at.manager() as manager:
        launch = at.launch(replica="agent/local1", env={"RRL_HEARTBEAT_INTERVAL": "0.1"})
        yield Node(at, manager, at.start(launch, "node_agent.main", patch), launch)
