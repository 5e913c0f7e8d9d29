"""``rrl health drain-requests``: nodes that runs want to be drained and may not drain, for whoever may."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rrl.cli import node_drains
from rrl.cli.asking import Failed
from rrl.cli.histories import read, warn
from rrl.cli.moments import moment
from rrl.cli.screen import print_json, show
from rrl.health.drain_requests import Request, open_requests
from rrl.health.report_nodes import drain_line
from rrl.health.report_values import DrainState


def drain_requests(since: str, history: Sequence[Path], *, apply: bool, json: bool) -> int:
    """Exit code 1 where one of them was to be drained and is not."""
    told, sources = read(history, max(0.0, moment(since)))
    warn(sources)
    requests = open_requests(told)
    try:
        drains, unknown = (node_drains.look(one.node for one in requests) if requests else {}), ""
    except node_drains.NotAsked as error:
        drains, unknown = {}, str(error)
    if apply:
        return _apply(requests, drains, unknown, json)
    if json:
        print_json([_told(one, drains.get(one.node, DrainState())) for one in requests])
        return 0
    from rrl.cli.views.health_drains import requests_view

    show(requests_view(requests, drains, unknown, time.time()))
    for one in requests:  # not wrapped, whatever the terminal: they are to be pasted
        state = drains.get(one.node, DrainState())
        if not state.drained and state.booted <= one.at:
            print(drain_line(one.node, one.reason))
    return 0


def _apply(requests: list[Request], drains: dict[str, DrainState], unknown: str, json: bool) -> int:
    if unknown:
        raise Failed(f"nothing was drained: {unknown}")
    outcomes: list[tuple[str, bool, str]] = []
    wanted = []
    for one in requests:
        state = drains.get(one.node, DrainState())
        if state.booted > one.at:  # it was repaired, or the next run that has it will ask anew
            outcomes.append((one.node, True, "was booted since it was asked for: not drained"))
        elif state.drained:
            outcomes.append((one.node, True, f"is drained already: {state.reason}"))
        else:
            wanted.append((one.node, one.reason))
    try:
        outcomes += node_drains.drain(wanted) if wanted else []
    except node_drains.NotAsked as error:
        raise Failed(f"nothing was drained: {error}") from None
    if json:
        print_json([{"node": node, "drained": ok, "said": said} for node, ok, said in outcomes])
    else:
        for node, ok, said in outcomes:
            print(f"{node}: {said}" if ok else f"{node}: not drained: {said}", flush=True)
        if not outcomes:
            print("nothing is asked for", file=sys.stderr)
    return 0 if all(ok for _, ok, _ in outcomes) else 1


def _told(one: Request, state: DrainState) -> dict[str, object]:
    line = "" if state.drained or state.booted > one.at else drain_line(one.node, one.reason)
    return {
        "node": one.node, "reason": one.reason, "cause": one.cause, "evidence": list(one.evidence), "at": one.at,
        "users": list(one.users), "runs": list(one.runs), "asked_by": one.by, "said": one.said, "state": state.state,
        "drained": state.drained, "whose": state.whose, "scontrol": line,
    }  # fmt: skip
