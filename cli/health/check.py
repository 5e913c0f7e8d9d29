"""``rrl health check``: judge whether this node is fit now.

A prolog and Slurm's HealthCheckProgram run it too. So it needs no run, no home directory and no shared file system, and
an error of the tool itself never looks like a failed node.

Exit codes as in Nagios: 0 OK, 1 WARN, 2 FAIL, 3 UNKNOWN or an error of the check itself. With ``--prolog``: 2 for FAIL,
else 0.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ...config.health_rules_file import RulesError, load_rules
from ...core.types import Finding, NodeName, UsageError, Verdict
from ...core.units import seconds
from ...health.checks.evaluate import CHECKS, unknown_checks
from ...health.node_check import EXIT_CODES, check_node, overall

_MAX_TIMEOUT_S = 3600.0
"""Maximum time limit (s) that a check may be given; a prolog has minutes."""
_MAX_REASON_LENGTH = 150
"""Maximum number of characters of a hook's text in a drain's reason."""


def check(
    *, json: bool, prolog: bool, time_limit: str, config: Path | None, only: str | None, mounts: Sequence[str],
    rates: bool,
) -> int:  # fmt: skip
    """Check this node; print one line with the verdict, then the findings, the most severe first.

    Returns the exit code. Raises UsageError.
    """
    rules, names = _rules(config), _names(only)
    try:
        limit = seconds(time_limit)
    except ValueError as error:
        raise UsageError(f"--within: {error}") from None
    if not 0 < limit <= _MAX_TIMEOUT_S:
        raise UsageError(f"--within: {time_limit} is not between 0 and {_MAX_TIMEOUT_S:g}s")
    node = _this_node()
    vacant = _job_gpus(os.environ.get("SLURM_JOB_GPUS", "")) if prolog else ()
    findings = check_node(rules, limit, node=node, mounts=mounts, expected_free=vacant, only=names, rates=rates)
    verdict = overall(findings)
    try:
        _print_result(node, verdict, findings, json)
    except OSError:  # stdout is closed or full: the flush at exit must not change the exit code, which suffices
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0 if prolog and verdict is not Verdict.FAIL else EXIT_CODES[verdict]


def drain_node(why: str, node: str | None, config: Path | None) -> int:
    """Drain a node that failed its check, as the hooks in examples/health do. Raises UsageError.

    Returns 0 if the node is drained, 1 if the site's limit on drains by hooks prevented it, 3 if Slurm did not answer
    or refused. The reason for 1 or 3 is printed.
    """
    from .node_drains import SlurmUnavailable, drain_by_hook

    try:
        held_back_reason = drain_by_hook(
            node or _this_node(), " ".join(why.split())[:_MAX_REASON_LENGTH], _rules(config).hooks
        )
    except SlurmUnavailable as error:
        print(f"not drained: {error}", flush=True)
        return EXIT_CODES[Verdict.UNKNOWN]
    if held_back_reason:
        print(f"held back: {held_back_reason}", flush=True)
    return 1 if held_back_reason else 0


def _this_node() -> NodeName:
    """Return the name by which Slurm knows this machine."""
    return NodeName(os.environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0])


def _print_result(node: NodeName, verdict: Verdict, findings: Sequence[Finding], json: bool) -> None:
    from ..common.output import print_json, show
    from ..views.checks import headline, health_check_view

    if sys.stdout is None:  # closed
        return
    if json:
        print_json(_result(node, verdict, findings))
    else:
        print(headline(verdict, findings), flush=True)
        show(health_check_view(findings))
    sys.stdout.flush()


def _rules(config: Path | None) -> Any:
    try:
        rules = load_rules(config)
    except RulesError as error:
        raise UsageError(str(error)) from None
    if wrong := unknown_checks(rules):
        raise UsageError(f"{config or 'health.toml'}: checks.{wrong[0]}: {_no_check(wrong[0])}")
    return rules


def _names(only: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in only.split(",") if name.strip()) if only is not None else ()
    if only is not None and not names:
        raise UsageError("--checks: name at least one check")
    known = {check.name for check in CHECKS}
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--checks: {wrong[0]}: {_no_check(wrong[0])}")
    return names


def _no_check(name: str) -> str:
    from difflib import get_close_matches

    known = [check.name for check in CHECKS]
    near = get_close_matches(name, known, 1)
    return f'no such check; did you mean "{near[0]}"?' if near else f"no such check; the checks are {', '.join(known)}"


def _job_gpus(text: str) -> tuple[str, ...]:
    """Return the GPU indices in a list such as ``0,2-3``, in which slurmd passes the job's GPUs to its prolog.

    The result is empty if the job has no GPUs, or if slurmd uses an unknown notation. The use of GPUs is then not
    checked, since other jobs may be using them.
    """
    found: list[str] = []
    for item in filter(None, text.split(",")):
        if match := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", item.strip()):
            found += map(str, range(int(match[1]), int(match[2] or match[1]) + 1))
        else:
            return ()
    return tuple(found)


class HealthCheckResult(Struct, frozen=True):
    """The output of ``rrl health check --json``. Times are s since 1970.

    A node's monotonic clock would mean nothing elsewhere.
    """

    node: NodeName
    verdict: Verdict
    code: int
    """Exit code of the command without ``--prolog``."""
    checked_at: float
    findings: list[Finding]


def _result(node: NodeName, verdict: Verdict, findings: Sequence[Finding]) -> HealthCheckResult:
    offset = time.time() - time.monotonic()
    dated = [_dated(finding, offset) for finding in findings]
    return HealthCheckResult(node, verdict, EXIT_CODES[verdict], time.time(), dated)


def _dated(finding: Finding, offset: float) -> Finding:
    evidence = tuple(msgspec.structs.replace(one, at=one.at + offset) for one in finding.evidence)
    return msgspec.structs.replace(finding, since=finding.since + offset, evidence=evidence)
