"""The rollout's leases, weights, appends and phases, with an engine that only counts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rrl
from rrl.core.types import Version
from rrl.roles.rollout import main as rollout_main
from rrl.roles.rollout.engine import StepOutput
from rrl.roles.rollout.main import run
from rrl.roles.trajectories.client import Appended
from rrl.roles.trajectories.types import Item, Segment

pytestmark = pytest.mark.torch

FIRST = Version(0, 1)


class _Engine:
    """An engine that makes one token of each trajectory per step, and returns two tokens as a segment.

    A trajectory with ``max_new`` tokens is complete.
    """

    def __init__(self, places: int, on_step: Callable[[int], None] = lambda _: None) -> None:
        self.did: list[Any] = []
        self.did_with: list[set[int]] = []
        """The trajectories that each step has extended."""
        self._places, self._on_step, self._steps = places, on_step, 0
        self._left: dict[int, int] = {}
        self._made: dict[int, list[Segment]] = {}

    @property
    def free_slots(self) -> int:
        return self._places - len(self._left)

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, items: Sequence[Item]) -> None:
        self._left |= {item.trajectory: item.max_new for item in items}

    def step(self) -> StepOutput:
        self._steps += 1
        self._on_step(self._steps)
        self.did.append("step")
        self.did_with.append(set(self._left))
        finished = []
        for trajectory in self._left:
            self._left[trajectory] -= 1
            self._made.setdefault(trajectory, []).append(Segment(trajectory, 0, (5,), (0.0,), FIRST))
            if self._left[trajectory] == 0:
                finished.append(trajectory)
        for trajectory in finished:
            del self._left[trajectory]
        if not finished and self._steps % 2:
            return [], []
        return self.flush()[0], finished

    def flush(self) -> StepOutput:
        made, self._made = [segment for each in self._made.values() for segment in each], {}
        return made, []

    def abort(self, trajectories: Iterable[int]) -> None:
        for trajectory in trajectories:
            self._left.pop(trajectory, None)
            self.did.append(f"dropped {trajectory}")

    def load(self, version: Version, tensors: Iterable[Any]) -> None:
        self.did.append(str(version))

    def probe(self) -> None:
        self.did.append("probe")

    def sleep(self) -> None:
        raise AssertionError("only a guest's engine sleeps")

    def wake(self) -> None:
        raise AssertionError("only a guest's engine wakes")

    def close(self) -> None:
        self.did.append("closed")


class _Pending:
    """An append that is answered by :meth:`answer`, or at the latest when the rollout waits for it."""

    def __init__(self, appended: Appended, on_finish: Callable[[], None]) -> None:
        self.answered = False
        self._appended, self._on_finish = appended, on_finish

    def answer(self) -> None:
        self.answered = True

    def finish(self) -> Appended:
        self._on_finish()
        return self._appended


class _Waiting:
    """A request for work that waits for :meth:`answer`.

    If the rollout waits for an answer before this call, it gets no items and stops.
    """

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self.answered = self.received = False
        self._items: tuple[Item, ...] = ()

    def answer(self, *items: Item) -> None:
        self.answered, self._items = True, items

    def finish(self) -> tuple[Item, ...]:
        self.received = True
        return self._items


class _Worker:
    """A worker that leases the items of ``waiting``, and requests the stop once no item is waiting or in the engine.

    ``lost`` are the trajectories that the answer to each append names as lost.
    """

    def __init__(self, waiting: list[Item], *lost: tuple[int, ...], agents: object = None) -> None:
        self.job = SimpleNamespace(agents=agents, endpoint=None)
        self.stopping = threading.Event()
        self.in_phase = "between"
        self.leased: list[tuple[int, bool, str]] = []
        self.appended: list[tuple[list[int], list[int], str]] = []
        """(trajectories of the segments, finished trajectories, phase) of each append."""
        self.open: _Pending | None = None
        self.waiting: _Waiting | None = None
        self.waited_at: list[int] = []
        """Number of appends at each time when the rollout waited for an answer."""
        self.loaded_in: list[str] = []
        self.new: list[Version] = [FIRST]
        self._waiting, self._lost = waiting, list(lost)
        self.probe: Callable[[], object] = lambda: "nobody answers"

    def on_probe(self, handler: Callable[[], object]) -> None:
        self.probe = handler

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.in_phase = self.in_phase, name
        try:
            yield
        finally:
            self.in_phase = before

    def lease(self, at_most: int, *, wait: bool = True) -> tuple[Item, ...]:
        self.leased.append((at_most, wait, self.in_phase))
        given, self._waiting = self._waiting[:at_most], self._waiting[at_most:]
        if wait and not given:
            self.stopping.set()
        return tuple(given)

    def start_append(self, segments: Sequence[Segment], finished: Sequence[int], lease: int) -> _Pending:
        assert self.open is None, "a second append was started before the answer to the first"
        self.appended.append(([segment.trajectory for segment in segments], list(finished), self.in_phase))
        items = self.lease(lease, wait=False) if lease else ()
        self.open = _Pending(Appended(self._lost.pop(0) if self._lost else (), items), self._on_finish)
        return self.open

    def start_lease(self, at_most: int) -> _Waiting:
        assert self.waiting is None or self.waiting.received, (
            "a second request for work was started before the answer to the first"
        )
        self.waiting = _Waiting(at_most)
        return self.waiting

    def _on_finish(self) -> None:
        assert self.open is not None
        if not self.open.answered:
            self.waited_at.append(len(self.appended))
        self.open = None

    def new_weights(self) -> Any:
        if not self.new:
            return None
        return SimpleNamespace(version=self.new.pop(0), tensors=(), flat=memoryview(b""))


def _items(*lengths: int) -> list[Item]:
    return [Item(n, n, (2,), (), length) for n, length in enumerate(lengths)]


def _roll(me: _Worker, engine: _Engine) -> None:
    run(cast(rrl.Worker, me), engine)


def test_busy_engine_gets_more_work_without_leaving_its_phase() -> None:
    me, engine = _Worker(_items(1, 3, 2)), _Engine(places=2)
    _roll(me, engine)
    assert me.leased == [
        (2, True, "between"),
        (1, False, "generate"),  # one trajectory is complete, and the other one continues
        (2, False, "generate"),
        (2, True, "between"),
    ]
    assert [finished for _, finished, _ in me.appended if finished] == [[0], [1, 2]]
    assert {phase for *_, phase in me.appended} == {"generate"}
    assert sum(len(segments) for segments, *_ in me.appended) == 6


def test_engine_without_free_slots_generates_on_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", 0.0)
    open_at_step: list[bool] = []
    me = _Worker(_items(5))
    _roll(me, _Engine(1, on_step=lambda _: open_at_step.append(me.open is not None)))
    assert open_at_step == [False, False, True, True, True]
    assert me.appended == [([0, 0], [], "generate"), ([0, 0], [], "generate"), ([0], [0], "generate")]
    assert me.waited_at == [1, 2, 3], "only the next append, or an empty engine, may wait for the answer to an append"


def test_answer_reaches_the_engine_before_the_next_append(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", 0.0)

    def on_step(number: int) -> None:
        if number == 3:
            assert me.open is not None
            me.open.answer()

    me = _Worker(_items(9, 4), (0,))
    engine = _Engine(2, on_step=on_step)
    _roll(me, engine)
    assert engine.did == ["v0.1", "probe", "step", "step", "step", "dropped 0", "step"]
    assert me.waited_at == [2], "the rollout has waited for the first answer"


def test_tokens_that_follow_those_of_a_lost_trajectory_are_not_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", 0.0)
    me = _Worker(_items(9, 4), (0,))
    _roll(me, _Engine(2))
    assert [(segments, finished) for segments, finished, _ in me.appended] == [([0, 0, 1, 1], []), ([1, 1], [1])]


def test_complete_trajectory_is_appended_although_all_others_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class WholeLeases(_Engine):
        """Takes new work only when all of its trajectories are complete, like the engine in plain torch."""

        @property
        def free_slots(self) -> int:
            return 0 if self.has_work else 2

    def on_step(number: int) -> None:
        if number == 4:
            monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", math.inf)
            assert me.open is not None
            me.open.answer()

    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", 0.0)
    me = _Worker(_items(4, 9), (1,))
    engine = WholeLeases(2, on_step=on_step)
    _roll(me, engine)
    assert [(segments, finished) for segments, finished, _ in me.appended] == [([0, 0, 1, 1], []), ([0, 0], [0])]
    assert not engine.has_work


def test_results_of_a_full_engine_are_appended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", math.inf)
    me = _Worker(_items(7))
    _roll(me, _Engine(1))
    assert me.appended == [([0] * 7, [0], "generate")]


def test_turn_that_arrives_during_a_step_of_another_begins_after_that_step() -> None:
    def on_step(number: int) -> None:
        if number == 2:
            assert me.waiting is not None
            me.waiting.answer(Item(7, 7, (2,), (), 2))

    me = _Worker(_items(8), agents="any")
    engine = _Engine(3, on_step=on_step)
    _roll(me, engine)
    assert engine.did_with[:5] == [{0}, {0}, {0, 7}, {0, 7}, {0}]


def test_append_requests_work_only_for_slots_without_a_pending_request() -> None:
    me = _Worker(_items(1, 4), agents="any")
    _roll(me, _Engine(3))
    assert me.waiting is not None
    assert me.waiting.at_most == 2
    assert [at_most for at_most, wait, _ in me.leased if not wait] == [2, 1], (
        "the last request must come when all three places are free"
    )


def test_new_weights_are_loaded_and_probed_before_the_first_step_and_between_steps() -> None:
    me = _Worker(_items(4))
    engine = _Engine(2, on_step=lambda number: me.new.append(Version(number, 1)) if number == 2 else None)
    _roll(me, engine)
    assert engine.did == ["v0.1", "probe", "step", "step", "v2.1", "probe", "step", "step"]


def test_lost_trajectory_is_dropped_by_the_engine() -> None:
    me, engine = _Worker(_items(2, 9, 9), (1, 2)), _Engine(3)
    _roll(me, engine)
    assert engine.did[-2:] == ["dropped 1", "dropped 2"]


def test_rollout_asked_to_stop_hands_over_its_tokens_and_samples_no_more() -> None:
    me = _Worker(_items(9))
    engine = _Engine(1, on_step=lambda number: me.stopping.set() if number == 3 else None)
    _roll(me, engine)
    assert engine.did.count("step") == 3
    assert me.appended == [([0, 0, 0], [], "between")]


def test_a_rollout_asked_to_stop_waits_until_all_tokens_are_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_main, "APPEND_INTERVAL_S", 0.0)
    me = _Worker(_items(9))
    _roll(me, _Engine(1, on_step=lambda number: me.stopping.set() if number == 3 else None))
    assert me.appended == [([0, 0], [], "generate"), ([0], [], "between")]
    assert me.waited_at == [1, 2]


def test_a_rollout_asked_to_stop_leases_no_more_work() -> None:
    me = _Worker(_items(9))
    _roll(me, _Engine(2, on_step=lambda number: me.stopping.set() if number == 3 else None))
    assert me.appended == [([0, 0], [], "generate"), ([0], [], "between")]
    assert me.leased == [(2, True, "between"), (1, False, "generate")], "the append after the stop has leased work"


def test_probe_runs_the_engine_once_it_has_weights() -> None:
    me, probe_texts = _Worker(_items(2)), []
    me.new = []

    def ask(_: int) -> None:
        probe_texts.append(me.probe())
        me.new.append(FIRST)

    engine = _Engine(1, on_step=ask)
    _roll(me, engine)
    assert probe_texts == ["no weights have been loaded yet", "the engine generated a token"]
    assert engine.did == ["step", "v0.1", "probe", "probe", "step", "v0.1", "probe"]


def test_an_engine_that_fails_ends_the_rollout() -> None:
    def fail(number: int) -> None:
        raise RuntimeError("the engine is dead")

    with pytest.raises(RuntimeError, match="the engine is dead"):
        _roll(_Worker(_items(9)), _Engine(1, on_step=fail))


def test_the_engine_is_built_once_the_rollout_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Joining:
        """A worker that records when the role enters its ``with`` block."""

        launch = SimpleNamespace(guest=False)

        def __enter__(self) -> None:
            done.append("joined")

        def __exit__(self, *_: object) -> None:
            done.append("left")

    def build() -> _Engine:
        done.append("built")
        return _Engine(1)

    monkeypatch.setattr(rrl, "join", Joining)
    monkeypatch.setattr(rollout_main, "_builder", lambda me: build)
    monkeypatch.setattr(rollout_main, "run", lambda me, engine: None)
    rollout_main.main()
    assert done == ["joined", "built", "left"]
