"""Attacks all ports of a run, and measures the cost of the attack (also for ``benchmarks/hostile_ports.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from rrl.core.types import Incarnation, ReplicaId
from rrl.tests.support.proxy import Proxy
from rrl.tests.support.runs import TestRun
from rrl.tests.support.security.attacks import (
    LATER_CONNECTIONS,
    Footprint,
    barrage,
    half_open,
    member_gone_mad,
    ports_of,
)
from rrl.transport.control.endpoints import Address, Dialer
from rrl.transport.keys import RunKeys
from rrl.transport.messages import FromManager, Heartbeat

RECOVERY_TIMEOUT_S = 40.0
"""Time (s) within which the number of descriptors must return to its initial value: four times the handshake
deadline."""
_NOBODY = Incarnation(ReplicaId("rollout/999"), 1)


class Target(Struct, frozen=True):
    """A process of the run that listens on ports."""

    name: str
    """The name ``manager``, or the id of the replica."""
    pid: int
    ports: tuple[tuple[str, int], ...]

    @property
    def weights(self) -> bool:
        """Return whether the process's ports serve weights or snapshots, which begin with the same handshake."""
        return self.name.startswith(("trainer", "rollout", "agent"))


class Cost(Struct, frozen=True):
    """The cost of an attack for one process."""

    target: Target
    before: Footprint
    worst: Footprint
    """Largest value of each resource during the attack."""
    after: Footprint
    frames: int
    """Lowest number of malformed messages that a port received. Ports that accept no connection are left out."""

    @property
    def memory_growth(self) -> float:
        return self.after.memory / self.before.memory - 1

    @property
    def descriptors_growth(self) -> int:
        return self.after.descriptors - self.before.descriptors


class Storm(Struct, frozen=True):
    """The part of an attack in which frames are sent, before the wait for the descriptors."""

    seconds: float
    cpu_s: float
    """CPU time (s) of the attacking process."""
    steps: int
    """Number of steps that the run committed while frames were sent."""


def targets(run: TestRun) -> list[Target]:
    """Return every process of the run that listens on TCP ports, with its ports."""
    names = {replica.pid: str(replica.id) for replica in run.state().replicas.values() if replica.pid is not None}
    found = []
    for pid, command in run.processes().items():
        with contextlib.suppress(OSError):
            if ports := ports_of(pid):
                other = "manager" if "run_manager" in command else command
                found.append(Target(names.get(pid, other), pid, tuple(ports)))
    return sorted(found, key=lambda target: target.name)


def assault(
    run: TestRun, victims: Sequence[Target], frames: int, halves: int, before: Sequence[Footprint] = ()
) -> tuple[list[Cost], Storm]:
    """Attack all ports of the victims; return the cost for each victim, and the part in which frames were sent.

    Each port receives ``frames`` malformed messages, while ``halves`` connections to it stop in the middle of the
    handshake. Ports of the control plane also receive ``frames`` malformed messages from a member with the run's
    keys. The function returns once no process has more descriptors than before, apart from ``LATER_CONNECTIONS``, or
    ``RECOVERY_TIMEOUT_S`` s after the last frame.
    """
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
            began, used, step = time.monotonic(), _cpu_s(), run.state().step
            reported = _storm(victims, keys, frames)
            storm = Storm(time.monotonic() - began, _cpu_s() - used, run.state().step - step)
        until = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < until:
            after = [Footprint.of(victim.pid) for victim in victims]
            pairs = zip(after, before, strict=True)
            if all(now.descriptors <= then.descriptors + LATER_CONNECTIONS for now, then in pairs):
                break
            time.sleep(0.2)
    finally:
        over.set()
        watching.join()
    return [Cost(*each) for each in zip(victims, before, worst, after, reported, strict=True)], storm


def _cpu_s() -> float:
    """Return the CPU time (s) of this process, which is the attacker."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _storm(victims: Sequence[Target], keys: RunKeys, frames: int) -> list[int]:
    """Attack each victim from a thread of its own; return :attr:`Cost.frames` of each victim.

    Raises the first error of a thread.
    """

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
    """Record an authenticated session, and return all its bytes."""
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
