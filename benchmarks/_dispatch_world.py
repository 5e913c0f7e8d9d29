"""Simulates, in virtual time, engines that request work, generate, append tokens and hand back answers as rollouts do.

An engine with b running answers takes τ(b) seconds for one token of each answer. It requests work whenever it has free
places, and appends every :data:`SEGMENT_TOKENS` tokens. With an append it hands over the answers that it was requested
to give back. An answer that continues on another engine first reads its prefix. Only the policy differs between two
arms.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

SEGMENT_TOKENS = 64
READ_S_PER_TOKEN = 1e-4
"""Seconds to read a token of a prefix: 10,000 tokens/s."""
_EPSILON = 1e-6


class Answer(Struct):
    """An answer of a step: its true length, the tokens that are generated so far, and its engine."""

    number: int
    group: int
    length: int
    progress: int = 0
    engine: int | None = None
    done: bool = False


class Outcome(Struct, frozen=True):
    """Seconds of a step until its last answer was done, and the number of moves."""

    seconds: float
    moves: int


class Policy(Protocol):
    """Chooses the answers that engines get, and the answers that they give back."""

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        """Return which of the waiting answers an engine gets, at most as many as it has free places."""

    def hand_back(self, world: World, engine: Engine) -> list[tuple[Answer, int]]:
        """Return which answers an engine should hand over, and the engines where they should continue."""

    def ended(self, world: World, answer: Answer) -> None:
        """Record that an answer is done."""


class Engine:
    """One engine. ``tokens`` is the number of tokens that an answer would have if it had run here since the start."""

    def __init__(self, number: int, places: int, times: Sequence[float]) -> None:
        self.number, self.places, self.times = number, places, times
        self.running: dict[int, float] = {}
        """For each running answer, its start: ``tokens`` minus this value is the number of tokens that the answer
        has."""
        self.reading: list[tuple[float, int]] = []
        """For each answer whose prefix the engine reads now: the time at which it will have read the prefix, and the
        number of the answer."""
        self.requested_back: set[int] = set()
        self.tokens = self.clock = 0.0
        self.next_append = float(SEGMENT_TOKENS)
        self._ends: list[tuple[float, int]] = []
        self.changes = 0
        """Number of appends and of changes of the running answers. Values derived from the engine's state are valid
        until this number changes."""

    @property
    def free(self) -> int:
        return self.places - len(self.running) - len(self.reading)

    def advance(self, now: float) -> None:
        if self.running:
            self.tokens += (now - self.clock) / self.times[len(self.running)]
        self.clock = now

    def start(self, answer: Answer) -> None:
        self.running[answer.number] = self.tokens - answer.progress
        heapq.heappush(self._ends, (self.tokens - answer.progress + answer.length, answer.number))
        self.changes += 1

    def stop(self, number: int) -> int:
        self.changes += 1
        return int(self.tokens - self.running.pop(number) + _EPSILON)

    def progress(self, number: int) -> int:
        return int(self.tokens - self.running[number] + _EPSILON)

    def _next_end(self) -> tuple[float, int]:
        """Return the value of ``tokens`` at which the next answer ends, and the answer's number.

        (inf, -1) means that no answer runs. This method first removes the entries at the beginning of ``_ends`` whose
        answers this engine has handed back.
        """
        while self._ends and self._ends[0][1] not in self.running:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else (math.inf, -1)

    def next_event(self) -> float:
        due = self.reading[0][0] if self.reading else math.inf
        if self.running:
            left = max(0.0, min(self._next_end()[0], self.next_append) - self.tokens)
            due = min(due, self.clock + left * self.times[len(self.running)])
        return due

    def pop_ended(self) -> int | None:
        end, number = self._next_end()
        if end > self.tokens + _EPSILON:
            return None
        heapq.heappop(self._ends)
        return number


class World:
    """A generation step. All its answers wait at the start, and the step is over when the last answer is done.

    Args:
        lengths: True lengths, by group and answer.
        engines: (places, τ) of each engine.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], engines: Sequence[tuple[int, Callable[[int], float]]]) -> None:
        self.groups: list[list[Answer]] = []
        self.answers: list[Answer] = []
        for group, those in enumerate(lengths):
            answers = [Answer(len(self.answers) + i, group, length) for i, length in enumerate(those)]
            self.groups.append(answers)
            self.answers += answers
        self.waiting = {answer.number: answer for answer in self.answers}
        self.reserved: dict[int, int] = {}
        self.engines = [
            Engine(i, places, (0.0, *(tau(b) for b in range(1, places + 1)))) for i, (places, tau) in enumerate(engines)
        ]
        self.now = 0.0
        self._moves = 0

    def progress(self, answer: Answer) -> int:
        """Return the number of tokens that an answer has so far."""
        if answer.engine is not None and answer.number in self.engines[answer.engine].running:
            return self.engines[answer.engine].progress(answer.number)
        return answer.progress

    def run(self, policy: Policy) -> Outcome:
        """Run the step; ``policy`` chooses the answers that engines get and give back."""
        self._policy = policy
        left = len(self.answers)
        for engine in self.engines:
            self._request(engine)
        due = [engine.next_event() for engine in self.engines]
        while left:
            self.now = min(due)
            engine = self.engines[due.index(self.now)]
            engine.advance(self.now)
            while engine.reading and engine.reading[0][0] <= self.now:
                engine.start(self.answers[heapq.heappop(engine.reading)[1]])
            while (number := engine.pop_ended()) is not None:
                answer = self.answers[number]
                answer.progress = engine.stop(number)
                answer.done = True
                left -= 1
                engine.requested_back.discard(number)
                self.reserved.pop(number, None)
                self._policy.ended(self, answer)
            if engine.tokens >= engine.next_append - _EPSILON:
                self._append(engine)
            touched = {engine.number}
            for each in [engine, *self.engines] if self.waiting else [engine]:
                if self.waiting and each.free > 0:
                    each.advance(self.now)
                    self._request(each)
                    touched.add(each.number)
            for each_number in touched:
                due[each_number] = self.engines[each_number].next_event()
        return Outcome(self.now, self._moves)

    def _append(self, engine: Engine) -> None:
        engine.next_append = engine.tokens + SEGMENT_TOKENS
        engine.changes += 1
        for number in sorted(engine.requested_back):
            answer = self.answers[number]
            answer.progress, answer.engine = engine.stop(number), None
            self.waiting[number] = answer
            self._moves += 1
        engine.requested_back.clear()
        for answer, target in self._policy.hand_back(self, engine):
            engine.requested_back.add(answer.number)
            self.reserved[answer.number] = target
            engine.changes += 1
            self.engines[target].changes += 1

    def _request(self, engine: Engine) -> None:
        for answer in self._policy.choose(self, engine):
            del self.waiting[answer.number]
            self.reserved.pop(answer.number, None)
            answer.engine = engine.number
            if answer.progress:
                ready = self.now + READ_S_PER_TOKEN * answer.progress
                heapq.heappush(engine.reading, (ready, answer.number))
                engine.changes += 1
            else:
                engine.start(answer)
