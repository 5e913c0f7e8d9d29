"""Simulates, in virtual time, engines that request work, generate and append tokens as rollouts do.

An engine with b running answers takes τ(b) seconds for one token of each answer. It requests work whenever it has free
places, and appends every :data:`SEGMENT_TOKENS` tokens. Only the policy differs between two arms.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

SEGMENT_TOKENS = 64
_EPSILON = 1e-6


class Answer(Struct, frozen=True):
    """An answer of a step, and its true length."""

    number: int
    group: int
    length: int


class Policy(Protocol):
    """Chooses the answers that engines get."""

    def choose(self, world: World, engine: Engine) -> list[Answer]:
        """Return which of the waiting answers an engine gets, at most as many as it has free places."""

    def appended(self, engine: Engine) -> None:
        """Record that an engine has appended tokens."""


class Engine:
    """One engine. ``tokens`` is the number of tokens that an answer would have if it had run here since the start."""

    def __init__(self, number: int, places: int, times: Sequence[float]) -> None:
        self.number, self.places, self.times = number, places, times
        self.ends: list[float] = []
        """For each running answer, the value of ``tokens`` at which it ends; a heap."""
        self.tokens = self.clock = 0.0
        self.next_append = float(SEGMENT_TOKENS)

    @property
    def running(self) -> int:
        return len(self.ends)

    @property
    def free(self) -> int:
        return self.places - self.running

    def advance(self, now: float) -> None:
        if self.running:
            self.tokens += (now - self.clock) / self.times[self.running]
        self.clock = now

    def next_event(self) -> float:
        if not self.running:
            return math.inf
        left = max(0.0, min(self.ends[0], self.next_append) - self.tokens)
        return self.clock + left * self.times[self.running]


class World:
    """A generation step. All its answers wait at the start, and the step is over when the last answer is done.

    Args:
        lengths: True lengths, by group and answer.
        engines: (places, τ) of each engine.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], engines: Sequence[tuple[int, Callable[[int], float]]]) -> None:
        pairs = [(group, length) for group, those in enumerate(lengths) for length in those]
        self.answers = [Answer(number, *pair) for number, pair in enumerate(pairs)]
        self.waiting = {answer.number: answer for answer in self.answers}
        self.engines = [
            Engine(i, places, (0.0, *(tau(b) for b in range(1, places + 1)))) for i, (places, tau) in enumerate(engines)
        ]

    def run(self, policy: Policy) -> float:
        """Return the seconds until the last answer is done; ``policy`` chooses the answers that engines get."""
        now, left = 0.0, len(self.answers)
        for engine in self.engines:
            self._request(policy, engine)
        due = [engine.next_event() for engine in self.engines]
        while left:
            now = min(due)
            engine = self.engines[due.index(now)]
            engine.advance(now)
            while engine.ends and engine.ends[0] <= engine.tokens + _EPSILON:
                heapq.heappop(engine.ends)
                left -= 1
            if engine.tokens >= engine.next_append - _EPSILON:
                engine.next_append = engine.tokens + SEGMENT_TOKENS
                policy.appended(engine)
            touched = {engine.number}
            for each in [engine, *self.engines] if self.waiting else [engine]:
                if self.waiting and each.free > 0:
                    each.advance(now)
                    self._request(policy, each)
                    touched.add(each.number)
            for number in touched:
                due[number] = self.engines[number].next_event()
        return now

    def _request(self, policy: Policy, engine: Engine) -> None:
        for answer in policy.choose(self, engine):
            del self.waiting[answer.number]
            heapq.heappush(engine.ends, engine.tokens + answer.length)
