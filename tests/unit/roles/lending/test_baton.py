"""The baton between real processes: a leader here, and guests as children that wait until they are told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rrl.core.launch import LAUNCH_ENV, Launch, tag_of
from rrl.core.types import Incarnation, NodeName, guest_id, replica_id
from rrl.roles.lending.baton import GuestBaton, LeaderBaton, baton_name
from rrl.tests.support.listening_manager import wait_until
from rrl.transport.streams.unix import abstract_address, dial_unix

NODE = NodeName("n1")
SECRET = os.urandom(32)
ME = Incarnation(replica_id("trainer", 0), 3)
FOREVER_S = 60.0

GUEST = """
import os, sys, threading, time
from rrl.core.types import Incarnation
from rrl.roles.lending.baton import GuestBaton
run, node, replica, number, how = sys.argv[1:]
baton = GuestBaton(run, node, 0, bytes.fromhex(os.environ["SECRET"]), Incarnation(replica, int(number)))
if how != "slow":
    baton.ready()
print("up", flush=True)
while baton.wait_until_ours(lambda: False):
    print("ours", flush=True)
    if how == "slow":
        time.sleep(1.5)
    baton.ready()
    if how == "forks" and os.fork() == 0:
        time.sleep(15)
        os._exit(0)
    while not baton.back_requested or how == "deaf":
        time.sleep(0.001)
    baton.give_back()
    print("asleep", flush=True)
"""


class Guest:
    """A guest as a process, with the environment of a launch of the run."""

    def __init__(self, folder: Path, run: str, number: int = 1, how: str = "good") -> None:
        self.incarnation = Incarnation(guest_id(NODE), number)
        launch = Launch(
            tag=tag_of(run, self.incarnation),
            run_dir=str(folder),
            incarnation=self.incarnation,
            node=NODE,
            argv=(),
            env={},
            cwd=str(folder),
            grace=1.0,
            virtual_node=True,
        )
        path = folder / f"{launch.tag}.launch"
        path.write_bytes(msgspec.json.encode(launch))
        self.process = subprocess.Popen(
            [sys.executable, "-c", GUEST, run, NODE, self.incarnation.replica, str(number), how],
            env={**os.environ, LAUNCH_ENV: str(path), "SECRET": SECRET.hex()},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.says("up")

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, f"run-{os.urandom(4).hex()}"
        self.guests: list[Guest] = []
        self.leaders: list[LeaderBaton] = []

    def guest(self, number: int = 1, how: str = "good") -> Guest:
        self.guests.append(Guest(self.folder, self.run, number, how))
        return self.guests[-1]

    def leader(self) -> LeaderBaton:
        self.leaders.append(LeaderBaton(self.run, NODE, 0, SECRET))
        return self.leaders[-1]

    def lent(self, guest: Guest) -> LeaderBaton:
        leader = self.leader()
        assert leader.take(FOREVER_S, never).clean
        wait_until(lambda: leader.guest == guest.incarnation)
        assert leader.lend(ME, anyone) == guest.incarnation
        guest.says("ours")
        return leader


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    for leader in scene.leaders:
        leader.close()
    for guest in scene.guests:
        guest.process.kill()
        guest.process.wait()


def never() -> bool:
    return False


def anyone(guest: Incarnation) -> bool:
    return True


def test_a_guest_has_the_baton_only_while_it_is_lent(scene: Scene) -> None:
    guest = scene.guest()
    leader = scene.lent(guest)
    for _ in range(20):
        assert leader.guest is None
        assert leader.lent_to == guest.incarnation
        taken = leader.take(FOREVER_S, never)
        guest.says("asleep")
        assert taken.held
        assert taken.clean
        assert not taken.killed
        assert taken.wake_s is not None
        assert leader.lent_to is None
        wait_until(lambda: leader.guest == guest.incarnation)
        assert leader.guest_has_engine
        assert leader.lend(ME, anyone) == guest.incarnation
        guest.says("ours")


def test_without_an_accepted_guest_the_leader_keeps_the_baton(scene: Scene) -> None:
    leader = scene.leader()
    assert leader.take(FOREVER_S, never).clean
    assert leader.lend(ME, anyone) is None
    new, _ = scene.guest(2), scene.guest(1)
    wait_until(lambda: leader.guest == new.incarnation)
    time.sleep(0.3)
    assert asked_about(leader) == [new.incarnation]
    other = scene.leader()
    ask = iter([False] * 20 + [True])
    assert not other.take(FOREVER_S, lambda: next(ask)).held


def asked_about(leader: LeaderBaton) -> list[Incarnation]:
    asked: list[Incarnation] = []
    assert leader.lend(ME, lambda guest: asked.append(guest) or False) is None  # type: ignore[func-returns-value]
    return asked


def test_a_killed_holder_frees_the_baton_but_its_memory_is_not_known_to_be_free(scene: Scene) -> None:
    guest = scene.guest()
    leader = scene.lent(guest)
    guest.process.kill()
    wait_until(lambda: leader.lent_to is None)
    taken = leader.take(FOREVER_S, never)
    assert taken.held
    assert not taken.clean
    assert not taken.killed


def test_a_child_that_was_forked_while_the_baton_was_held_does_not_keep_it(scene: Scene) -> None:
    guest = scene.guest(how="forks")
    leader = scene.lent(guest)
    time.sleep(0.3)
    guest.process.kill()
    stop = stop_after(10.0)
    assert leader.take(FOREVER_S, stop).held


@pytest.mark.parametrize("how", ["stopped", "deaf"])
def test_a_guest_that_does_not_give_back_is_killed_in_time(scene: Scene, how: str) -> None:
    guest = scene.guest(how="deaf" if how == "deaf" else "good")
    leader = scene.lent(guest)
    if how == "stopped":
        guest.process.send_signal(signal.SIGSTOP)
    taken = leader.take(0.5, never)
    assert taken.held
    assert taken.killed
    assert not taken.clean
    assert 0.5 <= taken.wait_s < 0.5 + 1.0
    assert guest.process.wait(10) == -signal.SIGKILL


def test_the_time_to_give_back_begins_after_the_build_of_the_engine(scene: Scene) -> None:
    guest = scene.guest(how="slow")
    leader = scene.lent(guest)
    taken = leader.take(0.5, never)
    guest.says("asleep")
    assert taken.clean
    assert taken.wait_s > 0.5
    assert taken.wake_s is not None
    assert taken.wake_s >= 1.5
    wait_until(lambda: leader.guest_has_engine)


def test_the_end_of_the_leader_means_back_and_the_next_leader_finds_the_guest_asleep(scene: Scene) -> None:
    guest = scene.guest()
    leader = scene.lent(guest)
    scene.leaders.remove(leader)
    leader.close()
    guest.says("asleep")
    following = scene.leader()
    assert following.take(FOREVER_S, never).held
    wait_until(lambda: following.guest == guest.incarnation)


def test_a_new_leader_takes_the_baton_from_a_guest_that_its_predecessor_lent_to(scene: Scene) -> None:
    guest = scene.guest()
    scene.lent(guest)  # this leader lives on, as one that the launcher has not ended yet
    taken = scene.leader().take(FOREVER_S, never)
    guest.says("asleep")
    assert taken.clean


def test_a_leader_waits_for_its_predecessor_and_does_not_kill_it(scene: Scene) -> None:
    old, new = scene.leader(), scene.leader()
    assert old.take(FOREVER_S, never).held
    threading.Timer(1.0, old.close).start()
    scene.leaders.remove(old)
    taken = new.take(0.1, never)
    assert taken.held
    assert not taken.killed
    assert not taken.clean


def test_a_guest_never_takes_a_free_baton(scene: Scene) -> None:
    scene.guest()
    time.sleep(0.5)
    taken = scene.leader().take(FOREVER_S, never)
    assert taken.clean
    assert taken.wait_s < 0.5


def test_a_guest_whose_leader_was_replaced_before_it_bound_stays_asleep(scene: Scene) -> None:
    guest = scene.guest()
    leader = scene.leader()
    assert leader.take(FOREVER_S, never).held
    wait_until(lambda: leader.guest == guest.incarnation)
    guest.process.send_signal(signal.SIGSTOP)
    assert leader.lend(ME, anyone) == guest.incarnation
    taken = leader.take(FOREVER_S, never)
    assert taken.held
    assert not taken.clean
    guest.process.send_signal(signal.SIGCONT)
    wait_until(lambda: leader.guest == guest.incarnation)
    assert leader.lend(ME, anyone) == guest.incarnation
    guest.says("ours")


def test_a_stranger_who_knows_the_name_can_neither_take_nor_be_given_the_baton(scene: Scene) -> None:
    leader = scene.leader()
    assert leader.take(FOREVER_S, never).held
    name = baton_name(scene.run, NODE, 0, SECRET)
    stranger = asyncio.run(dial_unix(name))
    assert leader.lend(ME, anyone) is None
    stranger.abort()
    scene.leaders.remove(leader)
    leader.close()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(abstract_address(name))
        squatter.listen(1)
        guest = GuestBaton(scene.run, NODE, 0, SECRET, Incarnation(guest_id(NODE), 1))
        ended = time.monotonic() + 1.5
        assert not guest.wait_until_ours(lambda: time.monotonic() > ended)
        guest.close()
        stop = stop_after(1.0)
        taken = scene.leader().take(0.1, stop)
        assert not taken.held
        assert not taken.killed  # the squatter is this process, no guest of the run


def stop_after(seconds: float) -> Callable[[], bool]:
    due = time.monotonic() + seconds
    return lambda: time.monotonic() > due
