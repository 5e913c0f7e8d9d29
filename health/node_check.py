"""Check this node now and return its findings and their verdict, for ``rrl health check`` and for admission.

Usually one sample of each reader suffices. If a check finds a failure without proof, its readers are read again until
enough consecutive samples confirm the failure, or until a sample does not show the failure. If the time is too short,
the failure remains a WARN.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from msgspec import structs

from ..config.health_rules import Rules
from ..core.types import WORST_FIRST, Finding, NodeName, Verdict
from .checks.evaluate import CHECKS, NodeChecks, is_uninformative
from .checks.node_state import NodeState
from .readers.base import READERS, ReaderOptions
from .readers.isolation.client import read_all
from .readers.samples import Reading

RECHECK_INTERVAL_S = 1.0
"""Seconds between two samples that confirm or refute a failure without proof."""
RATE_INTERVAL_S = 2.0
"""Seconds between the two samples from which the increases of counters are computed."""
_REST_OF_HOST_S = 5.0
"""Seconds of a check's time that are reserved for starting the host reader's process and reading everything except
mounts. The rest of the time is for mounts that hang."""
EXIT_CODES = {Verdict.OK: 0, Verdict.WARN: 1, Verdict.FAIL: 2, Verdict.UNKNOWN: 3}
"""Exit codes of ``rrl health check``, by verdict."""

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
    state: NodeState | None = None,
) -> list[Finding]:
    """Return all findings about this node, including those with verdict OK or UNKNOWN.

    Blocks for at most about ``timeout_s``, plus some seconds to end readers that hang.

    Args:
        rules: Rules of the checks.
        timeout_s: Seconds that the check may take.
        node: Name of this node in the findings.
        mounts: Paths that must answer, in addition to those of ``rules`` and ``options``.
        expected_free: GPUs (UUIDs, indices, or ``every``) that no process may use, because a role is about to start.
        only: Names of the checks to run; if empty, all checks are run.
        rates: Whether to read the node twice, so that increases of counters are noticed.
        options: Options of the readers.
        read: Function that reads the readers once.
        state: State to which the samples are added; None for a new one.

    Raises:
        OSError: No process can be started for the readers.
    """
    rules = _narrowed(rules, only)
    paths = tuple(dict.fromkeys((*options.mounts, *rules.expect.mounts, *mounts)))
    options = structs.replace(
        options,
        mounts=paths,
        mount_timeout_s=mount_timeout_s(rules, timeout_s),
        dcgm_user=rules.readers.dcgm_user or options.dcgm_user,
    )
    wanted, deadline = _readers(rules), time.monotonic() + timeout_s
    state = NodeState(rules.xid.burst) if state is None else state
    state.set_expected_free(expected_free)
    checks = NodeChecks(node)

    def read_and_evaluate(readers: Sequence[str], within_s: float) -> list[Finding]:
        for reading in read(readers, within_s, options):
            state.add(reading)
        return checks.evaluate(state, rules, time.monotonic())

    findings = read_and_evaluate(wanted, timeout_s)
    again, pause = (set(wanted), RATE_INTERVAL_S) if rates else (checks.pending(), RECHECK_INTERVAL_S)
    while again and (left := deadline - time.monotonic() - pause) > 0:
        time.sleep(pause)
        findings = read_and_evaluate([name for name in wanted if name in again], left)
        again, pause = checks.pending(), RECHECK_INTERVAL_S
    return findings


def mount_timeout_s(rules: Rules, timeout_s: float) -> float:
    """Return the time (s) within which each path must answer in a check that may take ``timeout_s`` s.

    The time is ``rules.host.mount_hung``, which suffices to prove that a path hangs, or less if ``timeout_s`` is short.
    """
    return max(1.0, min(rules.host.mount_hung, timeout_s - _REST_OF_HOST_S))


def overall(findings: Collection[Finding]) -> Verdict:
    """Return the verdict on the node: the most severe of its findings.

    The verdict is UNKNOWN only if no finding is more severe, and a reader hung, failed, or could not read something
    that the rules expect. Readers that are not installed or not permitted do not affect the verdict.
    """
    found = {finding.verdict for finding in findings if not is_uninformative(finding)}
    return next((verdict for verdict in WORST_FIRST if verdict in found), Verdict.OK)


def _narrowed(rules: Rules, only: Collection[str]) -> Rules:
    if not only:
        return rules
    off = {check.name: "off" for check in CHECKS if check.name not in only}
    return structs.replace(rules, checks={**rules.checks, **off})


def _readers(rules: Rules) -> list[str]:
    """Return the readers that the checks need; all readers if no check is on.

    The check ``readers`` does not count: it only reports on the readers that other checks need.
    """
    on = [c for c in CHECKS if rules.checks.get(c.name) != "off"]
    needed = {reader for check in on if check.name != "readers" for reader in check.readers}
    return [name for name in READERS if name in needed or not needed]
