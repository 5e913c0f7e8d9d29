"""When a step is balanced, so that a trainer that has lent its GPUs takes them back.

No layout may come to a stop: a trainer that trains never lends before its next step, and a guest that sleeps makes
nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrl.core.task_spec import EvalSpec
from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.steps.evaluations import EvaluationSettings
from rrl.roles.trajectories.steps.forecast import Outlook, balance
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import Balance, Denied, Done, Item, PartBound, Prompt, Segment
from rrl.tests.support.examples import examples
from rrl.tests.support.roles.trajectories.crew import (
    ALL,
    BATCH,
    GROUP,
    MAX_NEW,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    generate,
    incarnation_of,
    lease,
    open_store,
    score,
    segment,
)
from rrl.tests.support.roles.trajectories.virtual_run import TRAINER as TRAINER_NAME
from rrl.tests.support.roles.trajectories.virtual_run import Setting, VirtualRun

GUEST = incarnation_of("guest/n1")
STEP = Outlook(
    size=8,
    there=2,
    has_part=True,
    missing=6,
    evaluation=0.0,
    evaluated=True,
    has_rollouts=True,
    pace=0.5,
    has_work=True,
)


def short_s(train_s: float = 4.0, back_s: float = 0.0, lent: bool = True, **changed: Any) -> float:
    return balance(msgspec.structs.replace(STEP, **changed), train_s, back_s, lent=lent).short_s


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_step_is_short_by_the_time_that_the_rest_takes_longer_than_training_what_is_there() -> None:
    assert short_s(train_s=4.0) == 6 / 0.5 - 4.0 * 2 / 8
    assert balance(STEP, 4.0, 0.0, lent=False).alone_s == 8 / 0.5
    assert short_s(train_s=48.0) == 0.0


def test_the_gpus_are_taken_back_as_early_as_handing_back_takes() -> None:
    assert short_s(train_s=4.0, back_s=10.9) == 11.0
    assert short_s(train_s=4.0, back_s=11.0) == 0.0


def test_an_evaluation_is_work_ahead_of_which_nothing_can_be_trained() -> None:
    assert short_s(train_s=0.0, evaluated=False, evaluation=3.0) == (3 + 6) / 0.5
    assert short_s(train_s=0.0, evaluated=False, evaluation=3.0, there=8, missing=0) == 3 / 0.5


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"pace": None}, 0.0), ({"pace": None, "there": 0, "has_part": False}, math.inf), ({"pace": 0.0}, 0.0)],
)
def test_without_a_known_pace_a_step_is_short_only_if_nothing_can_be_trained(
    changed: dict[str, Any], expected: float
) -> None:
    assert short_s(**changed) == expected
    assert balance(msgspec.structs.replace(STEP, **changed), 1.0, 0.0, lent=False).alone_s == math.inf


def test_without_rollouts_the_whole_step_and_the_evaluation_must_be_there() -> None:
    alone: dict[str, Any] = {"has_rollouts": False, "pace": None}
    assert short_s(**alone) == math.inf
    assert short_s(**alone, has_work=False) == math.inf, "scoring could fail, and then only a guest could replace it"
    assert short_s(**alone, there=8, missing=0, evaluated=False) == math.inf
    assert short_s(**alone, there=8, missing=0) == 0.0


def test_nothing_is_lent_that_no_guest_could_use() -> None:
    nothing: dict[str, Any] = {"has_work": False, "there": 0, "has_part": False, "missing": 8}
    assert short_s(**nothing, lent=False) == 0.0
    assert short_s(**nothing, lent=True) > 0, "work can appear before there is anything to train"
    assert short_s(has_work=False, lent=True) == 0.0


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    size = draw(st.integers(1, 16))
    missing, evaluated = draw(st.integers(0, size)), draw(st.booleans())
    return Outlook(
        size=size,
        there=size - missing,
        has_part=missing < size and draw(st.booleans()),
        missing=missing,
        evaluation=0.0 if evaluated else draw(st.floats(0.0, 16.0)),
        evaluated=evaluated,
        has_rollouts=draw(st.booleans()),
        pace=draw(st.none() | st.floats(0.01, 10.0)),
        has_work=draw(st.booleans()),
    )


@given(outlooks(), st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 10), st.booleans())
def test_more_data_and_longer_training_never_make_a_step_shorter(
    step: Outlook, train_s: float, further: float, back_s: float, later: float, lent: bool
) -> None:
    now = balance(step, train_s, back_s, lent=lent)
    assert balance(step, train_s + further, back_s, lent=lent).short_s <= now.short_s
    assert balance(step, train_s, back_s + later, lent=lent).short_s <= now.short_s
    if step.missing:
        more = msgspec.structs.replace(step, missing=step.missing - 1, there=step.there + 1)
        assert balance(more, train_s, back_s, lent=lent).short_s <= now.short_s
    whole = msgspec.structs.replace(step, missing=0, there=step.size, evaluated=True, evaluation=0.0)
    assert balance(whole, train_s, back_s, lent=lent).short_s == 0


# ── in the store ─────────────────────────────────────────────────────────────────────────────────────────────────────
def open_beside(folder: Path, **changed: Any) -> Store:
    store = open_store(folder, (*ALL, GUEST), **changed)
    publish(store, 0)
    return store


def open_colocated(folder: Path, **changed: Any) -> Store:
    store = open_store(folder, (GUEST, REWARD, TRAINER), **changed)
    publish(store, 0)
    return store


def publish(store: Store, step: int) -> None:
    assert store.report_versions(TRAINER, (Version(step, TRAINER.number),)) is None


def ask(store: Store, number: int = 1, train_s: float = 0.0, back_s: float = 0.0, lent: bool = True) -> Balance:
    answer = store.balance(TRAINER, number, train_s, back_s, lent=lent)
    assert isinstance(answer, Balance), answer
    return answer


def trained_step(store: Store, number: int, who: Incarnation = ROLLOUT, token_s: float = 0.5) -> None:
    """Train a step, of which a rollout appends a token of each answer every ``token_s`` seconds."""
    held = {item.trajectory: 0 for item in lease(store, who, BATCH * GROUP, weights=number - 1)}
    for at in range(MAX_NEW):
        segments = [segment(trajectory, at, (5,), number - 1) for trajectory in held]
        assert store.append(who, segments, (), now=100.0 * number + token_s * at) == Done()
    score(store)
    commit(store, bind(store, number))


def test_pace_of_the_rollouts_comes_from_their_engines_not_from_guests(tmp_path: Path) -> None:
    store = open_beside(tmp_path)
    assert ask(store).alone_s == math.inf
    trained_step(store, 1, GUEST, token_s=0.001)
    publish(store, 1)
    lease(store, ROLLOUT, 1, weights=1)
    assert ask(store, 2).alone_s == math.inf, "the pace of a guest was taken for that of the rollouts"
    store.hand_over(ROLLOUT)
    trained_step(store, 2, OTHER, token_s=0.5)
    publish(store, 2)
    lease(store, OTHER, 2 * GROUP, weights=2)
    tokens_per_s = 2 * GROUP / 0.5
    assert ask(store, 3).alone_s == pytest.approx(BATCH * GROUP * MAX_NEW / tokens_per_s, rel=0.5)


def test_step_is_balanced_when_its_groups_are_complete_or_bound(tmp_path: Path) -> None:
    store = open_colocated(tmp_path)
    assert ask(store).short_s == math.inf
    generate(store, GUEST, GROUP)
    score(store)
    assert ask(store).short_s == math.inf
    generate(store, GUEST)
    score(store)
    assert ask(store).short_s == 0
    batch = bind(store, 1)
    assert ask(store).short_s == 0
    commit(store, batch)
    assert isinstance(store.balance(TRAINER, 5, 0.0, 0.0, lent=False), Denied)
    store.update_membership([GUEST, incarnation_of("trainer/0", 2)])
    denied = store.balance(TRAINER, 2, 0.0, 0.0, lent=True)
    assert isinstance(denied, Denied)
    assert denied.fenced


def test_groups_that_staleness_holds_back_are_missing(tmp_path: Path) -> None:
    """With ``staleness = 0`` the step keeps a place for each begun group."""
    store = open_colocated(tmp_path, staleness=0, groups_per_batch=4)
    items = lease(store, GUEST, 4 * GROUP, weights=0)
    done = [item.trajectory for item in items[: 3 * GROUP]]
    assert store.append(GUEST, [segment(number) for number in done], done) == Done()
    score(store)
    assert store._bindings.outlook(1) == (4, 1, True)
    assert ask(store).short_s == math.inf


def test_guests_get_no_work_if_rollouts_hold_all_of_it(tmp_path: Path) -> None:
    store = open_beside(tmp_path, staleness=0)
    assert ask(store, lent=False).short_s == math.inf
    lease(store, ROLLOUT, weights=0)
    assert ask(store, lent=False).short_s == 0
    assert ask(store, lent=True).short_s == math.inf, "there is nothing to train, so the GPUs may stay lent"
    store.update_membership([each for each in (*ALL, GUEST) if each != ROLLOUT])
    assert ask(store, lent=False).short_s == math.inf, "a guest could continue what a dead rollout had"
    lease(store, GUEST, weights=0)
    assert ask(store, lent=False).short_s == math.inf, "a guest works on the step"


def test_guests_have_work_for_the_weights_that_the_trainer_is_publishing(tmp_path: Path) -> None:
    store = open_beside(tmp_path, staleness=0)
    trained_step(store, 1)
    assert ask(store, 2, lent=False).short_s > 0


def test_hand_over_ends_all_leases_at_once(tmp_path: Path) -> None:
    store = open_beside(tmp_path)
    items = lease(store, GUEST, 3, weights=0)
    places = store._work.places
    assert store.append(GUEST, [segment(items[0].trajectory)], ()) == Done()
    store.hand_over(GUEST)
    assert store._work.places == places - 3, "places of a sleeping guest count as places of the fleet"
    again = lease(store, ROLLOUT, 3, weights=0)
    assert [item.trajectory for item in again] == [item.trajectory for item in items]
    assert again[0].so_far, "the tokens that the guest had appended are lost"
    late = store.append(GUEST, [segment(items[0].trajectory, 2)], ())
    assert isinstance(late, Denied)
    assert late.lost == (items[0].trajectory,)


def test_tokens_of_guests_are_counted_for_each_step(tmp_path: Path) -> None:
    store = open_beside(tmp_path)
    generate(store, GUEST, GROUP, tokens=(5, 5, 5))
    generate(store, ROLLOUT, GROUP * (BATCH - 1))
    score(store)
    figures = commit(store, bind(store, 1)).metrics
    assert figures["guest_tokens"] == 3 * GROUP
    assert sum(value for name, value in figures.items() if name.startswith("tokens_aged_")) > 3 * GROUP
    generate(store, ROLLOUT)
    score(store)
    assert "guest_tokens" not in commit(store, bind(store, 2)).metrics


# ── evaluations ──────────────────────────────────────────────────────────────────────────────────────────────────────
STEPS, PROMPTS = 2, 3


def evaluated(folder: Path, members: tuple[Incarnation, ...]) -> Store:
    spec = EvalSpec(every=1, count=PROMPTS)
    settings = EvaluationSettings(spec, STEPS, 0, PROMPTS, lambda item: Prompt(item, (9, item)), MAX_NEW)
    store = open_store(folder, members, evaluations=settings)
    publish(store, 0)
    return store


def answer_items(store: Store, who: Incarnation, items: tuple[Item, ...], step: int) -> None:
    segments = [Segment(item.trajectory, 0, (5, 1), (-0.5, -0.5), Version(step, 1)) for item in items]
    assert store.append(who, segments, [item.trajectory for item in items]) == Done()


def test_colocated_run_settles_its_evaluations_at_each_step_and_at_the_end(tmp_path: Path) -> None:
    """The guests, which generate only while the trainer has lent its GPUs, are the only ones that answer."""
    store = evaluated(tmp_path, (GUEST, REWARD, TRAINER))
    for number in range(1, STEPS + 2):
        lends = 0
        while ask(store, number, lent=lends > 0).short_s:
            lends += 1
            assert lends < 20, f"step {number} is never balanced"
            items = lease(store, GUEST, 2, weights=number - 1)
            answer_items(store, GUEST, items, number - 1)
            score(store)
        assert lends, f"the evaluation of step {number - 1} was not waited for"
        assert list(store.evaluations.results)[-1] == number - 1
        if number <= STEPS:
            commit(store, bind(store, number))
            publish(store, number)


def test_evaluation_is_work_for_a_guest_until_rollouts_hold_all_of_it(tmp_path: Path) -> None:
    store = evaluated(tmp_path, (*ALL, GUEST))
    generate(store, weights=None)
    score(store)
    assert ask(store, lent=False).short_s == math.inf, "the evaluation is due, and a guest could begin it"
    held = lease(store, ROLLOUT, PROMPTS - 1, weights=0)
    assert ask(store, lent=False).short_s == math.inf
    lease(store, GUEST, 1, weights=0)
    assert ask(store, lent=False).short_s == math.inf, "a guest works on the evaluation"
    store.hand_over(GUEST)
    taken = lease(store, OTHER, 9, weights=0)
    assert len(held) + len(taken) == PROMPTS, "an answer that the guest handed over is not leased again"
    assert ask(store, lent=False).short_s == 0, "all work is held by rollouts"
    answer_items(store, ROLLOUT, held, 0)
    answer_items(store, OTHER, taken, 0)
    score(store)
    assert ask(store).short_s == 0
    assert isinstance(store.part(TRAINER, 1, 0), PartBound)


# ── random runs ──────────────────────────────────────────────────────────────────────────────────────────────────────
class LendingRun(VirtualRun):
    """A run whose trainer lends its GPUs whenever a step is short; its guests generate only then."""

    GUESTS = ("guest/n0", "guest/n1")

    def __init__(self, folder: Path, setting: Setting, seed: int) -> None:
        super().__init__(folder, setting, seed)
        self.lent = False
        for name in self.GUESTS:
            self.incarnations[name] = 1
            self.kill_rollout(name)

    def _open(self) -> Store:
        store: Any = super()._open()
        append = store.append
        store.append = lambda *request: append(*request, float(self.ticks))
        return store  # type: ignore[no-any-return]

    def kill_trainer(self) -> None:
        self._take_back()
        super().kill_trainer()

    def _generate(self, name: str) -> None:
        version = Version(self.published, self.incarnations[TRAINER_NAME])
        self.store.report_versions(self._incarnation(TRAINER_NAME), (version,))
        if name not in self.GUESTS or self.lent:
            super()._generate(name)

    def _request(self, who: Incarnation, number: int) -> None:
        if not self.index:
            now = self.store.balance(who, number, self.setting.step_ticks, 1.0, lent=self.lent)
            assert isinstance(now, Balance), now
            if now.short_s and (self.lent or now.alone_s > self.setting.step_ticks):
                if not self.lent:
                    for name in self.GUESTS:
                        self.rollouts[name].weights = self.published
                self.lent = True
                return
            self._take_back()
        super()._request(who, number)

    def _take_back(self) -> None:
        self.lent = False
        for name in self.GUESTS:
            if name in self.rollouts:
                held = self.rollouts[name].held
                self._append(name, [one for waiting in held.values() for one in waiting], [])
                self.store.hand_over(self._incarnation(name))
                held.clear()


@st.composite
def _settings(draw: st.DrawFn) -> Setting:
    return Setting(
        staleness=draw(st.integers(0, 3)),
        waits=draw(st.sampled_from([True, True, False])),
        groups=draw(st.integers(1, 5)),
        ahead=draw(st.integers(0, 4)),
        rollouts=draw(st.integers(0, 2)),
        step_ticks=draw(st.integers(1, 12)),
        segment=draw(st.integers(1, 8)),
        unscorable=draw(st.sampled_from([0.0, 0.1])),
        parts=1.0,
        groups_per_part=draw(st.sampled_from([None, 1, 2])),
    )


@examples(20, many=500)
@given(
    setting=_settings(),
    mishaps=st.lists(
        st.tuples(st.integers(0, 25), st.sampled_from(["rollout", "guest", "trainer", "store"])), max_size=12
    ),
    seed=st.integers(0, 2**32),
)
def test_no_layout_comes_to_a_stop(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, mishaps: list[tuple[int, str]], seed: int
) -> None:
    run = LendingRun(tmp_path_factory.mktemp("run"), setting, seed)
    for ticks, what in mishaps:
        for _ in range(ticks):
            run.tick()
        if what == "trainer":
            run.kill_trainer()
        elif what == "store":
            run.restart_store()
        elif what == "guest" or setting.rollouts:
            run.kill_rollout("guest/n0" if what == "guest" else "rollout/0")
    target, ticks = run.bound() + 8, 0
    while run.bound() < target:
        run.tick()
        ticks += 1
        assert ticks < 3000, f"step {run.bound() + 1} is never bound (lent: {run.lent})"
