"""Transfers versions from a publisher to receivers while these processes are killed, stopped and restarted at random.

Every receiver checks every byte of every version that it commits. The versions differ from each other as real weights
do (:mod:`.sparse`), and receivers request deltas. A restarted trainer goes on from a step up to three steps back, or
begins anew with other weights. One receiver is never killed, and the publisher is
killed only in the second half of the faults. So the growth of the memory of these two can be measured over many faults
of other members.

    python -m rrl.tests.support.weights.torture KIND FAULTS [SEED] prints the result
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from statistics import mean

from msgspec import Struct, field, structs

from rrl.core.types import TRAINER, Incarnation, Version, WeightTraffic
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import TIMEOUT_S, Member, Nursery
from rrl.tests.support.weights.sparse_content import LINE
from rrl.transport.weights.base import STARVATION_TIMEOUT_S
from rrl.transport.weights.nixl import INLINE_BYTES

RECEIVERS = 4
NBYTES = 6 * 2**20 + 4321
CHUNK_BYTES = {"tcp": 64 * 2**10, "ucx": 64 * 2**10, "nixl": 16 * INLINE_BYTES}
"""Bytes of a chunk; with nixl, chunks of this size are read from the source's memory."""
CHUNK_BY = 0.5
"""Deadline of a chunk (s), which is shorter than some freezes."""
WITNESS = "rollout/0"
"""Receiver that is never killed."""
_APART = (0.0, 0.15)
"""Range of the time (s) between two faults. The transfer of a version takes longer."""
_FROZEN = (0.02, 0.7)
"""Range of the duration of a freeze in s."""
_LONG_FREEZE_S = STARVATION_TIMEOUT_S + 1
"""Duration of a long freeze (s): longer than a receiver waits for a source that itself waits for chunks."""
_LONG_EVERY = 6
"""One of this many freezes is long."""
_NOTICED = (0.0, 0.2)
"""Range of the time (s) for which a dead member is still listed as a source, so that others send requests to it."""
_COLD_EVERY = 4
"""On average one of this many restarted trainers begins anew."""
_MAX_STEPS_BACK = 3
_DELTA_SHARE = 0.5
"""Share of a version's bytes of which a receiver gets less if most chunks arrive as deltas."""
_FAULT_KINDS = ("kill", "kill", "freeze", "freeze", "restart")
_CHECK_EVERY_FAULTS = 40
"""Number of faults between two measurements of the processes' resources, for which all processes are idle."""
_ROUNDS = 2
"""Number of versions that all members commit before a measurement, so that their permanent buffers are allocated."""


class Tally(Struct):
    faults: Counter[str] = field(default_factory=Counter)
    versions: int = 0
    commits: int = 0
    deltas: int = 0
    """Number of these commits for which the receiver got less than half of the bytes of the version."""
    fallbacks: int = 0
    """Number of deltas that did not result in the right bytes."""
    wrong: list[str] = field(default_factory=list)
    """Versions that were committed with wrong bytes."""
    failed: list[str] = field(default_factory=list)
    """Pulls that receivers gave up, which is allowed."""
    usage: dict[str, list[say.Usage]] = field(default_factory=lambda: {WITNESS: [], TRAINER: []})
    """Measurements of the members that are never killed, and of the publisher until it is killed."""

    def growth(self) -> say.Usage:
        """Return the largest growth of a member from the mean of its earlier to the mean of its later measurements.

        The means hide short peaks, and buffers that are allocated once.
        """
        halves = [(looks[: len(looks) // 2], looks[len(looks) // 2 :]) for looks in self.usage.values()]

        def more(of: Callable[[say.Usage], int]) -> int:
            return max(round(mean(map(of, late)) - mean(map(of, early))) for early, late in halves)

        return say.Usage(more(lambda u: u.anonymous), more(lambda u: u.descriptors), more(lambda u: u.threads), ())


class _Torture:
    def __init__(self, nursery: Nursery, faults: int, seed: int) -> None:
        self._nursery, self._faults = nursery, faults
        self._chunk_bytes = CHUNK_BYTES[nursery.kind]
        self._freezes = 0
        self._chance = random.Random(seed)
        self._names = [TRAINER, *(f"rollout/{i}" for i in range(RECEIVERS))]
        self._members: dict[str, Member] = {}
        self._published: set[Version] = set()
        self._newest: Version | None = None
        self._traffic: dict[Incarnation, WeightTraffic] = {}
        self._harming: dict[str, asyncio.Task[None]] = {}
        self._rest = asyncio.Lock()
        """A lock that is held during each publishing, and at times when no version may be published."""
        self.tally = Tally()

    async def run(self) -> Tally:
        for name in self._names:
            await self._start(name)
        flow = asyncio.create_task(self._flow())
        flow.add_done_callback(self._flowed)
        parts = max(4, self._faults // _CHECK_EVERY_FAULTS // 2 * 2)
        for part in range(parts):
            faults = self._faults * (part + 1) // parts - self._faults * part // parts
            spared = part < parts // 2
            await self._inject_faults(faults, [name for name in self._names if name != TRAINER or not spared])
            await self._check_idle([WITNESS, TRAINER] if spared else [WITNESS])
        flow.cancel()
        await asyncio.wait([flow])
        for member in self._members.values():
            await member.close()
        return self.tally

    # ── reports of a manager ───────────────────────────────────────────────────────────────────────────────────────
    async def _start(self, name: str) -> None:
        number = self._members[name].incarnation.number + 1 if name in self._members else 1
        if name == TRAINER and number > 1 and not self._chance.randrange(_COLD_EVERY):
            number = (number // LINE + 1) * LINE
        self._members[name] = await Member.start(
            self._nursery, name, NBYTES, number=number, check=True, chunk_by=CHUNK_BY, delta=True, on=self._on_report
        )
        self._announce()

    def _announce(self) -> None:
        named = tuple(self._members[name].source for name in self._names if name in self._members)
        for member in self._members.values():
            if member.incarnation.replica != TRAINER:
                member.send(say.Peers(self._newest, named))

    def _on_report(self, member: Member, report: say.Report) -> None:
        match report:
            case say.Committed():
                self.tally.commits += 1
                before = self._traffic.get(member.incarnation, WeightTraffic())
                self._traffic[member.incarnation] = report.traffic
                self.tally.deltas += report.traffic.received - before.received < _DELTA_SHARE * NBYTES
                self.tally.fallbacks += report.traffic.fallbacks - before.fallbacks
                if not report.is_correct or report.version not in self._published:
                    self.tally.wrong.append(f"{member.incarnation} committed {report}")
                if member is self._members.get(member.incarnation.replica):
                    self._announce()
            case say.Failed():
                self.tally.failed.append(f"{member.incarnation}: {report.why}")
            case _:
                pass

    async def _flow(self) -> None:
        """Publish one version after another, each as soon as the witness has the previous version."""
        while True:
            async with self._rest:
                await self._publish()
            newest = self._newest
            if newest is not None:
                with contextlib.suppress(TimeoutError):  # continues if the witness or its source is stopped
                    await self._members[WITNESS].committed(newest, by=self._chance.uniform(0.1, 2.0))
            await asyncio.sleep(0)

    async def _publish(self) -> None:
        trainer = self._members[TRAINER]
        version = Version(self._next_step(trainer.incarnation.number), trainer.incarnation.number)
        self._published.add(version)  # the trainer may be killed between the publishing and its report
        try:
            await trainer.request(say.Publish(version, 7, self._chunk_bytes), say.Published)
        except ConnectionError:
            await asyncio.sleep(0.01)
            return
        self.tally.versions += 1
        self._newest = version
        self._announce()

    def _next_step(self, incarnation: int) -> int:
        newest = self._newest
        if newest is None or incarnation // LINE != newest.incarnation // LINE:
            return 0
        back = 0 if incarnation == newest.incarnation else self._chance.randint(0, _MAX_STEPS_BACK)
        return max(0, newest.step + 1 - back)

    # ── fault ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _inject_faults(self, faults: int, names: list[str]) -> None:
        while faults:
            await asyncio.sleep(self._chance.uniform(*_APART))
            name, fault = self._chance.choice(names), self._chance.choice(_FAULT_KINDS)
            before = self._harming.get(name)
            if (before is not None and not before.done()) or (fault != "freeze" and name == WITNESS):
                continue
            if before is not None:
                before.result()
            faults -= 1
            self.tally.faults[f"{fault} {'source' if name == TRAINER else 'receiver'}"] += 1
            self._harming[name] = asyncio.create_task(getattr(self, f"_{fault}")(name, self._members[name]))

    async def _kill(self, name: str, member: Member) -> None:
        await member.close()
        await self._replace(name)

    async def _restart(self, name: str, member: Member) -> None:
        await member.leave()
        await member.close()
        await self._replace(name)

    async def _freeze(self, name: str, member: Member) -> None:
        self._freezes += 1
        long = self._freezes % _LONG_EVERY == 1  # the first freeze is long, so that a short run has one
        member.freeze()
        await asyncio.sleep(_LONG_FREEZE_S if long else self._chance.uniform(*_FROZEN))
        member.thaw()

    async def _replace(self, name: str) -> None:
        await asyncio.sleep(self._chance.uniform(*_NOTICED))
        await self._start(name)

    # ── resources of the living members ────────────────────────────────────────────────────────────────────────────
    async def _check_idle(self, names: list[str]) -> None:
        """Measure all processes when all of them run and have the newest version, and no transfer is in progress."""
        await asyncio.gather(*self._harming.values())
        async with self._rest:
            for _ in range(_ROUNDS):
                await self._publish()
                for name, member in self._members.items():
                    if name != TRAINER:
                        await self._brought(member)
            for name in names:
                self.tally.usage[name].append(await self._members[name].request(say.Measure(), say.Usage))

    async def _brought(self, member: Member) -> None:
        newest = self._newest
        assert newest is not None
        try:
            await member.committed(newest, TIMEOUT_S)
        except TimeoutError as error:
            reports = [f"{one.incarnation}: {one.reports[-1:]}" for one in self._members.values()]
            text = "\n".join([f"{member.incarnation} never got {newest} after {self.tally}", *reports])
            raise TimeoutError(text) from error

    def _flowed(self, flow: asyncio.Task[None]) -> None:
        if not flow.cancelled():
            self.tally.wrong.append(f"no more versions were published: {flow.exception()!r}")


async def torture(kind: str, faults: int, seed: int) -> Tally:
    """Inject ``faults`` faults with transport ``kind``.

    Raises TimeoutError if a member never gets the newest version.
    """
    nursery = await asyncio.to_thread(Nursery, kind)
    try:
        return await _Torture(nursery, faults, seed).run()
    finally:
        nursery.close()


if __name__ == "__main__":
    tally = asyncio.run(torture(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    for name, value in structs.asdict(tally).items():
        print(name, value)
    print(tally.growth())
