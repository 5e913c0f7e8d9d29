"""A trainer that receives its steps in parts, from a real store in which one group after the other is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import CommittedState
from rrl.roles.worker.api import Worker
from rrl.tests.support.listening_manager import TIMEOUT_S, eventually
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import JOB, Scene
from rrl.transport.messages import Committed, Goodbye

GROUPS = 3
"""Number of groups in a step."""
SECOND = crew.incarnation_of("trainer/0", 2)


def _worker(scene: Scene, who: Incarnation = crew.TRAINER, *, stream: bool = True, steps: int = 2) -> Worker:
    sampling = msgspec.structs.replace(JOB.sampling, stream=stream)
    job = msgspec.structs.replace(JOB, steps=steps, sampling=sampling)
    write_atomically(scene.at.run.run_spec, msgspec.json.encode(job))
    return scene.worker(who)


@contextmanager
def _store(scene: Scene) -> Iterator[Store]:
    """Yield a store with the unscored answers of two steps."""
    store = crew.open_store(scene.at.run.store, groups_per_batch=GROUPS)
    crew.generate(store)
    try:
        yield store
    finally:
        store.close()


def _score(store: Store, groups: int) -> None:
    crew.score(store, at_most=groups * crew.GROUP)


def _commit(me: Worker, number: int) -> None:
    file = me.checkpoint_dir(number) / "state"
    file.write_bytes(b"state")
    me.commit(number, [file])


async def _play(
    scene: Scene, store: Store, me: Worker, work: Callable[[Callable[[int], None]], None]
) -> list[Committed]:
    """Run ``work`` as the trainer ``me``, and return the commits that were reported to the manager.

    ``work`` gets a function that scores a number of further groups.
    """
    loop = asyncio.get_running_loop()

    async def score(groups: int) -> None:
        _score(store, groups)

    def more(groups: int) -> None:
        asyncio.run_coroutine_threadsafe(score(groups), loop).result(TIMEOUT_S)

    async with scene.manager_and(store) as manager:
        role = scene.start(me, lambda: work(more))
        await eventually(lambda: role.ended or any(isinstance(message, Goodbye) for message in manager.received))
        commits = [message for message in manager.received if isinstance(message, Committed)]
        await manager.stop(me.launch.incarnation)
        await role.end()
    return commits


async def test_a_step_comes_in_parts_as_its_groups_are_scored_and_is_committed_after_the_last(scene: Scene) -> None:
    given: list[tuple[int, int, int, bool]] = []

    with _store(scene) as store:
        _score(store, 1)
        me = _worker(scene)

        def work(more: Callable[[int], None]) -> None:
            for part in me.parts(after=me.committed):
                given.append((part.number, part.index, len(part.trajectories), part.last))
                assert me._connection.status.done == len(given) - 1, "the progress is not the number of trained parts"
                if part.last:
                    _commit(me, part.number)
                else:
                    with pytest.raises(ValueError, match=f"cannot commit step {part.number}"):
                        _commit(me, part.number)
                more(2 if part.number == 1 else 1)

        commits = await _play(scene, store, me, work)
        assert [commit.step for commit in commits] == [1, 2]
        assert [commit.metrics["reward"] for commit in commits] == [1.0, 1.0]

    assert given == [(1, 0, 2, False), (1, 1, 4, True), (2, 0, 4, False), (2, 1, 2, True)]


async def test_without_stream_each_step_is_one_part(scene: Scene) -> None:
    with _store(scene) as store:
        _score(store, 2 * GROUPS)
        me = _worker(scene, stream=False)
        given: list[tuple[int, int, int, bool]] = []

        def work(_: object) -> None:
            for part in me.parts():
                given.append((part.number, part.index, len(part.groups), part.last))
                _commit(me, part.number)

        await _play(scene, store, me, work)
        assert given == [(1, 0, GROUPS, True), (2, 0, GROUPS, True)]


@pytest.mark.parametrize("stream", [True, False])
async def test_successor_gets_the_same_parts_or_all_of_their_groups_as_a_batch(scene: Scene, stream: bool) -> None:
    """While a step had one part, the run may have been resumed with another value of ``stream``."""
    before: list[str] = []

    with _store(scene) as store:
        _score(store, 1)
        first, second = _worker(scene), _worker(scene, SECOND, stream=stream)

        def dies(_: object) -> None:
            part = next(first.parts())
            before.extend((part.digest, *map(str, part.groups)))

        await _play(scene, store, first, dies)
        _score(store, GROUPS - 1)
        store.update_membership([*crew.ALL[:-1], SECOND])

        def continues(_: object) -> None:
            parts = [part for part in second.parts(after=second.committed) if part.number == 1]
            groups = [str(group) for part in parts for group in part.groups]
            assert (len(groups), groups[0]) == (GROUPS, before[1])
            assert [part.digest == before[0] for part in parts] == ([True, False] if stream else [False])
            _commit(second, 1)

        second.job = msgspec.structs.replace(second.job, steps=1)
        await _play(scene, store, second, continues)
        state = store.committed(SECOND)
        assert isinstance(state, CommittedState)
        assert state.number == 1


async def test_batches_of_a_run_that_streams_are_whole(scene: Scene) -> None:
    with _store(scene) as store:
        _score(store, GROUPS)
        me = _worker(scene, steps=1)
        sizes: list[int] = []

        def work(_: object) -> None:
            for batch in me.batches():
                sizes.append(len(batch.groups))
                _commit(me, batch.number)

        await _play(scene, store, me, work)
        assert sizes == [GROUPS]
