"""When the trainer lends, what it drops, and that nobody else touches its host copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.distributed_c10d import PrefixStore

from rrl.core.types import Incarnation, NodeName, ReplicaId
from rrl.roles.models.policy import build_model
from rrl.roles.trainer import lending, process_group
from rrl.roles.trainer.host_buffers import Layout
from rrl.roles.trainer.learner import Learner
from rrl.roles.trainer.lending import Batons, DeviceState, Learned, Lender, Wish, judge, shortage
from rrl.roles.trainer.process_group import Gang
from rrl.roles.trajectories.batches import Part
from rrl.roles.trajectories.types import Balance
from rrl.roles.worker.connection import Stopping
from rrl.tests.support.listening_manager import TIMEOUT_S, Lab, wait_until
from rrl.tests.support.roles.trainer import harness
from rrl.tests.support.roles.trainer.guests import Guest
from rrl.transport.messages import Peer, Peers

pytestmark = pytest.mark.torch

NEVER, ALL = Wish(), Wish(built=True, unbuilt=True)
KNOWN = Learned(train_s=40.0, back_s=1.0, cost_s=2.0, build_s=30.0)


@pytest.mark.parametrize(
    ("balance", "learned", "expected"),
    [
        pytest.param(Balance(0.0, 80.0), KNOWN, Wish(balanced=True), id="balanced"),
        pytest.param(Balance(4.0, 80.0), KNOWN, NEVER, id="short by less than two hand-overs"),
        pytest.param(Balance(4.1, 80.0), KNOWN, Wish(built=True), id="short by more, but not by a build"),
        pytest.param(Balance(64.1, 80.0), KNOWN, ALL, id="short by more than a build"),
        pytest.param(Balance(64.1, 40.0), KNOWN, NEVER, id="the rollouts are as fast as the trainer"),
        pytest.param(Balance(0.1, 80.0), Learned(), ALL, id="the first hand-overs are not judged"),
        pytest.param(Balance(0.1, 80.0), Learned(90.0), NEVER, id="the first one only if the rollouts are slower"),
        pytest.param(Balance(inf, inf), KNOWN, Wish(built=True, unbuilt=True, patient=True), id="no rollouts"),
        pytest.param(Balance(0.0, inf), KNOWN, Wish(balanced=True), id="no rollouts, and all is there"),
        pytest.param(Balance(inf, inf), Learned(), Wish(built=True, unbuilt=True, patient=True), id="nothing is known"),
    ],
)
def test_trainer_lends_only_if_it_gains(balance: Balance, learned: Learned, expected: Wish) -> None:
    assert judge(balance, learned) == expected


def _held_bytes(learner: Learner) -> int:
    models = [learner.model, *filter(None, [learner.reference])]
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(t.untyped_storage().nbytes() for t in (*parameters, *gradients, *learner.tensors().values()))


def _batch(number: int) -> Any:
    engine = harness.engine(harness.learner(), seed=number)
    return harness.sampled_batch(
        engine, [(2, 3), (4, 5)], 2 * number, 4, 3, number, lambda item, tokens: (tokens[0] / 13, tokens[0] / 13)
    )


def test_dropped_state_uses_no_memory_and_comes_back_bit_equal() -> None:
    def trained(drops: bool) -> Learner:
        learner = harness.learner(kl=0.1)
        learner.reference = build_model(harness.SMALL, 13, 5).requires_grad_(False)
        layout = Layout(learner.tensors())
        state, copy = DeviceState(learner, torch.device("cpu"), layout), memoryview(bytearray(layout.nbytes))
        for number in range(1, 4):
            if drops:
                layout.fill(copy, learner.tensors())
                state.drop()
                assert _held_bytes(learner) == 0
                state.restore(copy)
            harness.step(learner, _batch(number))
        return learner

    lent, never = trained(drops=True), trained(drops=False)
    for name, tensor in never.tensors().items():
        assert torch.equal(lent.tensors()[name], tensor), name
    assert lent.extra_state() == never.extra_state()


class _Worker(SimpleNamespace):
    """A trainer of one process whose store answers with ``balances``, the last one for ever, on a node with guests."""

    def __init__(self, path: Path, balances: list[Balance], steps: int = 9) -> None:
        self.lab = Lab(path)
        self.balances, self.phases, self.asked = balances, list[str](), list[float]()
        self.ready = list[Part]()
        self.generates: Callable[[], bool] = lambda: True
        """Returns whether each guest that has the GPUs has begun to generate."""
        super().__init__(
            node=NodeName("n0"),
            keys=self.lab.keys,
            run_dir=self.lab.run,
            stopping=threading.Event(),
            launch=SimpleNamespace(incarnation=Incarnation(ReplicaId("trainer/0"), 1)),
            job=SimpleNamespace(
                guests_on_node=1, steps=steps, tags=SimpleNamespace(handback=30.0), eval=SimpleNamespace()
            ),
            peers=Peers(1, 1, {}),
        )

    def knows(self, *guests: Guest) -> None:
        peers = {guest.incarnation.replica: Peer(guest.incarnation) for guest in guests}
        self.peers = Peers(1, 2, peers)

    @contextmanager
    def phase(self, name: str, waits_for: str | None = None) -> Iterator[None]:
        self.phases.append(name)
        yield

    def blocked_on(self, replica: ReplicaId) -> Any:
        return nullcontext()

    def await_balance(self, number: int, train_s: float, back_s: float, wait: float = 0.0) -> Balance:
        if self.stopping.is_set():
            raise Stopping
        self.asked.append(wait)
        if wait:
            wait_until(self.generates)
        self.stopping.wait(0.01 if wait else 0.0)
        return self.balances.pop(0) if len(self.balances) > 1 else self.balances[0]

    def parts(self, after: int, *_: object) -> Iterator[Part]:
        return iter(self.ready)


class _Scene:
    """A lender with its guests; ``state`` records what it drops and restores."""

    def __init__(self, path: Path, balances: list[Balance]) -> None:
        self.me = _Worker(path, balances)
        me: Any = self.me
        self.batons = Batons(me)
        self.batons.claim(True)
        self.done = list[str]()
        state: Any = SimpleNamespace(
            drop=lambda: self.done.append("drop"),
            restore=self._restore,
            await_memory=lambda: self.done.append("await memory"),
            report_shortage=lambda: None,
        )
        saver: Any = SimpleNamespace(host_copy=lambda: memoryview(b"copy"))
        self.lender = Lender(me, Gang(), self.batons, state, saver)
        self.guests = list[Guest]()
        self.me.generates = lambda: not self.batons.lent or any(guest.awake.is_set() for guest in self.guests)

    def _restore(self, copy: memoryview) -> None:
        assert not self.batons.lent, "restored while a guest had the GPUs"
        self.done.append("restore")

    def guest(self, number: int = 1) -> Guest:
        """Start a guest that the worker knows, and wait until it sleeps at the leader's."""
        guest = Guest(self.me.run_dir.id, self.me.node, self.me.keys, number)
        self.guests.append(guest)
        self.me.knows(guest)
        wait_until(lambda: any(self.batons.sleeping()) or guest.turns)  # the lender may be faster
        return guest

    def close(self) -> None:
        for guest in self.guests:
            guest.end()
        for baton in self.batons._batons:
            baton.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., _Scene]]:
    made: list[_Scene] = []

    def make(*balances: Balance) -> _Scene:
        made.append(_Scene(tmp_path / str(len(made)), list(balances)))
        return made[-1]

    yield make
    for each in made:
        each.close()


LACKS, THERE = Balance(10.0, 99.0), Balance(0.0, 99.0)


def test_gpus_are_lent_until_the_step_is_balanced(scene: Callable[..., _Scene]) -> None:
    one = scene(LACKS, LACKS, LACKS, THERE)
    guest = one.guest()
    assert one.lender._prepare(1)
    assert (guest.turns, one.done) == (1, ["drop", "restore"])
    assert one.me.asked == [0.0, 1.0, 1.0, 1.0]
    assert one.me.phases == ["wait_data", "lend"]
    assert one.lender.metrics().keys() == {"lent_s"}, "the guest built its engine: no other hand-over will cost as much"
    assert one.lender._prepare(2)  # balanced
    assert one.lender.metrics()["lent_s"] == 0
    for number in range(3, 6):
        assert one.lender._learned().cost_s is None
        wait_until(lambda: any(one.batons.sleeping()))
        one.me.balances = [LACKS, THERE]
        assert one.lender._prepare(number)
        assert 0 < one.lender.metrics()["lend_cost_s"] <= one.lender.metrics()["lent_s"]
    assert one.lender._learned().cost_s == one.lender.metrics()["lend_cost_s"]
    assert guest.turns == 4


def test_nothing_is_dropped_for_a_guest_that_is_not_there_or_not_current(scene: Callable[..., _Scene]) -> None:
    one = scene(LACKS, LACKS, THERE)
    assert one.lender._prepare(1)
    one.guest()
    one.me.knows()
    assert one.lender._prepare(1)
    assert one.done == []


def test_trainer_without_other_rollouts_waits_for_a_guest_and_lends_again_to_its_successor(
    scene: Callable[..., _Scene],
) -> None:
    one = scene(Balance(inf, inf))
    prepared = threading.Thread(target=one.lender._prepare, args=(1,), daemon=True)
    prepared.start()
    first = one.guest()
    wait_until(lambda: first.turns == 1)
    first.end()  # as if it died: the kernel frees the address
    one.guests.clear()
    second = one.guest(2)
    wait_until(lambda: second.turns == 1)
    one.me.balances[0] = THERE
    prepared.join(TIMEOUT_S)
    assert one.done == ["drop", "await memory", "restore"]  # that of the first guest


def test_step_goes_on_without_a_guest_that_ended_and_waits_for_its_memory_if_it_did_not_sleep(
    scene: Callable[..., _Scene],
) -> None:
    one = scene(LACKS)
    guest = one.guest()
    prepared = threading.Thread(target=one.lender._prepare, args=(1,), daemon=True)
    prepared.start()
    wait_until(lambda: guest.turns == 1)
    guest.end()
    one.guests.clear()
    prepared.join(TIMEOUT_S)
    assert one.done == ["drop", "await memory", "restore"]
    assert "lend_cost_s" not in one.lender.metrics(), "a hand-over from a guest that died tells nothing about its cost"


@pytest.mark.parametrize("lent", [False, True])
def test_stop_request_ends_the_iteration_without_a_restore(scene: Callable[..., _Scene], lent: bool) -> None:
    one = scene(Balance(inf, inf))
    guest = one.guest() if lent else None
    ended = list[list[Part]]()
    iterating = threading.Thread(target=lambda: ended.append(list(one.lender.parts(0))), daemon=True)
    iterating.start()
    wait_until(lambda: guest.turns == 1 if guest else len(one.me.asked) > 1)
    one.me.stopping.set()
    iterating.join(TIMEOUT_S)
    assert ended == [[]]
    assert "restore" not in one.done


def test_gpus_are_lent_for_the_last_evaluation(scene: Callable[..., _Scene]) -> None:
    one = scene(Balance(inf, inf))
    guest = one.guest()
    waiting = threading.Thread(target=one.lender.until_evaluated, daemon=True)
    waiting.start()
    wait_until(lambda: guest.turns == 1)
    one.me.balances[0] = THERE  # it is settled
    waiting.join(TIMEOUT_S)
    assert one.done == ["drop"]


def test_time_of_a_step_is_that_in_which_its_parts_are_used(scene: Callable[..., _Scene], monkeypatch: Any) -> None:
    one = scene(THERE)
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(lending, "time", clock)
    one.me.job.steps = 1
    one.me.ready = [SimpleNamespace(number=1, index=index, last=index == 1) for index in range(2)]  # type: ignore
    for _ in one.lender.parts(0):
        now[0] += 3
    assert one.lender._learned().train_s == 6


def test_no_member_uses_a_gpu_before_the_leaders_have_the_batons() -> None:
    """The first member of a node is its leader. The others wait for it, however long that takes."""
    store = HashStore()
    may_claim, claims, done = threading.Event(), list[tuple[int, bool]](), list[int]()
    stopping = threading.Event()

    def member(rank: int, node: str) -> None:
        me: Any = SimpleNamespace(rank=rank, world=3, node=NodeName(node), stopping=stopping)

        def claim(leader: bool) -> None:
            claims.append((rank, leader))
            assert not leader or may_claim.wait(TIMEOUT_S)

        process_group._claim_gpus(me, PrefixStore("gang", store), claim)
        done.append(rank)

    members = [threading.Thread(target=member, args=words, daemon=True) for words in enumerate(("a", "a", "b"))]
    for each in members:
        each.start()
    wait_until(lambda: len(claims) == 3)
    assert sorted(claims) == [(0, True), (1, False), (2, True)]
    assert done == []
    may_claim.set()
    for each in members:
        each.join(TIMEOUT_S)
    assert sorted(done) == [0, 1, 2]


def test_shortage_names_the_figure_and_the_key() -> None:
    text = shortage(60 * 2**30, 72 * 2**30)
    assert "leave 60.0 GiB" in text
    assert "used up to 72.0 GiB" in text
    assert "vllm.gpu_memory_utilization" in text
