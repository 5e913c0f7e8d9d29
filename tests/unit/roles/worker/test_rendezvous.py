"""Gangs of a user's own: real processes that meet through torch, with a manager that only listens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rrl.core.launch import LAUNCH_ENV, tag_of
from rrl.core.role_environment import RENDEZVOUS_VARIABLES
from rrl.core.run_dir import write_atomically
from rrl.core.types import Incarnation, ReplicaId, member_id
from rrl.roles.trajectories.types import CommittedState
from rrl.roles.worker import rendezvous
from rrl.tests.support.listening_manager import TIMEOUT_S
from rrl.tests.support.roles.trajectories import crew
from rrl.tests.support.roles.worker_scene import HEARTBEAT_S, Manager, Scene
from rrl.transport.address import NoAddress
from rrl.transport.messages import FirstWorkDone, Heartbeat, Hello, Promote

pytestmark = pytest.mark.torch

GANG = ReplicaId("trainer/0")
WORLD = 2
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp (proc(5))."""
_MEETS = """
import os, sys, rrl, torch, torch.distributed as dist
from datetime import timedelta
with rrl.join() as me:
    print(*(os.environ[name] for name in sys.argv[2:]), flush=True)
    sys.stdin.readline()
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
    total = torch.ones(1)
    dist.all_reduce(total)
    me.progress(int(total))
    me.stopping.wait()
"""
_COMES_LATE = """
import sys, rrl, torch.distributed as dist
from datetime import timedelta
with rrl.join() as me:
    batch = next(me.batches())
    print("has the batch", flush=True)
    sys.stdin.readline()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
    except dist.DistError as error:
        print(type(error).__name__, flush=True)
    file = me.checkpoint_dir(batch.number) / "state"
    file.write_bytes(b"old")
    try:
        me.commit(batch.number, [file])
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class RanksManager(Manager):
    world = WORLD


def member(rank: int, number: int = 1) -> Incarnation:
    return Incarnation(member_id(GANG, rank), number)


@contextlib.asynccontextmanager
async def process(
    scene: Scene, incarnation: Incarnation, code: str, timeout_s: float = TIMEOUT_S, standby: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a member that runs ``code``; kill it after the block."""
    launch = msgspec.structs.replace(scene.launch(incarnation), standby=standby)
    write_atomically(scene.at.run.launch_file(launch.tag), msgspec.json.encode(launch))
    env = {
        "PATH": "/usr/bin:/bin",
        "RRL_HEARTBEAT_INTERVAL": str(HEARTBEAT_S),
        LAUNCH_ENV: str(scene.at.run.launch_file(launch.tag)),
    }
    argv = [sys.executable, "-P", "-c", code, str(timeout_s), *RENDEZVOUS_VARIABLES]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, env=env, stdin=pipe, stdout=pipe)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def line_of(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await asyncio.wait_for(child.stdout.readline(), TIMEOUT_S)).decode().rstrip("\n")


def go_on(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")


async def has_met(manager: Manager, incarnation: Incarnation) -> None:
    await manager.wait_for(FirstWorkDone, lambda message: message.incarnation == incarnation)


@pytest.fixture
def gang(scene: Scene) -> Scene:
    scene.manager_type = RanksManager
    return scene


async def test_ranks_meet_at_the_store_of_rank_0_although_the_manager_dies_meanwhile(gang: Scene) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with gang.manager() as manager:
            second = await stack.enter_async_context(process(gang, member(1), _MEETS))
            await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.waits_for == GANG)
        first = await stack.enter_async_context(process(gang, member(0), _MEETS))
        async with gang.manager(epoch=2) as manager:
            printed = [(await line_of(child)).split() for child in (first, second)]
            port = printed[0][-1]
            assert printed == [[str(rank), "2", "0", "1", "127.0.0.1", port] for rank in range(WORLD)]
            go_on(first)
            go_on(second)
            await has_met(manager, member(0))
            await has_met(manager, member(1))


async def test_promoted_standby_meets_the_gang_that_it_becomes_a_member_of(gang: Scene) -> None:
    standby = Incarnation(ReplicaId("standby/local1"), 3)
    async with gang.manager() as manager, contextlib.AsyncExitStack() as stack:
        waits = await stack.enter_async_context(process(gang, standby, _MEETS, standby=True))
        await manager.wait_for(Hello, lambda hello: hello.incarnation == standby)
        first = await stack.enter_async_context(process(gang, member(0, 2), _MEETS))
        port = (await line_of(first)).split()[-1]
        await manager.send(standby, Promote(standby, member(1, 2), tag_of(gang.at.run.id, standby)))
        assert await line_of(waits) == f"1 2 0 1 127.0.0.1 {port}"
        go_on(first)
        go_on(waits)
        await has_met(manager, member(0, 2))
        await has_met(manager, member(1, 2))


@pytest.mark.parametrize("rank", range(WORLD))
async def test_rank_of_an_earlier_incarnation_that_comes_back_meets_nobody_and_commits_nothing(
    gang: Scene, rank: int
) -> None:
    """SIGSTOP, a new gang that meets, SIGCONT. The manager of the test fences nobody, as if it could not be reached."""
    store = gang.open_store()
    crew.generate(store)
    crew.score(store)
    old, new = (tuple(member(each, number) for each in range(WORLD)) for number in (1, 2))
    store.update_membership({*crew.ALL, *old})
    async with gang.manager_and(store) as manager, contextlib.AsyncExitStack() as stack:
        late, other = [
            await stack.enter_async_context(process(gang, old[each], code, timeout_s=2.0))
            for each, code in ((rank, _COMES_LATE), (1 - rank, _MEETS))
        ]
        assert await line_of(late) == "has the batch"
        await line_of(other)
        late.send_signal(signal.SIGSTOP)
        other.kill()
        store.update_membership({*crew.ALL, *new} - {crew.TRAINER})
        current = [await stack.enter_async_context(process(gang, each, _MEETS)) for each in new]
        for child in current:
            go_on(child)
        for each in new:
            await has_met(manager, each)
        late.send_signal(signal.SIGCONT)
        go_on(late)
        assert await line_of(late) in ("DistStoreError", "DistNetworkError")
        assert await line_of(late) == ("Fenced" if rank == 0 else "ValueError"), "only rank 0 may commit"
        assert [child.returncode for child in current] == [None, None]
    assert store.committed(new[0]) == CommittedState(None, None)


async def test_stop_request_ends_the_wait_for_rank_0(gang: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    begun = threading.Event()
    async with gang.manager() as manager:
        role = gang.start(gang.worker(member(1)), begun.set)
        await manager.wait_for(Heartbeat, lambda heartbeat: heartbeat.waits_for == GANG)
        await manager.stop(member(1))
        with pytest.raises(SystemExit):
            await role.end()
    assert not begun.is_set()


@pytest.mark.parametrize("code", ["import torch", "import rrl"])
async def test_single_process_can_make_a_process_group_if_it_has_imported_torch(scene: Scene, code: str) -> None:
    """A program that has not imported torch gets no variables, and torch is not imported for it."""
    checks = {
        "import torch": "torch.distributed.init_process_group('gloo'); assert torch.distributed.get_rank() == 0",
        "import rrl": "import os, sys; assert 'torch' not in sys.modules and 'RANK' not in os.environ",
    }
    judge = Incarnation(ReplicaId("judge/0"), 1)
    program = (
        f"import rrl\n{code}\nwith rrl.join() as me:\n    {checks[code]}\n    me.progress()\n    me.stopping.wait()"
    )
    async with scene.manager() as manager, process(scene, judge, program):
        await has_met(manager, judge)


# ── without processes ──────────────────────────────────────────────────────────────────────────────────────────────
def _connection(rank: int, world: int) -> Any:
    announced: list[str] = []
    return SimpleNamespace(
        rank=rank, world=world, host="127.0.0.1", announced=announced, announce_rendezvous=announced.append
    )


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    names = {*RENDEZVOUS_VARIABLES, *_INTERFACES}
    environ = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", environ)
    return environ


def test_rank_0_listens_only_at_the_address_of_the_run_that_it_announces(environ: dict[str, str]) -> None:
    connection = _connection(0, WORLD)
    store = rendezvous.prepare(connection, built_in=False)
    assert store is not None
    assert connection.announced == [f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"]
    port = int(environ["MASTER_PORT"])
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == _LISTENS and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_variables_of_torchrun_are_left_alone(environ: dict[str, str]) -> None:
    environ |= {"TORCHELASTIC_RUN_ID": "x", "RANK": "3"}
    before = dict(environ)
    assert rendezvous.prepare(_connection(0, 1), built_in=False) is None
    assert environ == before


def test_single_process_of_rrl_opens_no_store(environ: dict[str, str]) -> None:
    assert rendezvous.prepare(_connection(0, 1), built_in=True) is None
    assert "MASTER_PORT" not in environ


def test_interfaces_are_those_of_the_runs_address_or_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(NoAddress, match=r"no interface of this node has the address 203\.0\.113\.1"):
        rendezvous.bind_to_address("203.0.113.1")
    rendezvous.bind_to_address("127.0.0.1")
    assert [environ[name] for name in _INTERFACES] == ["lo", "=lo"]
