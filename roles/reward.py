"""The reward role (``python -m rrl.roles.reward``): lease complete trajectories, score them, and post the scores."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

import rrl

from ..core.types import RaisedException
from .launcher.end_report import ScorerFails, described, exits_on_invalid_config, users_place
from .models.rewards import InvalidReward
from .models.tasks import Task, TaskError, load_evaluation_task, load_task, score_of
from .models.tokenizer import Tokenizer, open_tokenizer
from .trajectories.types import Score, ToScore

_log = logging.getLogger("rrl.reward")

_NOTE_FACTOR = 2
"""Factor by which the number of failures must grow before the next note, because each note is a record in the
journal."""


class ScoredItems(Struct, frozen=True):
    """The results for the trajectories of one lease."""

    scores: list[Score] = []
    failed: dict[int, str] = {}
    """For each trajectory that could not be scored, the reason."""
    faulty: list[int] = []
    """Trajectories in ``failed`` whose failure is a fault of the scorer's code."""


class Scorer:
    """Scores token sequences with a task.

    Args:
        task: The task.
        tokenizer: Converts tokens to the text that is scored.
        folder: The job's folder; file names in messages are relative to it.
        evaluation_task: The task of evaluations; None if there are none.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, folder: Path, evaluation_task: Task | None = None) -> None:
        self._task, self._evaluation_task = task, evaluation_task
        self._tokenizer = tokenizer
        self._folder, self._process = folder, os.getpid()
        self._reported: set[str] = set()
        self._failures, self._noted = 0, 0
        self.newest_fault: tuple[BaseException, RaisedException] | None = None
        """Newest exception that is a fault of the scorer's code, and its description."""
        self.note = ""
        """Text for people about the answers that could not be scored; empty if all could be scored."""

    def score(self, items: Sequence[ToScore], on_scored: Callable[[], None] = lambda: None) -> ScoredItems:
        """Score complete trajectories.

        If the task's scorer raises an exception, or does not return two finite numbers, the trajectory's group is
        dropped. The run continues, unless the store finds that this happens to most groups.

        Args:
            items: the trajectories to score.
            on_scored: called after each item.
        """
        result = ScoredItems([], {}, [])
        for item in items:
            try:
                result.scores.append(self._score(item))
            except BaseException as error:  # whatever a user's scorer raises; a signal sets me.stopping instead
                if os.getpid() != self._process:  # a child that the scorer has forked
                    raise
                raised = self._described(error)
                result.failed[item.trajectory] = self._report(raised, error, item)
                if not raised.environmental and not item.evaluation:
                    result.faulty.append(item.trajectory)
                    self.newest_fault = error, raised
            on_scored()
        return result

    def _score(self, item: ToScore) -> Score:
        has_timer = any(signal.getitimer(signal.ITIMER_REAL))
        try:
            scored = score_of(self._task_of(item), item.item, self._tokenizer.decode(item.tokens))
        finally:
            if not has_timer:  # a timer that the scorer leaves running would interrupt rrl's own code
                signal.setitimer(signal.ITIMER_REAL, 0)
        return Score(item.trajectory, *scored)

    def _task_of(self, item: ToScore) -> Task:
        return self._evaluation_task if item.evaluation and self._evaluation_task is not None else self._task

    def _described(self, error: BaseException) -> RaisedException:
        """Return the type, text and place of an exception.

        For an invalid score, the place is the definition of the scoring function.
        """
        raised = described(error, self._folder)
        code = getattr(error.function, "__code__", None) if isinstance(error, InvalidReward) else None
        if code is None:  # a callable object has none
            return raised
        place = users_place([(code.co_filename, code.co_firstlineno)], self._folder)
        return msgspec.structs.replace(raised, type="ValueError", place=place)

    def _report(self, raised: RaisedException, error: BaseException, item: ToScore) -> str:
        """Log an exception of a new kind, update the note, and return the reason for dropping the group."""
        why = f"the scorer raised {raised.type} ({raised.place})"
        if why not in self._reported:
            self._reported.add(why)
            _log.warning(
                "%s for item %s of [task]; the group of this item is dropped; further groups that are dropped for this"
                " reason are not logged",
                why,
                item.item,
                exc_info=error,
            )
        self._failures += 1
        if self._failures >= _NOTE_FACTOR * self._noted:
            self._noted = self._failures
            answers = "1 answer" if self._failures == 1 else f"at least {self._failures} answers"
            self.note = f"{answers} could not be scored, and their groups are dropped; the last error: {raised}"
        return why


def main() -> None:
    """Join the run and score until a stop is requested.

    Raises:
        ScorerFails: The scorer fails for most groups; the manager then ends the run.
    """
    me = rrl.join()
    folder = Path(me.launch.cwd)
    with exits_on_invalid_config():
        tokenizer = open_tokenizer(me.job.model)
    with exits_on_invalid_config(TaskError):
        task = load_task(me.job.task, me.job.seed, tokenizer, folder)
        evaluation_task = load_evaluation_task(me.job, tokenizer, folder)[0] if me.job.eval is not None else None
    with me:
        me.on_probe(lambda: "the scorer waits for work")  # while it scores, the user's code may block this thread
        scorer = Scorer(task, tokenizer, folder, evaluation_task)
        for work in me.scoring(at_most=me.job.reward.lease):
            with me.phase("score"):
                scored = scorer.score(work.items, me.progress)  # called for each item: a long batch shows progress
                me.note(scorer.note)
                groups = work.post(scored.scores, scored.failed, scored.faulty)
                if groups and scorer.newest_fault is not None:
                    error, raised = scorer.newest_fault
                    raise ScorerFails(raised, groups) from error


if __name__ == "__main__":
    main()
