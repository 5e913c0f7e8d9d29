"""Queries on the state that several modules use."""

from __future__ import annotations

import pytest

from rrl.core.types import Cause, Finding, Incarnation, NodeName, Remedy, ReplicaId, Verdict
from rrl.manager.model.queries import first_symptom_at

OWN, N1 = Incarnation(ReplicaId("rollout/0"), 2), NodeName("n1")


def about(incarnation: Incarnation | None, node: str | None, since: float, verdict: Verdict = Verdict.FAIL) -> Finding:
    on = None if node is None else NodeName(node)
    return Finding("test", verdict, Cause.NODE, Remedy.EXCLUDE, since, (), incarnation=incarnation, node=on)


@pytest.mark.parametrize(
    ("findings", "symptom_at"),
    [
        ((), None),
        ((about(OWN, None, 30.0), about(OWN, None, 20.0)), 20.0),
        ((about(None, "n1", 10.0), about(OWN, None, 30.0)), 30.0),  # its own findings come first
        ((about(None, "n1", 10.0), about(None, "n2", 5.0)), 10.0),
        ((about(OWN, None, 10.0, Verdict.WARN), about(None, "n1", 40.0)), 40.0),
        ((about(Incarnation(ReplicaId("rollout/0"), 1), None, 10.0),), None),
        ((about(OWN, None, 0.0),), None),  # 0.0 is an unknown time
    ],
)
def test_first_symptom_is_the_earliest_of_the_incarnations_findings_else_of_its_nodes(
    findings: tuple[Finding, ...], symptom_at: float | None
) -> None:
    assert first_symptom_at(findings, OWN, N1) == symptom_at


def test_first_symptom_of_a_node_uses_the_findings_about_the_node() -> None:
    findings = (about(OWN, None, 5.0), about(None, "n1", 10.0))
    assert first_symptom_at(findings, None, N1) == 10.0
    assert first_symptom_at(findings, None, None) is None
