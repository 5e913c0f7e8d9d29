"""The sockets on which the processes of a local run listen cannot be reached from outside of the machine.

torch's TCPStore and gloo authenticate no client. So only the address to which they are bound protects them.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rrl.core.run_dir import RUNS_ENV, RunDir
from rrl.core.types import rank_of
from rrl.tests.support.plain_user import PlainUser, popen_as
from rrl.tests.support.runs import QUICKSTART, RRL, TestRun, with_light_task, write_job
from rrl.tests.support.security.sockets import PartBound, bound_by
from rrl.tests.support.supervisor import end_runs_with_caller

_START_TIMEOUT_S = 300.0
"""Time limit (s) for two ranks and a rollout to load torch on a busy two-core machine."""


OWN_PROGRAMS = """
[run]
name = "own"

[cluster]
kind = "local"

[commands.pair]
command = ["python", "meets.py"]
ranks = 2

[commands.alone]
command = ["python", "meets.py"]
"""
OWN_PROGRAM = """
import torch
import rrl

with rrl.join() as me:
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    me.progress()
    me.stopping.wait()
"""


@pytest.fixture
def gang_run(owner: PlainUser) -> Iterator[TestRun]:
    """Yield a run of the owner, the quickstart with two trainer ranks and weights over TCP; cancel it at the end."""
    toml = with_light_task(QUICKSTART.read_text()).partition("[[faults.planned]]")[0]
    for shipped, tested in (
        ("steps = 300", "steps = 100000"),
        ("replicas = 2", "replicas = 1"),  # others would listen on the same kinds of sockets
        ("spares = 1", "spares = 0"),
        ("prompts_per_step = 16", "prompts_per_step = 4"),
        ("warm_start_steps = 30", "ranks = 2\nwarm = false\nwarm_start_steps = 0"),
    ):
        assert toml.count(shipped) == 1, shipped
        toml = toml.replace(shipped, tested)
    yield from _run_of(owner, "gang", toml + '\n[transport]\nweights = "tcp"\n')


@pytest.fixture
def own_gang_run(owner: PlainUser) -> Iterator[TestRun]:
    """Yield a run of programs that use torch.distributed without naming an address: two ranks, and a single process."""
    yield from _run_of(owner, "own", OWN_PROGRAMS, {"meets.py": OWN_PROGRAM})


def _run_of(owner: PlainUser, name: str, toml: str, programs: Mapping[str, str] | None = None) -> Iterator[TestRun]:
    folder = owner.home / name
    owner.call(folder.mkdir, timeout_s=30)
    for program, text in (programs or {}).items():
        (folder / program).write_text(text)
        os.chown(folder / program, owner.uid, -1)
    job = write_job(folder, toml)
    end_runs_with_caller(folder / "runs")

    def call(*argv: str, **popen: Any) -> subprocess.Popen[str]:
        # gloo must not bind to the interface that the user's shell names
        env = owner.environment(**{RUNS_ENV: str(folder / "runs"), "GLOO_SOCKET_IFNAME": _outside()})
        ends = {"stdin": subprocess.DEVNULL, "stdout": None, "stderr": None, **popen}
        return popen_as(owner.name, [RRL, *argv], env, folder, **ends)

    with call("submit", str(job), stdout=subprocess.PIPE) as submitting:
        name = submitting.communicate(timeout=120)[0].strip()
    run = TestRun(RunDir(folder / "runs" / name), call)
    try:
        yield run
    finally:
        with call("cancel", name) as cancelling:
            cancelling.wait(120)
        run.wait_gone()
        assert not Path(f"/tmp/torchinductor_{owner.name}").exists(), (
            "a role has used the default folder of torch's cache"
        )


def _outside() -> str:
    """Return the name of an interface other than loopback, or loopback if there is no other."""
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")


@pytest.mark.torch
def test_every_socket_of_a_local_run_is_bound_to_loopback(gang_run: TestRun) -> None:
    state = gang_run.wait(lambda s: s.step >= 2, timeout_s=_START_TIMEOUT_S)
    found = bound_by(gang_run.processes())
    outside = [one for one in found if not one.stays_on_this_machine]
    assert outside == [], f"reached from outside: {outside}"
    for rank in state.replicas.values():
        if rank.role == "trainer":
            assert rank.pid is not None
            mine = [one for one in found if one.pid == rank.pid]
            # gloo binds one socket for each group (all, talk, files, mesh); the weights or the rendezvous bind another
            # one
            assert len(mine) >= 2, f"{rank.id} listens on fewer than two sockets: {mine}"
    assert not [one for one in found if one.kind == "udp"]


@pytest.mark.torch
def test_every_socket_of_a_users_own_gang_is_bound_to_loopback(own_gang_run: TestRun) -> None:
    state = own_gang_run.wait(lambda s: all(one.ever_worked for one in s.workers), timeout_s=_START_TIMEOUT_S)
    found = bound_by(own_gang_run.processes())
    outside = [one for one in found if not one.stays_on_this_machine]
    assert outside == [], f"reached from outside: {outside}"
    assert len(list(state.workers)) == 3
    for rank in state.workers:
        mine = [one for one in found if one.pid == rank.pid]
        hosts_store = rank_of(rank.id) == 0
        assert len(mine) >= 1 + hosts_store, f"{rank.id} does not listen for gloo, or not for torch's store: {mine}"


def test_sockets_of_each_kind_are_found_with_the_address_that_they_are_bound_to() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.create_server(("", 0)) as everywhere,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as named,
    ):
        datagrams.bind(("127.0.0.1", 0))
        named.bind(f"\0rrl-test-{os.getpid()}")
        named.listen()
        mine = set(bound_by([os.getpid()]))
        pid = os.getpid()
        everywhere_found = PartBound(pid, "tcp", "0.0.0.0", everywhere.getsockname()[1])
        assert {
            PartBound(pid, "tcp", "127.0.0.1", loopback.getsockname()[1]),
            everywhere_found,
            PartBound(pid, "tcp", "::1", six.getsockname()[1]),
            PartBound(pid, "udp", "127.0.0.1", datagrams.getsockname()[1]),
            PartBound(pid, "unix", f"@rrl-test-{pid}"),
        } <= mine
        assert not everywhere_found.stays_on_this_machine
