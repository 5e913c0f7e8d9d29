"""Plays a run of the store with every kind of record, and checks that a store keeps what it has acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from rrl.core.types import Incarnation
from rrl.roles.trajectories.batches import Batch
from rrl.roles.trajectories.episodes.requests import StoreAnswer as Answer
from rrl.roles.trajectories.server import answer
from rrl.roles.trajectories.store import Store
from rrl.roles.trajectories.types import (
    Append,
    Commit,
    CommittedState,
    Denied,
    Done,
    GetPart,
    Item,
    Leased,
    LeaseWork,
    PackedPart,
    PartBound,
    PostScores,
    Score,
    Scoring,
    Segment,
    StepRequest,
    TrainedStep,
)
from rrl.tests.support.roles.trajectories.crew import (
    BATCH,
    GROUP,
    OTHER,
    REWARD,
    ROLLOUT,
    TRAINER,
    bind,
    commit,
    generate,
    incarnation_of,
    manifest,
    mark,
    open_store,
    score,
    segment,
)

AFTER = (9, 9, 9, 9)
"""Tokens that are generated after the crash; trajectories that were acknowledged before it have other tokens."""
NEXT = incarnation_of("trainer/0", 2)
_IN_PARTS = {2: 9, 4: 9, 5: 1}
"""For each step with parts: the largest number of parts that are requested while some groups are not scored. After
these parts, the whole batch is requested."""
_LATE = 3
"""Step whose binding makes a group too old, if there is a limit on the age."""


class Acknowledged(Struct):
    """What the store had acknowledged when its file had ``size`` bytes."""

    size: int
    segments: dict[tuple[int, int], Segment] = {}
    scored: dict[int, float] = {}
    bound: dict[int, PackedPart] = {}
    parts: dict[tuple[int, int], PackedPart] = {}
    """PartBound parts by step and index."""
    committed: int = 0
    dropped: dict[str, int] = {}
    fence: int = 1
    made: int = 0
    """Number of trajectories that were created and leased."""


def log_in(folder: Path) -> Path:
    (path,) = folder.glob("log.*")
    return path


class Script:
    """A run with every kind of record, which notes after each flush what the store has acknowledged.

    ``calls[i]`` is the request, with its answer, that changed ``promised[i]`` to ``promised[i + 1]``. ``noted`` is
    called with the number of calls so far.
    """

    def __init__(self, folder: Path, noted: Callable[[int], None] = lambda _: None, **changed: Any) -> None:
        self.folder = folder
        self.noted = noted
        self.calls: list[tuple[StepRequest, Answer]] = []
        self.promised: list[Acknowledged] = [Acknowledged(0)]
        self.store = open_store(folder, **changed)
        self._staleness = changed.get("staleness")
        self._segment = partial(segment, marked="extras" in changed)
        self._checkpoint_every: int = changed.get("checkpoint_every", 1)
        self.store.flush()
        self.promised = [Acknowledged(log_in(folder).stat().st_size)]

    def _call(self, request: StepRequest, change: Callable[[Acknowledged, Answer], None]) -> Answer:
        given = answer(self.store, request)
        self.calls.append((request, given))
        self.store.flush()
        last = self.promised[-1]
        now = Acknowledged(
            log_in(self.folder).stat().st_size,
            dict(last.segments),
            dict(last.scored),
            dict(last.bound),
            dict(last.parts),
            last.committed,
            dict(last.dropped),
            last.fence,
            last.made,
        )
        change(now, given)
        self.promised.append(now)
        self.noted(len(self.promised) - 1)
        return given

    def lease(self, who: Incarnation, at_most: int = 1000) -> tuple[Item, ...]:
        def made(now: Acknowledged, given: Answer) -> None:
            assert isinstance(given, Leased)
            now.made = max([now.made, *(item.trajectory + 1 for item in given.items)])

        given = self._call(LeaseWork(who, at_most), made)
        assert isinstance(given, Leased)
        return given.items

    def append(self, who: Incarnation, segments: list[Segment], finished: tuple[int, ...] = ()) -> None:
        def grown(now: Acknowledged, given: Answer) -> None:
            assert given == Done()
            now.segments.update({(s.trajectory, s.offset): s for s in segments})

        self._call(Append(who, tuple(segments), finished), grown)

    def generate(self, who: Incarnation, tokens: tuple[int, ...], step: int) -> None:
        items = [item for item in self.lease(who) if not item.so_far]
        self.append(
            who,
            [self._segment(item.trajectory, 0, tokens, step) for item in items],
            tuple(item.trajectory for item in items),
        )

    def score(self, reward: float, at_most: int) -> None:
        leased = self.store.lease_scoring(REWARD, at_most)
        assert isinstance(leased, Scoring)
        scores = tuple(Score(item.trajectory, reward, reward / 2) for item in leased.items)
        done = [one.trajectory for one in scores]
        self._call(PostScores(REWARD, scores), lambda now, _: now.scored.update(dict.fromkeys(done, reward)))

    def drop(self, trajectory: int) -> None:
        failed = {trajectory: "no scorer"}
        self._call(PostScores(REWARD, (), failed), lambda now, _: now.dropped.update({"no scorer": GROUP}))

    def part(self, number: int, index: int, who: Incarnation) -> bool:
        """Request a part of a step that has enough groups for it; return whether it was the last part."""

        def bound(now: Acknowledged, given: Answer) -> None:
            assert isinstance(given, PartBound)
            now.parts[number, index], now.fence = given.part, who.number

        given = self._call(GetPart(who, number, index), bound)
        assert isinstance(given, PartBound)
        return given.part.last

    def step(self, number: int, who: Incarnation) -> None:
        def bound(now: Acknowledged, given: Answer) -> None:
            assert isinstance(given, PartBound)
            now.bound[number], now.fence = given.part, who.number
            if number == _LATE and self._staleness is not None:
                now.dropped[f"stale: a token is more than {self._staleness} training steps old"] = GROUP

        given = self._call(GetPart(who, number), bound)
        assert isinstance(given, PartBound)
        if number % self._checkpoint_every == 0:
            bound_before = self.promised[-1].bound
            first = max(1, number - self._checkpoint_every + 1)
            earlier = tuple(TrainedStep(one, bound_before[one].digest, {}) for one in range(first, number))
            words = Commit(who, number, manifest(number), given.part.digest, earlier=earlier)
            self._call(words, lambda now, _: setattr(now, "committed", number))

    def run(self, steps: int = 4) -> None:
        for number in range(1, steps + 1):
            mine, yours = self.lease(ROLLOUT, 5), self.lease(OTHER)
            begun = {x.trajectory: number for x in mine}
            if number == _LATE and self._staleness is not None:  # young enough for step _LATE, but not complete
                begun[mine[-1].trajectory] = number - 1 - self._staleness
            first = [self._segment(x.trajectory, 0, (5,), begun[x.trajectory]) for x in mine if not x.so_far]
            self.append(ROLLOUT, first)
            rest = [self._segment(x.trajectory, 1, (6,), number) for x in mine]
            late = {mine[-1].trajectory} if number == _LATE and self._staleness is not None else set()
            self.append(ROLLOUT, rest, tuple(x.trajectory for x in mine if x.trajectory not in late))
            self.append(
                OTHER,
                [self._segment(x.trajectory, 0, (7, 1), number) for x in yours],
                tuple(x.trajectory for x in yours),
            )
            if number == 2:
                self.drop(mine[0].trajectory)
                self.generate(OTHER, (8, 1), number)
            who, index = TRAINER if number < 3 else NEXT, 0
            while self._unscored() and self.store.wait_reason(number):
                self.score(number / 8, at_most=3 if number not in _IN_PARTS else 1)
                if number in _IN_PARTS and index < _IN_PARTS[number] and self.store.wait_reason(number, index) is None:
                    last = self.part(number, index, who)
                    index += not last
            self.step(number, who)

    def _unscored(self) -> bool:
        leased = self.store.lease_scoring(REWARD, 1)
        return isinstance(leased, Scoring) and bool(leased.items)


def _go_on(store: Store, who: Incarnation, to: int, checkpoint_every: int, marked: bool) -> Iterator[Batch]:
    """Finish the run up to step ``to`` and yield its batches, beginning with those that are bound and uncommitted."""
    start, earlier = store.committed(who), list[Batch]()
    bound = max(store.audit().steps, default=0)
    assert isinstance(start, CommittedState)
    for number in range((start.number or 0) + 1, to + 1):
        for _ in range(3):
            weights = max(bound, number - 1)  # older groups may not be trained any more
            generate(store, tokens=AFTER, weights=weights, marked=marked)
            score(store, reward=-1.0)
        batch = bind(store, number, who)
        yield batch
        if number % checkpoint_every == 0 or number == to:
            commit(store, batch, who, earlier=earlier)
            earlier = []
        else:
            earlier.append(batch)


def check(
    folder: Path, promised: Acknowledged, to: int, repeated: Sequence[tuple[StepRequest, Answer]] = (), **changed: Any
) -> None:
    """Check that a store that opens ``folder`` keeps all that ``promised`` contains.

    The store must answer the ``repeated`` requests as before, and continue to step ``to`` without losing a trajectory
    or training it twice.
    """
    who = NEXT
    store = open_store(folder, **changed)
    for request, given in repeated:
        fenced = request.incarnation == TRAINER and promised.fence > TRAINER.number
        if not isinstance(given, Leased):  # a crash loses leases: the first member that requests the work gets it
            sent_words = answer(store, request)
            assert isinstance(sent_words, Denied) if fenced else sent_words == given, (request, sent_words)
    store.flush()
    if promised.fence > TRAINER.number:
        assert isinstance(store.committed(TRAINER), Denied)
    start = store.committed(who)
    assert isinstance(start, CommittedState)
    assert (start.number or 0) >= promised.committed
    newest = max(promised.bound, default=0)
    assert newest - (start.number or 0) <= changed.get("checkpoint_every", 1), "a step beyond the limit was bound"
    for number, batch in promised.bound.items():
        if number > (start.number or 0) - 2:  # the store may have forgotten older batches by now
            kept = store.part(who, number)
            assert isinstance(kept, PartBound)
            assert kept.part == batch
    for (number, index), part in promised.parts.items():
        if number > (start.number or 0) - 2:
            assert store.part(who, number, index) == PartBound(part)
    following = _go_on(store, who, to, changed.get("checkpoint_every", 1), "extras" in changed)
    observed = {t.id: t for batch in following for t in batch.trajectories}
    for trajectory, offset in promised.segments:
        if trajectory in observed:
            words = promised.segments[trajectory, offset]
            end = offset + len(words.tokens)
            assert observed[trajectory].tokens[offset:end] == words.tokens
            assert observed[trajectory].versions[offset] == words.version
    for one in observed.values() if "extras" in changed else ():
        assert one.extras == {"mark": mark(one.id, 0, one.tokens)}
    for trajectory, reward in promised.scored.items():
        if trajectory in observed:
            assert observed[trajectory].reward == reward
    audit = store.audit()
    store.close()
    groups = [group for number in sorted(audit.steps) for group in audit.steps[number]]
    assert len(set(groups)) == len(groups)
    assert audit.made == audit.trained + sum(audit.dropped.values()) + audit.open
    assert audit.made >= promised.made
    assert audit.trained == to * BATCH * GROUP
    assert audit.dropped.items() >= promised.dropped.items()
    for number, batch in promised.bound.items():
        assert audit.steps[number] == batch.groups
    for (number, index), part in promised.parts.items():
        assert audit.parts[number][index] == part.groups
