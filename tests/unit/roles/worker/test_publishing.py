"""Versions that several ranks of a trainer publish in parts, and the deaths of ranks in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy
import pytest

from rrl.core.run_dir import write_atomically
from rrl.core.types import TRAINER, Incarnation, Version, WeightTraffic, member_id
from rrl.roles.launcher.end_report import Misuse
from rrl.roles.trajectories.store import Store
from rrl.roles.worker import publishing
from rrl.roles.worker.api import Worker
from rrl.roles.worker.connection import FENCED_EXIT
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually
from rrl.tests.support.roles.publishing_rank import gang, tensors_of
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import JOB, Manager, Role, Scene
from rrl.tests.support.weights.source import content
from rrl.tests.support.weights.sparse import knows_base, versions
from rrl.tests.support.weights.transports import SECRET
from rrl.transport.messages import Fenced, FirstWorkDone, Heartbeat
from rrl.transport.weights.manifest import Manifest, ManifestBuilder, digest
from rrl.transport.weights.store import StoredVersion

WORLD = 2
SECOND = Incarnation(member_id(TRAINER, 1), 1)


class Rollout:
    """A rollout that only receives weights."""

    def __init__(self, scene: Scene, incarnation: Incarnation) -> None:
        self._over = threading.Event()
        self._me = scene.worker(incarnation)
        self._role = scene.start(self._me, lambda: self._over.wait(TIMEOUT_S))

    @property
    def held(self) -> StoredVersion | None:
        return self._me._connection.weights.current()

    @property
    def traffic(self) -> WeightTraffic:
        return self._me._connection.deltas.traffic

    async def receives(self, version: Version, world: int = WORLD) -> None:
        """Wait for a version, and check every byte of it."""
        held = await eventually(lambda: self.held if self.held and self.held.manifest.version == version else None)
        got = {spec.name: held.flat[spec.offset : spec.offset + spec.nbytes] for spec in held.manifest.tensors}
        assert got == tensors_of(version, world)

    async def end(self, manager: Manager) -> None:
        self._over.set()
        await manager.stop(self._me.launch.incarnation)
        await self._role.end()


@asynccontextmanager
async def running(scene: Scene) -> AsyncIterator[tuple[Store, Manager, Rollout]]:
    """Provide a store, a manager, and a rollout that ends with the block."""
    store = scene.open_store()
    async with scene.manager_and(store) as manager:
        rollout = Rollout(scene, crew.ROLLOUT)
        yield store, manager, rollout
        await rollout.end(manager)
    store.close()


async def fence(manager: Manager, incarnation: Incarnation) -> None:
    await manager.send(incarnation, Fenced(incarnation, "its gang is restarted"))


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────
async def test_version_is_offered_once_all_parts_are_published_and_a_late_rollout_needs_no_rank(scene: Scene) -> None:
    async with running(scene) as (store, manager, rollout):
        async with gang(scene, manager, 3) as ranks:
            for rank in (2, 0):
                ranks[rank].start_publishing(1)
                await ranks[rank].waits(manager)
            pair = ranks[0].incarnation, ranks[1].incarnation.replica
            await manager.wait_for(Heartbeat, lambda one: (one.incarnation, one.waits_for) == pair)
            assert store.newest_version is None
            ranks[1].start_publishing(1)
            assert [await rank.published() for rank in ranks] == [1, 1, 1]
            await rollout.receives(Version(1, 1), 3)
        late = Rollout(scene, crew.OTHER)
        await late.receives(Version(1, 1), 3)
        await late.end(manager)


@pytest.mark.parametrize("publishing", [[0], [1], []], ids=["rank 1 dies", "rank 0 dies", "all die"])
async def test_rank_that_dies_before_its_part_is_published_leaves_no_version(
    scene: Scene, publishing: list[int]
) -> None:
    async with running(scene) as (store, manager, rollout):
        async with gang(scene, manager, WORLD) as ranks:
            for rank in ranks:
                rank.start_publishing(1)
            await rollout.receives(Version(1, 1))
            for index in publishing:
                ranks[index].start_publishing(2)
                await ranks[index].waits(manager)
            for index in {0, 1} - set(publishing):
                ranks[index].process.kill()
            for index in publishing:
                await fence(manager, ranks[index].incarnation)
                assert await ranks[index].process.wait() == FENCED_EXIT
        assert store.newest_version is not None
        assert store.newest_version.version == Version(1, 1)
        async with gang(scene, manager, WORLD, number=2) as ranks:
            for rank in ranks:
                rank.start_publishing(2)
            await rollout.receives(Version(2, 2))


async def test_rank_of_an_older_incarnation_that_publishes_late_is_not_heard(scene: Scene) -> None:
    async with running(scene) as (_, manager, rollout), gang(scene, manager, WORLD) as [_, late]:
        await manager.wait_for(FirstWorkDone, lambda one: one.incarnation == late.incarnation)
        late.process.send_signal(signal.SIGSTOP)
        async with gang(scene, manager, WORLD, number=2) as ranks:
            for rank in ranks:
                rank.start_publishing(2)
            await rollout.receives(Version(2, 2))
            late.start_publishing(3)
            late.process.send_signal(signal.SIGCONT)
            await late.waits(manager)
            for rank in ranks:
                rank.start_publishing(3)
            await rollout.receives(Version(3, 2))
        await fence(manager, late.incarnation)
        assert await late.process.wait() == FENCED_EXIT
        assert late.process.stdout is not None
        assert await late.process.stdout.read() == b"", "the late rank published"


# ── contradictions ─────────────────────────────────────────────────────────────────────────────────────────────────
def publish(me: Worker, step: int, names: str, part: int, of: int = WORLD, size: int = 4) -> None:
    tensors = [(name, "uint8", (size,), content(size, step)) for name in names]
    me.publish_shard(step, tensors, part=part, of=of)


async def test_rank_that_contradicts_the_others_gets_an_error_and_may_publish_again(scene: Scene) -> None:
    async with running(scene) as (_, manager, rollout):
        manager.world = WORLD
        published = threading.Event()

        def first() -> None:
            publish(me, 1, "ab", 0)
            with pytest.raises(Misuse, match="of = 3, but this trainer has 2 ranks"):
                publish(me, 2, "ab", 0, of=3)
            with pytest.raises(Misuse, match="ranks 0 and 1 both publish part 1 of 2"):
                publish(me, 2, "ab", 1)
            with pytest.raises(Misuse, match="ranks 0 and 1 both publish c; each tensor belongs to one part"):
                publish(me, 2, "abc", 0)
            with pytest.raises(Misuse, match=r"step 2: a is uint8 \[5\], but uint8 \[4\] in step 1"):
                publish(me, 2, "ab", 0, size=5)
            with pytest.raises(Misuse, match="step 2: it lacks b of step 1"):
                publish(me, 2, "a", 0)
            held = me._connection.weights.current()
            assert held is not None
            assert held.manifest.version == Version(1, 1)
            publish(me, 2, "ab", 0)
            publish(me, 2, "ab", 0)
            with pytest.raises(Misuse, match="step 2: part 0 was published before with other contents"):
                me.publish_shard(2, [("a", "uint8", (1,), memoryview(b"x"))], part=0, of=WORLD)
            publish(me, 3, "abcd", 0, of=1)
            published.set()

        def second() -> None:
            with pytest.raises(Misuse, match="step 4: rank 1 publishes a whole version; only rank 0 may"):
                publish(other, 4, "abcd", 0, of=1)  # a step that rank 0 never publishes
            publish(other, 1, "cd", 1)
            publish(other, 2, "cd", 1)
            with pytest.raises(Misuse, match="part = 2 of = 2: the parts are 0 to of - 1"):
                publish(other, 3, "cd", 2)
            with pytest.raises(
                Misuse, match="rank 1 publishes part 1 of 2, but the version is complete with the parts"
            ):
                publish(other, 3, "cd", 1)

        me, other = scene.worker(crew.TRAINER), scene.worker(SECOND)
        roles: list[tuple[Role, Incarnation]] = [
            (scene.start(me, first), crew.TRAINER),
            (scene.start(other, second), SECOND),
        ]
        await eventually(published.is_set)
        await eventually(lambda: rollout.held and rollout.held.manifest.version == Version(3, 1))
        for role, incarnation in roles:
            await manager.dismiss(role, incarnation)


# ── deltas ─────────────────────────────────────────────────────────────────────────────────────────────────────────
SIZE = 3 * 2**20 + 17
BOTH = versions(2, SIZE)
"""The bytes of the versions 0 and 1, of which 2 % of the words differ."""
WAYS: dict[str, Callable[[Worker, int, memoryview], None]] = {
    "publish": lambda me, step, flat: me.publish(step, [("a", "uint8", (SIZE,), flat)]),
    "publish_each": lambda me, step, flat: me.publish_each(step, [("a", "uint8", (SIZE,), SIZE)], [flat]),
    "publish_written": lambda me, step, flat: me.publish_written(
        step, [("a", "uint8", (SIZE,), SIZE)], [lambda into: into.__setitem__(slice(None), flat)]
    ),
}


def publish_both(me: Worker, rollout: Rollout, publish: Callable[[Worker, int, memoryview], None]) -> None:
    """Publish two versions, the second once the rollout has the first."""
    for step, flat in enumerate(BOTH):
        publish(me, step, flat)
        while rollout.held is None or rollout.held.manifest.version != Version(step, 1):
            time.sleep(0.01)
    assert rollout.held is not None
    assert rollout.held.flat[-SIZE:] == BOTH[1]


@pytest.mark.parametrize("way", WAYS)
async def test_rollout_receives_the_changes_of_the_second_version(scene: Scene, way: str) -> None:
    async with running(scene) as (_, manager, rollout):
        me = scene.worker(crew.TRAINER)
        await manager.dismiss(scene.start(me, lambda: publish_both(me, rollout, WAYS[way])), crew.TRAINER)
        traffic = rollout.traffic
        assert SIZE < traffic.received < 1.05 * SIZE
        assert (traffic.nbytes, traffic.fallbacks) == (2 * SIZE, 0)


async def test_rollout_receives_the_changes_of_each_part(scene: Scene) -> None:
    async with running(scene) as (_, manager, rollout):
        manager.world = WORLD
        ranks = [scene.worker(crew.TRAINER), scene.worker(SECOND)]

        def play(rank: int) -> None:
            def shard(me: Worker, step: int, flat: memoryview) -> None:
                me.publish_shard(step, [(f"w{rank}", "uint8", (SIZE,), flat)], part=rank, of=WORLD)

            publish_both(ranks[rank], rollout, shard)

        roles = [scene.start(me, partial(play, rank)) for rank, me in enumerate(ranks)]
        for role, incarnation in zip(roles, (crew.TRAINER, SECOND), strict=True):
            await manager.dismiss(role, incarnation)
        assert 2 * SIZE < rollout.traffic.received < 1.05 * 2 * SIZE


async def test_job_without_deltas_transfers_whole_versions_and_keeps_no_changes(scene: Scene) -> None:
    spec = msgspec.structs.replace(JOB, transport=msgspec.structs.replace(JOB.transport, delta=False))
    write_atomically(scene.at.run.run_spec, msgspec.json.encode(spec))
    async with running(scene) as (_, manager, rollout):
        me = scene.worker(crew.TRAINER)
        await manager.dismiss(scene.start(me, lambda: publish_both(me, rollout, WAYS["publish"])), crew.TRAINER)
        assert rollout.traffic.received > 2 * SIZE
        assert not knows_base(me._connection.weights, Version(1, 1), 0, digest(BOTH[0][: 2**20]))


async def test_memory_of_the_oldest_version_is_used_again_after_its_changes_were_found(scene: Scene) -> None:
    me, places = scene.worker(crew.TRAINER), list[int]()

    def play() -> None:
        for step in range(6):
            WAYS["publish"](me, step, BOTH[step % 2])
            held = me._connection.weights.current()
            assert held is not None
            places.append(id(held.flat.obj))
            del held

    async with scene.manager() as manager:
        await manager.dismiss(scene.start(me, play), crew.TRAINER)
    assert places == [*places[:2]] * 3


# ── arguments ──────────────────────────────────────────────────────────────────────────────────────────────────────
A = memoryview(bytes(8))
GAPS = memoryview(bytes(16))[::2]
TENSOR = ("a", "uint8", (8,), A)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"number": "1"}, "me.publish: step = '1', which is not an int"),
        ({"number": True}, "step = True, which is not an int"),
        ({"number": -1}, "step = -1: the first version is that of step 0"),
        ({"of": 0}, "part = 0 of = 0: the parts are 0 to of - 1"),
        ({"part": -1}, "part = -1 of = 1: the parts are 0 to of - 1"),
        ({"part": 0.0}, "part = 0.0, which is not an int"),
        ({"part": "0"}, "part = '0', which is not an int"),
        ({"of": None}, "of = None, which is not an int"),
        ({"tensors": {"a": A}}, "pass rrl.pack(state_dict), not the state dict itself"),
        ({"tensors": None}, "pass rrl.pack(state_dict), not the state dict itself"),
        ({"tensors": {"a": A}.items()}, "is not a tensor of the form (name, dtype, shape, memoryview), as rrl.pack"),
        ({"tensors": "abc"}, "step 1: 'a' is not a tensor of the form"),
        (
            {"tensors": [("a", "uint8", (8,), bytes(8))]},
            "tensor 'a': its bytes are of type bytes; they must be a contig",
        ),
        ({"tensors": [("a", "uint8", (8,), numpy.zeros(8))]}, "its bytes are of type ndarray"),
        ({"tensors": [("a", "uint8", (8,), GAPS)]}, "its bytes are a view with gaps; they must be a contiguous"),
        ({"tensors": [TENSOR, TENSOR]}, "step 1: tensor 'a': it is given twice"),
        ({"tensors": [(1, "uint8", (8,), A)]}, "tensor 1: its name is not a str"),
        ({"tensors": [("a", numpy.uint8, (8,), A)]}, "which is not a str such as 'float32'"),
        ({"tensors": [("a", "uint8", 8, A)]}, "its shape is 8, which is not a tuple of ints"),
        ({"tensors": [("a", "uint8", (8.0,), A)]}, "its shape is (8.0,), which is not a tuple of ints"),
        ({"tensors": [("a", "float32", (8,), A)]}, "tensor 'a': 8 bytes are not the size of float32 [8]"),
    ],
)
def test_malformed_argument_is_one_line_before_anything_is_sent(scene: Scene, given: dict[str, Any], why: str) -> None:
    me, right = scene.worker(crew.TRAINER), dict[str, Any](number=1, tensors=[TENSOR], part=0, of=1)
    with pytest.raises((Misuse, TypeError)) as caught:
        me.publish_shard(**right | given)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_views_of_any_shape_an_empty_tensor_and_a_generator_are_published(scene: Scene) -> None:
    matrix = numpy.arange(12, dtype="u1").reshape(3, 4)
    arrays = {"matrix": matrix, "scalar": numpy.array(2.0, "f4"), "empty": numpy.zeros((0, 3), "f4")}
    me = scene.worker(crew.TRAINER)

    def play() -> None:
        me.publish(1, ((name, str(one.dtype), one.shape, one.data) for name, one in arrays.items()))  # type: ignore[arg-type]
        held = me._connection.weights.current()
        assert held is not None
        for spec in held.manifest.tensors:
            assert bytes(held.flat[spec.offset : spec.offset + spec.nbytes]) == arrays[spec.name].tobytes()

    async with scene.manager() as manager:
        await manager.dismiss(scene.start(me, play), crew.TRAINER)


def part(number: int, of: int, rank: int, name: str) -> Manifest:
    tensors = [(name, "uint8", (4,), 4)]
    with ManifestBuilder(Version(1, 1), tensors, content(4), SECRET, part=number, of=of, rank=rank) as builder:
        return builder.sign()


def test_ranks_must_agree_on_the_number_of_parts() -> None:
    parts = [part(0, 3, 0, "a"), part(1, 3, 1, "b")]
    publishing._check_fits(parts, part(2, 3, 2, "c"))
    with pytest.raises(Misuse, match="of = 3 on rank 0, but of = 4 on rank 2"):
        publishing._check_fits(parts, part(2, 4, 2, "c"))
