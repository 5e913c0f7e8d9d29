"""An attack on all ports of a run that goes on, and what it cost (also for ``benchmarks/hostile_ports.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from rrl.core.types import Incarnation, ReplicaId
from rrl.tests.support.proxy import Proxy
from rrl.tests.support.runs import TestRun
from rrl.tests.support.security.attacks import Footprint, barrage, half_open, member_gone_mad, ports_of
from rrl.transport.control.endpoints import Address, Dialer
from rrl.transport.keys import RunKeys
from rrl.transport.messages import FromManager, Heartbeat

RECOVERY_TIMEOUT_S = 40.0
"""s for descriptors to be where they were: four deadlines of a handshake"""
_NOBODY = Incarnation(ReplicaId("rollout/999"), 1)


class Target(Struct, frozen=True):
    """A process of the run that listens."""

    name: str
    """``manager``, or the replica"""
    pid: int
    ports: tuple[tuple[str, int], ...]

    @property
    def weights(self) -> bool:
        """Its ports are of the weight plane, or of snapshots, where the same is said first."""
        return self.name.startswith(("trainer", "rollout", "agent"))


class Cost(Struct, frozen=True):
    """What an attack did to one process."""

    target: Target
    before: Footprint
    worst: Footprint
    """the most of each that was seen while it went on"""
    after: Footprint
    frames: int
    """malformed things that could be said at each of its ports, at least; those that are deaf left out"""

    @property
    def memory_growth(self) -> float:
        return self.after.memory / self.before.memory - 1

    @property
    def descriptors_growth(self) -> int:
        return self.after.descriptors - self.before.descriptors


def targets(run: TestRun) -> list[Target]:
    """Every process of the run that listens at TCP ports, and those ports."""
    names = {replica.pid: str(replica.id) for replica in run.state().replicas.values() if replica.pid is not None}
    found = []
    for pid, command in run.processes().items():
        with contextlib.suppress(OSError):
            if ports := ports_of(pid):
                found.append(Target(names.get(pid, "manager" if "submitit" in command else command), pid, tuple(ports)))
    return sorted(found, key=lambda target: target.name)


def assault(
    run: TestRun, victims: Sequence[Target], frames: int, halves: int, before: Sequence[Footprint] = ()
) -> list[Cost]:
    """``frames`` malformed things said at every port, and as many again by a member gone mad at those of the control
    plane, while ``halves`` connections at every port go no further than half of a handshake. Returns once the
    descriptors of everybody are where they were, or ``BACK_WITHIN`` s after the end."""
    keys = RunKeys.load(run.run.keys)
    before = before or [Footprint.of(victim.pid) for victim in victims]
    worst = list(before)
    over = threading.Event()
    watching = threading.Thread(target=_sample, args=(victims, worst, over))
    watching.start()
    try:
        with contextlib.ExitStack() as open_now:
            for victim in victims:
                for port in victim.ports:
                    open_now.enter_context(half_open(port, halves, victim.weights))
            reported = _storm(victims, keys, frames)
        until = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < until:
            after = [Footprint.of(victim.pid) for victim in victims]
            if all(now.descriptors <= then.descriptors for now, then in zip(after, before, strict=True)):
                break
            time.sleep(0.2)
    finally:
        over.set()
        watching.join()
    return [Cost(*each) for each in zip(victims, before, worst, after, reported, strict=True)]


def _storm(victims: Sequence[Target], keys: RunKeys, frames: int) -> list[int]:
    """A thread a process that is attacked; returns :attr:`Cost.said` of each. Raises what went wrong in one of them."""

    def attack(victim: Target) -> int:
        reported = []
        for port in victim.ports:
            if victim.weights:
                reported.append(barrage(port, frames, port[1]))
            else:
                reported.append(barrage(port, frames, port[1], asyncio.run(_recorded(port, keys))))
                member_gone_mad(f"tcp://{port[0]}:{port[1]}", keys, frames, port[1])
        return min((count for count in reported if count), default=0)

    with ThreadPoolExecutor(len(victims)) as threads:
        return list(threads.map(attack, victims))


async def _recorded(port: tuple[str, int], keys: RunKeys) -> bytes:
    """Every byte of a session that was let in."""
    async with Proxy(port[1]) as proxy:
        dialer = Dialer(keys, FromManager, lambda: Address(0, f"tcp://127.0.0.1:{proxy.port}"))
        task = asyncio.create_task(dialer.run())
        await _until(lambda: dialer.connected)
        await dialer.send(Heartbeat(_NOBODY, "generate", 1))
        reported = len(proxy.from_client)
        await _until(lambda: len(proxy.from_client) > reported)
        await dialer.close()
        await task
        return bytes(proxy.from_client)


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while not what():
            await asyncio.sleep(0.01)


def _sample(victims: Sequence[Target], worst: list[Footprint], over: threading.Event) -> None:
    while not over.wait(0.2):
        for number, victim in enumerate(victims):
            with contextlib.suppress(OSError):
                now, most = Footprint.of(victim.pid), worst[number]
                worst[number] = Footprint(max(now.memory, most.memory), max(now.descriptors, most.descriptors))
