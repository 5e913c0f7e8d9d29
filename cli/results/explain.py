"""``rrl explain``: explain each decision of a run's manager."""

from __future__ import annotations

from ...api.runs import find_run, read_state
from ...core.run_dir import RunDir, errors_about
from ...core.types import UsageError
from ...manager.reporting.decisions.explanations import Explanation, explain, known_names
from ...manager.storage.journal import replay
from ..common.output import print_json, print_line, show
from ..views.explanation import decision_record, explanation_view

MAX_NAMES = 12
"""Maximum number of names in a message."""


def explain_run(name: str, about: str | None, *, json: bool) -> int:
    """Print the decisions that :func:`explanations` selects; returns exit code 0."""
    run = find_run(name)
    selected = explanations(run, about)
    if json:
        print_json([decision_record(explanation) for explanation in selected])
    elif selected:
        show(explanation_view(selected, grouped=about is None))
    else:
        print_line(nothing_decided(run, about))
    return 0


def explanations(run: RunDir, about: str | None) -> list[Explanation]:
    """Return the decisions of a run's manager, or only those about a role, replica, node or training step.

    Raises UsageError if the journal is damaged, or if no decision is about ``about``.
    """
    with errors_about(run.journal):
        found = explain(replay(run))
    return found if about is None else _about(found, about, run.id)


def nothing_decided(run: RunDir, about: str | None) -> str:
    """Return the text that is shown if a run has no decision to explain, with the step at which the run is or ended."""
    nothing, state = f"{run.id}: its manager has decided nothing", read_state(run)
    if state is None or about is None:
        return f"{nothing} yet"
    return f"{nothing} in step {about}; the run {'ended' if state.outcome else 'is'} at step {state.step}"


def _about(explanations: list[Explanation], about: str, run: str) -> list[Explanation]:
    """Return the explanations about one name or training step."""
    if about.isdecimal():
        return [explanation for explanation in explanations if explanation.step == int(about)]
    if selected := [explanation for explanation in explanations if explanation.concerns(about)]:
        return selected
    replicas, nodes = known_names(explanations)
    named = ", ".join([*replicas, *nodes][:MAX_NAMES])
    more = ", ..." if len(replicas) + len(nodes) > MAX_NAMES else ""
    raise UsageError(
        f'no decision of {run} is about "{about}"; write a role, a replica, a node or the number of a step:'
        f" {named}{more}"
    )
