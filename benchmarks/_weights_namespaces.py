"""Five nodes with NICs of their own, each in a network namespace and shaped to 2 Gbit/s each way (root).

A node is shaped by token buckets, one where it sends and one where the bridge sends to it. ``ideal`` is the time that
the bytes of one copy take at that rate, without any header: nobody can be done before. The clock runs from the moment
when the receivers are told of a published version until the last one has verified the last byte. The source is free
once all but a trickle of what it sends in that run, by its NIC's counter, has left; that counter also says how many
copies it sent. A source that answers one more chunk later is not free before.

``fault``: one receiver is killed and one stopped as soon as both have half of their copy; nobody is told. Pairs take
turns, heads of the chain among them. The yardstick is when the same receivers were done without a fault. Afterwards the
stopped one goes on, the killed one is started again, and both must have the right version.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import time
from collections import defaultdict

from msgspec import Struct, field

from rrl.benchmarks._load import PATIENCE, calm
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_gloo import Broke, Gloo, Went
from rrl.benchmarks._weights_nics import Watch
from rrl.core.types import TRAINER, Version
from rrl.tests.support.slurm import netns
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import SOON, Member, Nursery

BITS = 2e9
"""a second, each way"""
RATE = "2gbit"
NODES = ("n1", "n2", "n3", "n4", "n5")
RECEIVERS = len(NODES) - 1
PAIRS = ((1, 2), (0, 1), (3, 1), (2, 0), (1, 0), (0, 3))
"""who is killed and who is stopped"""
GLOO_TIMEOUT = 20.0
"""s, the process group's own; what users have is 30 min by default"""


class Nics(Struct):
    """s by arm, one entry a round."""

    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    free: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """when the source was, and how many copies it sent"""
    copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    each: list[list[float]] = field(default_factory=list)
    """of the chain without a fault: when each receiver was done"""
    slower: list[float] = field(default_factory=list)
    """with a fault: how much later than without"""
    pairs: list[tuple[int, int, float]] = field(default_factory=list)
    gloo: list[str] = field(default_factory=list)
    """what living ranks said in the same situation"""
    others: list[float] = field(default_factory=list)
    wrong: int = 0
    ideal: float = 0.0


class _Run(Struct):
    began: float
    done: dict[int, float]
    """by receiver, s"""
    free: float
    copies: float


def impossible() -> str | None:
    """Why there are no shaped nodes here, or None."""
    if not netns.possible():
        return "no network namespaces (root and iproute2 are needed)"
    network = netns.free_network("rrlwp")
    try:
        netns.make(network, NODES[:1])
        netns.shape(network, NODES[0], RATE)
    except (RuntimeError, OSError) as error:
        return f"nodes cannot be shaped: {error}"
    finally:
        netns.remove(network)
    return None


async def measure(kind: str, nbytes: int, repeats: int) -> Nics:
    network = netns.free_network("rrlw")
    try:
        netns.make(network, NODES)
        for node in NODES:
            netns.shape(network, node, RATE)
        fleet = await _Fleet.made(network, kind, nbytes)
        try:
            return await fleet.measure(repeats)
        finally:
            fleet.close()
    finally:
        netns.remove(network)


def _inside(network: netns.Network, node: str) -> tuple[str, ...]:
    """Not :func:`netns.inside`: UCX finds its devices in /sys, which must be the namespace's."""
    return ("ip", "netns", "exec", network.namespace(node))


class _Fleet:
    def __init__(self, network: netns.Network, nbytes: int, nurseries: list[Nursery]) -> None:
        self._network, self._nbytes, self._nurseries = network, nbytes, nurseries
        self._source: Member
        self._receivers: list[Member] = []
        self._step = 0
        self._found = Nics(ideal=nbytes * 8 / BITS)

    @classmethod
    async def made(cls, network: netns.Network, kind: str, nbytes: int) -> _Fleet:
        nurseries = [await asyncio.to_thread(Nursery, kind, _inside(network, node)) for node in NODES]
        self = cls(network, nbytes, nurseries)
        self._source = await self._start(0)
        self._receivers = [await self._start(place) for place in range(1, len(NODES))]
        return self

    def close(self) -> None:
        for nursery in self._nurseries:
            nursery.close()

    async def _start(self, place: int, incarnation: int = 1) -> Member:
        name = f"rollout/{place - 1}" if place else TRAINER
        host = self._network.address(NODES[place])
        return await Member.start(self._nurseries[place], name, self._nbytes, host=host, incarnation=incarnation)

    async def measure(self, repeats: int) -> Nics:
        found = self._found
        for _ in range(2):  # connections, paces and memory are there after them
            await self._run("warm", range(RECEIVERS))
        gloo = await self._gloo(600.0)
        for turn in range(repeats):
            await self._run("one", range(1))
            clean = await self._run("chain", range(RECEIVERS))
            found.each.append([clean.done[place] for place in range(RECEIVERS)])
            await self._run("star", range(RECEIVERS), star=True)
            await self._fault(*PAIRS[turn % len(PAIRS)])
            await self._broadcast(gloo, turn)
        await gloo.close()
        usual = [statistics.median(times) for times in zip(*found.each, strict=True)]
        for killed, stopped, took in found.pairs:
            living = [place for place in range(RECEIVERS) if place not in (killed, stopped)]
            found.slower.append(took / max(usual[place] for place in living))
        found.gloo = await self._broken_gloo(*PAIRS[0])
        return found

    # ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _publish(self) -> Version:
        for member in (self._source, *self._receivers):
            await member.ask(say.Forget(), say.Forgot)
        self._step += 1
        version = Version(self._step, 1)
        await self._source.ask(say.Publish(version), say.Published)
        self._found.others.append(await calm(PATIENCE))
        return version

    def _tell(self, version: Version, chosen: range, star: bool) -> None:
        receivers = [self._receivers[place] for place in chosen]
        peers = say.Peers(version, (self._source.holder, *([] if star else [each.holder for each in receivers])))
        for receiver in receivers:
            receiver.tell(peers)

    async def _run(self, arm: str, chosen: range, star: bool = False) -> _Run:
        version = await self._publish()
        watch = Watch(self._network, NODES, self._nbytes)
        began = time.monotonic()
        self._tell(version, chosen, star)
        done = {place: (await self._receivers[place].committed(version)).at - began for place in chosen}
        run = _Run(began, done, *watch.end(began))
        if run.copies < 1:
            raise RuntimeError(f"the source sent {run.copies:.2f} copies through its NIC: they went some other way")
        await self._check(version, chosen)
        self._found.took[arm].append(max(done.values()))
        self._found.free[arm].append(run.free)
        self._found.copies[arm].append(run.copies)
        return run

    async def _fault(self, killed: int, stopped: int) -> None:
        version = await self._publish()
        watch = Watch(self._network, NODES, self._nbytes)
        began = time.monotonic()
        self._tell(version, range(RECEIVERS), star=False)
        await watch.half((killed, stopped))
        self._receivers[killed].kill()
        self._receivers[stopped].freeze()
        living = [place for place in range(RECEIVERS) if place not in (killed, stopped)]
        done = [(await self._receivers[place].committed(version)).at - began for place in living]
        free, copies = watch.end(began)
        self._found.took["fault"].append(max(done))
        self._found.free["fault"].append(free)
        self._found.copies["fault"].append(copies)
        self._found.pairs.append((killed, stopped, max(done)))
        self._receivers[stopped].thaw()
        dead = self._receivers[killed]
        await dead.close()
        self._receivers[killed] = await self._start(killed + 1, dead.life.incarnation + 1)
        self._tell(version, range(RECEIVERS), star=False)
        for place in (stopped, killed):
            await self._receivers[place].committed(version)
        await self._check(version, range(RECEIVERS))

    async def _check(self, version: Version, chosen: range) -> None:
        for place in chosen:
            checked = await self._receivers[place].ask(say.Check(), say.Checked)
            self._found.wrong += not checked.right or checked.version != version

    # ── gloo ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _gloo(self, timeout: float) -> Gloo:
        insides = [_inside(self._network, node) for node in NODES]
        return await Gloo.start(insides, self._network.address(NODES[0]), "eth0", timeout)

    async def _broadcast(self, gloo: Gloo, turn: int) -> None:
        await gloo.fill(Version(turn, 1), self._nbytes, 1, RECEIVERS)
        self._found.others.append(await calm(PATIENCE))
        began, said = await gloo.go(RECEIVERS, SOON)
        went = [each for each in said if isinstance(each, Went)]
        if len(went) != RECEIVERS:
            raise RuntimeError(f"gloo broke without a fault: {said}")
        self._found.took["gloo + digest"].append(max(each.digested for each in went) - began)

    async def _broken_gloo(self, killed: int, stopped: int) -> list[str]:
        """The same two, in the same moment; what the living ranks say."""
        gloo = await self._gloo(GLOO_TIMEOUT)
        try:
            await gloo.fill(Version(0, 1), self._nbytes, 1, RECEIVERS)
            watch = Watch(self._network, NODES, self._nbytes)
            going = asyncio.create_task(gloo.go(RECEIVERS, 2 * GLOO_TIMEOUT))
            await watch.half((killed, stopped), least=1)
            gloo.process(killed + 1).kill()
            gloo.process(stopped + 1).send_signal(signal.SIGSTOP)
            began, said = await going
            watch.end(began)
        finally:
            await gloo.close()
        return [f"rank {place + 1}: {_told(one, began)}" for place, one in enumerate(said)
                if place not in (killed, stopped)]  # fmt: skip


def _told(one: Went | Broke | BaseException, began: float) -> str:
    if isinstance(one, TimeoutError):
        return f"still hangs after {2 * GLOO_TIMEOUT:g} s"
    if isinstance(one, BaseException):
        return f"gone: {one!r}"
    if isinstance(one, Broke):
        return f"failed after {one.at - began:.1f} s: {one.why[:160]}"
    return f"has it after {one.received - began:.1f} s, {'right' if one.right else 'WRONG'}"


def report(found: Nics) -> dict[str, object]:
    """Prints a table; returns keys of the JSON object."""
    arms = [arm for arm in found.took if arm != "warm"]
    rows = []
    for arm in arms:
        took = statistics.median(found.took[arm])
        known = [values.get(arm) for values in (found.free, found.copies)]
        ours = ["" if values is None else f"{statistics.median(values):.2f}" for values in known]
        rows.append([arm, f"{took:.2f}", f"{took / found.ideal:.2f}", *ours])
    rounds = len(found.took["chain"])
    print(f"namespaces: NICs of {RATE}; one copy takes {found.ideal:.3f} s at best; medians of {rounds}")
    print_table(["arm", "s", "of ideal", "source free, s", "copies it sent"], rows)
    for (killed, stopped, took), slower in zip(found.pairs, found.slower, strict=True):
        print(f"receiver {killed} killed, {stopped} stopped: others done in {took:.2f} s, {slower:.2f} times as late")
    print(f"gloo with its timeout at {GLOO_TIMEOUT:g} s, one killed and one stopped: " + "; ".join(found.gloo))
    chain = statistics.median(found.took["chain"])
    return {
        "chain_over_ideal": round(chain / found.ideal, 3),
        "source_free_over_copy": round(statistics.median(found.free["chain"]) / found.ideal, 3),
        "killed_over_clean": round(statistics.median(found.slower), 3),
        "killed_over_clean_max": round(max(found.slower), 3),
        "star_over_ideal": round(statistics.median(found.took["star"]) / found.ideal, 3),
        "one_over_ideal": round(statistics.median(found.took["one"]) / found.ideal, 3),
        "source_sent_copies": round(statistics.median(found.copies["chain"]), 3),
    }


if __name__ == "__main__":
    sys.exit("this is a part of benchmarks/weights.py")
