"""Compares the transfer of real versions as deltas with that of whole chunks, between nodes with slow NICs (root).

A trainer and two receivers, which form one chain, are on three nodes: network namespaces, each with a NIC that sends
and receives 1 Gbit/s, or 200 Mbit/s with a round trip of 50 ms between any two nodes (25 ms one way). The versions are
those of the learning rate 1e-6 (:mod:`_delta_updates`). The arms ``auto`` (the default of ``[transport] delta``),
``delta`` (true) and ``plain`` (false) take turns in each version, and have processes of their own. The measured time
begins when the receivers get the message about a published version, and ends when the last receiver has verified the
last byte. Every byte is compared after that.

The speedup is the mean time of a version with ``plain`` over that with ``auto``, from version 2 on: versions 2 to 10,
and with 200 Mbit/s for ``plain`` only versions 2 to 4, which take 11 s each. Its range is that of the single versions
of ``auto``. The bytes that a receiver counts are compared with the counter of its NIC, which also has the headers of
TCP and IP, and acknowledgements.

The three nodes share the cores of this machine, where real nodes have their own, and each receiver computes the digests
of the whole version. The table shows the CPU time of all processes: a transfer cannot be faster than this time divided
by the number of cores.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from contextlib import ExitStack

from msgspec import Struct, field

from rrl.benchmarks._delta_fleet import ARMS, Fleet, Series
from rrl.benchmarks._delta_updates import Versions
from rrl.benchmarks._load import QUIET_TIMEOUT_S, wait_until_quiet
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_namespaces import in_namespace
from rrl.tests.support.slurm import netns
from rrl.tests.support.slurm.processes import DELAYER
from rrl.tests.support.weights.members import Nursery

NODES = ("n1", "n2", "n3")


class Link(Struct, frozen=True):
    """The NICs of one case."""

    name: str
    rate: str
    """Rate of each NIC in tc's notation."""
    round_trip_ms: float
    plain_versions: int
    """Number of versions that are also transferred whole."""
    least_speedup: float
    """The bar."""


LINKS = (Link("1gbit", "1gbit", 0.0, 10, 5.0), Link("200mbit", "200mbit", 50.0, 4, 8.0))


class Nics(Struct):
    """Measurements by case."""

    series: dict[str, Series] = field(default_factory=dict)
    nbytes: int = 0
    over_counters: dict[str, list[float]] = field(default_factory=dict)
    """Bytes at the NICs of the receivers over those that the receivers counted, for each version of ``auto``."""
    other_cores: list[float] = field(default_factory=list)


async def measure(versions: Versions) -> Nics:
    results = Nics(nbytes=versions.nbytes)
    for link in LINKS:
        network = netns.free_network("rrld")
        with ExitStack() as stack:
            stack.callback(netns.remove, network)
            netns.make(network, NODES)
            for node in NODES:
                netns.shape(network, node, link.rate)
                if link.round_trip_ms:
                    stack.enter_context(_Delay(network, node, link.round_trip_ms / 4))  # a packet passes two links
            nurseries = [await asyncio.to_thread(Nursery, "tcp", in_namespace(network, node)) for node in NODES]
            for nursery in nurseries:
                stack.callback(nursery.close)
            await _measure_link(results, link, versions, network, nurseries)
    return results


class _Delay:
    """A process that delays the frames of a node's link in each direction."""

    def __init__(self, network: netns.Network, node: str, milliseconds: float) -> None:
        self._argv = (sys.executable, "-m", DELAYER, *netns.divert(network, node), str(milliseconds))

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._argv)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


async def _measure_link(
    results: Nics, link: Link, versions: Versions, network: netns.Network, nurseries: list[Nursery]
) -> None:
    series = results.series[link.name] = Series()
    hosts = [network.address(node) for node in NODES]
    fleets = {arm: await Fleet.started(nurseries, hosts, versions.nbytes, ARMS[arm]) for arm in ARMS}
    for arm in ARMS:
        series.rounds[arm].append([])
    results.over_counters[link.name] = []
    for arm in ARMS:
        await fleets[arm].transfer(versions.paths[0])  # uses connections and memory for the first time
    for index, path in enumerate(versions.paths):
        results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
        turn = index % len(ARMS)
        for arm in (*list(ARMS)[turn:], *list(ARMS)[:turn]):
            if arm == "plain" and index >= link.plain_versions:
                continue
            before = _received(network)
            transfer = await fleets[arm].transfer(path)
            series.rounds[arm][0].append(transfer)
            if arm == "auto":
                results.over_counters[link.name].append((_received(network) - before) / sum(transfer.received))
    for fleet in fleets.values():
        await fleet.close()


def _received(network: netns.Network) -> int:
    return sum(netns.passed(network, node)[1] for node in NODES[1:])


def report(results: Nics) -> dict[str, object]:
    """Print a table; return the results for the JSON object."""
    rows = []
    figures: dict[str, object] = {}
    for link in LINKS:
        series = results.series[link.name]
        seconds = {arm: [one.seconds for one in series.later(arm)[0]] for arm in ARMS}
        plain_s = statistics.mean(seconds["plain"])
        speedup = {arm: plain_s / statistics.mean(seconds[arm]) for arm in ARMS}
        span = {arm: [plain_s / max(seconds[arm]), plain_s / min(seconds[arm])] for arm in ARMS}
        for arm in ARMS:
            low, high = span[arm]
            rows.append(
                [
                    f"{link.name} {arm}",
                    f"{statistics.mean(seconds[arm]):.2f}",
                    f"{speedup[arm]:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{link.least_speedup:g}" if arm == "auto" else "",
                    f"{series.share(arm, results.nbytes):.4f}",
                    f"{series.cpu_s(arm):.2f}",
                ]
            )
        figures |= {
            f"speedup_{link.name}_1e6": round(speedup["auto"], 2),
            f"speedup_{link.name}_1e6_range": [round(each, 2) for each in span["auto"]],
            f"speedup_{link.name}_1e6_delta": round(speedup["delta"], 2),
            f"bytes_share_{link.name}_1e6": round(series.share("auto", results.nbytes), 4),
            f"cpu_s_{link.name}": {arm: round(series.cpu_s(arm), 2) for arm in ARMS},
            f"nic_over_counted_{link.name}": round(statistics.mean(results.over_counters[link.name][1:]), 3),
        }
    print(f"namespaces: {results.nbytes / 2**20:.0f} MiB, two receivers in a chain; means without the first")
    print_table(["NICs, arm", "s", "speedup", "by version", "bar", "bytes, share", "CPU s"], rows)
    return figures
