"""Measures a weight version's transfer between five nodes whose NICs send and receive 0.5 Gbit/s each (root).

Each node is a network namespace. One token bucket limits what the node sends, and one limits what the bridge sends to
the node. ``ideal`` is the time that the bytes of one copy take at that rate without any header, so no receiver can
finish earlier. The measured time begins when the receivers get the message about a published version, and ends when the
last receiver has verified the last byte. The source counts as free when the counter of its NIC shows that it has sent
nearly all of its bytes of this transfer. This counter also shows how many copies the source sent.

The five nodes share the cores of this machine, where real nodes have their own. So the NICs must be slow enough that
the cores do not limit the transfer. The table shows the CPU time of all processes and how many cores were busy. The
last line shows how many cores the chain takes at this rate. In earlier versions of this benchmark the NICs had 2
Gbit/s. At that rate the chain needed 2.4 (tcp) to 2.8 cores (ucx), but the machine had two. So deadlines of chunks
expired, because no core was free. The chain took 1.33 to 2.7 times as long as one copy; this ratio depended on the
speed of the cores and on other processes.

In the arm ``fault``, one receiver is killed and another one is stopped as soon as both have half of their copy, and no
process is informed of the fault. The pair of receivers differs from round to round; some pairs include the first
receivers of the chain. The time is compared with the time of the same surviving receivers without a fault. Afterwards
the stopped receiver continues, the killed receiver is started again, and both must get the right version.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections import defaultdict

from msgspec import Struct, field

from rrl.benchmarks._load import QUIET_TIMEOUT_S, busy_seconds, cpu_seconds, wait_until_quiet
from rrl.benchmarks._provenance import spread
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_gloo import BroadcastDone, BroadcastFailed, Gloo
from rrl.benchmarks._weights_nics import NicMonitor
from rrl.core.types import TRAINER, Version
from rrl.tests.support.slurm import netns
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import Member, Nursery

BITS_PER_S = 0.5e9
"""Bits per second that a NIC sends, and as many that it receives. A node needs 0.6 s (tcp) to 0.75 s (ucx) of CPU time
to receive, verify and forward one copy (256 MiB) on a shared virtual machine. At this rate the copy takes 4.3 s. So the
four receivers of the chain take 0.6 to 0.7 cores together."""
SHAPED_RATE = "500mbit"
NODES = ("n1", "n2", "n3", "n4", "n5")
RECEIVERS = len(NODES) - 1
MAX_CHAIN, MAX_SOURCE_FREE = 1.5, 1.2
"""Bars, as multiples of the time of one copy: the chain's time, and the time after which its source is free."""
BUSY_SHARE = 0.9
"""If on average more than this share of the cores is busy, the report says that no core was free: at such a load,
processes sometimes wait for a core."""
FAULT_PAIRS = ((1, 2), (0, 1), (3, 1), (2, 0), (1, 0), (0, 3))
"""Indices of the killed and of the stopped receiver, by round."""
GLOO_TIMEOUT_S = 30.0
"""Timeout (s) of gloo's process group in the arm with a fault: twice the time of a broadcast. gloo's default is 30
min."""


class Nics(Struct):
    """Measurements in seconds, by arm, with one entry per round."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    source_free_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Times after which the source was free: it had sent nearly all bytes of the transfer."""
    source_copies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Numbers of copies that the source sent."""
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU times of the source and all receivers together."""
    busy_cores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Average number of busy cores of this machine, with all of its processes."""
    receiver_seconds: list[list[float]] = field(default_factory=list)
    """Times after which each receiver had finished, in the chain without a fault."""
    slowdowns: list[float] = field(default_factory=list)
    """Ratios of the time with a fault to the time without a fault."""
    pairs: list[tuple[int, int, float]] = field(default_factory=list)
    gloo_reports: list[str] = field(default_factory=list)
    """Reports of gloo's surviving ranks after one rank was killed and another one was stopped."""
    other_cores: list[float] = field(default_factory=list)
    wrong_copies: int = 0
    ideal_s: float = 0.0


class _Run(Struct):
    began: float
    receiver_seconds: dict[int, float]
    """Seconds until a receiver had finished, by the index of the receiver."""
    source_free_s: float
    source_copies: float


def unavailable_reason() -> str | None:
    """Return why this machine cannot have nodes with limited NICs, or None if it can."""
    if not netns.possible():
        return "no network namespaces (root and iproute2 are needed)"
    network = netns.free_network("rrlwp")
    try:
        netns.make(network, NODES[:1])
        netns.shape(network, NODES[0], SHAPED_RATE)
    except (RuntimeError, OSError) as error:
        return f"the NICs of nodes cannot be limited: {error}"
    finally:
        netns.remove(network)
    return None


async def measure(kind: str, nbytes: int, repeats: int) -> Nics:
    network = netns.free_network("rrlw")
    try:
        netns.make(network, NODES)
        for node in NODES:
            netns.shape(network, node, SHAPED_RATE)
        fleet = await _Fleet.made(network, kind, nbytes)
        try:
            return await fleet.measure(repeats)
        finally:
            fleet.close()
    finally:
        netns.remove(network)


def in_namespace(network: netns.Network, node: str) -> tuple[str, ...]:
    """Return the beginning of a command line that runs a program in the namespace of a node.

    :func:`netns.inside` is not used. UCX finds its devices in /sys, so the program needs the /sys of the namespace.
    """
    return ("ip", "netns", "exec", network.namespace(node))


class _Fleet:
    def __init__(self, network: netns.Network, nbytes: int, nurseries: list[Nursery]) -> None:
        self._network, self._nbytes, self._nurseries = network, nbytes, nurseries
        self._source: Member
        self._receivers: list[Member] = []
        self._step = 0
        self._results = Nics(ideal_s=nbytes * 8 / BITS_PER_S)

    @classmethod
    async def made(cls, network: netns.Network, kind: str, nbytes: int) -> _Fleet:
        nurseries = [await asyncio.to_thread(Nursery, kind, in_namespace(network, node)) for node in NODES]
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
        return await Member.start(self._nurseries[place], name, self._nbytes, host=host, number=incarnation)

    async def measure(self, repeats: int) -> Nics:
        results = self._results
        for _ in range(2):  # this first transfer creates connections, paces and memory
            await self._run("warm", range(RECEIVERS))
        gloo = await self._gloo(600.0)
        for turn in range(repeats):
            await self._run("one", range(1))
            clean = await self._run("chain", range(RECEIVERS))
            results.receiver_seconds.append([clean.receiver_seconds[place] for place in range(RECEIVERS)])
            await self._run("star", range(RECEIVERS), star=True)
            await self._fault(*FAULT_PAIRS[turn % len(FAULT_PAIRS)])
            await self._broadcast(gloo, turn)
        await gloo.close()
        baseline = [statistics.median(times) for times in zip(*results.receiver_seconds, strict=True)]
        for killed, stopped, seconds in results.pairs:
            survivors = [place for place in range(RECEIVERS) if place not in (killed, stopped)]
            results.slowdowns.append(seconds / max(baseline[place] for place in survivors))
        results.gloo_reports = await self._gloo_with_fault(*FAULT_PAIRS[0])
        return results

    # ── ours ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _publish(self) -> Version:
        for member in (self._source, *self._receivers):
            await member.request(say.Forget(), say.Forgot)
        self._step += 1
        version = Version(self._step, 1)
        await self._source.request(say.Publish(version), say.Published)
        self._results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
        return version

    def _announce(self, version: Version, chosen: range, star: bool) -> None:
        receivers = [self._receivers[place] for place in chosen]
        peers = say.Peers(version, (self._source.source, *([] if star else [each.source for each in receivers])))
        for receiver in receivers:
            receiver.send(peers)

    async def _run(self, arm: str, chosen: range, star: bool = False) -> _Run:
        version = await self._publish()
        monitor = NicMonitor(self._network, NODES, self._nbytes)
        cpu_before, busy_before = self._cpu_s(), busy_seconds()
        began = time.monotonic()
        self._announce(version, chosen, star)
        done = {place: (await self._receivers[place].committed(version)).at - began for place in chosen}
        self._results.cpu_s[arm].append(self._cpu_s() - cpu_before)
        self._results.busy_cores[arm].append((busy_seconds() - busy_before) / (time.monotonic() - began))
        run = _Run(began, done, *monitor.finish(began))
        if run.source_copies < 1:
            raise RuntimeError(
                f"the source sent only {run.source_copies:.2f} copies of the weights through its NIC, but must send at"
                " least 1: the rest took another path"
            )
        await self._check(version, chosen)
        self._results.seconds[arm].append(max(done.values()))
        self._results.source_free_s[arm].append(run.source_free_s)
        self._results.source_copies[arm].append(run.source_copies)
        return run

    def _cpu_s(self) -> float:
        return cpu_seconds(member.pid for member in (self._source, *self._receivers))

    async def _fault(self, killed: int, stopped: int) -> None:
        version = await self._publish()
        monitor = NicMonitor(self._network, NODES, self._nbytes)
        began = time.monotonic()
        self._announce(version, range(RECEIVERS), star=False)
        await monitor.wait_for_half_copies((killed, stopped))
        self._receivers[killed].kill()
        self._receivers[stopped].freeze()
        survivors = [place for place in range(RECEIVERS) if place not in (killed, stopped)]
        done = [(await self._receivers[place].committed(version)).at - began for place in survivors]
        free, copies = monitor.finish(began)
        self._results.seconds["fault"].append(max(done))
        self._results.source_free_s["fault"].append(free)
        self._results.source_copies["fault"].append(copies)
        self._results.pairs.append((killed, stopped, max(done)))
        self._receivers[stopped].thaw()
        dead = self._receivers[killed]
        await dead.close()
        self._receivers[killed] = await self._start(killed + 1, dead.incarnation.number + 1)
        self._announce(version, range(RECEIVERS), star=False)
        for place in (stopped, killed):
            await self._receivers[place].committed(version)
        await self._check(version, range(RECEIVERS))

    async def _check(self, version: Version, chosen: range) -> None:
        for place in chosen:
            checked = await self._receivers[place].request(say.Check(), say.Checked)
            self._results.wrong_copies += not checked.is_correct or checked.version != version

    # ── gloo ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _gloo(self, timeout: float) -> Gloo:
        insides = [in_namespace(self._network, node) for node in NODES]
        return await Gloo.start(insides, self._network.address(NODES[0]), "eth0", timeout)

    async def _broadcast(self, gloo: Gloo, turn: int) -> None:
        await gloo.fill(Version(turn, 1), self._nbytes, 1, RECEIVERS)
        self._results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
        began, reports = await gloo.broadcast(RECEIVERS, beside=True)
        finished = [each for each in reports if isinstance(each, BroadcastDone)]
        if len(finished) != RECEIVERS:
            raise RuntimeError(f"gloo failed although no fault was injected: {reports}")
        verified = max(each.received + each.digest_s for each in finished)
        self._results.seconds["gloo, digests beside"].append(verified - began)

    async def _gloo_with_fault(self, killed: int, stopped: int) -> list[str]:
        """Kill one rank and stop another one in the middle of a gloo broadcast; return the other receivers' reports."""
        gloo = await self._gloo(GLOO_TIMEOUT_S)
        try:
            await gloo.fill(Version(0, 1), self._nbytes, 1, RECEIVERS)
            monitor = NicMonitor(self._network, NODES, self._nbytes)
            broadcast = asyncio.create_task(gloo.broadcast(RECEIVERS, beside=False, timeout_s=2 * GLOO_TIMEOUT_S))
            await monitor.wait_for_half_copies((killed, stopped), least=1)
            gloo.process(killed + 1).kill()
            gloo.process(stopped + 1).send_signal(signal.SIGSTOP)
            began, reports = await broadcast
            monitor.finish(began)
        finally:
            await gloo.close()
        return [
            f"rank {place + 1}: {_report_text(one, began)}"
            for place, one in enumerate(reports)
            if place not in (killed, stopped)
        ]


def _report_text(reply: BroadcastDone | BroadcastFailed | BaseException, began: float) -> str:
    if isinstance(reply, TimeoutError):
        return f"still hangs after {2 * GLOO_TIMEOUT_S:g} s"
    if isinstance(reply, BaseException):
        return f"gone: {reply!r}"
    if isinstance(reply, BroadcastFailed):
        return f"failed after {reply.failed_at - began:.1f} s: {reply.reason[:160]}"
    return f"has it after {reply.received - began:.1f} s, {'right' if reply.is_correct else 'WRONG'}"


def report(results: Nics) -> dict[str, object]:
    """Print a table; return the results for the JSON object."""
    rows = []
    for arm in [arm for arm in results.seconds if arm != "warm"]:
        of_ideal = [seconds / results.ideal_s for seconds in results.seconds[arm]]
        known = (results.source_free_s, results.source_copies, results.cpu_s, results.busy_cores)
        known_cells = [f"{statistics.median(values[arm]):.2f}" if arm in values else "" for values in known]
        cells = [f"{each(of_ideal):.2f}" for each in (min, statistics.median, max)]
        rows.append([arm, f"{statistics.median(results.seconds[arm]):.2f}", *cells, *known_cells])
    rounds = len(results.seconds["chain"])
    print(f"namespaces: NICs of {SHAPED_RATE}; one copy takes {results.ideal_s:.3f} s at best; medians of {rounds}")
    header = ["arm", "s", "of ideal, min", "median", "max", "source free, s", "copies it sent", "CPU s", "cores busy"]
    print_table(header, rows)
    for (killed, stopped, seconds), slower in zip(results.pairs, results.slowdowns, strict=True):
        print(
            f"receiver {killed} killed, {stopped} stopped: others done in {seconds:.2f} s, {slower:.2f} x without fault"
        )
    print(f"gloo (timeout {GLOO_TIMEOUT_S:g} s), one rank killed and one stopped: " + "; ".join(results.gloo_reports))
    chain = spread([seconds / results.ideal_s for seconds in results.seconds["chain"]])
    source_free = spread([seconds / results.ideal_s for seconds in results.source_free_s["chain"]])
    needed = statistics.median(results.cpu_s["chain"]) / results.ideal_s
    busy = statistics.median(results.busy_cores["chain"])
    limited = busy > BUSY_SHARE * (os.cpu_count() or 1)
    for name, figure, bar in (("chain", chain, MAX_CHAIN), ("source free", source_free, MAX_SOURCE_FREE)):
        low, high = figure["range"]
        print(
            f"{name}: {figure['median']:.2f} times a copy's time ({low:.2f} to {high:.2f} in {rounds} rounds), "
            f"{'under' if figure['median'] <= bar else 'OVER'} {bar}"
        )
    print(
        f"to keep pace with these NICs the chain takes {needed:.2f} cores; {busy:.2f} of {os.cpu_count()} were busy"
        + (": no core was free, which prolongs these times" if limited else "")
    )
    return {
        "chain_over_ideal": round(chain["median"], 3),
        "chain_over_ideal_range": chain["range"],
        "source_free_over_copy": round(source_free["median"], 3),
        "source_free_over_copy_range": source_free["range"],
        "killed_over_clean": round(statistics.median(results.slowdowns), 3),
        "killed_over_clean_range": spread(results.slowdowns)["range"],
        "star_over_ideal": round(statistics.median(results.seconds["star"]) / results.ideal_s, 3),
        "one_over_ideal": round(statistics.median(results.seconds["one"]) / results.ideal_s, 3),
        "source_sent_copies": round(statistics.median(results.source_copies["chain"]), 3),
        "chain_cores_needed": round(needed, 2),
        "chain_cores_busy": round(busy, 2),
        "limited_by_cores": limited,
        "nic_gbit_s": BITS_PER_S / 1e9,
        "rounds": rounds,
    }


if __name__ == "__main__":
    sys.exit("run it by: python benchmarks/weights.py --part namespaces")
