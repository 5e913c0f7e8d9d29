"""The reward role (``python -m rrl.roles.reward``): leases complete trajectories, scores them, posts the scores."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import rrl

from .end_report import exits_on_invalid_config
from .models.tasks import Task, TaskError, load_task
from .models.tokenizer import Tokenizer, open_tokenizer
from .trajectories.types import Score, ToScore

_log = logging.getLogger("rrl.reward")


class Scorer:
    """Scores token sequences with a task."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._reported: set[str] = set()

    def score(
        self, items: Sequence[ToScore], on_scored: Callable[[], None] = lambda: None
    ) -> tuple[list[Score], dict[int, str]]:
        """Score complete trajectories.

        If the task's scorer raises an exception or returns a value that is not finite, the trajectory's group is
        dropped, and the run continues.

        Args:
            items: the trajectories to score.
            on_scored: called after each item.

        Returns:
            The scores, and for each trajectory that could not be scored the reason.
        """
        scores: list[Score] = []
        failed: dict[int, str] = {}
        for item in items:
            try:
                reward, training = self._task.score(item.item, self._tokenizer.decode(item.tokens))
            except Exception as error:  # whatever a user's scorer raises
                failed[item.trajectory] = self._report_once(f"the scorer raised {type(error).__name__}", item)
            else:
                if math.isfinite(reward) and math.isfinite(training):
                    scores.append(Score(item.trajectory, float(reward), float(training)))
                else:
                    failed[item.trajectory] = self._report_once("the score is not finite", item)
            on_scored()
        return scores, failed

    def _report_once(self, why: str, item: ToScore) -> str:
        if why not in self._reported:
            self._reported.add(why)
            raised = sys.exc_info()[0] is not None
            _log.warning(
                "%s (item %s of [task]); the group of this item is dropped; further groups that are dropped for this"
                " reason cause no warning",
                why,
                item.item,
                exc_info=raised,
            )
        return why


def main() -> None:
    """Join the run and score until a stop is requested."""
    me = rrl.join()
    with exits_on_invalid_config():
        tokenizer = open_tokenizer(me.job.model)
    with exits_on_invalid_config(TaskError):
        task = load_task(me.job.task, me.job.seed, tokenizer, Path(me.launch.cwd))
    with me:
        scorer = Scorer(task, tokenizer)
        for work in me.scoring(at_most=me.job.reward.lease):
            with me.phase("score"):
                work.post(*scorer.score(work.items, me.progress))  # each item counts, so a long batch shows progress


if __name__ == "__main__":
    main()
