"""Measures what deltas save when versions of real weights are transferred, in four parts that can be run alone.

The versions (:mod:`_delta_updates`) are those of SmolLM2-135M-Instruct after ten steps of rrl's own learner, with each
of the learning rates 1e-6, 1e-5 and 1e-3, in bfloat16. ``updates``: the share of words that change, and the CPU time of
the pure functions that make and apply deltas. ``loopback`` (:mod:`_delta_loopback`): the bytes that a receiver gets,
and the time over that of whole chunks where no NIC limits it, which is the worst case. ``namespaces``
(:mod:`_delta_namespaces`, as root): the speedup between nodes with NICs of 1 Gbit/s, and of 200 Mbit/s with 50 ms.
``faults`` (:mod:`rrl.tests.support.weights.torture`): kills, freezes and restarts until 500 versions were published,
half of them over each of ucx and tcp; every receiver compares every byte.

``bytes_share_...`` is the share of a version's bytes that a receiver gets with ``[transport] delta = true``: the size
of the form. With ``auto``, a receiver requests whole chunks where they are faster, such as over loopback
(``..._auto``). The headline is ``speedup_1gbit_1e6``.

Arms take turns in each version. Means are those of versions 2 to 10. Prints tables, and one JSON object as its last
line (benchmarks/_provenance.py). Values of parts that were not run, or cannot be run on this machine, are null. Needs
3 GB of $TMPDIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Collection
from pathlib import Path

from msgspec import to_builtins

from rrl.benchmarks import _delta_loopback, _delta_namespaces
from rrl.benchmarks._delta_updates import RATES, make_versions
from rrl.benchmarks._provenance import provenance, raw_samples, spread
from rrl.benchmarks._requirements import Need, check_requirements
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_namespaces import unavailable_reason
from rrl.tests.support.weights.torture import Tally, torture

PARTS = ("updates", "loopback", "namespaces", "faults")
KEYS = (
    "bytes_share_1e6",
    "bytes_share_1e5",
    "bytes_share_1e3",
    "worst_over_plain_time",
    "encode_core_s_per_gib",
    "apply_core_s_per_gib",
    "publish_over_plain",
    "speedup_1gbit_1e6",
    "speedup_200mbit_1e6",
    "wrong_commits",
)
ROUNDS = 3
VERSIONS = 500
"""Number of versions that part ``faults`` publishes."""
_FAULTS = 50
"""Faults of one torture: a multiple of its kinds of faults."""
_SLOW_NIC_RATE = "1e-6"


async def _transfers(
    parts: Collection[str], folder: Path, keep: bool, rounds: int
) -> tuple[_delta_loopback.Loopback, _delta_namespaces.Nics | None]:
    """Run the parts that need versions, one learning rate after the other, because ten versions take 2.7 GB."""
    loopback, nics = _delta_loopback.Loopback(), None
    for rate in RATES if {"updates", "loopback"} & set(parts) else (_SLOW_NIC_RATE,):
        versions = await asyncio.to_thread(make_versions, folder / rate, rate)
        if "updates" in parts:
            _delta_loopback.measure_costs(loopback, versions)
        if "loopback" in parts:
            await _delta_loopback.measure(loopback, versions, rounds)
        if "namespaces" in parts and rate == _SLOW_NIC_RATE:
            if (reason := unavailable_reason()) is None:
                nics = await _delta_namespaces.measure(versions)
            else:
                print(f"namespaces: left out on this machine: {reason}")
        if not keep:
            for path in versions.paths:
                path.unlink()
    return loopback, nics


async def _faults(versions: int, seed: int) -> dict[str, list[Tally]]:
    tallies: dict[str, list[Tally]] = {"ucx": [], "tcp": []}
    for kind, done in tallies.items():
        while sum(each.versions for each in done) < versions // len(tallies):
            done.append(await torture(kind, _FAULTS, seed + len(done)))
    header = ["transport", "faults", "versions", "commits", "of them as deltas", "fallbacks", "wrong"]
    rows = [
        [kind, *(str(sum(counts)) for counts in zip(*map(_counts, done), strict=True))]
        for kind, done in tallies.items()
    ]
    print("faults: every byte of every commit was compared")
    print_table(header, rows)
    return tallies


def _counts(tally: Tally) -> tuple[int, ...]:
    return (tally.faults.total(), tally.versions, tally.commits, tally.deltas, tally.fallbacks, len(tally.wrong))


async def _run_parts(options: argparse.Namespace) -> dict[str, object]:
    parts = options.part or PARTS
    figures: dict[str, object] = dict.fromkeys(KEYS)
    samples: dict[str, object] = {}
    wrong, other_cores = 0, list[float]()
    if set(parts) - {"faults"}:
        with tempfile.TemporaryDirectory(prefix="rrl-delta-") as scratch:
            folder = options.keep or Path(scratch)
            loopback, nics = await _transfers(parts, folder, options.keep is not None, options.rounds)
        figures |= _delta_loopback.report(loopback)
        samples["loopback"] = to_builtins(loopback)
        wrong += sum(series.wrong_copies for series in loopback.series.values())
        other_cores += loopback.other_cores
        if nics is not None:
            figures |= _delta_namespaces.report(nics)
            samples["namespaces"] = to_builtins(nics)
            wrong += sum(series.wrong_copies for series in nics.series.values())
            other_cores += nics.other_cores
    if "faults" in parts:
        tallies = await _faults(options.versions, options.seed)
        every = [tally for done in tallies.values() for tally in done]
        wrong += sum(len(each.wrong) for each in every)
        figures |= {
            "versions_under_faults": sum(each.versions for each in every),
            "faults": sum(each.faults.total() for each in every),
            "commits": sum(each.commits for each in every),
            "commits_as_deltas": sum(each.deltas for each in every),
            "fallbacks_under_faults": sum(each.fallbacks for each in every),
        }
        samples["faults"] = to_builtins(tallies)
    figures["wrong_commits"] = wrong
    if other_cores:
        figures["others_cores"] = spread(other_cores)
    return figures | provenance() | {"raw": str(raw_samples("delta", samples))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds over loopback (default: {ROUNDS})")
    parser.add_argument("--versions", type=int, default=VERSIONS, help="number of versions of the part faults")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the real versions in FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parts = set(options.part or PARTS)
    unneeded = {Need.UCX} if "faults" not in parts else set()
    check_requirements("delta", without=unneeded | ({Need.TORCH, Need.SMOLLM2} if parts == {"faults"} else set()))
    print(json.dumps(asyncio.run(_run_parts(options))))


if __name__ == "__main__":
    main()
