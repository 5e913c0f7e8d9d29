"""``rrl health drain-requests``: list the nodes that runs found broken but may not drain, for administrators."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from ...cluster.base import Refused, Unanswered
from ...core.types import OperationFailed
from ...health.report.drain_requests import DrainRequest, confirmation, confirmed_reason, open_requests
from ...health.report.model import DrainState
from ...health.report.node import drain_line
from ..common.output import parse_time, print_json, print_line, show
from . import node_drains, remote_checks
from .report import read_records, warn, without_implausible

_now = time.time


class OpenDrainRequest(DrainRequest, frozen=True, kw_only=True):
    """A node whose drain runs requested: an object of the output of ``rrl health drain-requests --json``."""

    state: str
    """State of the node according to Slurm; empty if it is not known."""
    drained: bool
    owner: str
    """Who drained the node; empty if it is not drained."""
    scontrol: str
    """Command that drains the node; empty if it should not be drained now."""


class DrainResult(Struct, frozen=True):
    """The result of a request: an object of the output of ``rrl health drain-requests --apply --json``."""

    node: str
    drained: bool
    """True if the node no longer needs a drain."""
    outcome: str


def drain_requests(since: str, history: Sequence[Path], *, apply: bool, json: bool) -> int:
    """Print the open drain requests in the run histories; with ``apply``, drain the nodes instead.

    ``since`` (a time, or a span such as ``10m``) limits the records that are read from the ``history`` folders. A node
    is drained only if a health check on it now confirms the records. Returns exit code 1 if ``apply`` left a requested
    node undrained (except one that was booted since the request), else 0.
    """
    records, sources = read_records(history, max(0.0, parse_time(since)))
    wanted = {one.node for one in open_requests(records)}
    try:
        drains, unknown = (node_drains.drain_states(wanted) if wanted else {}), ""
    except (Refused, Unanswered) as error:
        drains, unknown = {}, str(error)
    records, sources = without_implausible(records, sources, _now(), drains)
    warn(sources)
    requests = open_requests(records)
    if apply:
        return _apply(requests, drains, unknown, json)
    if json:
        print_json([_open_request(one, drains.get(one.node, DrainState())) for one in requests])
        return 0
    from ..views.checks import requests_view

    show(requests_view(requests, drains, unknown, _now()))
    for one in requests:  # commands to paste, so they are not wrapped
        if line := _scontrol(one, drains.get(one.node, DrainState())):
            print_line(line)
    return 0


def _apply(requests: list[DrainRequest], drains: dict[str, DrainState], unknown: str, json: bool) -> int:
    if unknown:
        raise OperationFailed(f"nothing was drained: {unknown}")
    outcomes: list[tuple[str, bool, str]] = []
    wanted: list[DrainRequest] = []
    for one in requests:
        state = drains.get(one.node, DrainState())
        if state.booted > one.at:  # the node was repaired, or the next run on it will request the drain
            outcomes.append((one.node, True, "was booted after the drain was requested: not drained"))
        elif state.drained:
            outcomes.append((one.node, True, f"is drained already: {state.reason}"))
        else:
            wanted.append(one)
    confirmed: list[tuple[str, str]] = []
    checked = remote_checks.check({one.node: drains[one.node] for one in wanted if one.node in drains})
    for one in wanted:
        found = checked.get(one.node, remote_checks.NotChecked("not known to Slurm"))
        if isinstance(found, remote_checks.NotChecked):
            outcomes.append((one.node, False, f"rrl health check could not run there: {found.reason}"))
        elif (finding := confirmation(one, found)) is None:
            outcomes.append((one.node, False, f"rrl health check there does not confirm the records of {_users(one)}"))
        else:
            confirmed.append((one.node, confirmed_reason(one, finding)))
    try:
        outcomes += node_drains.drain(confirmed) if confirmed else []
    except (Refused, Unanswered) as error:
        raise OperationFailed(f"nothing was drained: {error}") from None
    if json:
        print_json([DrainResult(node, ok, outcome) for node, ok, outcome in outcomes])
    else:
        for node, ok, outcome in outcomes:
            print_line(f"{node}: {outcome}" if ok else f"{node}: not drained: {outcome}")
        if not outcomes:
            print("no run requests a drain", file=sys.stderr)
    return 0 if all(ok for _, ok, _ in outcomes) else 1


def _users(one: DrainRequest) -> str:
    return " and ".join(one.users)


def _scontrol(one: DrainRequest, state: DrainState) -> str:
    """Return an ``scontrol`` command that drains the node, for an administrator to paste.

    The command is empty if the node is already drained, if it was booted since the request, or if only one user other
    than root requests the drain.
    """
    wanted = one.accused and not state.drained and state.booted <= one.at
    return drain_line(one.node, one.reason) if wanted else ""


def _open_request(one: DrainRequest, state: DrainState) -> OpenDrainRequest:
    return OpenDrainRequest(
        **asdict(one), state=state.state, drained=state.drained, owner=state.owner, scontrol=_scontrol(one, state)
    )
