"""Compares a weight version's transfer on one machine (without a NIC) with a broadcast and a memcpy of the same bytes.

The measured time begins when the receivers get the message about a published version (gloo: the command to broadcast),
and ends when the last receiver has verified the last byte. The source has published the version before this time: it
copied the tensors into one buffer, and computed the digests in parallel. Only the arms ``publish + pull`` include the
publishing.

gloo verifies nothing. ``gloo`` is the broadcast alone. In the other two arms of gloo, the receivers also compute the
digests that a user would need for a verification, in as many threads as rrl. In ``gloo, digests after`` they do so when
all bytes have arrived, in ``gloo, digests beside`` while later pieces arrive, as rrl does. rrl is compared with the
faster of these two arms, which do not include the digests at the source: rrl computes those when it publishes.

All connections exist before the measured time begins. A receiver of rrl writes to memory that it already had, as in
every version after the second. gloo's buffer has also been written before the measured time. After the measurement,
every byte is compared with what was sent.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from msgspec import Struct, field

from rrl.benchmarks._load import QUIET_TIMEOUT_S, cpu_seconds, wait_until_quiet
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_gloo import BroadcastDone, Gloo
from rrl.core.types import Version
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import Member, Nursery
from rrl.tests.support.weights.source import content
from rrl.transport.weights.store import fresh_memory

RECEIVERS = (1, 2, 4)
LAYOUTS = {"flat": 1, "400 tensors": 400}
KINDS = ("ucx", "tcp")
GLOO, AFTER, BESIDE = "gloo", "gloo, digests after", "gloo, digests beside"
MAX_OVER_GLOO = 1.1
"""Bar: with one receiver, rrl's time may be this many times the time of gloo with digests."""

Case = tuple[int, str]
"""Number of receivers, and layout of the tensors."""


class Loopback(Struct):
    """Measurements in seconds, by arm and case, with one entry per round."""

    seconds: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU time of the source and all receivers together."""
    other_cores: list[float] = field(default_factory=list)
    """Cores that other processes used before each measurement."""
    wrong_copies: int = 0

    def median(self, arm: str, case: Case) -> float:
        return statistics.median(self.seconds[arm, case])


def with_publishing(kind: str) -> str:
    """Return the name of the arm that includes the time to publish the version."""
    return f"{kind}, publish + pull"


class Run(Struct, frozen=True):
    seconds: float
    """Seconds from the message about the version to the last commit."""
    cpu: float
    """CPU time in seconds of the source and all receivers together."""
    publish: float
    """Seconds to publish the version."""
    other_cores: float
    wrong_copies: int


class WeightPlane:
    """One source and its receivers, which use one kind of weight transport."""

    def __init__(self, source: Member, receivers: list[Member]) -> None:
        self._source, self._receivers = source, receivers
        self._step = 0

    @classmethod
    @asynccontextmanager
    async def started(cls, kind: str, nbytes: int) -> AsyncIterator[WeightPlane]:
        nursery = await asyncio.to_thread(Nursery, kind)
        try:
            names = ["trainer/0", *(f"rollout/{i}" for i in range(max(RECEIVERS)))]
            source, *receivers = [await Member.start(nursery, name, nbytes) for name in names]
            yield cls(source, receivers)
        finally:
            nursery.close()

    async def run(self, count: int, tensors: int, quiet_timeout_s: float) -> Run:
        """Publish a version, transfer it to the first ``count`` receivers, and return what was measured."""
        self._step += 1
        version = Version(self._step, 1)
        published = await self._source.request(say.Publish(version, tensors), say.Published)
        chosen = self._receivers[:count]
        other_cores = await wait_until_quiet(quiet_timeout_s)
        peers = say.Peers(version, (self._source.source, *(each.source for each in chosen)))
        before, began = self._cpu(), time.monotonic()
        for receiver in chosen:
            receiver.send(peers)
        committed = [await receiver.committed(version) for receiver in chosen]
        cpu = self._cpu() - before
        checked = await asyncio.gather(*(receiver.request(say.Check(), say.Checked) for receiver in chosen))
        wrong = sum(not each.is_correct or each.version != version for each in checked)
        return Run(max(each.at for each in committed) - began, cpu, published.seconds, other_cores, wrong)

    def _cpu(self) -> float:
        return cpu_seconds(each.pid for each in (self._source, *self._receivers))

    async def forget(self, memory: bool) -> None:
        for member in (self._source, *self._receivers):
            await member.request(say.Forget(memory), say.Forgot)


async def measure(nbytes: int, repeats: int) -> Loopback:
    """Measure all arms in turn in each round of each case. This takes six times ``nbytes`` of memory."""
    results = Loopback()
    gloo = await Gloo.start([()] * (max(RECEIVERS) + 1), "127.0.0.1", "lo")
    try:
        async with WeightPlane.started("ucx", nbytes) as ucx, WeightPlane.started("tcp", nbytes) as tcp:
            planes = {"ucx": ucx, "tcp": tcp}
            for repeat in range(repeats):
                for receivers in RECEIVERS:
                    for layout in LAYOUTS:
                        case = (receivers, layout)
                        for kind, plane in planes.items():
                            await _measure_plane(results, kind, plane, case)
                        await _measure_gloo(results, gloo, nbytes, case, repeat)
                results.seconds["memcpy", (1, "flat")].append(await asyncio.to_thread(_memcpy, nbytes))
    finally:
        await gloo.close()
    return results


async def _measure_plane(results: Loopback, kind: str, plane: WeightPlane, case: Case) -> None:
    receivers, layout = case
    await plane.run(receivers, LAYOUTS[layout], 0.0)  # creates connections, paces and memory
    await plane.forget(memory=False)
    run = await plane.run(receivers, LAYOUTS[layout], QUIET_TIMEOUT_S)
    await plane.forget(memory=True)
    results.seconds[kind, case].append(run.seconds)
    results.seconds[with_publishing(kind), case].append(run.publish + run.seconds)
    results.cpu[kind, case].append(run.cpu)
    results.other_cores.append(run.other_cores)
    results.wrong_copies += run.wrong_copies


async def _measure_gloo(results: Loopback, gloo: Gloo, nbytes: int, case: Case, repeat: int) -> None:
    receivers, layout = case
    for arm, beside in ((AFTER, False), (BESIDE, True)):
        await gloo.fill(Version(repeat, 1), nbytes, LAYOUTS[layout], receivers)
        results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
        before = cpu_seconds(gloo.pids)
        began, reports = await gloo.broadcast(receivers, beside=beside)
        cpu = cpu_seconds(gloo.pids) - before
        finished = [each for each in reports if isinstance(each, BroadcastDone) and each.is_correct]
        if len(finished) != receivers:
            raise RuntimeError(f"gloo failed although no fault was injected: {reports}")
        received = max(each.received for each in finished) - began
        results.cpu[arm, case].append(cpu - sum(each.check_cpu_s for each in finished))
        if beside:
            verified = max(each.received + each.digest_s for each in finished) - began
        else:
            results.seconds[GLOO, case].append(received)
            verified = received + max(each.digest_s for each in finished)
        results.seconds[arm, case].append(verified)
    await gloo.fill(Version(repeat, 1), 64, 1, max(RECEIVERS))  # gives up the memory


def _memcpy(nbytes: int) -> float:
    source, target = content(nbytes), fresh_memory(nbytes)
    target[:] = source
    began = time.monotonic()
    target[:] = source
    return time.monotonic() - began


def report(results: Loopback) -> dict[str, object]:
    """Print a table; return the results for the JSON object."""
    cases = [(receivers, layout) for layout in LAYOUTS for receivers in RECEIVERS]
    arms = [*KINDS, *map(with_publishing, KINDS), GLOO, AFTER, BESIDE]
    rows = [[arm, *(f"{results.median(arm, case):.3f}" for case in cases)] for arm in arms]
    for arm in (*KINDS, AFTER, BESIDE):
        rows.append([f"{arm}: CPU", *(f"{statistics.median(results.cpu[arm, case]):.3f}" for case in cases)])
    rows.append(["memcpy", f"{results.median('memcpy', (1, 'flat')):.3f}", *("" for _ in cases[1:])])
    print("loopback, medians: s until the last receiver has verified all bytes, and CPU s of all processes")
    print_table(["arm", *(f"{layout}, {receivers} rec." for receivers, layout in cases)], rows)
    verified = partial(_faster_verified, results)
    ratios = {
        "ours_over_gloo_1": _highest_ratio(results, KINDS, 1, verified),
        "ours_over_raw_gloo_1": _highest_ratio(results, KINDS, 1, _raw),
        "published_over_gloo_1": _highest_ratio(results, [*map(with_publishing, KINDS)], 1, verified),
        "published_over_raw_gloo_1": _highest_ratio(results, [*map(with_publishing, KINDS)], 1, _raw),
    } | {
        f"{kind}_over_gloo_{receivers}": _highest_ratio(results, [kind], receivers, verified)
        for kind in KINDS
        for receivers in RECEIVERS
    }
    cpu = [
        statistics.median(results.cpu[kind, case]) / statistics.median(results.cpu[verified(case), case])
        for kind in KINDS
        for case in cases
        if case[0] == 1
    ]
    value, by_round = ratios["ours_over_gloo_1"]
    print(
        f"one receiver: {value:.2f} times as long as gloo with digests in as many threads ({by_round[0]:.2f} to "
        f"{by_round[1]:.2f} in {len(results.seconds[GLOO, cases[0]])} rounds); bar: {MAX_OVER_GLOO}"
    )
    return {
        **{name: round(value, 3) for name, (value, _) in ratios.items()},
        "ours_over_gloo_1_cpu": round(max(cpu), 3),
        "loopback_ranges": {name: [round(each, 3) for each in by_round] for name, (_, by_round) in ratios.items()},
    }


def _raw(_: Case) -> str:
    """Return the arm ``gloo``, a broadcast without digests."""
    return GLOO


def _faster_verified(results: Loopback, case: Case) -> str:
    """Return the faster one of gloo's two arms whose receivers compute digests."""
    return min((AFTER, BESIDE), key=lambda arm: results.median(arm, case))


def _highest_ratio(
    results: Loopback, arms: Sequence[str], receivers: int, baseline: Callable[[Case], str]
) -> tuple[float, list[float]]:
    """Return the highest ratio of an arm's median to the median of its baseline, over all arms and layouts.

    The second value is the range of this ratio over the rounds: its lowest and its highest value.
    """
    found = []
    for arm in arms:
        for case in [(receivers, layout) for layout in LAYOUTS]:
            under = baseline(case)
            by_round = [
                ours / theirs
                for ours, theirs in zip(results.seconds[arm, case], results.seconds[under, case], strict=True)
            ]
            found.append((results.median(arm, case) / results.median(under, case), [min(by_round), max(by_round)]))
    return max(found)
