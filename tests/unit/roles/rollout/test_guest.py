"""A guest's loop with the engine in plain torch, a real baton and a leader that the test plays."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rrl
from rrl.core.types import Incarnation, NodeName, Version, guest_id, replica_id
from rrl.roles.lending.baton import LeaderBaton, Taken
from rrl.roles.models.policy import build_model
from rrl.roles.models.tensors import pack
from rrl.roles.rollout import main as rollout_main
from rrl.roles.rollout.engine import Engine, Sampling
from rrl.roles.rollout.main import generate_when_lent
from rrl.roles.rollout.torch_engine import TorchEngine
from rrl.roles.trajectories.client import Appended
from rrl.roles.trajectories.types import Item, Segment
from rrl.tests.support.listening_manager import wait_until
from rrl.tests.support.roles.trainer import harness
from rrl.transport.weights.manifest import layout

pytestmark = pytest.mark.torch

NODE = NodeName("n1")
LEADER = Incarnation(replica_id("trainer", 0), 1)
ENDLESS = 100_000
PLACES = 4


class _Answered:
    """A request that is answered when ``ready`` returns True."""

    def __init__(self, answer: Callable[[], Any], ready: Callable[[], bool] = lambda: True, at_most: int = 0) -> None:
        self._answer, self._ready, self.at_most = answer, ready, at_most

    @property
    def answered(self) -> bool:
        return self._ready()

    def finish(self) -> Any:
        wait_until(self._ready)
        return self._answer()


class _Worker:
    """A worker of a guest, with a store that leases ``items`` and keeps what is appended."""

    def __init__(self, items: int = PLACES) -> None:
        self.launch = SimpleNamespace(incarnation=Incarnation(guest_id(NODE), 1), guest=True, gpus=0)
        self.run_dir, self.node = SimpleNamespace(id=f"run-{os.urandom(4).hex()}"), NODE
        self.keys = SimpleNamespace(secret=os.urandom(32))
        self.job = SimpleNamespace(agents=None, endpoint=None)
        self.stopping = threading.Event()
        self.version = Version(0, 1)
        self.phases: list[str] = []
        self.segments: list[Segment] = []
        self.handed_over: list[int] = []
        """Number of tokens that each hand-over appended."""
        self.leased: set[int] = set()
        self.probed: list[str] = []
        self._items, self._probe_due = items, False
        self._probe: Callable[[], object] = lambda: ""
        self._loaded: Version | None = None

    @property
    def in_phase(self) -> str:
        return self.phases[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.phases[-1] if self.phases else "starting"
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.append(before)

    def on_probe(self, handler: Callable[[], object]) -> None:
        self._probe = handler

    def probe(self) -> str:
        self._probe_due = True
        wait_until(lambda: not self._probe_due)
        return self.probed[-1]

    def answer_probe(self) -> None:
        if self._probe_due:
            self.probed.append(str(self._probe()))
            self._probe_due = False

    def new_weights(self, *, again: bool = False) -> Any:
        self.answer_probe()
        if self._loaded == self.version and not again:
            return None
        self._loaded = self.version
        return _weights(self.version)

    def lease(self, at_most: int) -> tuple[Item, ...]:
        raise AssertionError("a guest must notice within milliseconds that it is asked for the GPUs")

    def start_lease(self, at_most: int) -> Any:
        def answer() -> tuple[Item, ...]:
            count = min(at_most, self._items - len(self.leased))
            free = [number for number in range(self._items) if number not in self.leased][:count]
            self.leased.update(free)
            return tuple(Item(n, n, (2, 3, n % 5 + 2), self._so_far(n), ENDLESS) for n in free)

        return _Answered(answer, lambda: len(self.leased) < self._items or self.in_phase != "wait_work", at_most)

    def _so_far(self, trajectory: int) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.trajectory == trajectory)[-2:]

    def start_append(self, segments: Sequence[Segment], finished: Sequence[int], lease: int) -> Any:
        self.segments += segments
        return _Answered(lambda: Appended((), ()))

    def hand_over(self, segments: Sequence[Segment], finished: Sequence[int] = ()) -> None:
        self.segments += segments
        self.handed_over.append(sum(len(segment.tokens) for segment in segments))
        self.leased.clear()


def _weights(version: Version) -> Any:
    packed = pack(harness.learner(seed=version.step).weights())
    specs, nbytes = layout([(name, dtype, shape, data.nbytes) for name, dtype, shape, data in packed])
    flat = bytearray(nbytes)
    for spec, (*_, data) in zip(specs, packed, strict=True):
        flat[spec.offset : spec.offset + spec.nbytes] = data
    return SimpleNamespace(version=version, tensors=specs, flat=memoryview(flat))


class _Engine(TorchEngine):
    """The engine in plain torch, with a list of what was called, and tokens that take a little time."""

    def __init__(self) -> None:
        sampling = Sampling(segment_tokens=2)
        model = build_model(harness.SMALL, 13, 3)
        super().__init__(model, stop_tokens=frozenset({13}), seed=0, sampling=sampling, lease=PLACES)
        self.did: list[str] = []

    def load(self, version: Version, tensors: Any) -> None:
        self.did.append(f"load {version}")
        super().load(version, tensors)

    def sleep(self) -> None:
        self.did.append("sleep")
        super().sleep()

    def wake(self) -> None:
        self.did.append("wake")
        super().wake()

    def nbytes(self) -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in self._model.parameters())


class _Scene:
    def __init__(self, me: _Worker, build: Callable[[], Engine] = _Engine) -> None:
        self.me, self.built, self.error = me, list[Any](), None
        self.leader = LeaderBaton(me.run_dir.id, NODE, 0, me.keys.secret)
        assert self.leader.take(60.0, lambda: False).held

        def building() -> Engine:
            self.built.append(build())
            return cast(Engine, self.built[-1])

        def loop() -> None:
            try:
                generate_when_lent(cast(rrl.Worker, me), building)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=loop)
        self.thread.start()

    def lend(self) -> None:
        wait_until(lambda: self.leader.guest is not None)
        assert self.leader.lend(LEADER, lambda guest: True) == self.me.launch.incarnation

    def generates(self) -> None:
        before = len(self.me.segments)
        wait_until(lambda: len(self.me.segments) > before)

    def take(self) -> Taken:
        return self.leader.take(60.0, lambda: False)

    def end(self) -> None:
        self.me.stopping.set()
        self.thread.join(60.0)
        assert not self.thread.is_alive()
        self.leader.close()


@pytest.fixture
def scene() -> Iterator[_Scene]:
    scene = _Scene(_Worker())
    yield scene
    scene.end()
    assert scene.error is None


def test_a_guest_builds_its_engine_when_it_is_lent_and_loads_after_each_wake(scene: _Scene) -> None:
    wait_until(lambda: scene.leader.guest is not None)
    assert not scene.leader.guest_has_engine
    assert not scene.built, "an engine before the first lend would use memory that is the trainer's"
    scene.lend()
    scene.generates()
    (engine,) = scene.built
    assert engine.did == ["load v0.1", "sleep", "wake", "load v0.1"]
    assert scene.take().clean
    assert engine.nbytes() == 0
    assert scene.me.handed_over != []
    assert not scene.me.leased
    wait_until(lambda: scene.leader.guest_has_engine)
    scene.lend()
    scene.generates()
    assert engine.did[4:] == ["sleep", "wake", "load v0.1"], "a wake without a load would sample from lost weights"
    scene.take()
    scene.me.version = Version(1, 1)
    scene.lend()
    wait_until(lambda: engine.did[-1] == "load v1.1")
    assert len(scene.built) == 1


def test_twenty_hand_overs_take_a_fraction_of_a_second_each(scene: _Scene) -> None:
    times: list[float] = []
    for _ in range(20):
        scene.lend()
        scene.generates()
        taken = scene.take()
        assert taken.clean
        times.append(taken.wait_s)
    assert statistics.median(times) < 0.3, sorted(times)


@pytest.mark.parametrize("state", ["asleep", "generating", "waiting for work"])
def test_a_guest_stops_in_each_state(state: str) -> None:
    scene = _Scene(_Worker(0 if state == "waiting for work" else PLACES))
    wait_until(lambda: scene.leader.guest is not None)
    if state != "asleep":
        scene.lend()
        wait_until(lambda: scene.me.in_phase == ("generate" if state == "generating" else "wait_work"))
    scene.me.stopping.set()
    scene.thread.join(30.0)
    assert not scene.thread.is_alive()
    assert scene.error is None
    assert scene.take().held
    scene.end()


def test_a_guest_without_work_gives_the_gpus_back_at_once() -> None:
    scene = _Scene(_Worker(0))
    scene.lend()
    wait_until(lambda: scene.me.in_phase == "wait_work")
    taken = scene.take()
    assert taken.clean
    assert taken.wait_s < 5.0
    assert scene.me.handed_over == [0]
    scene.end()


def test_work_that_is_leased_while_the_guest_hands_over_is_handed_over_too() -> None:
    me = _Worker(0)
    scene = _Scene(me)
    scene.lend()
    wait_until(lambda: me.in_phase == "wait_work")
    hand_over = me.hand_over

    def late(segments: Sequence[Segment], finished: Sequence[int] = ()) -> None:
        hand_over(segments, finished)
        me._items = 2 if len(me.handed_over) == 1 else 0

    me.hand_over = late  # type: ignore[method-assign]
    assert scene.take().clean
    assert me.handed_over == [0, 0]
    assert not me.leased
    scene.end()


def test_the_end_of_the_trainer_ends_the_lending(scene: _Scene) -> None:
    scene.lend()
    scene.generates()
    scene.leader.close()
    wait_until(lambda: scene.me.in_phase == "asleep")
    assert scene.built[0].did[-1] == "sleep"
    scene.leader = LeaderBaton(scene.me.run_dir.id, NODE, 0, scene.me.keys.secret)
    assert scene.take().held
    scene.lend()
    scene.generates()


def test_probes_are_answered_asleep_and_awake(scene: _Scene) -> None:
    wait_until(lambda: scene.leader.guest is not None)
    assert scene.me.probe() == "the guest waits for the trainer to lend the GPUs"
    scene.lend()
    scene.generates()
    assert scene.me.probe() == "the engine generated a token"
    scene.take()
    assert scene.me.probe() == "the guest waits for the trainer to lend the GPUs"


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_an_engine_that_cannot_sleep_or_wake_ends_the_process(call: str) -> None:
    class Broken(_Engine):
        pass

    def fail(self: _Engine) -> None:
        raise RuntimeError("CUDA error")

    setattr(Broken, call, fail)
    scene = _Scene(_Worker(), Broken)
    scene.lend()
    scene.thread.join(60.0)
    assert isinstance(scene.error, RuntimeError)
    scene.leader.close()


def test_a_guest_connects_only_when_it_has_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "WEIGHTS_POLL_S", 0.01)
    me = _Worker()
    new_weights = me.new_weights
    monkeypatch.setattr(me, "new_weights", lambda **_: None)
    scene = _Scene(me)
    time.sleep(0.3)
    assert scene.leader.guest is None
    monkeypatch.setattr(me, "new_weights", new_weights)
    wait_until(lambda: scene.leader.guest is not None)
    scene.end()
