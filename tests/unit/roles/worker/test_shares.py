"""Shares of a batch as a trainer of the user's own requests them through the worker API."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rrl.core.types import Incarnation, member_id
from rrl.tests.support.listening_manager import eventually
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import Manager, Role, Scene
from rrl.transport.messages import Goodbye

SECOND = crew.incarnation_of(member_id(crew.TRAINER.replica, 1))


@pytest.mark.parametrize("call", ["batches", "parts"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"share": (0, 0)}, r"share=\(0, 0\): expected \(rank, world\) with 0 <= rank < world"),
        ({"share": (2, 2)}, r"share=\(2, 2\): expected"),
        ({"share": (0, 1), "by": "token"}, "by='token': expected one of 'group', 'sequence'"),
        ({"by": ["group"]}, r"by=\['group'\]: expected one of 'group', 'sequence'"),
        ({"after": "1"}, r"me\.(batches|parts): '1' is not the number of a step, such as batch\.number"),
        ({"after": 0.5}, r"0\.5 is not the number of a step"),
        ({"after": -1}, "-1 is not the number of a step"),
    ],
)
def test_wrong_share_is_refused_before_anything_is_sent(
    scene: Scene, call: str, given: dict[str, Any], why: str
) -> None:
    me = scene.worker(crew.TRAINER)  # outside of its block, every request fails
    with pytest.raises(ValueError, match=why):
        getattr(me, call)(**given)


def _is_done(role: Role, manager: Manager, who: Incarnation) -> bool:
    return role.ended or Goodbye(who) in manager.received


async def test_each_rank_gets_its_share_and_only_rank_0_commits(scene: Scene) -> None:
    store = crew.open_store(scene.at.run.store, [*crew.ALL, SECOND])
    crew.generate(store)
    crew.score(store)
    got: dict[int, list[list[int]]] = {}
    workers = scene.worker(crew.TRAINER), scene.worker(SECOND)

    def train(rank: int) -> None:
        me = workers[rank]
        for batch in me.batches(share=(rank, 2)):
            got[rank] = [batch.arrays.ids.tolist(), batch.arrays.whole.ids.tolist()]
            assert len(batch.trajectories) == crew.BATCH * crew.GROUP
            file = me.checkpoint_dir(batch.number) / "state"
            file.write_bytes(b"state")
            if rank:
                with pytest.raises(ValueError, match="only rank 0 commits"):
                    me.commit(batch.number, [file])
            else:
                me.commit(batch.number, [file])
        with pytest.raises(ValueError, match="all ranks must pass the same world"):
            next(me.batches(share=(rank, 3)))

    async with scene.manager_and(store) as manager:
        roles = [scene.start(me, partial(train, rank)) for rank, me in enumerate(workers)]
        for me, role in zip(workers, roles, strict=True):
            who = me.launch.incarnation
            await eventually(partial(_is_done, role, manager, who))
            await manager.stop(who)
            await role.end()
    assert sorted(got[0][0] + got[1][0]) == got[0][1] == got[1][1]
    assert len(got[0][0]) == len(got[1][0]) == crew.GROUP
    store.close()
