"""One node, now: read, judge, one verdict. What ``rrl health check`` and admission do.

Most looks are one reading. Where it shows something bad that is no proof, the readers concerned are asked again until
it has been seen often enough to condemn, or not again; if there is no time left for that, it stays a WARN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from msgspec import structs

from ..config.health_rules import Rules
from ..core.types import WORST_FIRST, Finding, NodeName, Verdict
from .checks.evaluate import CHECKS, evaluate, is_uninformative, pending
from .checks.node_state import NodeState
from .readers.base import ReaderOptions
from .readers.isolation.client import read_all
from .readers.samples import READERS, Reading

RECHECK_INTERVAL_S = 1.0
"""s between two looks at what is no proof"""
RATE_INTERVAL_S = 2.0
"""s between two readings where counters' rises are asked for"""
_REST_OF_HOST_S = 5.0
"""The part of a look's time that starting a reader's process and reading the host's other values may take. The rest is
for mounts that hang."""
EXIT_CODES = {Verdict.OK: 0, Verdict.WARN: 1, Verdict.FAIL: 2, Verdict.UNKNOWN: 3}
"""exit codes"""

ReadFunction = Callable[[Sequence[str], float, ReaderOptions], list[Reading]]


def check_node(
    rules: Rules,
    timeout_s: float,
    *,
    node: NodeName = NodeName("here"),
    mounts: Collection[str] = (),
    expected_free: Collection[str] = (),
    only: Collection[str] = (),
    rates: bool = False,
    options: ReaderOptions = ReaderOptions(),
    read: ReadFunction = read_all,
) -> list[Finding]:
    """Return all findings about this node, those of verdict OK and UNKNOWN included.

    Blocks for about ``timeout_s`` at most, and some seconds more to end readers that hang. ``mounts`` are paths besides
    the rules' that must answer. ``expected_free`` are GPUs (UUIDs, indices, or ``every``) that no process may use,
    because a role is about to start. ``only`` names the checks to make; empty: all. With ``rates`` the node is read
    twice, so that rising counters are noticed. Raises OSError if no process can be started.
    """
    rules = _narrowed(rules, only)
    paths = tuple(dict.fromkeys((*options.mounts, *rules.expect.mounts, *mounts)))
    options = structs.replace(
        options, mounts=paths, mount_timeout_s=mount_timeout_s(rules, timeout_s),
        dcgm_user=rules.readers.dcgm_user or options.dcgm_user,
    )  # fmt: skip
    wanted, deadline, state = _readers(rules), time.monotonic() + timeout_s, NodeState(rules.xid.burst)
    state.set_expected_free(expected_free)
    findings = _read_and_evaluate(state, wanted, timeout_s, node, rules, options, read)
    again, pause = (set(wanted), RATE_INTERVAL_S) if rates else (pending(state), RECHECK_INTERVAL_S)
    while again and (left := deadline - time.monotonic() - pause) > 0:
        time.sleep(pause)
        findings = _read_and_evaluate(
            state, [name for name in wanted if name in again], left, node, rules, options, read
        )
        again, pause = pending(state), RECHECK_INTERVAL_S
    return findings


def mount_timeout_s(rules: Rules, timeout_s: float) -> float:
    """Return the time (s) within which a path must answer in a check of ``timeout_s``.

    It suffices to find a hung path, if ``timeout_s`` does.
    """
    return max(1.0, min(rules.host.mount_hung, timeout_s - _REST_OF_HOST_S))


def overall(findings: Collection[Finding]) -> Verdict:
    """Return the verdict on the node: the most severe of its findings.

    UNKNOWN is returned only if nothing is more severe and something that the rules expect could not be read, or a
    reader hung or failed. Readers that are not installed or not permitted say nothing about the node.
    """
    found = {finding.verdict for finding in findings if not is_uninformative(finding)}
    return next((verdict for verdict in WORST_FIRST if verdict in found), Verdict.OK)


def _read_and_evaluate(
    state: NodeState,
    readers: Sequence[str],
    timeout_s: float,
    node: NodeName,
    rules: Rules,
    options: ReaderOptions,
    read: ReadFunction,
) -> list[Finding]:
    for reading in read(readers, timeout_s, options):
        state.add(reading)
    return evaluate(state, node, rules, time.monotonic())


def _narrowed(rules: Rules, only: Collection[str]) -> Rules:
    if not only:
        return rules
    off = {check.name: "off" for check in CHECKS if check.name not in only}
    return structs.replace(rules, checks={**rules.checks, **off})


def _readers(rules: Rules) -> list[str]:
    """Those that a check needs. The check of the readers themselves needs none that no other one does."""
    on = [c for c in CHECKS if rules.checks.get(c.name) != "off"]
    needed = {reader for check in on if check.name != "readers" for reader in check.readers}
    return [name for name in READERS if name in needed or not needed]
