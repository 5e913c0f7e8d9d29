"""``rrl doctor``: what of rrl works here, what does not, and what to do about it."""

from __future__ import annotations

import sys

import msgspec

from rrl.cli.doctor.checks import judge
from rrl.cli.doctor.facts import Facts, Wanted
from rrl.cli.doctor.readers import read_facts
from rrl.cli.screen import print_json, show
from rrl.cli.views.doctor import doctor_view
from rrl.roles.host import Unread
from rrl.spec.words import Verdict

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
    from rrl.cli.doctor.visit import visit

    print("a job looks at a node ...", file=sys.stderr, flush=True)
    return msgspec.structs.replace(facts, node=visit(facts))


def _agreed() -> bool:
    try:
        return input(_QUESTION).strip().lower() in ("y", "yes")
    except EOFError:
        return False
