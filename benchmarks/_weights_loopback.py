"""Compares a weight version's transfer on one machine with a plain broadcast and a memcpy of the same bytes; no NIC.

The clock runs from the moment when the receivers are told of a published version (gloo: are told to broadcast) until
the last receiver has verified the last byte. Publishing is not included, and is shown in a column of its own. For rrl,
publishing is a copy into one buffer, in parallel with digests; for gloo, the digests that a user would need to verify
the broadcast. All connections exist before the clock starts. A receiver of rrl writes to memory that it already had, as
in every version after the second; gloo's buffer is touched before the clock starts. After the clock has stopped, every
byte is compared with what was sent.
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
"""Number of receivers, and layout."""


class Loopback(Struct):
    """Measurements in seconds, by arm and case, with one entry per round."""

    seconds: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    publish: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU time of the source and all receivers together."""
    other_cores: list[float] = field(default_factory=list)
    """Cores that other processes used before each measurement."""
    wrong_copies: int = 0

    def median(self, arm: str, case: Case) -> float:
        return statistics.median(self.seconds[arm, case])


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
        """Publish a version, transfer it to the first ``count`` receivers, and return the measurements."""
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
    """Measure all arms one after the other in every round, case by case. Needs six times ``nbytes`` of memory."""
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
    """Print a table; return the results for the JSON object."""
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
