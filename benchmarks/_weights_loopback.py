"""One machine, no NIC: what a version costs beside a plain broadcast of the same bytes, and beside a memcpy.

The clock runs from the moment when the receivers are told of a version that is published (gloo: that they are told to
broadcast) until the last receiver has verified the last byte. Publishing is not in it, neither ours (a copy into one
buffer and digests, side by side) nor what a user of gloo would do to have digests to compare with; it is shown beside
it. Connections exist before in both. A receiver of ours writes to memory that it had before, as in every version after
the second; gloo's buffer is touched before the clock starts. After the clock every byte is compared with what was sent.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from msgspec import Struct, field

from rrl.benchmarks._load import QUIET_TIMEOUT_S, cpu_seconds, wait_until_quiet
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_gloo import BroadcastDone, Gloo
from rrl.core.types import Version
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import TIMEOUT_S, Member, Nursery
from rrl.tests.support.weights.source import content
from rrl.transport.weights.store import fresh_memory

RECEIVERS = (1, 2, 4)
LAYOUTS = {"flat": 1, "400 tensors": 400}
KINDS = ("ucx", "tcp")
MAX_OVER_GLOO = 1.1

Case = tuple[int, str]
"""receivers, layout"""


class Loopback(Struct):
    """s by arm and case, one entry a round."""

    seconds: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    publish: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    """of source and receivers together"""
    other_cores: list[float] = field(default_factory=list)
    """cores that others used before each measurement"""
    wrong_copies: int = 0

    def median(self, arm: str, case: Case) -> float:
        return statistics.median(self.seconds[arm, case])


class Run(Struct, frozen=True):
    seconds: float
    """s from being told to the last commit"""
    cpu: float
    """s, of all together"""
    publish: float
    """s"""
    other_cores: float
    wrong_copies: int


class WeightPlane:
    """One source and its receivers over one kind of pipe."""

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
        """To the first ``count`` receivers."""
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
    """Arms one after the other in every round, case by case. Needs six times ``nbytes`` at a time."""
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
    await plane.run(receivers, LAYOUTS[layout], 0.0)  # connections, paces and memory are there after it
    await plane.forget(memory=False)
    run = await plane.run(receivers, LAYOUTS[layout], QUIET_TIMEOUT_S)
    await plane.forget(memory=True)
    results.seconds[kind, case].append(run.seconds)
    results.publish[kind, case].append(run.publish)
    results.cpu[kind, case].append(run.cpu)
    results.other_cores.append(run.other_cores)
    results.wrong_copies += run.wrong_copies


async def _measure_gloo(results: Loopback, gloo: Gloo, nbytes: int, case: Case, repeat: int) -> None:
    receivers, layout = case
    await gloo.fill(Version(repeat, 1), nbytes, LAYOUTS[layout], receivers)
    results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
    before = cpu_seconds(gloo.pids)
    began, reports = await gloo.broadcast(receivers, TIMEOUT_S)
    cpu = cpu_seconds(gloo.pids) - before
    finished = [each for each in reports if isinstance(each, BroadcastDone) and each.is_correct]
    if len(finished) != receivers:
        raise RuntimeError(f"gloo broke without a fault: {reports}")
    received = max(each.received for each in finished) - began
    results.seconds["gloo", case].append(received)
    results.cpu["gloo + digest", case].append(cpu - sum(each.other_cpu_s for each in finished))
    results.seconds["gloo + digest", case].append(max(each.digested for each in finished) - began)
    results.seconds["gloo + digest in threads", case].append(received + max(each.threaded_s for each in finished))
    await gloo.fill(Version(repeat, 1), 64, 1, max(RECEIVERS))  # gives up the memory


def _memcpy(nbytes: int) -> float:
    source, target = content(nbytes), fresh_memory(nbytes)
    target[:] = source
    began = time.monotonic()
    target[:] = source
    return time.monotonic() - began


def report(results: Loopback) -> dict[str, object]:
    """Prints a table; returns keys of the JSON object."""
    cases = [(receivers, layout) for layout in LAYOUTS for receivers in RECEIVERS]
    arms = [*KINDS, "gloo", "gloo + digest", "gloo + digest in threads"]
    rows = [[arm, *(f"{results.median(arm, case):.3f}" for case in cases)] for arm in arms]
    for arm in (*KINDS, "gloo + digest"):
        rows.append([f"{arm}: CPU", *(f"{statistics.median(results.cpu[arm, case]):.3f}" for case in cases)])
    for kind in KINDS:
        rows.append(
            [f"{kind}: publishing", *(f"{statistics.median(results.publish[kind, case]):.3f}" for case in cases)]
        )
    rows.append(["memcpy", f"{results.median('memcpy', (1, 'flat')):.3f}", *("" for _ in cases[1:])])
    print("loopback: s until the last receiver has verified all, and s of CPU of all processes meanwhile; medians")
    print_table(["arm", *(f"{layout}, {receivers} rec." for receivers, layout in cases)], rows)
    over = partial(_ratio, results)
    result: dict[str, object] = {
        f"{kind}_over_gloo_{receivers}": round(max(over(kind, (receivers, layout)) for layout in LAYOUTS), 3)
        for kind in KINDS for receivers in RECEIVERS
    }  # fmt: skip
    result["ours_over_gloo_1"] = max(float(str(result[f"{kind}_over_gloo_1"])) for kind in KINDS)
    result["ours_over_gloo_1_cpu"] = round(
        max(statistics.median(results.cpu[kind, (1, layout)]) / statistics.median(results.cpu["gloo + digest", (1,
        layout)])
            for kind in KINDS for layout in LAYOUTS), 3
    )  # fmt: skip
    result["ours_over_gloo_1_in_threads"] = round(
        max(over(kind, (1, layout), "gloo + digest in threads") for kind in KINDS for layout in LAYOUTS), 3
    )
    return result


def _ratio(results: Loopback, kind: str, case: Case, arm: str = "gloo + digest") -> float:
    return results.median(kind, case) / results.median(arm, case)
