"""Measures the weight transports against their bars, in four parts, each of which can be run alone.

``loopback`` (:mod:`_weights_loopback`): 1 GiB to 1, 2 and 4 receivers on one machine, over ucx and tcp. The transfer is
compared with a broadcast by torch.distributed's gloo, without digests and with digests in as many threads as in rrl.
``namespaces`` (:mod:`_weights_namespaces`, as root): 256 MiB to four receivers, between five nodes with NICs of 0.5
Gbit/s. The arms are a chain, a star, a chain of which one receiver is killed and one is stopped, and gloo with such a
fault. ``rejoin`` (:mod:`_weights_rejoin`): the time to connect, and the time until a restarted rollout or trainer takes
part. ``faults`` (:mod:`rrl.tests.support.weights.torture`): hundreds of kills, freezes and restarts during transfers.

Arms are interleaved within each round. Receivers compare every byte after the clock has stopped. Ratios are ratios of
medians; their ranges are taken over the rounds. Prints tables, and one JSON object as its last line
(benchmarks/_provenance.py). Values of parts that were not run, or cannot be run on this machine, are null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics

from msgspec import Struct, field

from rrl.benchmarks import _weights_loopback, _weights_namespaces, _weights_rejoin
from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_loopback import Loopback
from rrl.benchmarks._weights_namespaces import Nics
from rrl.benchmarks._weights_rejoin import Rejoin
from rrl.tests.support.weights.torture import Tally, torture

PARTS = ("loopback", "namespaces", "rejoin", "faults")
KEYS = (
    "ours_over_gloo_1",
    "ours_over_raw_gloo_1",
    "published_over_gloo_1",
    "chain_over_ideal",
    "source_free_over_copy",
    "killed_over_clean",
    "connect_p50_ms",
    "rejoin_rollout_ms",
    "rejoin_trainer_ms",
    "wrong_commits",
)
REPEATS = {"loopback": 3, "namespaces": 5, "rejoin": 50}
DEFAULT_FAULTS = 500
GIB, MIB = 2**30, 2**20


class PartResult(Struct, frozen=True):
    """The results of one part."""

    figures: dict[str, object]
    """Values for the JSON object; empty if this machine cannot run the part."""
    wrong_copies: int = 0
    other_cores: list[float] = field(default_factory=list)
    """Cores that other processes used before each measurement."""
    samples: object = None
    """The single measurements, as JSON values."""


async def _loopback(mib: int, repeats: int) -> PartResult:
    results = await _weights_loopback.measure(mib * MIB, repeats)
    return _of(results, _weights_loopback.report(results))


async def _namespaces(kind: str, mib: int, repeats: int) -> PartResult:
    if (unavailable := _weights_namespaces.unavailable_reason()) is not None:
        print(f"namespaces: left out on this machine: {unavailable}")
        return PartResult({})
    results = await _weights_namespaces.measure(kind, mib * MIB, repeats)
    return _of(results, _weights_namespaces.report(results))


async def _rejoin(mib: int, repeats: int) -> PartResult:
    results = await _weights_rejoin.measure(mib * MIB, repeats)
    return _of(results, _weights_rejoin.report(results))


def _of(results: Loopback | Nics | Rejoin, figures: dict[str, object]) -> PartResult:
    samples = {name: _with_text_keys(getattr(results, name)) for name in results.__struct_fields__}
    return PartResult(figures, results.wrong_copies, results.other_cores, samples)


def _with_text_keys(value: object) -> object:
    """Return a value whose dicts have keys that JSON permits: a tuple becomes its elements, joined by commas."""
    if not isinstance(value, dict):
        return value
    return {_text(key): _with_text_keys(each) for key, each in value.items()}


def _text(key: object) -> str:
    return ", ".join(map(_text, key)) if isinstance(key, tuple) else str(key)


async def _faults(faults: int, seed: int) -> PartResult:
    tallies: dict[str, Tally] = {}
    for kind in ("ucx", "tcp"):
        tallies[kind] = await torture(kind, faults // 2, seed)
    header = [
        "pipe",
        "faults",
        "versions",
        "commits",
        "wrong",
        "given up",
        "MiB more",
        "descriptors more",
        "threads more",
    ]
    rows = []
    for kind, tally in tallies.items():
        grown = tally.growth()
        counts = (tally.faults.total(), tally.versions, tally.commits, len(tally.wrong), len(tally.failed))
        rows.append(
            [kind, *map(str, counts), f"{grown.anonymous / MIB:.1f}", str(grown.descriptors), str(grown.threads)]
        )
    print("faults: growth from the earlier to the later half, in the receiver or publisher that grew more")
    print_table(header, rows)
    figures: dict[str, object] = {"faults": sum(t.faults.total() for t in tallies.values())}
    samples = [dict(zip(header, row, strict=True)) for row in rows]
    return PartResult(figures, sum(len(t.wrong) for t in tallies.values()), [], samples)


async def _run_parts(options: argparse.Namespace) -> dict[str, object]:
    figures: dict[str, object] = dict.fromkeys(KEYS)
    results: dict[str, PartResult] = {}
    for part in options.part or PARTS:
        repeats = options.repeats or REPEATS.get(part, 0)
        if part == "loopback":
            result = await _loopback(options.mib or GIB // MIB, repeats)
        elif part == "namespaces":
            result = await _namespaces(options.kind, options.mib or 256, repeats)
        elif part == "rejoin":
            result = await _rejoin(options.mib or 256, repeats)
        else:
            result = await _faults(options.faults, options.seed)
        results[part] = result
        figures |= result.figures
        busy = result.other_cores
        load = f"load {os.getloadavg()[0]:.1f}" + (f", others used {statistics.median(busy):.2f} cores" if busy else "")
        print(f"{part}: {os.cpu_count()} cores, {load}\n", flush=True)
    if any(result.figures for result in results.values()):
        figures["wrong_commits"] = sum(result.wrong_copies for result in results.values())
    if others := [cores for result in results.values() for cores in result.other_cores]:
        figures["others_cores"] = spread(others)
    raw = raw_samples("weights", {part: result.samples for part, result in results.items()})
    return figures | provenance() | {"raw": str(raw)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--repeats", type=int, help="number of rounds; by default " + str(REPEATS))
    parser.add_argument("--mib", type=int, help="MiB of a version; default: 1024, in namespaces and rejoin 256")
    parser.add_argument("--kind", choices=("ucx", "tcp"), default="ucx", help="the weight transport in the namespaces")
    parser.add_argument("--faults", type=int, default=DEFAULT_FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    only_tcp = options.part == ["namespaces"] and options.kind == "tcp"
    check_requirements("weights", without=(Need.UCX,) if only_tcp else ())
    print(json.dumps(asyncio.run(_run_parts(options))))


if __name__ == "__main__":
    main()
