"""Measures how soon a restarted rollout or trainer takes part in the transfer of weights again, on one machine.

The measured time begins when the new process has done its imports: it is forked from a process that has already
imported all modules, for UCX also ucxx. For a rollout, the time ends when the rollout has verified and committed the
newest version, which a trainer and another rollout hold. For a trainer, the time ends when a rollout has verified the
first chunk of the version that the trainer publishes. A trainer's time includes copying the tensors into one buffer
with digests, but not reading them from its checkpoint. This program replaces the manager, and passes on the addresses
of sources at once.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict

from msgspec import Struct, field

from rrl.benchmarks._load import QUIET_TIMEOUT_S, wait_until_quiet
from rrl.benchmarks._provenance import spread
from rrl.benchmarks._table import print_table
from rrl.core.types import TRAINER, Version
from rrl.tests.support.weights import orders as say
from rrl.tests.support.weights.members import Member, Nursery

KINDS = ("ucx", "tcp")
STAGES = ("connect", "rollout", "trainer")


class Rejoin(Struct):
    """Measurements in seconds, by kind of transport and stage (:data:`STAGES`)."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    other_cores: list[float] = field(default_factory=list)
    wrong_copies: int = 0


async def measure(nbytes: int, repeats: int) -> Rejoin:
    """Measure all stages in every round, with one kind of transport after the other."""
    results = Rejoin()
    nurseries = {kind: await asyncio.to_thread(Nursery, kind) for kind in KINDS}
    try:
        testbeds = {kind: await _Testbed.made(nursery, nbytes) for kind, nursery in nurseries.items()}
        for turn in range(1, repeats + 1):
            for kind, testbed in testbeds.items():
                if turn % 10 == 1:
                    results.other_cores.append(await wait_until_quiet(QUIET_TIMEOUT_S))
                results.seconds[kind, "connect"].append(await testbed.connect())
                results.seconds[kind, "rollout"].append(await testbed.rollout(turn + 1))
                results.seconds[kind, "trainer"].append(await testbed.trainer(turn + 1))
        results.wrong_copies = sum(testbed.wrong_copies for testbed in testbeds.values())
    finally:
        for nursery in nurseries.values():
            nursery.close()
    return results


class _Testbed:
    """A trainer and a rollout that keep running, and a second rollout that is started for each measurement."""

    def __init__(self, nursery: Nursery, nbytes: int, source: Member, peer: Member) -> None:
        self._nursery, self._nbytes = nursery, nbytes
        self._source, self._peer = source, peer
        self._version = Version(0, 1)
        self.wrong_copies = 0

    @classmethod
    async def made(cls, nursery: Nursery, nbytes: int) -> _Testbed:
        source, peer = [await Member.start(nursery, name, nbytes) for name in (TRAINER, "rollout/0")]
        self = cls(nursery, nbytes, source, peer)
        await source.request(say.Publish(self._version), say.Published)
        await self._follow(peer)
        return self

    async def connect(self) -> float:
        """Return the median time (s) to connect, authenticate and receive a first answer."""
        dialled = await self._peer.request(say.Dial(self._source.serving.address, self._version, 3), say.Dialled)
        return statistics.median(dialled.seconds)

    async def rollout(self, incarnation: int) -> float:
        joiner = await Member.start(self._nursery, "rollout/1", self._nbytes, number=incarnation)
        committed = await self._follow(joiner)
        await joiner.close()
        return committed.at - joiner.serving.born

    async def trainer(self, incarnation: int) -> float:
        await self._source.close()
        self._source = await Member.start(self._nursery, TRAINER, self._nbytes, number=incarnation)
        self._version = Version(self._version.step + 1, incarnation)
        published = await self._source.request(say.Publish(self._version), say.Published)
        committed = await self._follow(self._peer)
        return committed.first - published.loaded - self._source.serving.born

    async def _follow(self, member: Member) -> say.Committed:
        """Send the current sources to a member, wait until the member has the newest version, and check its copy."""
        member.send(say.Peers(self._version, (self._source.source, self._peer.source)))
        committed = await member.committed(self._version)
        checked = await member.request(say.Check(), say.Checked)
        self.wrong_copies += not checked.is_correct or checked.version != self._version
        return committed


def report(results: Rejoin) -> dict[str, object]:
    """Print a table; return the results of the slower transport and of each transport, for the JSON object."""
    medians = {key: 1000 * statistics.median(values) for key, values in results.seconds.items()}
    rows = [
        [
            stage,
            *(f"{medians[kind, stage]:.1f}" for kind in KINDS),
            *(f"{1000 * max(results.seconds[kind, stage]):.1f}" for kind in KINDS),
        ]
        for stage in STAGES
    ]
    print(f"rejoin: ms, of {len(results.seconds[KINDS[0], STAGES[0]])}")
    print_table(["what", *(f"{kind} median" for kind in KINDS), *(f"{kind} max" for kind in KINDS)], rows)
    names = {"connect": "connect_p50_ms", "rollout": "rejoin_rollout_ms", "trainer": "rejoin_trainer_ms"}
    slower = {name: round(max(medians[kind, stage] for kind in KINDS), 2) for stage, name in names.items()}
    each = {f"{kind}_{name}": round(medians[kind, stage], 2) for stage, name in names.items() for kind in KINDS}
    ranges = {
        f"{kind}_{name}": spread([1000 * seconds for seconds in results.seconds[kind, stage]])["range"]
        for stage, name in names.items()
        for kind in KINDS
    }
    return {**slower, **each, "rejoin_ranges": ranges}
