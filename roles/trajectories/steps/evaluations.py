"""The rules of evaluations (``[eval]``): when the weights of a step are evaluated, and by which answers.

An evaluation of step s belongs to one weight version, and to the time between two steps:

- It starts once the current trainer has published the weights of step s. Rollouts with these weights get its answers
  before any other work; a token of another version is refused.
- The trainer gets no data of step s + 1 before each answer has a score (or cannot be scored). So the trainer publishes
  no newer version during the evaluation, and a rollout that replaces a failed one receives the weights of step s.
- Its result is recorded once step s is committed (for s = 0 at once). If the trainer restarts before the result is
  recorded, the evaluation begins again, since the trainer may compute step s again. A recorded result never changes.

Answers of an evaluation are durable like trajectories, but belong to no group, so that no step can train on them.

In a job with agents, the answers are episodes, to which the rules of :mod:`..episodes` apply; here they are started,
and their results are recorded. Agents of the run begin them before all other episodes. If all agents are outside of the
run, nothing waits for them: an evaluation is always open, and its turns are sampled with the weights of the time. Once
a step that must be evaluated is committed, the episodes with a score are its result; the others end.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ....core.task_spec import EvalSpec
from ....core.types import TRAINER, Incarnation
from ..dispatch.lease_table import Leases
from ..durable.evaluation_state import EvaluatedAnswer
from ..durable.groups import Group, TrajectoryState, as_to_score
from ..durable.log import DurableState
from ..durable.records import (
    AnsweredBy,
    EvaluationAppended,
    EvaluationFinished,
    EvaluationScored,
    EvaluationStarted,
    PackedSegment,
    is_evaluated,
    unpack,
    unpack_tokens,
)
from ..durable.trained_samples import trainable_turns
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
    agents: AnsweredBy = ""


class Evaluations:
    """The open evaluation, its leases to rollouts and to reward replicas, and the step that waits for it.

    Args:
        durable: State and log of the store.
        settings: Settings of the job; None if it has no evaluations.
        newest: Returns the newest weight version that the trainer has published.
        end_leases: Ends the leases of an episode, given its group, and of its turns.
        end_tokens: Tokens that end an answer.
    """

    def __init__(
        self,
        durable: DurableState,
        settings: EvaluationSettings | None,
        newest: Callable[[], NewestVersion | None],
        end_leases: Callable[[Group], None],
        end_tokens: Collection[int],
    ) -> None:
        self._durable, self._settings, self._newest, self._end_leases = durable, settings, newest, end_leases
        self._end_tokens = end_tokens
        self._state = durable.state.evaluations
        self._leases, self._scoring_leases = Leases(), Leases()
        self._prompts: dict[int, Prompt | None] = {}
        """Prompts by item, which are the same in each evaluation; None if the task cannot make the prompt."""
        self._to_extend: list[int] = []
        """Answers that no rollout extends; with agents, the episodes that no agent works on."""
        self._to_score: list[int] = []
        self._rebuild()

    def _rebuild(self) -> None:
        answers = self._state.answers.values()
        self._to_extend = [answer.id for answer in answers if _is_free(answer)]
        self._to_score = [answer.id for answer in answers if _awaits_score(answer)]
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
        started, settings = self._state.open, self._settings
        if started is None or settings is None or started.agents != settings.agents:
            return None
        fence = self._durable.state.fences.get(TRAINER, -1)
        return None if not self.is_outside and started.incarnation < fence else started

    @property
    def is_outside(self) -> bool:
        """True if agents outside of the run are evaluated, for which nothing waits."""
        return self._settings is not None and self._settings.agents == "outside"

    def end_abandoned(self) -> None:
        """End the episodes of an evaluation that will have no result, so that their agents begin no further turns."""
        if self._state.open is not None and self._state.open.agents and self._current is None:
            self.fail(number for number, answer in self._state.answers.items() if not answer.settled)

    def _is_wanted(self, step: int) -> bool:
        """Return whether the weights of a step must be evaluated and have no result yet."""
        settings, results = self._settings, self._state.results
        return settings is not None and settings.spec.is_due(step, settings.steps) and step > max(results, default=-1)

    def awaited(self, step: int, trainer: int) -> bool:
        """Return whether the trainer with this incarnation number has to wait for the evaluation of a step."""
        if self.is_outside or not self._is_wanted(step):
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
        if current.agents:  # which turns the agents will need is not known
            return len(left), bool(left)
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
        answers = "answers" if not self._current.agents else "episodes"
        done = f"{count - self._state.unsettled} of {count} {answers} are scored"
        return f"the trainer waits for the evaluation of step {step}: {done}"

    def _start(self) -> None:
        """Start the evaluation of the newest version, if its step must be evaluated and no other evaluation is open."""
        newest = self._newest()
        if newest is None or self._current is not None or self.is_outside or not self._is_wanted(newest.version.step):
            return
        if newest.version.incarnation >= self._durable.state.fences.get(TRAINER, -1):
            self._open(newest.version.step, newest.version.incarnation)

    def _open(self, step: int, incarnation: int) -> None:
        assert self._settings is not None
        settings, first = self._settings, self._state.next
        self._durable.write(
            EvaluationStarted(step, incarnation, first, settings.count, settings.spec.samples, settings.agents)
        )
        self._leases, self._scoring_leases = Leases(), Leases()
        self._rebuild()

    def finish(self) -> None:
        """Record the result of the open evaluation, if all its answers are settled and its step is committed.

        The result of agents outside of the run is recorded as soon as a step that must be evaluated is committed.
        """
        if self.is_outside:
            self._finish_outside()
            return
        current = self._current
        if current is not None and not self._state.unsettled and current.step <= self._durable.state.committed:
            self._record(current.step)

    def _finish_outside(self) -> None:
        assert self._settings is not None
        committed, steps = self._durable.state.committed, self._settings.steps
        due, newest = self._settings.spec.newest_due(min(committed, steps), steps), max(self._state.results, default=-1)
        if self._current is None and newest < steps:
            self._open(committed, 0)
        if due > newest and self._current is not None:
            self._record(due)
            if due < steps:
                self._open(committed, 0)

    def _record(self, step: int) -> None:
        assert self._state.open is not None
        metrics = self._state.metrics(self._source, self._is_cut)
        for answer in self._state.answers.values():
            if answer.episode is not None:
                self._end_leases(answer.episode.group)
        self._durable.write(EvaluationFinished(step, self._state.open.incarnation, metrics, self._state.next))

    # ── rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────
    def lease(
        self, incarnation: Incarnation, at_most: int, holding: Sequence[int] | None, weights: int | None
    ) -> tuple[Item, ...]:
        """Lease answers of the open evaluation to a rollout with exactly the weights of the evaluation.

        The arguments are those of :meth:`..store.Store.lease`.
        """
        self._start()
        current = self._current
        if current is None or weights != current.step or current.agents:
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

    def _prompt(self, item: int) -> Prompt | None:
        if item not in self._prompts:
            assert self._settings is not None
            try:
                self._prompts[item] = self._settings.prompt(item)
            except BaseException:  # user code may raise anything: one item must not end the run
                self._prompts[item] = None
        return self._prompts[item]

    def _source(self, item: int) -> str:
        prompt = self._prompt(item)
        return "" if prompt is None else prompt.source

    def _is_cut(self, answer: EvaluatedAnswer) -> bool:
        """Return whether the limit on its length cut a complete answer, or an answer of a complete episode."""
        assert self._settings is not None
        if answer.episode is not None and (episode := answer.episode.episode) is not None:
            return any(turn.truncated for turn in trainable_turns(episode))
        last = unpack_tokens(answer.segments[-1].tokens)[-1] if answer.segments else None
        return answer.length >= self._settings.max_new_tokens and last not in self._end_tokens

    def _answers_to(self, item: int) -> tuple[int, ...]:
        """Return the numbers of the answers to a prompt that are not settled."""
        assert self._state.open is not None
        first, samples = self._state.open.first + item * self._state.open.samples, self._state.open.samples
        return tuple(number for number in range(first, first + samples) if not self._state.answers[number].settled)

    def _item(self, answer: EvaluatedAnswer) -> Item:
        assert self._settings is not None
        sampling = self._sampling(answer.id)
        so_far = tuple(unpack(segment) for segment in answer.segments)
        left = self._settings.max_new_tokens - answer.length
        prompt = self._prompt(answer.item)
        return Item(answer.id, -1, prompt.tokens if prompt is not None else (), so_far, max(0, left), sampling)

    def _sampling(self, number: int, request: str = "") -> Sampling:
        """Return how an answer, or the turn that a request has opened in an episode, is sampled."""
        assert self._settings is not None
        assert self._state.open is not None
        spec, started = self._settings.spec, self._state.open
        place = f"{self._settings.seed} {started.step} {number - started.first} {request}".rstrip()
        seed = zlib.crc32(place.encode()) % _SEEDS
        return Sampling(temperature=0.0) if not spec.temperature else Sampling(spec.temperature, seed=seed)

    # ── agents ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def free_episode(self, *, outside: bool) -> TrajectoryState | None:
        """Return the next episode that no agent works on, and remove it from the queue; None if there is none.

        With ``outside``, it is for an agent outside of the run.
        """
        self._start()
        while self._current is not None and outside == self.is_outside and self._to_extend:
            answer = self._state.answers.get(heappop(self._to_extend))
            if answer is not None and answer.episode is not None and _is_free(answer):
                return answer.episode
        return None

    @property
    def unsettled_episodes(self) -> list[TrajectoryState]:
        """The episodes of the open evaluation that have no score and may get one."""
        answers = self._state.answers.values()
        return [one.episode for one in answers if one.episode is not None and not one.settled]

    def offer(self, episode: int) -> None:
        """Offer an episode, whose attempt has ended without a result, to agents."""
        heappush(self._to_extend, episode)

    def offer_scoring(self, episode: int) -> None:
        """Offer an episode without a reward to reward replicas."""
        heappush(self._to_score, episode)

    def fail(self, numbers: Iterable[int]) -> None:
        """Record that episodes will never have a score."""
        failed = tuple(numbers)
        for number in failed:
            if (episode := self._state.answers[number].episode) is not None:
                self._end_leases(episode.group)
        self._settle((), failed)

    def as_leased(self, item: Item, track: TrajectoryState) -> Item:
        """Return an item as a rollout receives it. A turn of an episode is sampled as the evaluation demands."""
        turn, asked = track.turn, item.sampling or Sampling()
        is_foreign = asked != Sampling(constraint=asked.constraint)
        if turn is None or not track.group.is_evaluated or is_foreign or self._settings is None:
            return item
        return replace(item, sampling=replace(self._sampling(turn.episode, turn.request), constraint=asked.constraint))

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
            fits = segment.offset == length < segment.end <= limit and self._state.accepts(segment)
            if fits and not answer.finished:
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
        if answer.episode is not None:
            return as_to_score(answer.episode)
        tokens = tuple(token for segment in answer.segments for token in unpack_tokens(segment.tokens))
        return ToScore(answer.id, answer.item, tokens, evaluation=True)

    def post_scores(self, scores: Iterable[Score], failed: Iterable[int]) -> None:
        """Record finite scores, and answers that cannot be scored. Ignore answers that are incomplete or settled."""
        known = {one.id for one in self._state.answers.values() if _awaits_score(one)}
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


def _is_free(answer: EvaluatedAnswer) -> bool:
    """Return whether an answer lacks tokens or, if it is an episode, an attempt."""
    episode = None if answer.episode is None else answer.episode.episode
    return not answer.finished and not answer.settled and (episode is None or episode.holder is None)


def _awaits_score(answer: EvaluatedAnswer) -> bool:
    """Return whether a reward replica must score an answer."""
    episode = None if answer.episode is None else answer.episode.episode
    return answer.finished and not answer.settled and (episode is None or not episode.awaits_reward)
