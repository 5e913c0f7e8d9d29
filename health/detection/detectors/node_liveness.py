"""Detectors of whether a node is there: what the cluster says of it, and the silence of everybody on it."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from ....core.run_spec import Limits
from ....core.types import Cause, Evidence, Finding, NodeName, Remedy, Verdict
from ..records import FLAP_WINDOW, FLAPS, NodeSighting, ReplicaSighting
from ..watch import Watch
from .base import NOTHING, Judged, expected_to_speak, patience, speaks_by

_ASKING = 30.0
"""s that a cluster has to say whether a silent node is suspended; one that is away longer hinders no repair"""


def node_down(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """The cluster says that it is down: proof."""
    if seen.down_said is None:
        return NOTHING
    since, words = seen.down_said
    evidence = (Evidence("cluster", f"down: {words}" if words else "down", since),)
    return _node_finding(seen, "node_down", Verdict.FAIL, Remedy.EXCLUDE, since, evidence, proof=True), inf


def node_lost(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """Its agent is silent. That alone is a warning; a second witness, the silence of every replica there, condemns it.

    Replicas that never joined have not been heard and so cannot fall silent: they witness only where none joined, and
    once their join deadline has passed. Whoever ended, or left before it fell silent, is no witness.
    """
    agent = seen.agent or seen.former_agent
    if agent is None or not _witness(agent, limits) or seen.suspended_at is not None:
        return NOTHING
    agent_due = speaks_by(agent, limits)
    witnesses = [one for one in (*seen.residents.values(), *seen.departed.values()) if _witness(one, limits)]
    joined = [one for one in witnesses if one.status == "joined"]
    dues = [speaks_by(one, limits) for one in witnesses]
    lost = max(speaks_by(one, limits) for one in joined) if joined else min(dues, default=inf)
    lost = max(lost, agent_due)
    text = f"agent {agent.life} is silent" if agent.status == "joined" else f"agent {agent.life} never joined"
    evidence = [Evidence("manager", text, agent.last_heard)]
    if now >= lost:
        silent = sorted(str(one.life) for one in (joined or witnesses) if now >= speaks_by(one, limits))
        since = agent.last_heard if seen.last_heard is None else seen.last_heard
        evidence.append(Evidence("manager", f"silent too: {_few(silent)}", since))
        if seen.looked_at is not None and not seen.asked(limits) and now < lost + _ASKING:
            evidence.append(Evidence("manager", "the cluster is asked first whether it is suspended", lost))
            return _node_finding(seen, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost + _ASKING
        return _node_finding(seen, "node_lost", Verdict.FAIL, Remedy.EXCLUDE, since, tuple(evidence)), inf
    if now >= agent_due and agent.status == "joined":
        since = agent.last_heard
        return _node_finding(seen, "node_lost", Verdict.WARN, Remedy.NONE, since, tuple(evidence)), lost
    return None, agent_due if now < agent_due else lost


def absent(found: Collection[Finding], watch: Watch, limits: Limits, now: float) -> dict[NodeName, float]:
    """Nodes of which nothing has been heard for some beats, and since when (s). Looked for only where one is lost."""
    if all(finding.detector != node_lost.__name__ for finding in found):
        return {}
    return {home.node: home.last_heard for home in watch.nodes.values()
            if home.agent is not None and home.agent.status == "joined" and expected_to_speak(home.agent)
            and home.last_heard is not None and now >= home.last_heard + patience(limits)}  # fmt: skip


def node_flaps(seen: NodeSighting, limits: Limits, now: float) -> Judged:
    """The cluster ceases to call it up again and again, however well it looks in between."""
    if len(seen.flaps) < FLAPS or seen.flaps[-1] - seen.flaps[0] > FLAP_WINDOW:
        return NOTHING
    over = seen.flaps[-1] + FLAP_WINDOW
    if now >= over:
        return NOTHING
    since = seen.flaps[0]
    text = f"it ceased to be up {len(seen.flaps)} times within {seen.flaps[-1] - since:.0f} s"
    evidence = (Evidence("cluster", text, seen.flaps[-1]),)
    return _node_finding(seen, "node_flaps", Verdict.FAIL, Remedy.EXCLUDE, since, evidence), over


def _witness(seen: ReplicaSighting, limits: Limits) -> bool:
    """Its silence says something: it did not end, and if it was to leave, it was overdue before that."""
    left = seen.left_at is not None and seen.left_at < speaks_by(seen, limits)
    return not seen.ended and not left


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _node_finding(
    seen: NodeSighting, detector: str, verdict: Verdict, remedy: Remedy, since: float, evidence: tuple[Evidence, ...],
    proof: bool = False,
) -> Finding:  # fmt: skip
    return Finding(detector, verdict, Cause.NODE, remedy, since, evidence, node=seen.node, proof=proof)
