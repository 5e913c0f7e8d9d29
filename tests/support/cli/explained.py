"""Check that ``rrl explain`` explains every decision of a run completely."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rrl.health.detection.detectors.registry import NODE_DETECTORS, PROGRESS_DETECTORS
from rrl.manager.model import events as ev
from rrl.manager.model.actions import Action, Exclude, Fence, Finish, InjectFault, Readmit, RestartAll, Rung
from rrl.manager.reporting.decisions.expectations import Arrival
from rrl.manager.reporting.decisions.explanations import Explanation, Takeover, explain, subject_of, words_of

DETECTOR_NAMES = "|".join(one.__name__ for one in (*PROGRESS_DETECTORS, *NODE_DETECTORS) if "_" in one.__name__)
INSIDE_WORDS = re.compile(
    r"\b(fence[ds]?|incarnations?|rungs?|gangs?|orphans?|epochs?|intents?|intended|retired|tags?|tagged|holds"
    rf"|{DETECTOR_NAMES})\b"
)
"""Words that must not appear in an explanation, because a reader of explanations may not know them."""
FIRST_RUNGS = {"role": Rung.IN_PLACE, "job": Rung.FULL_RESTART}
"""The first rung of the repair ladder of each ``recovery.policy``."""


def assert_explained(events: Iterable[ev.Stamped], planned: Sequence[Action] | None = None) -> list[Explanation]:
    """Assert that every decision of a run is explained; return the explanations.

    A test that records decisions of its own passes the decisions of the planner as ``planned``.
    """
    recorded = list(events)
    decided = sum(isinstance(stamped.event, ev.Decided | ev.Intended) for stamped in recorded)
    explanations = explain(recorded)
    assert sum(not isinstance(explanation.action, Takeover) for explanation in explanations) == decided
    first = FIRST_RUNGS[_policy(recorded)]
    own = None if planned is None else {id(action) for action in planned}
    for explanation in explanations:
        if own is None or id(explanation.action) in own:
            _assert_explained(explanation, first)
    if isinstance(recorded[-1].event, ev.RunEnded):
        unsettled = [one for one in explanations if one.result.arrival in (Arrival.OPEN, Arrival.HOLDS)]
        assert unsettled == [], "the run has ended, but an expected effect is still open"
    return explanations


def _assert_explained(explanation: Explanation, first: Rung) -> None:
    action, why, result = explanation.action, explanation.action.why, explanation.result
    assert why.evidence, explanation
    assert all(why.evidence), explanation
    assert words_of(action), explanation
    assert subject_of(explanation) or isinstance(action, RestartAll), explanation
    if isinstance(action, Fence | RestartAll | Finish | Exclude | Readmit):
        assert why.expects, explanation
    if why.rung not in (None, Rung.IN_PLACE, first):
        assert why.lower, explanation
    if result.arrival in (Arrival.CAME, Arrival.MISSED):
        assert result.text, explanation
        assert result.at is not None, explanation
        assert result.at >= explanation.at, explanation
    for lower in why.lower:
        assert lower.needed, explanation
        assert why.rung not in lower.rungs or why.rung is Rung.IN_PLACE or why.rung is Rung.SPARE, explanation
    assert not re.search(rf"\b({DETECTOR_NAMES})\b", " ".join(why.evidence)), explanation
    named = isinstance(action, InjectFault)  # by the kind of the fault, which may be called as a detector is
    texts = (words_of(action), why.expects, "" if named else result.text, *(lower.needed for lower in why.lower))
    assert not [text for text in texts if INSIDE_WORDS.search(text)], explanation


def _policy(events: list[ev.Stamped]) -> str:
    jobs = (stamped.event.job for stamped in events if isinstance(stamped.event, ev.RunStarted | ev.Resumed))
    return next(jobs).recovery.policy
