"""Compares the transfer of real versions as deltas with that of whole chunks, on one machine over tcp.

Three arms have the same versions (:mod:`_delta_updates`), and take turns in each version: ``auto`` (the default of
``[transport] delta``), ``delta`` (true) and ``plain`` (false). Each arm has a publisher and one receiver, in processes
that are new in each round, as in a run that begins: so ``auto`` includes what it takes to learn. The measured time
begins when the receiver gets the message about a published version, and ends when it has verified the last byte. Every
byte is compared after that. The time to publish, with or without finding the changed positions, is reported apart. All
figures are of versions 2 to 10, since a receiver has no base for the first one.

Without a NIC a whole chunk costs about as much as its digest, so this is the worst case for deltas.
``worst_over_plain_time`` is the highest of three values, one for each learning rate: the median over the rounds of the
mean time of a version with ``auto`` over the mean time of ``plain``.

The costs of the pure functions are the CPU times of one thread that goes through all chunks of a version, per GiB of
the version. ``encode`` finds the changed positions and makes the frames, ``apply`` copies the base and writes the
changed values. The digest, which each chunk needs, deltas or not, is shown beside them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy
from msgspec import Struct, field

from rrl.benchmarks._delta_fleet import ARMS, Fleet, Series
from rrl.benchmarks._delta_updates import Versions
from rrl.benchmarks._load import QUIET_TIMEOUT_S, wait_until_quiet
from rrl.benchmarks._provenance import spread
from rrl.benchmarks._table import print_table
from rrl.tests.support.weights.members import Nursery
from rrl.transport.weights import delta
from rrl.transport.weights.manifest import CHUNK_BYTES, digest

MAX_SHARES = {"1e-6": 0.03, "1e-5": 0.06}
MAX_OVER_PLAIN, MAX_CORE_S_PER_GIB = 1.02, 1.0
GIB = 2**30


class Costs(Struct):
    """CPU seconds of one thread per GiB of a version, for each version from the second on."""

    encode: list[float] = []
    apply: list[float] = []
    digest: list[float] = []


class Loopback(Struct):
    """Measurements by learning rate."""

    series: dict[str, Series] = field(default_factory=dict)
    nbytes: int = 0
    costs: dict[str, Costs] = field(default_factory=dict)
    changed: dict[str, list[float]] = field(default_factory=dict)
    """Shares of the words that changed, of each version from the second on."""
    other_cores: list[float] = field(default_factory=list)


async def measure(results: Loopback, versions: Versions, rounds: int) -> None:
    """Add the measurements of one learning rate."""
    results.nbytes = versions.nbytes
    series = results.series[versions.rate] = Series()
    nursery = await asyncio.to_thread(Nursery, "tcp")
    try:
        for _ in range(rounds):
            await _measure_round(results, series, versions, nursery)
    finally:
        nursery.close()


async def _measure_round(results: Loopback, series: Series, versions: Versions, nursery: Nursery) -> None:
    hosts = ["127.0.0.1"] * 2
    fleets = {arm: await Fleet.started([nursery] * 2, hosts, versions.nbytes, ARMS[arm]) for arm in ARMS}
    for arm in ARMS:
        series.rounds[arm].append([])
        await fleets[arm].transfer(versions.paths[0])  # uses connections and memory for the first time
    for index, path in enumerate(versions.paths):
        results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
        turn = index % len(ARMS)
        for arm in (*list(ARMS)[turn:], *list(ARMS)[:turn]):
            series.rounds[arm][-1].append(await fleets[arm].transfer(path))
    for fleet in fleets.values():
        await fleet.close()


def measure_costs(results: Loopback, versions: Versions) -> None:
    """Add the costs of the pure functions with the versions of one learning rate, in this thread."""
    results.changed[versions.rate] = versions.changed_shares()
    costs = results.costs[versions.rate] = Costs()
    flats = [versions.words(index).view(numpy.uint8) for index in range(len(versions.paths))]
    into = memoryview(bytearray(CHUNK_BYTES))
    for old, new in pairwise(flats):
        sums = Costs([0.0], [0.0], [0.0])
        for start in range(0, new.nbytes, CHUNK_BYTES):
            base, chunk = (bytearray(flat[start : start + CHUNK_BYTES]) for flat in (old, new))
            target, made = into[: len(chunk)], list[bytes | None]()
            sums.encode[0] += _cpu_s(lambda base=base, chunk=chunk, made=made: made.append(_encode(base, chunk)))  # type: ignore[misc]
            sums.digest[0] += _cpu_s(lambda chunk=chunk: digest(memoryview(chunk)))  # type: ignore[misc]
            if (frame := made[0]) is not None:
                sums.apply[0] += _cpu_s(
                    lambda frame=frame, base=base, target=target: delta.apply(frame, memoryview(base), target)  # type: ignore[misc]
                )
                if target != chunk:
                    raise RuntimeError(f"{versions.rate}: a delta of the chunk at {start} results in wrong bytes")
        for name in costs.__struct_fields__:
            getattr(costs, name).append(getattr(sums, name)[0] * GIB / new.nbytes)


def _encode(base: bytearray, chunk: bytearray) -> bytes | None:
    gaps = delta.changed_words(base, chunk)
    return None if gaps is None else delta.encode(gaps, chunk)


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def report(results: Loopback) -> dict[str, object]:
    """Print tables; return the results for the JSON object."""
    figures: dict[str, object] = {}
    rows = []
    for rate, series in results.series.items():
        over = {arm: series.over_plain_time(arm) for arm in ARMS}
        for arm in ARMS:
            later = [one for made in series.later(arm) for one in made]
            publish = statistics.median(each.publish_s for each in later)
            seconds = statistics.mean(each.seconds for each in later)
            rows.append(
                [
                    f"{rate} {arm}",
                    f"{series.share(arm, results.nbytes):.4f}",
                    f"{seconds:.3f}",
                    f"{statistics.median(over[arm]):.3f}",
                    f"{min(over[arm]):.3f} to {max(over[arm]):.3f}",
                    f"{series.cpu_s(arm):.2f}",
                    f"{publish:.3f}",
                ]
            )
        name = rate.replace("-", "")
        figures[f"bytes_share_{name}"] = round(series.share("delta", results.nbytes), 4)
        figures[f"bytes_share_{name}_auto"] = round(series.share("auto", results.nbytes), 4)
        figures[f"over_plain_time_{name}"] = spread(over["auto"])
        figures[f"over_plain_time_{name}_delta"] = spread(over["delta"])
        figures[f"publish_over_plain_{name}"] = round(_publish_s(series, "delta") / _publish_s(series, "plain"), 3)
    if rows:
        print(f"loopback: versions of {results.nbytes / 2**20:.0f} MiB, one receiver; means of versions 2 to 10")
        print_table(
            ["", "bytes, share", "pull s", "over plain", "range over rounds", "CPU s", "publish s (median)"], rows
        )
        medians = {rate: statistics.median(series.over_plain_time("auto")) for rate, series in results.series.items()}
        worst = max(medians, key=lambda rate: medians[rate])
        figures["worst_over_plain_time"] = round(medians[worst], 4)
        figures["worst_over_plain_time_range"] = spread(results.series[worst].over_plain_time("auto"))["range"]
        publishing = [_publish_s(series, "delta") / _publish_s(series, "plain") for series in results.series.values()]
        figures["publish_over_plain"] = round(max(publishing), 3)
        figures["fallbacks"] = sum(series.fallbacks for series in results.series.values())
    return figures | _report_costs(results)


def _publish_s(series: Series, arm: str) -> float:
    return statistics.median(one.publish_s for made in series.later(arm) for one in made)


def _report_costs(results: Loopback) -> dict[str, object]:
    figures: dict[str, object] = {}
    rows = [
        [
            rate,
            *(f"{statistics.mean(each):.2f}" for each in (costs.encode, costs.apply, costs.digest)),
            f"{min(results.changed[rate]):.4f} to {max(results.changed[rate]):.4f}",
        ]
        for rate, costs in results.costs.items()
    ]
    if rows:
        print("updates: CPU seconds of one thread per GiB of a version, and words that changed; versions 2 to 10")
        print_table(["learning rate", "encode", "apply", "digest", "changed"], rows)
    sparse = [costs for rate, costs in results.costs.items() if rate in MAX_SHARES]
    if sparse:
        for name in Costs.__struct_fields__:
            figures[f"{name}_core_s_per_gib"] = round(max(statistics.mean(getattr(each, name)) for each in sparse), 3)
    figures |= {
        f"changed_share_{rate.replace('-', '')}": spread(shares)["median"] for rate, shares in results.changed.items()
    }
    return figures
