"""Measures the weight transports against their bars, in four parts, each of which can be run alone.

``loopback`` (:mod:`_weights_loopback`): 1 GiB to 1, 2 and 4 receivers on one machine, over ucx and tcp, compared with a
broadcast of torch.distributed's gloo with the same digests.
``namespaces`` (:mod:`_weights_namespaces`; root): 256 MiB between five nodes with NICs of 2 Gbit/s, to four receivers
along a chain, as a star, with one receiver killed and one stopped in the middle, and with gloo in the same situation.
``rejoin`` (:mod:`_weights_rejoin`): connections, a restarted rollout, a restarted trainer.
``faults`` (:mod:`rrl.tests.support.weights.torture`): hundreds of kills, freezes and restarts during transfers.

Arms are interleaved within each round. Receivers compare every byte after the clock has stopped. Ratios are ratios of
medians. Prints tables, and one JSON object as its last line; values of parts that were not run, or cannot be run on
this machine, are null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics

from rrl.benchmarks import _weights_loopback, _weights_namespaces, _weights_rejoin
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.tests.support.weights.torture import Tally, torture

PARTS = ("loopback", "namespaces", "rejoin", "faults")
KEYS = ("ours_over_gloo_1", "chain_over_ideal", "source_free_over_copy", "killed_over_clean", "connect_p50_ms",
        "rejoin_rollout_ms", "rejoin_trainer_ms", "wrong_commits")  # fmt: skip
REPEATS = {"loopback": 3, "namespaces": 5, "rejoin": 50}
DEFAULT_FAULTS = 500
GIB, MIB = 2**30, 2**20


async def _loopback(mib: int, repeats: int) -> tuple[dict[str, object], int, list[float]]:
    results = await _weights_loopback.measure(mib * MIB, repeats)
    return _weights_loopback.report(results), results.wrong_copies, results.other_cores


async def _namespaces(kind: str, mib: int, repeats: int) -> tuple[dict[str, object], int, list[float]]:
    if (unavailable := _weights_namespaces.unavailable_reason()) is not None:
        print(f"namespaces: not here: {unavailable}")
        return {}, 0, []
    results = await _weights_namespaces.measure(kind, mib * MIB, repeats)
    return _weights_namespaces.report(results), results.wrong_copies, results.other_cores


async def _rejoin(mib: int, repeats: int) -> tuple[dict[str, object], int, list[float]]:
    results = await _weights_rejoin.measure(mib * MIB, repeats)
    return _weights_rejoin.report(results), results.wrong_copies, results.other_cores


async def _faults(faults: int, seed: int) -> tuple[dict[str, object], int, list[float]]:
    tallies: dict[str, Tally] = {}
    for kind in ("ucx", "tcp"):
        tallies[kind] = await torture(kind, faults // 2, seed)
    rows = []
    for kind, tally in tallies.items():
        grown = tally.growth()
        counts = (tally.faults.total(), tally.versions, tally.commits, len(tally.wrong), len(tally.failed))
        rows.append([kind, *map(str, counts), f"{grown.anonymous / MIB:.1f}", str(grown.descriptors),
                     str(grown.threads)])  # fmt: skip
    print("faults: growth from the earlier to the later half, of the worse of a receiver and the publisher that lived")
    print_table(["pipe", "faults", "versions", "commits", "wrong", "given up", "MiB more", "descriptors more",
                 "threads more"], rows)  # fmt: skip
    return {"faults": sum(t.faults.total() for t in tallies.values())}, sum(len(t.wrong) for t in tallies.values()), []


async def _run_parts(options: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = dict.fromkeys(KEYS)
    wrong, others, ran = 0, [], 0
    for part in options.part or PARTS:
        repeats = options.repeats or REPEATS.get(part, 0)
        if part == "loopback":
            keys, bad, busy = await _loopback(options.mib or GIB // MIB, repeats)
        elif part == "namespaces":
            keys, bad, busy = await _namespaces(options.kind, options.mib or 256, repeats)
        elif part == "rejoin":
            keys, bad, busy = await _rejoin(options.mib or 256, repeats)
        else:
            keys, bad, busy = await _faults(options.faults, options.seed)
        ran += bool(keys)
        result |= keys
        wrong += bad
        others += busy
        load = f"load {os.getloadavg()[0]:.1f}" + (f", others used {statistics.median(busy):.2f} cores" if busy else "")
        print(f"{part}: {os.cpu_count()} cores, {load}\n", flush=True)
    if ran:
        result["wrong_commits"] = wrong
    if others:
        result["others_cores"] = round(statistics.median(others), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run this one; may be said again")
    parser.add_argument("--repeats", type=int, help="rounds; by default " + str(REPEATS))
    parser.add_argument("--mib", type=int, help="size of a version; by default 1024, over NICs and to rejoin 256")
    parser.add_argument("--kind", choices=("ucx", "tcp"), default="ucx", help="the pipe in the namespaces")
    parser.add_argument("--faults", type=int, default=DEFAULT_FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    only_tcp = options.part == ["namespaces"] and options.kind == "tcp"
    check_requirements("weights", without=(Need.UCX,) if only_tcp else ())
    print(json.dumps(asyncio.run(_run_parts(options))))


if __name__ == "__main__":
    main()
