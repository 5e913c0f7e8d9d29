"""A publisher and its receivers, each in a process of its own, which transfer one version after the other."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct, field

from rrl.benchmarks._load import cpu_seconds
from rrl.core.run_spec import DeltaSetting
from rrl.core.types import TRAINER, Version, WeightTraffic
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import Member, Nursery

ARMS: dict[str, DeltaSetting] = {"auto": "auto", "delta": True, "plain": False}
"""Arms, with the value of ``[transport] delta``."""


class Transfer(Struct, frozen=True):
    """The transfer of one version."""

    seconds: float
    """Seconds from the message about the version until the last receiver has verified the last byte."""
    publish_s: float
    """Seconds to publish the version."""
    cpu_s: float
    """CPU seconds of the publisher and all receivers together, without those to publish."""
    received: tuple[int, ...]
    """Bytes that each receiver got, with those of the protocol."""
    fallbacks: int
    wrong_copies: int


class Series(Struct):
    """The transfers of one learning rate by arm: in each round, those of all versions in their order."""

    rounds: dict[str, list[list[Transfer]]] = field(default_factory=lambda: defaultdict(list))

    def later(self, arm: str) -> list[list[Transfer]]:
        """Return the transfers of each round from the second version on, because the first one has no base."""
        return [transfers[1:] for transfers in self.rounds[arm]]

    def over_plain_time(self, arm: str) -> list[float]:
        """Return for each round the mean time of a transfer, over the mean time of a plain transfer."""
        pairs = zip(self.later(arm), self.later("plain"), strict=True)
        return [_mean_s(ours) / _mean_s(plain[: len(ours)]) for ours, plain in pairs]

    def share(self, arm: str, nbytes: int) -> float:
        """Return the mean share of a version's bytes that a receiver got."""
        return statistics.mean(each / nbytes for made in self.later(arm) for one in made for each in one.received)

    def cpu_s(self, arm: str) -> float:
        """Return the mean CPU time (s) of a transfer."""
        return statistics.mean(one.cpu_s for made in self.later(arm) for one in made)

    @property
    def wrong_copies(self) -> int:
        return sum(one.wrong_copies for rounds in self.rounds.values() for made in rounds for one in made)

    @property
    def fallbacks(self) -> int:
        return sum(one.fallbacks for rounds in self.rounds.values() for made in rounds for one in made)


def _mean_s(transfers: Iterable[Transfer]) -> float:
    return statistics.mean(each.seconds for each in transfers)


class Fleet:
    """The processes of one arm."""

    def __init__(self, source: Member, receivers: Sequence[Member]) -> None:
        self._source, self._receivers = source, receivers
        self._traffic = [WeightTraffic() for _ in receivers]
        self._step = 0

    @classmethod
    async def started(
        cls, nurseries: Sequence[Nursery], hosts: Sequence[str], nbytes: int, delta: DeltaSetting
    ) -> Fleet:
        """Start the publisher in the first nursery, and one receiver in each of the others."""
        names = [TRAINER, *(f"rollout/{place}" for place in range(len(hosts) - 1))]
        members = [
            await Member.start(nursery, name, nbytes, host=host, delta=delta)
            for nursery, name, host in zip(nurseries, names, hosts, strict=True)
        ]
        return cls(members[0], members[1:])

    async def transfer(self, file: Path) -> Transfer:
        """Publish the version in a file, transfer it to all receivers along one chain, and check every byte."""
        self._step += 1
        version = Version(self._step, 1)
        published = await self._source.request(say.Publish(version, file=str(file)), say.Published)
        peers = say.Peers(version, (self._source.source, *(each.source for each in self._receivers)))
        cpu_before, began = self._cpu_s(), time.monotonic()
        for receiver in self._receivers:
            receiver.send(peers)
        committed = [await receiver.committed(version) for receiver in self._receivers]
        cpu_s = self._cpu_s() - cpu_before
        checked = [await receiver.request(say.Check(str(file)), say.Checked) for receiver in self._receivers]
        before, self._traffic = self._traffic, [each.traffic for each in committed]
        return Transfer(
            max(each.at for each in committed) - began,
            published.seconds,
            cpu_s,
            tuple(new.received - old.received for old, new in zip(before, self._traffic, strict=True)),
            sum(new.fallbacks - old.fallbacks for old, new in zip(before, self._traffic, strict=True)),
            sum(not each.is_correct or each.version != version for each in checked),
        )

    def _cpu_s(self) -> float:
        return cpu_seconds(member.pid for member in (self._source, *self._receivers))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in (self._source, *self._receivers)))
