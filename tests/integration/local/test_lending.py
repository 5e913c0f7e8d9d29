"""Guests generate on the trainer's nodes while it waits, and whatever dies, each GPU has one user.

All processes are real: the built-in trainer of two ranks on two nodes, a guest on each, rollouts. In each of them,
tests/support/fake_gpu.py checks at every load, restore, wake and use that only one of trainer and guest has tensors
resident. At the end of each run, the weights and moments must be those of a gang that never lent, bit for bit. The
first faults are those of lending.md, table 4.4.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from rrl.core.types import STORE, TRAINER, Outcome, guest_id
from rrl.manager.model import events as ev
from rrl.manager.model.state import Status
from rrl.manager.storage.lease import holder
from rrl.tests.support import fake_gpu
from rrl.tests.support.lending import LendingRun
from rrl.tests.support.queue_cluster import Queue, end_allocation, submit_to
from rrl.tests.support.runs import all_work
from rrl.tests.support.standbys import adoptions, standbys

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

ENDLESS = 100_000
"""Number of steps of a run that only has to last until its test cancels it."""
EVAL = """
[eval]
every = 2
count = 16
task = { function = "uneven_task:make" }
"""


@pytest.mark.long  # a guest is killed below, and tests/unit/roles/lending has one that does not hand back
def test_guests_that_are_killed_or_stopped_cost_the_trainer_nothing(tmp_path: Path) -> None:
    with LendingRun(tmp_path, ENDLESS) as run:
        node = run.wait_awake()
        killed, since = run.guest(node), time.time()
        run.kill(killed)
        other = run.wait_awake(since, but=node)
        stopped, since = run.guest(other), time.time()
        run.kill(stopped, signal.SIGSTOP)
        run.wait_event("restored", by=TRAINER, since=since)
        run.guest_returns(killed)
        run.guest_returns(stopped)  # the leader has ended it: nothing else ends a stopped process
        run.wait_awake(since=time.time())
        assert run.trainer_incarnations() == 1
        run.cancel()
        assert run.continued_by_others(killed.incarnation), "no other engine went on with the dead guest's tokens"


def test_one_node_trains_and_generates_in_turns_and_is_evaluated_though_its_guest_is_killed(tmp_path: Path) -> None:
    """Without other rollouts, an evaluation in the middle or at the end must not leave everybody waiting."""
    with LendingRun(tmp_path, 4, rollouts=0, ranks=1, extra=EVAL) as run:
        killed = run.guest(run.wait_awake())
        run.kill(killed)
        state = run.finish()
        assert state.replica(TRAINER).incarnation_number == 1
        assert state.replica(killed.id).incarnation_number == 2
        recorded = [one.event.step for one in run.test.events() if isinstance(one.event, ev.Evaluated)]
        assert recorded == [0, 2, 4]
        assert all(commit.metrics["lent_s"] > 0 for commit in run.commits())


@pytest.mark.long
def test_guests_that_cannot_wake_or_sleep_end_at_once(tmp_path: Path) -> None:
    """A guest whose engine raises must not go on; one that hangs in a kernel at sleep is ended by the leader."""
    with LendingRun(tmp_path, ENDLESS) as run:
        for event, what in (("wake", "raise"), ("sleep", "raise"), ("sleep", "hang")):
            node = run.wait_awake(since=time.time())
            guest, since = run.guest(node), time.time()
            run.wait_performed(fake_gpu.plant(run.gpu, event, node, what))
            run.wait_event("restored", by=TRAINER, since=since)
            run.guest_returns(guest)
        assert run.trainer_incarnations() == 1
        run.cancel()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_trainer_that_dies_while_its_gpus_are_lent_takes_them_back_first(tmp_path: Path, rank: int) -> None:
    """Killed while lent, between "dropped" and "yours", during the take back, and unable to restore."""
    with LendingRun(tmp_path, ENDLESS) as run:
        for number, moment in enumerate(("", "dropped", "restore", "cannot restore"), start=2):
            run.wait_awake(since=time.time())
            member = run.member(rank)
            assert member.node is not None
            if moment:
                what = "raise" if moment == "cannot restore" else "kill"
                planted = fake_gpu.plant(run.gpu, moment.removeprefix("cannot "), member.node, what)
                run.wait_performed(planted)
            else:
                run.kill(member)
            since = time.time()
            run.trainer_returns(number)
            run.wait_event("load", by=f"{TRAINER}#{number}", since=since)
        run.wait_awake(since=time.time())
        run.cancel()


@pytest.mark.long
def test_store_and_manager_die_while_the_gpus_are_lent(tmp_path: Path) -> None:
    with LendingRun(tmp_path, ENDLESS) as run:
        run.wait_awake()
        store = run.test.state().replica(STORE)
        run.kill(store)
        run.wait(lambda s: s.replica(STORE).incarnation_number > store.incarnation_number and all_work(s))

        node = run.wait_awake(since=time.time())
        guest, managing = run.guest(node), holder(run.test.run)
        assert managing is not None
        os.kill(managing.pid, signal.SIGKILL)
        since = time.time()
        run.wait_unmanaged(lambda: run.happened("restored", by=TRAINER, since=since, times=2))
        run.wait_unmanaged(lambda: run.happened("wake", by="guest/", since=since, times=2))
        with run.managed():
            run.wait(lambda state: state.epoch == 2 and all_work(state))
            assert run.guest(node).incarnation == guest.incarnation
            assert run.trainer_incarnations() == 1
            run.cancel()


@pytest.mark.long
def test_lost_node_takes_its_guest_with_it_and_the_others_sleep(tmp_path: Path) -> None:
    extra = "[faults]\nallow = true\n"
    with LendingRun(tmp_path, ENDLESS, spares=1, extra=extra) as run:
        run.wait_awake()
        lost = run.member(1).node
        assert lost is not None
        injected = run.test.call("inject", run.test.run.id, "crash", "--target", lost, stdout=subprocess.DEVNULL)
        assert injected.wait(120) == 0
        since = time.time()
        run.wait(lambda state: state.replica(TRAINER).incarnation_number == 2 and all_work(state))
        run.wait_event("load", by="trainer/0.1", since=since)
        moved = run.member(1).node
        assert moved not in (None, lost)
        run.wait_event("build", by=f"guest/{moved}", since=since)
        run.wait(lambda state: state.replicas[guest_id(lost)].status is Status.RETIRED)
        run.cancel()


@pytest.mark.long
def test_allocation_at_its_walltime_or_preempted_takes_its_guests_with_it(tmp_path: Path) -> None:
    """The whole run moves to another allocation while guests are awake, and the trainer lends there again."""
    with LendingRun(tmp_path, ENDLESS, partial(submit_to, Queue("pool"))) as run:
        for preempts in (False, True):
            run.wait_awake(since=time.time())
            number, left = run.trainer_incarnations(), run.member(0).allocation
            assert left is not None
            end_allocation(run.test.run, left, 5.0 if preempts else 500.0, preempts=preempts)
            state = run.wait(lambda state, left=left: left not in state.allocations and all_work(state))  # type: ignore[misc]
            assert state.replica(TRAINER).incarnation_number == number + 1
            awake = run.wait_awake(since=time.time())
            assert awake in {run.member(rank).node for rank in range(2)}
        assert not [one for one in run.test.state().workers if one.failures], "an announced end counts as a failure"
        run.cancel()


@pytest.mark.long
def test_standby_on_the_node_of_an_awake_guest_waits_for_the_gpus(tmp_path: Path) -> None:
    with LendingRun(tmp_path, ENDLESS, warm=True) as run:
        run.wait(lambda s: {one.node for one in standbys(s)} >= {run.member(rank).node for rank in range(2)})
        run.wait_awake(since=time.time())
        run.kill(run.member(0))
        since = time.time()
        run.wait(lambda state: state.replica(TRAINER).incarnation_number == 2 and all_work(state))
        run.wait_event("load", since=since, times=2)
        assert adoptions(run.test), "no standby process was promoted"
        run.wait_awake(since=time.time())
        run.cancel()


@pytest.mark.long
def test_run_that_is_stopped_while_lent_is_resumed_with_other_tags(tmp_path: Path) -> None:
    with LendingRun(tmp_path, ENDLESS) as run:
        run.wait(lambda state: state.step >= 2)
        run.wait_awake(since=time.time())
        state = run.cancel()
        assert state.outcome is Outcome.CANCELLED
        other = tmp_path / "other.toml"
        other.write_text(run.toml.replace('trainer = ["rollout"]', ""))
        run.resume(other, state.step + 2)
        since = time.time()
        assert run.finish().step == state.step + 2
        assert not [one for one in fake_gpu.events(run.gpu) if one["at"] > since and one["who"].startswith("guest/")]
        other.write_text(run.toml)
        run.resume(other, state.step + 6)
        since = time.time()
        run.wait_awake(since=since)
        run.finish()


@pytest.mark.long
def test_trainer_whose_generation_is_fast_never_lends(tmp_path: Path) -> None:
    """The guard of lending.md, 4.2: rollouts that alone need no longer than the trainer get no help."""
    with LendingRun(tmp_path, 12, rollouts=2, tau=(0.005, 0.0), token_s=0.01) as run:
        run.finish()
        assert [commit.metrics["lent_s"] for commit in run.commits()][2:] == [0.0] * 10
