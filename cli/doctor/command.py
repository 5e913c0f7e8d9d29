"""``rrl doctor``: what of rrl works here, what does not, and what to do about it."""

from __future__ import annotations

import sys

import msgspec

from ...core.types import Verdict
from ...roles.node_probe.host import Unread
from ..common.output import print_json, show
from ..views.checks import doctor_view
from .collect import read_facts
from .facts import Check, Facts, Wanted
from .host_checks import host_checks, storage_checks
from .node_checks import node_checks
from .slurm_checks import slurm_checks


def judge(facts: Facts) -> list[Check]:
    """What was found, line by line. What could not be known is UNKNOWN, never OK."""
    return [*host_checks(facts), *storage_checks(facts), *slurm_checks(facts), *node_checks(facts)]


NOT_ALLOWED = "no job looked at a node: nobody consented"
_QUESTION = "Look at a compute node too, by a job of 10 s (1 CPU, 512 MiB, a GPU if one is free)? [y/N] "


def doctor(wanted: Wanted, *, consent: bool | None, json: bool) -> int:
    """``consent``: to the job on a node; None: ask if somebody is there. Exit code 1 where a check fails, else 0."""
    facts = found(wanted, consent=consent, ask=not json)
    checks = judge(facts)
    if json:
        print_json({"checks": checks, "facts": facts})
    else:
        show(doctor_view(checks))
    return int(any(check.verdict is Verdict.FAIL for check in checks))


def found(wanted: Wanted, *, consent: bool | None, ask: bool) -> Facts:
    """All facts, those of a node too where that is allowed."""
    facts = read_facts(wanted)
    if facts.slurm is None:
        return facts
    if consent is None and ask and sys.stdin.isatty() and sys.stdout.isatty():
        consent = _agreed()
    if not consent:
        return msgspec.structs.replace(facts, node=Unread(NOT_ALLOWED))
    from .node_visit import visit

    print("a job looks at a node ...", file=sys.stderr, flush=True)
    return msgspec.structs.replace(facts, node=visit(facts))


def _agreed() -> bool:
    try:
        return input(_QUESTION).strip().lower() in ("y", "yes")
    except EOFError:
        return False
