"""A manager whose run directory was removed releases all its allocations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from rrl.cluster.base import AllocationRequest, Cluster, Refused
from rrl.core.run_dir import RunDir
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Request, Why
from rrl.manager.model.reducer import fold
from rrl.manager.model.state import State
from rrl.manager.runtime import Manager
from rrl.tests.support.manager.jobs import NODE, RUN, job

FIRST, OTHER = f"{RUN}.a", f"{RUN}.b"


class HetJob:
    """A cluster that refuses to release a heterogeneous job's first component before the other one, as Slurm does."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    async def release(self, tag: str) -> None:
        if tag == FIRST and OTHER not in self.given_back:
            raise Refused(f"{OTHER} would end with it")
        self.given_back.append(tag)


def test_first_component_of_a_heterogeneous_job_is_released_last(tmp_path: Path) -> None:
    asked = Request(
        AllocationRequest(FIRST, 1, NODE, 60.0, further_components=(AllocationRequest(OTHER, 1, NODE, 60.0),)),
        Why(("because",)),
    )
    events: tuple[ev.Event, ...] = (ev.RunStarted(RUN, job()), ev.Intended(asked), ev.IntentSettled(FIRST, True))
    state: State | None = None
    for seq, event in enumerate(events, 1):
        state = fold(state, ev.Stamped(seq, 0.0, 1, event))
    cluster = HetJob()

    async def abandoned() -> str | None:
        manager = Manager(RunDir(tmp_path / RUN), cast(Cluster, cluster), job(), "job.toml", "127.0.0.1")
        cast(Any, manager)._state = state
        await manager._abandon()
        return manager.leave_reason

    assert asyncio.run(abandoned()) == "its run directory was removed"
    assert cluster.given_back == [OTHER, FIRST]
