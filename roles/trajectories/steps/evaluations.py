"""The rules of evaluations (``[eval]``): when the weights of a step are evaluated, and by which answers.

An evaluation of step s belongs to one weight version, and to the time between two steps:

- It starts once the current trainer has published the weights of step s. Rollouts with these weights get its answers
  before any other work; a token of another version is refused.
- The trainer gets no data of step s + 1 before each answer has a score (or cannot be scored). So the trainer publishes
  no newer version during the evaluation, and a rollout that replaces a failed one receives the weights of step s.
- Its result is recorded once step s is committed (for s = 0 at once). If the trainer restarts before the result is
  recorded, the evaluation begins again, since the trainer may compute step s again. A recorded result never changes.

Answers of an evaluation are durable like trajectories, but belong to no group, so that no step can train on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ....core.task_spec import EvalSpec
from ....core.types import TRAINER, Incarnation
from ..dispatch.lease_table import Leases
from ..durable.evaluation_state import EvaluatedAnswer
from ..durable.log import DurableState
from ..durable.records import (
    FIRST_EVALUATED,
    EvaluationAppended,
    EvaluationFinished,
    EvaluationScored,
    EvaluationStarted,
    PackedSegment,
    unpack,
    unpack_tokens,
)
from ..types import Item, NewestVersion, Prompt, Sampling, Score, ToScore

_SEEDS = 2**31
"""Number of possible seeds of an answer; vLLM accepts signed integers of 32 bits."""


class EvaluationSettings(Struct, frozen=True):
    """The settings of the job's evaluations."""

    spec: EvalSpec
    steps: int
    """Steps of the run."""
    seed: int
    """Seed of the run."""
    count: int
    """Number of prompts."""
    prompt: Callable[[int], Prompt]
    """Makes the prompt of an item of the evaluation's task. If it raises an exception, the item's answers do not
    count."""
    max_new_tokens: int


class Evaluations:
    """The open evaluation, its leases to rollouts and to reward replicas, and the step that waits for it.

    Args:
        durable: State and log of the store.
        settings: Settings of the job; None if it has no evaluations.
        newest: Returns the newest weight version that the trainer has published.
    """

    def __init__(
        self, durable: DurableState, settings: EvaluationSettings | None, newest: Callable[[], NewestVersion | None]
    ) -> None:
        self._durable, self._settings, self._newest = durable, settings, newest
        self._state = durable.state.evaluations
        self._leases, self._scoring_leases = Leases(), Leases()
        self._prompts: dict[int, tuple[int, ...] | None] = {}
        """Prompts by item, which are the same in each evaluation; None if the task cannot make the prompt."""
        self._to_extend: list[int] = []
        self._to_score: list[int] = []
        self._rebuild()

    def _rebuild(self) -> None:
        answers = self._state.answers.values()
        self._to_extend = [answer.id for answer in answers if not answer.finished and not answer.failed]
        self._to_score = [answer.id for answer in answers if answer.finished and not answer.settled]
        heapify(self._to_extend)
        heapify(self._to_score)

    # ── start and end ──────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def results(self) -> Mapping[int, EvaluationFinished]:
        """The results by step, in the order of the steps."""
        return self._state.results

    @property
    def _current(self) -> EvaluationStarted | None:
        """The open evaluation; None if there is none, or if a newer trainer may compute its step again."""
        started = self._state.open
        fence = self._durable.state.fences.get(TRAINER, -1)
        return None if started is None or self._settings is None or started.incarnation < fence else started

    def _is_wanted(self, step: int) -> bool:
        """Return whether the weights of a step must be evaluated and have no result yet."""
        settings, results = self._settings, self._state.results
        return settings is not None and settings.spec.is_due(step, settings.steps) and step > max(results, default=-1)

    def awaited(self, step: int, trainer: int) -> bool:
        """Return whether the trainer with this incarnation number has to wait for the evaluation of a step."""
        if not self._is_wanted(step):
            return False
        current = self._current
        answered = current is not None and (current.step, current.incarnation) == (step, trainer)
        return not answered or self._state.unsettled > 0

    @property
    def last_step(self) -> float:
        """The last step of the run; inf without evaluations."""
        return inf if self._settings is None else self._settings.steps

    def unfinished(self, step: int, is_free: Callable[[Incarnation | None], bool]) -> tuple[int, bool]:
        """Return how many answers the awaited evaluation of a step lacks, and whether work on one of them is free.

        ``is_free`` tells this of an answer by the holder of its lease. An evaluation that has not started is free once
        the weights of the step are published.
        """
        assert self._settings is not None
        current, newest = self._current, self._newest()
        if current is None or current.step != step:
            published = newest is not None and newest.version.step == step
            return self._settings.count * self._settings.spec.samples, published
        left = [one.id for one in self._state.answers.values() if not one.finished and not one.failed]
        return len(left), any(is_free(self._leases.holder(number)) for number in left)

    def wait_reason(self, step: int) -> str | None:
        """Return a text for people that says why the evaluation of a step is not over; None if no step waits for it."""
        if not self.awaited(step, self._durable.state.fences.get(TRAINER, -1)):
            return None
        if self._current is None or self._current.step != step:
            return (
                f"the trainer waits for the evaluation of step {step}, and the rollouts wait for the weights of this"
                " step"
            )
        count = len(self._state.answers)
        done = f"{count - self._state.unsettled} of {count} answers are scored"
        return f"the trainer waits for the evaluation of step {step}: {done}"

    def _start(self) -> None:
        """Start the evaluation of the newest version, if its step must be evaluated and no other evaluation is open."""
        newest, settings = self._newest(), self._settings
        if newest is None or settings is None or self._current is not None or not self._is_wanted(newest.version.step):
            return
        version = newest.version
        if version.incarnation < self._durable.state.fences.get(TRAINER, -1):
            return
        first, samples = self._state.next, settings.spec.samples
        self._durable.write(EvaluationStarted(version.step, version.incarnation, first, settings.count, samples))
        self._leases, self._scoring_leases = Leases(), Leases()
        self._rebuild()

    def finish(self) -> None:
        """Record the result of the open evaluation, if all its answers are settled and its step is committed."""
        current = self._current
        if current is None or self._state.unsettled or current.step > self._durable.state.committed:
            return
        metrics = self._state.metrics()
        self._durable.write(EvaluationFinished(current.step, current.incarnation, metrics, self._state.next))

    # ── rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def lease(
        self, incarnation: Incarnation, at_most: int, holding: Sequence[int] | None, weights: int | None
    ) -> tuple[Item, ...]:
        """Lease answers of the open evaluation to a rollout with exactly the weights of the evaluation.

        The arguments are those of :meth:`..store.Store.lease`.
        """
        self._start()
        current = self._current
        if current is None or weights != current.step:
            return ()
        for number in holding or ():
            if self._may_write(incarnation, number) and not self._state.answers[number].finished:
                self._leases.assign(number, incarnation)  # a restart of the store ended the lease of this answer
        leased_before = () if holding is None else self._leases.leased_to(incarnation) - set(holding)
        items = [self._item(self._state.answers[number]) for number in sorted(leased_before)[:at_most]]
        while self._to_extend and len(items) < at_most:
            answer = self._state.answers.get(heappop(self._to_extend))
            if answer is None or answer.finished or answer.failed or self._leases.holder(answer.id) is not None:
                continue
            if self._prompt(answer.item) is None:
                self._settle((), self._answers_to(answer.item))
                continue
            self._leases.assign(answer.id, incarnation)
            items.append(self._item(answer))
        return tuple(items)

    def _prompt(self, item: int) -> tuple[int, ...] | None:
        if item not in self._prompts:
            assert self._settings is not None
            try:
                self._prompts[item] = self._settings.prompt(item).tokens
            except BaseException:  # user code may raise anything: one item must not end the run
                self._prompts[item] = None
        return self._prompts[item]

    def _answers_to(self, item: int) -> tuple[int, ...]:
        """Return the numbers of the answers to a prompt that are not settled."""
        assert self._state.open is not None
        first, samples = self._state.open.first + item * self._state.open.samples, self._state.open.samples
        return tuple(number for number in range(first, first + samples) if not self._state.answers[number].settled)

    def _item(self, answer: EvaluatedAnswer) -> Item:
        assert self._settings is not None
        assert self._state.open is not None
        spec, started = self._settings.spec, self._state.open
        index = answer.id - started.first
        seed = zlib.crc32(f"{self._settings.seed} {started.step} {index}".encode()) % _SEEDS
        sampling = Sampling(temperature=0.0) if not spec.temperature else Sampling(spec.temperature, seed=seed)
        so_far = tuple(unpack(segment) for segment in answer.segments)
        left = self._settings.max_new_tokens - answer.length
        return Item(answer.id, -1, self._prompt(answer.item) or (), so_far, max(0, left), sampling)

    def _may_write(self, incarnation: Incarnation, number: int) -> bool:
        """Return whether an answer may be extended by an incarnation (:meth:`..leases.WorkQueue.may_write`)."""
        answer = self._state.answers.get(number)
        if answer is None or self._current is None:
            return False
        holder = self._leases.holder(number)
        return holder == incarnation or (holder is None and answer.writer in (None, incarnation))

    def append(
        self, incarnation: Incarnation, packed: Iterable[PackedSegment], finished: Iterable[int]
    ) -> tuple[Callable[[], None], set[int]]:
        """Check the segments of an append that belong to answers of the evaluation; ignore all other segments.

        Returns:
            A function that appends the segments, to be called only if no answer of the append is lost; and the numbers
            of the lost answers. An answer is lost if the incarnation may not write it, if its segments neither continue
            nor repeat the stored segments, or if its segments are of another weight version.
        """
        segments = [replace(segment, extras=()) for segment in packed if is_evaluated(segment.trajectory)]
        finished = [number for number in finished if is_evaluated(number)]
        numbers = {*(segment.trajectory for segment in segments), *finished}
        lost = {number for number in numbers if not self._may_write(incarnation, number)}
        limit = 0 if self._settings is None else self._settings.max_new_tokens
        new: list[PackedSegment] = []
        lengths: dict[int, int] = {}
        for segment in segments:
            if segment.trajectory in lost or self._current is None:
                continue
            answer = self._state.answers[segment.trajectory]
            length = lengths.get(answer.id, answer.length)
            is_version = (segment.step, segment.incarnation) == (self._current.step, self._current.incarnation)
            if segment.offset == length < segment.end <= limit and is_version and not answer.finished:
                new.append(segment)
                lengths[answer.id] = segment.end
            elif segment not in answer.segments:
                lost.add(answer.id)
        for number in lost:
            self._release(number, incarnation)
        ends = {number for number, length in lengths.items() if length == limit}
        ends |= {number for number in finished if number not in lost and not self._state.answers[number].finished}

        def write() -> None:
            if new or ends:
                self._durable.write(EvaluationAppended(incarnation, tuple(new), tuple(sorted(ends))))
            for segment in new:
                self._leases.assign(segment.trajectory, incarnation)
            for number in ends:
                self._leases.release(number)
                heappush(self._to_score, number)

        return write, lost

    def _release(self, number: int, incarnation: Incarnation) -> None:
        """End the lease of an answer whose rollout must stop working on it, and offer the answer to other rollouts."""
        if self._leases.holder(number) == incarnation:
            self._leases.release(number)
            heappush(self._to_extend, number)

    def hand_over(self, incarnation: Incarnation) -> None:
        """End all leases of a rollout, and offer its answers to other rollouts."""
        for number in list(self._leases.leased_to(incarnation)):
            self._release(number, incarnation)

    def release_departed(self, current: frozenset[Incarnation]) -> None:
        """End the leases of all incarnations that are not current."""
        for number in self._leases.release_departed(current):
            heappush(self._to_extend, number)
        for number in self._scoring_leases.release_departed(current):
            heappush(self._to_score, number)

    # ── reward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def lease_scoring(self, incarnation: Incarnation, at_most: int, holding: Sequence[int]) -> tuple[ToScore, ...]:
        """Lease complete answers without a score; the arguments are those of :meth:`..store.Store.lease_scoring`."""
        numbers = sorted(self._scoring_leases.leased_to(incarnation) - set(holding))[:at_most]
        while self._to_score and len(numbers) < at_most:
            answer = self._state.answers.get(heappop(self._to_score))
            if answer is not None and not answer.settled and self._scoring_leases.holder(answer.id) is None:
                self._scoring_leases.assign(answer.id, incarnation)
                numbers.append(answer.id)
        return tuple(self._to_score_message(self._state.answers[number]) for number in numbers)

    def _to_score_message(self, answer: EvaluatedAnswer) -> ToScore:
        tokens = tuple(token for segment in answer.segments for token in unpack_tokens(segment.tokens))
        return ToScore(answer.id, answer.item, tokens, evaluation=True)

    def post_scores(self, scores: Iterable[Score], failed: Iterable[int]) -> None:
        """Record finite scores, and answers that cannot be scored. Ignore answers that are incomplete or settled."""
        known = {one.id for one in self._state.answers.values() if one.finished and not one.settled}
        by_answer = {score.trajectory: score for score in scores if score.trajectory in known.difference(failed)}
        self._settle(tuple(by_answer.values()), tuple({*failed} & known - by_answer.keys()))

    def _settle(self, scores: tuple[Score, ...], failed: tuple[int, ...]) -> None:
        if not scores and not failed:
            return
        self._durable.write(EvaluationScored(scores, failed))
        for number in (*(score.trajectory for score in scores), *failed):
            self._scoring_leases.release(number)
            self._leases.release(number)
        self.finish()


RESEND_S = 5.0
"""Seconds after which a result that the manager has not confirmed is sent again."""


class EvaluationReports:
    """Reports the results of evaluations to the manager, each until the manager confirms it.

    Every reported result is durable, because a round of the server flushes its records before the event loop can run
    :meth:`send`.

    Args:
        evaluations: The evaluations.
        report: Sends a step and its metrics to the manager.
    """

    def __init__(self, evaluations: Evaluations, report: Callable[[int, dict[str, float]], None]) -> None:
        self._evaluations, self._report = evaluations, report
        self._sent_at: dict[int, float] = {}
        """Time (s) at which each unconfirmed result was last sent, by step."""

    def send(self, confirmed: int, now: float) -> None:
        """Send the results of steps after ``confirmed`` in order, except those sent in the last :data:`RESEND_S`."""
        self._sent_at = {step: at for step, at in self._sent_at.items() if step > confirmed}
        for step, result in self._evaluations.results.items():
            if step > confirmed and now - self._sent_at.get(step, -inf) >= RESEND_S:
                self._report(step, result.metrics)
                self._sent_at[step] = now


def is_evaluated(number: int) -> bool:
    """Return whether a trajectory's number belongs to an answer of an evaluation."""
    return number >= FIRST_EVALUATED
