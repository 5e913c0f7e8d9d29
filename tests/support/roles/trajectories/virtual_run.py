"""Plays a run of the real ``Store`` in virtual time; in one tick, each running trajectory gets one token.

Trajectories have random lengths, rollouts receive new weights late, and the test adds other events: failures,
restarts, scores that fail, items without a prompt, a resume with another limit. The same seed gives the same run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from rrl.core.types import Incarnation, Version
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    CommittedState,
    Denied,
    Done,
    Leased,
    NotReady,
    PackedPart,
    PackedTrajectory,
    PartBound,
    Prompt,
    Score,
    Scoring,
    Segment,
)
from rrl.tests.support.roles.trajectories.crew import incarnation_of

SCORER = "reward/0"
TRAINER = "trainer/0"
BROKEN = "the scorer broke"
TOKEN = 5


class Setting(Struct, frozen=True):
    """Settings of a run. Durations are in ticks."""

    staleness: int | None
    waits: bool = True
    groups: int = 2
    """Number of groups in a step."""
    size: int = 2
    """Number of trajectories in a group."""
    ahead: int = 1
    uncommitted: int = 1
    rollouts: int = 2
    step_ticks: int = 3
    publish_every: int = 1
    """Number of steps between two published versions."""
    fetch_chance: float = 0.5
    """Probability that a rollout takes the newest weights in a tick."""
    segment: int = 2
    """Number of tokens that a rollout generates before it appends them."""
    longest: int = 30
    """Largest number of tokens of a trajectory."""
    unaskable: float = 0.0
    """Share of items without a prompt."""
    unscorable: float = 0.0
    """Share of trajectories that cannot be scored."""
    parts: float = 0.0
    """Share of the trainer's requests that ask for the next part of a step; the others ask for the whole batch."""
    groups_per_part: int | None = None
    max_part_bytes: int = 2**20
    refill: float | None = None
    """Limit of dropped groups, as a multiple of the groups of a step; None without refill."""
    solved: float = 0.0
    """Share of answers with the best reward; the others have the lowest one."""


class _Rollout(Struct):
    weights: int = 0
    held: dict[int, list[Segment]] = {}
    """Segments that the rollout has generated but not appended yet, by trajectory."""
    made: dict[int, int] = {}
    """Number of generated tokens by trajectory, including those that are not appended yet."""


class VirtualRun:
    """A run.

    ``length`` returns the length of an item's next trajectory. By default, lengths are log-normal with median 7.4 and
    sigma 1.
    """

    def __init__(
        self, folder: Path, setting: Setting, seed: int = 0, length: Callable[[int], int] | None = None
    ) -> None:
        self.folder, self.setting, self.random = folder, setting, random.Random(seed)
        self._length = length or (lambda _: int(self.random.lognormvariate(2.0, 1.0)))
        self._lengths: dict[int, int] = {}
        self.incarnations = {TRAINER: 1, SCORER: 1, **{f"rollout/{i}": 1 for i in range(setting.rollouts)}}
        self.rollouts = {f"rollout/{i}": _Rollout() for i in range(setting.rollouts)}
        self.batches: dict[int, PackedPart] = {}
        """Batches of the steps that were bound completely."""
        self.parts: dict[tuple[int, int], PackedPart] = {}
        """PartBound parts by step and index."""
        self.steps: dict[int, int] = {}
        """Step to which each group was bound."""
        self._counted: set[int] = set()
        """Groups whose tokens are counted in ``ages``."""
        self.sizes: dict[int, int] = {}
        """Number of groups of each step when its first group was bound."""
        self.ages: dict[int, Counter[int]] = {}
        """Number of tokens of each step by age."""
        self.learned = 0
        """Newest step that the trainer has trained."""
        self.published = 0
        self.index = 0
        """Number of parts of the next step that the trainer has received."""
        self.busy = 0
        """Ticks until the trainer has trained the part or batch that it received last."""
        self.ticks = 0
        self.made = 0
        """Number of tokens generated."""
        self.store = self._open()

    # ── events of a tick ───────────────────────────────────────────────────────────────────────────────────────────
    def tick(self) -> None:
        self.ticks += 1
        for name in self.rollouts:
            self._generate(name)
        self._score()
        self._train()

    def restart_store(self) -> None:
        """Restart the store, which loses its leases; rollouts continue with the trajectories that they have."""
        self.store.flush()
        self.store.close()
        self.store = self._open()

    def kill_rollout(self, name: str) -> None:
        self.incarnations[name] += 1
        self.rollouts[name] = _Rollout(self.published)
        self.store.update_membership(self._members())

    def kill_trainer(self) -> None:
        """Replace the trainer; its next incarnation continues from the committed step and publishes this step first."""
        self.incarnations[TRAINER] += 1
        self.store.update_membership(self._members())
        state = self.store.committed(self._incarnation(TRAINER))
        assert isinstance(state, CommittedState)
        self.learned = self.published = state.number or 0
        self.busy = self.index = 0

    def resume(self, **changed: Any) -> None:
        """End the run in the middle of its work, and continue with another limit or with steps of another size."""
        self.setting = _with(self.setting, **changed)
        for name in self.incarnations:
            self.incarnations[name] += 1
        self.restart_store()
        self.kill_trainer()
        for name in self.rollouts:
            self.kill_rollout(name)

    def bound(self) -> int:
        return max(self.batches, default=0)

    # ── members of the run ─────────────────────────────────────────────────────────────────────────────────────────
    def _incarnation(self, name: str) -> Incarnation:
        return incarnation_of(name, self.incarnations[name])

    def _members(self) -> list[Incarnation]:
        return [self._incarnation(name) for name in self.incarnations]

    def _open(self) -> Store:
        setting = self.setting
        store = Store(
            self.folder,
            group_size=setting.size,
            groups_per_batch=setting.groups,
            max_ahead_batches=setting.ahead,
            max_new_tokens=setting.longest,
            next_prompt=self._prompt,
            keep_uncommitted=setting.uncommitted,
            staleness=setting.staleness,
            wait_for_late=setting.waits,
            compact_from=20_000,
            groups_per_part=setting.groups_per_part,
            max_part_bytes=setting.max_part_bytes,
            refill_limit=setting.refill,
        )
        store.update_membership(self._members())
        return store

    def _prompt(self, item: int) -> Prompt:
        if random.Random(f"item {item}").random() < self.setting.unaskable:
            raise ValueError("no prompt")
        return Prompt(item, (2,))

    def _generate(self, name: str) -> None:
        rollout, who = self.rollouts[name], self._incarnation(name)
        if rollout.weights < self.published and self.random.random() < self.setting.fetch_chance:
            rollout.weights = self.published
        segments: list[Segment] = []
        finished = []
        for trajectory, waiting in list(rollout.held.items()):
            offset = rollout.made[trajectory]
            waiting.append(Segment(trajectory, offset, (TOKEN,), (-0.5,), Version(rollout.weights, 1)))
            rollout.made[trajectory] += 1
            self.made += 1
            complete = rollout.made[trajectory] >= self._lengths[trajectory]
            if complete or len(waiting) >= self.setting.segment:
                segments += waiting
                waiting.clear()
                if complete:
                    finished.append(trajectory)
        self._append(name, segments, finished)
        answer = self.store.lease(who, 1000, sorted(rollout.held), rollout.weights)
        assert isinstance(answer, Leased)
        for item in answer.items:
            if item.trajectory not in self._lengths:
                wanted = self._length(item.group)
                self._lengths[item.trajectory] = max(1, min(self.setting.longest, wanted))
            rollout.held[item.trajectory] = []
            rollout.made[item.trajectory] = self.setting.longest - item.max_new

    def _append(self, name: str, segments: list[Segment], finished: list[int]) -> None:
        rollout, lost = self.rollouts[name], set[int]()
        while segments or finished:
            answer = self.store.append(self._incarnation(name), segments, finished)
            if not isinstance(answer, Denied):
                assert isinstance(answer, Done)
                break
            lost.update(answer.lost)
            segments = [segment for segment in segments if segment.trajectory not in lost]
            finished = [trajectory for trajectory in finished if trajectory not in lost]
        for trajectory in (*finished, *lost):
            rollout.held.pop(trajectory, None)

    def _score(self) -> None:
        who = self._incarnation(SCORER)
        answer = self.store.lease_scoring(who, 1000)
        assert isinstance(answer, Scoring)
        broken = {item.trajectory: BROKEN for item in answer.items if self.random.random() < self.setting.unscorable}
        rewards = {item.trajectory: float(self.random.random() < self.setting.solved) for item in answer.items}
        scores = [Score(number, reward, reward) for number, reward in rewards.items() if number not in broken]
        assert self.store.post_scores(who, scores, broken) == Done()

    def _train(self) -> None:
        who = self._incarnation(TRAINER)
        if self.busy:
            self.busy -= 1
            if not self.busy and self.learned + 1 in self.batches and not self.index:
                self.learned += 1
                if self.learned % self.setting.publish_every == 0:
                    self.published = self.learned
        if not self.busy:
            self._commit(who)
            self._request(who, self.learned + 1)

    def _request(self, who: Incarnation, number: int) -> None:
        in_parts = self.random.random() < self.setting.parts
        answer: Any = self.store.part(who, number, self.index) if in_parts else self.store.part(who, number)
        if answer == NotReady():
            return
        self.busy = self.setting.step_ticks
        if in_parts:
            assert isinstance(answer, PartBound), answer
            self._check_part(answer.part)
            self.index = 0 if answer.part.last else self.index + 1
            if not answer.part.last:
                return
            answer = self.store.part(who, number)
        assert isinstance(answer, PartBound), answer
        self.index = 0
        self._check(who, answer.part)

    def _check_part(self, part: PackedPart) -> None:
        assert self.parts.setdefault((part.number, part.index), part) == part, "a part has changed"
        self._check_groups(part.number, part.groups, part.trajectories, part.max_age)

    def _check(self, who: Incarnation, batch: PackedPart) -> None:
        """Check that the parts of a bound step are together its batch, no matter how the step was requested."""
        number = batch.number
        assert self.batches.setdefault(number, batch) == batch, "a batch has changed"
        self._check_groups(number, batch.groups, batch.trajectories, batch.max_age)
        assert len(batch.groups) == self.sizes[number]
        parts: list[PackedPart] = []
        while not parts or not parts[-1].last:
            answer = self.store.part(who, number, len(parts))
            assert isinstance(answer, PartBound), answer
            self._check_part(answer.part)
            parts.append(answer.part)
        assert isinstance(self.store.part(who, number, len(parts)), Denied)
        assert tuple(group for part in parts for group in part.groups) == batch.groups
        assert tuple(one for part in parts for one in part.trajectories) == batch.trajectories
        assert (parts[-1].digest, parts[-1].stale, parts[-1].max_age) == (batch.digest, batch.stale, batch.max_age)
        assert len({part.digest for part in parts}) == len(parts)

    def _check_groups(
        self, number: int, groups: Iterable[int], trajectories: Iterable[PackedTrajectory], max_age: int
    ) -> None:
        self.sizes.setdefault(number, self.setting.groups)
        new = {group for group in groups if self.steps.setdefault(group, number) == number} - self._counted
        assert all(self.steps[group] == number for group in groups), "a group is in two steps"
        self._counted |= new
        for one in trajectories:
            for count, step, _ in one.runs if one.group in new else ():
                age = number - 1 - step
                self.ages.setdefault(number, Counter())[age] += count
                assert age <= max_age
                assert self.setting.staleness is None or age <= self.setting.staleness, "a token is too old"

    def _commit(self, who: Incarnation) -> None:
        """Commit all trained steps, or only as many as are necessary for the trainer to continue."""
        state = self.store.committed(who)
        assert isinstance(state, CommittedState)
        done = state.number or 0
        to = self.learned - self.random.randint(0, self.setting.uncommitted)
        for number in range(done + 1, to + 1):
            answer: Any = self.store.commit(who, number, {"folder": str(number)}, self.batches[number].digest)
            assert isinstance(answer, Done)


def _with(setting: Setting, **changed: Any) -> Setting:
    return Setting(**{name: getattr(setting, name) for name in Setting.__struct_fields__} | changed)
