"""Another plain user attacks the ports of a run with the default weight transport, without effect.

The owner is a plain user too, so no packet filter protects the ports, because only root may attach one.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.core.run_dir import RUNS_ENV
from rrl.core.types import ReplicaId
from rrl.manager.model.state import Status
from rrl.tests.support.plain_user import PlainUser
from rrl.tests.support.runs import RRL, TestRun, all_work, current_incarnations, light_job, submitted, write_job
from rrl.tests.support.security.assault import RECOVERY_TIMEOUT_S
from rrl.tests.support.security.attacks import LATER_CONNECTIONS, Footprint, barrage, ports_of
from rrl.tests.support.supervisor import end_runs_with_caller
from rrl.transport.keys import RunKeys

GARBAGE = 1500
"""Number of connections to each port, each with bytes that no process of the run would send."""
TIMEOUT_S = 300.0
LOOPBACK = "127.0.0.1"
UCX_LIBRARIES = ("libucp", "libuct", "libucxx")


@pytest.fixture(scope="module")
def run(owner: PlainUser) -> Iterator[TestRun]:
    """Return a run of the owner without a table ``[transport]``, once all replicas work."""
    toml = light_job("local", 100_000, spares=0, warm=False).replace('[transport]\nweights = "tcp"\n', "")
    assert "[transport]" not in toml

    def call(*argv: str, **_: object) -> subprocess.Popen[str]:
        return owner.popen(RRL, *argv, **{RUNS_ENV: str(owner.home / "runs")})

    end_runs_with_caller(owner.home / "runs")
    run = submitted(write_job(owner.home, toml), owner.home / "runs", call)
    run.wait_steps(3)
    yield run
    process = call("cancel", run.run.id)
    assert process.wait(60) == 0, process.communicate()
    run.wait_end()
    run.wait_gone()


def workers(run: TestRun) -> dict[str, int]:
    """Return the pid of the trainer and of each rollout, by replica."""
    state = run.state()
    return {
        str(replica.id): replica.pid
        for replica in state.replicas.values()
        if replica.role in ("trainer", "rollout") and replica.is_current and replica.pid is not None
    }


def listening_ports(owner: PlainUser) -> set[tuple[str, int]]:
    """Return the listening ports of all processes of the owner, which any user of the machine can list."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == "0A" and int(uid) == owner.uid:
                address, port = local.split(":")
                ip = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address
                found.add((ip, int(port, 16)))
    return found


def test_a_default_run_listens_on_loopback_and_loads_no_ucx(run: TestRun, owner: PlainUser) -> None:
    assert {address for address, _ in listening_ports(owner)} == {LOOPBACK}
    state = run.state()
    for name, pid in workers(run).items():
        serves = state.replica(ReplicaId(name)).weight_address
        assert serves is not None
        assert [f"tcp://{address}:{port}" for address, port in ports_of(pid)] == [serves], name
    for pid in run.processes():
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert not any(library in loaded for library in UCX_LIBRARIES), pid


def reached_by_ucx(attacker: PlainUser, ports: list[int]) -> dict[int, list[str]]:
    """Attack each port by :mod:`rrl.tests.support.security.ucx_attack`, and return the results by port."""
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    attack = attacker.popen(sys.executable, "-m", "rrl.tests.support.security.ucx_attack", LOOPBACK, *map(str, ports))
    out, err = attack.communicate(timeout=TIMEOUT_S)
    assert attack.returncode == 0, err
    return {int(port): ways for port, ways in json.loads(out).items()}


@pytest.mark.long  # shows that the attack of the next test is one
def test_the_attack_reaches_ucx_where_a_job_trusts_its_network(owner: PlainUser, attacker: PlainUser) -> None:
    """The attack reaches UCX if the job trusts its network. So the next test does not pass for lack of an attack."""
    keys = owner.home / "victims_keys.json"
    owner.call(lambda: RunKeys.make().save(keys), TIMEOUT_S)
    victim = owner.popen(sys.executable, "-m", "rrl.tests.support.security.victim", "ucx", str(keys))
    assert victim.stdout is not None
    try:
        serves = victim.stdout.readline().strip()
        ports = [port for address, port in ports_of(victim.pid) if address == LOOPBACK]
        assert len(ports) == len(ports_of(victim.pid)) == 2
        reached = reached_by_ucx(attacker, ports)
    finally:
        victim.communicate("", timeout=TIMEOUT_S)
    door = int(serves.rpartition(":")[2])
    assert reached.pop(door) == []
    assert list(reached.values()) == [["interface port"]]


def test_ucx_of_another_user_reaches_no_port_of_a_run(run: TestRun, owner: PlainUser, attacker: PlainUser) -> None:
    before, began = current_incarnations(run.wait(all_work)), run.state().step
    ports = sorted(port for _, port in listening_ports(owner))
    assert reached_by_ucx(attacker, ports) == {port: [] for port in ports}
    assert current_incarnations(run.wait(lambda state: state.step > began + 2)) == before


@pytest.mark.long  # test_run_under_attack.py sends garbage to every port of a run
def test_garbage_of_another_user_leaves_no_descriptor_open_in_a_run(
    run: TestRun, owner: PlainUser, attacker: PlainUser
) -> None:
    run.wait(lambda state: all(r.status is Status.JOINED for r in state.replicas.values() if r.is_current))
    before, began = current_incarnations(run.wait(all_work)), run.state().step
    ports = sorted(listening_ports(owner))
    listeners = {pid: Footprint.of(pid).descriptors for pid in run.processes() if ports_of(pid)}
    assert len(listeners) >= len(workers(run)) + 2  # the workers, the manager and the store

    def attack() -> None:
        for port in ports:
            assert barrage(port, GARBAGE, port[1]) > 0.9 * GARBAGE, port

    attacker.call(attack, TIMEOUT_S)
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while kept := {
        pid: most for pid, most in listeners.items() if Footprint.of(pid).descriptors > most + LATER_CONNECTIONS
    }:
        assert time.monotonic() < deadline, f"descriptors stay open; by pid, their number before the attack: {kept}"
        time.sleep(0.2)
    assert current_incarnations(run.wait(lambda state: state.step > began + 2)) == before
