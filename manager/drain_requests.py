"""Nodes that should be drained and that the cluster did not drain for us, with what was found: for the administrators.

Folded from the journal, like the rest of the run's account: a refused intent to drain is the request.
"""

from __future__ import annotations

from msgspec import Struct

from rrl.manager import events as ev
from rrl.manager.actions import Drain, Exclude, Readmit
from rrl.spec.words import NodeName


class DrainRequest(Struct, frozen=True):
    node: str
    cause: str
    """``gpu``, ``node`` ...; empty: a person wants it"""
    evidence: list[str]
    at: float
    """wall clock (s) of the node's exclusion"""
    asked: str
    """by whom; empty: by the run itself"""
    said: str
    """why the cluster did not drain it"""


class DrainRequests:
    def __init__(self) -> None:
        self._excluded: dict[NodeName, tuple[Exclude, float]] = {}
        self._tried: dict[str, Drain] = {}
        """by tag"""
        self._open: dict[NodeName, DrainRequest] = {}

    def enter(self, stamped: ev.Stamped) -> None:
        event = stamped.event
        if isinstance(event, ev.Decided) and isinstance(event.action, Exclude):
            self._excluded[event.action.node] = event.action, stamped.at
        elif isinstance(event, ev.Decided) and isinstance(event.action, Readmit):
            self._open.pop(event.action.node, None)
        elif isinstance(event, ev.Intended) and isinstance(event.action, Drain):
            self._tried[event.action.tag] = event.action
        elif isinstance(event, ev.Done) and (drain := self._tried.pop(event.tag, None)) is not None:
            self._open.pop(drain.node, None)
            if not event.ok:
                self._open[drain.node] = self._request(drain, event.detail, stamped.at)

    def _request(self, drain: Drain, said: str, at: float) -> DrainRequest:
        exclude, at = self._excluded.get(drain.node, (None, at))
        cause = exclude.cause.value if exclude is not None and exclude.cause is not None else ""
        by = exclude.by if exclude is not None else ""
        return DrainRequest(drain.node, cause, list(drain.why.evidence), at, by, said)

    @property
    def requests(self) -> list[DrainRequest]:
        return list(self._open.values())
