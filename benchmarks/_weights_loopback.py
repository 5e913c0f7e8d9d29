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

from rrl.benchmarks._load import PATIENCE, calm, cpu_seconds
from rrl.benchmarks._table import print_table
from rrl.benchmarks._weights_gloo import Gloo, Went
from rrl.core.types import Version
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import SOON, Member, Nursery
from rrl.tests.support.weights.source import content
from rrl.transport.weights.store import fresh_memory

RECEIVERS = (1, 2, 4)
LAYOUTS = {"flat": 1, "400 tensors": 400}
KINDS = ("ucx", "tcp")
BAR = 1.1

Case = tuple[int, str]
"""receivers, layout"""


class Loopback(Struct):
    """s by arm and case, one entry a round."""

    took: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    publish: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, Case], list[float]] = field(default_factory=lambda: defaultdict(list))
    """of source and receivers together"""
    others: list[float] = field(default_factory=list)
    """cores that others used before each measurement"""
    wrong: int = 0

    def median(self, arm: str, case: Case) -> float:
        return statistics.median(self.took[arm, case])


class Run(Struct, frozen=True):
    took: float
    """s from being told to the last commit"""
    cpu: float
    """s, of all together"""
    publish: float
    """s"""
    others: float
    wrong: int


class Ours:
    """One source and its receivers over one kind of pipe."""

    def __init__(self, source: Member, receivers: list[Member]) -> None:
        self._source, self._receivers = source, receivers
        self._step = 0

    @classmethod
    @asynccontextmanager
    async def started(cls, kind: str, nbytes: int) -> AsyncIterator[Ours]:
        nursery = await asyncio.to_thread(Nursery, kind)
        try:
            names = ["trainer/0", *(f"rollout/{i}" for i in range(max(RECEIVERS)))]
            source, *receivers = [await Member.start(nursery, name, nbytes) for name in names]
            yield cls(source, receivers)
        finally:
            nursery.close()

    async def run(self, count: int, tensors: int, patience: float) -> Run:
        """To the first ``count`` receivers."""
        self._step += 1
        version = Version(self._step, 1)
        published = await self._source.ask(say.Publish(version, tensors), say.Published)
        chosen = self._receivers[:count]
        others = await calm(patience)
        peers = say.Peers(version, (self._source.holder, *(each.holder for each in chosen)))
        before, began = self._cpu(), time.monotonic()
        for receiver in chosen:
            receiver.tell(peers)
        committed = [await receiver.committed(version) for receiver in chosen]
        cpu = self._cpu() - before
        checked = await asyncio.gather(*(receiver.ask(say.Check(), say.Checked) for receiver in chosen))
        wrong = sum(not each.right or each.version != version for each in checked)
        return Run(max(each.at for each in committed) - began, cpu, published.took, others, wrong)

    def _cpu(self) -> float:
        return cpu_seconds(each.pid for each in (self._source, *self._receivers))

    async def forget(self, memory: bool) -> None:
        for member in (self._source, *self._receivers):
            await member.ask(say.Forget(memory), say.Forgot)


async def measure(nbytes: int, repeats: int) -> Loopback:
    """Arms one after the other in every round, case by case. Needs six times ``nbytes`` at a time."""
    found = Loopback()
    gloo = await Gloo.start([()] * (max(RECEIVERS) + 1), "127.0.0.1", "lo")
    try:
        async with Ours.started("ucx", nbytes) as ucx, Ours.started("tcp", nbytes) as tcp:
            ours = {"ucx": ucx, "tcp": tcp}
            for repeat in range(repeats):
                for receivers in RECEIVERS:
                    for layout in LAYOUTS:
                        case = (receivers, layout)
                        for kind, plane in ours.items():
                            await _ours(found, kind, plane, case)
                        await _gloo(found, gloo, nbytes, case, repeat)
                found.took["memcpy", (1, "flat")].append(await asyncio.to_thread(_memcpy, nbytes))
    finally:
        await gloo.close()
    return found


async def _ours(found: Loopback, kind: str, plane: Ours, case: Case) -> None:
    receivers, layout = case
    await plane.run(receivers, LAYOUTS[layout], 0.0)  # connections, paces and memory are there after it
    await plane.forget(memory=False)
    run = await plane.run(receivers, LAYOUTS[layout], PATIENCE)
    await plane.forget(memory=True)
    found.took[kind, case].append(run.took)
    found.publish[kind, case].append(run.publish)
    found.cpu[kind, case].append(run.cpu)
    found.others.append(run.others)
    found.wrong += run.wrong


async def _gloo(found: Loopback, gloo: Gloo, nbytes: int, case: Case, repeat: int) -> None:
    receivers, layout = case
    await gloo.fill(Version(repeat, 1), nbytes, LAYOUTS[layout], receivers)
    found.others.append(await calm(PATIENCE))
    before = cpu_seconds(gloo.pids)
    began, said = await gloo.go(receivers, SOON)
    cpu = cpu_seconds(gloo.pids) - before
    went = [each for each in said if isinstance(each, Went) and each.right]
    if len(went) != receivers:
        raise RuntimeError(f"gloo broke without a fault: {said}")
    received = max(each.received for each in went) - began
    found.took["gloo", case].append(received)
    found.cpu["gloo + digest", case].append(cpu - sum(each.besides for each in went))
    found.took["gloo + digest", case].append(max(each.digested for each in went) - began)
    found.took["gloo + digest in threads", case].append(received + max(each.threads for each in went))
    await gloo.fill(Version(repeat, 1), 64, 1, max(RECEIVERS))  # gives up the memory


def _memcpy(nbytes: int) -> float:
    source, into = content(nbytes), fresh_memory(nbytes)
    into[:] = source
    began = time.monotonic()
    into[:] = source
    return time.monotonic() - began


def report(found: Loopback) -> dict[str, object]:
    """Prints a table; returns keys of the JSON object."""
    cases = [(receivers, layout) for layout in LAYOUTS for receivers in RECEIVERS]
    arms = [*KINDS, "gloo", "gloo + digest", "gloo + digest in threads"]
    rows = [[arm, *(f"{found.median(arm, case):.3f}" for case in cases)] for arm in arms]
    for arm in (*KINDS, "gloo + digest"):
        rows.append([f"{arm}: CPU", *(f"{statistics.median(found.cpu[arm, case]):.3f}" for case in cases)])
    for kind in KINDS:
        rows.append([f"{kind}: publishing", *(f"{statistics.median(found.publish[kind, case]):.3f}" for case in cases)])
    rows.append(["memcpy", f"{found.median('memcpy', (1, 'flat')):.3f}", *("" for _ in cases[1:])])
    print("loopback: s until the last receiver has verified all, and s of CPU of all processes meanwhile; medians")
    print_table(["arm", *(f"{layout}, {receivers} rec." for receivers, layout in cases)], rows)
    over = partial(_over, found)
    result: dict[str, object] = {
        f"{kind}_over_gloo_{receivers}": round(max(over(kind, (receivers, layout)) for layout in LAYOUTS), 3)
        for kind in KINDS for receivers in RECEIVERS
    }  # fmt: skip
    result["ours_over_gloo_1"] = max(float(str(result[f"{kind}_over_gloo_1"])) for kind in KINDS)
    result["ours_over_gloo_1_cpu"] = round(
        max(statistics.median(found.cpu[kind, (1, layout)]) / statistics.median(found.cpu["gloo + digest", (1, layout)])
            for kind in KINDS for layout in LAYOUTS), 3
    )  # fmt: skip
    result["ours_over_gloo_1_in_threads"] = round(
        max(over(kind, (1, layout), "gloo + digest in threads") for kind in KINDS for layout in LAYOUTS), 3
    )
    return result


def _over(found: Loopback, kind: str, case: Case, arm: str = "gloo + digest") -> float:
    return found.median(kind, case) / found.median(arm, case)
