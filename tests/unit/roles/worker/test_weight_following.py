"""The version and the sources from which a rollout pulls when newer versions appear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_spec import ROLE_TRAITS, TransportSpec
from rrl.core.types import Incarnation, ReplicaId, Version, member_id
from rrl.roles.worker import connection as link_module
from rrl.roles.worker.connection import ManagerConnection
from rrl.tests.support.listening_manager import TIMEOUT_S, lab
from rrl.tests.support.weights.chain import Publisher, until
from rrl.tests.support.weights.member import announce
from rrl.tests.support.weights.source import content, described
from rrl.tests.support.weights.transports import CHUNK, SECRET, SpyTransport, calm, served, transport_for, weight_source
from rrl.transport.weights import pull
from rrl.transport.weights.pull import WeightSource

ME = Incarnation(ReplicaId("rollout/1"), 1)
V1, V2, V3, V4 = (Version(step, 1) for step in (1, 2, 3, 4))
TRANSPORT = TransportSpec("tcp", chunk=CHUNK, chunk_deadline=TIMEOUT_S, chain=8)


class Rollout:
    """The part of a connection that follows weight versions. ``receive`` passes it reports of manager and store."""

    def __init__(self, connection: ManagerConnection, spy: SpyTransport) -> None:
        self.connection, self.spy = connection, spy
        self.held: list[Version] = []
        connection.announce_version = self.held.append  # type: ignore[method-assign, assignment]
        self._seq = 0

    def receive(self, newest: Version, *holders: WeightSource) -> None:
        self._seq += 1
        announce(self.connection, self._seq, newest, holders)

    def arrived(self, version: Version) -> int:
        arriving = self.connection.weights._arriving
        if arriving is None or arriving.manifest.version != version:
            return 0
        return len(arriving.manifest.chunks) - len(arriving.missing)


Story = Callable[[Rollout], Coroutine[Any, Any, None]]
Play = Callable[[Story], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Play:
    """Return a function that runs a test with a rollout for which no source counts as too slow.

    The parameter is the id of the rollout; default: that of ``ME``.
    """
    monkeypatch.setattr(link_module, "AdaptiveTimeout", calm)
    monkeypatch.setattr(pull, "FIRST_CHUNK_TIMEOUT_S", TIMEOUT_S)

    @asynccontextmanager
    async def following() -> AsyncGenerator[Rollout]:
        with lab(tmp_path) as at:
            launch = at.launch(replica=getattr(request, "param", ME.replica))
            connection = ManagerConnection(launch, at.run, at.keys, 1.0, TRANSPORT, ROLE_TRAITS["rollout"])
            async with transport_for("tcp") as pipe:
                rollout = Rollout(connection, SpyTransport(pipe))
                task = asyncio.create_task(connection._follow_weights(rollout.spy))
                try:
                    yield rollout
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    connection._loop.close()

    async def run(story: Story) -> None:
        async with asyncio.timeout(2 * TIMEOUT_S), following() as rollout:
            await story(rollout)

    return lambda story: asyncio.run(run(story))


def offer(publisher: Publisher, version: Version) -> None:
    flat = content(100, seed=version.step)
    publisher.store.offer(described(version, flat, SECRET, CHUNK), flat)


def test_pull_from_a_working_source_is_finished_before_the_newest_version(play: Play) -> None:
    async def story(rollout: Rollout) -> None:
        publisher = Publisher(V1)
        async with served("tcp", publisher.store) as at:
            with publisher.publishing():
                publisher.feed(3)
                rollout.receive(V1, weight_source(at, version=V1))
                await until(lambda: rollout.arrived(V1) == 3)
                for newer in (V2, V3):
                    offer(publisher, newer)
                    rollout.receive(newer, weight_source(at, version=newer))
                publisher.feed()
            await until(lambda: rollout.held == [V1, V3])

    play(story)


@pytest.mark.parametrize("play", [ME.replica, member_id(ME.replica, 1)], indirect=True)
def test_each_version_is_pulled_once_also_by_a_further_member(play: Play) -> None:
    async def story(rollout: Rollout) -> None:
        publisher = Publisher(V3)
        async with served("tcp", publisher.store) as at:
            for version in (V1, V2):
                offer(publisher, version)
                rollout.receive(version, weight_source(at, version=version))
                await until(lambda newest=version: newest in rollout.held)  # type: ignore[misc]
        assert rollout.held == [V1, V2]

    play(story)


@pytest.mark.parametrize("newest", [V2, V1], ids=["a newer version", "no newer version"])
def test_pull_from_a_failed_source_is_dropped_for_the_newest_version_or_continues_elsewhere(
    play: Play, newest: Version
) -> None:
    async def story(rollout: Rollout) -> None:
        publisher, relay = Publisher(newest), Publisher(V1)
        async with served("tcp", publisher.store) as at:
            async with served("tcp", relay.store) as gone:
                with relay.publishing():
                    relay.feed(3)
                    rollout.receive(V1, weight_source(at, version=V1), weight_source(gone, "rollout/0", None))
                    await until(lambda: rollout.arrived(V1) == 3)
                    publisher.feed()
                    if newest == V2:
                        rollout.receive(V2, weight_source(at, version=V2), weight_source(gone, "rollout/0", None))
            await until(lambda: rollout.held == [newest])
            assert rollout.connection.weights.versions() == (newest,)
            assert newest == V2 or rollout.spy.came == {gone: 3, at: 10}

    play(story)


def test_rollout_pulls_from_the_publisher_after_two_dropped_versions(play: Play) -> None:
    async def story(rollout: Rollout) -> None:
        publisher, neighbour = Publisher(V3), Publisher(V3)
        publisher.feed()
        neighbour.feed()
        async with served("tcp", publisher.store) as at, served("tcp", neighbour.store) as beside:
            for version, newer in ((V1, V2), (V2, V3)):
                relay = Publisher(version)
                async with served("tcp", relay.store) as gone:
                    with relay.publishing():
                        relay.feed(3)
                        rollout.receive(
                            version, weight_source(at, version=version), weight_source(gone, "rollout/0", None)
                        )
                        await until(lambda version=version: rollout.arrived(version) == 3)  # type: ignore[misc]
                        rollout.receive(newer, weight_source(at, version=newer), weight_source(gone, "rollout/0", None))
                if newer == V3:
                    rollout.receive(V3, weight_source(at, version=V3), weight_source(beside, "rollout/0", V3))
            await until(lambda: rollout.held == [V3])
            assert beside not in rollout.spy.came
            assert rollout.spy.came[at] == 13

    play(story)


def test_version_lost_with_its_publisher_is_dropped_for_one_that_others_serve(play: Play) -> None:
    async def story(rollout: Rollout) -> None:
        neighbour = Publisher(V1)
        neighbour.feed()
        async with served("tcp", neighbour.store) as beside:
            publisher = Publisher(V2)
            async with served("tcp", publisher.store) as gone:
                with publisher.publishing():
                    publisher.feed(3)
                    rollout.receive(V2, weight_source(gone, version=V2))
                    await until(lambda: rollout.arrived(V2) == 3)
                    rollout.receive(V1, weight_source(beside, "rollout/0", V1))
            await until(lambda: rollout.held == [V1])

    play(story)
